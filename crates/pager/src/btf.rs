//! Where the fields of the running kernel's structures are: BTF (`Documentation/bpf/btf.rst`).

use std::fs;
use std::io;

/// The kernel's own description of its types.
pub const PATH: &str = "/sys/kernel/btf/vmlinux";

const MAGIC: u16 = 0xEB9F;
/// Anonymous structures within each other, at most.
const DEPTH_MAX: u32 = 8;

const STRUCT: u32 = 4;
const UNION: u32 = 5;
const ENUM: u32 = 6;

/// What `find` finds in the running kernel's description.
///
/// # Errors
/// When there is no description, or the kernel has not all that is looked for.
pub fn of_kernel<T>(find: impl FnOnce(&Btf<'_>) -> Option<T>) -> io::Result<T> {
    let bytes = fs::read(PATH)?;
    Btf::parse(&bytes).as_ref().and_then(find).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// The types of a kernel.
pub struct Btf<'a> {
    strings: &'a [u8],
    /// Each with its header of three words and what follows; the first is number 1.
    types: Vec<&'a [u8]>,
}

impl<'a> Btf<'a> {
    /// Reads a description; none if it is not one, or of another byte order.
    pub fn parse(bytes: &'a [u8]) -> Option<Self> {
        if u16::from_le_bytes(*bytes.first_chunk()?) != MAGIC {
            return None;
        }
        let header = |at: usize| word(bytes, 4 + 4 * at).map(|word| word as usize);
        let section =
            |start: usize, length: usize| bytes.get(header(0)?..)?.get(header(start)?..)?.get(..header(length)?);
        let (mut rest, strings) = (section(1, 2)?, section(3, 4)?);
        let mut types = Vec::new();
        while !rest.is_empty() {
            let info = word(rest, 4)?;
            let length = 12 + following(info >> 24 & 31, (info & 0xFFFF) as usize)?;
            types.push(rest.get(..length)?);
            rest = &rest[length..];
        }
        Some(Self { strings, types })
    }

    /// How many bytes into the structure `of` its member `field` is, which may be in a structure without a name.
    pub fn offset(&self, of: &str, field: &str) -> Option<u64> {
        self.member(self.find(STRUCT, of)?, field, DEPTH_MAX)
    }

    /// How many bytes the structure `of` takes.
    pub fn size(&self, of: &str) -> Option<u64> {
        word(self.find(STRUCT, of)?, 8).map(u64::from)
    }

    /// What the constant `name` of the enumeration `of` is.
    pub fn constant(&self, of: &str, name: &str) -> Option<u32> {
        let constants = self.find(ENUM, of)?.get(12..)?;
        constants.chunks_exact(8).find(|one| self.is_named(one, name)).and_then(|one| word(one, 4))
    }

    /// The type of this kind and name that has members.
    fn find(&self, kind: u32, name: &str) -> Option<&[u8]> {
        let is_it = |one: &&&[u8]| {
            let info = word(one, 4).unwrap_or(0);
            info >> 24 & 31 == kind && info & 0xFFFF > 0 && self.is_named(one, name)
        };
        self.types.iter().find(is_it).copied()
    }

    fn member(&self, one: &[u8], field: &str, depth: u32) -> Option<u64> {
        let info = word(one, 4)?;
        let members = one.get(12..)?.chunks_exact(12).take((info & 0xFFFF) as usize);
        for member in members {
            let (bits, kind) = (word(member, 8)?, word(member, 4)?);
            // With the flag set, the upper byte is the width of a bit field.
            let bytes = u64::from(if info >> 31 == 1 { bits & 0xFF_FFFF } else { bits }) / 8;
            if self.is_named(member, field) {
                return Some(bytes);
            }
            let inner =
                self.types.get((kind as usize).wrapping_sub(1)).filter(|_| word(member, 0) == Some(0) && depth > 0);
            let inner = inner.filter(|inner| matches!(word(inner, 4).unwrap_or(0) >> 24 & 31, STRUCT | UNION));
            if let Some(inside) = inner.and_then(|inner| self.member(inner, field, depth - 1)) {
                return Some(bytes + inside);
            }
        }
        None
    }

    /// Whether the string that the first word names is this.
    fn is_named(&self, one: &[u8], name: &str) -> bool {
        let rest = word(one, 0).and_then(|at| self.strings.get(at as usize..));
        rest.and_then(|rest| rest.strip_prefix(name.as_bytes())).is_some_and(|rest| rest.first() == Some(&0))
    }
}

/// Bytes that follow the header of a type of this kind with so many members; none of a kind that is not known.
fn following(kind: u32, members: usize) -> Option<usize> {
    Some(match kind {
        2 | 7 | 8..=12 | 16 | 18 => 0,
        1 | 14 | 17 => 4,
        3 => 12,
        ENUM | 13 => 8 * members,
        STRUCT | UNION | 15 | 19 => 12 * members,
        _ => return None,
    })
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|word| u32::from_le_bytes(*word))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::skipped::skipped;

    #[test]
    fn the_kernels_own_description_can_be_read() {
        let Ok(bytes) = std::fs::read(PATH) else {
            skipped("this kernel does not describe itself (CONFIG_DEBUG_INFO_BTF)");
            return;
        };
        let btf = Btf::parse(&bytes).expect("the kernel's own");
        // `struct list_head`, and a member that is in a structure without a name.
        assert_eq!(btf.offset("list_head", "prev"), Some(8));
        assert_eq!([btf.size("list_head"), btf.size("no such structure")], [Some(16), None]);
        assert_eq!(btf.constant("pageflags", "PG_locked"), Some(0));
        assert_eq!(btf.constant("pageflags", "no such flag"), None);
        assert!(btf.offset("mm_struct", "pgd").is_some_and(|at| at > 0));
        assert_eq!(btf.offset("mm_struct", "no such member"), None);
        assert_eq!(btf.offset("no such structure", "pgd"), None);
        for length in (0..bytes.len()).step_by(bytes.len() / 50) {
            let _ = Btf::parse(&bytes[..length]).map(|btf| btf.offset("mm_struct", "pgd"));
        }
    }

    /// A structure of two members, of which one is in a structure without a name.
    #[test]
    fn members_of_members_without_a_name_are_found() {
        let good = include_bytes!("../../../fuzz/corpus/btf/good");
        let btf = Btf::parse(good).expect("it is well made");
        assert_eq!([btf.offset("s", "m"), btf.offset("s", "n"), btf.offset("s", "int")], [Some(0), Some(12), None]);
        let flagged = include_bytes!("../../../fuzz/corpus/btf/flagged");
        assert_eq!(Btf::parse(flagged).expect("it is well made").offset("s", "m"), Some(8));
        // One that is in itself ends.
        let within = include_bytes!("../../../fuzz/corpus/btf/within-itself");
        assert_eq!(Btf::parse(within).expect("it is well made").offset("s", "m"), None);
        assert!(Btf::parse(&good[..good.len() - 1]).is_none());
    }
}

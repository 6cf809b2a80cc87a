//! Which mappings of a process are managed, of those that can be.

use spillway_core::PAGE_BYTES_U64;

use crate::LOCAL_FLOOR_BYTES;
use crate::procfs::Mapping;

/// See the module's documentation. All, unless something else is said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Choice {
    /// Only those of at least so many bytes: the memory of a guest, and not what its monitor itself works with.
    pub least_mapping_bytes: u64,
}

impl Choice {
    /// Whether a mapping is to be managed.
    pub fn takes(self, mapping: &Mapping) -> bool {
        mapping.is_manageable() && mapping.span.pages() >= self.least_mapping_bytes.div_ceil(PAGE_BYTES_U64)
    }

    /// The smallest budget. A whole process needs several pages for one instruction, and its faults would wait for each other's
    /// evictions. What only guests of a software emulation touch may shrink to one page, because that touches one of them at
    /// a time.
    #[must_use]
    pub fn floor_bytes(self) -> u64 {
        if self.least_mapping_bytes == 0 { LOCAL_FLOOR_BYTES } else { PAGE_BYTES_U64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_mappings_that_are_large_enough_are_taken() {
        let mapping = |line| Mapping::parse(line).expect("a good line");
        let small = mapping("7f0000000000-7f00001ff000 rw-p 00000000 00:00 0 ");
        let large = mapping("7f0000000000-7f0000200000 rw-p 00000000 00:00 0 ");
        let code = mapping("7f0000000000-7f0000200000 rwxp 00000000 00:00 0 ");
        let (all, some) = (Choice::default(), Choice { least_mapping_bytes: 2 << 20 });
        assert_eq!([&small, &large, &code].map(|each| all.takes(each)), [true, true, false]);
        assert_eq!([&small, &large, &code].map(|each| some.takes(each)), [false, true, false]);
        assert_eq!((all.floor_bytes(), some.floor_bytes()), (LOCAL_FLOOR_BYTES, 4096));
    }
}

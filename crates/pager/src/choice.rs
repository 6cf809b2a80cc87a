//! Which mappings of a process are managed, of those that can be.

use spillway_core::PAGE_BYTES_U64;

use crate::LOCAL_FLOOR_BYTES;
use crate::procfs::Mapping;

/// See the module's documentation. All, unless something else is said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Choice {
    /// Only those of at least so many bytes: the memory of a guest, and not what its monitor itself works with.
    pub least_mapping_bytes: u64,
    /// Also memory that several processes share ([`Mapping::is_common`]).
    pub shared_memory: bool,
    /// Nothing but what is handed over, and who else has that.
    pub handed_alone: bool,
}

impl Choice {
    /// Whether a mapping is to be managed.
    pub fn takes(self, mapping: &Mapping) -> bool {
        !self.handed_alone && mapping.is_manageable() && self.is_large_enough(mapping)
    }

    /// Whether a mapping of shared memory is.
    pub fn takes_shared(self, mapping: &Mapping) -> bool {
        self.shared_memory && mapping.is_common() && self.is_large_enough(mapping)
    }

    fn is_large_enough(self, mapping: &Mapping) -> bool {
        mapping.span.pages() >= self.least_mapping_bytes.div_ceil(PAGE_BYTES_U64)
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
        let (all, some) = (Choice::default(), Choice { least_mapping_bytes: 2 << 20, ..Choice::default() });
        assert_eq!([&small, &large, &code].map(|each| all.takes(each)), [true, true, false]);
        assert_eq!([&small, &large, &code].map(|each| some.takes(each)), [false, true, false]);
        assert!(!Choice { handed_alone: true, ..all }.takes(&large));
        assert_eq!((all.floor_bytes(), some.floor_bytes()), (LOCAL_FLOOR_BYTES, 4096));
    }

    #[test]
    fn shared_memory_is_taken_where_that_is_wanted() {
        let mapping = |line| Mapping::parse(line).expect("a good line");
        let anonymous = mapping("7f0000000000-7f0000200000 rw-s 00000000 00:01 1034 /dev/zero (deleted)");
        let memfd = mapping("7f0000000000-7f00001ff000 r--s 00001000 00:01 1035 /memfd:guest ram (deleted)");
        let (none, all) = (Choice::default(), Choice { shared_memory: true, ..Choice::default() });
        let some = Choice { least_mapping_bytes: 2 << 20, ..all };
        assert_eq!([&anonymous, &memfd].map(|each| none.takes_shared(each)), [false, false]);
        assert_eq!([&anonymous, &memfd].map(|each| all.takes_shared(each)), [true, true]);
        assert_eq!([&anonymous, &memfd].map(|each| some.takes_shared(each)), [true, false]);
        for line in [
            "7f0000000000-7f0000200000 rw-p 00000000 00:01 1034 /dev/zero (deleted)",
            "7f0000000000-7f0000200000 rw-s 00000000 00:01 1034 /dev/shm/ring",
            "7f0000000000-7f0000200000 rw-s 00000000 00:01 1034 /SYSV00000000 (deleted)",
            "7f0000000000-7f0000200000 rwxs 00000000 00:01 1034 /memfd:code (deleted)",
            "7f0000000000-7f0000200000 rw-s 00000000 00:01 1034 /memfd:spillway-agent (deleted)",
            "7f0000000000-7f0000200000 rw-s 00000000 00:01 1034 /memfd:spillway-vault (deleted)",
        ] {
            assert!(!all.takes_shared(&mapping(line)) && !all.takes(&mapping(line)), "{line}");
        }
    }
}

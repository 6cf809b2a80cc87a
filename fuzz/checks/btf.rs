//! A description of a kernel's types is read or refused, and what it says of a member lies inside what can be addressed.

use spillway_pager::btf::Btf;

/// Holds one input to it.
pub fn check(bytes: &[u8]) {
    let Some(btf) = Btf::parse(bytes) else { return };
    assert_eq!(btf.offset("", "a name that nothing has"), None);
    for (of, field) in [("s", "m"), ("s", "n"), ("mm_struct", "pgd")] {
        // Offsets are of three bytes of bits, or four, in so many structures within each other.
        assert!(btf.offset(of, field).is_none_or(|at| at < 9 << 29));
    }
}

//! Whatever stands in etcd is a server's entry or is passed over.

use spillway_cluster::parse_member;

/// Holds one input to it.
pub fn check(entry: &[u8]) {
    if let Some(member) = parse_member(entry) {
        let is_plain = |text: &str| !text.is_empty() && !text.contains(char::is_whitespace);
        assert!(is_plain(&member.address) && is_plain(&member.domain) && entry.len() <= 4096);
    }
}

//! What a server says of itself in etcd.

use serde::{Deserialize, Serialize};

/// The form of the entries that this version writes and reads.
const VERSION: u32 = 1;
/// Longer entries are none of ours.
const ENTRY_BYTES_MAX: usize = 4096;

/// One server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// Where clients reach it: `HOST:PORT`.
    pub address: String,
    /// What fails together: servers of one host, or of one rack, name the same.
    pub domain: String,
    /// Bytes that it lends.
    pub capacity_bytes: u64,
    /// The share of its time that it was busy when it last said so, in percent; servers of an older version do not say.
    #[serde(default)]
    pub load_percent: u8,
}

#[derive(Serialize, Deserialize)]
struct Entry {
    version: u32,
    #[serde(flatten)]
    member: Member,
}

impl Member {
    /// As it is kept in etcd.
    pub(crate) fn to_entry(&self) -> String {
        let entry = Entry { version: VERSION, member: self.clone() };
        serde_json::to_string(&entry).expect("strings and numbers are JSON")
    }
}

/// Reads an entry; `None` for what is none of this version.
#[must_use]
pub fn parse_member(entry: &[u8]) -> Option<Member> {
    if entry.len() > ENTRY_BYTES_MAX {
        return None;
    }
    let Entry { version, member } = serde_json::from_slice(entry).ok()?;
    let is_plain = |text: &str| !text.is_empty() && !text.contains(|c: char| c.is_control() || c.is_whitespace());
    (version == VERSION && is_plain(&member.address) && is_plain(&member.domain)).then_some(member)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_read_as_they_were_written_and_others_are_not() {
        let member = Member {
            address: "10.0.0.1:7070".into(),
            domain: "rack1".into(),
            capacity_bytes: 1 << 30,
            load_percent: 7,
        };
        let entry = member.to_entry();
        let older = entry.replace(",\"load_percent\":7", "");
        assert_eq!(parse_member(older.as_bytes()), Some(Member { load_percent: 0, ..member.clone() }));
        assert_eq!(parse_member(entry.as_bytes()), Some(member));
        for other in [
            entry.replace("\"version\":1", "\"version\":2"),
            entry.replace("10.0.0.1", "10.0.0.1 x"),
            entry.replace("rack1", ""),
            entry.replace("rack1", &"x".repeat(5000)),
            "{}".into(),
            String::new(),
        ] {
            assert_eq!(parse_member(other.as_bytes()), None, "{other}");
        }
    }
}

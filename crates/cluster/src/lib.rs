//! Which memory servers there are: each says so in etcd, under a lease, and pagers look there.
//!
//! A server that vanishes is gone from the list when its lease ends. Whoever has the list needs etcd no longer: pages go
//! between pagers and servers, and while etcd is away only changes of the list wait. The keys are described in docs/NETWORK.md.
#![forbid(unsafe_code)]

mod error;
mod etcd;
mod host;
mod member;
mod registration;

use std::fmt;

pub use error::{Error, ParseError};
pub use host::Host;
pub use member::{Member, parse_member};
pub use registration::Registration;

use etcd::Etcd;

/// Where etcd listens unless told otherwise.
const PORT: u16 = 2379;
/// Longer names are a mistake.
const NAME_BYTES_MAX: usize = 100;

/// A cluster, as its URL names it: `etcd://host[:port],.../name`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cluster {
    /// Of etcd.
    endpoints: Vec<Host>,
    name: String,
}

impl Cluster {
    /// Reads what follows `etcd:`, without parameters.
    ///
    /// # Errors
    /// What is wrong, and how it is written.
    pub fn parse(text: &str) -> Result<Self, ParseError> {
        let place = text.strip_prefix("//").ok_or(ParseError::NoHost)?;
        let (hosts, name) = place.split_once('/').ok_or(ParseError::NoName)?;
        let name = name.strip_suffix('/').unwrap_or(name);
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        if name.is_empty() {
            return Err(ParseError::NoName);
        }
        if name.len() > NAME_BYTES_MAX || !name.bytes().all(plain) {
            return Err(ParseError::BadName(name.into()));
        }
        let endpoint = |text: &str| Host::parse(text, PORT).ok_or_else(|| ParseError::BadHost(text.into()));
        let endpoints = hosts.split(',').map(endpoint).collect::<Result<_, _>>()?;
        Ok(Self { endpoints, name: name.into() })
    }

    /// The servers that have joined, by address.
    ///
    /// # Errors
    /// When no endpoint answers. Entries that are none are passed over: another version may have put them there.
    pub fn members(&self) -> Result<Vec<Member>, Error> {
        self.directory().members()
    }

    /// For whoever asks for its servers again and again.
    #[must_use]
    pub fn directory(&self) -> Directory {
        Directory { etcd: self.etcd(), prefix: self.prefix() }
    }

    /// Whether another URL names the same servers: the name is the same, and etcd at one place at least.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        self.name == other.name && self.endpoints.iter().any(|endpoint| other.endpoints.contains(endpoint))
    }

    fn etcd(&self) -> Etcd {
        Etcd::new(&self.endpoints)
    }

    /// What the keys of all servers start with.
    fn prefix(&self) -> String {
        format!("/spillway/{}/servers/", self.name)
    }
}

/// A cluster's servers; keeps the connection over which it was asked.
pub struct Directory {
    etcd: Etcd,
    prefix: String,
}

impl Directory {
    /// As [`Cluster::members`].
    ///
    /// # Errors
    /// As there.
    pub fn members(&self) -> Result<Vec<Member>, Error> {
        let mut members: Vec<Member> =
            self.etcd.list(&self.prefix)?.iter().filter_map(|value| parse_member(value)).collect();
        members.sort_by(|one, other| one.address.cmp(&other.address));
        members.dedup_by(|one, other| one.address == other.address);
        Ok(members)
    }
}

impl fmt::Display for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let endpoints: Vec<String> = self.endpoints.iter().map(Host::to_string).collect();
        write!(f, "etcd://{}/{}", endpoints.join(","), self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cluster_is_the_same_by_any_of_its_endpoints() {
        let cluster = |text| Cluster::parse(text).unwrap();
        for (one, other, same) in [
            ("//a/pool", "//a:2379/pool/", true),
            ("//a,b/pool", "//b,c/pool", true),
            ("//a/pool", "//b/pool", false),
            ("//a/pool", "//a/loop", false),
        ] {
            assert_eq!(cluster(one).is_same(&cluster(other)), same, "{one} {other}");
        }
    }

    #[test]
    fn urls_are_read_as_they_are_written() {
        for (text, is) in
            [("//a/pool", "etcd://a:2379/pool"), ("//a:1,b,[::1]:3/my.pool-2/", "etcd://a:1,b:2379,[::1]:3/my.pool-2")]
        {
            assert_eq!(Cluster::parse(text).unwrap().to_string(), is);
        }
        for (text, error) in [
            ("a/pool", ParseError::NoHost),
            ("//a", ParseError::NoName),
            ("//a/", ParseError::NoName),
            ("//a/b/c", ParseError::BadName("b/c".into())),
            ("//a/b c", ParseError::BadName("b c".into())),
            ("///pool", ParseError::BadHost(String::new())),
            ("//a:0/p", ParseError::BadHost("a:0".into())),
            ("//a:b/p", ParseError::BadHost("a:b".into())),
            ("//a b/p", ParseError::BadHost("a b".into())),
            ("//[::1/p", ParseError::BadHost("[::1".into())),
        ] {
            assert_eq!(Cluster::parse(text), Err(error), "{text}");
        }
    }
}

//! Who is in a pool whose servers are found in etcd, and what a look there changes. No thread, no socket.
//!
//! A server keeps its number for as long as the pool is open, because pages' handles name it: one that comes back at its old
//! address has its old number, and the numbers of those that stay away are not given again.

use std::collections::BTreeMap;

use spillway_cluster::{Host, Member};

use super::hosts::HOSTS_MAX;

/// Looks that must miss a server before nothing new goes there. An etcd that has come back without its data learns of all
/// servers again within two seconds, and a look is made each second.
const MISSED_MAX: u8 = 3;

/// One server, by its number.
struct Entry {
    address: String,
    domain: Option<String>,
    /// The number of the domain that was told last: the first server's that is in it.
    told: u8,
    listed: bool,
    missed: u8,
}

/// See the module's documentation.
pub(super) struct Roll(Vec<Entry>);

/// What is different about a server that the pool has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Difference {
    /// Whether pages may be put there.
    Listed(u8, bool),
    /// Which domain it is in.
    Domain(u8, u8),
}

impl Roll {
    /// The servers that a pool begins with, by number, each a domain of its own as long as nothing else is known.
    pub(super) fn new(addresses: impl IntoIterator<Item = String>) -> Self {
        let mut roll = Self(Vec::new());
        for address in addresses {
            roll.add(address, None);
        }
        roll
    }

    /// Servers that the pool does not have yet, with their domains: as many as it may still get. And how many there are beyond.
    pub(super) fn strangers(&self, members: &[Member]) -> (Vec<(Host, String)>, usize) {
        let is_known = |host: &Host| self.0.iter().any(|entry| entry.address == host.to_string());
        let hosts = members.iter().filter_map(|member| Some((host(member)?, member.domain.clone())));
        let mut strangers: Vec<_> = hosts.filter(|(host, _)| !is_known(host)).collect();
        let room = HOSTS_MAX - self.0.len();
        let beyond = strangers.len().saturating_sub(room);
        strangers.truncate(room);
        (strangers, beyond)
    }

    /// One more server; the number of its domain.
    pub(super) fn add(&mut self, address: String, domain: Option<String>) -> u8 {
        let at = self.0.len();
        self.0.push(Entry { address, domain, told: number(at), listed: true, missed: 0 });
        self.0[at].told = self.domain_of(at);
        self.0[at].told
    }

    /// What a look has found out about the servers that the pool has.
    pub(super) fn heed(&mut self, members: &[Member]) -> Vec<Difference> {
        let hosts = members.iter().filter_map(|member| Some((host(member)?.to_string(), member)));
        let listed: BTreeMap<String, &Member> = hosts.collect();
        // Rather has etcd lost its data than a pool all its servers, and connections tell whether those are there.
        if !self.0.iter().any(|entry| listed.contains_key(&entry.address)) {
            return Vec::new();
        }
        let mut differences = Vec::new();
        for (at, entry) in self.0.iter_mut().enumerate() {
            match listed.get(&entry.address) {
                Some(member) => {
                    entry.missed = 0;
                    entry.domain = Some(member.domain.clone());
                }
                None => entry.missed = entry.missed.saturating_add(1),
            }
            let is_listed = entry.missed == 0 || entry.listed && entry.missed < MISSED_MAX;
            if std::mem::replace(&mut entry.listed, is_listed) != is_listed {
                differences.push(Difference::Listed(number(at), is_listed));
            }
        }
        for at in 0..self.0.len() {
            let domain = self.domain_of(at);
            if std::mem::replace(&mut self.0[at].told, domain) != domain {
                differences.push(Difference::Domain(number(at), domain));
            }
        }
        differences
    }

    fn domain_of(&self, at: usize) -> u8 {
        let domain = &self.0[at].domain;
        let first = self.0.iter().position(|entry| domain.is_some() && entry.domain == *domain);
        number(first.unwrap_or(at))
    }
}

/// Where a member is, if that makes sense.
pub(super) fn host(member: &Member) -> Option<Host> {
    Host::parse(&member.address, 0).filter(|host| host.port != 0)
}

fn number(at: usize) -> u8 {
    u8::try_from(at).expect("a pool has at most 255 servers")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(address: &str, domain: &str) -> Member {
        Member { address: address.into(), domain: domain.into(), capacity_bytes: 1, load_percent: 0 }
    }

    fn roll(addresses: &[&str]) -> Roll {
        Roll::new(addresses.iter().map(ToString::to_string))
    }

    #[test]
    fn domains_are_numbered_by_their_first_server() {
        let mut roll = roll(&["a:1", "b:1", "c:1"]);
        let members = [member("a:1", "x"), member("b:1", "y"), member("c:1", "x")];
        assert_eq!(roll.heed(&members), [Difference::Domain(2, 0)]);
        assert_eq!(roll.add("d:1".into(), Some("y".into())), 1);
        assert_eq!(roll.add("e:1".into(), Some("z".into())), 4);
        let moved = [member("a:1", "y"), member("b:1", "y"), member("c:1", "x")];
        assert_eq!(
            roll.heed(&moved),
            [Difference::Domain(1, 0), Difference::Domain(2, 2), Difference::Domain(3, 0)],
            "a server came back elsewhere"
        );
    }

    #[test]
    fn a_server_that_several_looks_miss_gets_nothing_new_until_it_is_back() {
        let mut roll = roll(&["a:1", "b:1"]);
        let (both, one) = ([member("a:1", "x"), member("b:1", "y")], [member("a:1", "x")]);
        assert_eq!(roll.heed(&both), []);
        for look in 1..=5 {
            let differences = roll.heed(&one);
            let expected = if look == MISSED_MAX { vec![Difference::Listed(1, false)] } else { Vec::new() };
            assert_eq!(differences, expected, "look {look}");
        }
        assert_eq!(roll.heed(&both), [Difference::Listed(1, true)]);
        // One that is missed now and then is not missed.
        for _ in 0..4 {
            assert_eq!((roll.heed(&one), roll.heed(&one), roll.heed(&both)), (vec![], vec![], vec![]));
        }
    }

    #[test]
    fn an_etcd_that_knows_none_of_them_changes_nothing() {
        let mut roll = roll(&["a:1", "b:1"]);
        for _ in 0..10 {
            assert_eq!(roll.heed(&[]), []);
            assert_eq!(roll.heed(&[member("c:1", "x")]), []);
        }
    }

    #[test]
    fn strangers_are_named_as_far_as_there_is_room() {
        let mut roll = roll(&["a:1", "[::1]:2"]);
        let members = [member("a:1", "x"), member("[::1]:2", "x"), member("nowhere", "x"), member("b:1", "y")];
        let (strangers, beyond) = roll.strangers(&members);
        assert_eq!((strangers, beyond), (vec![(Host { name: "b".into(), port: 1 }, "y".to_string())], 0));
        for at in 2..HOSTS_MAX - 1 {
            roll.add(format!("h{at}:1"), None);
        }
        let members = [member("b:1", "y"), member("c:1", "y"), member("d:1", "y")];
        let (strangers, beyond) = roll.strangers(&members);
        assert_eq!((strangers.len(), beyond), (1, 2));
        roll.add(strangers[0].0.to_string(), None);
        assert_eq!(roll.strangers(&members).0, []);
    }
}

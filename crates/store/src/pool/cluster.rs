//! Pools whose servers are found in etcd.

use spillway_cluster::{Cluster, Member};

use super::hosts::HOSTS_MAX;
use super::membership::Membership;
use super::roll;
use super::{OpenError, OpenErrorKind, Tcp, Url};
use crate::remote::news::News;
use crate::stripe::spread;
use crate::tcp;

/// Servers that have joined a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Etcd {
    /// Where they are found.
    pub cluster: Cluster,
    /// How they are spoken to; names none of them.
    pub tcp: Tcp,
}

/// The servers that a cluster has now.
pub(super) struct Found {
    cluster: Cluster,
    /// How they are spoken to; names all of them.
    pub(super) tcp: Tcp,
    /// In the same order.
    pub(super) members: Vec<Member>,
}

impl Etcd {
    /// Asks etcd, which takes seconds at most.
    pub(super) fn find(self) -> Result<Found, OpenError> {
        let Self { cluster, tcp } = self;
        let fail = |kind, text: String| OpenError { server: cluster.to_string(), kind, text };
        let mut members = cluster.members().map_err(|error| fail(OpenErrorKind::Unreachable, error.to_string()))?;
        // What names no server is none, whoever wrote it there.
        members.retain(|member| roll::host(member).is_some());
        if members.is_empty() {
            let text = format!("no server has joined: start some with `spillway serve --join {cluster}`");
            return Err(fail(OpenErrorKind::Unreachable, text));
        }
        members.truncate(HOSTS_MAX);
        let hosts = members.iter().filter_map(roll::host).collect();
        let tcp = Tcp { hosts, ..tcp }.with_enough_hosts();
        let tcp = tcp.map_err(|error| fail(OpenErrorKind::Unsuitable, error.to_string()))?;
        Ok(Found { cluster, tcp, members })
    }
}

impl Found {
    /// What keeps a pool of these servers informed, and what it is to listen to.
    pub(super) fn follow(&self) -> Result<(Membership, News<tcp::Tcp>), OpenError> {
        let addresses = self.tcp.hosts.iter().map(ToString::to_string);
        Membership::new(&self.cluster, &self.tcp, addresses, &self.members)
    }

    /// What a pool of these servers does not survive though it looks as if it did, in a line.
    pub(super) fn warning(&self) -> Option<String> {
        let domains: Vec<&str> = self.members.iter().map(|member| &member.domain[..]).collect();
        self.tcp.stripes.and_then(|shape| spread::warning(shape, &domains))
    }
}

impl Url {
    /// The same pool with the servers that its cluster has now. Asks etcd, which takes seconds at most.
    pub(super) fn with_servers(self) -> Result<Self, OpenError> {
        let Self::Etcd(etcd) = self else { return Ok(self) };
        Ok(Self::Tcp(etcd.find()?.tcp))
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::time::Duration;

    use super::*;

    /// As `http://10.0.0.7:7070` and `10.0.0.8:7070` would have joined, in the rack `rack`.
    const ENTRIES: [&str; 2] = [
        "eyJ2ZXJzaW9uIjogMSwgImFkZHJlc3MiOiAiaHR0cDovLzEwLjAuMC43OjcwNzAiLCAiZG9tYWluIjogInJhY2siLCAiY2FwYWNpdHlfYnl0ZXMi\
         OiAxfQ==",
        "eyJ2ZXJzaW9uIjogMSwgImFkZHJlc3MiOiAiMTAuMC4wLjg6NzA3MCIsICJkb21haW4iOiAicmFjayIsICJjYXBhY2l0eV9ieXRlcyI6IDF9",
    ];

    /// What is found in an etcd that answers once, with these values.
    fn found(values: &[&str]) -> Result<Found, OpenError> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("etcd://{}/pool", listener.local_addr().unwrap());
        let values: Vec<String> = values.iter().map(|value| format!(r#"{{"value":"{value}"}}"#)).collect();
        let body = format!(r#"{{"kvs":[{}]}}"#, values.join(","));
        std::thread::spawn(move || {
            let (mut client, _) = listener.accept().unwrap();
            client.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
            // What is asked is one object.
            let (mut ask, mut part) = (Vec::new(), [0; 1024]);
            while !ask.ends_with(b"}") {
                let bytes = client.read(&mut part).unwrap();
                ask.extend_from_slice(&part[..bytes]);
            }
            let head = format!("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {}\r\n\r\n", body.len());
            client.write_all((head + &body).as_bytes()).unwrap();
        });
        let Ok(Url::Etcd(etcd)) = Url::parse(&url) else { panic!("{url} is one") };
        etcd.find()
    }

    #[test]
    fn an_entry_that_names_no_server_is_passed_over() {
        let found = found(&ENTRIES).map_err(|error| error.to_string()).unwrap();
        assert_eq!(found.tcp.hosts.iter().map(ToString::to_string).collect::<Vec<_>>(), ["10.0.0.8:7070"]);
        assert_eq!(found.members.iter().map(|member| &member.address[..]).collect::<Vec<_>>(), ["10.0.0.8:7070"]);
    }

    #[test]
    fn a_cluster_of_nothing_else_has_no_server() {
        let error = found(&ENTRIES[..1]).err().expect("it has none").to_string();
        assert!(error.contains("no server has joined"), "{error}");
    }
}

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

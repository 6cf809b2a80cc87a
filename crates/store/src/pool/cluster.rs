//! Pools whose servers are found in etcd.

use spillway_cluster::Cluster;

use super::{OpenError, OpenErrorKind, Tcp, Url, hosts};

/// Servers that have joined a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Etcd {
    /// Where they are found.
    pub cluster: Cluster,
    /// How they are spoken to; names none of them.
    pub tcp: Tcp,
}

impl Url {
    /// The same pool with the servers that its cluster has now. Asks etcd, which takes seconds at most.
    pub(super) fn with_servers(self) -> Result<Self, OpenError> {
        let Self::Etcd(Etcd { cluster, tcp }) = self else { return Ok(self) };
        let fail = |kind, text: String| OpenError { server: cluster.to_string(), kind, text };
        let members = cluster.members().map_err(|error| fail(OpenErrorKind::Unreachable, error.to_string()))?;
        if members.is_empty() {
            let text = format!("no server has joined: start some with `spillway serve --join {cluster}`");
            return Err(fail(OpenErrorKind::Unreachable, text));
        }
        let addresses: Vec<String> = members.into_iter().map(|member| member.address).collect();
        let hosts = hosts::parse("etcd", &addresses.join(","), 0)
            .map_err(|error| fail(OpenErrorKind::Protocol, format!("an entry there names no server: {error}")))?;
        let tcp = Tcp { hosts, ..tcp }.with_enough_hosts();
        Ok(Self::Tcp(tcp.map_err(|error| fail(OpenErrorKind::Unsuitable, error.to_string()))?))
    }
}

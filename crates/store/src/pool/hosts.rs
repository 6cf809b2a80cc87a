//! The servers that a pool's URL names.

use std::net::{SocketAddr, ToSocketAddrs};

use spillway_cluster::Host;

use super::{OpenError, UrlError};
use crate::remote::news::SERVERS_MAX;

/// The most servers that a pool has: a page's place takes a byte.
pub(super) const HOSTS_MAX: usize = SERVERS_MAX;

/// Looks the name up, which may take seconds.
pub(super) fn resolve(host: &Host) -> Result<Vec<SocketAddr>, OpenError> {
    let addresses: Vec<SocketAddr> =
        (&host.name[..], host.port).to_socket_addrs().map_err(|_| OpenError::no_such_name(host))?.collect();
    if addresses.is_empty() { Err(OpenError::no_such_name(host)) } else { Ok(addresses) }
}

/// Reads `host[:port],...`.
pub(super) fn parse(scheme: &'static str, text: &str, port: u16) -> Result<Vec<Host>, UrlError> {
    let text = text.strip_suffix('/').unwrap_or(text);
    if text.is_empty() {
        return Err(UrlError::NoHost { scheme });
    }
    let host = |text: &str| Host::parse(text, port).ok_or_else(|| UrlError::BadHost(text.into()));
    let hosts: Vec<Host> = text.split(',').map(host).collect::<Result<_, _>>()?;
    if hosts.len() > HOSTS_MAX {
        return Err(UrlError::TooManyHosts(hosts.len()));
    }
    // Copies and parity would count one server as two.
    if let Some(twice) = hosts.iter().enumerate().find_map(|(at, host)| hosts[..at].contains(host).then_some(host)) {
        return Err(UrlError::SameHost(twice.to_string()));
    }
    Ok(hosts)
}

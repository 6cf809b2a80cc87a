//! The servers that a pool's URL names.

use std::net::{SocketAddr, ToSocketAddrs};

use spillway_cluster::Host;

use super::{OpenError, OpenErrorKind, UrlError};
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

/// Whether no server is there under two names, by its addresses: copies and parity would count it as two, and lose both at once.
pub(super) fn are_distinct(places: &[(&str, &[SocketAddr])]) -> Result<(), OpenError> {
    for (at, (name, addresses)) in places.iter().enumerate() {
        for (other, others) in &places[..at] {
            if let Some(address) = addresses.iter().find(|address| others.contains(address)) {
                let text = format!("this is the same server as {other}, {address}: name each server once");
                return Err(OpenError { server: (*name).into(), kind: OpenErrorKind::Url, text });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_server_under_two_names_is_found_by_its_address() {
        let (a, b, c) = ("10.0.0.1:7070", "10.0.0.2:7070", "10.0.0.1:7071");
        let places = |names: &[&'static str]| -> Vec<SocketAddr> {
            names.iter().map(|name| name.parse().expect("an address")).collect()
        };
        let (one, other, port) = (places(&[a]), places(&[b, a]), places(&[c]));
        assert!(are_distinct(&[("one", &one), ("port", &port)]).is_ok());
        let error = are_distinct(&[("port", &port), ("one", &one), ("other", &other)]).expect_err("`one` and `other`");
        assert_eq!(error.server, "other");
        assert!(error.text.contains("the same server as one, 10.0.0.1:7070"), "{}", error.text);
    }
}

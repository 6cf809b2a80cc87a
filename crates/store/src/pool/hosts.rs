//! The servers that a pool's URL names.

use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};

use super::{OpenError, OpenErrorKind, UrlError};

/// The most servers that a pool has: a page's place takes a byte.
const HOSTS_MAX: usize = 255;

/// A server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// A name or an address; one of version 6 without brackets.
    pub name: String,
    /// As given, or the scheme's.
    pub port: u16,
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.name.contains(':') {
            write!(f, "[{}]:{}", self.name, self.port)
        } else {
            write!(f, "{}:{}", self.name, self.port)
        }
    }
}

impl Host {
    /// Looks the name up, which may take seconds.
    pub(super) fn resolve(&self) -> Result<Vec<SocketAddr>, OpenError> {
        let unknown = || OpenError {
            server: self.to_string(),
            kind: OpenErrorKind::Unreachable,
            text: "its name is unknown: correct it, or give an address".into(),
        };
        let addresses: Vec<SocketAddr> =
            (&self.name[..], self.port).to_socket_addrs().map_err(|_| unknown())?.collect();
        if addresses.is_empty() { Err(unknown()) } else { Ok(addresses) }
    }
}

/// Reads `host[:port],...`.
pub(super) fn parse(scheme: &'static str, text: &str, port: u16) -> Result<Vec<Host>, UrlError> {
    let text = text.strip_suffix('/').unwrap_or(text);
    if text.is_empty() {
        return Err(UrlError::NoHost { scheme });
    }
    let hosts: Vec<Host> = text.split(',').map(|host| parse_host(host, port)).collect::<Result<_, _>>()?;
    if hosts.len() > HOSTS_MAX { Err(UrlError::TooManyHosts(hosts.len())) } else { Ok(hosts) }
}

fn parse_host(text: &str, default_port: u16) -> Result<Host, UrlError> {
    let bad = || UrlError::BadHost(text.into());
    let (name, rest) = match text.strip_prefix('[') {
        Some(inner) => inner.split_once(']').ok_or_else(bad)?,
        None => text.split_at(text.find(':').unwrap_or(text.len())),
    };
    let port = match rest.strip_prefix(':') {
        Some(port) => port.parse().ok().filter(|port| *port != 0).ok_or_else(bad)?,
        None if rest.is_empty() => default_port,
        None => return Err(bad()),
    };
    let bracketed = text.starts_with('[');
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte) || bracketed && b":%".contains(&byte);
    if name.is_empty() || !name.bytes().all(plain) {
        return Err(bad());
    }
    Ok(Host { name: name.into(), port })
}

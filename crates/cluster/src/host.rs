//! A server as URLs name it.

use std::fmt;

/// A server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// A name or an address; one of version 6 without brackets.
    pub name: String,
    /// As given, or the scheme's.
    pub port: u16,
}

impl Host {
    /// Reads `host[:port]`, with brackets around an address of version 6; none if it is written in another way.
    pub fn parse(text: &str, default_port: u16) -> Option<Self> {
        let (name, rest) = match text.strip_prefix('[') {
            Some(inner) => inner.split_once(']')?,
            None => text.split_at(text.find(':').unwrap_or(text.len())),
        };
        let port = match rest.strip_prefix(':') {
            Some(port) => port.parse().ok().filter(|port| *port != 0)?,
            None if rest.is_empty() => default_port,
            None => return None,
        };
        let bracketed = text.starts_with('[');
        let plain =
            |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte) || bracketed && b":%".contains(&byte);
        (!name.is_empty() && name.bytes().all(plain)).then(|| Self { name: name.into(), port })
    }
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

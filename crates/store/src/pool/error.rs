//! Why a pool cannot be used, in one line with a remedy.

use std::fmt;

use spillway_cluster::ParseError;
use spillway_core::size::SizeError;

use crate::stripe::Shape;

/// Why a text names no pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UrlError {
    /// There is no colon.
    NoScheme(String),
    /// The scheme is none of those known.
    UnknownScheme(String),
    /// There is something between the scheme and the parameters.
    UnexpectedPath {
        /// The scheme.
        scheme: &'static str,
        /// What there is.
        path: String,
    },
    /// No server is named.
    NoHost {
        /// The scheme.
        scheme: &'static str,
    },
    /// What should be a server is none.
    BadHost(String),
    /// A server is named twice.
    SameHost(String),
    /// What should be a cluster is none.
    BadCluster(ParseError),
    /// More servers than there may be.
    TooManyHosts(usize),
    /// Fewer servers than a group of pages needs.
    TooFewHosts {
        /// What was asked for.
        shape: Shape,
        /// Servers that are named.
        hosts: usize,
    },
    /// Copies are another way to survive losses.
    ReplicasWithParity,
    /// There is a name before the `@`, or no password.
    NoPassword,
    /// What should be an absolute path is none.
    NoPath(String),
    /// A file's size is not given.
    NoSize,
    /// The pool has no such parameter.
    UnknownParameter {
        /// The scheme.
        scheme: &'static str,
        /// Those that it has.
        known: &'static [&'static str],
        /// What was given.
        name: String,
    },
    /// A parameter is given twice.
    RepeatedParameter(&'static str),
    /// A parameter's value is not among those it takes.
    BadValue {
        /// The parameter.
        parameter: &'static str,
        /// What was given.
        value: String,
        /// What may be given.
        expected: &'static str,
    },
    /// A parameter is nothing without another.
    Alone {
        /// The parameter.
        parameter: &'static str,
        /// The other.
        needs: &'static str,
    },
    /// A size is none.
    BadSize(SizeError),
    /// A size is too small.
    SizeTooSmall {
        /// What was given.
        bytes: u64,
        /// What must be given at least.
        min_bytes: u64,
    },
}

/// The schemes there are.
const SCHEMES: &str = "those known are `local:`, `tcp:`, `etcd:`, `memcached:`, `redis:`, `file:` and `emulated:`";

impl fmt::Display for UrlError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoScheme(text) => write!(f, "pool `{}` has no scheme: {SCHEMES}", text.escape_debug()),
            Self::UnknownScheme(scheme) => {
                write!(f, "pool scheme `{}:` is unknown: {SCHEMES}", scheme.escape_debug())
            }
            Self::UnexpectedPath { scheme, path } => {
                let path = path.escape_debug();
                write!(f, "`{scheme}:` takes no path, but `{path}` follows it: parameters start with `?`")
            }
            Self::NoHost { scheme } => write!(f, "`{scheme}:` names no server: give `{scheme}://HOST[:PORT],...`"),
            Self::BadHost(host) => {
                let host = host.escape_debug();
                write!(f, "`{host}` is no server: give a name or an address, `HOST[:PORT]` or `[IPV6]:PORT`")
            }
            Self::BadCluster(error) => error.fmt(f),
            Self::SameHost(host) => write!(f, "`{host}` is named twice: name each server once"),
            Self::TooManyHosts(count) => write!(f, "a pool of {count} servers is too large: give at most 255"),
            Self::TooFewHosts { shape, hosts } => too_few_hosts(f, *shape, *hosts),
            Self::ReplicasWithParity => {
                f.write_str("`replicas` and `data` with `parity` are two ways to survive a loss: keep one of them")
            }
            Self::NoPassword => f.write_str("`redis:` takes a password and no user: give `redis://:PASSWORD@HOST`"),
            Self::NoPath(path) => {
                write!(f, "`file:` needs an absolute path, not `{}`: give `file:///PATH?size=8G`", path.escape_debug())
            }
            Self::NoSize => f.write_str("`file:` needs a size: give `file:///PATH?size=8G`"),
            Self::UnknownParameter { scheme, known, name } => {
                write!(f, "`{scheme}:` has no parameter `{}`: it has {}", name.escape_debug(), list(known))
            }
            Self::RepeatedParameter(name) => write!(f, "pool parameter `{name}` is given twice: keep one"),
            Self::BadValue { parameter, value, expected } => {
                write!(f, "pool parameter `{parameter}` cannot be `{}`: give {expected}", value.escape_debug())
            }
            Self::Alone { parameter, needs } => {
                write!(f, "pool parameter `{parameter}` is nothing without another: give `{needs}` with it")
            }
            Self::BadSize(error) => write!(f, "pool parameter `size`: {error}"),
            Self::SizeTooSmall { bytes, min_bytes } => {
                write!(f, "pool parameter `size` is {bytes} bytes: give at least {}M", min_bytes >> 20)
            }
        }
    }
}

fn too_few_hosts(f: &mut fmt::Formatter<'_>, shape: Shape, hosts: usize) -> fmt::Result {
    let Shape { data, parity } = shape;
    let asked = if data == 1 { format!("replicas={}", parity + 1) } else { format!("data={data}&parity={parity}") };
    let named = if hosts == 1 { "1 is named".into() } else { format!("{hosts} are named") };
    write!(
        f,
        "a pool with `{asked}` needs {} servers, but {named}: name {} more",
        shape.width(),
        shape.width() - hosts
    )?;
    match hosts.checked_sub(parity) {
        Some(fit @ 2..) => write!(f, ", or give `data={fit}&parity={parity}`"),
        Some(1) if data > 1 => write!(f, ", or give `replicas={}`", parity + 1),
        _ => Ok(()),
    }
}

/// Of two or more.
fn list(words: &[&str]) -> String {
    let words: Vec<String> = words.iter().map(|word| format!("`{word}`")).collect();
    let (last, others) = words.split_last().expect("every scheme has parameters");
    format!("{} and {last}", others.join(", "))
}

impl std::error::Error for UrlError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::BadSize(error) => Some(error),
            Self::BadCluster(error) => Some(error),
            _ => None,
        }
    }
}

/// What kind of reason there is for not opening a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenErrorKind {
    /// The URL is none.
    Url,
    /// No connection, or no answer.
    Unreachable,
    /// The password or token is not accepted.
    Denied,
    /// It is there, but is something else, or another version.
    Protocol,
    /// It would not do what a pool must.
    Unsuitable,
    /// No room.
    Full,
    /// This host does not give what is needed.
    System,
}

/// Why a pool could not be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenError {
    /// The server or file; empty when it is neither's fault.
    pub server: String,
    /// What kind of reason.
    pub kind: OpenErrorKind,
    /// What is so, and the remedy.
    pub text: String,
}

impl OpenError {
    pub(crate) const NO_SUCH_NAME: &str = "its name is unknown: correct it, or give an address";

    pub(crate) fn no_such_name(server: &impl ToString) -> Self {
        Self { server: server.to_string(), kind: OpenErrorKind::Unreachable, text: Self::NO_SUCH_NAME.into() }
    }

    pub(crate) fn system(error: impl Into<std::io::Error>) -> Self {
        let text = format!("the pool cannot be opened: {}", error.into());
        Self { server: String::new(), kind: OpenErrorKind::System, text }
    }
}

impl From<UrlError> for OpenError {
    fn from(error: UrlError) -> Self {
        Self { server: String::new(), kind: OpenErrorKind::Url, text: error.to_string() }
    }
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.server.is_empty() { f.write_str(&self.text) } else { write!(f, "pool {}: {}", self.server, self.text) }
    }
}

impl std::error::Error for OpenError {}

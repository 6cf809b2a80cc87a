//! Why a cluster cannot be used, in one line with a remedy.

use std::fmt;

/// Why a text names no cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ParseError {
    /// No endpoint is named.
    NoHost,
    /// What should be an endpoint is none.
    BadHost(String),
    /// The cluster has no name.
    NoName,
    /// What should be its name is none.
    BadName(String),
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = "give `etcd://HOST[:PORT],.../NAME`";
        match self {
            Self::NoHost => write!(f, "`etcd:` names no host: {how}"),
            Self::BadHost(host) => write!(f, "`{}` is no host of etcd: {how}", host.escape_debug()),
            Self::NoName => write!(f, "`etcd:` names no cluster: {how}"),
            Self::BadName(name) => {
                write!(
                    f,
                    "`{}` is no name for a cluster: letters, digits, `-`, `_` and `.` make one",
                    name.escape_debug()
                )
            }
        }
    }
}

impl std::error::Error for ParseError {}

/// What etcd did not do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// No endpoint answered; the last one's reason.
    Unreachable {
        /// Who did not.
        endpoint: String,
        /// Why.
        why: String,
    },
    /// It answered what etcd does not answer.
    Protocol {
        /// Who did.
        endpoint: String,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreachable { endpoint, why } => {
                write!(f, "etcd at {endpoint} does not answer ({why}): start it, or correct the address")
            }
            Self::Protocol { endpoint } => {
                write!(f, "{endpoint} does not answer as etcd 3.4 or newer does: correct the address")
            }
        }
    }
}

impl std::error::Error for Error {}

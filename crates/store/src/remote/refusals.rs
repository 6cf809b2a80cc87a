//! What befalls connections, in words.

use std::io;

use spillway_wire::tls;

use super::connection::Ended;
use super::protocol::Refusal;
use crate::pool::{OpenError, OpenErrorKind};

/// It cannot be connected to.
pub(super) fn unreachable(error: &io::Error) -> Refusal {
    let remedy = match error.kind() {
        io::ErrorKind::ConnectionRefused => "no one listens there: start the server, or correct the port",
        _ => "it cannot be reached: check the address and the network",
    };
    (OpenErrorKind::Unreachable, format!("{remedy} ({})", plain(error)))
}

/// Nobody knows where it is.
pub(super) fn unnamed() -> Refusal {
    (OpenErrorKind::Unreachable, OpenError::NO_SUCH_NAME.into())
}

/// The connection ended by itself.
pub(super) fn ended(why: Ended) -> Refusal {
    match why {
        Ended::Socket(error) => {
            (OpenErrorKind::Unreachable, format!("it ended the connection ({}): see its log", plain(&error)))
        }
        Ended::Tls(failure) => insecure(&failure),
    }
}

/// TLS failed.
pub(crate) fn insecure(failure: &tls::Failure) -> Refusal {
    let kind = if failure.is_denial() { OpenErrorKind::Denied } else { OpenErrorKind::Protocol };
    (kind, failure.to_string())
}

/// Nothing is heard from it.
pub(super) fn silent() -> Refusal {
    (OpenErrorKind::Unreachable, "it does not answer: see whether it is overloaded, stopped, or cut off".into())
}

/// It answers some requests, and others never.
pub(super) fn stuck() -> Refusal {
    (OpenErrorKind::Unreachable, "it leaves requests unanswered: see whether the disk that it spills to works".into())
}

/// As the system says it, without its number.
pub(crate) fn plain(error: &io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error").next().unwrap_or_default().to_lowercase()
}

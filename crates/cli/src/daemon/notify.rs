//! A word to the service manager, if it asked for one: a datagram to the socket that it names (systemd, `sd_notify(3)`).

use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Tells it. Nobody waits for an answer, and a failure harms nobody but whoever waits there.
pub(super) fn tell(what: &str) {
    let Some(name) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let address = match name.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
        _ => SocketAddr::from_pathname(&name),
    };
    let sent = |address| UnixDatagram::unbound()?.send_to_addr(what.as_bytes(), &address);
    let _ = address.and_then(sent);
}

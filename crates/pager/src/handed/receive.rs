//! The other end of a monitor's socket: the message, the descriptor that comes with it, and who sent it.

use std::fs;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use super::message::{MESSAGE_BYTES_MAX, Region, parse};
use super::{Handed, Refusal};
use crate::procfs;
use crate::sys::fd::peer;
use crate::sys::uffd::{EVENT_FORK, EVENT_REMOVE, SIGBUS, Uffd};

/// Descriptors that one message may bring: Firecracker sends one, and two where its memory is a file.
const DESCRIPTORS_MAX: usize = 8;

/// What came over a socket.
struct Came {
    regions: Vec<Region>,
    descriptors: Vec<OwnedFd>,
}

/// Receives a hand-over. Nothing of the sender is touched.
///
/// # Errors
/// As [`Refusal`] says.
pub fn receive(stream: &UnixStream, within: Duration) -> Result<Handed, Refusal> {
    let pid = peer(stream.as_fd()).map_err(Refusal::Socket)?.pid;
    if pid <= 0 {
        return Err(Refusal::Elsewhere);
    }
    let Came { regions, descriptors } = hear(stream, within)?;
    let uffd = userfaultfd(descriptors)?;
    check_mappings(pid, &regions)?;
    Ok(Handed { pid, uffd: Uffd::of_others(uffd), regions })
}

fn hear(stream: &UnixStream, within: Duration) -> Result<Came, Refusal> {
    let deadline = Instant::now() + within;
    let (mut bytes, mut descriptors) = (Vec::new(), Vec::new());
    loop {
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        stream.set_read_timeout(Some(left)).map_err(Refusal::Socket)?;
        let came = hear_some(stream, &mut bytes, &mut descriptors);
        if bytes.len() > MESSAGE_BYTES_MAX {
            return Err(Refusal::TooLong);
        }
        match came {
            Ok(0) if bytes.is_empty() => return Err(Refusal::Nothing),
            Ok(0) => return Err(parse(&bytes).err().unwrap_or(Refusal::NoDescriptor)),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(Refusal::Late),
            Err(error) => return Err(Refusal::Socket(error)),
        }
        match parse(&bytes) {
            // A byte at a time is not how it is sent.
            Err(Refusal::Incomplete) if Instant::now() < deadline => {}
            Err(Refusal::Incomplete) => return Err(Refusal::Late),
            Err(refusal) => return Err(refusal),
            Ok(_) if descriptors.is_empty() => return Err(Refusal::NoDescriptor),
            Ok(regions) => return Ok(Came { regions, descriptors }),
        }
    }
}

/// Receives what is there; how many bytes that was.
fn hear_some(stream: &UnixStream, bytes: &mut Vec<u8>, descriptors: &mut Vec<OwnedFd>) -> io::Result<usize> {
    let mut some = [0; 4096];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(stream, &mut [IoSliceMut::new(&mut some)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    bytes.extend_from_slice(&some[..received.bytes]);
    Ok(received.bytes)
}

/// The userfaultfd among them, which is the first; what follows is closed.
fn userfaultfd(descriptors: Vec<OwnedFd>) -> Result<OwnedFd, Refusal> {
    let first = descriptors.into_iter().next().ok_or(Refusal::NoDescriptor)?;
    let name = fs::read_link(format!("/proc/self/fd/{}", first.as_raw_fd())).map_err(Refusal::Socket)?;
    if name.as_os_str() != "anon_inode:[userfaultfd]" {
        return Err(Refusal::OtherDescriptor(name.to_string_lossy().into_owned()));
    }
    let information =
        fs::read_to_string(format!("/proc/self/fdinfo/{}", first.as_raw_fd())).map_err(Refusal::Socket)?;
    match parse_features(&information) {
        Some(features) if features & EVENT_REMOVE == 0 => Err(Refusal::NoRemovals),
        Some(features) if features & (EVENT_FORK | SIGBUS) != 0 => Err(Refusal::Feature),
        Some(_) => Ok(first),
        None => Err(Refusal::NoHandshake),
    }
}

/// The features that were agreed on, of a userfaultfd's `/proc/PID/fdinfo/FD`; none before they were.
fn parse_features(text: &str) -> Option<u64> {
    /// `UFFD_FEATURE_INITIALIZED`, the kernel's own.
    const AGREED: u64 = 1 << 31;
    let line = text.lines().find_map(|line| line.strip_prefix("API:"))?;
    let features = u64::from_str_radix(line.trim().split(':').nth(1)?, 16).ok()?;
    (features & AGREED != 0).then_some(features & !AGREED)
}

/// Refuses regions that the process does not have, or not as private memory without a file.
fn check_mappings(pid: i32, regions: &[Region]) -> Result<(), Refusal> {
    let mappings = procfs::mappings(pid).map_err(Refusal::Socket)?;
    for region in regions {
        let within = mappings.iter().filter(|mapping| mapping.span.intersect(region.span).is_some());
        let gap = region.span.without(within.clone().map(|mapping| mapping.span));
        if !gap.is_empty() {
            return Err(Refusal::NotThere(region.span));
        }
        if let Some(other) = within.clone().find(|mapping| !mapping.is_manageable()) {
            return Err(Refusal::OtherMemory { span: other.span, shared: !other.private, name: other.name.clone() });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_are_read_once_agreed_on() {
        let text = |features| format!("pos:\t0\nflags:\t02004002\npending:\t0\ntotal:\t0\nAPI:\taa:{features}:1ff\n");
        assert_eq!(parse_features(&text("80000008")), Some(8));
        assert_eq!(parse_features(&text("80000000")), Some(0));
        assert_eq!(parse_features(&text("0")), None);
        for text in ["", "API:", "API:\taa", "API:\taa:x:0", "pending:\t0\n"] {
            assert_eq!(parse_features(text), None, "{text}");
        }
    }
}

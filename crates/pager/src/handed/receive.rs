//! The other end of a monitor's socket: the message, the descriptor that comes with it, and who sent it.

use std::fs;
use std::io::{self, IoSliceMut, Read as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use super::handoff::{Frames, HandOff, Later};
use super::message::{MESSAGE_BYTES_MAX, Message, REGIONS_MAX, Region, parse};
use super::{Handed, Plugged, Refusal};
use crate::procfs::{self, Mapping};
use crate::sys::fd::peer;
use crate::sys::uffd::{EVENT_FORK, EVENT_REMOVE, SIGBUS, Uffd, WP_ASYNC};

/// Descriptors that one message may bring: Firecracker sends one, and two where its memory is a file.
const DESCRIPTORS_MAX: usize = 8;

/// What came over a socket.
struct Came {
    message: Message,
    descriptors: Vec<OwnedFd>,
    /// Behind the message.
    rest: Vec<u8>,
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
    let started = procfs::stat(pid).map_or(0, |stat| stat.started);
    let Came { message, descriptors, rest } = hear(stream, within)?;
    match message {
        Message::Regions(regions) => {
            let uffd = userfaultfd(descriptors, check_features)?;
            check_mappings(pid, &regions)?;
            Ok(Handed { pid, uffd, regions, is_shared: false, conversation: None })
        }
        Message::HandOff(HandOff { pid: said, regions, .. }) => {
            if said != i64::from(pid) {
                return Err(Refusal::OtherPid { said, is: pid });
            }
            let uffd = userfaultfd(descriptors, check_features_for_sharing)?;
            check_shared_mappings(pid, &regions)?;
            let (frames, told) = (Frames::beginning_with(rest), regions.len());
            let conversation = Some(Conversation { pid, started, frames, told });
            Ok(Handed { pid, uffd, regions, is_shared: true, conversation })
        }
    }
}

/// Something that a monitor says after it has handed over.
#[derive(Debug)]
pub enum Heard {
    /// Memory was plugged in.
    Plugged(Plugged),
    /// The same of memory that cannot be managed.
    Refused(Refusal),
    /// It is not understood.
    Unknown,
}

/// What a monitor says after it has handed over.
#[derive(Debug)]
pub struct Conversation {
    pid: i32,
    started: u64,
    frames: Frames,
    /// Regions that it has told of.
    told: usize,
}

impl Conversation {
    /// Whose.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Waits for the next that it says, of which no part may let us wait longer than `within` once it has begun. None when it has hung up.
    ///
    /// # Errors
    /// As [`Refusal`] says; nothing that comes afterwards can be understood.
    pub fn next(&mut self, mut stream: &UnixStream, within: Duration) -> Result<Option<Heard>, Refusal> {
        let mut some = [0; 4096];
        loop {
            if let Some(later) = self.frames.take()? {
                let Later::Plugged(region) = later else { return Ok(Some(Heard::Unknown)) };
                self.told += 1;
                if self.told > REGIONS_MAX {
                    return Err(Refusal::RegionCount(self.told));
                }
                let plugged = Plugged { pid: self.pid, started: self.started, region };
                return Ok(match check_shared_mappings(self.pid, &[region]) {
                    Ok(()) => Some(Heard::Plugged(plugged)),
                    // It has ended since.
                    Err(_) if procfs::living_thread(self.pid).is_none() => None,
                    Err(refusal) => Some(Heard::Refused(refusal)),
                });
            }
            let within = (self.frames.kept_bytes() > 0).then_some(within);
            stream.set_read_timeout(within).map_err(Refusal::Socket)?;
            match stream.read(&mut some) {
                Ok(0) => return Ok(None),
                Ok(count) => self.frames.push(&some[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(Refusal::Late),
                // However it has ended.
                Err(_) => return Ok(None),
            }
        }
    }
}

fn hear(stream: &UnixStream, within: Duration) -> Result<Came, Refusal> {
    let deadline = Instant::now() + within;
    let (mut bytes, mut descriptors) = (Vec::new(), Vec::new());
    loop {
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        stream.set_read_timeout(Some(left)).map_err(Refusal::Socket)?;
        let came = hear_some(stream, &mut bytes, &mut descriptors);
        // With a length before it.
        if bytes.len() > MESSAGE_BYTES_MAX + size_of::<u32>() {
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
            Ok(message) => {
                let length = if let Message::HandOff(handed) = &message { handed.length } else { bytes.len() };
                return Ok(Came { message, descriptors, rest: bytes.split_off(length) });
            }
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
fn userfaultfd(descriptors: Vec<OwnedFd>, check: impl Fn(u64) -> Result<(), Refusal>) -> Result<Uffd, Refusal> {
    let first = descriptors.into_iter().next().ok_or(Refusal::NoDescriptor)?;
    let name = fs::read_link(format!("/proc/self/fd/{}", first.as_raw_fd())).map_err(Refusal::Socket)?;
    if name.as_os_str() != "anon_inode:[userfaultfd]" {
        return Err(Refusal::OtherDescriptor(name.to_string_lossy().into_owned()));
    }
    let information =
        fs::read_to_string(format!("/proc/self/fdinfo/{}", first.as_raw_fd())).map_err(Refusal::Socket)?;
    let features = parse_features(&information).ok_or(Refusal::NoHandshake)?;
    check(features).map(|()| Uffd::of_others(first, features))
}

/// What may be agreed on for private memory.
fn check_features(features: u64) -> Result<(), Refusal> {
    match features {
        features if features & EVENT_REMOVE == 0 => Err(Refusal::NoRemovals),
        features if features & (EVENT_FORK | SIGBUS) != 0 => Err(Refusal::Feature),
        _ => Ok(()),
    }
}

/// The same for shared memory, of which a process gives up nothing by what is told of.
fn check_features_for_sharing(features: u64) -> Result<(), Refusal> {
    match features {
        features if features & (EVENT_FORK | SIGBUS) != 0 => Err(Refusal::Feature),
        features if features & WP_ASYNC != 0 => Err(Refusal::WritesPass),
        _ => Ok(()),
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
    check_each(pid, regions, |other| match other.is_manageable() {
        true => Ok(()),
        false => Err(Refusal::OtherMemory { span: other.span, shared: !other.private, name: other.name.clone() }),
    })
}

/// Refuses regions that the process does not have, or not as shared memory that can be managed.
fn check_shared_mappings(pid: i32, regions: &[Region]) -> Result<(), Refusal> {
    check_each(pid, regions, |mapping| match mapping {
        Mapping { private: true, span, .. } => Err(Refusal::Private(*span)),
        mapping if mapping.is_common() && mapping.readable && mapping.writable => Ok(()),
        Mapping { span, name, .. } => Err(Refusal::OtherFile { span: *span, name: name.clone() }),
    })
}

fn check_each(pid: i32, regions: &[Region], check: impl Fn(&Mapping) -> Result<(), Refusal>) -> Result<(), Refusal> {
    let mappings = procfs::mappings(pid).map_err(Refusal::Socket)?;
    for region in regions {
        let mut within = mappings.iter().filter(|mapping| mapping.span.intersect(region.span).is_some());
        let gap = region.span.without(within.clone().map(|mapping| mapping.span));
        if !gap.is_empty() {
            return Err(Refusal::NotThere(region.span));
        }
        within.try_for_each(&check)?;
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

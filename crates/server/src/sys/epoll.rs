//! Waiting for many descriptors, and waking a thread that waits.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

/// Events taken at a time.
const EVENTS_MAX: usize = 64;

/// What a descriptor is watched for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Interest {
    /// There is something to read, or the end.
    pub(crate) read: bool,
    /// There is room to write.
    pub(crate) write: bool,
}

impl Interest {
    fn bits(self) -> u32 {
        let bits = if self.read { libc::EPOLLIN } else { 0 } | if self.write { libc::EPOLLOUT } else { 0 };
        bits.cast_unsigned()
    }
}

/// What happened to a descriptor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Event {
    /// The number that it was added with.
    pub(crate) token: u64,
    /// It may be read: data, end or error. Otherwise it may be written.
    pub(crate) readable: bool,
    /// It is of no use any more. That is told again and again, whatever it is watched for.
    pub(crate) broken: bool,
}

/// An epoll instance.
pub(crate) struct Epoll {
    fd: OwnedFd,
    events: Vec<libc::epoll_event>,
}

impl Epoll {
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: takes a flag and returns a descriptor or -1.
        let fd = owned(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
        Ok(Self { fd, events: vec![libc::epoll_event { events: 0, u64: 0 }; EVENTS_MAX] })
    }

    /// Watches a descriptor, until it is closed.
    pub(crate) fn add(&self, fd: RawFd, token: u64, interest: Interest) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, fd, token, interest)
    }

    /// Watches it for something else.
    pub(crate) fn change(&self, fd: RawFd, token: u64, interest: Interest) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_MOD, fd, token, interest)
    }

    fn control(&self, operation: i32, fd: RawFd, token: u64, interest: Interest) -> io::Result<()> {
        let mut event = libc::epoll_event { events: interest.bits(), u64: token };
        // SAFETY: `event` is valid for the call; a wrong descriptor is an error, not a hazard.
        match unsafe { libc::epoll_ctl(self.fd.as_raw_fd(), operation, fd, &raw mut event) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Waits for events, at most for `limit`; an interrupted wait has none.
    pub(crate) fn wait(&mut self, limit: Duration) -> io::Result<impl Iterator<Item = Event> + '_> {
        let limit = i32::try_from(limit.as_millis()).unwrap_or(i32::MAX);
        let room = i32::try_from(self.events.len()).unwrap_or(i32::MAX);
        // SAFETY: the kernel writes at most `room` events, which is what the vector holds.
        let count = unsafe { libc::epoll_wait(self.fd.as_raw_fd(), self.events.as_mut_ptr(), room, limit) };
        let count = match usize::try_from(count) {
            Ok(count) => count,
            Err(_) => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => 0,
                error => return Err(error),
            },
        };
        let bit = |bits: i32| bits.cast_unsigned();
        Ok(self.events[..count].iter().map(move |event| {
            let bits = event.events;
            let broken = bits & (bit(libc::EPOLLERR) | bit(libc::EPOLLHUP)) != 0;
            Event { token: event.u64, readable: broken || bits & bit(libc::EPOLLIN) != 0, broken }
        }))
    }
}

/// Wakes a thread that waits in [`Epoll::wait`].
pub(crate) struct Bell(OwnedFd);

impl Bell {
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: takes numbers and returns a descriptor or -1.
        owned(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) }).map(Self)
    }

    /// To be watched for reading.
    pub(crate) fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Wakes.
    pub(crate) fn ring(&self) {
        let one = 1u64;
        // SAFETY: eight readable bytes. It fails only when the bell has been rung 2^64 times unheard.
        unsafe { libc::write(self.fd(), (&raw const one).cast(), size_of::<u64>()) };
    }

    /// Makes it silent again.
    pub(crate) fn hush(&self) {
        let mut count = 0u64;
        // SAFETY: eight writable bytes. It fails only when it was silent.
        unsafe { libc::read(self.fd(), (&raw mut count).cast(), size_of::<u64>()) };
    }
}

fn owned(fd: RawFd) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just gave us this descriptor, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

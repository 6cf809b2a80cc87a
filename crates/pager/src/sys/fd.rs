//! Descriptors: waiting for them, waking a thread through one, handing them over.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// `Ok(value)` unless the call said -1.
pub(super) fn checked(value: libc::c_long) -> io::Result<libc::c_long> {
    if value == -1 { Err(io::Error::last_os_error()) } else { Ok(value) }
}

/// Takes ownership of a descriptor that a system call just returned.
pub(super) fn owned(value: libc::c_long) -> io::Result<OwnedFd> {
    let fd = RawFd::try_from(checked(value)?).map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
    // SAFETY: the call opened this descriptor for us a moment ago; nobody else knows its number.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Wakes a thread that polls it.
#[derive(Debug)]
pub struct Bell(OwnedFd);

impl Bell {
    /// A silent bell.
    ///
    /// # Errors
    /// When descriptors run out.
    pub fn new() -> io::Result<Self> {
        // SAFETY: no pointers are involved.
        owned(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) }.into()).map(Self)
    }

    /// Rings it: pollers find it readable until [`Bell::silence`].
    pub fn ring(&self) {
        let one = 1_u64;
        // SAFETY: eight readable bytes. The only failure is a full counter, which is readable all the same.
        unsafe { libc::write(self.0.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    /// Takes back all rings so far.
    pub fn silence(&self) {
        let mut count = 0_u64;
        // SAFETY: eight writable bytes.
        unsafe { libc::read(self.0.as_raw_fd(), (&raw mut count).cast(), 8) };
    }
}

impl AsRawFd for Bell {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

pub(super) fn timespec(ns: u64) -> libc::timespec {
    libc::timespec {
        tv_sec: i64::try_from(ns / 1_000_000_000).unwrap_or(i64::MAX),
        tv_nsec: i64::try_from(ns % 1_000_000_000).unwrap_or(0),
    }
}

/// A descriptor to poll for reading; negative ones are passed over.
pub fn readable(fd: RawFd) -> libc::pollfd {
    libc::pollfd { fd, events: libc::POLLIN, revents: 0 }
}

/// Waits until one of `fds` is ready or `timeout_ns` have passed (`None`: for ever). Interruptions end the wait early.
pub fn poll(fds: &mut [libc::pollfd], timeout_ns: Option<u64>) -> bool {
    let timeout = timeout_ns.map(timespec);
    let timeout = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: `fds` is a writable array of the length given; `timeout` is null or outlives the call.
    unsafe { libc::ppoll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, timeout, std::ptr::null()) > 0 }
}

/// Sends one byte. False when the other end is gone.
pub fn send_byte(socket: BorrowedFd<'_>) -> bool {
    // SAFETY: one readable byte; MSG_NOSIGNAL turns a closed peer into an error.
    unsafe { libc::send(socket.as_raw_fd(), [1_u8].as_ptr().cast(), 1, libc::MSG_NOSIGNAL) == 1 }
}

/// What a socket had to say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heard {
    /// A byte.
    Byte,
    /// Nothing yet.
    Nothing,
    /// The other end is gone.
    End,
}

/// Receives one byte without waiting.
pub fn receive_byte(socket: BorrowedFd<'_>) -> Heard {
    let mut byte = 0_u8;
    // SAFETY: one writable byte.
    match unsafe { libc::recv(socket.as_raw_fd(), (&raw mut byte).cast(), 1, libc::MSG_DONTWAIT) } {
        1 => Heard::Byte,
        0 => Heard::End,
        _ if matches!(io::Error::last_os_error().raw_os_error(), Some(libc::EAGAIN | libc::EINTR)) => Heard::Nothing,
        _ => Heard::End,
    }
}

/// Who is at the other end of a Unix socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The process; 0 where it has no number here.
    pub pid: i32,
    /// Its user.
    pub uid: u32,
}

/// Who connected a Unix socket, or listens there. Not by `rustix`, whose process numbers must not be 0.
///
/// # Errors
/// When it is no such socket.
pub fn peer(socket: BorrowedFd<'_>) -> io::Result<Peer> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = libc::socklen_t::try_from(size_of_val(&peer)).unwrap_or(0);
    let (level, name) = (libc::SOL_SOCKET, libc::SO_PEERCRED);
    // SAFETY: `peer` is writable for `length` bytes, and so is `length`.
    let done = unsafe { libc::getsockopt(socket.as_raw_fd(), level, name, (&raw mut peer).cast(), &raw mut length) };
    checked(done.into()).map(|_| Peer { pid: peer.pid, uid: peer.uid })
}

/// Sends `fd` over `socket` (SCM_RIGHTS), with one byte of data.
///
/// # Errors
/// When the other end is gone.
pub fn send_fd(socket: BorrowedFd<'_>, fd: BorrowedFd<'_>) -> io::Result<()> {
    let mut byte = 0_u8;
    let mut data = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    let mut control = Rights::new(fd.as_raw_fd());
    // SAFETY: msghdr is plain data for which zeros are valid.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut data;
    message.msg_iovlen = 1;
    message.msg_control = (&raw mut control).cast();
    message.msg_controllen = size_of::<Rights>();
    // SAFETY: every pointer in `message` names a local that outlives the call, with its true length.
    checked(unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) } as libc::c_long)?;
    Ok(())
}

/// A control message that carries one descriptor: `struct cmsghdr` and its data, padded as `CMSG_SPACE` asks.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Rights {
    length: usize,
    level: libc::c_int,
    kind: libc::c_int,
    /// The descriptor.
    pub fd: RawFd,
    padding: u32,
}

const _: () = assert!(size_of::<Rights>() == 24 && size_of::<libc::cmsghdr>() == 16);

impl Rights {
    /// The message that carries `fd`.
    pub fn new(fd: RawFd) -> Self {
        Self { length: 20, level: libc::SOL_SOCKET, kind: libc::SCM_RIGHTS, fd, padding: 0 }
    }
}

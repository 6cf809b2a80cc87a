//! One nonblocking socket: what is to be sent, what came, and what the poller waits for. Knows no protocol.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{self, RecvFlags, SendFlags, SocketFlags, SocketType, sockopt};

/// A connection, or one that is being made.
pub(crate) struct Connection {
    socket: OwnedFd,
    out: Vec<u8>,
    /// Bytes of `out` that the kernel has taken.
    sent: usize,
    input: Box<[u8]>,
    /// What of `input` has come and was not yet used.
    unused: std::ops::Range<usize>,
    /// The poller also waits until the kernel takes more.
    waits_to_send: bool,
}

/// What outlives a connection, so that the next one allocates nothing.
pub(crate) struct Buffers {
    pub(crate) out: Vec<u8>,
    pub(crate) input: Box<[u8]>,
}

impl Connection {
    /// Begins to connect.
    pub(crate) fn start(
        address: SocketAddr,
        poller: BorrowedFd<'_>,
        mut buffers: Buffers,
    ) -> Result<Self, (io::Error, Buffers)> {
        buffers.out.clear();
        match connect(address, poller) {
            Ok(socket) => {
                let Buffers { out, input } = buffers;
                Ok(Self { socket, out, sent: 0, input, unused: 0..0, waits_to_send: true })
            }
            Err(error) => Err((error.into(), buffers)),
        }
    }

    /// Closes it.
    pub(crate) fn into_buffers(self) -> Buffers {
        Buffers { out: self.out, input: self.input }
    }

    /// Whether the other side has taken the connection, once it has or has not.
    pub(crate) fn is_open(&self) -> io::Result<bool> {
        sockopt::socket_error(&self.socket)??;
        match net::getpeername(&self.socket) {
            Ok(_) => Ok(true),
            Err(Errno::NOTCONN) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Where requests are appended.
    pub(crate) fn out(&mut self) -> &mut Vec<u8> {
        &mut self.out
    }

    /// Bytes that the kernel has not taken.
    pub(crate) fn unsent(&self) -> usize {
        self.out.len() - self.sent
    }

    /// Hands over what the kernel takes. Returns whether it took all; what goes wrong, [`Connection::receive`] tells.
    pub(crate) fn send(&mut self, poller: BorrowedFd<'_>) -> bool {
        while self.sent < self.out.len() {
            match net::send(&self.socket, &self.out[self.sent..], SendFlags::NOSIGNAL) {
                Ok(bytes) => self.sent += bytes,
                Err(Errno::INTR) => {}
                Err(_) => break,
            }
        }
        let all = self.sent == self.out.len();
        if all {
            self.out.clear();
            self.sent = 0;
        }
        if self.waits_to_send == all {
            self.waits_to_send = !all;
            let events = if all { EventFlags::IN } else { EventFlags::IN | EventFlags::OUT };
            // Fails only for want of kernel memory, and then the timer tries again.
            let _ = epoll::modify(poller, &self.socket, EventData::new_u64(0), events);
        }
        all
    }

    /// Takes what came, if anything did and there is room. An error when the connection has ended.
    pub(crate) fn receive(&mut self) -> io::Result<()> {
        if self.unused.is_empty() {
            self.unused = 0..0;
        } else if self.unused.end == self.input.len() {
            self.input.copy_within(self.unused.clone(), 0);
            self.unused = 0..self.unused.len();
        }
        loop {
            let room = &mut self.input[self.unused.end..];
            if room.is_empty() {
                return Ok(());
            }
            match net::recv(&self.socket, room, RecvFlags::empty()) {
                Ok((0, _)) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok((bytes, _)) => {
                    self.unused.end += bytes;
                    return Ok(());
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// What came and was not yet used.
    pub(crate) fn input(&self) -> &[u8] {
        &self.input[self.unused.clone()]
    }

    /// What came, and where to append what it makes us say.
    pub(crate) fn input_and_out(&mut self) -> (&[u8], &mut Vec<u8>) {
        (&self.input[self.unused.clone()], &mut self.out)
    }

    /// Marks bytes at the start of [`Connection::input`] as used.
    pub(crate) fn consume(&mut self, bytes: usize) {
        self.unused.start += bytes;
        assert!(self.unused.start <= self.unused.end, "no more is used than came");
    }
}

fn connect(address: SocketAddr, poller: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    let family = if address.is_ipv4() { net::AddressFamily::INET } else { net::AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = net::socket_with(family, SocketType::STREAM, flags, None)?;
    // A request that waits for the answer to the one before would wait for a delayed acknowledgement too.
    sockopt::set_tcp_nodelay(&socket, true)?;
    epoll::add(poller, socket.as_fd(), EventData::new_u64(0), EventFlags::IN | EventFlags::OUT)?;
    match net::connect(&socket, &address) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
        Err(error) => Err(error),
    }
}

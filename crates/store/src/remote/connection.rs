//! One nonblocking socket: what is to be sent, what came, and what the poller waits for; TLS between them if there is any.
//! Knows no protocol.

use std::io::{self, IoSlice, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{self, RecvFlags, SendAncillaryBuffer, SendFlags, SocketFlags, SocketType, sockopt};
use spillway_wire::auth::Channel;
use spillway_wire::tls::{self, PARTIAL_BYTES_MAX, Session};

/// What the kernel has taken already is kept as long as it is no more than this.
const SENT_BYTES_MAX: usize = 64 << 10;

/// A connection, or one that is being made.
pub(crate) struct Connection {
    socket: OwnedFd,
    /// What the poller calls it.
    name: u64,
    out: Vec<u8>,
    /// Bytes of `out` that the kernel has taken.
    sent: usize,
    input: Box<[u8]>,
    /// What of `input` has come and was not yet used.
    unused: std::ops::Range<usize>,
    /// The poller also waits until the kernel takes more.
    waits_to_send: bool,
    tls: Option<Box<Session>>,
    /// Where records are received, under TLS.
    records: Box<[u8]>,
}

/// What outlives a connection, so that the next one allocates nothing but its TLS session.
pub(crate) struct Buffers {
    out: Vec<u8>,
    input: Box<[u8]>,
    records: Box<[u8]>,
}

impl Buffers {
    /// Where to receive, how much room to have for what is sent, and how much to receive at a time under TLS: `input`
    /// must have room for that beside the longest answer, and it must be several records.
    pub(crate) fn new(input: Box<[u8]>, out_bytes: usize, records_bytes: Option<usize>) -> Self {
        let records = vec![0; records_bytes.unwrap_or(0)].into();
        Self { out: Vec::with_capacity(out_bytes), input, records }
    }
}

/// Why a connection is over.
pub(crate) enum Ended {
    Socket(io::Error),
    Tls(tls::Failure),
}

impl Ended {
    /// Nothing more will come.
    fn end() -> Self {
        Self::Socket(io::ErrorKind::UnexpectedEof.into())
    }
}

impl From<io::Error> for Ended {
    fn from(error: io::Error) -> Self {
        Self::Socket(error)
    }
}

impl Connection {
    /// Begins to connect; the poller tells of it by this name.
    pub(crate) fn start(
        address: SocketAddr,
        poller: BorrowedFd<'_>,
        name: u64,
        mut buffers: Buffers,
    ) -> Result<Self, (io::Error, Buffers)> {
        buffers.out.clear();
        match connect(address, poller, name) {
            Ok(socket) => {
                let Buffers { out, input, records } = buffers;
                Ok(Self { socket, name, out, sent: 0, input, unused: 0..0, waits_to_send: true, tls: None, records })
            }
            Err(error) => Err((error.into(), buffers)),
        }
    }

    /// Closes it.
    pub(crate) fn into_buffers(self) -> Buffers {
        Buffers { out: self.out, input: self.input, records: self.records }
    }

    /// Has everything from now on under TLS.
    pub(crate) fn secure(&mut self, client: &tls::Client) {
        self.tls = Some(Box::new(client.connect()));
    }

    /// What both ends of the TLS session know, once it is made.
    pub(crate) fn channel(&self) -> Option<Channel> {
        self.tls.as_ref().and_then(|tls| tls.channel())
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
        self.out.len() - self.sent + self.tls.as_ref().map_or(0, |tls| tls.unsent())
    }

    /// Hands over what the kernel takes. Returns whether it took all; what goes wrong, [`Connection::receive`] tells.
    pub(crate) fn send(&mut self, poller: BorrowedFd<'_>) -> bool {
        let all = self.hand_over();
        if all {
            self.out.clear();
            self.sent = 0;
        } else if self.sent > SENT_BYTES_MAX {
            // More is appended as long as little is unsent, so on a link that is always busy it never is empty.
            self.out.drain(..self.sent);
            self.sent = 0;
        }
        if self.waits_to_send == all {
            self.waits_to_send = !all;
            let events = if all { EventFlags::IN } else { EventFlags::IN | EventFlags::OUT };
            // Fails only for want of kernel memory, and then the timer tries again.
            let _ = epoll::modify(poller, &self.socket, EventData::new_u64(self.name), events);
        }
        all
    }

    /// Hands over what the kernel takes; whether it was all.
    fn hand_over(&mut self) -> bool {
        let Some(tls) = &mut self.tls else {
            while self.sent < self.out.len() {
                match net::send(&self.socket, &self.out[self.sent..], SendFlags::NOSIGNAL) {
                    Ok(bytes) => self.sent += bytes,
                    Err(Errno::INTR) => {}
                    Err(_) => return false,
                }
            }
            return true;
        };
        loop {
            self.sent += tls.seal(&[IoSlice::new(&self.out[self.sent..])]);
            if !tls.wants_to_send() {
                return self.sent == self.out.len();
            }
            match tls.send(&mut Socket(&self.socket)) {
                Err(error) if error.kind() != io::ErrorKind::Interrupted => return false,
                _ => {}
            }
        }
    }

    /// Takes what came, if anything did and there is room. An error when the connection has ended.
    pub(crate) fn receive(&mut self) -> Result<(), Ended> {
        if self.tls.is_some() {
            return self.receive_records();
        }
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
                Ok((0, _)) => return Err(Ended::end()),
                Ok((bytes, _)) => {
                    self.unused.end += bytes;
                    return Ok(());
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(()),
                Err(error) => return Err(io::Error::from(error).into()),
            }
        }
    }

    /// As [`Connection::receive`], under TLS.
    fn receive_records(&mut self) -> Result<(), Ended> {
        let Self { socket, input, unused, records, tls: Some(tls), .. } = self else { return Ok(()) };
        if unused.start == unused.end {
            *unused = 0..0;
        } else if input.len() - unused.end < records.len() {
            input.copy_within(unused.clone(), 0);
            *unused = 0..unused.len();
        }
        // What comes out of records is never more than what went in.
        let room = (input.len() - unused.end).saturating_sub(PARTIAL_BYTES_MAX).min(records.len());
        if room == 0 {
            return Ok(());
        }
        let bytes = loop {
            match net::recv(&*socket, &mut records[..room], RecvFlags::empty()) {
                Ok((0, _)) => return Err(Ended::end()),
                Ok((bytes, _)) => break bytes,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(()),
                Err(error) => return Err(io::Error::from(error).into()),
            }
        };
        let opened = tls.open(&records[..bytes], |plain| {
            input[unused.end..unused.end + plain.len()].copy_from_slice(plain);
            unused.end += plain.len();
        });
        match opened {
            Ok(()) if tls.has_ended() => Err(Ended::end()),
            Ok(()) => Ok(()),
            Err(failure) => {
                // That the server learns why is a courtesy.
                let _ = tls.send(&mut Socket(socket));
                Err(Ended::Tls(failure))
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

/// A socket as rustls writes to one.
struct Socket<'a>(&'a OwnedFd);

impl Write for Socket<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(net::send(self.0, bytes, SendFlags::NOSIGNAL)?)
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        Ok(net::sendmsg(self.0, slices, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn connect(address: SocketAddr, poller: BorrowedFd<'_>, name: u64) -> Result<OwnedFd, Errno> {
    let family = if address.is_ipv4() { net::AddressFamily::INET } else { net::AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = net::socket_with(family, SocketType::STREAM, flags, None)?;
    // A request that waits for the answer to the one before would wait for a delayed acknowledgement too.
    sockopt::set_tcp_nodelay(&socket, true)?;
    epoll::add(poller, socket.as_fd(), EventData::new_u64(name), EventFlags::IN | EventFlags::OUT)?;
    match net::connect(&socket, &address) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::TcpListener;

    use super::*;

    const BULK_BYTES: usize = 64 << 10;

    #[test]
    fn what_a_slow_peer_has_taken_is_not_kept() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        sockopt::set_socket_recv_buffer_size(&listener, 4096).unwrap();
        let poller = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let buffers = Buffers::new(vec![0; 4096].into(), BULK_BYTES, None);
        let started = Connection::start(listener.local_addr().unwrap(), poller.as_fd(), 0, buffers);
        let mut connection = started.map_err(|(error, _)| error).unwrap();
        sockopt::set_socket_send_buffer_size(&connection.socket, 4096).unwrap();
        let (mut peer, _) = listener.accept().unwrap();
        peer.set_read_timeout(Some(std::time::Duration::from_secs(10))).unwrap();
        let (mut said, mut heard, mut part) = (0u32, Vec::new(), [0; 2048]);
        while heard.len() < 4 << 20 {
            while connection.unsent() < BULK_BYTES {
                connection.out().extend_from_slice(&said.to_le_bytes());
                said += 1;
            }
            assert!(!connection.send(poller.as_fd()), "the kernel takes less than there is");
            assert!(connection.out.len() <= SENT_BYTES_MAX + 2 * BULK_BYTES, "{} bytes", connection.out.len());
            let bytes = peer.read(&mut part).unwrap();
            heard.extend_from_slice(&part[..bytes]);
        }
        for (word, expected) in heard.chunks_exact(4).zip(0u32..) {
            assert_eq!(word, expected.to_le_bytes());
        }
    }
}

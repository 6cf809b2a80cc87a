//! A socket and the session on it.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsRawFd, RawFd};
use std::time::Instant;

use spillway_wire::hello::Code;

use crate::mix::random_u64;
use crate::output::SLICES_MAX;
use crate::session::{Context, Session};
use crate::shared::Shared;
use crate::sys::epoll::Interest;

/// Bytes received at a time: several large frames, and still within a CPU's own cache.
pub(crate) const RECEIVE_BYTES: usize = 256 << 10;
/// Room that an idle connection keeps for the beginnings of frames.
const PENDING_KEPT_BYTES: usize = 16 << 10;

/// The connection is over; why does not matter to the server.
pub(crate) struct Gone;

/// Bytes that were received and could not be dealt with yet.
#[derive(Default)]
struct Pending {
    bytes: Vec<u8>,
    len: usize,
}

impl Pending {
    /// Room for so many bytes more.
    fn room(&mut self, more: usize) -> &mut [u8] {
        let end = self.len + more;
        if self.bytes.len() < end {
            self.bytes.resize(end, 0);
        }
        &mut self.bytes[self.len..end]
    }

    fn extend(&mut self, bytes: &[u8]) {
        self.room(bytes.len()).copy_from_slice(bytes);
        self.len += bytes.len();
    }

    fn all(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    fn drop_front(&mut self, count: usize) {
        self.bytes.copy_within(count..self.len, 0);
        self.len -= count;
    }
}

/// One client.
pub(crate) struct Connection {
    stream: TcpStream,
    pub(crate) session: Session,
    pending: Pending,
    /// When something was last received or sent.
    moved: Instant,
    /// What epoll was told.
    pub(crate) interest: Interest,
}

impl Connection {
    pub(crate) fn new(stream: TcpStream, now: Instant) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        let mut challenge = [0; 32];
        for part in challenge.chunks_exact_mut(8) {
            part.copy_from_slice(&random_u64().to_ne_bytes());
        }
        let (session, interest) = (Session::new(challenge), Interest::default());
        Ok(Self { stream, session, pending: Pending::default(), moved: now, interest })
    }

    /// The socket, if the client is on this host.
    pub(crate) fn on_this_host(&self) -> Option<&TcpStream> {
        let same = self.stream.peer_addr().ok()?.ip() == self.stream.local_addr().ok()?.ip();
        same.then_some(&self.stream)
    }

    /// Its descriptor.
    pub(crate) fn fd(&self) -> RawFd {
        self.stream.as_raw_fd()
    }

    /// What to wait for.
    pub(crate) fn wanted(&self, shared: &Shared) -> Interest {
        let congested = self.session.is_congested(shared.limits.window_bytes);
        Interest { read: !congested && !self.session.is_closing(), write: self.session.output.queued() > 0 }
    }

    /// Receives once and carries out what can be; sends what results.
    pub(crate) fn receive(&mut self, buffer: &mut [u8], cx: &mut Context<'_>) -> Result<(), Gone> {
        if self.wanted(cx.shared).read {
            self.receive_once(buffer, cx)?;
        }
        self.send(cx)
    }

    fn receive_once(&mut self, buffer: &mut [u8], cx: &mut Context<'_>) -> Result<(), Gone> {
        let missing = if self.pending.len == 0 { 0 } else { self.session.missing(self.pending.all()) };
        let room = self.pending.room(missing);
        let received = (&self.stream).read_vectored(&mut [IoSliceMut::new(room), IoSliceMut::new(buffer)]);
        let received = match received {
            Ok(0) => return Err(Gone),
            Ok(received) => received,
            Err(error) => return if is_passing(&error) { Ok(()) } else { Err(Gone) },
        };
        self.moved = cx.now;
        self.pending.len += received.min(missing);
        let fresh = &buffer[..received.saturating_sub(missing)];
        self.pending_requests(cx);
        if self.pending.len > 0 {
            self.pending.extend(fresh);
        } else {
            let done = self.session.input(fresh, cx);
            self.pending.extend(&fresh[done..]);
        }
        Ok(())
    }

    /// Carries out what waits in `pending`.
    fn pending_requests(&mut self, cx: &mut Context<'_>) {
        if self.pending.len > 0 {
            let done = self.session.input(self.pending.all(), cx);
            self.pending.drop_front(done);
        }
    }

    /// Sends what the client takes, and carries out what had to wait for that.
    pub(crate) fn send(&mut self, cx: &mut Context<'_>) -> Result<(), Gone> {
        while self.session.output.queued() > 0 {
            let mut slices = [IoSlice::new(&[]); SLICES_MAX];
            let count = self.session.output.slices(&cx.shared.pool, &mut slices);
            match (&self.stream).write_vectored(&slices[..count]) {
                Ok(sent) => {
                    self.moved = cx.now;
                    self.session.output.advance(sent, &cx.shared.pool);
                }
                Err(error) if is_passing(&error) => return Ok(()),
                Err(_) => return Err(Gone),
            }
            self.session.go_on(cx);
            if !self.session.is_congested(cx.shared.limits.window_bytes) {
                self.pending_requests(cx);
            }
        }
        if self.session.is_closing() { Err(Gone) } else { Ok(()) }
    }

    /// Looks after time limits; to be called now and then.
    pub(crate) fn tick(&mut self, cx: &mut Context<'_>) -> Result<(), Gone> {
        let limits = &cx.shared.limits;
        let limit = if self.session.is_open() { limits.heartbeat * 3 } else { limits.hello };
        if cx.now.saturating_duration_since(self.moved) > limit {
            self.end(Code::Silent, cx);
            return Err(Gone);
        }
        if self.session.was_overtaken() {
            self.end(Code::TakenOver, cx);
            return Err(Gone);
        }
        if self.pending.len == 0 && self.pending.bytes.capacity() > PENDING_KEPT_BYTES {
            self.pending = Pending::default();
        }
        Ok(())
    }

    /// Says goodbye, as far as the client listens.
    pub(crate) fn end(&mut self, code: Code, cx: &mut Context<'_>) {
        self.session.end(code, cx.shared);
        let _ = self.send(cx);
    }
}

/// Whether it is worth trying again later.
fn is_passing(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

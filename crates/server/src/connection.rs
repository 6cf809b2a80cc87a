//! A socket, the session on it, and TLS between them if there is any.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::time::Instant;

use spillway_wire::hello::Code;
use spillway_wire::tls;

use crate::mix::random_u64;
use crate::output::SLICES_MAX;
use crate::refusals::Why;
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
    pub(crate) peer: SocketAddr,
    /// The client is on this host.
    near: bool,
    tls: Option<Box<tls::Session>>,
    pub(crate) session: Session,
    pending: Pending,
    began: Instant,
    /// When something was last received or sent.
    moved: Instant,
    /// What epoll was told.
    pub(crate) interest: Interest,
}

impl Connection {
    pub(crate) fn new(stream: TcpStream, shared: &Shared, now: Instant) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        let mut challenge = [0; 32];
        for part in challenge.chunks_exact_mut(8) {
            part.copy_from_slice(&random_u64().to_ne_bytes());
        }
        let (peer, tls) = (stream.peer_addr()?, shared.tls.as_ref().map(|server| Box::new(server.accept())));
        let near = peer.ip() == stream.local_addr()?.ip();
        let (session, interest) = (Session::new(challenge, shared), Interest::default());
        Ok(Self { stream, peer, near, tls, session, pending: Pending::default(), began: now, moved: now, interest })
    }

    /// The socket, if the client is on this host.
    pub(crate) fn on_this_host(&self) -> Option<&TcpStream> {
        self.near.then_some(&self.stream)
    }

    /// Its descriptor.
    pub(crate) fn fd(&self) -> RawFd {
        self.stream.as_raw_fd()
    }

    /// What to wait for.
    pub(crate) fn wanted(&self, shared: &Shared) -> Interest {
        let congested = self.session.is_congested(shared.limits.window_bytes);
        let reads = !congested && !self.session.is_closing() && !self.session.is_behind();
        Interest { read: reads, write: self.has_to_send() }
    }

    /// Whether there is something that the client may be sent now.
    fn has_to_send(&self) -> bool {
        let queued = self.session.output.queued() > 0;
        self.tls.as_ref().map_or(queued, |tls| tls.wants_to_send() || queued && !tls.is_handshaking())
    }

    /// Receives once and carries out what can be; sends what results.
    pub(crate) fn receive(&mut self, buffer: &mut [u8], cx: &mut Context<'_>) -> Result<(), Gone> {
        if self.wanted(cx.shared).read {
            self.receive_once(buffer, cx)?;
        }
        self.send(cx)
    }

    fn receive_once(&mut self, buffer: &mut [u8], cx: &mut Context<'_>) -> Result<(), Gone> {
        if self.tls.is_some() {
            return self.receive_sealed(buffer, cx);
        }
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
            // Of a request whose head came in pieces, no more than the head was known to be missing.
            self.pending_requests(cx);
        } else {
            let done = self.session.input(fresh, cx);
            self.pending.extend(&fresh[done..]);
        }
        Ok(())
    }

    /// As [`Connection::receive_once`], under TLS: what was in the records waits in `pending` first.
    fn receive_sealed(&mut self, buffer: &mut [u8], cx: &mut Context<'_>) -> Result<(), Gone> {
        let Some(tls) = &mut self.tls else { return Ok(()) };
        let received = match (&self.stream).read(buffer) {
            Ok(0) => return Err(Gone),
            Ok(received) => received,
            Err(error) => return if is_passing(&error) { Ok(()) } else { Err(Gone) },
        };
        self.moved = cx.now;
        let handshaking = tls.is_handshaking();
        let opened = tls.open(&buffer[..received], |plain| self.pending.extend(plain));
        if handshaking && let Some(channel) = tls.channel() {
            self.session.bind(&channel);
        }
        if opened.is_err() || tls.has_ended() {
            // An alert may say why.
            let _ = tls.send(&mut &self.stream);
            cx.refused = opened.err().filter(|_| self.session.is_new()).map(Why::Tls);
            return Err(Gone);
        }
        self.pending_requests(cx);
        Ok(())
    }

    /// Carries out what waits in `pending`.
    fn pending_requests(&mut self, cx: &mut Context<'_>) {
        if self.pending.len > 0 {
            let done = self.session.input(self.pending.all(), cx);
            self.pending.drop_front(done);
        }
    }

    /// Carries out requests that had to wait for another turn; sends what results.
    pub(crate) fn catch_up(&mut self, cx: &mut Context<'_>) -> Result<(), Gone> {
        self.pending_requests(cx);
        self.send(cx)
    }

    /// Sends what the client takes, and carries out what had to wait for that.
    pub(crate) fn send(&mut self, cx: &mut Context<'_>) -> Result<(), Gone> {
        while self.has_to_send() {
            match self.send_once(cx) {
                Ok(()) => self.moved = cx.now,
                Err(error) if is_passing(&error) => return Ok(()),
                Err(_) => return Err(Gone),
            }
            self.session.go_on(cx);
            if !self.session.is_congested(cx.shared.limits.window_bytes) {
                self.pending_requests(cx);
            }
        }
        if !self.session.is_closing() {
            return Ok(());
        }
        if let Some(tls) = &mut self.tls {
            tls.close();
            let _ = tls.send(&mut &self.stream);
        }
        Err(Gone)
    }

    fn send_once(&mut self, cx: &Context<'_>) -> io::Result<()> {
        let (output, pool) = (&mut self.session.output, &cx.shared.pool);
        let mut slices = [IoSlice::new(&[]); SLICES_MAX];
        let Some(tls) = &mut self.tls else {
            let count = output.slices(pool, &mut slices);
            let sent = (&self.stream).write_vectored(&slices[..count])?;
            output.advance(sent, pool);
            return Ok(());
        };
        if !tls.wants_to_send() {
            let count = output.slices(pool, &mut slices);
            let sealed = tls.seal(&slices[..count]);
            output.advance(sealed, pool);
        }
        tls.send(&mut &self.stream)
    }

    /// Looks after time limits; to be called now and then.
    pub(crate) fn tick(&mut self, cx: &mut Context<'_>) -> Result<(), Gone> {
        let limits = &cx.shared.limits;
        // A hello must be there in time as a whole: bytes that trickle in are no excuse.
        let since = if self.session.is_new() { self.began } else { self.moved };
        let limit = if self.session.is_open() { limits.heartbeat * 3 } else { limits.hello };
        if cx.now.saturating_duration_since(since) > limit {
            cx.refused = self.session.is_new().then_some(Why::Told(Code::Silent));
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

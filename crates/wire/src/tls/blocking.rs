//! A socket that is waited for, with or without TLS: for tools and tests, which have nothing else to do meanwhile.

use std::io::{self, IoSlice, Read, Write};
use std::net::TcpStream;

use super::{Client, Failure, Session};
use crate::auth::Channel;

/// What is received at a time.
const RECEIVE_BYTES: usize = 256 << 10;

/// A connection that is read and written as if there were no TLS. Failures of TLS are [`Failure`]s within the errors.
pub struct Stream {
    socket: TcpStream,
    tls: Option<Tls>,
}

struct Tls {
    session: Session,
    received: Box<[u8]>,
    plain: Vec<u8>,
    /// Bytes of `plain` that were read.
    used: usize,
}

impl Stream {
    /// A socket as it is.
    #[must_use]
    pub fn plain(socket: TcpStream) -> Self {
        Self { socket, tls: None }
    }

    /// Waits for the handshake.
    ///
    /// # Errors
    /// The socket's, or TLS's.
    pub fn secure(socket: TcpStream, client: &Client) -> io::Result<Self> {
        let received = vec![0; RECEIVE_BYTES].into();
        let mut tls = Tls { session: client.connect(), received, plain: Vec::new(), used: 0 };
        while tls.session.is_handshaking() {
            tls.send_all(&socket)?;
            if tls.receive(&socket)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        tls.send_all(&socket)?;
        Ok(Self { socket, tls: Some(tls) })
    }

    /// What both ends of the session know; `None` without TLS.
    #[must_use]
    pub fn channel(&self) -> Option<Channel> {
        self.tls.as_ref().and_then(|tls| tls.session.channel())
    }

    /// The socket below.
    #[must_use]
    pub fn socket(&self) -> &TcpStream {
        &self.socket
    }
}

impl Tls {
    fn send_all(&mut self, mut socket: &TcpStream) -> io::Result<()> {
        while self.session.wants_to_send() {
            self.session.send(&mut socket)?;
        }
        Ok(())
    }

    /// Returns how many bytes came.
    fn receive(&mut self, mut socket: &TcpStream) -> io::Result<usize> {
        let received = socket.read(&mut self.received)?;
        let Self { session, plain, .. } = self;
        let opened = session.open(&self.received[..received], |more| plain.extend_from_slice(more));
        opened.map_err(|failure| {
            // That the other end learns why is a courtesy.
            let _ = session.send(&mut socket);
            io::Error::new(io::ErrorKind::InvalidData, failure)
        })?;
        Ok(received)
    }
}

impl Read for Stream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let Some(tls) = &mut self.tls else { return self.socket.read(into) };
        while tls.used == tls.plain.len() {
            tls.plain.clear();
            tls.used = 0;
            if tls.session.has_ended() || tls.receive(&self.socket)? == 0 {
                return Ok(0);
            }
        }
        let bytes = into.len().min(tls.plain.len() - tls.used);
        into[..bytes].copy_from_slice(&tls.plain[tls.used..tls.used + bytes]);
        tls.used += bytes;
        Ok(bytes)
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let Some(tls) = &mut self.tls else { return self.socket.write(bytes) };
        if bytes.is_empty() {
            return Ok(0);
        }
        let sealed = tls.session.seal(&[IoSlice::new(bytes)]);
        tls.send_all(&self.socket)?;
        Ok(sealed)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Failure {
    /// The failure that is in an error of [`Stream`].
    #[must_use]
    pub fn within(error: &io::Error) -> Option<&Self> {
        error.get_ref()?.downcast_ref()
    }
}

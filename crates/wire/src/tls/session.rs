//! One session: sealed bytes in and out.

use std::io::{self, BufRead, IoSlice, Write};

use rustls::Connection;

use super::Failure;
use crate::auth::Channel;

/// Plain bytes that are sealed before the socket must have taken them: sixteen pages and their heads, in one system call.
pub const SEAL_BYTES_MAX: usize = 72 << 10;
/// Bytes of a record that is not complete, at most: what a session may give beyond the bytes that it is just fed.
pub const PARTIAL_BYTES_MAX: usize = (16 << 10) + 2048 + 5;

/// What makes the secret that both ends know.
const CHANNEL_LABEL: &[u8] = b"EXPORTER-spillway-1";

/// One end of a connection under TLS.
pub struct Session {
    connection: Connection,
    /// Plain bytes in what was sealed last.
    sealed: usize,
    ended: bool,
}

impl Session {
    pub(super) fn new(mut connection: Connection) -> Self {
        connection.set_buffer_limit(Some(SEAL_BYTES_MAX));
        Self { connection, sealed: 0, ended: false }
    }

    /// Whether the other end is not yet verified: nothing of ours may be sent.
    #[must_use]
    pub fn is_handshaking(&self) -> bool {
        self.connection.is_handshaking()
    }

    /// Whether the other end said that nothing more will come.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// What both ends of this session know, and nobody else; `None` before the handshake is complete.
    #[must_use]
    pub fn channel(&self) -> Option<Channel> {
        self.connection.export_keying_material([0; 32], CHANNEL_LABEL, None).ok()
    }

    /// Deals with bytes from the socket, all of them; `take` gets what was in them. It may follow that something is to be
    /// sent, also after a failure: an alert.
    ///
    /// # Errors
    /// When the session is over. What `take` was given before is genuine.
    pub fn open(&mut self, sealed: &[u8], mut take: impl FnMut(&[u8])) -> Result<(), Failure> {
        let mut rest = sealed;
        while !rest.is_empty() && !self.ended {
            match self.connection.read_tls(&mut rest) {
                Ok(1..) => {}
                Ok(0) | Err(_) => return Err(Failure::TooLong),
            }
            let handshaking = self.connection.is_handshaking();
            let processed = self.connection.process_new_packets();
            let mut reader = self.connection.reader();
            while let Ok(plain @ [_, ..]) = reader.fill_buf() {
                take(plain);
                let bytes = plain.len();
                reader.consume(bytes);
            }
            self.ended = processed.map_err(|error| Failure::new(error, handshaking))?.peer_has_closed();
        }
        Ok(())
    }

    /// Seals bytes, up to [`SEAL_BYTES_MAX`]; how many. None while others wait to be sent, or the handshake goes on.
    pub fn seal(&mut self, plain: &[IoSlice<'_>]) -> usize {
        if self.is_handshaking() || self.wants_to_send() {
            return 0;
        }
        self.sealed = self.connection.writer().write_vectored(plain).unwrap_or(0);
        self.sealed
    }

    /// Whether there is something for the socket.
    #[must_use]
    pub fn wants_to_send(&self) -> bool {
        self.connection.wants_write()
    }

    /// Plain bytes that were sealed and may not be sent.
    #[must_use]
    pub fn unsent(&self) -> usize {
        if self.wants_to_send() { self.sealed } else { 0 }
    }

    /// Hands what is sealed to the socket, which may take a part.
    ///
    /// # Errors
    /// The socket's, or [`io::ErrorKind::WriteZero`] when it took nothing or there is nothing: so no loop goes on for ever.
    pub fn send(&mut self, socket: &mut dyn Write) -> io::Result<()> {
        match self.connection.write_tls(socket)? {
            0 => Err(io::ErrorKind::WriteZero.into()),
            _ => Ok(()),
        }
    }

    /// Says that nothing more will come.
    pub fn close(&mut self) {
        self.connection.send_close_notify();
    }
}

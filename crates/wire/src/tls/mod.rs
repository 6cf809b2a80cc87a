//! TLS between the bytes of this protocol and the socket: rustls, TLS 1.3 alone, without a socket of its own.
//!
//! Invariants: no byte of ours goes out, and none is taken as the other end's, before the handshake is complete and the
//! certificates that were asked for are verified. There are no session tickets, no resumption and no early data: each
//! connection proves everything anew. What was received is handed on at once, so nothing hides here from whoever waits for
//! the socket.
//!
//! Memory, for each session: a record at most that is not complete (18 KiB; a handshake message, 64 KiB), and
//! [`SEAL_BYTES_MAX`] that were sealed and not yet sent. For each record, of up to 16 KiB, rustls allocates a buffer and
//! frees it.

mod blocking;
mod failure;
mod files;
mod session;
mod settings;

pub use blocking::Stream;
pub use failure::Failure;
pub use files::FileError;
pub use session::{PARTIAL_BYTES_MAX, SEAL_BYTES_MAX, Session};
pub use settings::{Client, Identity, Server, Trust, is_name};

//! The header that every frame after the handshake starts with.
//!
//! ```text
//! request, 16 bytes:  body length u32 | kind u8 | class u8 | count u16 | id u32 | zero u32
//! answer, 24 bytes:   body length u32 | kind u8 | load u8  | count u16 | id u32 | flags u32 | free pages u64
//! ```
//!
//! An answer's flags: 1 = the server is leaving; zero in version 1.

use spillway_core::PAGE_BYTES;

use crate::bytes::Reader;
use crate::{BATCH_MAX, Malformed};

/// Bytes of a request's header.
pub const REQUEST_HEADER_BYTES: usize = 16;
/// Bytes of an answer's header.
pub const ANSWER_HEADER_BYTES: usize = 24;
/// Bytes that a put has for each page beside its content.
pub const PUT_ENTRY_BYTES: usize = 20;
/// Bytes that the answer to a get has for each page beside its content.
pub const GOT_ENTRY_BYTES: usize = 12;
/// Bytes of a key in a get.
pub const KEY_BYTES: usize = 8;
/// Bytes of a range in a free.
pub const RANGE_BYTES: usize = 12;
/// The longest body: a put of [`BATCH_MAX`] pages.
pub const BODY_BYTES_MAX: usize = BATCH_MAX * (PUT_ENTRY_BYTES + PAGE_BYTES);
/// The longest frame of either side.
pub const FRAME_BYTES_MAX: usize = ANSWER_HEADER_BYTES + BODY_BYTES_MAX;

/// What a frame asks or answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Keep pages.
    Put = 1,
    /// Give pages.
    Get = 2,
    /// Forget pages.
    Free = 3,
    /// Say how the server is.
    Status = 4,
    /// Say that the other end is there.
    Heartbeat = 5,
    /// The server's last word on a connection; only an answer.
    Goodbye = 6,
    /// Leave, or stay; from version 2 on.
    Leave = 7,
}

impl Kind {
    fn from_byte(byte: u8) -> Result<Self, Malformed> {
        Ok(match byte {
            1 => Self::Put,
            2 => Self::Get,
            3 => Self::Free,
            4 => Self::Status,
            5 => Self::Heartbeat,
            6 => Self::Goodbye,
            7 => Self::Leave,
            _ => return Err(Malformed("a frame's kind is 1 to 7")),
        })
    }

    fn to_byte(self) -> u8 {
        self as u8
    }
}

/// The parts that both headers have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) body_bytes: usize,
    pub(crate) kind: Kind,
    /// A request's class; an answer's load.
    pub(crate) byte: u8,
    pub(crate) count: u16,
    pub(crate) id: u32,
    /// Of an answer; a request has none.
    pub(crate) flags: u32,
}

impl Header {
    /// `None` while there are fewer bytes than a header has; the limits are checked as soon as it is there.
    pub(crate) fn decode(buffer: &[u8]) -> Result<Option<Self>, Malformed> {
        let Some(header) = buffer.first_chunk::<REQUEST_HEADER_BYTES>() else { return Ok(None) };
        let mut reader = Reader(header);
        let body_bytes = usize::try_from(reader.u32()?).unwrap_or(usize::MAX);
        let [kind, byte] = reader.array()?;
        let (count, id, flags) = (reader.u16()?, reader.u32()?, reader.u32()?);
        if body_bytes > BODY_BYTES_MAX || usize::from(count) > BATCH_MAX {
            return Err(Malformed("a frame has at most 64 pages"));
        }
        Ok(Some(Self { body_bytes, kind: Kind::from_byte(kind)?, byte, count, id, flags }))
    }

    pub(crate) fn encode(self, out: &mut Vec<u8>) {
        let body_bytes = u32::try_from(self.body_bytes).expect("encoders keep to BODY_BYTES_MAX");
        out.extend_from_slice(&body_bytes.to_le_bytes());
        out.extend_from_slice(&[self.kind.to_byte(), self.byte]);
        out.extend_from_slice(&self.count.to_le_bytes());
        out.extend_from_slice(&self.id.to_le_bytes());
        out.extend_from_slice(&self.flags.to_le_bytes());
    }
}

/// A batch's length as headers carry it.
///
/// # Panics
/// For none and for more than [`BATCH_MAX`]: the caller's bug.
pub(crate) fn count_of(items: usize) -> u16 {
    assert!((1..=BATCH_MAX).contains(&items), "a batch of {items}");
    u16::try_from(items).expect("at most BATCH_MAX")
}

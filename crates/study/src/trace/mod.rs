//! The trace file: docs/TRACE.md describes it to others.
//!
//! A header, then frames: length, checksum, records. Numbers in records are varints, times and pages differences to the
//! record before in the same frame; so each frame can be read on its own, and a garbled one is found out.

mod read;
mod write;

pub use read::Reader;
pub use write::Writer;

/// How a trace begins. The first byte is no text.
pub const MAGIC: [u8; 8] = *b"\xb5SPLTRC\n";

/// The version of the format that is written, and the only one that is read.
pub const VERSION: u8 = 1;

/// The longest payload of a frame in bytes: what a reader holds at once.
pub const FRAME_BYTES_MAX: usize = 64 << 10;

/// Bytes of a header.
pub const HEADER_BYTES: usize = 40;

/// The longest record: a tag and three numbers of 64 bits.
const RECORD_BYTES_MAX: usize = 1 + 3 * 10;

/// What a trace is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The length of a window of an exact trace in nanoseconds; zero for an ordinary one.
    pub window_ns: u64,
    /// The budget under which it was recorded in pages, or `u64::MAX` for none. What was local raised no fault.
    pub budget_pages: u64,
}

impl Header {
    fn encode(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8] = VERSION;
        // 9 to 12: reserved, zero.
        bytes[12..16].copy_from_slice(&PAGE_BYTES.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.window_ns.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.budget_pages.to_le_bytes());
        let sum = checksum(&bytes[..32]);
        bytes[32..36].copy_from_slice(&sum.to_le_bytes());
        bytes
    }
}

const PAGE_BYTES: u32 = 4096;
const _: () = assert!(PAGE_BYTES as usize == spillway_core::PAGE_BYTES);

/// FNV-1a, 32 bits: finds what a broken copy does to a file, and is nothing against those who want to deceive.
fn checksum(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |sum, &byte| (sum ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

/// What differences are taken to.
#[derive(Clone, Copy, Default)]
struct Before {
    time_ns: u64,
    page: u64,
}

/// Differences of either sign as small numbers.
fn zigzag(difference: i64) -> u64 {
    (difference << 1 ^ difference >> 63).cast_unsigned()
}

fn unzigzag(number: u64) -> i64 {
    (number >> 1).cast_signed() ^ -(number & 1).cast_signed()
}

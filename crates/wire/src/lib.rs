//! What a pager (the client) and a memory server say to each other. `docs/PROTOCOL.md` is the same in prose.
//!
//! A connection starts with a handshake ([`hello`], [`auth`]); then the client sends [`request`]s and the server
//! [`answer`]s, which carry the request's id and may come in another order. All numbers are little-endian.
//!
//! [`tls`] is what may lie between these bytes and the socket.
//!
//! Invariants: encoding appends to the caller's buffer, decoding borrows from it, and neither allocates beyond that.
//! Every length is checked against what is there and against a limit before it is used; no bytes make a decoder panic.
//! A frame that was decoded is consistent: its iterators cannot fail.
#![forbid(unsafe_code)]

pub mod answer;
pub mod auth;
mod bytes;
pub mod frame;
pub mod hello;
pub mod request;
pub mod tls;

use std::fmt;

use spillway_core::Page;
use twox_hash::XxHash3_64;

/// The latest version of this protocol.
pub const VERSION: u16 = 2;
/// The oldest that is spoken still: without servers that leave.
pub const VERSION_MIN: u16 = 1;
/// Pages, keys or ranges in a frame at most.
pub const BATCH_MAX: usize = 64;
/// Pages that the ranges of one [`request::RequestBody::Free`] may name in all: 64 MiB, a millisecond of work.
pub const FREE_PAGES_MAX: u32 = 16 << 10;

/// A page's name, chosen by the client and valid within its tenant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// Any number; pages that are neighbours should share it.
    pub region: u32,
    /// The page within the region.
    pub index: u32,
}

/// What a page holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content<'a> {
    /// Nothing but zeros: no bytes travel.
    Zero,
    /// These bytes.
    Bytes(&'a Page),
}

/// The checksum that travels and is stored with a page: XXH3-64 without a seed.
///
/// The client computes it before a put and verifies it after a get; it does not matter for pages of zeros.
#[must_use]
pub fn checksum(page: &Page) -> u64 {
    XxHash3_64::oneshot(page)
}

/// Bytes that are none of the protocol's: the connection cannot go on. The text names what was expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed(pub &'static str);

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the other end does not keep to the protocol ({}): use the same version of spillway on both", self.0)
    }
}

impl std::error::Error for Malformed {}

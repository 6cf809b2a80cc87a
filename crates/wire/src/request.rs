//! What clients ask.
//!
//! ```text
//! put    count times { region u32 | index u32 | checksum u64 | flags u32: 1 = zeros }, then the pages that are not zeros
//! get    count times { region u32 | index u32 }; the header's class: 0 = demand, 1 = prefetch
//! free   count times { region u32 | first index u32 | pages u32 }
//! status, heartbeat: no body
//! leave  u32: 1 = leave, 0 = stay
//! ```

use spillway_core::PAGE_BYTES;

use crate::bytes::{Reader, u32_at, u64_at};
use crate::frame::{Header, KEY_BYTES, Kind, PUT_ENTRY_BYTES, RANGE_BYTES, REQUEST_HEADER_BYTES, count_of};
use crate::{Content, FREE_PAGES_MAX, Key, Malformed};

const FLAG_ZERO: u32 = 1;

/// Who waits for a get.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Class {
    /// A thread of a target does: answered before everything that waits on the same connection.
    #[default]
    Demand,
    /// Nobody yet.
    Prefetch,
}

/// One page of a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PutPage<'a> {
    /// Its name; a page of that name is replaced.
    pub key: Key,
    /// [`crate::checksum`] of its bytes; any number for zeros.
    pub checksum: u64,
    /// What it holds.
    pub content: Content<'a>,
}

/// Pages of one region, next to each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// The first page.
    pub first: Key,
    /// How many, at least one; all ranges of a request together at most [`FREE_PAGES_MAX`].
    pub pages: u32,
}

/// A request that was decoded.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Chosen by the client, repeated in the answer.
    pub id: u32,
    /// What is asked.
    pub body: RequestBody<'a>,
}

/// What a request asks.
#[derive(Clone, Copy, Debug)]
pub enum RequestBody<'a> {
    /// Keep these pages.
    Put(Puts<'a>),
    /// Give these pages.
    Get(Class, Keys<'a>),
    /// Forget these pages.
    Free(Ranges<'a>),
    /// Say how the server is.
    Status,
    /// Say that the server is there.
    Heartbeat,
    /// Take no more pages and have clients move theirs, or do so no longer; from version 2 on.
    Leave(bool),
}

impl<'a> Request<'a> {
    /// The frame at the start of `buffer`, and its length in bytes. `None` while it is not there as a whole: the bytes
    /// there are within the limits so far, and no more than [`crate::frame::FRAME_BYTES_MAX`] will be needed.
    ///
    /// # Errors
    /// When the bytes are no request.
    pub fn decode(buffer: &'a [u8]) -> Result<Option<(Self, usize)>, Malformed> {
        let Some(header) = Header::decode(buffer)? else { return Ok(None) };
        if header.kind == Kind::Goodbye {
            return Err(Malformed("clients say no goodbye"));
        }
        if header.kind != Kind::Get && header.byte != 0 {
            return Err(Malformed("only gets have a class"));
        }
        if header.flags != 0 {
            return Err(Malformed("requests have no flags"));
        }
        let end = REQUEST_HEADER_BYTES + header.body_bytes;
        let Some(body) = buffer.get(REQUEST_HEADER_BYTES..end) else { return Ok(None) };
        let body = RequestBody::decode(header, body)?;
        Ok(Some((Self { id: header.id, body }, end)))
    }
}

/// Bytes of the frame at the start of `buffer` in all, or of its header while that is not there as a whole.
///
/// # Errors
/// When the header is none of a request.
pub fn frame_bytes(buffer: &[u8]) -> Result<usize, Malformed> {
    Ok(REQUEST_HEADER_BYTES + Header::decode(buffer)?.map_or(0, |header| header.body_bytes))
}

impl<'a> RequestBody<'a> {
    fn decode(header: Header, body: &'a [u8]) -> Result<Self, Malformed> {
        let count = usize::from(header.count);
        if matches!(header.kind, Kind::Status | Kind::Heartbeat | Kind::Leave) != (count == 0) {
            return Err(Malformed("a batch has something in it, and nothing else has"));
        }
        let mut reader = Reader(body);
        let body = match header.kind {
            Kind::Put => {
                let entries = reader.take(count * PUT_ENTRY_BYTES)?;
                let puts = Puts { entries, pages: reader.0 };
                let flags = entries.chunks_exact(PUT_ENTRY_BYTES).map(|entry| u32_at(entry, 16));
                if flags.clone().any(|flags| flags & !FLAG_ZERO != 0) {
                    return Err(Malformed("a page's flags are 0 or 1"));
                }
                reader.take(flags.filter(|flags| *flags == 0).count() * PAGE_BYTES)?;
                Self::Put(puts)
            }
            Kind::Get => {
                let class = match header.byte {
                    0 => Class::Demand,
                    1 => Class::Prefetch,
                    _ => return Err(Malformed("a get's class is 0 or 1")),
                };
                Self::Get(class, Keys(reader.take(count * KEY_BYTES)?))
            }
            Kind::Free => {
                let ranges = Ranges(reader.take(count * RANGE_BYTES)?);
                ranges.check()?;
                Self::Free(ranges)
            }
            Kind::Status => Self::Status,
            Kind::Heartbeat => Self::Heartbeat,
            Kind::Leave => match reader.u32()? {
                0 => Self::Leave(false),
                1 => Self::Leave(true),
                _ => return Err(Malformed("a server leaves, 1, or stays, 0")),
            },
            Kind::Goodbye => return Err(Malformed("clients say no goodbye")),
        };
        reader.end()?;
        Ok(body)
    }
}

/// The pages of a put, in the order of the request.
#[derive(Clone, Copy, Debug)]
pub struct Puts<'a> {
    entries: &'a [u8],
    pages: &'a [u8],
}

impl<'a> Iterator for Puts<'a> {
    type Item = PutPage<'a>;

    fn next(&mut self) -> Option<PutPage<'a>> {
        let (entry, rest) = self.entries.split_at_checked(PUT_ENTRY_BYTES)?;
        self.entries = rest;
        let content = if u32_at(entry, 16) & FLAG_ZERO != 0 {
            Content::Zero
        } else {
            let (page, rest) = self.pages.split_first_chunk::<PAGE_BYTES>()?;
            self.pages = rest;
            Content::Bytes(page)
        };
        Some(PutPage { key: key_at(entry), checksum: u64_at(entry, 8), content })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.entries.len() / PUT_ENTRY_BYTES;
        (left, Some(left))
    }
}

impl ExactSizeIterator for Puts<'_> {}

/// The keys of a get, in the order of the request.
#[derive(Clone, Copy, Debug)]
pub struct Keys<'a>(&'a [u8]);

impl Iterator for Keys<'_> {
    type Item = Key;

    fn next(&mut self) -> Option<Key> {
        let (key, rest) = self.0.split_at_checked(KEY_BYTES)?;
        self.0 = rest;
        Some(key_at(key))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.0.len() / KEY_BYTES;
        (left, Some(left))
    }
}

impl ExactSizeIterator for Keys<'_> {}

/// The ranges of a free.
#[derive(Clone, Copy, Debug)]
pub struct Ranges<'a>(&'a [u8]);

impl Ranges<'_> {
    fn check(self) -> Result<(), Malformed> {
        let mut left = FREE_PAGES_MAX;
        for Range { first, pages } in self {
            left = left.checked_sub(pages).ok_or(Malformed("a request frees at most 16384 pages"))?;
            if pages == 0 || first.index.checked_add(pages - 1).is_none() {
                return Err(Malformed("a range has pages, and ends within its region"));
            }
        }
        Ok(())
    }
}

impl Iterator for Ranges<'_> {
    type Item = Range;

    fn next(&mut self) -> Option<Range> {
        let (range, rest) = self.0.split_at_checked(RANGE_BYTES)?;
        self.0 = rest;
        Some(Range { first: key_at(range), pages: u32_at(range, 8) })
    }
}

fn key_at(bytes: &[u8]) -> Key {
    Key { region: u32_at(bytes, 0), index: u32_at(bytes, 4) }
}

fn push_key(out: &mut Vec<u8>, key: Key) {
    out.extend_from_slice(&key.region.to_le_bytes());
    out.extend_from_slice(&key.index.to_le_bytes());
}

/// Appends a put of 1 to [`crate::BATCH_MAX`] pages.
///
/// # Panics
/// For fewer or more pages.
pub fn put(out: &mut Vec<u8>, id: u32, pages: &[PutPage<'_>]) {
    put_head(out, id, pages);
    for page in pages {
        if let Content::Bytes(bytes) = page.content {
            out.extend_from_slice(bytes);
        }
    }
}

/// Appends all of a put but the bytes of its pages, which the caller sends after it in the same order, without those
/// of zeros.
///
/// # Panics
/// As [`put`].
pub fn put_head(out: &mut Vec<u8>, id: u32, pages: &[PutPage<'_>]) {
    let with_bytes = pages.iter().filter(|page| page.content != Content::Zero).count();
    let body_bytes = pages.len() * PUT_ENTRY_BYTES + with_bytes * PAGE_BYTES;
    Header { body_bytes, kind: Kind::Put, byte: 0, count: count_of(pages.len()), id, flags: 0 }.encode(out);
    for page in pages {
        push_key(out, page.key);
        out.extend_from_slice(&page.checksum.to_le_bytes());
        let flags = if page.content == Content::Zero { FLAG_ZERO } else { 0 };
        out.extend_from_slice(&flags.to_le_bytes());
    }
}

/// Appends a get of 1 to [`crate::BATCH_MAX`] pages.
///
/// # Panics
/// For fewer or more keys.
pub fn get(out: &mut Vec<u8>, id: u32, class: Class, keys: &[Key]) {
    let byte = match class {
        Class::Demand => 0,
        Class::Prefetch => 1,
    };
    let body_bytes = keys.len() * KEY_BYTES;
    Header { body_bytes, kind: Kind::Get, byte, count: count_of(keys.len()), id, flags: 0 }.encode(out);
    keys.iter().for_each(|key| push_key(out, *key));
}

/// Appends a free of 1 to [`crate::BATCH_MAX`] ranges, which together name at most [`FREE_PAGES_MAX`] pages.
///
/// # Panics
/// For fewer or more ranges.
pub fn free(out: &mut Vec<u8>, id: u32, ranges: &[Range]) {
    let body_bytes = ranges.len() * RANGE_BYTES;
    Header { body_bytes, kind: Kind::Free, byte: 0, count: count_of(ranges.len()), id, flags: 0 }.encode(out);
    for range in ranges {
        push_key(out, range.first);
        out.extend_from_slice(&range.pages.to_le_bytes());
    }
}

/// Appends a request for the server's status.
pub fn status(out: &mut Vec<u8>, id: u32) {
    Header { body_bytes: 0, kind: Kind::Status, byte: 0, count: 0, id, flags: 0 }.encode(out);
}

/// Appends a heartbeat.
pub fn heartbeat(out: &mut Vec<u8>, id: u32) {
    Header { body_bytes: 0, kind: Kind::Heartbeat, byte: 0, count: 0, id, flags: 0 }.encode(out);
}

/// Appends a request to leave, or to stay.
pub fn leave(out: &mut Vec<u8>, id: u32, leaves: bool) {
    Header { body_bytes: 4, kind: Kind::Leave, byte: 0, count: 0, id, flags: 0 }.encode(out);
    out.extend_from_slice(&u32::from(leaves).to_le_bytes());
}

//! Writes traces, a frame at a time.

use std::io::{self, Write};

use super::{Before, FRAME_BYTES_MAX, Header, RECORD_BYTES_MAX, checksum, zigzag};
use crate::record::{Raw, Record};

/// Writes a trace as it is recorded. What was pushed is in the file after [`Writer::flush`].
pub struct Writer<W: Write> {
    to: W,
    frame: Vec<u8>,
    before: Before,
}

impl<W: Write> Writer<W> {
    /// Begins a trace.
    ///
    /// # Errors
    /// When `to` does not take the header.
    pub fn new(mut to: W, header: Header) -> io::Result<Self> {
        to.write_all(&header.encode())?;
        Ok(Self { to, frame: Vec::with_capacity(FRAME_BYTES_MAX), before: Before::default() })
    }

    /// Adds a record. Times are not to fall: one that does is written as the time before.
    ///
    /// # Errors
    /// When a frame is full and cannot be written.
    pub fn push(&mut self, record: &Record) -> io::Result<()> {
        let Raw { tag, page, value } = record.what.into();
        self.frame.push(tag);
        varint(&mut self.frame, record.time_ns.saturating_sub(self.before.time_ns));
        self.before.time_ns = self.before.time_ns.max(record.time_ns);
        if Raw::has_page(tag) {
            varint(&mut self.frame, zigzag(page.cast_signed() - self.before.page.cast_signed()));
            self.before.page = page;
        }
        if Raw::has_value(tag) {
            varint(&mut self.frame, value);
        }
        if self.frame.len() > FRAME_BYTES_MAX - RECORD_BYTES_MAX { self.flush() } else { Ok(()) }
    }

    /// Writes what was pushed.
    ///
    /// # Errors
    /// When that fails.
    pub fn flush(&mut self) -> io::Result<()> {
        if !self.frame.is_empty() {
            let len = u32::try_from(self.frame.len()).expect("frames are short");
            self.to.write_all(&len.to_le_bytes())?;
            self.to.write_all(&checksum(&self.frame).to_le_bytes())?;
            self.to.write_all(&self.frame)?;
            self.frame.clear();
            self.before = Before::default();
        }
        self.to.flush()
    }

    /// Where it is written to.
    pub fn get_mut(&mut self) -> &mut W {
        &mut self.to
    }
}

fn varint(into: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        into.push((number & 0x7f) as u8 | 0x80);
        number >>= 7;
    }
    into.push((number & 0x7f) as u8);
}

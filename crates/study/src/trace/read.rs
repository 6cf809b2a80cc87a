//! Reads traces, a frame at a time. Bytes come from anywhere.

use std::io::{self, Read};

use super::{Before, FRAME_BYTES_MAX, HEADER_BYTES, Header, MAGIC, PAGE_BYTES, VERSION, checksum, unzigzag};
use crate::error::Error;
use crate::record::{PAGES_MAX, Raw, Record, What};

/// A trace that is being read.
pub struct Reader<R: Read> {
    from: R,
    header: Header,
    frame: Vec<u8>,
    /// How far the frame was read.
    at: usize,
    /// Where the frame begins in the file.
    frame_at: u64,
    before: Before,
    last_ns: u64,
    ended: bool,
    truncated: bool,
}

impl<R: Read> Reader<R> {
    /// Reads the header. `None` when this is no trace of ours.
    ///
    /// # Errors
    /// When it is one that cannot be read.
    pub fn new(mut from: R) -> Result<Option<Self>, Error> {
        let mut bytes = [0; HEADER_BYTES];
        let got = read_up_to(&mut from, &mut bytes)?;
        if got < MAGIC.len() || bytes[..8] != MAGIC {
            return Ok(None);
        }
        let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let half = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        if got > 8 && bytes[8] != VERSION {
            return Err(Error::Version(bytes[8]));
        }
        if got < HEADER_BYTES || half(32) != checksum(&bytes[..32]) {
            return Err(Error::Garbled(0));
        }
        if half(12) != PAGE_BYTES {
            return Err(Error::PageBytes(half(12)));
        }
        Ok(Some(Self {
            from,
            header: Header { window_ns: number(16), budget_pages: number(24) },
            frame: Vec::new(),
            at: 0,
            frame_at: HEADER_BYTES as u64,
            before: Before::default(),
            last_ns: 0,
            ended: false,
            truncated: false,
        }))
    }

    /// What the trace is about.
    pub fn header(&self) -> Header {
        self.header
    }

    /// Whether the trace ended without its last record: who wrote it was stopped. Known at the end.
    pub fn is_truncated(&self) -> bool {
        self.truncated
    }

    /// The next record; `None` at the end.
    ///
    /// # Errors
    /// When what follows cannot be.
    pub fn next_record(&mut self) -> Result<Option<Record>, Error> {
        if self.at == self.frame.len() && !self.next_frame()? {
            self.truncated = !self.ended;
            return Ok(None);
        }
        let garbled = Error::Garbled(self.frame_at + 8 + self.at as u64);
        match self.decode() {
            // Frames are written in the order of time, and nothing follows the end.
            Some(record) if !self.ended && record.time_ns >= self.last_ns => {
                self.last_ns = record.time_ns;
                self.ended = record.what == What::End;
                Ok(Some(record))
            }
            _ => Err(garbled),
        }
    }

    /// False at the end, also when the last frame is not whole.
    fn next_frame(&mut self) -> Result<bool, Error> {
        self.frame_at += if self.frame.is_empty() { 0 } else { 8 + self.frame.len() as u64 };
        (self.at, self.before) = (0, Before::default());
        self.frame.clear();
        let mut head = [0; 8];
        if read_up_to(&mut self.from, &mut head)? < head.len() {
            return Ok(false);
        }
        let [l0, l1, l2, l3, s0, s1, s2, s3] = head;
        let len = usize::try_from(u32::from_le_bytes([l0, l1, l2, l3])).unwrap_or(usize::MAX);
        if !(1..=FRAME_BYTES_MAX).contains(&len) {
            return Err(Error::Garbled(self.frame_at));
        }
        self.frame.resize(len, 0);
        if read_up_to(&mut self.from, &mut self.frame)? < len {
            self.frame.clear();
            return Ok(false);
        }
        if checksum(&self.frame) != u32::from_le_bytes([s0, s1, s2, s3]) {
            return Err(Error::Garbled(self.frame_at));
        }
        Ok(true)
    }

    fn decode(&mut self) -> Option<Record> {
        let tag = *self.frame.get(self.at)?;
        self.at += 1;
        let time_ns = self.before.time_ns.checked_add(self.varint()?)?;
        let mut raw = Raw { tag, page: 0, value: 0 };
        if Raw::has_page(tag) {
            raw.page =
                self.before.page.checked_add_signed(unzigzag(self.varint()?)).filter(|page| *page < PAGES_MAX)?;
            self.before.page = raw.page;
        }
        if Raw::has_value(tag) {
            raw.value = self.varint()?;
        }
        self.before.time_ns = time_ns;
        Some(Record { time_ns, what: raw.what()? })
    }

    fn varint(&mut self) -> Option<u64> {
        let mut number = 0_u64;
        for shift in (0..64).step_by(7) {
            let byte = *self.frame.get(self.at)?;
            self.at += 1;
            let bits = u64::from(byte & 0x7f);
            if bits << shift >> shift != bits {
                return None;
            }
            number |= bits << shift;
            if byte & 0x80 == 0 {
                return Some(number);
            }
        }
        None
    }
}

/// Fills `bytes` as far as there is anything.
fn read_up_to(from: &mut impl Read, bytes: &mut [u8]) -> io::Result<usize> {
    let mut got = 0;
    while got < bytes.len() {
        match from.read(&mut bytes[got..]) {
            Ok(0) => break,
            Ok(count) => got += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(got)
}

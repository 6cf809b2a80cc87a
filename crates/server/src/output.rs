//! What a connection has still to send: heads in a buffer, pages where they lie.

use std::collections::VecDeque;
use std::io::IoSlice;

use spillway_core::Page;

use crate::pool::Pool;
use crate::sys::pages::Pin;

/// Slices handed to the kernel at a time: a full batch and its head, a few times over. The kernel takes 1024.
pub(crate) const SLICES_MAX: usize = 256;

enum Part {
    /// So many bytes of the buffer.
    Head(usize),
    /// A page of the arena.
    Page(Pin),
    /// A page that was read from the spill file, or unpacked.
    Own(Box<Page>),
}

/// A queue of bytes.
#[derive(Default)]
pub(crate) struct Output {
    heads: Vec<u8>,
    /// Bytes of `heads` that were sent.
    heads_sent: usize,
    parts: VecDeque<Part>,
    /// Bytes of the first part that were sent.
    part_sent: usize,
    queued: usize,
}

impl Output {
    /// Bytes that wait.
    pub(crate) fn queued(&self) -> usize {
        self.queued
    }

    /// Appends what `write` appends to a buffer.
    pub(crate) fn head(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        let before = self.heads.len();
        write(&mut self.heads);
        let added = self.heads.len() - before;
        self.queued += added;
        match self.parts.back_mut() {
            Some(Part::Head(len)) => *len += added,
            _ => self.parts.push_back(Part::Head(added)),
        }
    }

    /// Appends a page; the pin is held until it was sent, unless the page must be unpacked.
    pub(crate) fn page(&mut self, pin: Pin, pool: &Pool) {
        match pool.unpacked(pin) {
            Ok(page) => self.own(page),
            Err(pin) => {
                self.queued += size_of::<Page>();
                self.parts.push_back(Part::Page(pin));
            }
        }
    }

    /// Appends a page that is nowhere else.
    pub(crate) fn own(&mut self, page: Box<Page>) {
        self.queued += size_of::<Page>();
        self.parts.push_back(Part::Own(page));
    }

    /// The next bytes, into as many slices as there is room for.
    pub(crate) fn slices<'a>(&'a self, pool: &'a Pool, into: &mut [IoSlice<'a>]) -> usize {
        let mut head_at = self.heads_sent;
        let mut skip = self.part_sent;
        let mut count = 0;
        for (part, slot) in self.parts.iter().zip(into) {
            let bytes: &[u8] = match part {
                Part::Head(len) => {
                    let end = head_at + len - skip;
                    let bytes = &self.heads[head_at..end];
                    head_at = end;
                    *slot = IoSlice::new(bytes);
                    skip = 0;
                    count += 1;
                    continue;
                }
                Part::Page(pin) => pool.pages.bytes(pin),
                Part::Own(page) => &**page,
            };
            *slot = IoSlice::new(&bytes[skip..]);
            skip = 0;
            count += 1;
        }
        count
    }

    /// The first bytes were sent.
    pub(crate) fn advance(&mut self, mut sent: usize, pool: &Pool) {
        self.queued -= sent;
        while sent > 0
            && let Some(part) = self.parts.front()
        {
            let len = match part {
                Part::Head(len) => *len,
                Part::Page(_) | Part::Own(_) => size_of::<Page>(),
            };
            let now = sent.min(len - self.part_sent);
            if matches!(part, Part::Head(_)) {
                self.heads_sent += now;
            }
            sent -= now;
            self.part_sent += now;
            if self.part_sent == len {
                self.part_sent = 0;
                if let Some(Part::Page(pin)) = self.parts.pop_front() {
                    pool.unpin(pin);
                }
            }
        }
        if self.parts.is_empty() {
            self.heads.clear();
            self.heads_sent = 0;
        } else if self.heads_sent > 64 << 10 {
            self.heads.drain(..self.heads_sent);
            self.heads_sent = 0;
        }
    }

    /// Forgets all that waits.
    pub(crate) fn clear(&mut self, pool: &Pool) {
        for part in self.parts.drain(..) {
            if let Part::Page(pin) = part {
                pool.unpin(pin);
            }
        }
        *self = Self::default();
    }
}

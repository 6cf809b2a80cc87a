//! The driver's reader: what was captured leaves staging some time later. A fault on it is served from there meanwhile.

use spillway_core::PageIndex;
use spillway_core::evict::Bytes;
use spillway_core::page::BufferIndex;

use crate::driver::Driver;
use crate::mutation::Mutation;

/// How long reading may take, in steps.
const READING_MOST: u64 = 40;

/// Pages that are being read.
#[derive(Clone, Debug, Default)]
pub struct Reader {
    /// Where they go, and what they hold in staging.
    pages: Vec<(PageIndex, BufferIndex, u64)>,
    until: u64,
}

impl Reader {
    /// Whether nothing may be captured, as it would take the place of what is being read.
    pub fn is_at_work(&self) -> bool {
        !self.pages.is_empty()
    }

    /// Begins to read this, which is in staging: for a while that differs from time to time.
    pub fn begin(&mut self, pages: Vec<(PageIndex, BufferIndex, u64)>, now: u64) {
        // Whoever captures meanwhile has dropped what was there.
        self.pages.iter_mut().for_each(|(_, _, value)| *value = 0);
        self.pages.extend(pages);
        self.until = now + now % READING_MOST;
    }
}

impl Driver {
    /// Takes over what was read, if it has been, or must be. True when nothing is being read any more.
    pub(crate) fn finish_reading(&mut self, now: u64, must: bool) -> bool {
        if now < self.reader.until && !must {
            return !self.reader.is_at_work();
        }
        for (page, buffer, value) in std::mem::take(&mut self.reader.pages) {
            self.buffers[buffer.0 as usize] = value;
            self.core.read(page, buffer, if value == 0 { Bytes::Zero } else { Bytes::Here });
        }
        true
    }

    /// What a page holds that left its target for this buffer.
    pub(crate) fn buffered_value(&self, buffer: BufferIndex) -> u64 {
        let being_read = self.reader.pages.iter().rev().find(|(_, its, _)| *its == buffer);
        match being_read.filter(|_| !self.is(Mutation::StealUnread)) {
            Some((_, _, value)) => *value,
            None => self.buffers[buffer.0 as usize],
        }
    }
}

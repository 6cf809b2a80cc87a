//! The driver's reader: what was captured leaves staging some time later. A fault on it is served from there meanwhile.
//! Some of it is compared with its clean copy on the way, if the store answers at once.

use spillway_core::evict::Bytes;
use spillway_core::page::{BufferIndex, HandleBits};
use spillway_core::{PageIndex, TargetId};

use crate::driver::Driver;
use crate::mutation::Mutation;

/// How long reading may take, in steps.
const READING_MOST: u64 = 40;

/// One batch in so many is not compared.
const NOT_COMPARED: u64 = 3;

/// What a buffer holds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Buffered {
    /// The page.
    pub value: u64,
    /// The copy in the store that was found to hold the same.
    pub same_as: Option<HandleBits>,
}

/// Pages that are being read.
#[derive(Clone, Debug, Default)]
pub struct Reader {
    /// Where they go, and what they hold in staging.
    pages: Vec<(PageIndex, BufferIndex, Buffered)>,
    /// Whose they are.
    of: Option<TargetId>,
    until: u64,
}

impl Reader {
    /// Whether nothing may be captured, as it would take the place of what is being read.
    pub fn is_at_work(&self) -> bool {
        !self.pages.is_empty()
    }

    /// Begins to read this, which is in staging: for a while that differs from time to time.
    fn begin(&mut self, of: TargetId, pages: impl Iterator<Item = (PageIndex, BufferIndex, Buffered)>, now: u64) {
        // Whoever captures meanwhile has dropped what was there.
        self.pages.iter_mut().for_each(|(_, _, buffered)| buffered.value = 0);
        self.pages.extend(pages);
        self.of = Some(of);
        self.until = now + now % READING_MOST;
    }
}

impl Driver {
    /// Begins to read what was captured: page, buffer, and what it holds.
    pub(crate) fn begin_reading(&mut self, of: TargetId, staged: &[(PageIndex, BufferIndex, u64)], now: u64) {
        let compares = !self.store.answers_later() && !now.is_multiple_of(NOT_COMPARED);
        let (core, store) = (&self.core, &self.store);
        let looked_at = staged.iter().map(|&(page, buffer, value)| {
            let clean = core.handle_of(page).filter(|clean| compares && store.holds(*clean, value));
            (page, buffer, Buffered { value, same_as: clean })
        });
        self.reader.begin(of, looked_at, now);
        self.batches.entry(of).and_modify(|batch| batch.collected = true);
    }

    /// Takes over what was read, if it has been, or must be. True when nothing is being read any more.
    pub(crate) fn finish_reading(&mut self, now: u64, must: bool) -> bool {
        if now < self.reader.until && !must {
            return !self.reader.is_at_work();
        }
        if !self.reader.is_at_work() {
            return true;
        }
        let of = self.reader.of.expect("someone's pages are being read");
        if self.is(Mutation::ReadTooEarly) {
            self.batches.remove(&of);
        }
        for (page, buffer, mut buffered) in std::mem::take(&mut self.reader.pages) {
            self.point();
            let (held, value) = (&mut self.buffers[buffer.0 as usize], buffered.value);
            if self.mutation == Some(Mutation::TrustOldComparison) {
                buffered.same_as = buffered.same_as.or(held.same_as);
            }
            *held = buffered;
            self.core.read(page, buffer, if value == 0 { Bytes::Zero } else { Bytes::Here });
        }
        self.point();
        self.batches.remove(&of);
        true
    }

    /// What a page holds that left its target for this buffer.
    pub(crate) fn buffered_value(&self, buffer: BufferIndex) -> u64 {
        let being_read = self.reader.pages.iter().rev().find(|(_, its, _)| *its == buffer);
        match being_read.filter(|_| !self.is(Mutation::StealUnread)) {
            Some((_, _, buffered)) => buffered.value,
            None => self.buffers[buffer.0 as usize].value,
        }
    }
}

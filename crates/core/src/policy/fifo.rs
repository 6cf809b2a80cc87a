//! FIFO, the order of arrival; and LRU, as far as it can be seen: the order of the last fault (FluidMem's list).
//!
//! They differ in a page that comes back from a buffer. To FIFO it arrived long ago and keeps its turn: it is the next to
//! leave, and only one that was in the store, or was given up, arrives anew. LRU believes in that re-reference: the page goes
//! behind all others. True LRU would need to see every reference; while a page is in its target none is seen.

use super::queues::{End, Queues};
use super::{Arrival, Pages, Policy};
use crate::units::PageIndex;

const ALL: usize = 0;

/// See the module's documentation.
pub struct Fifo {
    queue: Queues,
    /// Whether it is the last fault that counts: LRU.
    by_last_fault: bool,
}

impl Fifo {
    /// FIFO.
    pub fn by_arrival() -> Self {
        Self { queue: Queues::default(), by_last_fault: false }
    }

    /// LRU.
    pub fn by_last_fault() -> Self {
        Self { queue: Queues::default(), by_last_fault: true }
    }
}

impl Policy for Fifo {
    fn next(&mut self, _: &mut Pages<'_>) -> Option<PageIndex> {
        self.queue.give_out_oldest(ALL)
    }

    fn queues(&self) -> Option<&Queues> {
        Some(&self.queue)
    }

    fn queues_mut(&mut self) -> Option<&mut Queues> {
        Some(&mut self.queue)
    }

    fn arrived(&mut self, page: PageIndex, how: Arrival) {
        let end = if how == Arrival::Buffer && !self.by_last_fault { End::Oldest } else { End::Newest };
        self.queue.remove(page);
        self.queue.push(ALL, end, page, 0);
    }

    fn stretched(&mut self, page: PageIndex) {
        if self.by_last_fault {
            self.queue.renew(page, ALL);
        }
    }
}

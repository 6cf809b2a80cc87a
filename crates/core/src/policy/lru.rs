//! LRU, as far as it can be seen: the order of the last fault (FluidMem's list).
//!
//! True LRU would need to see every reference. While a page is in its target none is seen; one that comes back, from a
//! buffer or from the store, goes behind all others. So this is FIFO that believes in re-references.

use super::queues::{End, Queues};
use super::{Arrival, Pages, Policy};
use crate::units::PageIndex;

const ALL: usize = 0;

/// See the module's documentation.
#[derive(Default)]
pub struct Lru(Queues);

impl Policy for Lru {
    fn next(&mut self, _: &mut Pages<'_>) -> Option<PageIndex> {
        self.0.give_out_oldest(ALL)
    }

    fn queues(&self) -> Option<&Queues> {
        Some(&self.0)
    }

    fn queues_mut(&mut self) -> Option<&mut Queues> {
        Some(&mut self.0)
    }

    fn arrived(&mut self, page: PageIndex, _: Arrival) {
        self.0.remove(page);
        self.0.push(ALL, End::Newest, page, 0);
    }

    fn stretched(&mut self, page: PageIndex) {
        self.0.renew(page, ALL);
    }
}

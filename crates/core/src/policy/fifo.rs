//! FIFO: the order of arrival.
//!
//! A page that comes back from a buffer arrived long ago and keeps its turn: it is the next to leave. Only one that was in
//! the store, or was given up, arrives anew.

use super::queues::{End, Queues};
use super::{Arrival, Pages, Policy};
use crate::units::PageIndex;

const ALL: usize = 0;

/// See the module's documentation.
#[derive(Default)]
pub struct Fifo(Queues);

impl Policy for Fifo {
    fn next(&mut self, _: &mut Pages<'_>) -> Option<PageIndex> {
        self.0.give_out_oldest(ALL)
    }

    fn queues(&self) -> Option<&Queues> {
        Some(&self.0)
    }

    fn queues_mut(&mut self) -> Option<&mut Queues> {
        Some(&mut self.0)
    }

    fn arrived(&mut self, page: PageIndex, how: Arrival) {
        let end = if how == Arrival::Buffer { End::Oldest } else { End::Newest };
        self.0.remove(page);
        self.0.push(ALL, end, page, 0);
    }
}

//! SIEVE (Zhang et al., NSDI 2024): one queue in the order of arrival, and a hand that goes from the oldest to the newest page
//! and round again. It takes pages without a mark, and takes the marks of the others.
//!
//! The paper marks a page on every hit. What can be seen here is a page that is touched while it waits in a buffer: it is
//! marked, and takes up its old place, just behind the hand. What is fetched from the store is new.

use super::queues::{End, Queues};
use super::{Arrival, Pages, Policy, Refusal};
use crate::units::PageIndex;

const ALL: usize = 0;

/// See the module's documentation.
#[derive(Default)]
pub struct Sieve {
    queues: Queues,
    /// The page to be looked at next; none: the oldest.
    hand: Option<PageIndex>,
}

impl Sieve {
    /// `page` leaves the queue: the hand must not stay with it.
    fn leave(&mut self, page: PageIndex) -> Option<(usize, u8)> {
        if self.hand == Some(page) {
            self.hand = self.queues.after(page);
        }
        self.queues.remove(page)
    }

    /// Behind the hand, which has been there.
    fn put_behind_hand(&mut self, page: PageIndex, mark: u8) {
        match self.hand {
            Some(hand) => self.queues.push_before(hand, page, mark),
            // It is about to begin anew: behind it is the new end.
            None => self.queues.push(ALL, End::Newest, page, mark),
        }
    }
}

impl Policy for Sieve {
    fn next(&mut self, _: &mut Pages<'_>) -> Option<PageIndex> {
        loop {
            let page = self.hand.or_else(|| self.queues.oldest(ALL))?;
            self.hand = self.queues.after(page);
            match self.queues.find(page) {
                Some((_, 1..)) => self.queues.set_mark(page, 0),
                _ => return Some(self.queues.give_out(page)),
            }
        }
    }

    fn queues(&self) -> Option<&Queues> {
        Some(&self.queues)
    }

    fn queues_mut(&mut self) -> Option<&mut Queues> {
        Some(&mut self.queues)
    }

    fn arrived(&mut self, page: PageIndex, how: Arrival) {
        self.leave(page);
        if how == Arrival::Buffer {
            self.put_behind_hand(page, 1);
        } else {
            self.queues.push(ALL, End::Newest, page, 0);
        }
    }

    fn gone(&mut self, page: PageIndex) {
        self.leave(page);
    }

    fn refused(&mut self, page: PageIndex, why: Refusal) {
        if !self.queues.is_out(page) {
            return;
        }
        self.queues.remove(page);
        self.put_behind_hand(page, 0);
        if why == Refusal::Untried {
            self.hand = Some(page);
        }
    }
}

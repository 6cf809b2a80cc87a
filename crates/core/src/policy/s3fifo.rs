//! S3-FIFO (Yang et al., SOSP 2023): a small queue on trial, a main queue, and a ghost queue of what left the small one.
//!
//! The paper counts hits. A page in its target raises no fault, so the hits here are those that can be seen: a page that is
//! touched while it waits in a buffer, and one that is fetched again while its ghost is remembered. Either has passed its
//! trial and enters the main queue; the former gets another round there. There are never more ghosts than pages in
//! the target: what the paper's cache of the same size remembers.

use super::queues::{End, Queues};
use super::{Arrival, Pages, Policy, Refusal};
use crate::units::PageIndex;

const SMALL: usize = 0;
const MAIN: usize = 1;
const GHOST: usize = 2;

/// The small queue's share; the paper's.
const SMALL_PERCENT: u64 = 10;

/// See the module's documentation.
#[derive(Default)]
pub struct S3Fifo(Queues);

impl Policy for S3Fifo {
    fn next(&mut self, _: &mut Pages<'_>) -> Option<PageIndex> {
        let all = self.0.len(SMALL) + self.0.len(MAIN) + self.0.out();
        if self.0.len(SMALL) * 100 > all * SMALL_PERCENT || self.0.len(MAIN) == 0 {
            return self.0.give_out_oldest(SMALL);
        }
        while let Some(page) = self.0.oldest(MAIN) {
            match self.0.find(page) {
                Some((_, rounds @ 1..)) => self.0.turn_over(MAIN, MAIN, rounds - 1),
                _ => return Some(self.0.give_out(page)),
            }
        }
        None
    }

    fn queues(&self) -> Option<&Queues> {
        Some(&self.0)
    }

    fn queues_mut(&mut self) -> Option<&mut Queues> {
        Some(&mut self.0)
    }

    fn refused(&mut self, page: PageIndex, why: Refusal) {
        self.0.refused(page, why, |queue| if queue == SMALL { MAIN } else { SMALL });
    }

    fn arrived(&mut self, page: PageIndex, how: Arrival) {
        let was_ghost = self.0.remove(page).is_some_and(|(queue, _)| queue == GHOST);
        match how {
            Arrival::Buffer => self.0.push(MAIN, End::Newest, page, 1),
            // A neighbour is brought along unasked: no hit.
            Arrival::Store if was_ghost => self.0.push(MAIN, End::Newest, page, 0),
            _ => self.0.push(SMALL, End::Newest, page, 0),
        }
    }

    fn knows(&self, page: PageIndex) -> bool {
        self.0.find(page).is_some_and(|(queue, _)| queue != GHOST)
    }

    fn captured(&mut self, page: PageIndex) {
        if let Some((SMALL, _)) = self.0.remove(page) {
            self.0.push(GHOST, End::Newest, page, 0);
        }
        while self.0.len(GHOST) > self.0.len(SMALL) + self.0.len(MAIN)
            && let Some(oldest) = self.0.oldest(GHOST)
        {
            self.0.remove(oldest);
        }
    }
}

//! Which pages leave: replacement policies behind one trait, chosen by name.
//!
//! A policy is told what happens to pages, by index, and is asked for victims. It sees no addresses and no contents, and but
//! for [`nru`] no access bits: kernels offer none to anyone outside the process. What it learns of references is
//! what raises a fault: a page that comes back from a buffer shortly after it was captured, and a page that is
//! fetched from the store again.
//!
//! Two families. *Sweeps* ([`clock`], [`nru`], [`rr`]) go over the table in its order: victims are neighbours, which leave in one
//! move with one TLB flush, and no page costs memory beyond its entry. *Orders* ([`fifo`], [`lru3`], [`s3fifo`],
//! [`sieve`]) keep queues of pages ([`queues`]).
//!
//! Invariants of the orders: a page that is in the target is in exactly one queue or *out*; a victim that was asked for
//! is out until the outcome of its capture is known, so none is given twice.

pub mod clock;
mod divided;
pub mod fifo;
pub mod lru3;
pub mod nru;
mod pages;
pub mod queues;
pub(crate) mod replacement;
pub mod rr;
pub mod s3fifo;
pub mod settings;
pub mod sieve;
#[cfg(test)]
mod tests;

use crate::units::PageIndex;
use queues::Queues;

pub use pages::Pages;
pub use settings::{Block, Kind, Scheme, Scope, SettingError, Settings};

/// How a page came to be in its target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// A fault was answered with zeros: the first touch.
    Fault,
    /// Its neighbour's fault brought it along.
    Ahead,
    /// A scan saw it there; nobody knows how old it is.
    Found,
    /// It was touched while it waited in a buffer: the reference signal.
    Buffer,
    /// It was fetched from the store.
    Store,
}

/// Why a victim stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// It cannot leave for now: pinned, locked, shared, kept, or being removed.
    Stuck,
    /// It was not tried.
    Untried,
}

/// What a policy is told, and asked.
///
/// The defaults suit an order, which gives its [`Queues`]; a sweep has none and needs to be told nothing.
pub trait Policy: Send {
    /// The next victim, which is *out* from now on; none when none is left.
    fn next(&mut self, pages: &mut Pages<'_>) -> Option<PageIndex>;

    /// The policy's queues; none for a sweep.
    fn queues(&self) -> Option<&Queues> {
        None
    }

    /// The same, to be changed.
    fn queues_mut(&mut self) -> Option<&mut Queues> {
        None
    }

    /// Whether `page` is in its target, as far as this policy knows. A sweep looks that up.
    fn knows(&self, page: PageIndex) -> bool {
        self.queues().is_some_and(|queues| queues.find(page).is_some())
    }

    /// `page` is in its target.
    fn arrived(&mut self, page: PageIndex, how: Arrival) {
        let _ = (page, how);
    }

    /// `page` was captured, and waits in a buffer.
    fn captured(&mut self, page: PageIndex) {
        self.gone(page);
    }

    /// `page` is nowhere any more: unmapped, removed, all zeros, or lost.
    fn gone(&mut self, page: PageIndex) {
        if let Some(queues) = self.queues_mut() {
            queues.remove(page);
        }
    }

    /// `page` was there already, and makes one block with what has just arrived: where the order is one of use, its turn
    /// comes as late.
    fn stretched(&mut self, page: PageIndex) {
        let _ = page;
    }

    /// `page`, a victim, stays in its target.
    fn refused(&mut self, page: PageIndex, why: Refusal) {
        if let Some(queues) = self.queues_mut() {
            queues.refused(page, why, |queue| queue);
        }
    }

    /// Victims whose outcome was never told stay, and are the next ones.
    fn recall(&mut self) {
        while let Some(page) = self.queues().and_then(|queues| queues.newest_out()) {
            self.refused(page, Refusal::Untried);
        }
    }

    /// A sweep only: the victim just given, and so many pages behind it, are of a target that nothing can be taken from.
    fn pass_over(&mut self, pages: u64) {
        let _ = pages;
    }

    /// A sweep only: the victim just given is the next one once more.
    fn step_back(&mut self) {}
}

impl Kind {
    /// A policy of this kind that knows no page.
    pub fn policy(self) -> Box<dyn Policy> {
        match self {
            Self::Rr => Box::new(rr::RoundRobin::default()),
            Self::Clock => Box::new(clock::Clock::default()),
            Self::Nru => Box::new(nru::NotRecentlyUsed::default()),
            Self::Fifo => Box::new(fifo::Fifo::by_arrival()),
            Self::Lru => Box::new(fifo::Fifo::by_last_fault()),
            Self::Lru3 => Box::new(lru3::Lru3::default()),
            Self::S3Fifo => Box::new(s3fifo::S3Fifo::default()),
            Self::Sieve => Box::new(sieve::Sieve::default()),
        }
    }
}

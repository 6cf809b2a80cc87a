//! Which pages of a capture are in staging.
//!
//! `UFFDIO_MOVE` tells how many bytes it has moved. Linux 6.18, which moves several pages under one lock, tells too few when
//! it stops early: pages behind those it tells of may have been moved, too. Nobody else has them then, and their program would
//! read zeros. So what it does not tell is looked up in the page tables, which is seldom.

use spillway_core::evict::Run;
use spillway_core::{Address, PAGE_BYTES_U64, Span};

use crate::adopt::Agent;
use crate::sys::pagemap::Pagemap;

/// What a move has brought to staging.
pub(super) struct Moved {
    /// So many, from the first on, holes included.
    pub(super) told: u64,
    /// Where it has brought more.
    untold: Vec<Span>,
    staging: Address,
}

impl Moved {
    /// The outcome of the `i`th move of the last list, which was to bring `run` to `staging`.
    pub(super) fn of(agent: &Agent, pagemap: Option<&Pagemap>, i: usize, run: &Run, staging: Address) -> Self {
        let told = u64::try_from(agent.memory.moved(i)).unwrap_or(0) / PAGE_BYTES_U64;
        let told = told.min(run.pages);
        let mut untold = Vec::new();
        // The list begins with emptying staging, or with registering it where it was empty. What was in it before is nothing new.
        let was_empty = agent.memory.result(0) == 0;
        if let Some(pagemap) = pagemap.filter(|_| told < run.pages && was_empty) {
            let rest = Span { start: staging.plus_pages(told), end: staging.plus_pages(run.pages) };
            // An address space that is gone has lost all of them.
            let _ = pagemap.populated(rest, |there| untold.push(there));
        }
        Self { told, untold, staging }
    }

    /// Whether the `n`th page of the run is in staging, or was nowhere.
    pub(super) fn has(&self, n: u64) -> bool {
        let at = self.staging.plus_pages(n);
        n < self.told || self.untold.iter().any(|span| span.start <= at && at < span.end)
    }

    /// How many are.
    pub(super) fn pages(&self) -> u64 {
        self.told + self.untold.iter().map(|span| span.pages()).sum::<u64>()
    }
}

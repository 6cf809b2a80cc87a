//! Which pages of a capture are in staging.
//!
//! `UFFDIO_MOVE` tells how many bytes it has moved. Linux 6.18, which moves several pages under one lock, tells too few when
//! it stops early: pages behind those it tells of may have been moved, too. Nobody else has them then, and their program would
//! read zeros. So what it does not tell is looked up in the page tables, which is seldom: it was moved if it is in staging, and
//! no longer where it was. Where staging could not be emptied before, a page there may also be an older one, and which it is
//! nobody knows.

use std::io;

use spillway_core::evict::Run;
use spillway_core::{Address, PAGE_BYTES_U64, Span};

use crate::adopt::Agent;
use crate::sys::agent::NOT_BEGUN;
use crate::sys::pagemap::Pagemap;

/// What a move has brought to staging.
pub(super) struct Moved {
    /// So many, from the first on, holes included.
    pub(super) told: u64,
    /// Where it has brought more.
    untold: Vec<Span>,
    /// Where it may have.
    unsure: Vec<Span>,
    staging: Address,
}

impl Moved {
    /// The outcome of the `i`th move of the last list, which was to bring `run` to `staging`.
    pub(super) fn of(agent: &Agent, pagemap: Option<&Pagemap>, i: usize, run: &Run, staging: Address) -> Self {
        let told = u64::try_from(agent.memory.moved(i)).unwrap_or(0) / PAGE_BYTES_U64;
        let told = told.min(run.pages);
        let (mut untold, mut unsure) = (Vec::new(), Vec::new());
        let emptied = agent.memory.result(0);
        if let Some(pagemap) = pagemap.filter(|_| told < run.pages && emptied != NOT_BEGUN) {
            let rest =
                Run { address: run.address.plus_pages(told), page: run.page.plus(told), pages: run.pages - told };
            let staging = staging.plus_pages(told);
            // Each list that captures begins with emptying staging. That fails where the process has locked all of its memory
            // since (`mlockall`): the kernel drops nothing that is locked.
            match gone_to(pagemap, &rest, staging) {
                Ok(there) if emptied == 0 => untold = there,
                Ok(there) => unsure = there,
                Err(_) => unsure.push(Span::of_pages(staging, rest.pages)),
            }
        }
        Self { told, untold, unsure, staging }
    }

    /// Whether the `n`th page of the run is in staging, or was nowhere.
    pub(super) fn has(&self, n: u64) -> bool {
        n < self.told || is_in(&self.untold, self.staging.plus_pages(n))
    }

    /// Whether nobody knows if the `n`th page is there, or an older one.
    pub(super) fn has_lost(&self, n: u64) -> bool {
        is_in(&self.unsure, self.staging.plus_pages(n))
    }

    /// How many are.
    pub(super) fn pages(&self) -> u64 {
        self.told + self.untold.iter().map(|span| span.pages()).sum::<u64>()
    }
}

/// Where pages of `run` are in staging, from `staging` on, that are not where they were.
fn gone_to(pagemap: &Pagemap, run: &Run, staging: Address) -> io::Result<Vec<Span>> {
    let (mut there, mut stayed) = (Vec::new(), Vec::new());
    pagemap.populated(Span::of_pages(staging, run.pages), |span| there.push(span))?;
    if there.is_empty() {
        return Ok(there);
    }
    pagemap.populated(Span::of_pages(run.address, run.pages), |span| stayed.push(span))?;
    let gone = |&n: &u64| is_in(&there, staging.plus_pages(n)) && !is_in(&stayed, run.address.plus_pages(n));
    Ok((0..run.pages).filter(gone).map(|n| Span::of_pages(staging.plus_pages(n), 1)).collect())
}

fn is_in(spans: &[Span], at: Address) -> bool {
    spans.iter().any(|span| span.start <= at && at < span.end)
}

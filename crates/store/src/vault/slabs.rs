//! Tables that outlive the pager: slabs of words that never move, in numbered runs of an extent each.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Release};

use super::{EXTENT, FIXED, ROWS_EXTENT, SLAB_EXTENT, STRIPED_PAGES_EXTENT, Vault};
use crate::slots::SLAB_WORDS;

/// In the record of a run: slabs of it that were given out.
const GIVEN: usize = 1;

/// What a table is of, and the words of its slabs.
#[derive(Clone, Copy)]
pub(crate) struct Use {
    kind: u64,
    words: usize,
}

impl Use {
    /// Slots of the embedded pool, or entries about pages at servers.
    pub(crate) const SLOTS: Self = Self { kind: SLAB_EXTENT, words: SLAB_WORDS };

    /// Pages of a pool with parity.
    pub(crate) fn striped_pages(words: usize) -> Self {
        Self { kind: STRIPED_PAGES_EXTENT, words }
    }

    /// Its rows.
    pub(crate) fn rows(words: usize) -> Self {
        Self { kind: ROWS_EXTENT, words }
    }

    /// Slabs in a run.
    fn count(self) -> usize {
        EXTENT / (self.words * 8)
    }
}

impl Vault {
    /// The runs of a table, in order.
    fn runs(&self, of: Use) -> Vec<usize> {
        let kept = (FIXED..self.0.extents).filter(|&extent| self.kind(extent) == of.kind);
        let mut runs: Vec<(u64, usize)> =
            kept.map(|extent| (self.record(extent)[0].load(Acquire) >> 8, extent)).collect();
        runs.sort_unstable();
        // A run whose predecessor is missing cannot be told from another.
        let in_order = (0..).zip(runs).take_while(|(nth, (number, _))| nth == number);
        in_order.map(|(_, (_, extent))| extent).collect()
    }

    /// All slabs that were given out, in order, and where more come from.
    pub(crate) fn slabs(&self, of: Use) -> (Vec<&'static [AtomicU64]>, Slabs) {
        let runs = self.runs(of);
        let mut more = Slabs { runs: runs.len() as u64, ..Slabs::new(self, of) };
        let mut slabs: Vec<_> =
            runs.iter().flat_map(|&extent| (0..of.count()).map(move |nth| self.slab(of, (extent, nth)))).collect();
        if let Some(&last) = runs.last() {
            let given = usize::try_from(self.record(last)[GIVEN].load(Acquire)).unwrap_or(0);
            // Another version may not have said how many.
            if (1..of.count()).contains(&given) {
                (more.extent, more.used) = (last, given);
                slabs.truncate((runs.len() - 1) * of.count() + given);
            }
        }
        (slabs, more)
    }

    fn slab(&self, of: Use, (extent, nth): (usize, usize)) -> &'static [AtomicU64] {
        self.0.shared.words(self.start(extent) + nth * of.words * 8, of.words)
    }
}

/// Where further slabs come from.
pub(crate) struct Slabs {
    of: Use,
    vault: Vault,
    runs: u64,
    extent: usize,
    /// Slabs of the last run that were given out.
    used: usize,
}

impl Slabs {
    /// Of a table that has none yet.
    pub(crate) fn new(vault: &Vault, of: Use) -> Self {
        Self { of, vault: vault.clone(), runs: 0, extent: 0, used: of.count() }
    }

    /// One more, of zeros. None when there is no more room.
    pub(crate) fn take(&mut self) -> Option<&'static [AtomicU64]> {
        if self.used == self.of.count() {
            (self.extent, self.used) = (self.vault.take(self.of.kind | self.runs << 8)?, 0);
            self.runs += 1;
        }
        self.used += 1;
        self.vault.record(self.extent)[GIVEN].store(self.used as u64, Release);
        Some(self.vault.slab(self.of, (self.extent, self.used - 1)))
    }
}

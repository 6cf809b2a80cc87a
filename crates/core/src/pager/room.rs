//! How much is local, how much may be, and the peaks of both.

use super::{Budget, Pager};
use crate::units::TargetId;

impl Pager {
    /// So many pages are local beyond the budget, and nobody else's are to leave for them.
    pub fn lend(&mut self, pages: u64) {
        self.lent = pages;
    }

    /// Changes the budget.
    pub fn set_budget(&mut self, budget: Budget) {
        self.budget = budget;
    }

    /// The budget as it was set.
    pub fn budget(&self) -> Budget {
        self.budget
    }

    /// The budget in pages, as of now.
    pub fn budget_pages(&self) -> u64 {
        let pages = match self.budget {
            Budget::Pages(pages) => pages,
            Budget::Percent { percent, floor_pages } => (self.used_peak * percent / 100).max(floor_pages),
        };
        pages.saturating_add(self.lent)
    }

    /// Pages in local memory: mapped, in a buffer, or on their way in.
    pub fn local_pages(&self) -> u64 {
        self.table.mapped() + self.table.fetching() + self.buffered_pages()
    }

    /// Pages in targets.
    pub fn mapped_pages(&self) -> u64 {
        self.table.mapped()
    }

    /// Pages in buffers. Those set aside for a capture under way hold none.
    pub fn buffered_pages(&self) -> u64 {
        u64::from(self.buffers) - self.free_buffers.len() as u64 - self.set_aside
    }

    /// Whether there are buffers for a copy of each page in one: for a child's, if its parent forks now.
    pub fn copies_fit(&self) -> bool {
        self.buffered_pages() <= self.free_buffers.len() as u64
    }

    /// Pages that may still become local.
    pub fn free_pages(&self) -> u64 {
        if self.store_full { u64::MAX } else { self.budget_pages().saturating_sub(self.local_pages()) }
    }

    /// Nothing can be evicted now, and faults must not wait for ever: they may take `pages` more than is local now.
    /// Zero ends it.
    pub fn set_overdraft(&mut self, pages: u64) {
        let excess = self.local_pages().saturating_sub(self.budget_pages());
        self.overdraft = if pages == 0 { (0, 0) } else { (excess + pages, pages) };
    }

    /// Less is local than before: what faults may overdraw shrinks along, or an old excess would come back.
    pub(crate) fn tighten(&mut self) {
        let excess = self.local_pages().saturating_sub(self.budget_pages());
        self.overdraft.0 = self.overdraft.0.min(excess + self.overdraft.1);
    }

    /// Pages that faults may still make local: what is free, and what they may overdraw.
    pub(super) fn room_pages(&self) -> u64 {
        if self.store_full {
            return u64::MAX;
        }
        (self.budget_pages().saturating_add(self.overdraft.0)).saturating_sub(self.local_pages())
    }

    /// The same for the faults of one target.
    pub(super) fn room_of(&self, target: TargetId) -> u64 {
        let room = self.room_pages();
        if self.store_full || !self.replacement.is_divided() {
            return room;
        }
        self.replacement.room(target, room, self.low_pages(), self.overdraft.0.saturating_add(self.lent))
    }

    /// Pages that targets hold, wherever they are.
    pub fn touched_pages(&self) -> u64 {
        self.table.used()
    }

    /// Pages whose only copy is in the store.
    pub fn remote_pages(&self) -> u64 {
        self.table.used() - self.table.mapped() - self.buffered_pages()
    }

    /// Pages of `target` that are in it, and all that it holds, wherever they are.
    pub fn held_by(&self, target: TargetId) -> (u64, u64) {
        let counts = self.regions.of(target).map(|region| self.table.count_in(region.first, region.span.pages()));
        counts.fold((0, 0), |(mapped, used), count| (mapped + count.0, used + count.1))
    }

    /// Keeps the peaks; call it after pages became local.
    pub(crate) fn note_local(&mut self) {
        self.used_peak = self.used_peak.max(self.table.used());
        let local = self.local_pages();
        self.counters.burst_peak_pages = self.counters.burst_peak_pages.max(local);
        self.in_burst &= local > self.budget_pages();
        if !self.in_burst {
            self.counters.local_peak_pages = self.counters.local_peak_pages.max(local);
        }
    }
}

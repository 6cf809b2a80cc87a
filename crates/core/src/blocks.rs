//! Elastic blocks (dcm, section 4): how many adjacent pages move together, area by area.
//!
//! An *area* is 16 aligned pages of the table, 64 KiB. It is divided into blocks as a buddy allocator divides memory: each
//! has 1, 2, 4, 8 or 16 pages, and begins at a multiple of its length. One bit a page says so: a page is *joined* to the one
//! before it, or begins a block. A page that nobody has fetched is a block of its own.
//!
//! Invariants: blocks are aligned powers of two, and lie in one region. Only [`stretch`] joins, and only [`reduce`] parts.
//!
//! dcm reads access bits when a block is unmapped. There are none here, so pages say themselves how they came. One that was
//! *asked for* is used. One that came *ahead* may or may not be. And one that its block left behind, although it could have
//! come along, is unused unless it was asked for later. Who wants to know what a block is worth therefore leaves something
//! of it behind: see `reach.rs`.

use std::ops::Range;

use crate::page::{Entry, State};

/// Pages in an area, and in the largest block: 64 KiB, as dcm found no gain beyond (section 4.2).
pub const AREA_PAGES: usize = 16;

/// The entries of an area.
pub type Area = [Entry; AREA_PAGES];

/// The block that the `at`th page of `area` is in.
pub fn block_of(area: &Area, at: usize) -> Range<usize> {
    let first = (0..=at).rev().find(|&i| !area[i].is_joined()).unwrap_or(0);
    let end = (at + 1..AREA_PAGES).find(|&i| !area[i].is_joined()).unwrap_or(AREA_PAGES);
    first..end
}

/// Whether anything of `block` is in local memory, or on its way there.
pub fn is_local(area: &Area, block: &Range<usize>) -> bool {
    area[block.clone()]
        .iter()
        .any(|entry| matches!(entry.state(), State::Mapped | State::Inactive | State::Writing | State::Fetching))
}

/// STRETCH (algorithm 1): `block`, which a fault brings into local memory, becomes one with its buddy if that has the same
/// size and is local. Nothing outside of `within`, the region, is a buddy. Returns the buddy that it was stretched over.
pub fn stretch(area: &mut Area, block: &Range<usize>, within: &Range<usize>) -> Option<Range<usize>> {
    if block.len() >= AREA_PAGES {
        return None;
    }
    let first = block.start ^ block.len();
    let buddy = first..first + block.len();
    let inside = within.start <= buddy.start && buddy.end <= within.end;
    if !inside || block_of(area, first) != buddy || !is_local(area, &buddy) {
        return None;
    }
    area[block.start.max(first)].join();
    Some(buddy)
}

/// REDUCE (algorithm 2), once its condition holds: every page of `block` is a block of its own.
pub fn reduce(area: &mut Area, block: &Range<usize>) {
    area[block.clone()].iter_mut().for_each(Entry::part);
}

/// What is known of how a block was used while it was local.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Use {
    /// Its pages; those that hold nothing are none.
    pub pages: u64,
    /// Those that were used for certain.
    pub used: u64,
    /// Those that came ahead, and nobody knows.
    pub unknown: u64,
    /// Those that did not come ahead: an access to them showed.
    pub shown: u64,
    /// Of those, the ones that were asked for.
    pub asked: u64,
}

impl Use {
    /// Of `block`.
    pub fn of(area: &Area, block: &Range<usize>) -> Self {
        let mut sum = Self::default();
        for entry in &area[block.clone()] {
            let (used, ahead) = (entry.is_used(), entry.is_ahead());
            if !used && matches!(entry.state(), State::Untouched | State::Lost) {
                continue;
            }
            sum.pages += 1;
            sum.used += u64::from(used);
            sum.unknown += u64::from(ahead && !used);
            sum.shown += u64::from(!ahead);
            sum.asked += u64::from(used && !ahead);
        }
        sum
    }

    /// The condition of REDUCE: not more than half of the pages were used. Those of which nobody knows may have been.
    pub fn is_half_or_less(self) -> bool {
        2 * (self.used + self.unknown) <= self.pages
    }

    /// Whether all came along with the one that was asked for, but for one that was left out.
    pub fn is_probe(self) -> bool {
        self.shown == 2
    }

    /// What was learnt of pages that came, or could have come, along with the one that was asked for first: how many there
    /// were, and how many of them were used. None when all came and no access would show, or none was asked for.
    pub fn sample(self) -> Option<(u64, u64)> {
        let (others, shown) = (self.pages.checked_sub(1)?, self.shown.checked_sub(1)?);
        let used = self.asked.checked_sub(1)?;
        // What was left behind stands for what came.
        (others * used).checked_div(shown).map(|used| (others, used))
    }
}

/// How often pages that come along with another are used, in 256ths, as far as known of a piece of memory. Learnt slowly, and
/// forgotten twice as fast: "conservatively stretch, aggressively reduce".
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Accuracy(u8);

impl Default for Accuracy {
    /// Nothing is known: as good as not.
    fn default() -> Self {
        Self(128)
    }
}

impl Accuracy {
    /// Whole blocks come where at least so much is used: 0.8.
    pub const ENOUGH: Self = Self(205);

    /// However little is used.
    pub const ANY: Self = Self(0);

    /// Whether hardly more than a third is used: then what looks worth it is not, as a rule.
    pub fn is_poor(self) -> bool {
        self.0 < 96
    }

    /// Of `others` pages `used` were.
    pub fn learn(&mut self, others: u64, used: u64) {
        if others == 0 {
            return;
        }
        let seen = i32::try_from(255 * used.min(others) / others).unwrap_or(0);
        let is = i32::from(self.0);
        let step = if seen >= is { (seen - is + 15) / 16 } else { (seen - is - 7) / 8 };
        self.0 = u8::try_from(is + step).unwrap_or(u8::MAX);
    }
}

#[cfg(test)]
mod tests;

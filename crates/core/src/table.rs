//! The page table: an [`Entry`] for each page that was ever touched, in chunks of 2 MiB of address space.
//!
//! A chunk exists only where something was touched: eight bytes a page and a header a chunk (`chunks.rs`).

use crate::blocks::{AREA_PAGES, Accuracy, Area};
use crate::chunks::{CHUNK_PAGES_U64, Chunks, Holds, split};
use crate::page::{Entry, State};
use crate::units::PageIndex;

pub use crate::chunks::CHUNK_PAGES;

/// Chunks kept in stock: 64 MiB of first touches between two refills.
const STOCK: usize = 32;

struct Entries {
    /// Entries in state `Mapped`: lets a sweep pass over what holds no victim.
    mapped: u16,
    /// Entries in any state but `Untouched`: a chunk without any is given back.
    used: u16,
    /// What pages that come along with others are worth here.
    accuracy: Accuracy,
    entries: [Entry; CHUNK_PAGES],
}

impl Holds for Entries {
    fn nothing() -> Self {
        Self { mapped: 0, used: 0, accuracy: Accuracy::default(), entries: [Entry::UNTOUCHED; CHUNK_PAGES] }
    }

    fn clear(&mut self) {
        debug_assert!(self.entries.iter().all(|entry| entry.state() == State::Untouched), "no page is forgotten");
        self.entries.fill(Entry::UNTOUCHED);
        self.accuracy = Accuracy::default();
    }
}

type Chunk = crate::chunks::Chunk<Entries>;

/// Entries by page index.
#[derive(Default)]
pub struct Table {
    chunks: Chunks<Entries>,
    mapped: u64,
    fetching: u64,
    writing: u64,
    used: u64,
}

/// Where a sweep stands: a chunk's slot and a page in it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Hand {
    slot: usize,
    page: usize,
}

impl Hand {
    /// Whether it stands at the table's start.
    pub fn is_start(&self) -> bool {
        self.slot == 0 && self.page == 0
    }

    /// Passes over `pages` pages, as far as they lie in the same chunk.
    pub fn skip(&mut self, pages: u64) {
        let pages = usize::try_from(pages).unwrap_or(CHUNK_PAGES).min(CHUNK_PAGES);
        self.page = (self.page + pages).min(CHUNK_PAGES);
    }

    /// Back to the page that a sweep has just returned: the next sweep returns it again.
    pub fn step_back(&mut self) {
        self.page -= 1;
    }
}

impl Table {
    /// The entry of `page`; untouched when it has none.
    pub fn get(&self, page: PageIndex) -> Entry {
        let (number, within) = split(page);
        self.chunks.find(number).map_or(Entry::UNTOUCHED, |chunk| chunk.entries[within])
    }

    /// Changes the entry of `page` and returns what `change` returns.
    pub fn update<T>(&mut self, page: PageIndex, change: impl FnOnce(&mut Entry) -> T) -> T {
        let (number, within) = split(page);
        let slot = self.chunks.slot_or_new(number);
        let chunk = self.chunks.get_mut(slot).expect("slots name chunks that exist");
        let entry = &mut chunk.entries[within];
        let before = entry.state();
        let result = change(entry);
        let after = entry.state();
        if before != after {
            let mapped = i64::from(after == State::Mapped) - i64::from(before == State::Mapped);
            let used = i64::from(after != State::Untouched) - i64::from(before != State::Untouched);
            chunk.mapped = chunk.mapped.wrapping_add_signed(i16::try_from(mapped).expect("-1 to 1"));
            chunk.used = chunk.used.wrapping_add_signed(i16::try_from(used).expect("-1 to 1"));
            self.mapped = self.mapped.wrapping_add_signed(mapped);
            let fetching = i64::from(after == State::Fetching) - i64::from(before == State::Fetching);
            let writing = i64::from(after == State::Writing) - i64::from(before == State::Writing);
            self.fetching = self.fetching.wrapping_add_signed(fetching);
            self.writing = self.writing.wrapping_add_signed(writing);
            self.used = self.used.wrapping_add_signed(used);
        }
        if chunk.used == 0 {
            self.chunks.remove(slot, STOCK);
        }
        result
    }

    /// The area that `page` is in, and what is known of pages there that come along with others; none where nothing was ever
    /// touched.
    pub fn area(&self, page: PageIndex) -> Option<(&Area, Accuracy)> {
        let (number, within) = split(page);
        let chunk = self.chunks.find(number)?;
        let (areas, _) = chunk.entries.as_chunks();
        Some((&areas[within / AREA_PAGES], chunk.accuracy))
    }

    /// The same, to be marked; entries must keep their states.
    pub(crate) fn area_mut(&mut self, page: PageIndex) -> Option<(&mut Area, &mut Accuracy)> {
        let (number, within) = split(page);
        let slot = self.chunks.slot(number)?;
        let chunk: &mut Entries = self.chunks.get_mut(slot)?;
        let (areas, _) = chunk.entries.as_chunks_mut();
        Some((&mut areas[within / AREA_PAGES], &mut chunk.accuracy))
    }

    /// Pages in state `Mapped`.
    pub fn mapped(&self) -> u64 {
        self.mapped
    }

    /// Pages on their way from the store into targets.
    pub fn fetching(&self) -> u64 {
        self.fetching
    }

    /// Pages on their way from buffers to the store.
    pub fn writing(&self) -> u64 {
        self.writing
    }

    /// Pages in any state but `Untouched`.
    pub fn used(&self) -> u64 {
        self.used
    }

    /// Bytes that the table occupies.
    pub fn bytes(&self) -> u64 {
        self.chunks.bytes()
    }

    /// The used pages of `[start, start + pages)`, in order. Costs what the range has touched, not its length, as
    /// long as the range is longer than the table.
    pub fn used_in(&self, start: PageIndex, pages: u64, mut each: impl FnMut(PageIndex, Entry)) {
        let end = start.0 + pages;
        let (first, last) = (start.0 / CHUNK_PAGES_U64, end.div_ceil(CHUNK_PAGES_U64));
        let mut visit = |chunk: &Chunk| {
            let base = chunk.number * CHUNK_PAGES_U64;
            let from = start.0.saturating_sub(base).min(CHUNK_PAGES_U64);
            let to = (end - base).min(CHUNK_PAGES_U64);
            for within in from..to {
                let entry = chunk.entries[usize::try_from(within).expect("below 512")];
                if entry.state() != State::Untouched {
                    each(PageIndex(base + within), entry);
                }
            }
        };
        if last - first <= self.chunks.len() as u64 {
            (first..last).filter_map(|number| self.chunks.find(number)).for_each(&mut visit);
        } else {
            let mut numbers: Vec<_> = self.chunks.numbers().filter(|number| (first..last).contains(number)).collect();
            numbers.sort_unstable();
            numbers.iter().filter_map(|&number| self.chunks.find(number)).for_each(&mut visit);
        }
    }

    /// The next capturable page at or after `hand` that has no second chance left; passes over at most `chunks_max`
    /// chunks. Takes the second chances it meets; `believing` as for [`Entry::take_chance`].
    pub fn sweep(&mut self, hand: &mut Hand, chunks_max: &mut usize, believing: bool) -> Option<PageIndex> {
        while *chunks_max > 0 {
            if hand.slot >= self.chunks.slots() {
                *hand = Hand::default();
                if self.chunks.slots() == 0 {
                    return None;
                }
            }
            if let Some(chunk) = self.chunks.get_mut(hand.slot).filter(|chunk| chunk.mapped > 0) {
                while hand.page < CHUNK_PAGES {
                    let within = hand.page;
                    hand.page += 1;
                    let entry = &mut chunk.entries[within];
                    if entry.is_candidate() && !entry.take_chance(believing) {
                        return Some(PageIndex(chunk.number * CHUNK_PAGES_U64 + within as u64));
                    }
                }
            }
            hand.slot += 1;
            hand.page = 0;
            *chunks_max -= 1;
        }
        None
    }

    /// The next page at or after `hand` that is neither untouched nor mapped nor lost, before the table's end.
    pub fn next_outside(&self, hand: &mut Hand) -> Option<PageIndex> {
        let outside = |entry: Entry| !matches!(entry.state(), State::Untouched | State::Mapped | State::Lost);
        self.next_where(hand, |chunk| chunk.used > chunk.mapped, outside)
    }

    /// The next page at or after `hand` that is mapped and has a clean copy, before the table's end.
    pub fn next_clean(&self, hand: &mut Hand) -> Option<PageIndex> {
        let clean = |entry: Entry| entry.state() == State::Mapped && entry.handle().is_some();
        self.next_where(hand, |chunk| chunk.mapped > 0, clean)
    }

    /// The next page at or after `hand` that may be captured, before the table's end. No chance is taken or given.
    pub fn next_candidate(&self, hand: &mut Hand) -> Option<PageIndex> {
        self.next_where(hand, |chunk| chunk.mapped > 0, Entry::is_candidate)
    }

    fn next_where(
        &self,
        hand: &mut Hand,
        look_in: impl Fn(&Chunk) -> bool,
        wanted: impl Fn(Entry) -> bool,
    ) -> Option<PageIndex> {
        while hand.slot < self.chunks.slots() {
            if let Some(chunk) = self.chunks.get(hand.slot).filter(|chunk| look_in(chunk)) {
                while hand.page < CHUNK_PAGES {
                    let within = hand.page;
                    hand.page += 1;
                    if wanted(chunk.entries[within]) {
                        return Some(PageIndex(chunk.number * CHUNK_PAGES_U64 + within as u64));
                    }
                }
            }
            *hand = Hand { slot: hand.slot + 1, page: 0 };
        }
        *hand = Hand::default();
        None
    }

    /// Chunks there are, for bounding a sweep.
    pub fn chunk_slots(&self) -> usize {
        self.chunks.slots()
    }

    /// Refills the stock. Allocates: call it when no fault waits.
    pub fn restock(&mut self) {
        self.chunks.restock(STOCK);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::{BufferIndex, Step};

    fn map(table: &mut Table, page: u64) {
        table.update(PageIndex(page), |entry| entry.step(Step::Fill)).expect("legal");
    }

    #[test]
    fn a_chunk_lives_as_long_as_a_page_of_it() {
        let mut table = Table::default();
        map(&mut table, 5);
        map(&mut table, 5000);
        assert_eq!((table.mapped(), table.used(), table.chunks.len()), (2, 2, 2));
        table.update(PageIndex(5), |entry| entry.step(Step::Capture(BufferIndex(0)))).expect("legal");
        table.update(PageIndex(5), |entry| entry.step(Step::ReadZero)).expect("legal");
        assert_eq!((table.mapped(), table.used(), table.chunks.len()), (1, 1, 1));
        assert_eq!(table.get(PageIndex(5)), Entry::UNTOUCHED);
        assert_eq!(table.get(PageIndex(5000)).state(), State::Mapped);
    }

    #[test]
    fn a_huge_sparse_range_costs_what_it_touches() {
        let mut table = Table::default();
        for page in [0, 1 << 24, 1 << 40] {
            map(&mut table, page);
        }
        let mut seen = Vec::new();
        table.used_in(PageIndex(1), 1 << 40, |page, _| seen.push(page.0));
        assert_eq!(seen, [1 << 24, 1 << 40]);
        assert!(table.bytes() < 64 << 10);
    }

    #[test]
    fn a_sweep_visits_every_candidate_once_a_turn_and_honours_second_chances() {
        let mut table = Table::default();
        for page in [3, 4, 700, 5000] {
            map(&mut table, page);
        }
        table.update(PageIndex(4), Entry::set_referenced);
        let mut hand = Hand::default();
        let mut turn = |table: &mut Table| {
            let mut chunks = 3;
            let mut seen = Vec::new();
            while let Some(page) = table.sweep(&mut hand, &mut chunks, true) {
                seen.push(page.0);
            }
            seen.sort_unstable();
            seen
        };
        assert_eq!(turn(&mut table), [3, 700, 5000]);
        assert_eq!(turn(&mut table), [3, 4, 700, 5000]);
    }
}

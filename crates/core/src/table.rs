//! The page table: an [`Entry`] for each page that was ever touched, in chunks of 2 MiB of address space.
//!
//! A chunk exists only where something was touched: eight bytes a page and a header a chunk (`chunks.rs`).

use std::sync::atomic::Ordering::{Relaxed, Release};

use crate::blocks::{AREA_PAGES, Accuracy, Area};
use crate::book::INDICES_END;
use crate::chunks::{CHUNK_PAGES_U64, Chunks, Holds, split};
use crate::lasting::{Leaf, Sheet};
use crate::page::{Entry, State};
use crate::touches::Touches;
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
    leaf: Leaf,
}

impl Entries {
    fn get(&self, within: usize) -> Entry {
        Entry::from_bits(self.leaf[within].load(Relaxed))
    }

    /// One store, after all that came before it: whoever finds the entry finds what it tells of.
    fn set(&self, within: usize, entry: Entry) {
        self.leaf[within].store(entry.bits(), Release);
    }

    /// Gives a second chance to what was touched and may leave.
    fn reference(&mut self, number: u64, touched: impl FnOnce(PageIndex) -> Option<Touches>) {
        let may_leave = |within: &usize| self.get(*within).is_candidate();
        let Some(first) = (0..CHUNK_PAGES).find(may_leave) else { return };
        let Some(touched) = touched(PageIndex(number * CHUNK_PAGES_U64 + first as u64)) else { return };
        for within in (first..CHUNK_PAGES).filter(|within| touched[within / 64] >> (within % 64) & 1 != 0) {
            let mut entry = self.get(within);
            // The kernel installs pages as if they had been touched. Of those that were asked for that is right.
            if entry.is_candidate() && !entry.is_ahead() {
                entry.set_referenced();
                self.set(within, entry);
            }
        }
    }

    /// Counts anew.
    fn count(&mut self) -> (u16, u16) {
        let mapped = (0..CHUNK_PAGES).filter(|&at| self.get(at).state() == State::Mapped).count();
        let used = (0..CHUNK_PAGES).filter(|&at| self.get(at).state() != State::Untouched).count();
        let small = |count: usize| u16::try_from(count).expect("at most 512");
        (self.mapped, self.used) = (small(mapped), small(used));
        (self.mapped, self.used)
    }
}

impl Holds for Entries {
    fn nothing() -> Self {
        Self { mapped: 0, used: 0, accuracy: Accuracy::default(), leaf: Leaf::new() }
    }

    fn clear(&mut self) {
        debug_assert!((0..CHUNK_PAGES).all(|at| self.get(at).state() == State::Untouched), "no page is forgotten");
        (0..CHUNK_PAGES).for_each(|at| self.set(at, Entry::UNTOUCHED));
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
    lasting: Option<Sheets>,
}

/// Sheets for chunks that are to outlive the pager.
struct Sheets {
    more: Box<dyn FnMut() -> Option<Sheet> + Send>,
    spare: Vec<Sheet>,
    /// There were no more: some chunks will not outlive it.
    ran_out: bool,
}

impl Sheets {
    fn take(&mut self) -> Leaf {
        match self.spare.pop().or_else(|| (self.more)()) {
            Some(sheet) => Leaf::Lasting(sheet),
            None => {
                self.ran_out = true;
                Leaf::new()
            }
        }
    }
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
        self.chunks.find(number).map_or(Entry::UNTOUCHED, |chunk| chunk.get(within))
    }

    /// Changes the entry of `page` and returns what `change` returns.
    pub fn update<T>(&mut self, page: PageIndex, change: impl FnOnce(&mut Entry) -> T) -> T {
        let (number, within) = split(page);
        let slot = match self.chunks.slot(number) {
            Some(slot) => slot,
            None => self.add(number),
        };
        let chunk = self.chunks.get_mut(slot).expect("slots name chunks that exist");
        let mut entry = chunk.get(within);
        let before = entry.state();
        let result = change(&mut entry);
        let after = entry.state();
        chunk.set(within, entry);
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
            self.remove(slot);
        }
        result
    }

    fn add(&mut self, number: u64) -> usize {
        let slot = self.chunks.slot_or_new(number);
        if let (Some(sheets), Some(chunk)) = (&mut self.lasting, self.chunks.get_mut(slot)) {
            if matches!(chunk.leaf, Leaf::Own(_)) {
                chunk.leaf = sheets.take();
            }
            if let Leaf::Lasting(sheet) = &chunk.leaf {
                sheet.assign(Some(number));
            }
        }
        slot
    }

    fn remove(&mut self, slot: usize) {
        if let Some(Leaf::Lasting(sheet)) = self.chunks.get(slot).map(|chunk| &chunk.leaf) {
            // Marks go before the sheet can be another chunk's.
            sheet.clear();
            sheet.assign(None);
        }
        // What is to outlive the pager cannot be given back otherwise than to the stock.
        let most = if self.lasting.is_some() { usize::MAX } else { STOCK };
        self.chunks.remove(slot, most);
    }

    /// An empty table, in sheets.
    pub(crate) fn lasting(more: Box<dyn FnMut() -> Option<Sheet> + Send>) -> Self {
        Self { lasting: Some(Sheets { more, spare: Vec::new(), ran_out: false }), ..Self::default() }
    }

    /// Takes over a sheet that was found. `survives` says what of an entry is still true.
    pub(crate) fn take_over(&mut self, sheet: Sheet, mut survives: impl FnMut(PageIndex, Entry) -> Entry) {
        let Some(sheets) = &mut self.lasting else { return };
        let number = sheet.chunk().filter(|&number| number < INDICES_END / CHUNK_PAGES_U64);
        let Some(number) = number.filter(|&number| self.chunks.slot(number).is_none()) else {
            sheet.assign(None);
            sheet.clear();
            return sheets.spare.push(sheet);
        };
        let slot = self.chunks.slot_or_new(number);
        let chunk = self.chunks.get_mut(slot).expect("it was just made");
        chunk.leaf = Leaf::Lasting(sheet);
        for within in 0..CHUNK_PAGES {
            let page = PageIndex(number * CHUNK_PAGES_U64 + within as u64);
            chunk.set(within, survives(page, chunk.get(within)));
        }
        let (mapped, used) = chunk.count();
        self.mapped += u64::from(mapped);
        self.used += u64::from(used);
        if used == 0 {
            self.remove(slot);
        }
    }

    /// Whether there were no sheets any more when one was needed.
    pub(crate) fn ran_out(&self) -> bool {
        self.lasting.as_ref().is_some_and(|sheets| sheets.ran_out)
    }

    /// The area that `page` is in, and what is known of pages there that come along with others; none where nothing was ever
    /// touched.
    pub fn area(&self, page: PageIndex) -> Option<(Area, Accuracy)> {
        let (number, within) = split(page);
        let chunk = self.chunks.find(number)?;
        let first = within - within % AREA_PAGES;
        Some((std::array::from_fn(|at| chunk.get(first + at)), chunk.accuracy))
    }

    /// Marks its entries, which must keep their states.
    pub(crate) fn mark_area(&mut self, page: PageIndex, area: &Area, accuracy: Accuracy) {
        let (number, within) = split(page);
        let first = within - within % AREA_PAGES;
        let Some(chunk) = self.chunks.slot(number).and_then(|slot| self.chunks.get_mut(slot)) else { return };
        chunk.accuracy = accuracy;
        for (at, entry) in (first..).zip(area) {
            debug_assert_eq!(entry.state(), chunk.get(at).state(), "only marks are changed");
            if *entry != chunk.get(at) {
                chunk.set(at, *entry);
            }
        }
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
        self.chunks.bytes() + (self.chunks.held() * size_of::<[Entry; CHUNK_PAGES]>()) as u64
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
                let entry = chunk.get(usize::try_from(within).expect("below 512"));
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

    /// Of the pages of `[start, start + pages)`, how many are mapped and how many are used at all. Costs a look at each chunk
    /// that lies in the range, and at each page of those that lie in it in part.
    pub fn count_in(&self, start: PageIndex, pages: u64) -> (u64, u64) {
        let end = start.0 + pages;
        let (mut mapped, mut used) = (0, 0);
        let mut count = |chunk: &Chunk| {
            let base = chunk.number * CHUNK_PAGES_U64;
            let (from, to) = (start.0.max(base), end.min(base + CHUNK_PAGES_U64));
            if to - from == CHUNK_PAGES_U64 {
                (mapped, used) = (mapped + u64::from(chunk.mapped), used + u64::from(chunk.used));
                return;
            }
            for within in from - base..to - base {
                let state = chunk.get(usize::try_from(within).expect("below 512")).state();
                mapped += u64::from(state == State::Mapped);
                used += u64::from(state != State::Untouched);
            }
        };
        let numbers = start.0 / CHUNK_PAGES_U64..end.div_ceil(CHUNK_PAGES_U64);
        if numbers.end - numbers.start <= self.chunks.len() as u64 {
            numbers.filter_map(|number| self.chunks.find(number)).for_each(&mut count);
        } else {
            let there = self.chunks.numbers().filter(|number| numbers.contains(number));
            there.filter_map(|number| self.chunks.find(number)).for_each(&mut count);
        }
        (mapped, used)
    }

    /// The next capturable page at or after `hand` that has no second chance left; passes over at most `chunks_max`
    /// chunks. Takes the second chances it meets; `believing` as for [`Entry::take_chance`]. `touched` is asked of each chunk
    /// that the hand comes to, by the first page there that may leave: a page that was touched has a second chance.
    pub fn sweep(
        &mut self,
        hand: &mut Hand,
        chunks_max: &mut usize,
        believing: bool,
        mut touched: Option<&mut dyn FnMut(PageIndex) -> Option<Touches>>,
    ) -> Option<PageIndex> {
        while *chunks_max > 0 {
            if hand.slot >= self.chunks.slots() {
                *hand = Hand::default();
                if self.chunks.slots() == 0 {
                    return None;
                }
            }
            if let Some(chunk) = self.chunks.get_mut(hand.slot).filter(|chunk| chunk.mapped > 0) {
                if let (0, Some(touched)) = (hand.page, &mut touched) {
                    let number = chunk.number;
                    chunk.reference(number, touched);
                }
                while hand.page < CHUNK_PAGES {
                    let within = hand.page;
                    hand.page += 1;
                    let mut entry = chunk.get(within);
                    if !entry.is_candidate() {
                        continue;
                    }
                    let had = entry.take_chance(believing);
                    chunk.set(within, entry);
                    if !had {
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

    /// The next page at or after `hand` that is mapped and has a clean copy, before the table's end; none where that is further away
    /// than so many chunks, of which those passed are taken off.
    pub fn next_clean(&self, hand: &mut Hand, chunks: &mut usize) -> Option<PageIndex> {
        let clean = |entry: Entry| entry.state() == State::Mapped && entry.handle().is_some();
        self.next_within(hand, chunks, |chunk| chunk.mapped > 0, clean)
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
        let mut all = usize::MAX;
        self.next_within(hand, &mut all, look_in, wanted)
    }

    fn next_within(
        &self,
        hand: &mut Hand,
        chunks: &mut usize,
        look_in: impl Fn(&Chunk) -> bool,
        wanted: impl Fn(Entry) -> bool,
    ) -> Option<PageIndex> {
        while hand.slot < self.chunks.slots() {
            if *chunks == 0 {
                return None;
            }
            if let Some(chunk) = self.chunks.get(hand.slot).filter(|chunk| look_in(chunk)) {
                while hand.page < CHUNK_PAGES {
                    let within = hand.page;
                    hand.page += 1;
                    if wanted(chunk.get(within)) {
                        return Some(PageIndex(chunk.number * CHUNK_PAGES_U64 + within as u64));
                    }
                }
            }
            *hand = Hand { slot: hand.slot + 1, page: 0 };
            *chunks -= 1;
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
        if let Some(sheets) = &mut self.lasting {
            while sheets.spare.len() < STOCK {
                let Some(sheet) = (sheets.more)() else { break };
                sheets.spare.push(sheet);
            }
        }
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
    fn a_count_is_that_of_its_pages() {
        let mut table = Table::default();
        for page in (0..3000).step_by(7).chain([1 << 40]) {
            map(&mut table, page);
        }
        for page in (0..3000).step_by(21) {
            table.update(PageIndex(page), |entry| entry.step(Step::Capture(BufferIndex(0)))).expect("legal");
        }
        for (start, pages) in [(0, 1), (0, 512), (1, 511), (500, 1600), (512, 1024), (3, 1 << 41), (2990, 100)] {
            let (mut mapped, mut used) = (0, 0);
            table.used_in(PageIndex(start), pages, |_, entry| {
                mapped += u64::from(entry.state() == State::Mapped);
                used += 1;
            });
            assert_eq!(table.count_in(PageIndex(start), pages), (mapped, used), "{pages} pages from {start} on");
        }
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
            while let Some(page) = table.sweep(&mut hand, &mut chunks, true, None) {
                seen.push(page.0);
            }
            seen.sort_unstable();
            seen
        };
        assert_eq!(turn(&mut table), [3, 700, 5000]);
        assert_eq!(turn(&mut table), [3, 4, 700, 5000]);
    }

    #[test]
    fn what_was_touched_has_a_second_chance() {
        let mut table = Table::default();
        for page in [1, 2, 3, 600, 601] {
            map(&mut table, page);
        }
        // What came without having been asked for looks touched from the beginning.
        table.update(PageIndex(3), Entry::set_ahead);
        let (mut hand, mut chunks, mut asked) = (Hand::default(), 6, Vec::new());
        let mut touched = |page: PageIndex| {
            asked.push(page.0);
            (page.0 < 512).then_some([0b1010, 0, 0, 0, 0, 0, 0, 0])
        };
        let mut found = Vec::new();
        while let Some(page) = table.sweep(&mut hand, &mut chunks, true, Some(&mut touched)) {
            found.push(page.0);
        }
        assert_eq!(found[..6], [2, 3, 600, 601, 2, 3]);
        assert_eq!(asked[..3], [1, 600, 1]);
    }
}

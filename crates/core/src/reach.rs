//! How far a fetch reaches beyond the page that was asked for: blocks, streams, and what is known of their use.
//!
//! A block that is outside as a whole comes back as a whole, with one copy, if pages that came along with others were used
//! often enough in that piece of memory. Otherwise the page that was asked for comes alone. That costs nothing but the chance
//! to be early, and shows exactly which pages of the block are used while it is local: each of them raises its fault. So
//! where blocks do badly, REDUCE sees what dcm sees in access bits. Where they do well, one fetch in [`PROBE_ONE_OF`]
//! leaves out one page of its block, by lot: whether that is asked for tells of all of them, for the price of one fault.
//!
//! A block that is local in part was fetched before; of it, only what is asked for comes.

use std::ops::Range;

use crate::blocks::{AREA_PAGES, Area, Use, block_of, is_local, reduce, stretch};
use crate::page::State;
use crate::pager::Pager;
use crate::policy::Block;
use crate::regions::Region;
use crate::streams::BLOCK_PAGES_MAX;
use crate::trend::Stride;
use crate::units::{PageIndex, TargetId};

const _: () = assert!(AREA_PAGES as u64 == BLOCK_PAGES_MAX);

/// One fetch of a whole block in so many leaves out a page. A fault more for 16 blocks is hardly to be measured, and in a
/// chunk of 2 MiB that has gone bad two or three pages left behind in vain are enough to know.
pub(crate) const PROBE_ONE_OF: u64 = 16;

/// What a fetch may bring: table indexes, one among them that stays, and then pages along a stride.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reach {
    pub(crate) pages: Range<u64>,
    pub(crate) without: Option<PageIndex>,
    stride: Option<Stride>,
    /// The page before the stride's next: the one that was asked for, before anything comes along the stride.
    from: u64,
    /// What a stream suggests behind the page that was asked for, and what a stride does before it.
    behind: Range<u64>,
    before: Range<u64>,
}

impl Reach {
    /// Nothing but `page`.
    fn only(page: PageIndex) -> Self {
        Self::of(page, page.0..page.0 + 1)
    }

    /// `pages`, for a fault at `page`.
    fn of(page: PageIndex, pages: Range<u64>) -> Self {
        let none = page.0..page.0;
        Self { pages, without: None, stride: None, from: page.0, behind: none.clone(), before: none }
    }

    /// Only as many pages as there is room for: of the block, the half that `page` is in, and the half of that.
    fn fit(&mut self, page: PageIndex, room: u64) {
        let mut half = BLOCK_PAGES_MAX;
        while self.pages.end - self.pages.start > room {
            half /= 2;
            let first = page.0 / half * half;
            self.pages = self.pages.start.max(first)..self.pages.end.min(first + half);
        }
    }

    /// The next page along the stride; none when it ends, or leaves `region`.
    pub(crate) fn next_in_stride(&mut self, region: &Region) -> Option<PageIndex> {
        let stride = self.stride.as_mut().filter(|stride| stride.pages > 0)?;
        stride.pages -= 1;
        self.from = self.from.checked_add_signed(stride.distance)?;
        Some(PageIndex(self.from)).filter(|page| region.address_of(*page).is_some())
    }
}

/// Of the block that `page` is in: where it lies in its area.
fn block_in(setting: Block, area: &Area, page: PageIndex) -> Range<usize> {
    let at = at(page);
    match setting.pages() {
        None => block_of(area, at),
        Some(pages) => {
            let pages = usize::try_from(pages).expect("at most an area");
            let start = at / pages * pages;
            start..start + pages
        }
    }
}

fn at(page: PageIndex) -> usize {
    usize::try_from(page.0).unwrap_or(usize::MAX) % AREA_PAGES
}

/// The part of the area of `page` that lies in `region`.
fn area_within(region: &Region, page: PageIndex) -> Range<usize> {
    let base = page.0 - at(page) as u64;
    let clip = |index: u64| usize::try_from(index.clamp(base, base + BLOCK_PAGES_MAX) - base).expect("within an area");
    clip(region.first.0)..clip(region.first.0 + region.span.pages())
}

impl Pager {
    /// What a fault at `page`, which is remote, is to fetch, at most `room` pages.
    pub(crate) fn reach(&mut self, target: TargetId, region: &Region, page: PageIndex, room: u64) -> Reach {
        let longest = self.blocks().fetch_pages;
        if longest == 1 || self.table.get(page).is_stuck() {
            return Reach::only(page);
        }
        if self.replacement.settings().block != Block::Elastic {
            let mut block = self.block_to_fetch(target, region, page, true);
            block.fit(page, room);
            return block;
        }
        let rest = region.first.0 + region.span.pages() - page.0;
        let (ahead, stride) = self.trend_of(target, page, longest.min(rest).min(room));
        let mut reach = self.block_to_fetch(target, region, page, ahead == 1 && stride.is_none());
        reach.behind = page.0 + 1..page.0 + ahead;
        reach.pages.end = reach.pages.end.max(reach.behind.end);
        match stride {
            // Backwards page by page: one copy does.
            Some(Stride { distance: -1, pages }) => {
                reach.before = page.0.saturating_sub(pages).max(region.first.0)..page.0;
                reach.pages.start = reach.pages.start.min(reach.before.start);
            }
            _ => reach.stride = stride,
        }
        reach.fit(page, room);
        self.streams[target.0 as usize].reaches(reach.pages.end);
        if !reach.before.is_empty() {
            self.trends[target.0 as usize].reaches(reach.pages.start.wrapping_sub(1));
        }
        reach
    }

    /// `pages` of `reach`, none of them along a stride, are on their way. Whether those were used that nobody asked for is learnt later:
    /// from where a stream goes on, or from the next page that a block leaves out.
    pub(crate) fn owe(&mut self, target: TargetId, reach: &Reach, pages: &Range<u64>) {
        let of = |line: &Range<u64>| line.end.min(pages.end).saturating_sub(line.start.max(pages.start));
        let (behind, before) = (of(&reach.behind), of(&reach.before));
        self.streams[target.0 as usize].owes(behind);
        self.trends[target.0 as usize].owes(before);
        self.unprobed += pages.end - pages.start - u64::from(pages.contains(&reach.from)) - behind - before;
    }

    /// How many pages the stream of a fault at `page` suggests, or else the stride that it belongs to.
    fn trend_of(&mut self, target: TargetId, page: PageIndex, longest: u64) -> (u64, Option<Stride>) {
        let (streams, trend) = (&mut self.streams[target.0 as usize], &mut self.trends[target.0 as usize]);
        let mut pages = streams.suggest(page, longest);
        let mut stride = None;
        if streams.is_exact() {
            trend.streams(page);
        } else {
            stride = trend.fault(page);
            if stride.is_some() {
                streams.moved(page, 1);
                pages = 1;
            }
        }
        for (others, used) in [streams.learnt(), trend.learnt()] {
            self.note_sample(others, used);
        }
        (pages, stride)
    }

    fn note_sample(&mut self, others: u64, used: u64) {
        self.counters.sampled_pages += others;
        self.counters.sampled_used_pages += used;
    }

    /// The block of `page`, stretched if it is to be, or `page` alone; with a page left out, by lot, if there `may` be one.
    fn block_to_fetch(&mut self, target: TargetId, region: &Region, page: PageIndex, may: bool) -> Reach {
        let (setting, enough) = (self.replacement.settings().block, self.blocks().enough);
        let within = area_within(region, page);
        let Some((mut area, accuracy)) = self.table.area(page) else { return Reach::only(page) };
        let block = block_in(setting, &area, page);
        if is_local(&area, &block) {
            return Reach::only(page);
        }
        let is_worth_it = setting != Block::Elastic || accuracy >= enough;
        let comes_whole = block.len() > 1 && is_worth_it;
        let stretched = if setting == Block::Elastic { stretch(&mut area, &block, &within) } else { None };
        let start = page.0 - at(page) as u64;
        let first = block.start.max(within.start);
        let pages = start + first as u64..start + block.end.min(within.end) as u64;
        if let Some(buddy) = stretched {
            self.table.mark_area(page, &area, accuracy);
            self.counters.stretches += 1;
            // Where pages come alone, they also leave alone: a second chance for half of all pages would only scatter victims.
            if is_worth_it {
                self.freshen(target, start, &buddy);
            }
        }
        if !comes_whole {
            return Reach::only(page);
        }
        let without = if may { self.left_out(page, &pages) } else { None };
        Reach { without, ..Reach::of(page, pages) }
    }

    /// A page of `pages` that could come along with `page` and is to stay; none most of the time.
    fn left_out(&mut self, page: PageIndex, pages: &Range<u64>) -> Option<PageIndex> {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        if !self.random.is_multiple_of(PROBE_ONE_OF) {
            return None;
        }
        let may = |index: &u64| *index != page.0 && self.table.get(PageIndex(*index)).state() == State::Remote;
        let count = pages.clone().filter(may).count() as u64;
        let nth = (self.random >> 32).checked_rem(count)?;
        pages.clone().filter(may).nth(usize::try_from(nth).ok()?).map(PageIndex)
    }

    /// A block was stretched over `buddy`, which has been local for a while: its turn to leave comes as late as that of the
    /// page that comes now.
    fn freshen(&mut self, target: TargetId, area_starts: u64, buddy: &Range<usize>) {
        for page in buddy.clone().map(|i| PageIndex(area_starts + i as u64)) {
            if self.table.get(page).is_candidate() {
                self.table.update(page, crate::page::Entry::set_referenced);
                if let Some(policy) = self.replacement.of(target) {
                    policy.stretched(page);
                }
            }
        }
    }

    /// `page` left local memory. If it was the last of its block, what is known of the block's use is drawn on: REDUCE.
    pub(crate) fn left(&mut self, page: PageIndex) {
        let (setting, enough) = (self.replacement.settings().block, self.blocks().enough);
        let Some((mut area, mut accuracy)) = self.table.area(page) else { return };
        let block = block_in(setting, &area, page);
        if is_local(&area, &block) {
            return;
        }
        if block.len() > 1 {
            let all = Use::of(&area, &block);
            // Both halves of what was stretched meanwhile had been asked for: that says nothing of what comes along.
            let sample = all.sample().filter(|_| !area[block.clone()].iter().any(|entry| entry.is_stretched()));
            if let Some((others, used)) = sample {
                if all.is_probe() && (setting != Block::Elastic || accuracy >= enough) {
                    // It stands for all that have come with their blocks since the last one did.
                    let all = std::mem::take(&mut self.unprobed);
                    self.note_sample(all, if used > 0 { all } else { 0 });
                }
                accuracy.learn(others, used);
            }
            if setting == Block::Elastic && all.is_half_or_less() {
                reduce(&mut area, &block);
                self.counters.reductions += 1;
            }
        }
        area[block].iter_mut().for_each(crate::page::Entry::forget_use);
        self.table.mark_area(page, &area, accuracy);
    }

    /// The block of `page` falls apart: its pages have nothing in common any more.
    pub(crate) fn part(&mut self, page: PageIndex) {
        if let Some((mut area, accuracy)) = self.table.area(page) {
            let block = block_of(&area, at(page));
            reduce(&mut area, &block);
            self.table.mark_area(page, &area, accuracy);
        }
    }

    /// A region ends before `page`, or begins with it: no block has pages on both sides.
    pub(crate) fn part_before(&mut self, page: PageIndex) {
        if self.table.area(page).is_some_and(|(area, _)| area[at(page)].is_joined()) {
            self.part(page);
        }
    }

    /// The first page behind the block of `page`.
    pub(crate) fn block_end(setting: Block, area: Option<&Area>, page: PageIndex) -> PageIndex {
        let end = area.map_or(at(page) + 1, |area| block_in(setting, area, page).end);
        page.plus((end - at(page)) as u64)
    }

    /// Pages in blocks of 1, 2, 4, 8 and 16 pages.
    pub fn block_pages(&self) -> [u64; 5] {
        let mut pages = [0; 5];
        self.table.used_in(PageIndex(0), u64::MAX, |page, _| {
            let Some((area, _)) = self.table.area(page) else { return };
            let block = block_in(self.replacement.settings().block, &area, page);
            pages[block.len().ilog2() as usize] += 1;
        });
        pages
    }

    /// Every block against what blocks are: for [`Pager::audit`].
    pub(crate) fn audit_blocks(&self) {
        self.table.used_in(PageIndex(0), u64::MAX, |page, _| {
            let Some((area, _)) = self.table.area(page) else { return };
            let block = block_of(&area, at(page));
            let pages = block.len();
            assert!(pages.is_power_of_two() && block.start.is_multiple_of(pages), "{page:?} in {block:?}");
            let start = page.0 - at(page) as u64;
            let region = self.regions.of_page(page).expect("used pages are in regions");
            let last = PageIndex(start + block.end as u64 - 1);
            let (first, last) = (PageIndex(start + block.start as u64), last);
            let inside = [first, last].iter().all(|page| region.address_of(*page).is_some());
            assert!(inside, "{block:?} of {page:?} leaves {region:?}");
        });
    }
}

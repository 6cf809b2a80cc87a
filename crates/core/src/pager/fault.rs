//! What faults need: the page, and what comes along with it.

use super::{Pager, Plan};
use crate::page::{State, Step};
use crate::reach::Reach;
use crate::regions::Region;
use crate::streams::BLOCK_PAGES_MAX;
use crate::units::{Address, PageIndex, TargetId};

/// What else a fetch reaches: from `next` on.
#[derive(Clone, Debug)]
pub(super) struct Ahead {
    region: Region,
    reach: Reach,
    next: u64,
    room: u64,
}

impl Pager {
    /// What to do about a fault at `address`.
    pub fn fault(&mut self, target: TargetId, address: Address) -> Plan {
        let address = address.page();
        self.ahead = None;
        let Some(region) = self.regions.at(target, address) else {
            return Plan::Zero { address, pages: 1, page: None };
        };
        let page = region.page_at(address);
        let entry = self.table.get(page);
        if let (State::Inactive | State::Writing, Some(buffer)) = (entry.state(), entry.buffer()) {
            return Plan::Buffer { address, page, buffer };
        }
        let room = self.room_of(target);
        let state = entry.state();
        match state {
            State::Mapped => Plan::Zero { address, pages: 1, page: Some(page) },
            State::Lost => Plan::Lost { address },
            State::Untouched | State::Remote if room == 0 => {
                // One that has all that it may have says nothing of what all have.
                if self.room_pages() == 0 {
                    self.replacement.note_short();
                }
                Plan::NoRoom
            }
            State::Untouched => {
                self.note_room();
                let most = region.span.end.pages_since(address).min(room);
                let longest = self.replacement.settings().block.pages().unwrap_or(BLOCK_PAGES_MAX);
                let longest = longest.min(self.blocks.fill_pages);
                let wanted = self.streams[target.0 as usize].suggest(page, longest).min(most);
                let alike = self.alike(page, wanted);
                self.streams[target.0 as usize].moved(page, alike);
                Plan::Zero { address, pages: alike, page: Some(page) }
            }
            State::Remote => {
                self.note_room();
                let reach = self.reach(target, &region, page, room);
                let run = self.run_around(page, &reach);
                let fetch = self.fetch(&region, run.clone(), page.0 - run.start);
                self.owe(target, &reach, &run);
                let room = room - (run.end - run.start);
                self.ahead = Some(Ahead { region, next: reach.pages.start, reach, room });
                fetch
            }
            State::Fetching => Plan::Coming,
            State::Inactive | State::Writing => unreachable!("buffered pages were answered above"),
        }
    }

    /// What else to fetch for the fault that [`Pager::fault`] was last asked about: the next remote pages of its block and of
    /// its stream, beyond pages that are there already. None when there are no more.
    pub fn ahead(&mut self) -> Option<Plan> {
        let Ahead { region, reach, next, room } = self.ahead.take()?;
        let comes = |index: &u64| self.comes(PageIndex(*index), &reach);
        let Some(from) = (next..reach.pages.end).find(comes) else { return self.stride_ahead(region, reach, room) };
        let most = reach.pages.end.min(from + room.min(BLOCK_PAGES_MAX));
        let end = (from..most).find(|index| !comes(index)).unwrap_or(most);
        if end == from {
            return None;
        }
        let fetch = self.fetch(&region, from..end, 0);
        self.owe(region.target, &reach, &(from..end));
        self.ahead = Some(Ahead { region, reach, next: end, room: room - (end - from) });
        Some(fetch)
    }

    /// The same, along a stride.
    fn stride_ahead(&mut self, region: Region, mut reach: Reach, room: u64) -> Option<Plan> {
        if room == 0 {
            if let Some(next) = reach.next_in_stride(&region) {
                self.trends[region.target.0 as usize].reaches(next.0);
            }
            return None;
        }
        while let Some(page) = reach.next_in_stride(&region) {
            if self.comes(page, &reach) {
                let fetch = self.fetch(&region, page.0..page.0 + 1, 0);
                self.trends[region.target.0 as usize].owes(1);
                self.ahead = Some(Ahead { region, next: reach.pages.end, reach, room: room - 1 });
                return Some(fetch);
            }
        }
        None
    }

    /// Whether `page` is to be fetched along with others.
    fn comes(&self, page: PageIndex, reach: &Reach) -> bool {
        reach.without != Some(page) && self.table.get(page).state() == State::Remote
    }

    /// The pages around `page` that come in one go: at most a block, and not beyond what is not to come.
    fn run_around(&self, page: PageIndex, reach: &Reach) -> std::ops::Range<u64> {
        let end = (page.0 + 1..reach.pages.end).take_while(|&index| self.comes(PageIndex(index), reach)).count() as u64;
        let end = page.0 + 1 + end.min(BLOCK_PAGES_MAX - 1);
        let first = reach.pages.start.max(end.saturating_sub(BLOCK_PAGES_MAX));
        let before = (first..page.0).rev().take_while(|&index| self.comes(PageIndex(index), reach)).count() as u64;
        page.0 - before..end
    }

    /// Begins to fetch `pages`, the `asked`th of which a fault is about.
    pub(crate) fn fetch(&mut self, region: &Region, pages: std::ops::Range<u64>, asked: u64) -> Plan {
        let page = PageIndex(pages.start);
        let address = region.address_of(page).expect("a fetch stays in its region");
        pages.clone().for_each(|index| self.step(PageIndex(index), Step::Fetch));
        Plan::Fetch { address, page, pages: pages.end - pages.start, asked }
    }

    /// A fault has found room: none is to be made for it any more.
    fn note_room(&mut self) {
        if self.is_on_demand() {
            self.replacement.note_room();
        }
    }

    /// Of `most` pages from `page` on, how many are in its state.
    fn alike(&self, page: PageIndex, most: u64) -> u64 {
        let state = self.table.get(page).state();
        (0..most).find(|&i| self.table.get(page.plus(i)).state() != state).unwrap_or(most)
    }
}

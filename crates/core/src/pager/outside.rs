//! Which pages are not in their targets, and what can be given up of those that are.

use super::Pager;
use crate::page::{BURDENS_MAX, HandleBits, State, Step};
use crate::table::CHUNK_PAGES;
use crate::units::{Address, PageIndex, TargetId};

/// Chunks that one call of [`Pager::forgo_clean`] looks at: some ten microseconds.
const FORGOING_CHUNKS: usize = 16;

impl Pager {
    /// Up to `most` pages that are not in their targets, and where they belong; none when a whole pass found none. The
    /// pass goes on from call to call.
    pub fn outside(&mut self, most: usize, into: &mut Vec<(TargetId, Address, PageIndex)>) {
        into.clear();
        let from_start = self.home_hand.is_start();
        while into.len() < most {
            let Some(page) = self.table.next_outside(&mut self.home_hand) else { break };
            into.extend(self.regions.address_of(page).map(|(target, address)| (target, address, page)));
        }
        if into.is_empty() && !from_start {
            self.outside(most, into);
        }
    }

    /// The same for one target, from `from` on: up to `most` pages, and at most as many looked at as fit into a chunk. Where to
    /// go on; none at its end.
    pub fn outside_of(
        &self,
        target: TargetId,
        from: Address,
        most: usize,
        into: &mut Vec<(TargetId, Address, PageIndex)>,
    ) -> Option<Address> {
        let region = self.regions.next_at(target, from)?;
        let start = region.span.start.max(from);
        let pages = region.span.end.pages_since(start).min(CHUNK_PAGES as u64);
        let mut next = start.plus_pages(pages);
        self.table.used_in(region.page_at(start), pages, |page, entry| {
            let Some(address) = region.address_of(page).filter(|&address| address < next) else { return };
            if matches!(entry.state(), State::Untouched | State::Mapped | State::Lost) {
                return;
            }
            into.push((target, address, page));
            if into.len() >= most {
                next = address.plus_pages(1);
            }
        });
        Some(next)
    }

    /// Where `target` has pages that are lost.
    pub fn lost_in(&self, target: TargetId) -> Vec<Address> {
        let mut lost = Vec::new();
        if self.has_lost {
            for region in self.regions.of(target) {
                self.table.used_in(region.first, region.span.pages(), |page, entry| {
                    lost.extend(region.address_of(page).filter(|_| entry.state() == State::Lost));
                });
            }
        }
        lost
    }

    /// Looks at up to `most` clean copies of pages that are in their targets, and gives up those that are `burdens` to the store,
    /// which is asked about [`BURDENS_MAX`] at a time and answers with a bit for each. The pass goes on from call to call, each of which
    /// looks at a few chunks only.
    pub fn forgo_clean(&mut self, most: usize, mut burdens: impl FnMut(&[HandleBits]) -> u64) {
        let (mut chunks, mut left) = (FORGOING_CHUNKS, most);
        let mut pages = [PageIndex(0); BURDENS_MAX];
        let mut handles = [HandleBits::MIN; BURDENS_MAX];
        while left > 0 {
            let (wanted, mut count) = (left.min(BURDENS_MAX), 0);
            while count < wanted {
                let Some(page) = self.table.next_clean(&mut self.clean_hand, &mut chunks) else { break };
                if let Some(handle) = self.handle_of(page) {
                    (pages[count], handles[count]) = (page, handle);
                    count += 1;
                }
            }
            let found = burdens(&handles[..count]);
            for at in (0..count).filter(|at| found >> at & 1 == 1) {
                self.forgo(pages[at], handles[at]);
            }
            if count < wanted {
                return;
            }
            left -= wanted;
        }
    }

    /// The store had better be without `handle`, the clean copy of `page`: it is given up if the page is in its target.
    pub fn forgo(&mut self, page: PageIndex, handle: HandleBits) {
        let entry = self.table.get(page);
        if entry.state() == State::Mapped && entry.handle() == Some(handle) {
            self.step(page, Step::Forgo);
        }
    }
}

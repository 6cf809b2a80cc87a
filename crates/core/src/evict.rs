//! Eviction: which pages leave next (clock over the table), and what leaves the buffers for the store.
//!
//! The kernel gives us no access bits, so a page's second chance comes from what we do see: it came back from a buffer
//! soon after it was captured, or the kernel would not move it. Sweeping in table order makes victims adjacent, and
//! adjacent pages leave in one move with one TLB flush.

use crate::page::{BufferIndex, Entry, HandleBits, State, Step};
use crate::pager::Pager;
use crate::regions::Region;
use crate::streams::BLOCK_PAGES_MAX;
use crate::units::{Address, PageIndex, TargetId};

/// The most pages that are ever captured at once: what the agent's control pages have room for.
pub const BATCH_PAGES_MAX: u64 = 256;

/// Adjacent pages of one target to capture with one move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Where the first is mapped.
    pub address: Address,
    /// The first page; the others follow.
    pub page: PageIndex,
    /// How many: at most a block.
    pub pages: u64,
}

/// What became of a page that was to be captured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Captured {
    /// It is in this buffer ([`Pager::take_buffer`]).
    Buffer(BufferIndex),
    /// It held only zeros, or was not there: nothing is kept.
    Zero,
    /// The kernel would not move it (pinned, shared with a forked child, locked, read-only).
    Stuck,
    /// It was moved out of the target and could not be read: an access must fail loudly.
    Lost,
    /// It was not tried: the target's mappings were changing.
    Untried,
}

/// A page on its way to the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Write {
    /// Which.
    pub page: PageIndex,
    /// Where its bytes are.
    pub buffer: BufferIndex,
    /// Its clean copy, for the store to compare with: unchanged pages are not written.
    pub previous: Option<HandleBits>,
}

impl Pager {
    /// Pages that should be free before the next burst of faults, given the budget.
    fn reserve_pages(&self) -> u64 {
        self.batch_pages()
    }

    /// Pages that are kept in buffers, after capture, for the chance that they come back.
    fn inactive_pages_kept(&self) -> u64 {
        (self.budget_pages() / 64).clamp(4, 64)
    }

    /// Pages in buffers that the store should have: they become free without another capture.
    fn due_writes(&self) -> u64 {
        (self.inactive.len() as u64).saturating_sub(self.inactive_pages_kept())
    }

    /// Whether buffered pages wait to be written ([`Pager::next_write`]).
    pub fn has_due_writes(&self) -> bool {
        !self.store_full && self.due_writes() > 0
    }

    /// Whether the store declined a page and has taken none since.
    pub fn is_store_full(&self) -> bool {
        self.store_full
    }

    /// How many pages to capture now so that enough will be free for the next burst of faults; zero when enough are.
    /// Goes for twice the reserve, so that captures come in batches.
    pub fn wanted_captures(&self) -> u64 {
        if self.store_full {
            // One page is enough to ask with whether it takes pages again.
            return u64::from(self.inactive.is_empty() && self.local_pages() > self.budget_pages());
        }
        // What a slow store is still taking over makes room as well: it must not cost further pages.
        let leaving = self.due_writes() + self.table.writing();
        let coming = self.free_pages().saturating_add(leaving);
        let over = self.local_pages().saturating_sub(self.budget_pages().saturating_add(leaving));
        if coming >= self.reserve_pages() && over == 0 {
            return 0;
        }
        (2 * self.reserve_pages()).saturating_sub(coming) + over
    }

    /// The most pages to capture at once. Large, because a batch has a fixed cost, and because then fewer than one fault in
    /// a hundred meets one; but a small budget should not lose a large part of itself to it.
    pub fn batch_pages(&self) -> u64 {
        (self.budget_pages() / 256).clamp(8, BATCH_PAGES_MAX)
    }

    /// Chooses up to `most` pages of one target to capture, as runs of adjacent pages appended to `runs`. Targets for
    /// which `may` is false are passed over. Returns whose pages they are.
    pub fn next_capture(&mut self, most: u64, may: impl Fn(TargetId) -> bool, runs: &mut Vec<Run>) -> Option<TargetId> {
        let mut left = most.min(self.free_buffers.len() as u64);
        // Two turns: the first may only take second chances.
        let mut chunks = 2 * self.table.chunk_slots();
        let mut whose: Option<TargetId> = None;
        let mut last: Option<Run> = None;
        let mut region: Option<Region> = None;
        let mut first: Option<PageIndex> = None;
        while left > 0 {
            let Some(page) = self.table.sweep(&mut self.hand, &mut chunks) else { break };
            if first == Some(page) {
                // All the way round: from here on, pages would be chosen twice.
                break;
            }
            if self.is_kept(page) {
                continue;
            }
            // Regions are looked up by search, and pages come in order: most are in the region of the one before.
            if region.is_none_or(|region| region.address_of(page).is_none()) {
                region = self.regions.of_page(page);
                runs.extend(last.take());
            }
            let Some((there, address)) = region.and_then(|region| Some((region, region.address_of(page)?))) else {
                continue;
            };
            let target = there.target;
            if let Some(run) = &mut last
                && whose == Some(target)
                && page == run.page.plus(run.pages)
                && run.pages < BLOCK_PAGES_MAX
            {
                run.pages += 1;
                left -= 1;
                continue;
            }
            match whose {
                None if may(target) => whose = Some(target),
                None => {
                    // All of this region's pages are passed over, not one after the other.
                    self.hand.skip(there.span.end.pages_since(address) - 1);
                    continue;
                }
                Some(whose) if whose == target => {}
                Some(_) => {
                    self.hand.step_back();
                    break;
                }
            }
            first = first.or(Some(page));
            runs.extend(last.replace(Run { address, page, pages: 1 }));
            left -= 1;
        }
        runs.extend(last);
        whose
    }

    /// From now on the pages at `addresses`, and no others of `target`, stay where they are once they are mapped: the kernel
    /// touches them where it cannot wait for a fault.
    pub fn keep(&mut self, target: TargetId, addresses: &[Address]) {
        self.kept.retain(|(_, whose)| *whose != target);
        for &address in addresses {
            let region = self.regions.at(target, address.page());
            self.kept.extend(region.map(|region| (region.page_at(address.page()), target)));
        }
        self.kept.sort_unstable();
    }

    pub(crate) fn is_kept(&self, page: PageIndex) -> bool {
        self.kept.binary_search_by_key(&page, |(kept, _)| *kept).is_ok()
    }

    /// A free buffer for a captured page, to be named in [`Pager::captured`] next.
    pub fn take_buffer(&mut self) -> Option<BufferIndex> {
        let buffer = self.free_buffers.pop()?;
        self.set_aside += 1;
        Some(buffer)
    }

    /// Gives back a buffer that was taken and not used.
    pub fn return_buffer(&mut self, buffer: BufferIndex) {
        self.set_aside -= 1;
        self.free_buffers.push(buffer);
    }

    /// The outcome of capturing `page`.
    pub fn captured(&mut self, page: PageIndex, outcome: Captured) {
        match outcome {
            Captured::Buffer(buffer) => {
                self.step(page, Step::Capture(buffer));
                self.set_aside -= 1;
                self.inactive.push_back(page);
                self.counters.evicted_pages += 1;
                self.note_local();
            }
            Captured::Zero => {
                self.step(page, Step::CaptureZero);
                self.counters.evicted_pages += 1;
                self.counters.zero_drops += 1;
                self.tighten();
            }
            Captured::Stuck => {
                self.table.update(page, Entry::set_stuck);
                self.counters.stuck_pages += 1;
            }
            Captured::Lost => {
                self.step(page, Step::CaptureLost);
                self.counters.lost_pages += 1;
            }
            Captured::Untried => {}
        }
    }

    /// The next page to hand to the store; none while few enough wait in buffers. `all` empties the buffers.
    pub fn next_write(&mut self, all: bool) -> Option<Write> {
        let kept = if all || self.store_full { 0 } else { self.inactive_pages_kept() };
        while self.inactive.len() as u64 > kept || self.inactive.len() * 2 > self.inactive.capacity() {
            let page = self.inactive.pop_front()?;
            let entry = self.table.get(page);
            if entry.state() == State::Inactive {
                let buffer = entry.buffer().expect("inactive pages have one");
                self.step(page, Step::Write);
                return Some(Write { page, buffer, previous: entry.handle() });
            }
        }
        None
    }

    /// The store took the page; `clean` when its copy was right already and nothing was written.
    pub fn written(&mut self, write: Write, handle: HandleBits, clean: bool) {
        self.store_full = false;
        self.counters.clean_drops += u64::from(clean);
        self.counters.written_pages += u64::from(!clean);
        self.step(write.page, Step::Written(handle));
        self.tighten();
    }

    /// The store took the page under `handle` and will say whether it keeps it ([`Pager::stored`], [`Pager::refused`]). The
    /// page stays in its buffer until then.
    pub fn handed(&mut self, write: Write, handle: HandleBits) {
        self.step(write.page, Step::Hand(handle));
    }

    /// The store keeps what it was handed for `page` under `handle`. If the page came back or changed meanwhile, that is its
    /// clean copy, or was released.
    pub fn stored(&mut self, page: PageIndex, handle: HandleBits) {
        self.store_full = false;
        self.counters.written_pages += 1;
        let entry = self.table.get(page);
        if entry.state() == State::Writing && entry.handle() == Some(handle) {
            self.step(page, Step::Written(handle));
            self.tighten();
        }
    }

    /// The store did not keep what it was handed for `page` under `handle`, which is void and not to be freed any more.
    pub fn refused(&mut self, page: PageIndex, handle: HandleBits) {
        self.store_full = true;
        let entry = self.table.get(page);
        if entry.handle() == Some(handle) {
            self.step(page, Step::Refuse);
            if entry.state() == State::Writing {
                self.inactive.push_back(page);
            }
        } else {
            // The page has given it up, and the driver may not have freed it yet.
            self.released.retain(|released| *released != handle);
        }
    }

    /// The store declined the page: it stays in its buffer, and targets may go past the budget until the store takes
    /// pages again.
    pub fn write_declined(&mut self, write: Write) {
        self.store_full = true;
        self.step(write.page, Step::Keep);
        self.inactive.push_back(write.page);
    }
}

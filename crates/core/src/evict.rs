//! Eviction: when pages leave and how many, what became of them, and what leaves the buffers for the store. Which pages
//! leave is the business of [`crate::policy`].

use crate::page::{BufferIndex, Entry, HandleBits, State, Step};
use crate::pager::Pager;
use crate::policy::{Refusal, Scheme};
use crate::streams::BLOCK_PAGES_MAX;
use crate::units::{Address, PageIndex, TargetId};

/// The most pages that are ever captured at once: what the agent's control pages have room for.
pub const BATCH_PAGES_MAX: u64 = 256;
/// A batch is one part in so many of the budget, up to [`BATCH_PAGES_MAX`]: from 8 MiB on, enough pages for another CPU to be woken for them.
pub const BATCH_SHARE: u64 = 64;

/// Captured pages that a slow store may leave waiting: beyond that, capturing more would only fill buffers.
const BACKLOG_PAGES_MAX: u64 = 1024;

/// Below so large a budget no room is made ahead of faults. It would be most of what there is: a page would leave before the
/// thread that it came for has run.
const AHEAD_FROM_PAGES: u64 = 16;

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
    /// It was moved out, and its bytes go to this buffer ([`Pager::take_buffer`], then [`Pager::read`]).
    Moved(BufferIndex),
    /// The kernel would not move it (pinned, merged, shared with a forked child, locked, read-only).
    Stuck,
    /// It was not tried: the target's mappings were changing.
    Untried,
}

/// What was read of a page that was moved out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bytes {
    /// They are in the buffer.
    Here,
    /// All are zero, or nothing was there: nothing is kept.
    Zero,
    /// They could not be read: an access must fail loudly.
    Lost,
    /// The same, and there is nobody left to access them, as far as can be told: not worth telling.
    Gone,
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

/// What is left of a reserve when captures come before faults: enough to last until the room of a batch is free, as a fault that finds
/// none waits for all of that.
pub(crate) fn low(reserve: u64) -> u64 {
    reserve / 2
}

/// A batch of so large a budget, however small that is.
pub(crate) fn batch_of(budget_pages: u64) -> u64 {
    (budget_pages / BATCH_SHARE).clamp(8, BATCH_PAGES_MAX)
}

impl Pager {
    /// Pages that should be free before the next burst of faults, given the budget.
    fn reserve_pages(&self) -> u64 {
        self.batch_pages() + self.replacement.more_reserve()
    }

    /// Below so many free pages, captures come before the faults that keep coming.
    pub fn low_pages(&self) -> u64 {
        low(self.reserve_pages())
    }

    /// Pages that are kept in buffers, after capture, for the chance that they come back.
    fn inactive_pages_kept(&self) -> u64 {
        let pages = self.replacement.settings().policy.inactive_pages(self.budget_pages());
        // A batch must find buffers beside them.
        pages.min(u64::from(self.buffers()) / 2)
    }

    /// Pages for which there is a buffer, as long as the store has not too much to take over.
    pub fn capturable_pages(&self) -> u64 {
        let backlog = self.due_writes() + self.table.writing();
        (self.free_buffers.len() as u64).min(BACKLOG_PAGES_MAX.saturating_sub(backlog))
    }

    /// Pages in buffers that the store should have: they become free without another capture.
    fn due_writes(&self) -> u64 {
        (self.inactive.len() as u64).saturating_sub(self.inactive_pages_kept())
    }

    /// Whether buffered pages are to be written now ([`Pager::next_write`]): a batch of them, or any where room is short.
    pub fn has_due_writes(&self) -> bool {
        let due = self.due_writes();
        !self.store_full && due > 0 && (due >= self.write_batch || self.free_pages() < self.write_batch)
    }

    /// Whether the store declined a page and has taken none since.
    pub fn is_store_full(&self) -> bool {
        self.store_full
    }

    /// How many pages to capture now so that enough will be free for the next burst of faults; zero when enough are.
    /// Pre-eviction goes for twice the reserve, so that captures come in batches.
    pub fn wanted_captures(&self) -> u64 {
        let own = if self.replacement.is_divided() && !self.store_full { self.replacement.own_excess().0 } else { 0 };
        self.wanted_of_all().max(own)
    }

    /// Whether captures are so urgent that faults wait for them.
    pub fn is_low(&self) -> bool {
        self.free_pages() < self.low_pages() || (self.replacement.is_divided() && self.replacement.own_excess().1)
    }

    /// Pages to capture now, whosever they are.
    pub(crate) fn wanted_of_all(&self) -> u64 {
        if self.store_full {
            // One page is enough to ask with whether it takes pages again.
            return u64::from(self.inactive.is_empty() && self.local_pages() > self.budget_pages());
        }
        let (coming, over) = (self.free_pages().saturating_add(self.leaving_pages()), self.excess_pages());
        if self.is_on_demand() {
            // As many as a fault may need at most.
            let needed = if self.replacement.is_short() { BLOCK_PAGES_MAX } else { 0 };
            return over.max(needed.saturating_sub(coming));
        }
        if coming >= self.reserve_pages() && over == 0 {
            return 0;
        }
        (2 * self.reserve_pages()).saturating_sub(coming) + over
    }

    /// Pages whose room is as good as free: what a slow store is still taking over must not cost further pages.
    fn leaving_pages(&self) -> u64 {
        self.due_writes() + self.table.writing()
    }

    /// Pages beyond the budget that are not leaving yet.
    fn excess_pages(&self) -> u64 {
        self.local_pages().saturating_sub(self.budget_pages().saturating_add(self.leaving_pages()))
    }

    /// Whether pages leave only when a fault has found no room.
    pub(crate) fn is_on_demand(&self) -> bool {
        self.replacement.settings().evict == Scheme::OnDemand || self.budget_pages() < AHEAD_FROM_PAGES
    }

    /// How many pages to capture with the next batch: as many as are wanted, or less. What is beyond the budget leaves in the
    /// largest batches, however small that is: nothing is lost with it.
    pub fn next_batch_pages(&self) -> u64 {
        self.wanted_captures().min(self.batch_pages().max(self.excess_pages())).min(BATCH_PAGES_MAX)
    }

    /// The most pages to capture at once, where no more than that are beyond the budget. Large, because a batch has a fixed
    /// cost, and because then fewer than one fault in a hundred meets one; but a small budget should not lose a large part of
    /// itself to it.
    pub fn batch_pages(&self) -> u64 {
        let sixteenth = (self.budget_pages() / 16).max(1);
        batch_of(self.budget_pages()).min(sixteenth)
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
            Captured::Moved(buffer) => {
                self.step(page, Step::Capture(buffer));
                self.set_aside -= 1;
                self.unread[buffer.0 as usize] = true;
                self.counters.evicted_pages += 1;
                self.note_local();
            }
            Captured::Stuck => {
                self.table.update(page, Entry::set_stuck);
                self.stays(page, Refusal::Stuck);
                self.counters.stuck_pages += 1;
            }
            Captured::Untried => self.stays(page, Refusal::Untried),
        }
    }

    /// What was read of `page`, which was moved out, for `buffer`. If it came back or was given up meanwhile, that is of no
    /// interest any more. No buffer may be taken between the move and this: it could be the same.
    pub fn read(&mut self, page: PageIndex, buffer: BufferIndex, bytes: Bytes) {
        self.unread[buffer.0 as usize] = false;
        let entry = self.table.get(page);
        if entry.state() != State::Inactive || entry.buffer() != Some(buffer) {
            return;
        }
        match bytes {
            Bytes::Here => self.inactive.push_back(page),
            Bytes::Zero => {
                self.step(page, Step::ReadZero);
                self.counters.zero_drops += 1;
                self.tighten();
            }
            Bytes::Lost | Bytes::Gone => {
                self.step(page, Step::ReadLost);
                self.counters.lost_pages += u64::from(bytes == Bytes::Lost);
            }
        }
    }

    /// The next page to hand to the store; none while few enough wait in buffers. `all` empties the buffers.
    pub fn next_write(&mut self, all: bool) -> Option<Write> {
        let kept = if all || self.store_full { 0 } else { self.inactive_pages_kept() };
        while self.inactive.len() as u64 > kept || self.inactive.len() * 2 > self.inactive.capacity() {
            let page = self.inactive.pop_front()?;
            let entry = self.table.get(page);
            let buffer = entry.buffer().filter(|buffer| !self.unread[buffer.0 as usize]);
            // One that was stolen and captured again comes before its turn, or even before its bytes.
            if let (State::Inactive, Some(buffer)) = (entry.state(), buffer) {
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

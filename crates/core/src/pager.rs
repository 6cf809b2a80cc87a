//! The pager's decisions: what a fault needs, and what its outcome means for the table.
//!
//! Invariants, checked by [`Pager::audit`]: every buffer is free or named by exactly one inactive or writing page; the
//! counts of the budget equal those of the table; what is local (mapped pages and used buffers) exceeds the budget
//! only while the store declines or a scan has just found more.
//!
//! Nothing here waits, allocates on a fault, or knows a clock: the driver asks for a [`Plan`], carries it out and
//! reports the [`Outcome`].

mod audit;
mod fault;
mod outcome;
mod outside;
mod room;

use std::collections::VecDeque;

use crate::blocks::Accuracy;
use crate::book::{Book, Void};
use crate::evict::BATCH_PAGES_MAX;
use crate::mappings::Vacated;
use crate::page::{BufferIndex, HandleBits, Illegal, Released, State, Step};
use crate::policy::replacement::Replacement;
use crate::policy::{Arrival, Refusal, Settings};
use crate::regions::Regions;
use crate::shares::Share;
use crate::streams::{BLOCK_PAGES_MAX, Streams};
use crate::table::{Hand, Table};
use crate::trend::Trend;
use crate::units::{Address, PageIndex, Span, TargetId, TreeId};

use fault::Ahead;

/// How much may be local.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Budget {
    /// So many pages.
    Pages(u64),
    /// A share of the most that was ever touched at one time, and at least `floor_pages`.
    Percent {
        /// 1 to 100.
        percent: u64,
        /// Never fewer pages than this.
        floor_pages: u64,
    },
}

/// What happened, in numbers that only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Faults served.
    pub faults: u64,
    /// Pages filled with zeros on a fault.
    pub zero_fills: u64,
    /// Pages that came back from a buffer.
    pub refaults: u64,
    /// Pages fetched from the store.
    pub fetched_pages: u64,
    /// Pages captured from targets.
    pub evicted_pages: u64,
    /// Pages that the store took.
    pub written_pages: u64,
    /// Captured pages whose clean copy was still right.
    pub clean_drops: u64,
    /// Captured pages that held only zeros.
    pub zero_drops: u64,
    /// Captures that the kernel refused.
    pub stuck_pages: u64,
    /// Pages lost by the store.
    pub lost_pages: u64,
    /// Pages fetched that no fault had asked for.
    pub prefetched_pages: u64,
    /// Such pages, or what stands for them, whose use showed or failed to.
    pub sampled_pages: u64,
    /// Of those, the used ones.
    pub sampled_used_pages: u64,
    /// Blocks that became one with their buddy.
    pub stretches: u64,
    /// Blocks that fell apart, because half of them or less was used.
    pub reductions: u64,
    /// The most pages that were local at one time, but for those that a scan had just found beyond the budget.
    pub local_peak_pages: u64,
    /// The most pages that were local at one time.
    pub burst_peak_pages: u64,
}

/// What the driver is to do about a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plan {
    /// Install zeros.
    Zero {
        /// Where.
        address: Address,
        /// How many pages.
        pages: u64,
        /// The first of them; none when the address is in no region yet: tell the scanner.
        page: Option<PageIndex>,
    },
    /// Copy one page back from its buffer.
    Buffer {
        /// Where.
        address: Address,
        /// Which.
        page: PageIndex,
        /// From here.
        buffer: BufferIndex,
    },
    /// Get pages from the store ([`Pager::handle_of`]) and install them in one go.
    Fetch {
        /// Where.
        address: Address,
        /// The first page.
        page: PageIndex,
        /// How many, at most [`crate::streams::BLOCK_PAGES_MAX`].
        pages: u64,
        /// How many of them come before the page that the fault is about.
        asked: u64,
    },
    /// The page is lost: poison it.
    Lost {
        /// Where.
        address: Address,
    },
    /// The page is on its way already, for an earlier fault, whose installation wakes whoever waits.
    Coming,
    /// The budget is used up: evict, then ask again.
    NoRoom,
}

/// Why an installation ended before its last page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// A page is there already; a waiting fault needs a wake-up.
    Exists,
    /// The target's mappings are changing: read events, then ask again.
    Changing,
    /// The mapping, or the target, is gone.
    Gone,
    /// The target may not have more memory now (its own cgroup's limit): ask again later.
    NoMemory,
}

/// How far an installation got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Pages installed, from the first on.
    pub done: u64,
    /// What ended it early.
    pub stop: Option<Stop>,
}

/// What became of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Served {
    /// The faulting thread runs again.
    Yes,
    /// It still waits; a wake-up is all that it needs.
    Wake,
    /// It still waits; ask again after the next events.
    Later,
}

/// Sizes that a pager is made with.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// The budget.
    pub budget: Budget,
    /// Page buffers that the driver has.
    pub buffers: u32,
    /// Pages that the store had better be given at once: 1 where each is no dearer alone.
    pub write_batch: u64,
}

/// The most pages that one fault moves, 1 to [`BLOCK_PAGES_MAX`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// Filled with zeros.
    pub fill_pages: u64,
    /// Fetched.
    pub fetch_pages: u64,
    /// How often pages that come along must be used, for elastic blocks to come whole.
    pub enough: Accuracy,
}

impl Blocks {
    /// What streams are worth: full blocks.
    pub const LARGEST: Self =
        Self { fill_pages: BLOCK_PAGES_MAX, fetch_pages: BLOCK_PAGES_MAX, enough: Accuracy::ENOUGH };
}

/// The table and the policies over it. See the module's documentation.
pub struct Pager {
    pub(crate) regions: Regions,
    pub(crate) table: Table,
    /// Identities that can be given again.
    vacant: Vec<TargetId>,
    pub(crate) streams: Vec<Streams>,
    pub(crate) trends: Vec<Trend>,
    pub(crate) replacement: Replacement,
    home_hand: Hand,
    clean_hand: Hand,
    ahead: Option<Ahead>,
    /// Pages that came along in blocks since one that was left out told of such.
    pub(crate) unprobed: u64,
    /// A lot that is drawn: nobody depends on it but which page is left out of a block.
    pub(crate) random: u64,
    /// No batch may have more pages than this, not even to keep a block whole.
    pub(crate) most_in_all: u64,
    pub(crate) free_buffers: Vec<BufferIndex>,
    pub(crate) inactive: VecDeque<PageIndex>,
    pub(crate) released: Vec<HandleBits>,
    pub(crate) counters: Counters,
    pub(crate) store_full: bool,
    pub(crate) set_aside: u64,
    /// Of each buffer, whether the bytes of a page that was moved out are still to come.
    pub(crate) unread: Vec<bool>,
    /// Whether any page was ever lost.
    pub(crate) has_lost: bool,
    pub(crate) vacated: Vec<Vacated>,
    /// Said to be unmapped, and not believed yet.
    pub(crate) pending: Vec<(TargetId, Span)>,
    /// What of this outlives the pager, if anything is to.
    pub(crate) book: Option<Book>,
    /// The event that is being applied, or was last.
    pub(crate) applied: u64,
    /// Pages that must not leave, in order, each target's renewed as a whole.
    pub(crate) kept: Vec<(PageIndex, TargetId)>,
    buffers: u32,
    pub(crate) write_batch: u64,
    budget: Budget,
    /// Pages beyond the budget that are local because their target is let go of.
    lent: u64,
    /// How far past the budget faults may go, and how far past what was local when they might.
    overdraft: (u64, u64),
    blocks: Blocks,
    pub(crate) window: Option<Hand>,
    used_peak: u64,
    /// A scan found pages beyond the budget, and eviction has not caught up yet.
    pub(crate) in_burst: bool,
}

impl Pager {
    /// A pager without targets.
    pub fn new(config: Config) -> Self {
        let buffers = usize::try_from(config.buffers).expect("u32 fits");
        Self {
            regions: Regions::default(),
            table: Table::default(),
            vacant: Vec::new(),
            streams: Vec::new(),
            trends: Vec::new(),
            replacement: Replacement::new(BATCH_PAGES_MAX),
            home_hand: Hand::default(),
            clean_hand: Hand::default(),
            ahead: None,
            unprobed: 0,
            random: 0x9E37_79B9_7F4A_7C15,
            most_in_all: u64::MAX,
            free_buffers: (0..config.buffers).rev().map(BufferIndex).collect(),
            // Twice the buffers: a page that was stolen or removed leaves its place in the queue behind.
            inactive: VecDeque::with_capacity(2 * buffers),
            released: Vec::with_capacity(4096),
            counters: Counters::default(),
            store_full: false,
            set_aside: 0,
            unread: vec![false; buffers],
            has_lost: false,
            vacated: Vec::new(),
            pending: Vec::new(),
            book: None,
            applied: 0,
            kept: Vec::new(),
            buffers: config.buffers,
            write_batch: config.write_batch,
            budget: config.budget,
            lent: 0,
            overdraft: (0, 0),
            blocks: Blocks::LARGEST,
            window: None,
            used_peak: 0,
            in_burst: false,
        }
    }

    /// A new address space.
    pub fn add_target(&mut self) -> TargetId {
        let target = self.new_target();
        self.write_down();
        target
    }

    /// What the next target will be.
    pub fn next_target(&self) -> TargetId {
        self.vacant.last().copied().unwrap_or(TargetId(self.targets()))
    }

    /// As [`Pager::add_target`]; nobody else knows of it yet.
    pub(crate) fn new_target(&mut self) -> TargetId {
        if let Some(target) = self.vacant.pop() {
            let at = target.0 as usize;
            (self.streams[at], self.trends[at]) = (Streams::default(), Trend::default());
            self.replacement.renew_target(target);
            return target;
        }
        self.streams.push(Streams::default());
        self.trends.push(Trend::default());
        self.replacement.add_target();
        TargetId(self.targets() - 1)
    }

    /// `target` has ended, and nobody can mean it any more: its identity may be given to another.
    pub fn reuse(&mut self, target: TargetId) {
        assert!(self.regions.of(target).next().is_none(), "{target:?} has memory");
        if !self.vacant.contains(&target) {
            self.vacant.push(target);
        }
    }

    /// Changes how many pages a fault moves.
    pub fn set_blocks(&mut self, blocks: Blocks) {
        self.blocks = blocks;
    }

    /// Changes which pages leave, when and whose. New policies are told of all pages that are in targets, in the table's
    /// order and in one go: faults wait for that, once, when a user asks for it. In turns, each policy would have to bear
    /// with pages that it was never told of.
    pub fn set_replacement(&mut self, settings: Settings) {
        if self.replacement.set(settings) {
            self.tell_all();
        }
    }

    /// `target`, which has no pages yet, is of `tree`, which has this share of local memory.
    pub fn assign(&mut self, target: TargetId, tree: TreeId, share: Share) {
        if self.replacement.assign(target, tree, share) {
            self.tell_all();
        }
    }

    /// The share of the tree that `target` is of.
    pub fn share_of(&self, target: TargetId) -> Option<Share> {
        self.replacement.share_of(target)
    }

    /// `tree` has another share from now on.
    pub fn set_share(&mut self, tree: TreeId, share: Share) {
        if self.replacement.set_share(tree, share) {
            self.tell_all();
        }
    }

    /// Tells policies of every page, and counts those of each tree.
    fn tell_all(&mut self) {
        let (regions, replacement) = (&self.regions, &mut self.replacement);
        self.table.used_in(PageIndex(0), u64::MAX, |page, entry| {
            let (State::Mapped | State::Fetching, Some(region)) = (entry.state(), regions.of_page(page)) else {
                return;
            };
            replacement.count(region.target, State::Untouched, entry.state());
            if entry.state() == State::Mapped {
                replacement.arrived(region.target, page, Arrival::Found, false);
            }
        });
        self.replacement.restock();
    }

    /// Which pages leave, when and whose.
    pub fn replacement(&self) -> Settings {
        self.replacement.settings()
    }

    /// Bytes of the page table, and of the policies beside it.
    pub fn table_bytes(&self) -> u64 {
        self.table.bytes() + self.replacement.bytes()
    }

    /// The counters now.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// The regions.
    pub fn regions(&self) -> &Regions {
        &self.regions
    }

    /// Where `page` is.
    pub fn state_of(&self, page: PageIndex) -> State {
        self.table.get(page).state()
    }

    /// The store's handle for `page`.
    pub fn handle_of(&self, page: PageIndex) -> Option<HandleBits> {
        self.table.get(page).handle()
    }

    /// Prepares for faults to come. Allocates: call it when no fault waits.
    pub fn restock(&mut self) {
        self.table.restock();
        self.replacement.restock();
        if self.table.ran_out() {
            self.book.iter().for_each(|book| book.void(Void::Entries, true));
        }
    }

    /// Whether there are handles that nobody needs any more.
    pub fn has_released(&self) -> bool {
        !self.released.is_empty()
    }

    /// A handle that nobody needs any more, for the driver to free.
    pub fn next_released(&mut self) -> Option<HandleBits> {
        self.released.pop()
    }

    /// One step of one page, with what it releases put where it belongs.
    pub(crate) fn step(&mut self, page: PageIndex, step: Step) {
        self.step_as(page, step, Arrival::Found);
    }

    /// The same; `how` it came, if it is in its target now and was not before.
    fn step_as(&mut self, page: PageIndex, step: Step, how: Arrival) {
        let stepped = self.table.update(page, |entry| {
            let before = entry.state();
            let released = entry.step(step)?;
            match step {
                Step::Fill | Step::Install if how == Arrival::Ahead => entry.set_ahead(),
                Step::Fill | Step::Install | Step::Find => entry.set_asked(),
                Step::Refault => entry.set_used(),
                _ => {}
            }
            Ok((released, before, entry.state()))
        });
        let (Released { buffer, handle }, before, after) =
            stepped.unwrap_or_else(|illegal: Illegal| panic!("page {page:?}: {illegal:?}"));
        self.free_buffers.extend(buffer);
        self.released.extend(handle);
        self.has_lost |= after == State::Lost;
        if before != after && self.replacement.is_told() {
            self.tell(page, before, after, how);
        }
        let was_local = matches!(before, State::Mapped | State::Inactive | State::Writing);
        if was_local && matches!(after, State::Untouched | State::Remote | State::Lost) {
            self.left(page);
        }
    }

    /// Tells the policy of the page's target.
    fn tell(&mut self, page: PageIndex, before: State, after: State, how: Arrival) {
        let Some(region) = self.regions.of_page(page) else { return };
        self.replacement.count(region.target, before, after);
        match (before, after) {
            (_, State::Mapped) => {
                let short = self.free_pages() < 2 * self.batch_pages();
                self.replacement.arrived(region.target, page, how, short);
            }
            (State::Mapped, _) => self.replacement.left(region.target, page, after == State::Inactive),
            (_, State::Untouched | State::Lost) => self.replacement.gone(region.target, page),
            _ => {}
        }
    }

    /// A victim stays.
    pub(crate) fn stays(&mut self, page: PageIndex, why: Refusal) {
        if self.replacement.is_told()
            && let Some(region) = self.regions.of_page(page)
            && let Some(policy) = self.replacement.of(region.target)
        {
            policy.refused(page, why);
        }
    }

    /// The most pages that one fault moves.
    pub(crate) fn blocks(&self) -> Blocks {
        self.blocks
    }

    /// The driver's page buffers.
    pub(crate) fn buffers(&self) -> u32 {
        self.buffers
    }
}

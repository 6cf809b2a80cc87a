//! Replays a trace through the pager's core: the one that ships, [`Pager`], on a virtual clock.
//!
//! One fault is handled at a time, as by the fault thread, and one page crosses the link at a time (Lim et al.,
//! "System-level Implications of Disaggregated Memory", HPCA 2012, section 4, whose breakdown of handling times this
//! computes). A fault takes [`Costs::fault_ns`] (the *rest*: reading, looking up, installing), what it waits for the link,
//! and what it waits for evictions. With [`Scheme::OnDemand`] pages leave when there is no room for the next; with
//! [`Scheme::PreEvict`] they leave ahead, while pages cross the link and while the program runs, and only what is not
//! over when the next fault comes is waited for.
//!
//! Access bits are those of the touches that the trace has: all of a list of addresses, the first in each window of an exact
//! trace, and none of a page that stayed local in a trace of faults.

use std::collections::BTreeMap;

use spillway_core::evict::{Bytes, Captured, Run, Write};
use spillway_core::page::{HandleBits, State};
use spillway_core::pager::{Budget, Config, Outcome, Pager, Plan};
use spillway_core::policy::Settings;
use spillway_core::streams::BLOCK_PAGES_MAX;
use spillway_core::touches::{AccessBits, Touches};
use spillway_core::{Address, PAGE_BYTES_U64, PageIndex, Span, TargetId};

pub use spillway_core::policy::{Block, Kind, Scheme};

use crate::references::{Dense, Does, References};

/// What things take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Costs {
    /// A page's way over the link, either way.
    pub link_ns: u64,
    /// A fault, but for the link and evictions.
    pub fault_ns: u64,
    /// Choosing a page and taking it out of the program.
    pub capture_ns: u64,
}

/// What a trace is replayed with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setting {
    /// The budget; at least [`LOCAL_PAGES_LEAST`].
    pub local_pages: u64,
    /// Which pages leave.
    pub policy: Kind,
    /// When pages leave.
    pub scheme: Scheme,
    /// How many adjacent pages move together.
    pub block: Block,
    /// What things take.
    pub costs: Costs,
}

/// Below this the pager's reserve and buffers would be most of the budget.
pub const LOCAL_PAGES_LEAST: u64 = 64;

/// As the pager has them.
const BUFFERS: u32 = 1024;

/// Where the time of faults went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Handling {
    /// How many.
    pub faults: u64,
    /// Pages on the link, and those before them.
    pub link_ns: u64,
    /// Evictions that were waited for.
    pub eviction_ns: u64,
    /// Everything else.
    pub rest_ns: u64,
}

impl Handling {
    /// All of it.
    pub fn total_ns(&self) -> u64 {
        self.link_ns + self.eviction_ns + self.rest_ns
    }
}

/// What came out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Replayed {
    /// Faults for pages that nobody had touched. One may fill several.
    pub first: Handling,
    /// Faults for pages that had been evicted.
    pub missed: Handling,
    /// Of those, served from a buffer, without the link.
    pub refaults: u64,
    /// Pages that crossed the link to the program, those that no fault asked for among them.
    pub fetched_pages: u64,
    /// Those that no fault had asked for.
    pub prefetched_pages: u64,
    /// And of these, the ones that the program touched before they left, which the trace tells exactly.
    pub prefetched_used_pages: u64,
    /// What the pager itself made of that: pages that it saw used, or not.
    pub sampled_pages: u64,
    /// Of those, the used ones.
    pub sampled_used_pages: u64,
    /// At the end, pages in blocks of 1, 2, 4, 8 and 16.
    pub block_pages: [u64; 5],
    /// Pages that left the program.
    pub evicted_pages: u64,
    /// Pages that crossed the link from it.
    pub written_pages: u64,
    /// The most pages that were local.
    pub local_peak_pages: u64,
}

/// What page tables would say: which pages were touched since somebody asked.
struct Touched<'a> {
    /// Runs of adjacent pages, in order: the first page of each, and what the trace calls them.
    runs: &'a [(u64, Vec<Dense>)],
    /// For each page of the trace.
    touched: Vec<bool>,
}

impl AccessBits for Touched<'_> {
    fn take(&mut self, _: TargetId, span: Span) -> Option<Touches> {
        let (start, end) = (span.start.0 / PAGE_BYTES_U64, span.end.0 / PAGE_BYTES_U64);
        let at = self.runs.partition_point(|(first, _)| *first <= start).checked_sub(1)?;
        let (first, run) = &self.runs[at];
        let within = run.get(usize::try_from(start - first).ok()?..)?;
        let mut touches = Touches::default();
        for (page, Dense(dense)) in (start..end).zip(within) {
            let bit = u64::from(std::mem::take(&mut self.touched[*dense as usize]));
            touches[usize::try_from(page / 64 % 8).expect("below 8")] |= bit << (page % 64);
        }
        Some(touches)
    }
}

/// A replay under way.
struct Replay<'a> {
    core: Pager,
    target: TargetId,
    setting: Setting,
    /// For each page of the trace, its index in the core, and where that is mapped.
    places: Vec<(PageIndex, Address)>,
    /// For each index in the core, from its region's first on, the page of the trace.
    by_index: BTreeMap<PageIndex, &'a [Dense]>,
    /// For each page of the trace, whether it changed since the store got it.
    dirty: Vec<bool>,
    /// For each page of the trace, whether it came without having been asked for, and has not been touched since.
    unasked: Vec<bool>,
    bits: Touched<'a>,
    runs: Vec<Run>,
    now_ns: u64,
    /// Until when the pager is busy, and the link.
    pager_ns: u64,
    link_ns: u64,
    done: Replayed,
}

/// Replays `references` with `setting`.
pub fn replay(references: &References, setting: Setting) -> Replayed {
    let runs = references.runs();
    let mut replay = Replay::new(&runs, references.pages() as usize, setting);
    for step in references.steps() {
        replay.now_ns += step.ran_ns();
        match step.does() {
            Does::Touch { write } => replay.touch(step.page(), write),
            Does::Remove => replay.remove(step.page()),
        }
    }
    let counters = replay.core.counters();
    replay.core.audit();
    Replayed {
        fetched_pages: counters.fetched_pages,
        prefetched_pages: counters.prefetched_pages,
        sampled_pages: counters.sampled_pages,
        sampled_used_pages: counters.sampled_used_pages,
        block_pages: replay.core.block_pages(),
        evicted_pages: counters.evicted_pages,
        local_peak_pages: counters.local_peak_pages,
        ..replay.done
    }
}

impl<'a> Replay<'a> {
    fn new(runs: &'a [(u64, Vec<Dense>)], pages: usize, setting: Setting) -> Self {
        let budget = Budget::Pages(setting.local_pages.max(LOCAL_PAGES_LEAST));
        let mut core = Pager::new(Config { budget, buffers: BUFFERS, write_batch: 1 });
        let Setting { policy, scheme: evict, block, .. } = setting;
        core.set_replacement(Settings { policy, evict, block, ..Settings::default() });
        core.restock();
        let target = core.add_target();
        let mut places = vec![(PageIndex(0), Address(0)); pages];
        let mut by_index = BTreeMap::new();
        for (first, run) in runs {
            let span = Span::of_pages(Address(0).plus_pages(*first), run.len() as u64);
            core.add_region(target, span);
            let region = core.regions().at(target, span.start).expect("just added");
            for (i, dense) in (0..).zip(run) {
                places[dense.0 as usize] = (region.first.plus(i), span.start.plus_pages(i));
            }
            by_index.insert(region.first, run.as_slice());
        }
        let none = || vec![false; pages];
        Self {
            core,
            target,
            setting,
            places,
            by_index,
            dirty: none(),
            unasked: none(),
            bits: Touched { runs, touched: none() },
            runs: Vec::new(),
            now_ns: 0,
            pager_ns: 0,
            link_ns: 0,
            done: Replayed::default(),
        }
    }

    fn dense(&self, page: PageIndex) -> Dense {
        let (first, run) = self.by_index.range(..=page).next_back().expect("every index is in a region");
        run[usize::try_from(page.0 - first.0).expect("within a run")]
    }

    fn touch(&mut self, page: Dense, write: bool) {
        let (index, address) = self.places[page.0 as usize];
        if self.core.state_of(index) != State::Mapped {
            self.fault(address);
            self.unasked[page.0 as usize] = false;
        }
        self.done.prefetched_used_pages += u64::from(std::mem::take(&mut self.unasked[page.0 as usize]));
        self.dirty[page.0 as usize] |= write;
        self.bits.touched[page.0 as usize] = true;
    }

    fn remove(&mut self, page: Dense) {
        // What comes there next is another page.
        self.unasked[page.0 as usize] = false;
        let span = Span::of_pages(self.places[page.0 as usize].1, 1);
        if self.core.removed(self.target, span) {
            self.core.removal_seen(self.target, span);
        }
        while self.core.next_released().is_some() {}
    }

    fn fault(&mut self, address: Address) {
        self.evict_while_idle();
        let start_ns = self.now_ns.max(self.pager_ns);
        let mut handling = Handling { faults: 1, eviction_ns: start_ns - self.now_ns, ..Handling::default() };
        self.pager_ns = start_ns + self.setting.costs.fault_ns;
        handling.rest_ns = self.setting.costs.fault_ns;
        let plan = loop {
            match self.core.fault(self.target, address) {
                Plan::NoRoom => handling.eviction_ns += self.make_room(),
                plan => break plan,
            }
        };
        let mut fetched = 0;
        while let Some(ahead) = self.core.ahead() {
            fetched += self.install(ahead, true);
        }
        fetched += self.install(plan, false);
        let ready_ns = self.pager_ns;
        let arrived_ns = self.over_link(ready_ns, fetched);
        handling.link_ns = arrived_ns - ready_ns;
        if self.setting.scheme == Scheme::PreEvict {
            self.evict_ahead();
        }
        // The link works by itself: the pager goes on with evictions, and installs what has arrived.
        self.now_ns = arrived_ns;
        self.core.restock();
        let (of, refault) = match plan {
            Plan::Zero { .. } => (&mut self.done.first, false),
            Plan::Buffer { .. } => (&mut self.done.missed, true),
            _ => (&mut self.done.missed, false),
        };
        of.faults += 1;
        of.link_ns += handling.link_ns;
        of.eviction_ns += handling.eviction_ns;
        of.rest_ns += handling.rest_ns;
        self.done.refaults += u64::from(refault);
        while self.core.next_released().is_some() {}
    }

    /// Carries out a plan; returns the pages that have to cross the link.
    fn install(&mut self, plan: Plan, ahead: bool) -> u64 {
        let (pages, fetched) = match plan {
            Plan::Zero { pages, .. } => (pages, 0),
            Plan::Fetch { pages, .. } => (pages, pages),
            _ => (1, 0),
        };
        if let Plan::Fetch { page, pages, .. } = plan {
            for page in (0..pages).map(|i| page.plus(i)) {
                let dense = self.dense(page);
                self.unasked[dense.0 as usize] = true;
            }
        }
        let outcome = Outcome { done: pages, stop: None };
        if ahead {
            self.core.installed_ahead(plan, outcome);
        } else {
            self.core.installed(plan, outcome);
        }
        fetched
    }

    /// When `pages` pages have crossed the link that are ready at `ready_ns`.
    fn over_link(&mut self, ready_ns: u64, pages: u64) -> u64 {
        if pages == 0 {
            return ready_ns;
        }
        self.link_ns = self.link_ns.max(ready_ns) + pages * self.setting.costs.link_ns;
        self.link_ns
    }

    /// Evicts for a fault that finds no room; returns how long that takes.
    fn make_room(&mut self) -> u64 {
        let before_ns = self.pager_ns;
        if !self.write(false) {
            let most = match self.setting.scheme {
                Scheme::OnDemand => 1,
                Scheme::PreEvict => self.core.batch_pages(),
            };
            if !self.capture(most) && !self.write(true) {
                // As the driver does when nothing can leave: faults go past the budget rather than wait for ever.
                self.core.set_overdraft(BLOCK_PAGES_MAX);
            }
        }
        self.pager_ns - before_ns
    }

    /// What leaves between two faults: as the driver does it, while faults keep coming only when the reserve runs low.
    fn evict_ahead(&mut self) {
        while self.write(false) {}
        if self.core.wanted_captures() > 0 && self.core.free_pages() < self.core.low_pages() {
            self.capture(self.core.wanted_captures().min(self.core.batch_pages()));
        }
    }

    /// Before a fault that comes a while after the last one: batches that were over by then, or had begun.
    fn evict_while_idle(&mut self) {
        if self.setting.scheme == Scheme::OnDemand {
            return;
        }
        while self.pager_ns < self.now_ns && self.core.wanted_captures() > 0 {
            while self.write(false) {}
            if !self.capture(self.core.wanted_captures().min(self.core.batch_pages())) {
                break;
            }
        }
        while self.write(false) {}
    }

    /// Captures up to `most` pages; false when there is none.
    fn capture(&mut self, most: u64) -> bool {
        let mut runs = std::mem::take(&mut self.runs);
        runs.clear();
        self.core.next_capture(most, |_| true, &mut self.bits, &mut runs);
        for page in runs.iter().flat_map(|run| (0..run.pages).map(|i| run.page.plus(i))) {
            let buffer = self.core.take_buffer().expect("no more are chosen than are free");
            self.core.captured(page, Captured::Moved(buffer));
            self.core.read(page, buffer, Bytes::Here);
            self.pager_ns += self.setting.costs.capture_ns;
        }
        let any = !runs.is_empty();
        self.runs = runs;
        any
    }

    /// Gives a page to the store; `all` empties the buffers.
    fn write(&mut self, all: bool) -> bool {
        let Some(write) = self.core.next_write(all) else { return false };
        let Write { page, previous, .. } = write;
        let dense = self.dense(page);
        let dirty = std::mem::replace(&mut self.dirty[dense.0 as usize], false);
        let clean = previous.is_some() && !dirty;
        if !clean {
            self.over_link(self.pager_ns, 1);
            self.done.written_pages += 1;
        }
        let handle = HandleBits::new(dense.0 + 1).expect("not zero");
        self.core.written(write, handle, clean);
        true
    }
}

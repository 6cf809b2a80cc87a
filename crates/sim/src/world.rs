//! One run: who takes the next step, and what must hold all the while.

use std::panic::{AssertUnwindSafe, catch_unwind};

use spillway_core::blocks::Accuracy;
use spillway_core::pager::{Blocks, Budget, Counters};

use crate::death::Killed;
use crate::driver::Driver;
use crate::failure::Failure;
use crate::guest::Theme;
use crate::journeys::Travels;
use crate::kernel::{Events, Kernel};
use crate::letters::Command;
use crate::memory::Content;
use crate::mutation::Mutation;
use crate::rng::Rng;
use crate::setting::Setting;
use crate::store::Store;
use crate::trace::Trace;
use crate::transfers::Transfers;
use crate::watcher::Watcher;

/// In runs of seeds from here on pagers are killed.
pub const DEATHS: u64 = 1 << 32;

/// And from here on their stores answer later.
pub const DEATHS_AFAR: u64 = 1 << 33;

/// Of how many steps of the pager it is killed within one, or behind one.
const DEATH_EVERY: usize = 250;
/// And one of so many in which a fork is heard of, which is seldom.
const DEATH_EVERY_FORK: usize = 4;

/// What a run is asked to do.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Everything follows from it.
    pub seed: u64,
    /// Steps in which guests do as they like.
    pub steps: u64,
    /// What is wrong with the driver.
    pub mutation: Option<Mutation>,
}

/// What a run that succeeded has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Steps taken by anyone.
    pub steps: u64,
    /// What guests did.
    pub events: Events,
    /// What the pager did.
    pub counters: Counters,
    /// What a store that answers later led to.
    pub travels: Travels,
    /// Runs that ended in a release.
    pub releases: u64,
    /// Pagers that were killed.
    pub deaths: u64,
    /// Of those, the ones that had begun a capture and not ended it.
    pub captures_taken_up: u64,
}

impl Seen {
    /// Adds what another run has seen.
    pub fn add(&mut self, other: &Self) {
        self.steps += other.steps;
        self.releases += other.releases;
        self.deaths += other.deaths;
        self.captures_taken_up += other.captures_taken_up;
        self.events.add(&other.events);
        self.travels.add(&other.travels);
        let (mine, its) = (&mut self.counters, &other.counters);
        mine.faults += its.faults;
        mine.zero_fills += its.zero_fills;
        mine.refaults += its.refaults;
        mine.fetched_pages += its.fetched_pages;
        mine.evicted_pages += its.evicted_pages;
        mine.written_pages += its.written_pages;
        mine.clean_drops += its.clean_drops;
        mine.zero_drops += its.zero_drops;
        mine.stuck_pages += its.stuck_pages;
        mine.lost_pages += its.lost_pages;
        mine.prefetched_pages += its.prefetched_pages;
        mine.stretches += its.stretches;
        mine.reductions += its.reductions;
    }
}

/// See the module's documentation.
pub struct World {
    pub(crate) setting: Setting,
    pub(crate) rng: Rng,
    /// Of replacement: a chance of its own.
    taste: Rng,
    pub(crate) kernel: Kernel,
    pub(crate) driver: Driver,
    pub(crate) watcher: Watcher,
    /// When pagers are killed, if they are.
    pub(crate) fate: Option<Rng>,
    /// Where equal pages are merged: a chance of its own.
    merger: Option<Rng>,
    deaths: u64,
    captures_taken_up: u64,
}

/// Steps between two visits of the kernel's thread that merges, on average.
const MERGE_EVERY: usize = 60;

/// Steps between two audits of the core, which cost as much as dozens of steps.
const AUDIT_EVERY: u64 = 64;

/// Steps between two changes of who is slow.
const SPEEDS_EVERY: u64 = 256;

impl World {
    /// A world in which nothing has happened.
    pub fn new(plan: Plan, trace: Trace) -> Self {
        let mut rng = Rng::new(plan.seed);
        let mut setting = Setting::of(&mut rng);
        // Of a chance of its own: with a store that answers at once everything else stays as it is.
        let mut chance = Rng::new(plan.seed ^ 0x0051_0000_57A7_E000);
        let fate = (plan.seed >= DEATHS).then(|| Rng::new(plan.seed ^ 0x0000_FA7E_0000_0000));
        let later = plan.seed >= DEATHS_AFAR || fate.is_none() && chance.percent(50);
        if later && fate.is_none() && chance.percent(60) {
            setting.be_about_journeys(&mut chance);
        }
        // And with the default replacement too.
        let mut taste = Rng::new(plan.seed ^ 0x0000_7A57_E000_0000);
        // What goes wrong with pages under way needs three things at once: other settings must not make it rarer still.
        if taste.percent(if setting.theme == Theme::Journeys { 20 } else { 70 }) {
            setting.replacement = Setting::draw_replacement(&mut taste);
            setting.changes_replacement = taste.percent(30);
        }
        let mut kernel = Kernel::new(setting.habits.clone(), trace);
        for _ in 0..setting.guests {
            let start = rng.below(setting.space_pages - setting.mapped_pages + 1);
            let threads = rng.between(1, 4);
            kernel.spawn(setting.space_pages, start..start + setting.mapped_pages, threads);
        }
        let transfers = later.then(|| Transfers::new(chance));
        let store = Store::new(setting.store_shares, transfers);
        let make = if fate.is_some() { Driver::lasting } else { Driver::new };
        let mut driver = make(setting.budget, setting.buffers, store, plan.mutation);
        driver.core.set_replacement(setting.replacement);
        // What blocks are worth is learnt more slowly than most runs last.
        if Rng::new(plan.seed ^ 0x0000_B10C_0000_0000).percent(70) {
            driver.core.set_blocks(Blocks { enough: Accuracy::ANY, ..Blocks::LARGEST });
        }
        let watcher = Watcher::default();
        let mut merger = Rng::new(plan.seed ^ 0x0000_4B53_4D00_0000);
        let merger = merger.percent(20).then_some(merger);
        Self { setting, rng, taste, kernel, driver, watcher, fate, merger, deaths: 0, captures_taken_up: 0 }
    }

    /// The whole run.
    ///
    /// # Errors
    /// When something was seen that must not be.
    pub fn run(&mut self, plan: Plan) -> Result<Seen, Failure> {
        // In two halves, because what is wrong may show only when everything has come to rest.
        for _ in 0..2 {
            for _ in 0..plan.steps / 2 {
                self.step()?;
            }
            self.come_to_rest()?;
        }
        let releases = self.rng.percent(40);
        if releases {
            self.release()?;
        } else {
            self.end_all()?;
        }
        let (events, counters) = (self.kernel.events, self.driver.core.counters());
        let travels = self.driver.journeys.travels;
        let (deaths, captures_taken_up) = (self.deaths, self.captures_taken_up);
        let releases = u64::from(releases);
        Ok(Seen { steps: self.kernel.now, events, counters, travels, releases, deaths, captures_taken_up })
    }

    /// What was done last.
    pub fn tail(&self) -> Vec<String> {
        let mut tail = self.kernel.trace.tail();
        tail.insert(0, format!("{:?}, {}", self.setting, self.driver.store.manner()));
        tail
    }

    /// Steps so far.
    pub fn now(&self) -> u64 {
        self.kernel.now
    }

    pub(crate) fn step(&mut self) -> Result<(), Failure> {
        if self.kernel.now.is_multiple_of(SPEEDS_EVERY) && self.rng.percent(50) {
            self.setting.draw_speeds(&mut self.rng);
        }
        match self.rng.weighted(&self.setting.speeds) {
            0 => self.step_thread(false)?,
            1 => self.step_thread(true)?,
            2 => self.live_or_die()?,
            3 => self.step_watcher(),
            _ => self.step_nature(),
        }
        self.tick();
        Ok(())
    }

    pub(crate) fn tick(&mut self) {
        self.kernel.now += 1;
        self.merge();
        if self.kernel.now.is_multiple_of(AUDIT_EVERY) {
            self.driver.core.audit();
        }
    }

    fn step_thread(&mut self, agents: bool) -> Result<(), Failure> {
        let threads = self.kernel.threads.len();
        let from = self.rng.below(threads.max(1));
        let next = (from..threads).chain(0..from).find(|&thread| {
            let this = &self.kernel.threads[thread];
            this.agent == agents && self.kernel.may_run(thread)
        });
        let Some(thread) = next else { return Ok(()) };
        if self.rng.percent(self.setting.habits.drowsy) {
            self.kernel.threads[thread].away_until = self.kernel.now + self.rng.between(1, 300) as u64;
        }
        self.kernel.step(thread, &mut self.rng)
    }

    /// A step of the pager, which may be its last, or be cut short.
    fn live_or_die(&mut self) -> Result<(), Failure> {
        let every = if self.driver.is_forking() { DEATH_EVERY_FORK } else { DEATH_EVERY };
        let lives = self.fate.as_mut().and_then(|fate| (fate.below(every) == 0).then(|| fate.below(8)));
        let Some(lives) = lives.filter(|_| self.driver.may_die()) else { return self.step_pager() };
        // Where a panic ends the process, pagers are killed between their steps only.
        self.driver.lives = cfg!(panic = "unwind").then(|| u32::try_from(lives).expect("below 8"));
        let last = catch_unwind(AssertUnwindSafe(|| self.step_pager()));
        match last {
            Err(panic) if panic.is::<Killed>() => {}
            Err(panic) => std::panic::resume_unwind(panic),
            Ok(result) => result?,
        }
        self.driver.lives = None;
        if self.driver.may_die() { self.kill() } else { Ok(()) }
    }

    /// The pager is killed; everyone else goes on for a while; another takes over.
    fn kill(&mut self) -> Result<(), Failure> {
        self.kernel.trace.note(self.kernel.now, || "the pager is killed".into());
        self.deaths += 1;
        self.captures_taken_up += u64::from(!self.driver.batches.is_empty());
        let fate = self.fate.as_mut().expect("pagers are killed");
        let (pause, chance) = (if fate.percent(50) { fate.below(200) } else { 0 }, fate.draw());
        for _ in 0..pause {
            let agents = self.rng.percent(50);
            self.step_thread(agents)?;
            self.kernel.now += 1;
        }
        let fresh = Driver::new(self.setting.budget, 0, Store::new(false, None), None);
        let killed = std::mem::replace(&mut self.driver, fresh);
        self.driver = killed.succeed(&mut self.kernel, chance).map_err(Failure::new)?;
        let targets =
            self.driver.targets.iter().flatten().map(|target| (target.id, target.space, target.agent.is_some()));
        self.watcher = Watcher::succeed(targets);
        self.driver.core.audit();
        self.kernel.trace.note(self.kernel.now, || "another pager has taken over".into());
        Ok(())
    }

    pub(crate) fn step_pager(&mut self) -> Result<(), Failure> {
        self.driver.step(&mut self.kernel);
        self.check_budget()
    }

    pub(crate) fn step_watcher(&mut self) {
        let orphans = self.rng.percent(self.setting.adopts_children);
        self.watcher.step(&mut self.kernel, &mut self.driver, &mut self.rng, orphans);
    }

    /// What nobody asked for.
    fn step_nature(&mut self) {
        if self.setting.changes_replacement && self.taste.percent(5) {
            let settings = Setting::draw_replacement(&mut self.taste);
            self.driver.commands.push_back(Command::Replacement(settings));
        }
        match self.rng.below(6) {
            0 | 1 => self.reclaim(),
            2 if self.setting.store_fills => self.driver.store.full = !self.driver.store.full && self.rng.percent(60),
            3 if self.setting.store_loses && self.rng.percent(30) => self.lose_a_page(),
            4 if self.setting.tight => {
                let space = self.rng.below(self.kernel.spaces.len());
                let tight = self.rng.percent(30);
                self.kernel.spaces[space].tight = tight;
            }
            5 if self.rng.percent(10) => {
                let pages = self.rng.between(16, self.setting.mapped_pages + 16) as u64;
                self.driver.commands.push_back(Command::Budget(Budget::Pages(pages)));
            }
            _ => {}
        }
    }

    pub(crate) fn lose_a_page(&mut self) {
        let nth = self.rng.below(1000);
        let lost = self.driver.store.lose(nth);
        self.kernel.trace.note(self.kernel.now, || format!("the store loses {lost:x?}"));
        self.kernel.lost.extend(lost);
    }

    /// The kernel's thread that merges comes by, now and then. Which pages are equal makes no difference to the pager. Where all
    /// else is quiet it stays away: what is merged again as often as it is about to leave may stay for as long as that goes on.
    fn merge(&mut self) {
        let Some(rng) = &mut self.merger else { return };
        if self.kernel.quiet || rng.below(MERGE_EVERY) > 0 {
            return;
        }
        let space = rng.below(self.kernel.spaces.len());
        for slot in &mut self.kernel.spaces[space].slots {
            let anonymous = slot.is_anonymous();
            if let Content::Present(frame) = &mut slot.content
                && anonymous
                && !frame.pinned
                && !frame.lazy
                && !frame.shared
                && rng.percent(60)
            {
                frame.shared = true;
                self.kernel.events.merged += 1;
            }
        }
    }

    /// The kernel drops a page that was given up and not written since.
    fn reclaim(&mut self) {
        let space = self.rng.below(self.kernel.spaces.len());
        let slots = &mut self.kernel.spaces[space].slots;
        let from = self.rng.below(slots.len());
        let lazy = |slot: &&mut crate::memory::Slot| slot.frame().is_some_and(|frame| frame.lazy && !frame.pinned);
        if let Some(slot) = slots[from..].iter_mut().find(lazy) {
            slot.content = Content::Absent;
        }
    }
}

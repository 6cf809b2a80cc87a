//! What must hold: at all times, when everything has come to rest, and at the end.

use spillway_core::page::State;
use spillway_core::pager::Budget;

use crate::capture::REST_MOST;
use crate::failure::Failure;
use crate::kernel::Work;
use crate::letters::Command;
use crate::memory::Slot;
use crate::world::World;

/// Steps within which everything must come to rest, when each takes its turn. The longest lawful wait is the overdraft's.
const REST_STEPS: u64 = 2_000_000;
/// Steps that everything must have been at rest for, and without a capture, for each page that is mapped: all may be
/// tried one after the other.
const RESTED_FOR_EACH: u64 = 100;
/// And for so many more, a capture that has begun may go on: what it brings counts.
const LONGEST_CAPTURE: u64 = 2000;
/// Steps of a release in which guests go on as they like.
const BUSY_STEPS: u64 = 3000;
/// A budget that leaves nothing where it need not be. Whoever reads under it has one page at a time.
const BARE_PAGES: u64 = 1;

impl World {
    /// What is local is within the budget, except where the core's documentation says otherwise: the store is full or
    /// nothing can leave (overdraft), a scan or a fork has just found more, the budget was lowered.
    pub(crate) fn check_budget(&mut self) -> Result<(), Failure> {
        let core = &self.driver.core;
        let (local, budget) = (core.local_pages(), core.budget_pages());
        if local <= budget {
            self.driver.excused = self.driver.overdraws || core.free_pages() == u64::MAX;
        } else if !self.driver.excused {
            return Err(Failure::new(format!("{local} pages are local, and the budget is {budget}")));
        }
        Ok(())
    }

    /// Guests begin nothing new, and everyone takes turns: then everything must end. Then every page is read, and then
    /// nearly all must leave, and every page is read once more.
    pub(crate) fn come_to_rest(&mut self) -> Result<(), Failure> {
        (self.driver.store.full, self.driver.store.well) = (false, true);
        self.kernel.spaces.iter_mut().for_each(|space| space.tight = false);
        self.kernel.quiet = true;
        self.take_turns("after the guests stopped")?;
        self.watcher.rescan();
        self.take_turns("while everything is looked at again")?;
        self.read_everything()?;
        let budget = self.driver.core.budget();
        self.driver.commands.push_back(Command::Budget(Budget::Pages(BARE_PAGES)));
        self.take_turns("while nearly everything leaves")?;
        self.check_what_stayed()?;
        self.read_everything()?;
        self.driver.commands.push_back(Command::Budget(budget));
        (self.kernel.quiet, self.driver.store.well) = (false, false);
        Ok(())
    }

    /// All threads in turn, and the pager and watcher beside each, until nothing is left to do.
    pub(crate) fn take_turns(&mut self, when: &str) -> Result<(), Failure> {
        let (mut rested_since, mut captured) = (self.kernel.now, self.driver.core.counters().evicted_pages);
        let (mut thread, mut restless) = (0, 0);
        loop {
            let patience = rested_since + 2 * REST_MOST + RESTED_FOR_EACH * self.evictable();
            let longest = if self.driver.is_capturing() { LONGEST_CAPTURE } else { 0 };
            if self.kernel.now >= patience + longest {
                return Ok(());
            }
            thread = (thread + 1) % self.kernel.threads.len();
            if self.kernel.may_run(thread) {
                self.kernel.step(thread, &mut self.rng)?;
            }
            self.step_pager()?;
            self.step_watcher();
            self.tick();
            let at_rest = self.driver.is_at_rest(&self.kernel)
                && self.watcher.is_at_rest(&self.kernel)
                && self.kernel.restless().next().is_none();
            let before = std::mem::replace(&mut captured, self.driver.core.counters().evicted_pages);
            if !at_rest || captured != before {
                rested_since = self.kernel.now;
            }
            restless += u64::from(!at_rest);
            if restless > REST_STEPS {
                return Err(Failure::new(format!("no rest {when}: {}", self.unrest())));
            }
        }
    }

    /// Pages that should leave and may.
    fn evictable(&self) -> u64 {
        let core = &self.driver.core;
        if core.local_pages() > core.budget_pages() { core.mapped_pages() } else { 0 }
    }

    fn core_in_numbers(&self) -> String {
        let core = &self.driver.core;
        let (local, mapped, budget) = (core.local_pages(), core.mapped_pages(), core.budget_pages());
        let (wanted, due) = (core.wanted_captures(), core.has_due_writes());
        format!("local {local}, mapped {mapped}, budget {budget}, captures wanted {wanted}, writes due {due}")
    }

    /// Who has not come to rest.
    fn unrest(&self) -> String {
        let threads: Vec<String> = self
            .kernel
            .restless()
            .map(|thread| {
                let held = self.kernel.spaces[self.kernel.threads[thread].space].uffd.holds(thread);
                format!("thread {thread} {:?}, waiting {held}", self.kernel.threads[thread].work)
            })
            .collect();
        let driver = &self.driver;
        format!("{threads:?}, {:?}, {:?}, {:?}, {:?}", driver.targets, driver.commands, driver.journeys, self.watcher)
    }

    /// A thread of each guest reads all of its pages.
    fn read_everything(&mut self) -> Result<(), Failure> {
        for space in 0..self.kernel.spaces.len() {
            if let Some(thread) = self.kernel.guest_of(space) {
                let left = self.kernel.spaces[space].slots.len();
                self.kernel.threads[thread].work = Work::Run { next: 0, left, write: false };
            }
        }
        self.take_turns("while everything is read")
    }

    /// After nearly everything should have left: each page that stayed could not leave, and the table knows of it.
    fn check_what_stayed(&self) -> Result<(), Failure> {
        let core = &self.driver.core;
        for (target, index) in self.watcher.equipped() {
            let space = &self.kernel.spaces[index];
            for (at, slot) in space.slots.iter().enumerate().filter(|(_, slot)| may_leave(slot)) {
                let state = self.driver.page_at(target, at).map(|page| core.state_of(page));
                if slot.is_registered() && slot.frame().is_some() && state != Some(State::Mapped) {
                    return Err(Failure::new(format!("page {at} of {index} is resident and {state:?} to the table")));
                }
            }
        }
        if core.local_pages() <= core.budget_pages() {
            return Ok(());
        }
        for (target, index) in self.watcher.equipped() {
            let space = &self.kernel.spaces[index];
            for (at, slot) in space.slots.iter().enumerate() {
                let state = self.driver.page_at(target, at).map(|page| core.state_of(page));
                if state == Some(State::Mapped) && may_leave(slot) {
                    let what = format!("page {at} of {index} counts as mapped and never leaves: {slot:?}");
                    return Err(Failure::new(format!("{what}, {}, {:?}", self.core_in_numbers(), self.driver.targets)));
                }
            }
        }
        Ok(())
    }

    /// Everything is brought home and let go of; guests then read what they must read, without a pager.
    pub(crate) fn release(&mut self) -> Result<(), Failure> {
        self.kernel.quiet = false;
        // Nobody takes over what was let go of.
        self.fate = None;
        self.driver.commands.push_back(Command::Release);
        let begun = self.kernel.now;
        if self.setting.store_loses {
            (0..10).for_each(|_| self.lose_a_page());
        }
        while !self.watcher.released {
            self.step()?;
            // While guests change mappings all the time, hardly a page comes home.
            self.kernel.quiet = self.kernel.now - begun > BUSY_STEPS;
            if self.kernel.quiet && self.driver.has_stayed() {
                // A guest's own limit left no room; the user raises it and asks again.
                self.kernel.spaces.iter_mut().for_each(|space| space.tight = false);
                self.driver.commands.push_back(Command::Release);
            }
            if self.kernel.now - begun > REST_STEPS {
                return Err(Failure::new("the pager does not let go".into()));
            }
        }
        self.kernel.quiet = true;
        self.take_turns("after the release")?;
        for space in 0..self.kernel.spaces.len() {
            if let Some(thread) = self.kernel.guest_of(space) {
                let left = self.kernel.spaces[space].slots.len();
                self.kernel.threads[thread].work = Work::Run { next: 0, left, write: false };
            }
        }
        self.take_turns("while everything is read without a pager")?;
        self.check_nothing_left()
    }

    /// All guests end, and nothing may be left of them.
    pub(crate) fn end_all(&mut self) -> Result<(), Failure> {
        self.kernel.quiet = true;
        for space in 0..self.kernel.spaces.len() {
            self.kernel.exit(space);
        }
        self.take_turns("after all guests ended")?;
        self.check_nothing_left()
    }

    fn check_nothing_left(&mut self) -> Result<(), Failure> {
        let mut turns = 100;
        while turns > 0 {
            self.step_pager()?;
            turns -= u32::from(self.driver.graves.is_empty());
        }
        self.driver.core.audit();
        let core = &self.driver.core;
        let left = (core.touched_pages(), core.local_pages(), self.driver.store.references());
        if left != (0, 0, 0) {
            return Err(Failure::new(format!("left at the end: (pages, local pages, references) = {left:?}")));
        }
        Ok(())
    }
}

fn may_leave(slot: &Slot) -> bool {
    let held = slot.mapping.is_some_and(|mapping| mapping.locked || mapping.file);
    let stuck = slot.frame().is_some_and(|frame| frame.shared || frame.pinned);
    let poisoned = slot.content == crate::memory::Content::Poison;
    !held && !stuck && !poisoned
}

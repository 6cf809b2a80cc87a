//! The driver's commands, and how it lets go of everything.

use spillway_core::page::State;
use spillway_core::pager::{Budget, Plan, Served, Stop};

use crate::capture::Flight;
use crate::driver::Driver;
use crate::kernel::Kernel;
use crate::letters::{Command, Report};
use crate::memory::{range, slot};
use crate::mutation::Mutation;
use crate::target::Target;

/// A release under way.
#[derive(Debug)]
pub struct Release {
    /// The budget to return to when it fails.
    budget: Budget,
}

impl Driver {
    pub(crate) fn carry_out(&mut self, kernel: &mut Kernel, command: Command) {
        if !matches!(command, Command::Register { .. }) {
            kernel.trace.note(kernel.now, || format!("pager obeys {command:?}"));
        }
        match command {
            Command::Add { space, agent } => {
                let id = self.core.add_target();
                self.add(Target::new(id, space, Some(agent)));
                self.reports.push_back(Report::Added(id, space));
            }
            Command::Equip { target: id, agent } => {
                if let Some(target) = &mut self.targets[id.0 as usize] {
                    (target.parent, target.agent) = (None, Some(agent));
                    let at = target.id.0 as usize;
                    self.note_thread(at);
                    self.young.retain(|young, record| *young != id || !record.inherits);
                }
            }
            Command::Inherit { target, wiped, has, changes } => self.inherit(kernel, target, (&wiped, &has), changes),
            Command::Register { target, spans } => {
                if self.is_locked(kernel, target) {
                    self.commands.push_front(Command::Register { target, spans });
                    // Others go on meanwhile.
                    return self.pass();
                }
                let new = self.register(kernel, target, &spans);
                self.reports.push_back(Report::Registered(target, new));
            }
            Command::Found { target, spans } => self.found(target, &spans),
            Command::RemovalSeen { target, removal, gone, all } => self.removal_seen(target, removal, &gone, all),
            Command::RemovalOver { target, removal } => self.removal_over(target, removal),
            Command::Ended { target } => {
                self.batches.remove(&target);
                self.young.remove(&target);
                self.graves.push(target);
                self.outstanding.forget(target);
                let gone = self.targets[target.0 as usize].take();
                gone.into_iter().flat_map(|target| target.buffers).for_each(|buffer| self.core.return_buffer(buffer));
            }
            Command::Replacement(settings) => self.core.set_replacement(settings),
            Command::Budget(budget) => {
                self.excused = true;
                match &mut self.release {
                    Some(release) => release.budget = budget,
                    None => self.core.set_budget(budget),
                }
            }
            Command::Release => {
                self.release = Some(Release { budget: self.core.budget() });
                self.core.set_budget(Budget::Pages(u64::MAX));
            }
        }
        self.core.restock();
    }

    /// Whether no release is under way or asked for.
    pub(crate) fn has_stayed(&self) -> bool {
        self.release.is_none() && !self.commands.iter().any(|command| matches!(command, Command::Release))
    }

    /// Brings a few pages home; when none is left outside, lets go of every target.
    pub(crate) fn bring_home(&mut self, kernel: &mut Kernel) {
        const PAGES_PER_TURN: usize = 32;
        if self.targets.iter().flatten().any(|target| target.flight != Flight::Idle) {
            return;
        }
        self.finish_reading(kernel.now, true);
        let heirs: Vec<usize> =
            self.targets.iter().flatten().filter(|it| !it.inherits).map(|it| it.id.0 as usize).collect();
        if !heirs.is_empty() {
            // What they have must be known before anything is brought to them.
            return heirs.into_iter().for_each(|at| self.note_thread(at));
        }
        let mut outside = Vec::new();
        self.core.outside(PAGES_PER_TURN, &mut outside);
        if outside.is_empty() && self.journeys.are_under_way() {
            return;
        }
        if outside.is_empty() {
            if self.poison_lost(kernel) || self.is(Mutation::LetGoOfLost) {
                self.let_go(kernel);
            }
            return;
        }
        for (id, address, page) in outside {
            // A block may have brought it home meanwhile.
            let there = [State::Mapped, State::Untouched, State::Lost, State::Fetching];
            if there.contains(&self.core.state_of(page)) {
                continue;
            }
            if !self.journeys.have_room() {
                return;
            }
            let Some(space) = self.target_at(id).map(|target| target.space) else { continue };
            let plan = self.core.fault(id, address);
            if self.store.answers_later() && matches!(plan, Plan::Fetch { .. }) {
                self.fetch(kernel, id.0 as usize, plan, None);
                continue;
            }
            let (plan, outcome) = self.perform(kernel, plan, space);
            kernel.trace.note(kernel.now, || format!("pager brings home {} of {space}: {outcome:?}", slot(address)));
            let served = self.core.installed(plan, outcome);
            if served == Served::Later && outcome.stop == Some(Stop::NoMemory) {
                return self.stay();
            }
            if outcome.stop == Some(Stop::Exists) {
                kernel.spaces[space].uffd.wake(&(slot(address)..slot(address) + 1));
            }
        }
    }

    /// Without a pager, what is lost would read as zeros, unless it is poisoned. False when that cannot be done now.
    fn poison_lost(&mut self, kernel: &mut Kernel) -> bool {
        for target in self.targets.iter().flatten() {
            for region in self.core.regions().of(target.id) {
                let pages = (0..region.span.pages()).map(|i| (region.first.plus(i), region.span.start.plus_pages(i)));
                for (_, address) in pages.filter(|(page, _)| self.core.state_of(*page) == State::Lost) {
                    let outcome = kernel.spaces[target.space].poison(slot(address));
                    if matches!(outcome.stop, Some(Stop::Changing | Stop::NoMemory)) {
                        return false;
                    }
                }
            }
        }
        true
    }

    /// A release failed: everything stays managed, under the budget that it had.
    pub(crate) fn stay(&mut self) {
        if let Some(Release { budget }) = self.release.take() {
            self.excused = true;
            self.core.set_budget(budget);
        }
    }

    fn let_go(&mut self, kernel: &mut Kernel) {
        for target in self.targets.iter_mut().filter_map(Option::take) {
            let space = &mut kernel.spaces[target.space];
            for region in self.core.regions().of(target.id) {
                space.unregister(&range(region.span));
            }
            self.core.ended(target.id);
            // The agent leaves, and the last descriptor with it: what the table did not know is let go of as well.
            let mut closed = vec![target.space];
            while let Some(space) = closed.pop().map(|space| &mut kernel.spaces[space]) {
                space.unregister(&(0..space.slots.len()));
                closed.extend(space.uffd.close());
            }
            if let Some(agent) = target.agent {
                kernel.threads[agent].dead = true;
            }
        }
        self.outstanding = crate::removals::Outstanding::default();
        self.release = None;
        self.reports.push_back(Report::Released);
    }
}

//! The pager is killed, between any two of its actions, and another takes over some time later.
//!
//! What the other finds is what the real one finds: the table's sheets and the book, page buffers, the store's pages
//! without their counts of references, the record of each capture, messages that were read and not applied, and what the
//! kernel and the agents have. Everything else is gone.

use std::collections::{BTreeMap, VecDeque};

use spillway_core::TargetId;
use spillway_core::evict::{Bytes, Captured, Run};
use spillway_core::page::State;
use spillway_core::pager::{Pager, Plan};

use crate::agent::Moved;
use crate::capture::Flight;
use crate::driver::{Driver, Parts};
use crate::fork::Forking;
use crate::kernel::{Kernel, Work};
use crate::memory::{address, range, slot, span};
use crate::mutation::Mutation;
use crate::reader::Buffered;
use crate::target::Target;
use crate::uffd::{Event, Message};

/// What a killed pager leaves its thread with.
pub struct Killed;

/// The record of a capture that was begun: until its pages are all in their buffers.
#[derive(Clone, Debug)]
pub struct Batch {
    pub(crate) runs: Vec<Run>,
    /// What the agent has said; it stays in the control pages and in staging.
    pub(crate) outcomes: Option<Vec<Moved>>,
    /// The table knows of it.
    pub(crate) collected: bool,
}

impl Batch {
    fn has(&self, page: spillway_core::PageIndex) -> bool {
        self.runs.iter().any(|run| run.page <= page && page < run.page.plus(run.pages))
    }
}

impl Driver {
    /// Here the pager may be killed.
    pub(crate) fn point(&mut self) {
        if let Some(left) = &mut self.lives {
            if *left == 0 {
                std::panic::resume_unwind(Box::new(Killed));
            }
            *left -= 1;
        }
    }

    /// Whether it may be killed now: what is only promised to it would be forgotten.
    pub(crate) fn may_die(&self) -> bool {
        use crate::letters::Command::{Add, Equip, Release};
        let promised = self.commands.iter().any(|it| matches!(it, Add { .. } | Equip { .. } | Release));
        self.release.is_none() && !promised
    }

    /// The driver that finds what this one has left behind.
    ///
    /// # Errors
    /// When the book cannot be read.
    pub(crate) fn succeed(self, kernel: &mut Kernel, chance: u64) -> Result<Self, String> {
        let mutation = self.mutation;
        let (budget, replacement) = (self.core.budget(), self.core.replacement());
        let Parts { mut store, estate, buffers, mut batches, mut young, mut inbox, last, numbers, targets } =
            self.into_parts();
        if mutation == Some(Mutation::ForgetStaging) {
            batches.clear();
        }
        let count = u32::try_from(buffers.len()).expect("few");
        let config = Self::config(budget, count, &store);
        store.cut_off();
        let unread = |page, _| batches.values().any(|batch| batch.has(page));
        let estate = estate.expect("only a lasting driver is killed");
        let mut core = Pager::take_over(config, estate.lasting(), |handle| store.has(handle), unread)
            .map_err(|unreadable| unreadable.to_string())?;
        core.set_replacement(replacement);
        let mut references = BTreeMap::new();
        core.each_handle(|handle| *references.entry(handle).or_insert(0) += 1);
        store.recount(&references);

        let done = core.last_event();
        // An event that was applied may still be in its place among those that were read.
        let is_applied = |number: u64| number <= done;
        inbox.extend(last.filter(|&(_, _, number)| !is_applied(number) || chance.is_multiple_of(2)));
        inbox.make_contiguous().sort_by_key(|(_, _, number)| *number);
        inbox.retain(|(_, message, _)| matches!(message, Message::Event(_)));
        if mutation == Some(Mutation::ForgetEvents) {
            inbox.clear();
        }
        inbox.retain(|&(_, _, number)| !is_applied(number) || mutation == Some(Mutation::ApplyTwice));
        let mut driver = Self::with(core, store, mutation, Some(estate));
        (driver.inbox, driver.numbers) = (inbox, numbers);
        // What was found of their bytes is not known any more.
        driver.buffers = buffers.into_iter().map(|held| Buffered { same_as: None, ..held }).collect();
        (driver.excused, driver.batches, driver.succeeds) = (true, batches, true);
        // Those that had yet to come to be do so when their fork is heard of again.
        young.retain(|_, young| young.event <= done && mutation != Some(Mutation::ForgetChildren));
        driver.young = young;
        driver.targets.resize_with(driver.core.targets() as usize, || None);
        for id in (0..driver.core.targets()).map(TargetId) {
            if targets.iter().all(|(known, ..)| *known != id) && !driver.young.contains_key(&id) {
                driver.bring_up_children_of(id, kernel);
                driver.core.ended(id);
            }
        }
        let has_agent = |id: &TargetId| targets.iter().any(|(known, ..)| known == id);
        let children = driver.young.iter().filter(|(id, _)| !has_agent(id)).map(|(&id, young)| (id, young.space, None));
        let equipped = targets.iter().map(|&(id, space, agent)| (id, space, Some(agent)));
        let known: Vec<(TargetId, usize, Option<usize>)> = equipped.chain(children).collect();
        for (id, space, agent) in known {
            if agent.is_some_and(|agent| kernel.threads[agent].dead) {
                driver.lose_batch(id);
                driver.bring_up_children_of(id, kernel);
                driver.core.ended(id);
                continue;
            }
            let mut target = Target::new(id, space, agent);
            target.doubtful = true;
            target.forked = true;
            if let Some(young) = driver.young.get(&id) {
                (target.parent, target.inherits, target.is_known) = (young.parent, young.inherits, false);
            }
            if agent.is_some_and(|agent| matches!(kernel.threads[agent].work, Work::Populate(_))) {
                target.flight = Flight::Other;
            }
            driver.targets[id.0 as usize] = Some(target);
            if agent.is_some() {
                driver.note_thread(id.0 as usize);
            }
            driver.take_up_capture(kernel, id);
            // A removal that concerned no page that was known may be under way all the same.
            let spans: Vec<_> = driver.core.regions().of(id).map(|region| range(region.span)).collect();
            spans.into_iter().for_each(|span| driver.announce(id, span));
            if mutation != Some(Mutation::ForgetWake) {
                let all = 0..kernel.spaces[space].slots.len();
                kernel.spaces[space].uffd.wake(&all);
            }
        }
        Ok(driver)
    }

    /// Nobody has `id` any more. What it had done before was read, and whom it has forked by then may be there.
    fn bring_up_children_of(&mut self, id: TargetId, kernel: &mut Kernel) {
        let (its, others) = std::mem::take(&mut self.inbox).into_iter().partition(|(at, ..)| *at == id.0 as usize);
        let its: Inbox = its;
        self.inbox = others;
        for (_, message, number) in its {
            let Message::Event(event) = message else { continue };
            self.core.begin_event(number);
            match event {
                Event::Remove(pages) => drop(self.core.removed(id, span(&pages))),
                Event::Unmap(pages) => self.core.unmapped(id, span(&pages), &[]),
                Event::Remap { from, to } => self.core.remapped(id, span(&from), address(to)),
                Event::Fork(_) if self.is(Mutation::ForgetChildren) => {}
                Event::Fork(child) => self.end_fork(kernel, Forking { parent: id, child, begun: kernel.now }, true),
            }
        }
    }

    /// What became of the capture that was begun.
    fn take_up_capture(&mut self, kernel: &mut Kernel, id: TargetId) {
        let Some(Batch { runs, outcomes, .. }) = self.batches.get(&id).cloned() else { return };
        let Some(target) = &mut self.targets[id.0 as usize] else { return };
        let Some(agent) = target.agent else { return };
        match (outcomes, &kernel.threads[agent].work) {
            (Some(_), _) => self.collect_again(kernel, id),
            (None, Work::Moves(_)) => {
                (target.flight, target.looked) = (Flight::Capture { again: false }, false);
                let pages = runs.iter().map(|run| run.pages).sum();
                target.buffers.extend((0..pages).map_while(|_| self.core.take_buffer()));
            }
            (None, _) => drop(self.batches.remove(&id)),
        }
        kernel.trace.note(kernel.now, || format!("the new pager finds a capture of {runs:?}"));
    }

    /// Nobody has any more what was captured last.
    pub(crate) fn lose_batch(&mut self, id: TargetId) {
        for run in self.batches.remove(&id).into_iter().flat_map(|batch| batch.runs) {
            for page in (0..run.pages).map(|n| run.page.plus(n)) {
                if let Some(buffer) = self.core.unread_buffer(page) {
                    self.core.read(page, buffer, Bytes::Gone);
                }
            }
        }
    }

    /// As the driver's own `collect`, of which a part may have been done already.
    pub(crate) fn collect_again(&mut self, kernel: &mut Kernel, id: TargetId) {
        self.finish_reading(kernel.now, true);
        let Some(batch) = self.batches.get(&id).cloned() else { return };
        let target = self.targets[id.0 as usize].as_mut().expect("its capture was taken up");
        target.buffers.drain(..).for_each(|buffer| self.core.return_buffer(buffer));
        let again = !batch.collected;
        let mut staged = Vec::new();
        for (run, moved) in batch.runs.iter().zip(batch.outcomes.iter().flatten()) {
            for (n, &value) in (0..run.pages).zip(&moved.values) {
                let page = run.page.plus(n);
                if let Some(buffer) = self.core.unread_buffer(page) {
                    staged.push((page, buffer, value));
                } else if again && self.core.state_of(page) == State::Mapped {
                    let buffer = self.core.take_buffer().expect("as many as were set aside for it");
                    self.core.captured(page, Captured::Moved(buffer));
                    staged.push((page, buffer, value));
                    self.point();
                }
            }
        }
        self.begin_reading(id, &staged, kernel.now);
        let target = self.targets[id.0 as usize].as_mut().expect("its capture was taken up");
        if target.flight != Flight::Other {
            target.flight = Flight::Idle;
        }
        target.runs.clear();
    }

    /// Pages that were seen in the target although they count as outside are installed: where that is refused, they are there.
    pub(crate) fn settle_doubts(&mut self, kernel: &mut Kernel, at: usize) {
        let Some(target) = self.targets[at].as_mut().filter(|target| target.may_serve()) else { return };
        let (id, space) = (target.id, target.space);
        for slot in std::mem::take(&mut target.doubts) {
            if !self.journeys.have_room() {
                self.targets[at].iter_mut().for_each(|target| target.doubts.push(slot));
                continue;
            }
            let Some(plan) = self.core.doubt(id, address(slot)) else { continue };
            if self.store.answers_later() && matches!(plan, Plan::Fetch { .. }) {
                self.fetch(kernel, at, plan, None);
                self.excused = true;
                continue;
            }
            let (plan, outcome) = self.perform(kernel, plan, space);
            kernel.trace.note(kernel.now, || format!("pager doubts {slot} of {space}: {plan:?} {outcome:?}"));
            self.core.installed_ahead(plan, outcome);
            self.excused = true;
            let later = outcome.done == 0 && outcome.stop != Some(spillway_core::pager::Stop::Exists);
            if let (true, Some(target)) = (later && kernel.spaces[space].alive, &mut self.targets[at]) {
                target.doubts.push(slot);
            }
        }
    }

    /// The slots of a run.
    pub(crate) fn slots_of(run: &Run) -> std::ops::Range<usize> {
        slot(run.address)..slot(run.address.plus_pages(run.pages))
    }
}

/// Messages that were read: whose, what, and the number of each.
pub type Inbox = VecDeque<(usize, Message, u64)>;

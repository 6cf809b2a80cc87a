//! Taking over from a pager that was killed. What is believed of what it has left, and why that is enough:
//! [`spillway_core::lasting`], docs/decisions/0021.

mod commons;
mod young;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Acquire;

use spillway_core::evict::{Bytes, Captured, Run};
use spillway_core::page::State;
use spillway_core::pager::{Budget, Pager, Plan, Stop};
use spillway_core::policy::Settings;
use spillway_core::{PAGE_BYTES_U64, Span, TargetId, TreeId};
use spillway_store::{Handle, Inheritance, Urgency};

use super::hands::to_handle;
use super::moved::Moved;
use super::{Driver, Report, Seen, Wires};
use crate::adopt::Agent;
use crate::error::Error;
use crate::estate::{Estate, Found, Stage};
use crate::guardian;
use crate::sys::message::MESSAGES;
use crate::sys::uffd::{Event, Message, Uffd};
use crate::tally::Tally;
use crate::target::{Flight, Target};
use crate::watcher::{Inherited, Request};

pub use commons::CommonsHeir;
use young::Gone;
pub use young::YoungHeir;

/// A target that was found, with its agent.
pub struct Heir {
    /// What was written down of it.
    pub found: Found,
    /// Its agent.
    pub agent: Agent,
    /// Its userfaultfd.
    pub uffd: Uffd,
    /// What is told of its tree.
    pub tally: Arc<Tally>,
    /// Its agent is still at work on something that does not mind events; it had nothing to do otherwise.
    pub at_work: bool,
}

/// All that is left of the targets of a dead pager.
pub struct Heirs {
    /// Processes with agents.
    pub processes: Vec<Heir>,
    /// Without.
    pub young: Vec<YoungHeir>,
    /// Files of memory.
    pub commons: Vec<CommonsHeir>,
}

impl Heirs {
    /// The trees that they are of.
    pub fn trees(&self) -> impl Iterator<Item = TreeId> {
        let processes = self.processes.iter().map(|heir| heir.found.tree);
        let young = self.young.iter().map(|heir| heir.found.tree);
        processes.chain(young).chain(self.commons.iter().map(|heir| heir.found.tree))
    }
}

impl Driver {
    /// A driver that takes over, to be run on the thread that makes it.
    ///
    /// # Errors
    /// When what was left cannot be read; the targets wait on.
    pub fn take_over(
        budget: Budget,
        replacement: Settings,
        mut store: Box<dyn Inheritance>,
        estate: Estate,
        Heirs { processes, mut young, commons }: Heirs,
        wires: Wires,
    ) -> Result<Self, Error> {
        let ids = processes.iter().map(|heir| heir.found.id).chain(young.iter().map(|heir| heir.found.id));
        let mut known: Vec<TargetId> = ids.chain(commons.iter().map(|heir| heir.found.id)).collect();
        let gone = Gone::of(&estate, &known, &processes);
        let batches = processes.iter().filter_map(|heir| heir.found.batch.as_ref());
        let batches: Vec<Run> =
            batches.chain(gone.iter().flat_map(|gone| &gone.batch)).flat_map(|it| it.runs.clone()).collect();
        let unread = |page, _| batches.iter().any(|run| run.page <= page && page < run.page.plus(run.pages));
        let core = Pager::take_over(
            Self::config(budget, &*store),
            estate.vault().lasting(),
            // The table may hold anything.
            |bits| Handle::from_bits(bits.get()).is_some_and(|handle| store.has(handle)),
            unread,
        );
        let core = core.map_err(Error::Unreadable)?;
        core.each_handle(|handle| store.count(to_handle(handle)));
        store.all_counted();
        let mut driver = Self::with(core, replacement, store, Some(estate), wires);
        driver.succeeds = true;
        // Those that had yet to come to be do so when their fork is heard of again.
        young.retain(|heir| {
            let is_born = heir.found.event <= driver.core.last_event();
            known.retain(|id| is_born || *id != heir.found.id);
            is_born
        });
        driver.strike_out_young_but(&known);
        let is_known = |id: &TargetId| known.contains(id) || gone.as_ref().is_some_and(|gone| gone.id == *id);
        for id in (0..driver.core.targets()).map(TargetId).filter(|id| !is_known(id)) {
            driver.forget_target(id);
        }
        // What was on its way out of these is in buffers that others may take.
        let mut leaving = Vec::new();
        let targets = driver.core.targets();
        for heir in commons.into_iter().filter(|heir| heir.found.id.0 < targets) {
            match driver.take_up_commons(heir) {
                Ok(its) => leaving.extend(its),
                Err(error) => {
                    // They wait for the next one. A store that is dropped has servers forget what would be kept for ever.
                    std::mem::forget(driver);
                    return Err(error);
                }
            }
        }
        let inherited: Vec<Inherited> = processes.iter().map(Inherited::of).collect();
        for heir in processes.into_iter().filter(|heir| heir.found.id.0 < targets) {
            driver.take_up(heir);
        }
        // The watcher hears of children when it knows whose they are.
        let _ = driver.reports.send(Request::TakeOver(inherited, driver.inherited_commons()));
        for target in driver.targets.iter().flatten().filter(|target| !target.inherits) {
            let seen = Seen { thread: target.pid, changes: Some(target.changes) };
            let _ = driver.reports.send(Request::Report(Report::Thread(target.id, seen)));
        }
        (0..driver.targets.len()).for_each(|at| driver.look_for_views(at));
        let guardians: Vec<_> = young.iter().map(|heir| heir.found.guardian).collect();
        for heir in young.into_iter().filter(|heir| heir.found.id.0 < targets) {
            driver.take_up_young(heir, &known);
        }
        gone.iter().for_each(|gone| driver.lose_batch(gone));
        driver.replay(gone.as_ref());
        gone.into_iter().for_each(|gone| driver.forget_target(gone.id));
        driver.settle_commons(leaving);
        driver.change_guardians(guardians);
        for target in driver.targets.iter().flatten() {
            target.uffd.wake_all();
        }
        // Who asks at once hears what there is.
        driver.publish();
        Ok(driver)
    }

    /// What it had announced, and was not settled.
    fn announce_again(&mut self, id: TargetId) {
        let pending: Vec<Span> =
            self.core.pending_unmapped().iter().filter(|(of, _)| *of == id).map(|(_, span)| *span).collect();
        if let Some(target) = self.target(id) {
            // What had been moved there died with the pager before this one, and nothing was registered there since.
            pending.iter().for_each(|&span| target.announced.arrived(span));
            target.unmapped = pending;
        }
        for span in self.core.removing(id) {
            self.announce(id, span);
        }
    }

    fn take_up(&mut self, Heir { found, agent, uffd, tally, at_work }: Heir) {
        let id = found.id;
        self.core.assign(id, found.tree, found.share);
        let target = Target::new(id, found.pid, uffd, Some(agent), tally);
        let merging = self.merging_again(&found, &target.tally);
        let flight = if at_work { Flight::Other } else { Flight::Idle };
        if let Some(estate) = &self.hands.estate {
            estate.set_ordered(id, at_work);
        }
        let inherits = found.inherits;
        self.add(Target { doubtful: true, forked: true, staged: true, merging, flight, inherits, ..target });
        self.collect_again(&found);
        self.announce_again(id);
        // It may be on an errand, and where and as the dead pager was.
        self.place_agent(id.0 as usize);
    }

    /// What the capture that was under way has brought. A part of it may be in the table already.
    fn collect_again(&mut self, found: &Found) {
        self.hands.finish_reading(true, &mut self.core);
        let (Some(batch), id) = (&found.batch, found.id) else { return };
        let Some(target) = &self.targets[id.0 as usize] else { return };
        let Some(agent) = &target.agent else { return };
        let mut order = Vec::new();
        let mut unused = Vec::new();
        let mut staging = agent.layout.staging;
        for (i, run) in batch.runs.iter().enumerate() {
            let moved = Moved::of(agent, target.pagemap.as_ref(), i, run, staging);
            staging = staging.plus_pages(run.pages);
            for n in 0..run.pages {
                let page = run.page.plus(n);
                if let Some(buffer) = self.core.unread_buffer(page) {
                    order.push((Some(page), buffer));
                    continue;
                }
                let Some(buffer) = self.core.take_buffer() else {
                    // There are as many as were set aside, unless someone has meddled: it is that one's own pages that are lost.
                    order.into_iter().filter_map(|(page, buffer)| Some((page?, buffer))).for_each(|(page, buffer)| {
                        self.core.read(page, buffer, Bytes::Lost);
                    });
                    return unused.into_iter().for_each(|buffer| self.core.return_buffer(buffer));
                };
                let has_left = batch.stage == Stage::Begun && self.core.may_capture(page);
                if has_left && moved.has(n) {
                    self.core.captured(page, Captured::Moved(buffer));
                    order.push((Some(page), buffer));
                } else if has_left && moved.has_lost(n) {
                    self.core.captured(page, Captured::Moved(buffer));
                    self.core.read(page, buffer, Bytes::Lost);
                    order.push((None, buffer));
                } else {
                    unused.push(buffer);
                    order.push((None, buffer));
                }
            }
        }
        unused.into_iter().for_each(|buffer| self.core.return_buffer(buffer));
        order.into_iter().for_each(|(page, buffer)| self.hands.reader.note(page, buffer));
        self.hands.begin_reading(id, agent, false, &self.core);
        self.hands.finish_reading(true, &mut self.core);
    }

    fn forget_target(&mut self, id: TargetId) {
        self.core.ended(id);
        self.core.reuse(id);
    }

    /// Applies events that were read and not applied.
    fn replay(&mut self, gone: Option<&Gone>) {
        let Some(estate) = self.hands.estate.clone() else { return };
        let (id, first) = estate.last_inbox();
        let at = id.0 as usize;
        let gone = gone.filter(|gone| gone.id == id);
        let done = self.core.last_event();
        let (removals, reader) = (estate.removals(), estate.guardian());
        for nth in 0..MESSAGES {
            let words: &[AtomicU64] = &estate.inbox()[nth * 4..][..4];
            let message = Message::from_words(std::array::from_fn(|word| words[word].load(Acquire)));
            let number = first + nth as u64;
            let is_there = self.targets.get(at).is_some_and(Option::is_some);
            if number > done
                && (is_there || gone.is_some())
                // Descriptors for as many were spared before anything was taken over.
                && let Some(event) = message.change(|number| reader?.keeps(number).ok().flatten())
            {
                if is_there {
                    self.settle_unmapped(at, Some(&event));
                }
                self.core.begin_event(number);
                match (event, gone) {
                    (event, _) if self.replay_removal(id, &event, &removals) => {}
                    (event, Some(gone)) => self.change_of_gone(gone, event),
                    (Event::Fork(uffd), None) => self.fork(at, uffd, true),
                    (event, None) => self.change(at, event),
                }
            }
            estate.settle_message(nth);
        }
    }

    /// Writes down whose agent this is.
    pub(super) fn write_down(&mut self, id: TargetId, agent: &Agent, tally: &Tally) {
        let Some(estate) = &self.hands.estate else { return };
        let started = crate::procfs::stat(agent.pid).map_or(0, |stat| stat.started);
        let is_recorded = estate.add(id, agent, started, tally);
        self.note_recorded(id, is_recorded);
        let Some(estate) = &self.hands.estate else { return };
        if let Some(share) = self.core.share_of(id) {
            estate.set_share(id, share);
        }
        if let Some(target) = self.targets.get(id.0 as usize).and_then(Option::as_ref) {
            estate.set_merging(id, target.merging);
        }
    }

    /// Whether a target is written down. As long as one is there that is not, nobody could take over all.
    fn note_recorded(&mut self, id: TargetId, is_recorded: bool) {
        self.unrecorded.retain(|other| *other != id);
        self.unrecorded.extend((!is_recorded).then_some(id));
        self.core.forsake(!self.unrecorded.is_empty());
    }

    /// Its record is not needed any more.
    pub(super) fn strike_out(&mut self, id: TargetId) {
        let Some(estate) = &self.hands.estate else { return };
        estate.remove(id);
        self.unrecorded.retain(|other| *other != id);
        self.core.forsake(!self.unrecorded.is_empty());
    }

    /// Whether another pager could take over now. Of who has no agent only a guardian keeps the userfaultfd.
    pub(super) fn can_be_outlived(&self) -> bool {
        let has_guardian = guardian::ours().is_some();
        let is_kept = |target: &Target| has_guardian || target.agent.is_some() || target.commons.is_some();
        // A call that is held up outlives its process, which whoever takes over would have to wait for.
        self.core.can_be_taken_over() && self.targets.iter().flatten().all(is_kept) && !self.deputy.is_held_up()
    }

    /// A scan saw these pages. Those that count as outside are looked at more closely, if this pager has just taken over.
    pub(super) fn doubt(&mut self, id: TargetId, spans: &[Span]) {
        if self.target(id).is_none_or(|target| !target.doubtful) {
            return;
        }
        let mut doubts = Vec::new();
        for region in spans.iter().flat_map(|&span| self.core.regions().within(id, span)) {
            for n in 0..region.span.pages() {
                let state = self.core.state_of(region.first.plus(n));
                if matches!(state, State::Inactive | State::Writing | State::Remote) {
                    doubts.push(region.span.start.plus_bytes(n * PAGE_BYTES_U64));
                }
            }
        }
        if let Some(target) = self.target(id) {
            target.doubts.extend(doubts);
        }
    }

    /// Such pages are installed: where that is refused, they are there.
    pub(super) fn settle_doubts(&mut self, at: usize) {
        let Some(target) = self.targets[at].as_mut().filter(|target| !target.doubts.is_empty()) else { return };
        if !target.may_serve() {
            return;
        }
        let id = target.id;
        for address in std::mem::take(&mut target.doubts) {
            let Some(target) = &mut self.targets[at] else { return };
            if !self.journeys.have_room() {
                target.doubts.push(address);
                continue;
            }
            let Some(plan) = self.core.doubt(id, address) else { continue };
            if self.journeys.are_possible() && matches!(plan, Plan::Fetch { .. }) {
                self.fetch(at, plan, None, Urgency::Prefetch);
                continue;
            }
            let (plan, outcome) = self.hands.perform(plan, true, target, &mut self.core);
            self.core.installed_ahead(plan, outcome);
            if outcome.done == 0 && matches!(outcome.stop, Some(Stop::Changing | Stop::NoMemory)) {
                target.doubts.push(address);
            }
        }
    }
}

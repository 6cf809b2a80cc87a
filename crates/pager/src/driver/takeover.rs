//! Taking over from a pager that was killed. What is believed of what it has left, and why that is enough:
//! [`spillway_core::lasting`], docs/decisions/0021.

mod commons;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Acquire;

use spillway_core::evict::{Bytes, Captured, Run};
use spillway_core::page::State;
use spillway_core::pager::{Budget, Pager, Plan, Stop};
use spillway_core::policy::Settings;
use spillway_core::{PAGE_BYTES_U64, Span, TargetId};
use spillway_store::{Handle, Inheritance, Urgency};

use super::hands::to_handle;
use super::moved::Moved;
use super::{Driver, Wires};
use crate::adopt::Agent;
use crate::error::Error;
use crate::estate::{Estate, Found, Stage};
use crate::sys::message::MESSAGES;
use crate::sys::uffd::{Message, Uffd};
use crate::tally::Tally;
use crate::target::{Flight, Target};

pub use commons::CommonsHeir;

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
        heirs: Vec<Heir>,
        commons: Vec<CommonsHeir>,
        wires: Wires,
    ) -> Result<Self, Error> {
        let batches: Vec<Run> =
            heirs.iter().filter_map(|heir| heir.found.batch.as_ref()).flat_map(|it| it.runs.clone()).collect();
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
        let processes = heirs.iter().map(|heir| heir.found.id);
        let known: Vec<TargetId> = processes.chain(commons.iter().map(|heir| heir.found.id)).collect();
        for id in (0..driver.core.targets()).map(TargetId).filter(|id| !known.contains(id)) {
            driver.core.ended(id);
            driver.core.reuse(id);
        }
        // What was on its way out of these is in buffers that others may take.
        let mut leaving = Vec::new();
        let targets = driver.core.targets();
        for heir in commons.into_iter().filter(|heir| heir.found.id.0 < targets) {
            leaving.extend(driver.take_up_commons(heir)?);
        }
        for heir in heirs.into_iter().filter(|heir| heir.found.id.0 < targets) {
            driver.take_up(heir);
        }
        if !driver.commons.is_empty() {
            (0..driver.targets.len()).for_each(|at| driver.look_for_views(at));
        }
        driver.replay();
        driver.settle_commons(leaving);
        for target in driver.targets.iter().flatten() {
            target.uffd.wake_all();
        }
        Ok(driver)
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
        self.add(Target { doubtful: true, forked: true, staged: true, merging, flight, ..target });
        self.collect_again(&found);
        let pending: Vec<Span> =
            self.core.pending_unmapped().iter().filter(|(of, _)| *of == id).map(|(_, span)| *span).collect();
        if let Some(target) = self.target(id) {
            target.unmapped = pending;
        }
        for span in self.core.removing(id) {
            self.announce(id, span);
        }
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
                if batch.stage == Stage::Begun && moved.has(n) && self.core.may_capture(page) {
                    self.core.captured(page, Captured::Moved(buffer));
                    order.push((Some(page), buffer));
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

    /// Applies events that were read and not applied.
    fn replay(&mut self) {
        let Some(estate) = self.hands.estate.clone() else { return };
        let (id, first) = estate.last_inbox();
        let at = id.0 as usize;
        let done = self.core.last_event();
        let removals = estate.removals();
        for nth in 0..MESSAGES {
            let words: &[AtomicU64] = &estate.inbox()[nth * 4..][..4];
            let message = Message::from_words(std::array::from_fn(|word| words[word].load(Acquire)));
            let number = first + nth as u64;
            let there = self.targets.get(at).is_some_and(Option::is_some);
            if number > done
                && there
                && let Some(event) = message.change()
            {
                self.settle_unmapped(at);
                self.core.begin_event(number);
                if !self.replay_removal(id, &event, &removals) {
                    self.change(at, event);
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

    /// Whether another pager could take over now. Who has no agent has nobody else who keeps its userfaultfd.
    pub(super) fn can_be_outlived(&self) -> bool {
        let is_kept = |target: &Target| target.agent.is_some() || target.commons.is_some();
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

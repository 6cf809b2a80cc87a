//! Bringing everything home.

use std::sync::mpsc::Sender;

use spillway_core::page::State;
use spillway_core::pager::{Budget, Plan, Served, Stop};
use spillway_core::{Address, PageIndex, Span, TargetId};
use spillway_store::Urgency;

use super::{Driver, Homeward};
use crate::adopt::Agent;
use crate::merging::Merging;
use crate::procfs;
use crate::stretch::{joined, room_behind};
use crate::sys::sched::{Class, set_class};
use crate::target::{Flight, Target};

/// A release under way.
pub(super) struct Release {
    pub(super) reply: Sender<Homeward>,
    /// The budget to return to when it fails.
    pub(super) budget: Budget,
}

/// What came of bringing pages home.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Brought {
    /// Nothing that can be told now: pages may be on their way.
    Nothing,
    /// Some are home, or known to be lost.
    Some,
    /// The target may not have so much memory.
    NoRoom,
}

/// Whether what is lost is poisoned.
pub(super) enum Poisoned {
    /// All of it.
    All,
    /// Mappings are changing.
    Later,
    /// The target may not have so much memory.
    NoRoom,
}

impl Driver {
    /// Brings a few pages home; when none is left outside, lets go of every target.
    #[inline(never)]
    pub(super) fn bring_home(&mut self) {
        const PAGES_PER_TURN: usize = 256;
        if self.targets.iter().flatten().any(|target| target.flight != Flight::Idle) {
            return;
        }
        self.hands.finish_reading(true, &mut self.core);
        let Some(reply) = self.release.as_ref().map(|release| release.reply.clone()) else { return };
        let mut outside = Vec::with_capacity(PAGES_PER_TURN);
        self.core.outside(PAGES_PER_TURN, &mut outside);
        if outside.is_empty() && self.journeys.are_under_way() {
            return;
        }
        if outside.is_empty() {
            match self.poison_lost(|_| true) {
                Poisoned::All => {}
                Poisoned::Later => return,
                Poisoned::NoRoom => return self.stay(),
            }
            let agents = self.let_go(|_| true);
            let _ = reply.send(Homeward::Done(agents));
            self.release = None;
            return;
        }
        let _ = reply.send(Homeward::Left(self.core.touched_pages() - self.core.mapped_pages()));
        if self.install_outside(&outside) == Brought::NoRoom {
            self.stay();
        }
    }

    /// Installs what is outside, as far as journeys have room, in targets that may be served now: a child gets nothing before
    /// it is known what it inherits.
    pub(super) fn install_outside(&mut self, outside: &[(TargetId, Address, PageIndex)]) -> Brought {
        let mut brought = Brought::Nothing;
        for &(id, address, page) in outside {
            // A block may have brought it home meanwhile.
            let there = [State::Mapped, State::Untouched, State::Lost, State::Fetching];
            if there.contains(&self.core.state_of(page)) {
                continue;
            }
            let at = id.0 as usize;
            let Some(target) = self.targets[at].as_ref().filter(|target| target.may_serve()) else { continue };
            if !self.journeys.have_room() {
                break;
            }
            let plan = self.core.fault(id, address);
            let performed = match plan {
                Plan::Fetch { .. } => self.fetch(at, plan, None, Urgency::Prefetch),
                _ => Some(self.hands.perform(plan, true, target, &mut self.core)),
            };
            let (Some((plan, outcome)), Some(target)) = (performed, &self.targets[at]) else { continue };
            let served = self.core.installed(plan, outcome);
            if outcome.done > 0 || served != Served::Later {
                brought = Brought::Some;
            }
            if served == Served::Later && outcome.stop == Some(Stop::NoMemory) {
                return Brought::NoRoom;
            }
            if outcome.stop == Some(Stop::Exists) {
                target.wake(Span::of_pages(address, 1));
            }
        }
        brought
    }

    /// Without a pager, what is lost would read as zeros, unless it is poisoned.
    pub(super) fn poison_lost(&self, whose: impl Fn(&Target) -> bool) -> Poisoned {
        for target in self.targets.iter().flatten().filter(|target| whose(target)) {
            for address in self.core.lost_in(target.id) {
                match target.poison(address).stop {
                    Some(Stop::Changing) => return Poisoned::Later,
                    Some(Stop::NoMemory) => return Poisoned::NoRoom,
                    // What is there needs none, and what is gone neither.
                    Some(Stop::Exists | Stop::Gone) | None => {}
                }
            }
        }
        Poisoned::All
    }

    /// A release failed: everything stays managed, under the budget that it had.
    pub(super) fn stay(&mut self) {
        if let Some(Release { reply, budget }) = self.release.take() {
            self.core.set_budget(budget);
            self.owes_errands = true;
            self.lend();
            let _ = reply.send(Homeward::NoRoom(self.core.touched_pages() - self.core.mapped_pages()));
        }
    }

    /// Nothing of these targets is outside: they are what they were without us, but for their agents.
    pub(super) fn let_go(&mut self, whose: impl Fn(&Target) -> bool) -> Vec<Agent> {
        let mut agents = Vec::new();
        let gone = self.targets.iter_mut().filter_map(|slot| slot.take_if(|target| whose(target)));
        for target in gone.collect::<Vec<_>>() {
            let spans = joined(self.core.regions().of(target.id).map(|region| region.span).collect());
            // Where its process is not known, they end where they are known to end.
            let mappings = procfs::mappings(target.pid).unwrap_or_default();
            for span in spans {
                // What lies behind memory that was handed over is not ours.
                let end = if target.handed { span.end } else { room_behind(&mappings, span.end) };
                if target.uffd.unregister(Span { end, ..span }).is_err() {
                    // A mapping that went away meanwhile needs no unregistering.
                    let _ = target.uffd.unregister(span);
                }
            }
            self.commons.retain(|id| *id != target.id);
            for view in target.commons.iter().flat_map(|commons| &commons.views) {
                // What is gone needs none.
                let _ = view.uffd.unregister(view.span);
            }
            self.core.ended(target.id);
            self.strike_out(target.id);
            agents.extend(target.agent.map(|mut agent| {
                agent.ear = None;
                agent.unmerges = (target.merging == Merging::Ours).then_some(target.marked);
                agent
            }));
        }
        self.settle_if_alone();
        for agent in &agents {
            // They leave, and nobody looks any more whether they starve.
            let _ = set_class(agent.thread, Class::Normal);
            let _ = self.shared.cpus.get().map(|cpus| cpus.confine(agent.thread));
        }
        agents
    }
}

//! Bringing everything home.

use std::sync::mpsc::Sender;

use spillway_core::Span;
use spillway_core::page::State;
use spillway_core::pager::{Budget, Plan, Served, Stop};
use spillway_store::Urgency;

use super::{Driver, Homeward};
use crate::adopt::Agent;
use crate::target::Flight;

/// A release under way.
pub(super) struct Release {
    pub(super) reply: Sender<Homeward>,
    /// The budget to return to when it fails.
    pub(super) budget: Budget,
}

impl Driver {
    /// Brings a few pages home; when none is left outside, lets go of every target.
    pub(super) fn bring_home(&mut self) {
        const PAGES_PER_TURN: usize = 256;
        if self.targets.iter().flatten().any(|target| target.flight != Flight::Idle) {
            return;
        }
        let Some(reply) = self.release.as_ref().map(|release| release.reply.clone()) else { return };
        let mut outside = Vec::with_capacity(PAGES_PER_TURN);
        self.core.outside(PAGES_PER_TURN, &mut outside);
        if outside.is_empty() && self.journeys.are_under_way() {
            return;
        }
        if outside.is_empty() {
            if !self.poison_lost() {
                return;
            }
            let agents = self.let_go();
            let _ = reply.send(Homeward::Done(agents));
            self.release = None;
            return;
        }
        let _ = reply.send(Homeward::Left(self.core.touched_pages() - self.core.mapped_pages()));
        for (id, address, page) in outside {
            // A block may have brought it home meanwhile.
            let there = [State::Mapped, State::Untouched, State::Lost, State::Fetching];
            if there.contains(&self.core.state_of(page)) {
                continue;
            }
            if !self.journeys.have_room() {
                return;
            }
            let at = id.0 as usize;
            let Some(target) = &self.targets[at] else { continue };
            let plan = self.core.fault(id, address);
            let performed = match plan {
                Plan::Fetch { .. } => self.fetch(at, plan, None, Urgency::Prefetch),
                _ => Some(self.hands.perform(plan, true, target, &mut self.core)),
            };
            let (Some((plan, outcome)), Some(target)) = (performed, &self.targets[at]) else { continue };
            let served = self.core.installed(plan, outcome);
            if served == Served::Later && outcome.stop == Some(Stop::NoMemory) {
                return self.stay();
            }
            if outcome.stop == Some(Stop::Exists) {
                let _ = target.uffd.wake(Span::of_pages(address, 1));
            }
        }
    }

    /// A release failed: everything stays managed, under the budget that it had.
    fn stay(&mut self) {
        if let Some(Release { reply, budget }) = self.release.take() {
            self.core.set_budget(budget);
            let _ = reply.send(Homeward::NoRoom(self.core.touched_pages() - self.core.mapped_pages()));
        }
    }

    /// Makes every lost page raise SIGBUS, also those that nobody has touched since: to the kernel they are missing, and
    /// without us it would make zeros of them. False when some must be tried again.
    fn poison_lost(&self) -> bool {
        self.targets.iter().flatten().all(|target| {
            let lost = self.core.lost_in(target.id);
            lost.into_iter().all(|address| target.uffd.poison(address).stop != Some(Stop::Changing))
        })
    }

    fn let_go(&mut self) -> Vec<Agent> {
        let mut agents = Vec::new();
        for target in self.targets.iter_mut().filter_map(Option::take) {
            for region in self.core.regions().of(target.id) {
                // A mapping that went away meanwhile needs no unregistering.
                let _ = target.uffd.unregister(region.span);
            }
            self.core.ended(target.id);
            agents.extend(target.agent);
        }
        self.placement.settle(&self.shared);
        agents
    }
}

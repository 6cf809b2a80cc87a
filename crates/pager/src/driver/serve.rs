//! Serving faults.

use spillway_core::Span;
use spillway_core::pager::{Outcome, Plan, Served, Stop};
use spillway_store::Urgency;

use super::eviction::OVERDRAFT_PAGES;
use super::{Driver, Report, Seen};
use crate::sys::clock::now_ns;
use crate::tally::Tally;
use crate::target::Waiting;
use crate::watcher::Request;

impl Driver {
    pub(super) fn note_thread(&mut self, at: usize, thread: i32) {
        let Some(target) = &mut self.targets[at] else { return };
        if target.pid == 0 {
            // Reported once; the scanner answers by equipping the target or not.
            target.pid = -1;
            let _ = self
                .reports
                .send(Request::Report(Report::Thread(target.id, Seen { thread, changes: Some(target.changes) })));
        }
        let slept = std::mem::take(&mut self.slept);
        if target.pid > 0 && thread != 0 && self.placement.note(target.pid, thread, slept, &self.shared) {
            self.place_agents();
        }
    }

    /// Serves a fault, or lets it wait.
    pub(super) fn serve(&mut self, at: usize, fault: Waiting) {
        let Some((at, fault)) = self.whereabouts(at, fault) else { return };
        let Some(target) = &mut self.targets[at] else { return };
        if !target.may_serve() || target.is_on_its_way_out(fault.address) {
            target.waiting.push(fault);
            return;
        }
        if target.is_agent_at_work(fault.thread) {
            // Nothing can be captured before it is done: it must not wait for room.
            self.core.set_overdraft(OVERDRAFT_PAGES);
        }
        let mut plan = self.core.fault(target.id, fault.address);
        if target.handed && matches!(plan, Plan::Zero { page: None, .. }) {
            // Registered, and not among what was handed over: it may be zeros, and it may be anything.
            plan = Plan::Lost { address: fault.address };
        }
        if self.journeys.are_possible() && matches!(plan, Plan::Fetch { .. }) {
            return self.ask_for(at, plan, fault);
        }
        // What the stream will want next comes first: once the faulting thread runs, it would fault on it.
        while let Some(plan) = self.core.ahead() {
            let (plan, outcome) = self.hands.perform(plan, fault.write, target, &mut self.core);
            self.core.installed_ahead(plan, outcome);
        }
        let (plan, outcome) = self.hands.perform(plan, fault.write, target, &mut self.core);
        let served = self.core.installed(plan, outcome);
        if outcome.stop == Some(Stop::Exists) && matches!(plan, Plan::Zero { page: Some(_), .. }) {
            self.found_by_fault(at, fault.address);
        }
        let Some(target) = &mut self.targets[at] else { return };
        match served {
            Served::Yes => {}
            Served::Wake => {
                target.wake(Span::of_pages(fault.address, 1));
            }
            Served::Later => {
                target.waiting.push(fault);
                return;
            }
        }
        if matches!(plan, Plan::Fetch { .. }) {
            Tally::add(&target.tally.fetched_pages, outcome.done);
        }
        if matches!(plan, Plan::Zero { page: None, .. }) {
            let _ = self.reports.send(Request::Report(Report::Rescan(target.id)));
        }
        self.note_served(at, plan, fault);
    }

    /// This plan served a fault just now.
    pub(super) fn note_served(&mut self, at: usize, plan: Plan, fault: Waiting) {
        let served_ns = self.hands.watch.served(now_ns()).max(fault.since_ns);
        self.shared.histogram.record(served_ns - fault.since_ns);
        if let Some(target) = &self.targets[at] {
            target.tally.histogram.record(served_ns - fault.since_ns);
        }
        if let Some(tape) = &mut self.tape {
            tape.fault(plan, fault, served_ns);
        }
    }

    /// Asks a store that answers later for what a fault needs, and then for what its stream will want.
    fn ask_for(&mut self, at: usize, plan: Plan, fault: Waiting) {
        if !self.journeys.have_room() {
            let outcome = Outcome { done: 0, stop: Some(Stop::Changing) };
            self.core.installed(plan, outcome);
            if let Some(target) = &mut self.targets[at] {
                target.waiting.push(fault);
            }
            return;
        }
        self.fetch(at, plan, Some(fault), Urgency::Demand);
        while self.journeys.have_room()
            && let Some(plan) = self.core.ahead()
        {
            self.fetch(at, plan, None, Urgency::Prefetch);
        }
    }

    pub(super) fn retry_waiting(&mut self) {
        for at in 0..self.targets.len() {
            self.settle_at_rest(at);
            self.settle_doubts(at);
            let Some(target) = &mut self.targets[at] else { continue };
            if target.waiting.is_empty() || !target.may_serve() {
                continue;
            }
            // Those that go on waiting are put into the other list, which has its room already.
            let mut waiting = std::mem::replace(&mut target.waiting, std::mem::take(&mut self.retried));
            for &fault in &waiting {
                self.serve(at, fault);
            }
            waiting.clear();
            self.retried = waiting;
        }
    }
}

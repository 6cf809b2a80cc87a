//! Telling the kernel, by way of agents, whose pages it is to merge.

use std::sync::atomic::Ordering::Relaxed;

use spillway_core::{Span, TreeId};

use super::{Driver, Report};
use crate::estate::Found;
use crate::merging::Merging;
use crate::sys::clock::ticks_since_boot;
use crate::tally::Tally;
use crate::target::{Errand, Flight, Target};
use crate::watcher::Request;

impl Target {
    /// What the kernel is still to be told of merging.
    fn owes(&self) -> Option<Errand> {
        if self.agent.is_none() || self.leaving || self.unmergeable {
            return None;
        }
        match (self.merging, self.tally.merges.load(Relaxed)) {
            (Merging::Untold, true) => Some(Errand::Ask),
            (Merging::Ours | Merging::Its, false) => Some(Errand::End),
            _ => None,
        }
    }
}

impl Driver {
    /// What is wanted of `tree` has changed: what was refused may be tried again. `marked` is what of it is merged now.
    pub(super) fn merge_anew(&mut self, tree: TreeId, marked: &[(i32, Vec<Span>)]) {
        for target in self.targets.iter_mut().flatten().filter(|target| target.tally.tree == tree) {
            target.unmergeable = false;
            // Once all of it is, nothing tells what was marked before.
            if target.merging == Merging::Untold
                && let Some((_, marked)) = marked.iter().find(|(pid, _)| *pid == target.pid)
            {
                target.marked.clone_from(marked);
            }
        }
        self.owes_errands = true;
    }

    /// Sends agents that have nothing to do on their errands.
    #[inline(never)]
    pub(super) fn tend_merging(&mut self) {
        if self.release.is_some() {
            return;
        }
        self.owes_errands = false;
        for at in 0..self.targets.len() {
            let Some(target) = &mut self.targets[at] else { continue };
            match target.owes() {
                None => {}
                Some(_) if target.flight != Flight::Idle || target.deaf => self.owes_errands = true,
                Some(Errand::End) if target.merging == Merging::Its => self.note_merging(at, Merging::Untold),
                Some(errand) => {
                    self.tell_of_merging(at, errand);
                }
            }
        }
    }

    fn tell_of_merging(&mut self, at: usize, errand: Errand) {
        self.errand_begins(at);
        if let Some(target) = &mut self.targets[at] {
            target.tell_of_merging(errand);
        }
    }

    /// The agent is back from an errand.
    pub(super) fn heard_of_merging(&mut self, at: usize, errand: Errand) {
        let Some(target) = &mut self.targets[at] else { return };
        let Some(agent) = &target.agent else { return };
        let answer = agent.memory.result(0);
        if answer < 0 {
            target.unmergeable = true;
            let _ = self.reports.send(Request::Report(Report::Unmergeable(target.id, answer)));
            // Whatever it was, it has not begun.
            if errand == Errand::Begin {
                self.note_merging(at, Merging::Untold);
            }
            return;
        }
        match errand {
            Errand::Ask if answer > 0 && !target.inherits_merging => self.note_merging(at, Merging::Its),
            // Written down before it begins: whoever takes over must know that it is to end.
            Errand::Ask => {
                self.note_merging(at, Merging::Ours);
                if answer == 0 {
                    self.tell_of_merging(at, Errand::Begin);
                }
            }
            Errand::Begin => {
                if target.tally.merging_since.load(Relaxed) == 0 {
                    target.tally.merging_since.store(ticks_since_boot(), Relaxed);
                }
            }
            Errand::End => self.note_merging(at, Merging::Untold),
        }
        // It may have been asked for the opposite meanwhile.
        self.owes_errands = true;
    }

    /// What a target that was taken over is known to be made to do.
    pub(super) fn merging_again(&mut self, found: &Found, tally: &Tally) -> Merging {
        if found.merging == Merging::Ours && tally.merging_since.load(Relaxed) == 0 {
            tally.merging_since.store(ticks_since_boot(), Relaxed);
        }
        self.owes_errands = true;
        found.merging
    }

    fn note_merging(&mut self, at: usize, merging: Merging) {
        let Some(target) = &mut self.targets[at] else { return };
        target.merging = merging;
        if let Some(estate) = &self.hands.estate {
            estate.set_merging(target.id, merging);
        }
    }
}

//! Removals that were announced and are not settled: what the driver knows of them.
//!
//! What a scan saw may be old by the time it is heard of. Two rules keep that from mattering: pages that a scan saw
//! resident are taken for resident only where no removal is outstanding, and a removal is over only where no later one
//! of the same pages is outstanding.

use std::ops::Range;

use spillway_core::{Span, TargetId};

use crate::driver::Driver;
use crate::letters::Report;
use crate::memory::{overlap, range, span};
use crate::mutation::Mutation;

#[derive(Clone, Debug)]
struct Announced {
    id: u64,
    target: TargetId,
    pages: Range<usize>,
    /// Of these pages, what a scan saw resident, at a time when the removal may not have happened.
    seen: Vec<Range<usize>>,
}

/// All of them.
#[derive(Clone, Debug, Default)]
pub struct Outstanding {
    list: Vec<Announced>,
    next: u64,
}

impl Outstanding {
    /// How many there are.
    pub fn count(&self) -> usize {
        self.list.len()
    }

    fn take(&mut self, id: u64) -> Option<Announced> {
        let at = self.list.iter().position(|announced| announced.id == id)?;
        Some(self.list.remove(at))
    }

    /// The last removal announced that concerns a page.
    fn last_of(&mut self, target: TargetId, pages: &Range<usize>) -> Option<&mut Announced> {
        self.list.iter_mut().rev().find(|announced| announced.target == target && overlap(&announced.pages, pages))
    }

    /// The target is gone.
    pub(crate) fn forget(&mut self, target: TargetId) {
        self.list.retain(|announced| announced.target != target);
    }
}

impl Driver {
    /// A removal was announced.
    pub(crate) fn announce(&mut self, target: TargetId, pages: Range<usize>) {
        if self.is(Mutation::CaptureRemoving) {
            return self.core.removal_over(target, span(&pages));
        }
        self.outstanding.next += 1;
        let id = self.outstanding.next;
        self.reports.push_back(Report::Removal(target, span(&pages), id));
        self.outstanding.list.push(Announced { id, target, pages, seen: Vec::new() });
    }

    /// A scan saw these pages resident.
    pub(crate) fn found(&mut self, target: TargetId, spans: &[Span]) {
        if let Some(target) = self.targets[target.0 as usize].as_mut().filter(|target| target.doubtful) {
            target.doubtful = false;
            target.doubts = spans.iter().flat_map(|&span| range(span)).collect();
        }
        self.are_there(target, spans);
        if let Some(target) = self.targets[target.0 as usize].as_mut() {
            target.scanned = false;
        }
    }

    fn are_there(&mut self, target: TargetId, spans: &[Span]) {
        self.excused = true;
        let trusting = self.is(Mutation::TrustScan);
        for at in spans.iter().flat_map(|&span| range(span)) {
            let page = at..at + 1;
            match self.outstanding.last_of(target, &page).filter(|_| !trusting) {
                Some(announced) => announced.seen.push(page),
                None => self.core.found(target, span(&page)),
            }
        }
    }

    /// A fault was answered with a page that is there already, and that the table did not know.
    pub(crate) fn found_by_fault(&mut self, target: TargetId, at: usize) {
        self.excused = true;
        let page = at..at + 1;
        if self.outstanding.last_of(target, &page).is_some() && !self.is(Mutation::TrustScan) {
            self.core.removed(target, span(&page));
        }
    }

    /// A scan after a removal saw none of these pages; `all` when that settles it. What was removed once more since is
    /// scanned once more.
    pub(crate) fn removal_seen(&mut self, target: TargetId, id: u64, gone: &[Span], all: bool) {
        for at in gone.iter().flat_map(|&gone| range(gone)) {
            let last = self.outstanding.last_of(target, &(at..at + 1));
            if last.is_none_or(|last| last.id <= id) {
                self.core.removal_seen(target, span(&(at..at + 1)));
            }
        }
        if all {
            self.outstanding.take(id);
        }
    }

    /// No thread is inside the removal any more: what is there still was spared, where no other is outstanding.
    pub(crate) fn removal_over(&mut self, target: TargetId, id: u64) {
        let Some(Announced { pages, seen, .. }) = self.outstanding.take(id) else { return };
        self.excused = true;
        let trusting = self.is(Mutation::TrustRemovalOver);
        for at in pages {
            if self.outstanding.last_of(target, &(at..at + 1)).is_none() || trusting {
                self.core.removal_over(target, span(&(at..at + 1)));
            }
        }
        let seen: Vec<Span> = seen.iter().map(span).collect();
        self.are_there(target, &seen);
    }
}

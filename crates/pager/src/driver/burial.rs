//! Address spaces that are gone: their pages are forgotten a few at a time, as others' faults are not to wait for all of a guest's.

use spillway_core::TargetId;

use super::{Driver, Report};
use crate::watcher::Request;

/// Pages between two looks for faults: where there were some, and where there were none.
const PAGES_PER_TURN: (u64, u64) = (64, 1024);

impl Driver {
    /// The address space of `target` is gone.
    pub(super) fn ended(&mut self, target: TargetId) {
        self.awaits_agent = false;
        if let Some(access) = &mut self.access {
            access.remove(target);
        }
        if let Some(tape) = &mut self.tape {
            tape.ended(&self.core, target);
        }
        self.forget_views_of(target);
        self.deputy.forget(target);
        self.commons.retain(|id| *id != target);
        // Whoever takes over forgets all pages of those that are not written down.
        self.strike_out(target);
        let slot = self.targets.get_mut(target.0 as usize).and_then(Option::take);
        let children = self.targets.iter_mut().flatten().filter(|child| child.parent == Some(target));
        children.for_each(|child| child.parent = None);
        slot.into_iter().flat_map(|target| target.buffers).for_each(|b| self.core.return_buffer(b));
        self.graves.push(target);
        self.settle_if_alone();
    }

    /// Forgets a few pages of those that have ended.
    pub(super) fn bury(&mut self, busy: bool) {
        let Some(&target) = self.graves.last() else { return };
        let (while_busy, else_pages) = PAGES_PER_TURN;
        if self.core.bury(target, if busy { while_busy } else { else_pages }) {
            self.graves.pop();
            let _ = self.reports.send(Request::Report(Report::Buried(target)));
        }
    }
}

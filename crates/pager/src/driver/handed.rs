//! Memory that was handed over with its userfaultfd: pages that are in the store before anything of it was touched.

use std::sync::Arc;
use std::sync::mpsc::Sender;

use spillway_core::shares::Share;
use spillway_core::{Span, TargetId};
use spillway_store::Handle;

use super::Driver;
use super::hands::to_bits;
use crate::sys::uffd::Uffd;
use crate::tally::Tally;
use crate::target::{Flight, HOLD_CALLS, Target};

impl Driver {
    /// A target that has made its userfaultfd itself. Its messages are read once it is known where its pages are.
    pub(super) fn hand(&mut self, pid: i32, uffd: Uffd, tally: Arc<Tally>, share: Share, looks_into: bool) -> TargetId {
        let id = self.core.add_target();
        self.core.assign(id, tally.tree, share);
        let mut target = Target { handed: true, inherits: false, ..Target::new(id, pid, uffd, None, tally) };
        if looks_into {
            target.look_into(pid);
        }
        self.add(target);
        id
    }

    /// Has an agent keep memory in its place that was plugged in after adoption had seen to the rest.
    pub(super) fn hold(&mut self, id: TargetId, span: Span, reply: Sender<Option<bool>>) {
        let is_free = |target: &&mut Target| target.agent.is_some() && target.flight == Flight::Idle && !target.deaf;
        if self.target(id).filter(is_free).is_none() {
            let _ = reply.send(None);
            return;
        }
        self.errand_begins(id.0 as usize);
        if let Some(target) = self.target(id) {
            target.hold(span);
            target.holds = Some(reply);
        }
    }

    /// The agent is back from that, or has not begun.
    pub(super) fn heard_of_hold(&mut self, at: usize, done: bool) {
        let Some(target) = &mut self.targets[at] else { return };
        let Some(reply) = target.holds.take() else { return };
        let result = target.agent.as_ref().map(|agent| (0..HOLD_CALLS).all(|call| agent.memory.result(call) == 0));
        let _ = reply.send(result.filter(|_| done));
    }

    /// What is missing in `span` is in the store, page after page from `first` on.
    pub(super) fn lay_out(&mut self, target: TargetId, span: Span, first: Handle) {
        let handle = |pages: u64| {
            let bits = u64::from(first.bits()) + pages;
            let handle = u32::try_from(bits).ok().and_then(Handle::from_bits);
            to_bits(handle.expect("an image has a handle for each of its pages"))
        };
        self.core.laid_out(target, span, |address| handle(address.pages_since(span.start)));
    }
}

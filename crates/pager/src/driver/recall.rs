//! Orders that nobody takes: the agent of a process that is stopped (Ctrl-Z) or frozen does nothing until that goes on.
//!
//! Such an order is taken back. Nobody is to wait for it: neither another target's fault that needs the room, nor the end of this
//! pager, nor the one that comes after it.

use super::Driver;
use crate::procfs;
use crate::target::Flight;

/// An agent that runs has begun within so long, unless others have all the CPUs.
const BEGUN_WITHIN_NS: u64 = 100_000_000;
/// And one that has not gets no other order for so long.
const DEAF_NS: u64 = 1_000_000_000;

impl Driver {
    /// How soon to look for orders that nobody takes, and for agents that may do so again.
    pub(super) fn until_recall(&self) -> Option<u64> {
        let awaited = self.targets.iter().flatten().any(|target| target.deaf || target.flight != Flight::Idle);
        awaited.then_some(BEGUN_WITHIN_NS)
    }

    /// Takes back orders that nobody takes, if it is time to look for such. That others keep us busy is no reason not to.
    pub(super) fn recall(&mut self, now_ns: u64) {
        if now_ns.saturating_sub(self.recalled_ns) < BEGUN_WITHIN_NS {
            return;
        }
        self.recalled_ns = now_ns;
        for at in 0..self.targets.len() {
            let Some(target) = &mut self.targets[at] else { continue };
            let waited_ns = now_ns.saturating_sub(target.ordered_ns);
            target.deaf &= waited_ns < DEAF_NS;
            let late = target.flight != Flight::Idle && waited_ns > BEGUN_WITHIN_NS;
            let Some(agent) = target.agent.as_ref().filter(|_| late) else { continue };
            // It may have begun, and be stopped since.
            target.ordered_ns = now_ns;
            // Who waits for a CPU will get one: without it faults of busy programs would go past the budget for a second.
            let waits_for_cpu = procfs::thread_stat(agent.pid, agent.thread).is_ok_and(|stat| stat.state == b'R');
            if !waits_for_cpu && agent.take_back_order() {
                // What it was to drop from staging is still there, and shared what it was to unshare.
                (target.deaf, target.staged) = (true, true);
                target.unshared.clear();
                self.errand_is_over(at, false);
                self.awaits_agent = false;
                self.note_rest();
            }
        }
    }
}

//! Orders that nobody takes: the agent of a process that is stopped (Ctrl-Z) or frozen does nothing until that goes on.
//!
//! Such an order is taken back. Nobody is to wait for it: neither another target's fault that needs the room, nor the end of this
//! pager, nor the one that comes after it. One that was begun cannot be: until its agent answers, what it is about is left as it is, and
//! others' faults that need room go without that target.

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
            if procfs::thread_stat(agent.pid, agent.thread).is_ok_and(|stat| stat.state == b'R') {
                continue;
            }
            let is_back = agent.take_back_order();
            target.deaf = true;
            self.awaits_agent = false;
            if is_back {
                // What it was to drop from staging is still there, and shared what it was to unshare.
                target.staged = true;
                target.unshared.clear();
                self.errand_is_over(at, false);
                self.note_rest();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::outside::tests::until_asleep;
    use crate::skipped::skipped;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;

    use rustix::fs::{MemfdFlags, memfd_create};
    use spillway_core::pager::{Budget, Plan};
    use spillway_core::{Address, Span};

    use super::*;
    use crate::adopt::Agent;
    use crate::driver::tests::driver;
    use crate::sys::agent::Memory;
    use crate::sys::clock::now_ns;
    use crate::sys::fd::send_byte;
    use crate::sys::uffd::new_of_our_own;
    use crate::target::Target;

    /// An agent that is a process, and where it answers.
    fn agent(pid: i32) -> (Agent, UnixStream) {
        let (ours, its) = UnixStream::pair().expect("two descriptors");
        let file = memfd_create(c"agent", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("a descriptor");
        (Agent::of_test(pid, ours.into(), Memory::new(file).expect("a few pages")), its)
    }

    /// Frozen between two moves it could not be told not to go on, and everybody else's faults waited for what it would bring.
    #[test]
    fn nobody_waits_for_one_that_is_stopped_in_the_middle_of_a_capture() {
        let uffd = match new_of_our_own() {
            Ok(uffd) => uffd,
            Err(error) => return skipped(error),
        };
        let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("sleep");
        let pid = child.id().cast_signed();
        until_asleep(pid);
        let mut driver = driver();
        let (frozen, other) = (driver.core.add_target(), driver.core.add_target());
        let ends = [frozen, other].map(|id| {
            let (agent, its_end) = agent(pid);
            driver.add(Target { looked: true, ..Target::new(id, pid, uffd.clone(), Some(agent), Arc::default()) });
            its_end
        });
        let memory = Span::of_pages(Address(1 << 30), 2);
        driver.core.add_region(other, memory);
        driver.core.set_budget(Budget::Pages(0));
        let has_room = |driver: &mut Driver| driver.core.fault(other, memory.start) != Plan::NoRoom;
        let under_way = Flight::Capture { first_call: 1, again: false };
        let target = driver.target(frozen).expect("it is there");
        target.ordered_ns = now_ns() - BEGUN_WITHIN_NS - 1;
        target.flight = Flight::Capture { first_call: 1, again: false };

        assert!(!has_room(&mut driver));
        driver.evict();
        assert!(driver.awaits_agent && !has_room(&mut driver), "what is under way may bring some");
        driver.recall(now_ns());
        driver.evict();
        assert!(!driver.awaits_agent && has_room(&mut driver), "it was waited for");
        let is_so = |driver: &mut Driver, flight, takes_orders| {
            driver.target(frozen).is_some_and(|it| it.flight == flight && it.takes_orders() == takes_orders)
        };
        assert!(is_so(&mut driver, under_way, false));

        assert!(send_byte(ends[0].as_fd()));
        driver.hear_agent(frozen.0 as usize);
        assert!(is_so(&mut driver, Flight::Idle, true));
        child.kill().and_then(|()| child.wait()).expect("it ends");
    }
}

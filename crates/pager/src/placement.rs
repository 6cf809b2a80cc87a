//! Where the fault thread runs.
//!
//! Serving a fault from the faulting thread's own CPU takes a third of what it takes from another that is awake, and
//! less than a tenth of one that must be woken from its idle state (docs/decisions/0002). So while one thread of the
//! targets raises nearly all faults, the fault thread follows it; two that do little else but fault are gathered on its CPU.
//!
//! Where other CPUs are idle, that alone would drive the thread away: woken by a pager on its own CPU, it goes to an idle
//! one. So the fault thread then runs in the idle scheduling class: to the kernel that CPU counts as idle, and the woken
//! thread stays. Where every CPU is busy nothing is driven away, and the idle class would starve: the normal class it
//! is, as it is without the right to leave the idle class again. A watchdog on another thread has this thread stand aside,
//! on another CPU, when it is runnable and stands still, and ends the idle class where that does not help.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use crate::procfs::{self, ThreadStat};
use crate::shared::Shared;
use crate::sys::clock::now_ns;
use crate::sys::sched::{Class, Cpus, current_cpu, idle_class_can_be_left, set_class, thread_id};

/// Faults between two looks at where their thread runs, at first and, as looks find nothing new, at last. A look costs more
/// than a fault, and a thread that moves is mostly noticed sooner ([`SLEPT_AWAY`]).
const LOOK_EVERY: (u32, u32) = (64, 1024);

/// So many faults after it has moved, it has come to stay, and the pager's other threads make way. Whoever is driven away mostly comes
/// back sooner, and to place all others costs as much as five faults.
const SETTLED: u32 = 64;

/// For how long it is known which threads the pager has.
const OTHERS_KEPT_NS: u64 = 100_000_000;

/// Faults in a row that had to be waited for, after which the thread has probably moved: on the wrong CPU a fault costs as
/// much as ten looks.
const SLEPT_AWAY: u32 = 2;

/// Of eight of those, so many must come from one thread for it to count as dominant.
const DOMINANT: u32 = 7;

/// Two threads whose faults follow each other sooner than this on average, in nanoseconds, mostly wait for them: they are better off
/// on one CPU with the fault thread than each on its own. Between these bounds it stays as it was.
const GATHER_NS: (u64, u64) = (60_000, 90_000);

/// Whether two threads that fault once in `pace_ns` together are to be on one CPU, if they are now or not.
fn gathers(pace_ns: u64, now: bool) -> bool {
    pace_ns < if now { GATHER_NS.1 } else { GATHER_NS.0 }
}

/// Decides, and remembers what it decided.
pub struct Placement {
    allowed: Option<Cpus>,
    seen: u32,
    /// Faults until the next look, and between looks at present.
    look_after: u32,
    look_every: u32,
    /// Faults in a row that had to be waited for.
    slept: u32,
    from_candidate: u32,
    candidate: i32,
    /// Another thread, and how many faults came from it.
    second: i32,
    from_second: u32,
    /// When it was last looked where threads are, and whether two of them are gathered on one CPU since.
    looked_ns: u64,
    gathers: bool,
    followed: Option<usize>,
    /// Faults since it last moved.
    stayed: u32,
    /// Whose CPU is followed: the process, the thread; zeros for none. And what tells where that is, or of another thread where there is
    /// none: how many descriptors the pager has open says nothing of its targets.
    leader: (i32, i32),
    leader_stat: Option<ThreadStat>,
    /// Faults came since it was last looked where the leader is.
    fresh: bool,
    enabled: bool,
    /// It may leave the idle class again.
    may_idle: bool,
    /// The CPU that the pager's other threads are kept off, and the one that the thread which shares the work is.
    cleared: Option<usize>,
    shared_from: Option<usize>,
    /// Those other threads, and until when that is believed.
    others: Vec<i32>,
    others_until_ns: u64,
}

impl Placement {
    /// For the calling thread, from now on, which may run on all that are `allowed`.
    pub fn new(enabled: bool, allowed: Option<Cpus>) -> Self {
        let enabled = enabled && allowed.as_ref().is_some_and(|cpus| cpus.count() > 1);
        Self {
            allowed,
            seen: 0,
            look_after: LOOK_EVERY.0,
            look_every: LOOK_EVERY.0,
            slept: 0,
            from_candidate: 0,
            candidate: 0,
            second: 0,
            from_second: 0,
            looked_ns: 0,
            gathers: false,
            followed: None,
            stayed: 0,
            leader: (0, 0),
            leader_stat: ThreadStat::open(std::process::id().cast_signed(), thread_id()).ok(),
            fresh: false,
            enabled,
            may_idle: enabled && idle_class_can_be_left(),
            cleared: None,
            shared_from: None,
            others: Vec::new(),
            others_until_ns: 0,
        }
    }

    /// A fault came from `thread` of `pid`; `slept` when this thread had to wait for it. Returns true when its place or its
    /// class changed.
    pub fn note(&mut self, pid: i32, thread: i32, slept: bool, shared: &Shared) -> bool {
        if !self.enabled {
            return false;
        }
        self.seen += 1;
        self.fresh = true;
        self.stayed = self.stayed.saturating_add(1);
        if self.stayed == SETTLED {
            self.clear_the_way();
        }
        // On the same CPU one of the two always runs, so there is nothing to wait for. Where there is, the other has moved.
        self.slept = if slept { self.slept + 1 } else { 0 };
        let is_second = self.gathers && thread == self.second;
        let comes_back = shared.aside.load(Relaxed) && (thread == self.candidate || is_second);
        if self.followed.is_some() && (self.slept >= SLEPT_AWAY || comes_back) {
            self.look_after = self.look_after.min(self.seen);
            self.look_every = LOOK_EVERY.0;
            self.slept = 0;
        }
        if thread == self.candidate {
            self.from_candidate += 1;
        } else if thread == self.second || self.from_second == 0 {
            self.second = thread;
            self.from_second += 1;
        }
        if self.seen < self.look_after {
            return false;
        }
        let dominates = |faults: u32| faults * 8 >= DOMINANT * self.seen;
        let (dominant, pair) = (dominates(self.from_candidate), dominates(self.from_candidate + self.from_second));
        let now_ns = now_ns();
        let pace_ns = (now_ns - self.looked_ns) / u64::from(self.seen);
        self.looked_ns = now_ns;
        // From the normal class they would be driven apart again.
        self.gathers = pair && !dominant && !self.is_forbidden(shared, now_ns) && gathers(pace_ns, self.gathers);
        self.seen = 0;
        (self.from_candidate, self.from_second) = (0, 0);
        self.candidate = thread;
        let follows = dominant || self.gathers;
        let moved = if follows { self.follow(pid, thread, shared) } else { self.settle(shared) };
        // In the normal class it looks for the moment at which it may leave that.
        let is_calm = follows && !moved && shared.idle.load(Relaxed);
        self.look_every = if is_calm { LOOK_EVERY.1.min(self.look_every * 2) } else { LOOK_EVERY.0 };
        self.look_after = self.look_every;
        moved
    }

    /// The pager's other threads keep off the CPU that is followed: whatever else runs there drives the faulting thread
    /// away, or starves this one.
    fn clear_the_way(&mut self) {
        let Some(allowed) = self.allowed else { return };
        let elsewhere = self.followed.map_or(allowed, |cpu| allowed.without(cpu));
        if elsewhere.count() == 0 || self.cleared == self.followed {
            return;
        }
        self.cleared = self.followed;
        let now_ns = now_ns();
        // A program may be moved hundreds of times a second.
        if now_ns >= self.others_until_ns {
            let ourselves = thread_id();
            self.others = procfs::threads(std::process::id().cast_signed()).unwrap_or_default();
            self.others.retain(|&thread| thread != ourselves);
            self.others_until_ns = now_ns + OTHERS_KEPT_NS;
        }
        for &thread in &self.others {
            // A failure leaves it where it is, which is slower and not wrong.
            let _ = elsewhere.confine(thread);
        }
        self.shared_from = self.followed;
    }

    /// Nothing is to be done although faults came of late: on the same CPU this thread runs only while the leader waits for
    /// it, so the leader has moved, or waits for something else. Following it now spares its next fault a wake-up from
    /// afar. Returns true when the place changed.
    pub fn chase(&mut self, shared: &Shared) -> bool {
        // In the normal class the leader was driven away, and would be again; and who stands aside does so because of it.
        if self.followed.is_none()
            || shared.aside.load(Relaxed)
            || !std::mem::take(&mut self.fresh)
            || !shared.idle.load(Relaxed)
        {
            return false;
        }
        let (pid, thread) = self.leader;
        self.follow(pid, thread, shared)
    }

    /// Whether `thread` can do what need not be done here; then it is kept off this CPU.
    pub fn may_share_with(&mut self, thread: i32, shared: &Shared) -> bool {
        let (Some(allowed), Some(cpu)) = (self.allowed, current_cpu()) else { return false };
        // Who stands aside is where the other thread should be, and not where it should not.
        if thread == 0 || shared.crowded.load(Relaxed) || shared.aside.load(Relaxed) {
            return false;
        }
        if self.shared_from != Some(cpu) {
            let elsewhere = allowed.without(cpu);
            if elsewhere.count() == 0 || elsewhere.confine(thread).is_err() {
                return false;
            }
            self.shared_from = Some(cpu);
        }
        true
    }

    /// The CPU that is followed now.
    pub fn followed(&self) -> Option<usize> {
        self.followed
    }

    /// Whether it must not be in the idle class now.
    fn is_forbidden(&self, shared: &Shared, now_ns: u64) -> bool {
        !self.may_idle || shared.crowded.load(Relaxed) || now_ns < shared.idle_forbidden_until_ns.load(Relaxed)
    }

    fn follow(&mut self, pid: i32, thread: i32, shared: &Shared) -> bool {
        if self.leader != (pid, thread) {
            let Ok(stat) = ThreadStat::open(pid, thread) else { return self.settle(shared) };
            (self.leader, self.leader_stat) = ((pid, thread), Some(stat));
        }
        let Some(Ok(stat)) = self.leader_stat.as_ref().map(ThreadStat::read) else { return self.settle(shared) };
        let class = if self.is_forbidden(shared, now_ns()) { Class::Normal } else { Class::Idle };
        let changes = shared.idle.load(Relaxed) != (class == Class::Idle);
        if changes {
            if set_class(0, class).is_err() {
                return self.settle(shared);
            }
            shared.idle.store(class == Class::Idle, Relaxed);
        }
        if !shared.aside.swap(false, Relaxed) && self.followed == Some(stat.cpu) {
            return changes;
        }
        if Cpus::one(stat.cpu).confine(0).is_err() {
            return self.settle(shared);
        }
        if self.followed.replace(stat.cpu) != Some(stat.cpu) {
            self.stayed = 0;
        }
        true
    }

    /// Back to where the kernel puts it.
    pub fn settle(&mut self, shared: &Shared) -> bool {
        let aside = shared.aside.swap(false, Relaxed);
        self.leader = (0, 0);
        if self.followed.take().is_none() && !aside && !shared.idle.load(Relaxed) {
            return false;
        }
        // Failures leave the thread where it is, which is slower and not wrong.
        let _ = set_class(0, Class::Normal);
        if let Some(allowed) = &self.allowed {
            let _ = allowed.confine(0);
        }
        shared.idle.store(false, Relaxed);
        self.clear_the_way();
        true
    }
}

/// Lets the fault thread go on on other CPUs than its own: whoever is on that one does not let it run. It comes back with the next fault
/// of that thread. False where it cannot be moved.
pub fn stand_aside(shared: &Shared) -> bool {
    let thread = shared.thread.load(Relaxed);
    if thread == 0 || thread == thread_id() {
        return false;
    }
    let stat = procfs::thread_stat(std::process::id().cast_signed(), thread);
    let others = stat.ok().and_then(|stat| Some(shared.cpus.get()?.without(stat.cpu)));
    let moved = others.is_some_and(|others| others.count() > 0 && others.confine(thread).is_ok());
    if moved {
        // Last: should it have followed meanwhile, it does so again.
        shared.aside.store(true, Relaxed);
    }
    moved
}

/// Takes the fault thread out of the idle class from outside, for so long from now.
pub fn rescue(shared: &Shared, how_long: Duration) {
    let until_ns = now_ns() + u64::try_from(how_long.as_nanos()).unwrap_or(u64::MAX / 2);
    shared.idle_forbidden_until_ns.store(until_ns, Relaxed);
    let thread = shared.thread.load(Relaxed);
    if thread != 0 && thread != thread_id() {
        let _ = set_class(thread, Class::Normal);
        shared.idle.store(false, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_threads_that_mostly_wait_for_faults_are_gathered() {
        let paces_us = [200, 59, 89, 91, 89, 59];
        let mut now = false;
        let decided = paces_us.map(|pace_us| {
            now = gathers(pace_us * 1000, now);
            now
        });
        assert_eq!(decided, [false, true, true, false, false, true]);
    }
}

//! The watchdog: sees to it that the fault thread and the agents get CPU time.
//!
//! In the idle class they starve as soon as others want their CPU, first of all the program that they serve: while it computes,
//! what they have begun stays undone. Where one of them is runnable and does nothing, the fault thread goes on on another CPU,
//! and an agent before the program. If that does not help, or no CPU has time to spare, they are taken out of the class for a
//! while.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use crate::placement;
use crate::procfs;
use crate::shared::Shared;
use crate::sys::sched;

/// A thread has starved when it was runnable so long and did nothing.
const RESCUE_AFTER: Duration = Duration::from_millis(3);
/// How long the idle class stays forbidden after a rescue: at first, and at last where one soon follows another. In the
/// normal class, a thread that is woken goes to a CPU of its own where there is one, and its faults cost several times as
/// much.
const RESCUE_FOR: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(400));
/// How often it is looked whether CPUs are idle; a tick is 10 ms, so not much oftener.
const CPUS_EVERY: Duration = Duration::from_millis(100);
/// CPUs that together are idle for less than one part in so many of the time count as all busy.
const SPARE_SHARE: u32 = 20;

/// Work that does not go on.
#[derive(Default)]
struct Stall {
    /// A number that changes when it does, as last seen.
    progress: u64,
    /// Since when it has stood there although a thread could run, or since something was done about it.
    since: Option<Instant>,
    /// Something has been done.
    helped: bool,
}

/// What is to be done about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Remedy {
    Nothing,
    /// What costs the next fault or two, and only them.
    Help,
    /// That did not help.
    Rescue,
}

impl Stall {
    /// What to do, now that it stands at `progress`. A thread that could run is one that `starves`: asleep, it waits for what is
    /// to come.
    fn remedy(&mut self, progress: u64, now: Instant, starves: impl FnOnce() -> bool) -> Remedy {
        if std::mem::replace(&mut self.progress, progress) != progress || !starves() {
            (self.since, self.helped) = (None, false);
            return Remedy::Nothing;
        }
        if now - *self.since.get_or_insert(now) < RESCUE_AFTER {
            return Remedy::Nothing;
        }
        self.since = Some(now);
        if std::mem::replace(&mut self.helped, true) { Remedy::Rescue } else { Remedy::Help }
    }
}

/// What it has seen.
pub struct Watchdog {
    /// Of the fault thread.
    faults: Stall,
    /// Of the agents on an errand.
    errands: Stall,
    /// Agents go before the program until their errand is over.
    hurried: bool,
    /// How long the last rescue held, and until when.
    rescued: Option<(Duration, Instant)>,
    idle_ticks: (Instant, u64),
}

impl Watchdog {
    /// One that has seen nothing.
    pub fn new() -> Self {
        Self {
            faults: Stall::default(),
            errands: Stall::default(),
            hurried: false,
            rescued: None,
            idle_ticks: (Instant::now(), 0),
        }
    }

    /// Looks, and helps or rescues the fault thread and `agents`, threads by process, where they need it.
    pub fn look(&mut self, now: Instant, shared: &Shared, agents: &(impl Iterator<Item = (i32, i32)> + Clone)) {
        self.watch_cpus(now, shared);
        if !shared.idle.load(Relaxed) {
            (self.faults, self.errands, self.hurried) = Default::default();
            return;
        }
        let runs = |(pid, thread)| procfs::thread_stat(pid, thread).is_ok_and(|stat| stat.state == b'R');
        let fault_thread = (std::process::id().cast_signed(), shared.thread.load(Relaxed));
        let faults = self.faults.remedy(shared.progress.load(Relaxed), now, || runs(fault_thread));
        let (begun, over) = (shared.errands_begun.load(Relaxed), shared.errands_over.load(Relaxed));
        let errands = self.errands.remedy(begun, now, || begun != over && agents.clone().any(runs));
        // One that has ended needs no CPU.
        let set_class = |class| agents.clone().for_each(|(_, agent)| drop(sched::set_class(agent, class)));
        let helps = faults == Remedy::Help && placement::stand_aside(shared);
        if shared.crowded.load(Relaxed)
            || faults == Remedy::Rescue
            || errands == Remedy::Rescue
            || (faults == Remedy::Help && !helps)
        {
            placement::rescue(shared, self.rescue_for(now));
            set_class(sched::Class::Normal);
            (self.faults, self.errands, self.hurried) = Default::default();
        } else if errands == Remedy::Help {
            set_class(sched::Class::Normal);
            self.hurried = true;
        } else if self.hurried && begun == over {
            set_class(sched::Class::Idle);
            if !shared.idle.load(Relaxed) {
                // The fault thread has left it meanwhile, and its agents with it.
                set_class(sched::Class::Normal);
            }
            self.hurried = false;
        }
    }

    /// How long a rescue now is to hold: several times as long as the last one, if that ended only a little ago.
    fn rescue_for(&mut self, now: Instant) -> Duration {
        let (first, longest) = RESCUE_FOR;
        let soon = self.rescued.filter(|(_, until)| now < *until + Duration::from_secs(1));
        let long = soon.map_or(first, |(long, _)| (long * 4).min(longest));
        self.rescued = Some((long, now + long));
        long
    }

    /// Whether any CPU had time to spare of late.
    fn watch_cpus(&mut self, now: Instant, shared: &Shared) {
        let (at, before) = self.idle_ticks;
        let passed = now - at;
        if passed < CPUS_EVERY {
            return;
        }
        let Some(ticks) = procfs::idle_ticks() else { return };
        self.idle_ticks = (now, ticks);
        // A tick is 10 ms to user space (USER_HZ).
        let spare = Duration::from_millis(10) * u32::try_from(ticks.saturating_sub(before)).unwrap_or(u32::MAX);
        shared.crowded.store(spare < passed / SPARE_SHARE, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicI32};

    use crate::sys::clock::now_ns;

    /// Looks at a thread in the idle class that makes no progress, the fault thread or an agent on an errand, with and after
    /// help; whether it was taken out of the class.
    fn rescued(is_agent: bool, runs: bool, crowded: bool) -> bool {
        let (thread, over) = (Arc::new(AtomicI32::new(0)), Arc::new(AtomicBool::new(false)));
        let (ends, end) = std::sync::mpsc::channel::<()>();
        let looked_at = {
            let (thread, over) = (Arc::clone(&thread), Arc::clone(&over));
            std::thread::spawn(move || {
                thread.store(sched::thread_id(), Relaxed);
                while runs && !over.load(Relaxed) {
                    std::hint::spin_loop();
                }
                let _ = end.recv();
            })
        };
        let pid = std::process::id().cast_signed();
        let state = |thread| procfs::thread_stat(pid, thread).expect("it is there").state;
        while thread.load(Relaxed) == 0 || (!runs && state(thread.load(Relaxed)) != b'S') {
            std::thread::yield_now();
        }
        let shared = Shared::default();
        shared.idle.store(true, Relaxed);
        shared.crowded.store(crowded, Relaxed);
        let thread = thread.load(Relaxed);
        let agents = if is_agent { vec![(pid, thread)] } else { Vec::new() };
        shared.errands_begun.store(agents.len() as u64, Relaxed);
        shared.thread.store(if is_agent { 0 } else { thread }, Relaxed);
        let mut watchdog = Watchdog { idle_ticks: (Instant::now() + CPUS_EVERY, 0), ..Watchdog::new() };
        let (began, began_ns) = (Instant::now(), now_ns());
        for at in [began, began, began + RESCUE_AFTER, began + 2 * RESCUE_AFTER] {
            watchdog.look(at, &shared, &agents.iter().copied());
            // The fault thread goes on, while an agent does not.
            shared.progress.fetch_add(u64::from(is_agent), Relaxed);
        }
        over.store(true, Relaxed);
        drop(ends);
        looked_at.join().expect("it ends");
        began_ns < shared.idle_forbidden_until_ns.load(Relaxed)
    }

    #[test]
    fn who_is_runnable_and_does_nothing_is_rescued() {
        assert!(rescued(false, true, false));
    }

    /// What it was sent for would not be done before other programs let go of its CPU, and faults might wait for that.
    #[test]
    fn an_agent_that_is_runnable_and_brings_nothing_is_rescued() {
        assert!(rescued(true, true, false));
    }

    #[test]
    fn help_comes_before_rescue_and_anew_after_each_progress() {
        let (mut stall, began) = (Stall::default(), Instant::now());
        let mut look = |progress, patiences: u32| stall.remedy(progress, began + patiences * RESCUE_AFTER, || true);
        assert_eq!(look(1, 0), Remedy::Nothing);
        assert_eq!([look(1, 1), look(1, 2), look(1, 3)], [Remedy::Nothing, Remedy::Help, Remedy::Rescue]);
        assert_eq!([look(2, 4), look(2, 5), look(2, 6)], [Remedy::Nothing, Remedy::Nothing, Remedy::Help]);
        let mut asleep = |patiences: u32| stall.remedy(2, began + patiences * RESCUE_AFTER, || false);
        assert_eq!([asleep(7), asleep(8)], [Remedy::Nothing; 2]);
    }

    /// What it has begun goes on on another CPU; the class stays what it is.
    #[test]
    fn a_fault_thread_that_the_program_does_not_let_run_stands_aside() {
        let (thread, over) = (Arc::new(AtomicI32::new(0)), Arc::new(AtomicBool::new(false)));
        let allowed = sched::Cpus::of(0).expect("there are CPUs");
        let stuck = {
            let (thread, over) = (Arc::clone(&thread), Arc::clone(&over));
            std::thread::spawn(move || {
                let here = sched::current_cpu().expect("a CPU");
                sched::Cpus::one(here).confine(0).expect("its own");
                thread.store(sched::thread_id(), Relaxed);
                while !over.load(Relaxed) {
                    std::hint::spin_loop();
                }
                (here, sched::Cpus::of(0).expect("its own"))
            })
        };
        while thread.load(Relaxed) == 0 {
            std::thread::yield_now();
        }
        let shared = Shared::default();
        let _ = shared.cpus.set(allowed);
        shared.idle.store(true, Relaxed);
        shared.thread.store(thread.load(Relaxed), Relaxed);
        let mut watchdog = Watchdog { idle_ticks: (Instant::now() + CPUS_EVERY, 0), ..Watchdog::new() };
        let began = Instant::now();
        for at in [began, began, began + RESCUE_AFTER] {
            watchdog.look(at, &shared, &std::iter::empty());
        }
        over.store(true, Relaxed);
        let (here, cpus) = stuck.join().expect("it ends");
        if allowed.count() > 1 {
            assert_eq!((cpus.count(), cpus.without(here).count()), (allowed.count() - 1, allowed.count() - 1));
        }
        assert!(shared.aside.load(Relaxed) && shared.idle.load(Relaxed));
        assert_eq!(shared.idle_forbidden_until_ns.load(Relaxed), 0);
    }

    #[test]
    fn who_waits_for_what_is_to_come_is_left_alone() {
        assert!(!rescued(false, false, false));
        assert!(!rescued(true, false, false));
    }

    #[test]
    fn rescues_that_follow_each_other_hold_longer() {
        let (mut watchdog, mut now) = (Watchdog::new(), Instant::now());
        let mut soon = || {
            let long = watchdog.rescue_for(now);
            now += long;
            long.as_millis()
        };
        assert_eq!([(); 5].map(|()| soon()), [10, 40, 160, 400, 400]);
        assert_eq!(watchdog.rescue_for(now + Duration::from_secs(1)).as_millis(), 10);
    }

    #[test]
    fn nobody_stays_in_the_idle_class_where_all_cpus_are_busy() {
        assert!(rescued(false, false, true));
    }
}

//! The watchdog: sees to it that the fault thread and the agents get CPU time.
//!
//! In the idle class they starve as soon as other programs want their CPU. They are taken out of that class where no CPU
//! has time to spare, and where one of them is runnable and does nothing.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use crate::placement;
use crate::procfs;
use crate::shared::Shared;
use crate::sys::sched;

/// The fault thread has starved when it was runnable so long and did nothing.
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
    /// Since when it has stood there although a thread could run.
    since: Option<Instant>,
}

impl Stall {
    /// Whether it has stood at `progress` for too long by now. A thread that could run is one that `starves`: asleep, it
    /// waits for what is to come.
    fn lasts(&mut self, progress: u64, now: Instant, starves: impl FnOnce() -> bool) -> bool {
        if std::mem::replace(&mut self.progress, progress) != progress || !starves() {
            self.since = None;
            return false;
        }
        now - *self.since.get_or_insert(now) >= RESCUE_AFTER
    }
}

/// What it has seen.
pub struct Watchdog {
    /// Of the fault thread.
    faults: Stall,
    /// Of the agents on an errand.
    errands: Stall,
    /// How long the last rescue held, and until when.
    rescued: Option<(Duration, Instant)>,
    idle_ticks: (Instant, u64),
}

impl Watchdog {
    /// One that has seen nothing.
    pub fn new() -> Self {
        Self { faults: Stall::default(), errands: Stall::default(), rescued: None, idle_ticks: (Instant::now(), 0) }
    }

    /// Looks, and rescues the fault thread and `agents`, threads by process, where they need it.
    pub fn look(&mut self, now: Instant, shared: &Shared, agents: impl Iterator<Item = (i32, i32)> + Clone) {
        self.watch_cpus(now, shared);
        if !shared.idle.load(Relaxed) {
            (self.faults, self.errands) = Default::default();
            return;
        }
        let runs = |(pid, thread)| procfs::thread_stat(pid, thread).is_ok_and(|stat| stat.state == b'R');
        let fault_thread = (std::process::id().cast_signed(), shared.thread.load(Relaxed));
        let faults_stall = self.faults.lasts(shared.progress.load(Relaxed), now, || runs(fault_thread));
        let (begun, over) = (shared.errands_begun.load(Relaxed), shared.errands_over.load(Relaxed));
        let errands_stall = self.errands.lasts(begun, now, || begun != over && agents.clone().any(runs));
        if shared.crowded.load(Relaxed) || faults_stall || errands_stall {
            placement::rescue(shared, self.rescue_for(now));
            for (_, agent) in agents {
                // One that has ended needs no CPU.
                let _ = sched::set_class(agent, sched::Class::Normal);
            }
            (self.faults, self.errands) = Default::default();
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

    /// Two looks at a thread in the idle class that makes no progress, the fault thread or an agent on an errand; whether
    /// it was taken out of the class.
    fn rescued(is_agent: bool, runs: bool, crowded: bool) -> bool {
        let (thread, over) = (Arc::new(AtomicI32::new(0)), Arc::new(AtomicBool::new(false)));
        let looked_at = {
            let (thread, over) = (Arc::clone(&thread), Arc::clone(&over));
            std::thread::spawn(move || {
                thread.store(sched::thread_id(), Relaxed);
                while !over.load(Relaxed) {
                    if runs { std::hint::spin_loop() } else { std::thread::sleep(Duration::from_millis(1)) }
                }
            })
        };
        while thread.load(Relaxed) == 0 {
            std::thread::yield_now();
        }
        let shared = Shared::default();
        shared.idle.store(true, Relaxed);
        shared.crowded.store(crowded, Relaxed);
        let thread = thread.load(Relaxed);
        let agents = if is_agent { vec![(std::process::id().cast_signed(), thread)] } else { Vec::new() };
        shared.errands_begun.store(agents.len() as u64, Relaxed);
        shared.thread.store(if is_agent { 0 } else { thread }, Relaxed);
        let mut watchdog = Watchdog { idle_ticks: (Instant::now() + CPUS_EVERY, 0), ..Watchdog::new() };
        let (began, began_ns) = (Instant::now(), now_ns());
        for at in [began, began, began + RESCUE_AFTER] {
            watchdog.look(at, &shared, agents.iter().copied());
            // The fault thread goes on, while an agent does not.
            shared.progress.fetch_add(u64::from(is_agent), Relaxed);
        }
        over.store(true, Relaxed);
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

//! The watchdog: sees to it that the fault thread gets CPU time.
//!
//! In the idle class the fault thread starves as soon as other programs want its CPU. It is taken out of that class where
//! no CPU has time to spare, and where it is runnable and does nothing.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use crate::placement;
use crate::procfs;
use crate::shared::Shared;
use crate::sys::sched;

/// The fault thread has starved when it was runnable so long and did nothing.
const RESCUE_AFTER: Duration = Duration::from_millis(3);
/// How long the idle class stays forbidden after a rescue.
const RESCUE_FOR_NS: u64 = 200_000_000;
/// How often it is looked whether CPUs are idle; a tick is 10 ms, so not much oftener.
const CPUS_EVERY: Duration = Duration::from_millis(100);
/// CPUs that together are idle for less than one part in so many of the time count as all busy.
const SPARE_SHARE: u32 = 20;

/// What it has seen.
pub struct Watchdog {
    /// Progress that did not go on, and since when.
    stalled: Option<(u64, Instant)>,
    idle_ticks: (Instant, u64),
}

impl Watchdog {
    /// One that has seen nothing.
    pub fn new() -> Self {
        Self { stalled: None, idle_ticks: (Instant::now(), 0) }
    }

    /// Looks, and rescues the fault thread and `agents` where they need it.
    pub fn look(&mut self, now: Instant, shared: &Shared, agents: impl Iterator<Item = i32>) {
        self.watch_cpus(now, shared);
        if !shared.idle.load(Relaxed) {
            self.stalled = None;
            return;
        }
        if shared.crowded.load(Relaxed) || self.has_starved(now, shared) {
            placement::rescue(shared, RESCUE_FOR_NS);
            for agent in agents {
                // One that has ended needs no CPU.
                let _ = sched::set_class(agent, sched::Class::Normal);
            }
            self.stalled = None;
        }
    }

    fn has_starved(&mut self, now: Instant, shared: &Shared) -> bool {
        let progress = shared.progress.load(Relaxed);
        let Some((_, since)) = self.stalled.filter(|(before, _)| *before == progress) else {
            self.stalled = Some((progress, now));
            return false;
        };
        // Asleep, it waits for what is to come.
        let thread = shared.thread.load(Relaxed);
        let runnable =
            procfs::thread_stat(std::process::id().cast_signed(), thread).is_ok_and(|stat| stat.state == b'R');
        if !runnable {
            self.stalled = None;
        }
        runnable && now - since >= RESCUE_AFTER
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
    use std::sync::atomic::AtomicBool;

    /// Two looks at a thread in the idle class that makes no progress; whether it was taken out of the class.
    fn rescued(runs: bool, crowded: bool) -> bool {
        let (shared, over) = (Arc::new(Shared::default()), Arc::new(AtomicBool::new(false)));
        let thread = {
            let (shared, over) = (Arc::clone(&shared), Arc::clone(&over));
            std::thread::spawn(move || {
                shared.thread.store(sched::thread_id(), Relaxed);
                while !over.load(Relaxed) {
                    if runs { std::hint::spin_loop() } else { std::thread::sleep(Duration::from_millis(1)) }
                }
            })
        };
        while shared.thread.load(Relaxed) == 0 {
            std::thread::yield_now();
        }
        shared.idle.store(true, Relaxed);
        shared.crowded.store(crowded, Relaxed);
        let mut watchdog = Watchdog { idle_ticks: (Instant::now() + CPUS_EVERY, 0), ..Watchdog::new() };
        let began = Instant::now();
        watchdog.look(began, &shared, std::iter::empty());
        watchdog.look(began + RESCUE_AFTER, &shared, std::iter::empty());
        over.store(true, Relaxed);
        thread.join().expect("it ends");
        !shared.idle.load(Relaxed)
    }

    #[test]
    fn who_is_runnable_and_does_nothing_is_rescued() {
        assert!(rescued(true, false));
    }

    #[test]
    fn who_waits_for_what_is_to_come_is_left_alone() {
        assert!(!rescued(false, false));
    }

    #[test]
    fn nobody_stays_in_the_idle_class_where_all_cpus_are_busy() {
        assert!(rescued(false, true));
    }
}

//! When the watcher looks, and what it does at each look.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use spillway_core::evict::{BATCH_PAGES_MAX, BATCH_SHARE};

use super::Watcher;
use crate::procfs;
use crate::sys::clock::thread_time;
use crate::sys::ptrace::let_go_of_left;

/// The shortest time between two looks: what a program can touch meanwhile, at 4 GiB/s, is 4 MiB.
pub(super) const LOOK_SOONEST: Duration = Duration::from_millis(1);
/// The longest, while nothing changes.
pub(super) const LOOK_LATEST: Duration = Duration::from_millis(20);
/// Looks that find nothing new may take this share of a CPU's time: one part in ten. With many targets a look takes as long
/// as the shortest pause; at the priority that the watcher has, little would be left for the fault thread where CPUs are busy.
const LOOK_SHARE: u32 = 10;
/// Pauses are no longer than this for that reason.
const LOOK_RARELY: Duration = Duration::from_millis(100);
/// How often while the fault thread is in the idle class: each look, on whichever CPU, may drive the faulting thread away
/// from it.
const LOOK_WHILE_IDLE: Duration = Duration::from_millis(8);
/// How long nothing must have changed for that: who maps memory, maps more.
const QUIET_AFTER: Duration = Duration::from_millis(300);
/// How often the process tree is walked,
const TREE_EVERY: Duration = Duration::from_millis(10);
/// and how often when it has just changed.
const YOUNG_TREE_EVERY: Duration = Duration::from_millis(2);
/// How long a tree counts as just changed.
const TREE_YOUNG_FOR: Duration = Duration::from_millis(500);
/// How often mappings are read even when nothing seems to have changed.
const MAPS_EVERY: Duration = Duration::from_secs(1);
/// Pages that memory may grow by, unexplained, before mappings are read again: 1 MiB.
const GROWTH_PAGES: u64 = 256;
/// What a program can touch in a second, in pages: 8 GiB.
const TOUCH_PAGES_PER_S: u64 = 1 << 21;

impl Watcher {
    /// One look at everything; returns how long until the next.
    pub(super) fn look(&mut self) -> Duration {
        let (now, worked) = (Instant::now(), thread_time());
        let young = self.tree_changed_at.is_some_and(|at| now - at < TREE_YOUNG_FOR);
        let tree_every = if young { YOUNG_TREE_EVERY } else { TREE_EVERY };
        if self.tree_at.is_none_or(|at| now - at >= tree_every) {
            self.tree_at = Some(now);
            self.walk_tree();
            self.bury_orphans();
            self.end_trees();
        }
        let pids: Vec<i32> = self.processes.keys().copied().collect();
        let (mut unmanaged_pages, mut changed) = (0, false);
        // Of two batches: one leaves staging while the other is moved there.
        let swing_pages = 2 * (self.shared.numbers.budget_pages.load(Relaxed) / BATCH_SHARE).min(BATCH_PAGES_MAX);
        for pid in pids {
            let size = match procfs::size(pid) {
                Ok(size) => size,
                Err(error) if procfs::is_for_want_of(&error) => continue,
                Err(_) => {
                    self.forget_if_ended(pid);
                    continue;
                }
            };
            let Some(process) = self.processes.get_mut(&pid) else { continue };
            process.tend_agent(pid);
            if process.handed.is_some() {
                continue;
            }
            if process.kept_only {
                self.promote(pid, size);
                continue;
            }
            if process.target.is_none() {
                unmanaged_pages += self.weight(pid, size);
                continue;
            }
            let grown = size.anonymous_pages > process.seen.anonymous_pages + GROWTH_PAGES;
            let resized = size.total_pages != process.seen.total_pages;
            let due = process.read_at.is_none_or(|at| now - at >= MAPS_EVERY);
            let is_past = |until: Option<Instant>| until.is_none_or(|until| now >= until);
            // It shrinks by eviction, and growth is measured from there; but batches that leave, and faults that take their
            // place, say nothing of it.
            process.seen.anonymous_pages = process.seen.anonymous_pages.min(size.anonymous_pages + swing_pages);
            if (grown && is_past(self.growth_rests_until)) || ((due || resized) && is_past(self.maps_rest_until)) {
                changed |= self.read_mappings(pid) || resized;
            }
        }
        self.hear_of_the_untold();
        self.keep_orphans();
        self.tend_departures();
        self.tend_commons();
        let_go_of_left();
        changed |= self.adopt_the_grown(unmanaged_pages);
        self.settle_removals();
        self.guard(now);
        if changed {
            self.changed_at = Some(now);
        }
        self.next_look(unmanaged_pages, changed, thread_time() - worked)
    }

    /// Soon while something changes, or while what is left of the budget could be touched soon; `looked_for` is what this look took
    /// of a CPU.
    fn next_look(&self, unmanaged_pages: u64, changed: bool, looked_for: Duration) -> Duration {
        if changed || self.removals.are_waiting() || !self.leaving.is_empty() {
            return LOOK_SOONEST;
        }
        let idle = self.shared.idle.load(Relaxed);
        let quiet = self.changed_at.is_none_or(|at| at.elapsed() >= QUIET_AFTER);
        let room = self.adoption_threshold().saturating_sub(unmanaged_pages);
        let budget_room = self
            .shared
            .numbers
            .budget_pages
            .load(Relaxed)
            .saturating_sub(self.shared.numbers.local_pages.load(Relaxed));
        let managed = self.processes.values().any(|process| process.target.is_some());
        let pages = if managed { budget_room.max(GROWTH_PAGES) } else { room };
        let reach = Duration::from_micros(pages.saturating_mul(1_000_000) / TOUCH_PAGES_PER_S / 2);
        let young = self.tree_changed_at.is_some_and(|at| at.elapsed() < TREE_YOUNG_FOR);
        let soon = match (idle && managed, quiet) {
            (true, true) => LOOK_WHILE_IDLE,
            (true, false) => LOOK_SOONEST,
            (false, _) => reach.clamp(LOOK_SOONEST, if young { YOUNG_TREE_EVERY } else { LOOK_LATEST }),
        };
        soon.max((looked_for * (LOOK_SHARE - 1)).min(LOOK_RARELY))
    }
}

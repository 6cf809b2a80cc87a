//! What a daemon knows beyond its pager, and how its targets are listed.

use crate::{processes, stops};
use serde::{Deserialize, Serialize};
use spillway_core::PAGE_BYTES_U64;
use spillway_pager::{FaultTimes, TreeSnapshot};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A `spillway run` whose program is a target.
struct Run {
    front: i32,
    target: i32,
    /// It stopped itself because its program had stopped.
    pausing: bool,
}

/// See the module's documentation.
pub(crate) struct Host {
    /// Where its pages are.
    pub(crate) pool: String,
    runs: Mutex<Vec<Run>>,
}

/// One target in a listing. Sizes in bytes, times in microseconds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct TargetListing {
    /// The process that it is known by.
    pub(crate) pid: i32,
    /// Its processes under management.
    pub(crate) pids: Vec<i32>,
    /// How many they are.
    pub(crate) processes: u64,
    /// The `spillway run` process, or 0.
    pub(crate) front_pid: i32,
    /// Whether its processes have ended, or were let go.
    pub(crate) ended: bool,
    /// Whether it is being let go.
    pub(crate) leaving: bool,
    /// Memory that it holds, wherever it is.
    pub(crate) touched_bytes: u64,
    /// Of that, what is in it.
    pub(crate) local_bytes: u64,
    /// And what is not.
    pub(crate) stored_bytes: u64,
    /// Faults served.
    pub(crate) faults: u64,
    /// Over the last second or so.
    pub(crate) faults_per_s: f64,
    /// From reading a fault to the return of the wake-up.
    pub(crate) fault_us: FaultTimes,
    /// Pages fetched from the pool.
    pub(crate) fetched_pages: u64,
    /// Pages captured from it.
    pub(crate) evicted_pages: u64,
    /// What is not taken from it for others.
    pub(crate) min_bytes: u64,
    /// What it never has more of; none where there is no limit but the daemon's.
    pub(crate) max_bytes: Option<u64>,
    /// What its pages above the minimum are worth beside those of others.
    pub(crate) weight: u32,
    /// Whether the kernel is asked to keep equal pages of it once.
    #[serde(default)]
    pub(crate) share_pages: bool,
    /// Memory of it that the kernel keeps once for all who have it.
    #[serde(default)]
    pub(crate) merged_bytes: u64,
    /// What that saves, less what the kernel needs to remember for it.
    #[serde(default)]
    pub(crate) merged_profit_bytes: i64,
}

impl Host {
    /// That of a daemon which has told nobody anything yet.
    pub(crate) fn new(pool: String) -> Self {
        Self { pool, runs: Mutex::new(Vec::new()) }
    }

    /// This process is the program of this `spillway run`.
    pub(crate) fn add_run(&self, front: i32, target: i32) {
        self.runs().push(Run { front, target, pausing: false });
    }

    /// The `spillway run` of this program stops itself, or goes on.
    pub(crate) fn pause(&self, target: i32, now: bool) {
        self.runs().iter_mut().filter(|run| run.target == target).for_each(|run| run.pausing = now);
    }

    /// Looks after stopped programs and their fronts; see [`stops`].
    pub(crate) fn mend_stops(&self) {
        let mut runs = self.runs();
        // Numbers of processes that have ended may be others' by now.
        runs.retain(|run| processes::parent(run.target) == Some(run.front));
        runs.iter().for_each(|run| stops::mend(run.front, run.target, run.pausing));
    }

    /// The program of this `spillway run`, or the process itself.
    pub(crate) fn program_of(&self, pid: i32) -> i32 {
        self.runs().iter().find(|run| run.front == pid).map_or(pid, |run| run.target)
    }

    /// How a target is listed.
    pub(crate) fn listing(&self, tree: TreeSnapshot) -> TargetListing {
        let front = self.runs().iter().find(|run| run.target == tree.root).map_or(0, |run| run.front);
        TargetListing {
            pid: tree.root,
            processes: tree.pids.len() as u64,
            pids: tree.pids,
            front_pid: front,
            ended: tree.ended,
            leaving: tree.leaving,
            touched_bytes: tree.touched_bytes,
            local_bytes: tree.local_bytes,
            stored_bytes: tree.stored_bytes,
            faults: tree.faults,
            faults_per_s: tree.faults_per_s,
            fault_us: tree.fault_us,
            fetched_pages: tree.fetched_pages,
            evicted_pages: tree.evicted_pages,
            min_bytes: tree.share.min_pages * PAGE_BYTES_U64,
            max_bytes: tree.share.max_pages.checked_mul(PAGE_BYTES_U64),
            weight: tree.share.weight,
            share_pages: tree.share_pages,
            merged_bytes: tree.merged_bytes,
            merged_profit_bytes: tree.merged_profit_bytes,
        }
    }

    fn runs(&self) -> MutexGuard<'_, Vec<Run>> {
        self.runs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

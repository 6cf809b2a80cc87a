//! What the fault thread tells the others: one writer, any number of readers, no lock.

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, OnceLock};

use spillway_core::PAGE_BYTES_U64;
use spillway_core::pager::{Counters, Pager};
use spillway_store::{Protection, Store};

use crate::sys::sched::Cpus;
use crate::{FaultTimes, Snapshot};

/// Sub-buckets of an octave: 1/16 octave is 4% resolution.
const STEPS: usize = 16;
const BUCKETS: usize = 40 * STEPS;

/// How often which service time occurred.
pub struct Histogram {
    buckets: [AtomicU64; BUCKETS],
    sum_ns: AtomicU64,
    largest_ns: AtomicU64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self {
            buckets: [const { AtomicU64::new(0) }; BUCKETS],
            sum_ns: AtomicU64::new(0),
            largest_ns: AtomicU64::new(0),
        }
    }
}

impl Histogram {
    /// Adds one. Only the fault thread calls this.
    pub fn record(&self, ns: u64) {
        let bucket = &self.buckets[bucket(ns)];
        bucket.store(bucket.load(Relaxed) + 1, Relaxed);
        self.sum_ns.store(self.sum_ns.load(Relaxed) + ns, Relaxed);
        if ns > self.largest_ns.load(Relaxed) {
            self.largest_ns.store(ns, Relaxed);
        }
    }

    /// How many there were.
    pub fn count(&self) -> u64 {
        self.buckets.iter().map(|bucket| bucket.load(Relaxed)).sum()
    }

    /// The mean and the percentiles so far.
    pub fn times(&self) -> FaultTimes {
        let counts: Vec<u64> = self.buckets.iter().map(|bucket| bucket.load(Relaxed)).collect();
        let total: u64 = counts.iter().sum();
        let largest_us = self.largest_ns.load(Relaxed) as f64 / 1e3;
        let percentile = |share: f64| {
            let mut seen = 0;
            let reached = counts.iter().position(|count| {
                seen += count;
                total > 0 && seen as f64 >= share * total as f64
            });
            reached.map_or(0.0, |at| middle_us(at).min(largest_us))
        };
        let mean = self.sum_ns.load(Relaxed) as f64 / 1e3 / total.max(1) as f64;
        FaultTimes { mean, p50: percentile(0.5), p99: percentile(0.99), p999: percentile(0.999), max: largest_us }
    }
}

fn bucket(ns: u64) -> usize {
    let ns = ns.max(STEPS as u64);
    let octave = ns.ilog2();
    let step = (ns >> (octave - 4)) & 15;
    let at = u64::from(octave - 4) * STEPS as u64 + step;
    usize::try_from(at).unwrap_or(BUCKETS).min(BUCKETS - 1)
}

fn middle_us(bucket: usize) -> f64 {
    let (octave, step) = (bucket / STEPS, bucket % STEPS);
    let octave = i32::try_from(octave).unwrap_or(0);
    (16.0 + step as f64 + 0.5) * f64::powi(2.0, octave) / 1e3
}

macro_rules! published {
    ($($name:ident),+ $(,)?) => {
        /// Numbers that the fault thread publishes.
        #[derive(Default)]
        pub struct Published { $(#[allow(missing_docs)] pub $name: AtomicU64),+ }
    };
}

published!(
    faults,
    zero_fills,
    refaults,
    fetched_pages,
    evicted_pages,
    written_pages,
    clean_drops,
    zero_drops,
    stuck_pages,
    lost_pages,
    prefetched_pages,
    sampled_pages,
    sampled_used_pages,
    stretches,
    reductions,
    local_peak_pages,
    burst_peak_pages,
    touched_pages,
    local_pages,
    mapped_pages,
    budget_pages,
    remote_pages,
    kept_bytes,
    stored_compressed_bytes,
    store_bytes,
    table_bytes,
    processes,
    pool_full,
);

/// Everything that is shared with the fault thread.
#[derive(Default)]
pub struct Shared {
    /// Its numbers.
    pub numbers: Published,
    /// Its service times.
    pub histogram: Histogram,
    /// Whether the pool survives the loss of servers, and how it is ([`Protection::words`]).
    protected: AtomicBool,
    protection: [AtomicU64; 12],
    /// Grows whenever it has done something: a watchdog's sign of life.
    pub progress: AtomicU64,
    /// Errands that it sent agents on.
    pub errands_begun: AtomicU64,
    /// As many once all of them are over: a watchdog's sign of the agents' lives.
    pub errands_over: AtomicU64,
    /// Its thread id, once it runs.
    pub thread: AtomicI32,
    /// Whether it runs in the idle class now.
    pub idle: AtomicBool,
    /// Whether it was sent to another CPU than the one that it follows.
    pub aside: AtomicBool,
    /// Whether every CPU of the machine is busy.
    pub crowded: AtomicBool,
    /// The CPUs that the pager may use.
    pub cpus: OnceLock<Cpus>,
    /// Whether the replacement policy sees access bits.
    pub access_bits: AtomicBool,
    /// Until when (monotonic nanoseconds) it must not enter the idle class.
    pub idle_forbidden_until_ns: AtomicU64,
    /// The last process that could not be adopted, and why. Only the watcher writes it, and no fault waits for it.
    pub refused: Mutex<Option<(i32, String)>>,
    /// Why the kernel would not merge. Likewise.
    pub share_refused: Mutex<Option<String>>,
    /// Forked children that are served and have no agent.
    pub orphans: AtomicU64,
    /// Whether something that another pager must know has no room.
    pub unheritable: AtomicBool,
    /// Files of memory that targets share, and those of which pages may leave.
    pub shared_files: AtomicU64,
    /// See [`Self::shared_files`].
    pub shared_files_ready: AtomicU64,
    /// The longest stop of a target's thread for adoption.
    pub pause_ns: AtomicU64,
}

impl Shared {
    /// Publishes the core's numbers. Only the fault thread calls this.
    pub fn publish(&self, core: &Pager, store: &dyn Store, processes: u64) {
        let (store, protection) = (store.status(), store.protection());
        self.protected.store(protection.is_some(), Relaxed);
        for (to, value) in self.protection.iter().zip(protection.unwrap_or_default().words()) {
            to.store(value, Relaxed);
        }
        self.unheritable.store(core.lacks_room(), Relaxed);
        let n = &self.numbers;
        let Counters {
            faults,
            zero_fills,
            refaults,
            fetched_pages,
            evicted_pages,
            written_pages,
            clean_drops,
            zero_drops,
            stuck_pages,
            lost_pages,
            prefetched_pages,
            sampled_pages,
            sampled_used_pages,
            stretches,
            reductions,
            local_peak_pages,
            burst_peak_pages,
        } = core.counters();
        for (to, value) in [
            (&n.faults, faults),
            (&n.zero_fills, zero_fills),
            (&n.refaults, refaults),
            (&n.fetched_pages, fetched_pages),
            (&n.evicted_pages, evicted_pages),
            (&n.written_pages, written_pages),
            (&n.clean_drops, clean_drops),
            (&n.zero_drops, zero_drops),
            (&n.stuck_pages, stuck_pages),
            (&n.lost_pages, lost_pages),
            (&n.prefetched_pages, prefetched_pages),
            (&n.sampled_pages, sampled_pages),
            (&n.sampled_used_pages, sampled_used_pages),
            (&n.stretches, stretches),
            (&n.reductions, reductions),
            (&n.local_peak_pages, local_peak_pages),
            (&n.burst_peak_pages, burst_peak_pages),
            (&n.touched_pages, core.touched_pages()),
            (&n.local_pages, core.local_pages()),
            (&n.mapped_pages, core.mapped_pages()),
            (&n.budget_pages, core.budget_pages()),
            (&n.remote_pages, core.remote_pages()),
            (&n.kept_bytes, store.stored_bytes),
            (&n.stored_compressed_bytes, store.stored_compressed_bytes),
            (&n.store_bytes, store.memory_bytes),
            (&n.table_bytes, core.table_bytes()),
            (&n.processes, processes),
            (&n.pool_full, core.is_store_full().into()),
        ] {
            to.store(value, Relaxed);
        }
    }

    fn protection(&self) -> Option<Protection> {
        let words = std::array::from_fn(|at| self.protection[at].load(Relaxed));
        self.protected.load(Relaxed).then(|| Protection::from_words(words))
    }

    /// A snapshot for users.
    pub fn snapshot(&self) -> Snapshot {
        let n = &self.numbers;
        let get = |number: &AtomicU64| number.load(Relaxed);
        let bytes = |number: &AtomicU64| number.load(Relaxed).saturating_mul(PAGE_BYTES_U64);
        Snapshot {
            processes: get(&n.processes),
            refused: self.refused.lock().ok().and_then(|refused| Some(refused.as_ref()?.1.clone())),
            unheritable: self.unheritable.load(Relaxed),
            shared_files: get(&self.shared_files),
            shared_files_ready: get(&self.shared_files_ready),
            share_refused: self.share_refused.lock().ok().and_then(|refused| refused.clone()),
            touched_bytes: bytes(&n.touched_pages),
            local_bytes: bytes(&n.local_pages),
            local_peak_bytes: bytes(&n.local_peak_pages),
            burst_peak_bytes: bytes(&n.burst_peak_pages),
            budget_bytes: bytes(&n.budget_pages),
            stored_bytes: bytes(&n.remote_pages),
            kept_bytes: get(&n.kept_bytes),
            stored_compressed_bytes: get(&n.stored_compressed_bytes),
            faults: get(&n.faults),
            fault_us: self.histogram.times(),
            zero_fills: get(&n.zero_fills),
            refaults: get(&n.refaults),
            fetched_pages: get(&n.fetched_pages),
            prefetched_pages: get(&n.prefetched_pages),
            prefetch_accuracy: accuracy(get(&n.sampled_used_pages), get(&n.sampled_pages)),
            stretches: get(&n.stretches),
            reductions: get(&n.reductions),
            evicted_pages: get(&n.evicted_pages),
            written_pages: get(&n.written_pages),
            clean_drops: get(&n.clean_drops),
            zero_drops: get(&n.zero_drops),
            stuck_pages: get(&n.stuck_pages),
            lost_pages: get(&n.lost_pages),
            protection: self.protection(),
            pool_full: get(&n.pool_full) != 0,
            table_bytes: get(&n.table_bytes),
            access_bits: self.access_bits.load(Relaxed),
            adopt_pause_us: get(&self.pause_ns) as f64 / 1e3,
            ..Snapshot::default()
        }
    }
}

/// A share, where enough is known to tell one.
fn accuracy(used: u64, of: u64) -> Option<f64> {
    const FEWEST: u64 = 64;
    (of >= FEWEST).then(|| used as f64 / of as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_right_within_a_step() {
        let histogram = Histogram::default();
        for i in 1..=1000 {
            histogram.record(i * 1000);
        }
        let times = histogram.times();
        for (got, want) in
            [(times.mean, 500.5), (times.p50, 500.0), (times.p99, 990.0), (times.p999, 999.0), (times.max, 1000.0)]
        {
            assert!((got / want - 1.0).abs() < 0.05, "{got} against {want}");
        }
        assert!(Histogram::default().times().p99 < f64::MIN_POSITIVE);
    }

    #[test]
    fn any_time_has_a_bucket() {
        for ns in [0, 1, 15, 16, 1 << 20, u64::MAX] {
            assert!(bucket(ns) < BUCKETS);
        }
    }
}

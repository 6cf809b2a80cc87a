//! What the server knows of its own speed: how busy its threads are, and how long requests take.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Buckets of the histogram: four for each doubling, from 1 ns to beyond an hour.
const BUCKETS: usize = 4 * 42;
/// Requests at which all buckets are halved, so that the old ones fade.
const FADE_AT: u64 = 1 << 20;
/// How long a stretch of time is over which load is measured.
const STRETCH: Duration = Duration::from_millis(200);

/// One thread's numbers. Only that thread writes.
pub(crate) struct Meter {
    load: AtomicU8,
    buckets: [AtomicU64; BUCKETS],
    count: AtomicU64,
}

impl Meter {
    pub(crate) fn new() -> Self {
        Self { load: AtomicU8::new(0), buckets: std::array::from_fn(|_| AtomicU64::new(0)), count: AtomicU64::new(0) }
    }

    /// So many requests took this long.
    pub(crate) fn record(&self, took: Duration, requests: u64) {
        if requests == 0 {
            return;
        }
        self.buckets[bucket_of(took)].fetch_add(requests, Relaxed);
        if self.count.fetch_add(requests, Relaxed) >= FADE_AT {
            self.fade();
        }
    }

    fn fade(&self) {
        let mut count = 0;
        for bucket in &self.buckets {
            let left = bucket.load(Relaxed) / 2;
            bucket.store(left, Relaxed);
            count += left;
        }
        self.count.store(count, Relaxed);
    }
}

/// Busy and idle time of one thread, by stretches.
pub(crate) struct Stopwatch {
    stretch_began: Instant,
    idle: Duration,
}

impl Stopwatch {
    pub(crate) fn new(now: Instant) -> Self {
        Self { stretch_began: now, idle: Duration::ZERO }
    }

    /// The thread waited from `since` to `now`.
    pub(crate) fn waited(&mut self, since: Instant, now: Instant, meter: &Meter) {
        self.idle += now.saturating_duration_since(since);
        let stretch = now.saturating_duration_since(self.stretch_began);
        if stretch >= STRETCH {
            let busy = stretch.saturating_sub(self.idle);
            let share = busy.as_nanos() * 255 / stretch.as_nanos().max(1);
            meter.load.store(u8::try_from(share).unwrap_or(u8::MAX), Relaxed);
            *self = Self::new(now);
        }
    }
}

/// The mean load of all threads.
pub(crate) fn load(meters: &[Meter]) -> u8 {
    let sum: usize = meters.iter().map(|meter| usize::from(meter.load.load(Relaxed))).sum();
    u8::try_from(sum / meters.len().max(1)).unwrap_or(u8::MAX)
}

/// The time below which `share` (0 to 1) of the last requests stayed, in nanoseconds; zero when there were none.
pub(crate) fn quantile_ns(meters: &[Meter], share: f64) -> u64 {
    let at = |bucket: usize| meters.iter().map(|meter| meter.buckets[bucket].load(Relaxed)).sum::<u64>();
    let total: u64 = (0..BUCKETS).map(at).sum();
    let mut left = share * total as f64;
    for bucket in 0..BUCKETS {
        let count = at(bucket);
        left -= count as f64;
        if count > 0 && left <= 0.0 {
            return upper_ns(bucket);
        }
    }
    0
}

fn bucket_of(took: Duration) -> usize {
    let ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX).max(4);
    let octave = ns.ilog2();
    let quarter = (ns >> (octave - 2)) & 3;
    let bucket = usize::try_from(u64::from(octave) * 4 + quarter).unwrap_or(BUCKETS);
    bucket.min(BUCKETS - 1)
}

/// The end of a bucket.
fn upper_ns(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    (5 + bucket % 4) << (bucket / 4).saturating_sub(2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_within_a_quarter() {
        let meter = Meter::new();
        assert_eq!(quantile_ns(std::slice::from_ref(&meter), 0.5), 0);
        meter.record(Duration::from_micros(10), 98);
        meter.record(Duration::from_millis(3), 2);
        let meters = [meter];
        for (share, ns) in [(0.5, 10_000), (0.98, 10_000), (0.99, 3_000_000)] {
            let got = quantile_ns(&meters, share);
            assert!((ns..=ns * 5 / 4).contains(&got), "{share}: {got}");
        }
        for ns in [0, 1, 7, u64::MAX] {
            assert!(bucket_of(Duration::from_nanos(ns)) < BUCKETS);
        }
    }

    #[test]
    fn load_is_the_share_of_time_not_waited() {
        let (meter, began) = (Meter::new(), Instant::now());
        let mut watch = Stopwatch::new(began);
        watch.waited(began + STRETCH / 4, began + STRETCH, &meter);
        assert!((62..=65).contains(&load(&[meter])));
    }
}

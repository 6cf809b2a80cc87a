//! How long answers take, and how much of the link upkeep may have.

use std::time::{Duration, Instant};

/// Answers after which half of them count no more.
const SAMPLES: u32 = 2048;
/// Fewer say nothing.
const SAMPLES_MIN: u32 = 64;
/// What is waited for before anything is known.
const UNKNOWN: Duration = Duration::from_millis(5);
/// While pages are asked for there is an alarm as often as this, and each takes tens of microseconds from whoever waits for
/// a page then (docs/decisions/0020). A member that is merely busy is not helped by more work either.
const SHORTEST: Duration = Duration::from_millis(2);
const LONGEST: Duration = Duration::from_millis(100);

/// Times from a question to its answer; buckets are a quarter of a power of two, from a microsecond on.
pub(super) struct Latency {
    buckets: [u32; 100],
    count: u32,
    p99: Duration,
}

impl Default for Latency {
    fn default() -> Self {
        Self { buckets: [0; 100], count: 0, p99: UNKNOWN }
    }
}

impl Latency {
    pub(super) fn record(&mut self, time: Duration) {
        let us = u32::try_from(time.as_micros()).unwrap_or(u32::MAX).max(4);
        let power = us.ilog2();
        let bucket = (power - 2) * 4 + (us >> (power - 2) & 3);
        let last = self.buckets.len() - 1;
        self.buckets[(bucket as usize).min(last)] += 1;
        self.count += 1;
        if self.count.is_multiple_of(SAMPLES_MIN) {
            self.p99 = self.find().clamp(SHORTEST, LONGEST);
        }
        if self.count >= SAMPLES {
            self.buckets.iter_mut().for_each(|count| *count /= 2);
            self.count = self.buckets.iter().sum();
        }
    }

    fn find(&self) -> Duration {
        let mut above = self.count / 100;
        for (bucket, count) in (0_u32..100).zip(&self.buckets).rev() {
            if *count > above {
                let (power, quarter) = (bucket / 4, bucket % 4);
                // The bucket's end, so that what is usual is not overdue.
                return Duration::from_micros(u64::from(4 + quarter + 1) << power);
            }
            above -= count;
        }
        SHORTEST
    }

    /// What all but one in a hundred answers take at most.
    pub(super) fn p99(&self) -> Duration {
        self.p99
    }
}

/// A share of the link, in pages.
pub(crate) struct Budget {
    pages: f64,
    per_second: f64,
    filled: Instant,
}

/// What may be saved up.
const SAVED_PAGES_MAX: f64 = 256.0;

impl Budget {
    pub(crate) fn new(per_second: f64, now: Instant) -> Self {
        Self { pages: 0.0, per_second, filled: now }
    }

    pub(crate) fn earn(&mut self, pages: f64) {
        self.pages = (self.pages + pages).min(SAVED_PAGES_MAX);
    }

    /// Whether something may begin, without what has come since that was last asked.
    pub(crate) fn has_some(&self) -> bool {
        self.pages > 0.0
    }

    /// Whether something may begin; it may cost more than there is, which later ones wait for.
    pub(crate) fn has(&mut self, now: Instant) -> bool {
        let seconds = now.saturating_duration_since(self.filled).as_secs_f64();
        self.filled = now;
        self.earn(seconds * self.per_second);
        self.has_some()
    }

    /// Whether there is more than half of what may be saved up.
    pub(crate) fn has_much(&mut self, now: Instant) -> bool {
        self.has(now) && self.pages > SAVED_PAGES_MAX / 2.0
    }

    pub(crate) fn spend(&mut self, pages: f64) {
        self.pages -= pages;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tail_is_found_and_forgotten() {
        let mut latency = Latency::default();
        assert_eq!(latency.p99(), UNKNOWN);
        for n in 0..1920 {
            latency.record(Duration::from_micros(if n % 50 == 0 { 30_000 } else { 4000 }));
        }
        assert!((30_000..40_000).contains(&latency.p99().as_micros()), "{:?}", latency.p99());
        for _ in 0..16_384 {
            latency.record(Duration::from_micros(4000));
        }
        assert!((4000..5200).contains(&latency.p99().as_micros()), "{:?}", latency.p99());
    }

    #[test]
    fn a_budget_bounds_what_is_spent() {
        let start = Instant::now();
        let mut budget = Budget::new(100.0, start);
        let mut spent = 0.0;
        for ms in 0..10_000 {
            if budget.has(start + Duration::from_millis(ms)) {
                budget.spend(5.0);
                spent += 5.0;
            }
        }
        assert!((990.0..1010.0).contains(&spent), "{spent}");
        assert!(!budget.has_much(start + Duration::from_secs(10)));
        assert!(budget.has_much(start + Duration::from_secs(12)));
    }
}

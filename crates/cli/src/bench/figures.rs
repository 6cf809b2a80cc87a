//! What the workload measures, as it tells it to `bench`.

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

/// The longest access that the histogram tells apart from longer ones: an hour.
const LONGEST_NS: u64 = 3_600_000_000_000;

/// One run of the workload. Times in microseconds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Figures {
    /// Pages that it touched.
    pub(super) pages: u64,
    /// How often it touched one while it was timed.
    pub(super) accesses: u64,
    /// How many of these wrote.
    pub(super) writes: u64,
    /// To touch and fill a page for the first time.
    pub(super) first_touch_us: f64,
    /// An access.
    pub(super) mean_us: f64,
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
    pub(super) p999_us: f64,
    pub(super) max_us: f64,
    /// All threads together; it includes verifying what was read.
    pub(super) accesses_per_s: f64,
    /// A page, when all are read one after the other.
    pub(super) scan_us: f64,
    /// Words and pages that were not what they had to be.
    pub(super) wrong: u64,
    /// The most that was local at one time, by the pager's count; `bench` adds it where there is a pager.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) local_peak_bytes: Option<u64>,
    /// How many accesses took about so many nanoseconds, to one per cent.
    pub(super) histogram_ns: Vec<(u64, u64)>,
}

/// One run of a program of the user's, which ended well.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Timed {
    /// From its start to its end, under Spillway with the pager's own.
    pub(super) seconds: f64,
    /// A hash of what it wrote to standard output; none of nothing.
    #[serde(skip)]
    pub(super) said: Option<u64>,
    /// As in [`Figures`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) local_peak_bytes: Option<u64>,
}

/// An empty histogram of nanoseconds, to one per cent.
pub(super) fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, LONGEST_NS, 2).expect("bounds that make sense")
}

/// How long an access of these takes at most in that share of the cases, in microseconds.
pub(super) fn percentiles<const N: usize>(of: &Histogram<u64>, shares: [f64; N]) -> [f64; N] {
    shares.map(|share| of.value_at_quantile(share) as f64 / 1e3)
}

/// The histogram as pairs.
pub(super) fn table(of: &Histogram<u64>) -> Vec<(u64, u64)> {
    of.iter_recorded().map(|at| (at.value_iterated_to(), at.count_at_value())).collect()
}

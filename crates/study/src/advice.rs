//! From a miss-ratio curve to what a smaller memory costs.

use crate::curve::Curve;
use crate::workingset::WorkingSet;

/// A run time that is longer by so much is as good as none.
pub const ENOUGH_LOSS: f64 = 0.03;
/// A program that takes twice its time spends more of it on faults than on its work: it thrashes.
pub const THRASHING_LOSS: f64 = 1.0;
/// Sizes that are looked at, as parts of the program's memory.
const POINTS: u64 = 50;

/// What a memory of some size costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// Local memory.
    pub pages: u64,
    /// Misses by references.
    pub miss_ratio: f64,
    /// Misses, first touches apart.
    pub misses: f64,
    /// By how much of itself the run time grows. Below [`Advice::known_from_pages`]: at least that.
    pub loss: f64,
}

/// What a program was seen to do.
#[derive(Clone, Copy, Debug)]
pub struct Observed {
    /// Its memory.
    pub pages: u64,
    /// For how long it ran by itself.
    pub ran_ns: u64,
    /// What a miss costs it.
    pub miss_ns: u64,
    /// Below this size the curve counts too few misses: pages that are touched in one window.
    pub known_from_pages: u64,
}

/// How much local memory a program needs.
#[derive(Clone, Debug)]
pub struct Advice {
    /// Sizes from small to all.
    pub points: Vec<Point>,
    /// The smallest memory with which hardly anything is lost.
    pub enough: Point,
    /// The largest with which the program thrashes; none if it never does.
    pub thrashing: Option<Point>,
    /// See [`Observed::known_from_pages`].
    pub known_from_pages: u64,
}

/// What `curve` says of a program, and below what it knows, `within` a window.
pub fn advise(curve: &Curve, within: Option<&WorkingSet>, observed: Observed) -> Advice {
    let Observed { pages: all, ran_ns, miss_ns, known_from_pages } = observed;
    let all = all.max(1);
    let point = |pages: u64| {
        let rate = within.and_then(|within| within.misses_per_s(pages as f64 / all as f64)).unwrap_or(0.0);
        let misses = curve.misses(pages).max(rate * all as f64 * ran_ns as f64 / 1e9);
        let loss = misses * miss_ns as f64 / ran_ns.max(1) as f64;
        Point { pages, miss_ratio: curve.miss_ratio(pages), misses, loss }
    };
    let mut points: Vec<Point> = (1..POINTS).map(|i| point(all.saturating_mul(i).div_ceil(POINTS))).collect();
    // With all of its memory a program loses nothing, whatever a sample makes of its size.
    points.push(Point { pages: all, miss_ratio: 0.0, misses: 0.0, loss: 0.0 });
    let least = points[0];
    let enough = |point: &&Point| point.loss <= ENOUGH_LOSS && point.pages >= known_from_pages.min(all);
    let enough = points.iter().find(enough).copied().unwrap_or(least);
    let thrashing = points.iter().rev().find(|point| point.loss >= THRASHING_LOSS).copied();
    Advice { points, enough, thrashing, known_from_pages }
}

/// How many distinct pages windows have: at the 90th percentile, so that single ones do not count.
#[derive(Default)]
pub struct WindowSizes {
    sizes: Vec<u64>,
}

impl WindowSizes {
    /// A window begins.
    pub fn begin(&mut self) {
        self.sizes.push(0);
    }

    /// A page is touched, for the first time in its window.
    pub fn touch(&mut self) {
        if let Some(size) = self.sizes.last_mut() {
            *size += 1;
        }
    }

    /// The 90th percentile.
    pub fn pages(mut self) -> u64 {
        self.sizes.sort_unstable();
        self.sizes.get(self.sizes.len() * 9 / 10).copied().unwrap_or(0)
    }
}

//! Working sets: how many pages a program touches within a time, and from that how often it misses in a small memory.
//!
//! When a page leaves the program at some moment, whatever the program does, the time until it is touched next tells how
//! many pages are touched within any time: those of which it is shorter. The slope of that curve is the rate of misses of a
//! memory that holds as many (Denning and Schwartz, "Properties of the working-set model", CACM 1972); for LRU it is a
//! close estimate. This sees what happens within a window, of which stack distances of first touches know nothing.

use std::collections::{BTreeMap, BTreeSet};

/// Steps of an octave of time.
const STEPS: u32 = 4;

/// What was seen in windows. Times are the program's own: nanoseconds that it ran.
#[derive(Default)]
pub struct WorkingSet {
    /// Pages outside, and since when.
    outside: BTreeMap<u64, u64>,
    /// All pages.
    known: BTreeSet<u64>,
    /// When the window began.
    window_ns: u64,
    /// Pages by how long after they left, or their window began, they were touched: in steps of time.
    touched: BTreeMap<u32, u64>,
    /// Pages in all windows together.
    chances: u64,
}

impl WorkingSet {
    /// A window begins.
    pub fn begin(&mut self, now_ns: u64) {
        self.chances += self.known.len() as u64;
        self.window_ns = now_ns;
    }

    /// `page` is outside from now on.
    pub fn left(&mut self, page: u64, now_ns: u64) {
        // In the first window, pages are known only once they leave.
        if self.known.insert(page) {
            self.chances += 1;
        }
        self.outside.insert(page, now_ns);
    }

    /// `page` is touched.
    pub fn touch(&mut self, page: u64, now_ns: u64) {
        self.known.insert(page);
        if let Some(since_ns) = self.outside.remove(&page) {
            let delay_ns = now_ns.saturating_sub(since_ns.max(self.window_ns));
            *self.touched.entry(step(delay_ns)).or_default() += 1;
        }
    }

    /// The pages from `first` to before `end` are no more.
    pub fn remove(&mut self, first: u64, end: u64) {
        let gone: Vec<u64> = self.known.range(first..end).copied().collect();
        for page in gone {
            self.known.remove(&page);
            self.outside.remove(&page);
        }
    }

    /// Distinct pages that are touched in one window, as a share of all.
    pub fn share(&self) -> f64 {
        self.touched.values().sum::<u64>() as f64 / self.chances.max(1) as f64
    }

    /// How often a memory misses that holds a `share` of the pages: pages in a second by all pages. None where that is more
    /// than is touched in a window.
    pub fn misses_per_s(&self, share: f64) -> Option<f64> {
        let all = self.chances.max(1) as f64;
        let (mut within, mut from_ns, mut most) = (0.0, 0.0, None);
        for (&at, &count) in &self.touched {
            let (to_ns, part) = (end_ns(at), count as f64 / all);
            within += part;
            if within > share {
                // A larger memory never misses more often: what looks like it is chance.
                let rate = part / (to_ns - from_ns) * 1e9;
                most = Some(most.map_or(rate, |most: f64| most.max(rate)));
            }
            from_ns = to_ns;
        }
        most
    }
}

fn step(ns: u64) -> u32 {
    let ns = ns.max(16);
    let octave = ns.ilog2();
    let within = u32::try_from(ns >> (octave - 2) & 3).expect("two bits");
    octave * STEPS + within
}

/// Where the step after `at` begins.
fn end_ns(at: u32) -> f64 {
    f64::from(STEPS + at % STEPS + 1) * f64::from(at / STEPS).exp2() / f64::from(STEPS)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGES: u64 = 1000;

    /// A program that runs through windows and touches what `pick` says, one page a microsecond.
    fn run(mut pick: impl FnMut(u64) -> u64) -> WorkingSet {
        let (mut set, mut now) = (WorkingSet::default(), 0);
        for _ in 0..50 {
            set.begin(now * 1000);
            (0..PAGES).for_each(|page| set.left(page, now * 1000));
            for _ in 0..5 * PAGES {
                now += 1;
                set.touch(pick(now), now * 1000);
            }
        }
        set
    }

    #[test]
    fn steps_follow_each_other() {
        for ns in [16, 19, 20, 31, 32, 1000, 123_456_789] {
            assert!(end_ns(step(ns)) > ns as f64 && end_ns(step(ns) - 1) <= ns as f64, "{ns}");
        }
    }

    #[test]
    fn a_cyclic_scan_misses_always_until_it_fits() {
        let set = run(|now| now % PAGES);
        assert!((set.share() - 1.0).abs() < 1e-9);
        // A page in a microsecond, of a thousand.
        for share in [0.1, 0.5, 0.9] {
            let rate = set.misses_per_s(share).expect("within a window");
            assert!((rate / 1e3 - 1.0).abs() < 0.35, "{share}: {rate}");
        }
        assert_eq!(set.misses_per_s(1.0), None);
    }

    #[test]
    fn uniform_references_miss_in_proportion_to_what_is_not_there() {
        let set = run(|now| spillway_core::sample::hash(now) % PAGES);
        for share in [0.2, 0.5, 0.8] {
            let rate = set.misses_per_s(share).expect("within a window");
            assert!((rate / (1e3 * (1.0 - share)) - 1.0).abs() < 0.3, "{share}: {rate}");
        }
    }

    #[test]
    fn what_is_gone_is_not_counted() {
        let mut set = WorkingSet::default();
        set.begin(0);
        set.left(1, 0);
        set.left(2, 0);
        set.remove(1, 2);
        set.touch(1, 50);
        assert_eq!(set.touched.values().sum::<u64>(), 0);
    }
}

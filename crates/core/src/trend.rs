//! Strides: faults that are equally far apart (Leap, Maruf and Chowdhury, USENIX ATC 2020, section 4).
//!
//! Leap looks for the distance that the majority of the last faults had, in a window that doubles until there is one: what
//! other threads do in between does not hide it, and irregular access has none. How far to go ahead it learns from hits in
//! the kernel's cache of pages read ahead. Here a page that came ahead raises no fault; but the fault that comes next tells:
//! when it falls behind all of them, exactly where the stride leads, they have been used, and twice as many come the next
//! time. Where that fails too often, a stride is believed only when it has led to three faults more.

use crate::blocks::Accuracy;
use crate::units::PageIndex;

/// Distances that are remembered; Leap has 32. A majority of eight comes sooner, and costs a few comparisons a fault.
const REMEMBERED: usize = 8;
/// The window that is looked at first.
const WINDOW_LEAST: usize = 4;
/// The most pages ahead: as Leap's largest window.
const AHEAD_MOST: u64 = 8;

/// A stride under way.
#[derive(Clone, Copy, Debug)]
struct Run {
    distance: i64,
    /// The page whose fault would continue it.
    next: u64,
    /// Pages that came ahead, and that nobody has been seen to use.
    owed: u64,
    /// The most pages to come ahead.
    pages: u64,
    faults: u32,
}

/// The trend of one target's faults.
#[derive(Debug, Default)]
pub struct Trend {
    last: u64,
    distances: [i64; REMEMBERED],
    newest: usize,
    run: Option<Run>,
    accuracy: Accuracy,
    learnt: (u64, u64),
}

/// Pages that lie `distance` pages apart, from that of the fault on, which is not counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stride {
    /// In pages.
    pub distance: i64,
    /// How many.
    pub pages: u64,
}

impl Trend {
    /// A fault at `page`, in line with a stream: there is no stride to be looked for.
    pub fn streams(&mut self, page: PageIndex) {
        self.end_run();
        self.remember(1);
        self.last = page.0;
    }

    /// A fault at `page`; the stride that it belongs to, if any.
    pub fn fault(&mut self, page: PageIndex) -> Option<Stride> {
        let distance = page.0.wrapping_sub(self.last).cast_signed();
        self.last = page.0;
        if let Some(run) = self.run.filter(|run| run.next == page.0) {
            self.remember(run.distance);
            self.learn(run.owed, run.owed);
            let faults = run.faults.saturating_add(1);
            return Some(self.go_on(Run { faults, pages: (run.pages * 2).min(AHEAD_MOST), ..run }, page));
        }
        self.end_run();
        self.remember(distance);
        // Streams see to what is dense.
        let majority = self.majority().filter(|majority| *majority == distance && !(0..4).contains(majority))?;
        Some(self.go_on(Run { distance: majority, next: 0, owed: 0, pages: 1, faults: 0 }, page))
    }

    /// `pages` are on their way for that fault's stride: fewer than it led to where some are there already, or out of its region.
    pub fn owes(&mut self, pages: u64) {
        self.run.iter_mut().for_each(|run| run.owed += pages);
    }

    /// More came for that fault than its stride led to, or less: the stride goes on at `next`.
    pub fn reaches(&mut self, next: u64) {
        self.run.iter_mut().for_each(|run| run.next = next);
    }

    /// What was learnt by that fault of pages that had come ahead: how many, and how many of them were used.
    pub fn learnt(&mut self) -> (u64, u64) {
        std::mem::take(&mut self.learnt)
    }

    fn go_on(&mut self, mut run: Run, page: PageIndex) -> Stride {
        if self.accuracy.is_poor() && run.faults < 3 {
            run.pages = 1;
        }
        let pages = if self.accuracy.is_poor() && run.faults < 3 { 0 } else { run.pages };
        let far = run.distance.wrapping_mul(pages.cast_signed() + 1);
        run.next = page.0.wrapping_add_signed(far);
        run.owed = 0;
        self.run = Some(run);
        Stride { distance: run.distance, pages }
    }

    fn end_run(&mut self) {
        if let Some(run) = self.run.take() {
            self.learn(run.owed, 0);
        }
    }

    fn learn(&mut self, others: u64, used: u64) {
        self.accuracy.learn(others, used);
        self.learnt = (self.learnt.0 + others, self.learnt.1 + used);
    }

    fn remember(&mut self, distance: i64) {
        self.newest = (self.newest + 1) % REMEMBERED;
        self.distances[self.newest] = distance;
    }

    /// The distance that more than half of a window's faults had (Boyer and Moore's vote, then a count).
    fn majority(&self) -> Option<i64> {
        let mut window = WINDOW_LEAST;
        while window <= REMEMBERED {
            let recent = || (0..window).map(|i| self.distances[(self.newest + REMEMBERED - i) % REMEMBERED]);
            let (winner, _) = recent().fold((0, 0_u32), |(winner, votes), distance| match votes {
                0 => (distance, 1),
                _ if winner == distance => (winner, votes + 1),
                _ => (winner, votes - 1),
            });
            if recent().filter(|distance| *distance == winner).count() > window / 2 {
                return Some(winner);
            }
            window *= 2;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Faults of a program that touches `pages` in order, of which those that came ahead raise none: how many there were, and
    /// how many pages came ahead.
    fn walk(trend: &mut Trend, pages: impl Iterator<Item = u64>) -> (u64, u64) {
        let (mut faults, mut ahead) = (0, std::collections::BTreeSet::new());
        let mut came = 0;
        for page in pages {
            if ahead.remove(&page) {
                continue;
            }
            faults += 1;
            if let Some(stride) = trend.fault(PageIndex(page)) {
                trend.owes(stride.pages);
                let next = |n: u64| page.wrapping_add_signed(stride.distance * i64::try_from(n).expect("few"));
                ahead.extend((1..=stride.pages).map(next));
                came += stride.pages;
            }
        }
        (faults, came)
    }

    #[test]
    fn strides_are_followed_in_both_directions() {
        for distance in [40_i64, -40, -1, 4] {
            let pages = (0..900).map(|i: i64| (1_000_000 + i * distance).cast_unsigned());
            let (faults, came) = walk(&mut Trend::default(), pages);
            assert!((90..130).contains(&faults), "{distance}: {faults} faults");
            assert!(came + faults >= 900 && came + faults < 910, "{distance}: {came} pages came ahead");
        }
    }

    #[test]
    fn a_stride_shows_through_faults_in_between() {
        let noise = |i: u64| i.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 20;
        let mut trend = Trend::default();
        let mut found = 0;
        for i in 0..200 {
            // Two of three faults keep the stride.
            let page = if i % 6 == 5 { noise(i) } else { 5000 + 40 * i };
            found += u64::from(trend.fault(PageIndex(page)).is_some_and(|stride| stride.distance == 40));
        }
        assert!(found > 60, "{found}");
    }

    #[test]
    fn what_is_irregular_has_no_trend() {
        let mut x = 1_u64;
        let pages = std::iter::repeat_with(|| {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            x >> 30
        });
        assert_eq!(walk(&mut Trend::default(), pages.take(10_000)), (10_000, 0));
    }

    #[test]
    fn strides_that_break_off_are_doubted() {
        let mut trend = Trend::default();
        let jump = |i: u64| i.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 20;
        let broken = |i: u64| (0..4).map(move |k| jump(i) + 50 * k);
        let (_, before) = walk(&mut trend, (0..100).flat_map(broken));
        let (_, after) = walk(&mut trend, (100..300).flat_map(broken));
        assert!(before > 0 && after < before / 4, "{before} pages came in vain, and then {after}");
    }
}

//! Which parts of the arena are whose: runs of grains of 512 bytes, given out and taken back.
//!
//! The arena is cut into spans of 128 grains; a number of 128 bits says which of a span's are free. A run lies in one span and
//! may be as long as a page. Runs of all lengths share a span, so one that is given back is room for any other, and nothing
//! has to be moved when pages come to compress better or worse. A span is found by its longest free run, the shortest
//! that will do first, which keeps long ones for pages that do not compress.
//!
//! Grains are *closed* until the page of DRAM that they are in is opened, one page at a time, as the budget allows.
//!
//! That no grain is in two [`Loose`] runs is what the unsafe code of `pages.rs` rests on.

#![expect(clippy::needless_pass_by_value, reason = "handing a run over is what ends the right to it")]

use spillway_core::PAGE_BYTES;

/// The unit: eight to a page. Smaller ones would waste less at the end of a page (a 16th of a page, in the mean) and make
/// searches longer.
pub(crate) const GRAIN_BYTES: u32 = 512;
/// Grains of a page that is kept as it is.
pub(crate) const WHOLE: u32 = 8;
const _: () = assert!((WHOLE * GRAIN_BYTES) as usize == PAGE_BYTES);
const SPAN_GRAINS: u32 = u128::BITS;
const SPAN_PAGES: u32 = SPAN_GRAINS / WHOLE;
/// Spans that are looked at for a page to close: those that it is likeliest in.
const CLOSE_TRIALS: usize = 64;

/// A run of grains that belongs to no page.
#[derive(Debug)]
pub(crate) struct Loose {
    pub(super) first: u32,
    pub(super) grains: u32,
}

impl Loose {
    /// How long it is.
    pub(crate) fn grains(&self) -> u32 {
        self.grains
    }
}

/// How many grains so many bytes take.
pub(crate) fn grains_of(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(GRAIN_BYTES as usize)).unwrap_or(WHOLE).clamp(1, WHOLE)
}

struct Span {
    /// A bit for each grain that is open and in no run.
    free: u128,
    /// Its longest free run, as far as [`WHOLE`]: the list that it is in.
    longest: u32,
    /// Where in that list.
    at: u32,
}

/// All grains.
pub(crate) struct Grains {
    spans: Vec<Span>,
    /// Spans by their longest free run, from none to [`WHOLE`] or more.
    by_longest: [Vec<u32>; WHOLE as usize + 1],
    /// Pages that were never open start here.
    fresh: u32,
    pages: u32,
    /// Pages that were closed again.
    closed: Vec<u32>,
}

impl Grains {
    /// Those of an arena of so many pages, all closed.
    pub(super) fn new(pages: u32) -> Self {
        Self { spans: Vec::new(), by_longest: Default::default(), fresh: 0, pages, closed: Vec::new() }
    }

    /// A run of so many grains, one to [`WHOLE`], if there is one.
    pub(crate) fn take(&mut self, grains: u32) -> Option<Loose> {
        let lists = &self.by_longest[grains as usize..];
        let span = *lists.iter().find_map(|list| list.last())?;
        let at = starts_of_runs(self.spans[span as usize].free, grains).trailing_zeros();
        let loose = Loose { first: span * SPAN_GRAINS + at, grains };
        self.change(span, |free| free & !mask(at, grains));
        Some(loose)
    }

    /// Takes a run back. The bytes in it must be zeros.
    pub(crate) fn give_back(&mut self, loose: Loose) {
        let (span, at) = (loose.first / SPAN_GRAINS, loose.first % SPAN_GRAINS);
        self.change(span, |free| {
            debug_assert_eq!(free & mask(at, loose.grains), 0, "it was in one run");
            free | mask(at, loose.grains)
        });
    }

    /// Opens one more page, which must be zeros; whether there is one.
    pub(crate) fn open(&mut self) -> bool {
        let page = match self.closed.pop() {
            Some(page) => page,
            None if self.fresh < self.pages => {
                self.fresh += 1;
                self.fresh - 1
            }
            None => return false,
        };
        let span = page / SPAN_PAGES;
        if span as usize == self.spans.len() {
            let at = u32::try_from(self.by_longest[0].len()).expect("fewer than pages");
            self.by_longest[0].push(span);
            self.spans.push(Span { free: 0, longest: 0, at });
        }
        self.change(span, |free| free | mask(page % SPAN_PAGES * WHOLE, WHOLE));
        true
    }

    /// Closes a page none of which is in a run, if one is found. Its memory is the caller's to give to the kernel, so
    /// that it reads as zeros when it is opened again.
    pub(crate) fn close(&mut self) -> Option<Loose> {
        let candidates = self.by_longest[WHOLE as usize].iter().rev().take(CLOSE_TRIALS);
        let (span, at) = candidates.copied().find_map(|span| {
            let starts = starts_of_runs(self.spans[span as usize].free, WHOLE) & PAGE_STARTS;
            (starts != 0).then(|| (span, starts.trailing_zeros()))
        })?;
        self.change(span, |free| free & !mask(at, WHOLE));
        self.closed.push(span * SPAN_PAGES + at / WHOLE);
        Some(Loose { first: span * SPAN_GRAINS + at, grains: WHOLE })
    }

    /// Grains that are open and in no run.
    #[cfg(test)]
    pub(crate) fn free(&self) -> u64 {
        self.spans.iter().map(|span| u64::from(span.free.count_ones())).sum()
    }

    fn change(&mut self, number: u32, change: impl FnOnce(u128) -> u128) {
        let span = &mut self.spans[number as usize];
        span.free = change(span.free);
        let (before, at, longest) = (span.longest, span.at, longest_run(span.free));
        if longest == before {
            return;
        }
        let list = &mut self.by_longest[before as usize];
        list.swap_remove(at as usize);
        if let Some(&moved) = list.get(at as usize) {
            self.spans[moved as usize].at = at;
        }
        let list = &mut self.by_longest[longest as usize];
        let span = &mut self.spans[number as usize];
        (span.longest, span.at) = (longest, u32::try_from(list.len()).expect("fewer than pages"));
        list.push(number);
    }
}

/// Grains at which pages of DRAM start.
const PAGE_STARTS: u128 = u128::MAX / 0xff;

/// So many ones, from a grain on.
fn mask(at: u32, grains: u32) -> u128 {
    ((1 << grains) - 1) << at
}

/// The grains from which on at least so many are free.
fn starts_of_runs(free: u128, grains: u32) -> u128 {
    let (mut starts, mut known) = (free, 1);
    while known < grains {
        let step = known.min(grains - known);
        starts &= starts >> step;
        known += step;
    }
    starts
}

/// Grains in the longest run, as far as [`WHOLE`].
fn longest_run(free: u128) -> u32 {
    let (mut starts, mut longest) = (free, 0);
    while starts != 0 && longest < WHOLE {
        starts &= starts >> 1;
        longest += 1;
    }
    longest
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn opened(pages: u32) -> Grains {
        let mut grains = Grains::new(pages);
        assert!((0..pages).all(|_| grains.open()) && !grains.open());
        grains
    }

    proptest! {
        #[test]
        fn no_grain_is_in_two_runs(steps in prop::collection::vec((0..6_u8, 1..=WHOLE, any::<prop::sample::Index>()), 1..300)) {
            const PAGES: u32 = 40;
            let mut grains = Grains::new(PAGES);
            let (mut runs, mut closed): (Vec<Loose>, u32) = (Vec::new(), PAGES);
            for (what, len, which) in steps {
                match what {
                    0..3 => runs.extend(grains.take(len)),
                    3 if !runs.is_empty() => grains.give_back(runs.swap_remove(which.index(runs.len()))),
                    4 => closed -= u32::from(grains.open()),
                    5 => closed += u32::from(grains.close().is_some()),
                    _ => {}
                }
                let mut taken = vec![false; (PAGES * WHOLE) as usize];
                for run in &runs {
                    prop_assert_eq!(run.first / SPAN_GRAINS, (run.first + run.grains - 1) / SPAN_GRAINS);
                    for grain in run.first..run.first + run.grains {
                        prop_assert!(!std::mem::replace(&mut taken[grain as usize], true));
                    }
                }
                let in_runs: u32 = runs.iter().map(|run| run.grains).sum();
                prop_assert_eq!(u64::from((PAGES - closed) * WHOLE - in_runs), grains.free());
            }
            runs.into_iter().for_each(|run| grains.give_back(run));
            // All of it is whole again.
            prop_assert!((0..PAGES - closed).all(|_| grains.take(WHOLE).is_some()) && grains.take(1).is_none());
        }
    }

    #[test]
    fn runs_of_all_lengths_leave_few_holes() {
        let mut grains = opened(1024);
        let (mut runs, mut random) = (Vec::new(), 7_u64);
        let mut next = |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            usize::try_from((random >> 33) % below).expect("small")
        };
        for _ in 0..60_000 {
            let len = u32::try_from(next(8) + 1).expect("small");
            match grains.take(len) {
                Some(run) => runs.push(run),
                // Full: some of what is there goes, as pages do.
                None => grains.give_back(runs.swap_remove(next(runs.len() as u64))),
            }
        }
        // Until a page that does not compress is declined.
        while let Some(run) = grains.take(WHOLE) {
            runs.push(run);
        }
        let unused = grains.free() * 100 / u64::from(1024 * WHOLE);
        assert!(unused < 12, "{unused}% are in holes that a page does not fit");
    }

    #[test]
    fn runs_are_found_where_they_are() {
        for (free, grains, starts) in
            [(0b0111_0110, 2, 0b0011_0010), (0b0111_0110, 3, 0b0001_0000), (u128::MAX, 8, u128::MAX >> 7)]
        {
            assert_eq!(starts_of_runs(free, grains), starts);
        }
        assert_eq!([0, 0b1011, u128::MAX].map(longest_run), [0, 2, 8]);
        assert_eq!((PAGE_STARTS & 0xffff, PAGE_STARTS.count_ones()), (0x0101, 16));
    }
}

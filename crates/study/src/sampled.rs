//! Miss-ratio curves from a sample of the pages: Waldspurger, Park, Garthwaite and Ahmad, "Efficient MRC Construction with
//! SHARDS", FAST 2015.
//!
//! A page is in the sample or not by a hash of its number, so either all or none of its touches are seen, and a distance
//! among sampled pages is the true one times the sampling rate. With a fixed size (section 3.2 there) the rate falls as
//! distinct pages come, which bounds memory and time whatever the trace. The difference between the references that
//! were to be expected in the sample and those that were seen is laid to the smallest distance (SHARDS-adj, section 5.3
//! there): it is the share of a few very hot pages that fell into the sample or out of it.

use std::collections::BTreeSet;

use spillway_core::sample::{HASHES, hash};

use crate::curve::Curve;
use crate::record::Fault;
use crate::source::Step;
use crate::stack::Stack;

/// Pages in a sample: a mean error below 0.01 on the traces of the paper (its section 5).
pub const SAMPLE_PAGES: usize = 8192;

/// A sample of a reference stream.
pub struct Sampled {
    stack: Stack,
    /// Pages in the sample, by hash: those with the largest leave first.
    by_hash: BTreeSet<(u64, u64)>,
    most: usize,
    /// Pages are in the sample when their hash is below.
    below: u64,
    /// Of the hashes below `below`, only those with this remainder modulo 2: for halves of a sample.
    parity: Option<u64>,
    curve: Curve,
    references: f64,
    seen: u64,
    most_seen: usize,
}

impl Sampled {
    /// A sample of at most `most` pages, of those whose hash is below `below`.
    pub fn new(most: usize, below: u64) -> Self {
        Self {
            stack: Stack::default(),
            by_hash: BTreeSet::new(),
            most,
            below: below.min(HASHES),
            parity: None,
            curve: Curve::default(),
            references: 0.0,
            seen: 0,
            most_seen: 0,
        }
    }

    /// Half of such a sample; the other half has the other parity.
    pub fn half(most: usize, below: u64, parity: u64) -> Self {
        Self { parity: Some(parity), ..Self::new(most, below) }
    }

    /// The share of the pages that are in the sample.
    pub fn rate(&self) -> f64 {
        self.below as f64 / HASHES as f64 / if self.parity.is_some() { 2.0 } else { 1.0 }
    }

    /// References of sampled pages.
    pub fn seen(&self) -> u64 {
        self.seen
    }

    /// The most pages that were in the sample at one time.
    pub fn pages(&self) -> usize {
        self.most_seen
    }

    /// Adds a step of the program.
    pub fn push(&mut self, step: Step) {
        match step {
            Step::Touch { page, served, .. } => {
                self.touch(page, matches!(served, Some((Fault::Refault | Fault::Fetch, _))));
            }
            Step::Window => {}
            Step::Removed { page, pages } => {
                for gone in self.stack.remove(page, page.saturating_add(pages)) {
                    self.by_hash.remove(&(hash(gone), gone));
                }
            }
        }
    }

    /// A page that was `there` before is not touched for the first time, although this is the first that is seen of it:
    /// whatever was touched meanwhile was touched since it was.
    fn touch(&mut self, page: u64, there: bool) {
        self.references += 1.0;
        let hash = hash(page);
        if hash >= self.below || self.parity.is_some_and(|parity| hash & 1 != parity) {
            return;
        }
        let rate = self.rate();
        self.seen += 1;
        let distance = self.stack.touch(page);
        if distance.is_none() {
            self.by_hash.insert((hash, page));
        }
        let distance = distance.or(there.then_some(self.stack.len() as u64));
        self.curve.add(distance.map(|distance| scaled(distance, rate)), 1.0 / rate);
        while self.by_hash.len() > self.most {
            self.lower();
        }
        self.most_seen = self.most_seen.max(self.stack.len());
    }

    /// The pages with the largest hash leave the sample.
    fn lower(&mut self) {
        let Some(&(largest, _)) = self.by_hash.last() else { return };
        self.below = largest;
        while let Some(&(hash, page)) = self.by_hash.last().filter(|(hash, _)| *hash >= largest) {
            self.by_hash.remove(&(hash, page));
            self.stack.remove(page, page + 1);
        }
    }

    /// The curve. `references` is how many there were in all, where that is known otherwise than by counting the steps.
    pub fn curve(mut self, references: Option<f64>) -> Curve {
        self.curve.set_references(references.unwrap_or(self.references));
        self.curve
    }
}

/// A sample and its two halves: what the halves differ by tells how sure the whole is.
pub struct Halved {
    /// All of it.
    pub whole: Sampled,
    halves: [Sampled; 2],
}

impl Halved {
    /// See [`Sampled::new`].
    pub fn new(most: usize, below: u64) -> Self {
        let half = |parity| Sampled::half(most.div_ceil(2), below, parity);
        Self { whole: Sampled::new(most, below), halves: [half(0), half(1)] }
    }

    /// Adds a step of the program.
    pub fn push(&mut self, step: Step) {
        self.halves.iter_mut().for_each(|half| half.push(step));
        self.whole.push(step);
    }

    /// The curve, and those of the halves.
    pub fn curves(self, references: Option<f64>) -> (Curve, [Curve; 2]) {
        (self.whole.curve(references), self.halves.map(|half| half.curve(references)))
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "saturates, and is positive")]
fn scaled(distance: u64, rate: f64) -> u64 {
    (distance as f64 / rate).round() as u64
}

//! A miss-ratio curve: how many references miss in a memory of any size, under LRU.

use std::collections::BTreeMap;

/// Distances are kept to 12 significant bits, rounded up.
const BITS: u32 = 12;

/// Weights of stack distances.
#[derive(Clone, Debug, Default)]
pub struct Curve {
    /// By distance in pages.
    weights: BTreeMap<u64, f64>,
    /// First touches: they miss whatever the size.
    cold: f64,
    /// All references.
    references: f64,
}

impl Curve {
    /// Adds `weight` references at a distance; none is a first touch.
    pub(crate) fn add(&mut self, distance: Option<u64>, weight: f64) {
        match distance {
            Some(distance) => *self.weights.entry(rounded(distance)).or_default() += weight,
            None => self.cold += weight,
        }
    }

    /// There were so many references in all, whatever the weights make of them.
    pub(crate) fn set_references(&mut self, references: f64) {
        self.references = references;
    }

    /// References of which the curve is made.
    pub fn references(&self) -> f64 {
        self.references
    }

    /// First touches.
    pub fn first_touches(&self) -> f64 {
        self.cold
    }

    /// References that miss in a memory of `pages` pages, first touches apart.
    pub fn misses(&self, pages: u64) -> f64 {
        self.weights.range(pages.saturating_add(1)..).map(|(_, weight)| weight).sum()
    }

    /// The share of all references that miss in a memory of `pages` pages, first touches apart.
    pub fn miss_ratio(&self, pages: u64) -> f64 {
        if self.references > 0.0 { (self.misses(pages) / self.references).min(1.0) } else { 0.0 }
    }

    /// The largest distance: no larger memory helps.
    pub fn largest(&self) -> u64 {
        self.weights.keys().next_back().copied().unwrap_or(0)
    }
}

fn rounded(distance: u64) -> u64 {
    let shift = (u64::BITS - distance.leading_zeros()).saturating_sub(BITS);
    (distance >> shift << shift).saturating_add(if distance.trailing_zeros() >= shift { 0 } else { 1 << shift })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_keep_twelve_bits() {
        for (distance, kept) in [(0, 0), (1, 1), (4095, 4095), (4097, 4098), (1 << 40, 1 << 40), (u64::MAX, u64::MAX)] {
            assert_eq!(rounded(distance), kept, "{distance}");
        }
    }

    #[test]
    fn a_memory_as_large_as_the_distance_hits() {
        let mut curve = Curve::default();
        curve.add(Some(10), 3.0);
        curve.add(Some(20), 1.0);
        curve.add(None, 4.0);
        curve.set_references(8.0);
        let ratios: Vec<f64> = [9, 10, 19, 20].map(|pages| curve.miss_ratio(pages)).into();
        assert_eq!(ratios, [0.5, 0.125, 0.125, 0.0]);
        assert_eq!(curve.largest(), 20);
    }
}

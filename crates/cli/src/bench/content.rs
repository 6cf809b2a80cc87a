//! What the workload's pages contain: every word follows from the page's number, so that each can be verified when it is read.
//!
//! Invariants: the last word of a page counts the writes to it, and a count of our own beside it says what it must be; all
//! other words never change. A share of each page is noise, the rest repeats the page's number, so that it compresses.

use super::sys;
use spillway_core::PAGE_BYTES;
use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

/// Words of a page.
pub(super) const WORDS: usize = PAGE_BYTES / size_of::<u64>();
/// Where writes are counted.
const WRITES: usize = WORDS - 1;

/// splitmix64 (Steele et al., "Fast splittable pseudorandom number generators", 2014): any number is a good seed.
pub(super) fn mix(number: u64) -> u64 {
    let mut x = number.wrapping_add(0x9E37_79B9_7F4A_7C15);
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// Pages under test.
pub(super) struct Pages {
    words: &'static [AtomicU64],
    /// How often each page was written to.
    writes: Vec<AtomicU32>,
    noise_words: usize,
}

impl Pages {
    /// Pages that nobody has touched; `noise_percent` of each will not compress.
    pub(super) fn new(count: usize, noise_percent: usize) -> io::Result<Self> {
        let mut writes = Vec::new();
        writes.resize_with(count, AtomicU32::default);
        Ok(Self { words: sys::words(count * WORDS)?, writes, noise_words: WORDS * noise_percent / 100 })
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.writes.len()
    }

    /// Writes a page's content, from its first word to its last.
    pub(super) fn fill(&self, page: usize) {
        for (at, word) in self.page(page).iter().enumerate() {
            word.store(if at == WRITES { 0 } else { self.expected(page, at) }, Relaxed);
        }
    }

    /// Reads a word that never changes. `dice` chooses which; it is returned with what it must be.
    pub(super) fn read(&self, page: usize, dice: u64) -> (u64, usize) {
        let at = index(dice % WRITES as u64);
        (self.page(page)[at].load(Relaxed), at)
    }

    /// What a word must be.
    pub(super) fn expected(&self, page: usize, at: usize) -> u64 {
        let (page, at) = (page as u64, at as u64);
        if at < self.noise_words as u64 { mix(page * WORDS as u64 + at) } else { !page }
    }

    /// Counts a write in the page.
    pub(super) fn write(&self, page: usize) {
        self.page(page)[WRITES].fetch_add(1, Relaxed);
    }

    /// Remembers that write; apart from it, because only the other is timed.
    pub(super) fn wrote(&self, page: usize) {
        self.writes[page].fetch_add(1, Relaxed);
    }

    /// Whether each byte of a page is what it must be.
    pub(super) fn is_right(&self, page: usize) -> bool {
        let right = |(at, word): (usize, &AtomicU64)| match at {
            WRITES => word.load(Relaxed) == u64::from(self.writes[page].load(Relaxed)),
            _ => word.load(Relaxed) == self.expected(page, at),
        };
        self.page(page).iter().enumerate().all(right)
    }

    /// Changes one bit, as nobody ever should.
    pub(super) fn spoil(&self, page: usize) {
        self.page(page)[WORDS / 2].fetch_xor(1, Relaxed);
    }

    fn page(&self, page: usize) -> &[AtomicU64] {
        &self.words[page * WORDS..][..WORDS]
    }
}

/// A number that is below the length of something in memory.
pub(super) fn index(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_bit_is_found_wherever_it_is() {
        let pages = Pages::new(3, 50).expect("memory");
        (0..pages.count()).for_each(|page| pages.fill(page));
        assert!((0..3).all(|page| pages.is_right(page)));
        for at in 0..WORDS {
            for bit in [0, 63] {
                pages.page(1)[at].fetch_xor(1 << bit, Relaxed);
                assert!(!pages.is_right(1), "word {at}, bit {bit}");
                pages.page(1)[at].fetch_xor(1 << bit, Relaxed);
            }
        }
        pages.write(2);
        assert!(!pages.is_right(2), "a write that nobody made");
        pages.wrote(2);
        assert!(pages.is_right(2));
        pages.wrote(2);
        assert!(!pages.is_right(2), "a write that was lost");
    }

    #[test]
    fn half_of_a_page_is_noise_and_pages_differ() {
        let pages = Pages::new(2, 50).expect("memory");
        let half: Vec<u64> = (0..WRITES).map(|at| pages.expected(0, at)).collect();
        let mut distinct = half.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), WORDS / 2 + 1);
        assert!((0..WRITES).all(|at| pages.expected(1, at) != half[at]));
        pages.fill(1);
        for dice in [0, 1, WRITES as u64 - 1, WRITES as u64, u64::MAX] {
            let (read, at) = pages.read(1, dice);
            assert_eq!(read, pages.expected(1, at));
        }
    }
}

//! Where pages and rows are written down: entries of some 32-bit halves each, in segments that never move, which may outlive
//! this process.
//!
//! Every change is one store of eight bytes, after all that it vouches for: a process may be killed between any two of them.

use std::ops::Deref;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Relaxed, Release};

use crate::vault::{Slabs, Use, Vault};

/// Entries in a segment. Even, so that segments are whole words.
pub(super) const SEGMENT_ENTRIES: usize = 4096;
/// Segments in reserve, so that the fault path allocates none.
const RESERVE: usize = 2;
const HALVES: usize = 2;

enum Segment {
    Own(Box<[AtomicU64]>),
    Lasting(&'static [AtomicU64]),
}

impl Deref for Segment {
    type Target = [AtomicU64];

    fn deref(&self) -> &Self::Target {
        match self {
            Self::Own(words) => words,
            Self::Lasting(words) => words,
        }
    }
}

/// The words that a segment takes, with entries of so many halves.
pub(super) fn segment_words(stride: usize) -> usize {
    stride * SEGMENT_ENTRIES / HALVES
}

/// All entries; those that are free are zeros.
pub(super) struct Table {
    stride: usize,
    segments: Vec<Segment>,
    reserve: Vec<Segment>,
    free: Vec<u32>,
    segments_max: usize,
    /// Where entries are to outlive this process.
    source: Option<Slabs>,
}

impl Table {
    /// An empty one, with a reserve; in the vault, if there is one.
    pub(super) fn new(stride: usize, entries_max: usize, vault: Option<(&Vault, Use)>) -> Self {
        let segments_max = entries_max / SEGMENT_ENTRIES;
        let mut table = Self {
            stride,
            segments: Vec::with_capacity(segments_max),
            reserve: Vec::with_capacity(RESERVE),
            free: Vec::with_capacity(SEGMENT_ENTRIES),
            segments_max,
            source: vault.map(|(vault, of)| Slabs::new(vault, of)),
        };
        while table.top_up() {}
        table
    }

    /// What another process has left. Nothing is free until [`Table::offer`] says so.
    pub(super) fn found(stride: usize, entries_max: usize, (vault, of): (&Vault, Use)) -> Self {
        let (slabs, source) = vault.slabs(of);
        let mut table = Self::new(stride, entries_max, Some((vault, of)));
        let segments = slabs.into_iter().map(Segment::Lasting);
        table.segments.extend(segments.take(table.segments_max));
        Self { source: Some(source), ..table }
    }

    /// Fills up the reserve by one segment, unless what is taken is lasting. Returns whether there is more to do.
    pub(super) fn top_up(&mut self) -> bool {
        if self.source.is_some() {
            return false;
        }
        if self.reserve.len() < RESERVE {
            self.reserve.push(self.fresh());
        }
        self.reserve.len() < RESERVE
    }

    fn fresh(&self) -> Segment {
        Segment::Own((0..segment_words(self.stride)).map(|_| AtomicU64::new(0)).collect())
    }

    pub(super) fn memory_bytes(&self) -> u64 {
        let words = (self.segments.len() + self.reserve.len()) * segment_words(self.stride);
        (words * size_of::<AtomicU64>() + self.free.capacity() * size_of::<u32>()) as u64
    }

    pub(super) fn len(&self) -> usize {
        self.segments.len() * SEGMENT_ENTRIES
    }

    /// An entry of zeros. None when there is no more room.
    pub(super) fn insert(&mut self) -> Option<u32> {
        if self.free.is_empty() {
            if self.segments.len() == self.segments_max {
                return None;
            }
            let first = u32::try_from(self.len()).ok()?;
            let segment = match &mut self.source {
                Some(source) => Segment::Lasting(source.take()?),
                None => self.reserve.pop().unwrap_or_else(|| self.fresh()),
            };
            self.segments.push(segment);
            let entries = u32::try_from(SEGMENT_ENTRIES).expect("few");
            self.free.extend((first..first + entries).rev());
        }
        self.free.pop()
    }

    /// Clears an entry, last half first.
    pub(super) fn clear(&mut self, at: u32) {
        for half in (0..self.stride).rev() {
            if self.half(at, half) != 0 {
                self.set_half(at, half, 0);
            }
        }
    }

    /// What is all zeros may be given.
    pub(super) fn offer(&mut self, at: u32) {
        self.free.push(at);
    }

    /// The word that has a half of an entry, and which half of it that is.
    fn place(&self, at: u32, half: usize) -> (&AtomicU64, usize) {
        let (segment, half) = (at as usize / SEGMENT_ENTRIES, at as usize % SEGMENT_ENTRIES * self.stride + half);
        (&self.segments[segment][half / HALVES], half % HALVES)
    }

    /// An entry of one word.
    pub(super) fn word(&self, at: u32) -> u64 {
        debug_assert_eq!(self.stride, HALVES);
        self.place(at, 0).0.load(Relaxed)
    }

    pub(super) fn set_word(&mut self, at: u32, word: u64) {
        debug_assert_eq!(self.stride, HALVES);
        store(self.place(at, 0).0, word);
    }

    /// A part of an entry.
    pub(super) fn half(&self, at: u32, half: usize) -> u32 {
        let (word, side) = self.place(at, half);
        halves(word.load(Relaxed))[side]
    }

    /// The other half of the word stays as it is: nobody else writes.
    pub(super) fn set_half(&mut self, at: u32, half: usize, value: u32) {
        let (word, side) = self.place(at, half);
        let mut both = halves(word.load(Relaxed));
        both[side] = value;
        store(word, of_halves(both));
    }
}

fn store(place: &AtomicU64, word: u64) {
    #[cfg(test)]
    super::tests::point();
    place.store(word, Release);
}

/// Low and high.
pub(super) fn halves(word: u64) -> [u32; 2] {
    let [b0, b1, b2, b3, b4, b5, b6, b7] = word.to_le_bytes();
    [u32::from_le_bytes([b0, b1, b2, b3]), u32::from_le_bytes([b4, b5, b6, b7])]
}

pub(super) fn of_halves([low, high]: [u32; 2]) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

//! Memory with one owner, parts of which another thread may read for a while.
//!
//! The rule that makes it sound: a part that is lent is neither written nor unmapped before the loan is over. Both are
//! checked here, whatever the owner does.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use memmap2::{MmapMut, MmapRaw};

use crate::vault::Extent;

/// Counts the beginnings and ends of one lender's loans: odd while one is out.
type Turns = Arc<AtomicU64>;

/// One loan, as the owner remembers it.
#[derive(Clone)]
pub(crate) struct Lending {
    turns: Turns,
    turn: u64,
}

impl Lending {
    /// Whether the parts are no longer read.
    pub(crate) fn is_over(&self) -> bool {
        self.turns.load(Acquire) != self.turn
    }

    fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.turns, &other.turns) && self.turn == other.turn
    }
}

struct Part {
    at: *const u8,
    len: usize,
}

// SAFETY: a part is memory that anyone may read while its loan is out; only `Parts` reads it, and only then.
unsafe impl Send for Part {}

/// What was lent, for the thread that reads it.
#[derive(Default)]
pub(crate) struct Parts {
    turns: Turns,
    parts: Vec<Part>,
}

impl Parts {
    /// With room for so many.
    pub(crate) fn with_capacity(parts: usize) -> Self {
        Self { turns: Turns::default(), parts: Vec::with_capacity(parts) }
    }

    /// How many.
    pub(crate) fn len(&self) -> usize {
        self.parts.len()
    }

    /// The part that was lent as the `index`th.
    pub(crate) fn get(&self, index: usize) -> &[u8] {
        let Part { at, len } = self.parts[index];
        // SAFETY: `Memory::lend` put it there, from memory of this length. There are parts only while the loan is out
        // (`end` and `drop` end it after taking them), and until then the memory is neither written nor unmapped.
        // `end` takes `&mut self`, so no slice is left by then.
        unsafe { std::slice::from_raw_parts(at, len) }
    }

    /// Gives everything back.
    pub(crate) fn end(&mut self) {
        self.parts.clear();
        let turn = self.turns.load(Relaxed);
        // Whoever sees the new number sees that all reading has been done.
        self.turns.store(turn + turn % 2, Release);
    }

    /// The loan that is out, or begins.
    fn lending(&mut self) -> Lending {
        let turn = self.turns.load(Relaxed) | 1;
        self.turns.store(turn, Relaxed);
        Lending { turns: Arc::clone(&self.turns), turn }
    }
}

impl Drop for Parts {
    fn drop(&mut self) {
        self.end();
    }
}

/// Where the memory is.
enum Place {
    /// A mapping of its own.
    Own(#[expect(dead_code, reason = "it unmaps when it is dropped")] MmapRaw),
    /// A part of a file that outlives this process.
    Extent(Extent),
}

/// See the module's documentation.
pub(crate) struct Memory {
    /// None only while it is dropped.
    place: Option<Place>,
    start: *mut u8,
    len: usize,
    /// The last loan that has parts of this, and which.
    lent: Option<(Lending, Vec<Range<usize>>)>,
}

impl Memory {
    pub(crate) fn new(map: MmapMut) -> Self {
        let map = MmapRaw::from(map);
        let (start, len) = (map.as_mut_ptr(), map.len());
        Self { place: Some(Place::Own(map)), start, len, lent: None }
    }

    /// The same, in memory that outlives this process.
    pub(crate) fn lasting(extent: Extent) -> Self {
        let (start, len) = (extent.area().start(), extent.area().len());
        Self { place: Some(Place::Extent(extent)), start, len, lent: None }
    }

    /// Where it is in memory that outlives this process, if it is there.
    pub(crate) fn extent(&self) -> Option<&Extent> {
        match &self.place {
            Some(Place::Extent(extent)) => Some(extent),
            Some(Place::Own(_)) | None => None,
        }
    }

    fn start(&self, range: &Range<usize>) -> *mut u8 {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} is within the memory");
        // SAFETY: the offset is within the mapping, which `place` holds.
        unsafe { self.start.add(range.start) }
    }

    /// Bytes of it.
    pub(crate) fn bytes(&self, range: Range<usize>) -> &[u8] {
        // SAFETY: within the mapping, which lives as long as the slice; writing takes `&mut self`.
        unsafe { std::slice::from_raw_parts(self.start(&range), range.len()) }
    }

    /// Bytes of it, to be written.
    ///
    /// # Panics
    /// When some of them are lent.
    pub(crate) fn bytes_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        if let Some((lending, lent)) = &mut self.lent
            && !lent.is_empty()
        {
            if lending.is_over() {
                lent.clear();
            }
            let meets = |part: &Range<usize>| part.start < range.end && range.start < part.end;
            assert!(!lent.iter().any(meets), "what is lent is not written");
        }
        // SAFETY: within the mapping, which lives as long as the slice; nobody else reads these bytes, as the owner's other
        // slices take `&self` and lent parts do not overlap.
        unsafe { std::slice::from_raw_parts_mut(self.start(&range), range.len()) }
    }

    /// Lends a part, to be read until the loan of all `parts` is over. Returns that loan.
    ///
    /// # Panics
    /// When a part is lent to someone else.
    pub(crate) fn lend(&mut self, range: Range<usize>, parts: &mut Parts) -> Lending {
        let lending = parts.lending();
        match &mut self.lent {
            Some((last, lent)) => {
                if !last.is_same(&lending) {
                    assert!(last.is_over(), "there is one loan at a time");
                    lent.clear();
                    *last = lending.clone();
                }
                lent.push(range.clone());
            }
            None => self.lent = Some((lending.clone(), vec![range.clone()])),
        }
        parts.parts.push(Part { at: self.start(&range), len: range.len() });
        lending
    }
}

// SAFETY: the pointer is that of `place`, which may go to any thread.
unsafe impl Send for Memory {}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.lent.as_ref().is_some_and(|(lending, lent)| !lent.is_empty() && !lending.is_over()) {
            // Somebody reads it: it stays.
            std::mem::forget(self.place.take());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory() -> Memory {
        let mut memory = Memory::new(MmapMut::map_anon(8192).unwrap());
        memory.bytes_mut(0..8192).fill(1);
        memory
    }

    #[test]
    fn what_is_lent_is_read_until_the_loan_is_over_and_then_written() {
        let (mut memory, mut parts) = (memory(), Parts::with_capacity(2));
        let lending = memory.lend(100..200, &mut parts);
        memory.lend(300..400, &mut parts);
        // What lies between is the owner's.
        memory.bytes_mut(200..300).fill(2);
        let reader = std::thread::spawn(move || {
            let read = (parts.get(0).to_vec(), parts.get(1).to_vec());
            parts.end();
            (read, parts)
        });
        let (read, mut parts) = reader.join().unwrap();
        assert_eq!(read, (vec![1; 100], vec![1; 100]));
        assert!(lending.is_over());
        memory.bytes_mut(100..400).fill(3);
        let next = memory.lend(100..101, &mut parts);
        assert!(lending.is_over() && !next.is_over());
        drop(parts);
        assert!(next.is_over());
    }

    #[test]
    #[should_panic(expected = "what is lent is not written")]
    fn what_is_lent_is_not_written() {
        let (mut memory, mut parts) = (memory(), Parts::default());
        memory.lend(100..200, &mut parts);
        memory.bytes_mut(199..200);
    }

    #[test]
    #[should_panic(expected = "one loan at a time")]
    fn parts_are_lent_to_one_at_a_time() {
        let (mut memory, mut one, mut two) = (memory(), Parts::default(), Parts::default());
        memory.lend(0..1, &mut one);
        memory.lend(1..2, &mut two);
    }

    #[test]
    fn memory_that_is_lent_stays_when_its_owner_goes() {
        let (mut memory, mut parts) = (memory(), Parts::default());
        memory.lend(0..4096, &mut parts);
        drop(memory);
        assert_eq!(parts.get(0), [1; 4096]);
    }
}

//! Handle to page: where its bytes are, their checksum, and how many references there are.
//!
//! Slots live in slabs that never move, so growing costs one small slab and no copy. A free slot is a link to the next
//! free one. Slabs are kept when slots are freed: 24 bytes a page of the largest number ever kept.

use std::ops::Deref;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Relaxed, Release};

use crate::arena::Place;
use crate::vault::{Slabs, Use, Vault};
use crate::{HANDLE_BITS, Handle};

/// Slots in a slab. Small, as whoever needs a new one waits while its 6 KiB are page-faulted and chained up.
const SLAB_SLOTS: u32 = 256;
/// Words that a slot is kept in: hash; place; references and length.
const WORDS: usize = 3;
pub(crate) const SLAB_WORDS: usize = SLAB_SLOTS as usize * WORDS;

/// Each word is one store; whatever names a slot is written after it.
enum Slab {
    Own(Box<[AtomicU64; SLAB_WORDS]>),
    /// In memory that outlives this process.
    Lasting(&'static [AtomicU64; SLAB_WORDS]),
}

impl Slab {
    fn lasting(words: &'static [AtomicU64]) -> Self {
        Self::Lasting(words.try_into().expect("a slab of words"))
    }
}

impl Deref for Slab {
    type Target = [AtomicU64; SLAB_WORDS];

    fn deref(&self) -> &Self::Target {
        match self {
            Self::Own(words) => words,
            Self::Lasting(words) => words,
        }
    }
}

/// References at which identical pages are stored again instead of sharing this one.
pub(crate) const REFS_MAX: u32 = u32::MAX / 2;
/// References at which the count sticks: only `share` leads here, four billion times, and as it is then unknown how
/// many there are, the page is kept for good.
pub(crate) const REFS_STUCK: u32 = u32::MAX;
/// Of a slot that was found, beside what was counted so far: whoever counts may be killed, and then it is found again.
const REFS_FOUND: u32 = 1 << 31;

/// One stored page.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Slot {
    /// [`crate::hash::PageHash`] of the page: dedupe key and checksum.
    pub(crate) hash: u64,
    /// Where the bytes are; in a free slot, `place.segment` is the next free slot.
    pub(crate) place: Place,
    /// References; zero in a free slot.
    refs: u32,
    /// Stored bytes.
    pub(crate) len: u16,
}

const SLAB_BYTES: u64 = SLAB_WORDS as u64 * 8;

impl Slot {
    /// A page with one reference.
    pub(crate) fn new(hash: u64, place: Place, len: u16) -> Self {
        Self { hash, place, refs: 1, len }
    }

    fn vacant(next: u32) -> Self {
        Self { place: Place { segment: next, offset: 0 }, ..Self::default() }
    }

    /// Whether there is no reference but one.
    pub(crate) fn is_sole(&self) -> bool {
        self.refs == 1
    }

    /// Whether one more identical page may share this one.
    pub(crate) fn has_room(&self) -> bool {
        self.refs < REFS_MAX
    }
}

/// All slots.
#[derive(Default)]
pub(crate) struct Slots {
    slabs: Vec<Slab>,
    /// Head of the free slots, as a handle's bits; zero when there is none.
    free: u32,
    /// Where slabs are to outlive this process.
    source: Option<Slabs>,
    /// What was found, until its references are counted.
    found: Vec<Handle>,
}

impl Slots {
    /// No slots, in memory that outlives this process.
    pub(crate) fn lasting(vault: &Vault) -> Self {
        Self { source: Some(Slabs::new(vault, Use::SLOTS)), ..Self::default() }
    }

    /// Slots that were found, each with its handle, unless it is free. Those for which `is_good` is false are free from now on;
    /// the others have no references yet ([`Slots::count`]).
    pub(crate) fn take_over(vault: &Vault, mut is_good: impl FnMut(Handle, Slot) -> bool) -> Self {
        let (found, source) = vault.slabs(Use::SLOTS);
        let slabs = found.into_iter().map(Slab::lasting).collect();
        let mut slots = Self { slabs, source: Some(source), ..Self::default() };
        let count = u32::try_from(slots.slabs.len()).unwrap_or(u32::MAX).saturating_mul(SLAB_SLOTS);
        for handle in (1..=count).rev().filter_map(Handle::from_bits) {
            let slot = slots.raw(handle);
            if slot.refs > 0 && is_good(handle, slot) {
                slots.set(handle, Slot { refs: REFS_FOUND, ..slot });
                slots.found.push(handle);
            } else {
                slots.vacate(handle);
            }
        }
        // In order, to be searched.
        slots.found.reverse();
        slots
    }

    /// Whether this was found.
    pub(crate) fn is_there(&self, handle: Handle) -> bool {
        self.found.binary_search_by_key(&handle.bits(), |found| found.bits()).is_ok()
    }

    /// One more reference, of those that were found.
    pub(crate) fn count(&mut self, handle: Handle) {
        let slot = self.raw(handle);
        self.set(handle, Slot { refs: slot.refs.saturating_add(1), ..slot });
    }

    /// Frees what was found and has no reference; what it held.
    pub(crate) fn drop_unnamed(&mut self) -> Vec<(Handle, Slot)> {
        let mut dropped = Vec::new();
        for handle in std::mem::take(&mut self.found) {
            let slot = self.raw(handle);
            match slot.refs {
                REFS_FOUND => {
                    self.vacate(handle);
                    dropped.push((handle, slot));
                }
                REFS_STUCK => {}
                counted => self.set(handle, Slot { refs: counted - REFS_FOUND, ..slot }),
            }
        }
        dropped
    }

    /// Bytes that one more slot would take now: zero, or a slab.
    pub(crate) fn growth_bytes(&self) -> u64 {
        if self.free == 0 { SLAB_BYTES } else { 0 }
    }

    /// Bytes taken.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.slabs.len() as u64 * SLAB_BYTES
    }

    /// Puts `slot` into a free slot; `None` when handles have run out.
    pub(crate) fn insert(&mut self, slot: Slot) -> Option<Handle> {
        if self.free == 0 {
            self.grow()?;
        }
        let handle = Handle::from_bits(self.free).expect("free slots have handles");
        self.free = self.raw(handle).place.segment;
        self.set(handle, slot);
        Some(handle)
    }

    /// One more reference.
    pub(crate) fn share(&mut self, handle: Handle) {
        let slot = self.get(handle);
        self.set(handle, Slot { refs: slot.refs.saturating_add(1), ..slot });
    }

    /// One reference less. What the slot held, when that was the last: its bytes are the caller's to free.
    pub(crate) fn release(&mut self, handle: Handle) -> Option<Slot> {
        let slot = self.get(handle);
        match slot.refs {
            REFS_STUCK => return None,
            1 => {}
            _ => {
                self.set(handle, Slot { refs: slot.refs - 1, ..slot });
                return None;
            }
        }
        self.vacate(handle);
        Some(slot)
    }

    pub(crate) fn get(&self, handle: Handle) -> Slot {
        let slot = self.raw(handle);
        assert!(slot.refs > 0, "{handle:?} was freed before");
        slot
    }

    /// Something else is behind `handle` from now on; its old content.
    pub(crate) fn replace(&mut self, handle: Handle, slot: Slot) -> Slot {
        let old = self.get(handle);
        self.set(handle, slot);
        old
    }

    /// Its bytes are here from now on, and are there already.
    pub(crate) fn set_place(&mut self, handle: Handle, place: Place) {
        self.words(handle)[1].store(u64::from(place.segment) << 32 | u64::from(place.offset), Release);
    }

    fn words(&self, handle: Handle) -> &[AtomicU64] {
        let (slab, at) = position(handle);
        &self.slabs[slab][at * WORDS..][..WORDS]
    }

    fn raw(&self, handle: Handle) -> Slot {
        let words = self.words(handle);
        let [hash, place, rest] = [0, 1, 2].map(|word: usize| words[word].load(Relaxed));
        let ([o0, o1, o2, o3, s0, s1, s2, s3], [l0, l1, _, _, r0, r1, r2, r3]) =
            (place.to_le_bytes(), rest.to_le_bytes());
        let (offset, segment) = (u32::from_le_bytes([o0, o1, o2, o3]), u32::from_le_bytes([s0, s1, s2, s3]));
        let (len, refs) = (u16::from_le_bytes([l0, l1]), u32::from_le_bytes([r0, r1, r2, r3]));
        Slot { hash, place: Place { segment, offset }, refs, len }
    }

    fn set(&self, handle: Handle, Slot { hash, place, refs, len }: Slot) {
        let words = self.words(handle);
        words[0].store(hash, Release);
        words[1].store(u64::from(place.segment) << 32 | u64::from(place.offset), Release);
        words[2].store(u64::from(refs) << 32 | u64::from(len), Release);
    }

    /// Nobody refers to a slot any more: it is the first of the free ones.
    fn vacate(&mut self, handle: Handle) {
        let words = self.words(handle);
        for (word, value) in vacating(self.free) {
            words[word].store(value, Release);
        }
        self.free = handle.bits();
    }

    fn grow(&mut self) -> Option<()> {
        // Handle zero does not exist: bits are positions plus one.
        let first = u32::try_from(self.slabs.len()).ok()?.checked_mul(SLAB_SLOTS)? + 1;
        let last = first + (SLAB_SLOTS - 1);
        if last >> HANDLE_BITS != 0 {
            return None;
        }
        self.slabs.push(match &mut self.source {
            Some(source) => Slab::lasting(source.take()?),
            None => Slab::Own(Box::new([const { AtomicU64::new(0) }; SLAB_WORDS])),
        });
        for handle in (first..=last).filter_map(Handle::from_bits) {
            let next = if handle.bits() == last { 0 } else { handle.bits() + 1 };
            self.set(handle, Slot::vacant(next));
        }
        self.free = first;
        Some(())
    }
}

/// What vacates a slot before the next free one: words in the order in which they are stored. References first: whoever is killed
/// between two stores must not leave a page whose place is a link, as that may be the place of another page.
pub(crate) fn vacating(next: u32) -> [(usize, u64); 3] {
    [(2, 0), (1, u64::from(next) << 32), (0, 0)]
}

fn position(handle: Handle) -> (usize, usize) {
    let at = handle.bits() - 1;
    ((at / SLAB_SLOTS) as usize, (at % SLAB_SLOTS) as usize)
}

#[cfg(test)]
impl Slots {
    /// As if this many references had been made.
    pub(crate) fn set_refs_to(&mut self, handle: Handle, refs: u32) {
        let slot = self.get(handle);
        self.set(handle, Slot { refs, ..slot });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(hash: u64) -> Slot {
        Slot::new(hash, Place::default(), 1)
    }

    #[test]
    fn slots_are_reused_and_keep_their_content() {
        let mut slots = Slots::default();
        let handles: Vec<_> = (0..3000).map(|n| slots.insert(slot(n)).unwrap()).collect();
        let memory_bytes = slots.memory_bytes();
        for handle in handles.iter().step_by(2) {
            assert!(slots.release(*handle).is_some());
        }
        for n in 0..1500 {
            slots.insert(slot(n + 10_000)).unwrap();
        }
        assert_eq!(slots.memory_bytes(), memory_bytes);
        for (n, handle) in handles.iter().enumerate().skip(1).step_by(2) {
            assert_eq!(slots.get(*handle).hash, n as u64);
        }
    }

    #[test]
    fn the_last_release_gives_the_slot_up() {
        let mut slots = Slots::default();
        let handle = slots.insert(slot(7)).unwrap();
        slots.share(handle);
        assert!(slots.release(handle).is_none());
        assert_eq!(slots.release(handle).map(|slot| slot.hash), Some(7));
    }

    #[test]
    fn a_count_that_overflows_sticks() {
        let mut slots = Slots::default();
        let handle = slots.insert(slot(7)).unwrap();
        slots.set_refs_to(handle, REFS_STUCK - 1);
        slots.share(handle);
        slots.share(handle);
        assert!(slots.release(handle).is_none());
        assert_eq!(slots.get(handle).refs, REFS_STUCK);
    }

    #[test]
    #[should_panic(expected = "was freed before")]
    fn a_freed_handle_is_a_bug() {
        let mut slots = Slots::default();
        let handle = slots.insert(slot(1)).unwrap();
        slots.release(handle);
        slots.get(handle);
    }
}

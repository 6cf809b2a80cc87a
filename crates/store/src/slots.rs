//! Handle to page: where its bytes are, their checksum, and how many references there are.
//!
//! Slots live in slabs that never move, so growing costs one small slab and no copy. A free slot is a link to the next
//! free one. Slabs are kept when slots are freed: 24 bytes a page of the largest number ever kept.

use crate::arena::Place;
use crate::{HANDLE_BITS, Handle};

/// Slots in a slab: 24 KiB, a few page faults when it is first filled.
const SLAB_SLOTS: usize = 1024;

/// One stored page.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Slot {
    /// [`crate::hash::PageHash`] of the page: dedupe key and checksum.
    pub(crate) hash: u64,
    /// Where the bytes are; in a free slot, `place.segment` is the next free slot.
    pub(crate) place: Place,
    /// References; zero in a free slot.
    pub(crate) refs: u32,
    /// Stored bytes.
    pub(crate) len: u16,
}

const _: () = assert!(size_of::<Slot>() == 24);

/// All slots.
#[derive(Default)]
pub(crate) struct Slots {
    slabs: Vec<Box<[Slot; SLAB_SLOTS]>>,
    /// Head of the free slots, as a handle's bits; zero when there is none.
    free: u32,
}

impl Slots {
    /// Bytes that one more slot would take now: zero, or a slab.
    pub(crate) fn growth_bytes(&self) -> u64 {
        if self.free == 0 { size_of::<[Slot; SLAB_SLOTS]>() as u64 } else { 0 }
    }

    /// Bytes taken.
    pub(crate) fn memory_bytes(&self) -> u64 {
        (self.slabs.len() * size_of::<[Slot; SLAB_SLOTS]>()) as u64
    }

    /// Puts `slot` into a free slot; `None` when handles have run out.
    pub(crate) fn insert(&mut self, slot: Slot) -> Option<Handle> {
        debug_assert!(slot.refs > 0);
        if self.free == 0 {
            self.grow()?;
        }
        let handle = Handle::from_bits(self.free).expect("free slots have handles");
        let free = self.raw_mut(handle);
        let next = free.place.segment;
        *free = slot;
        self.free = next;
        Some(handle)
    }

    /// Gives the slot up. Its bytes are the caller's to free.
    pub(crate) fn remove(&mut self, handle: Handle) {
        let next = self.free;
        *self.get_mut(handle) = Slot { place: Place { segment: next, offset: 0 }, ..Slot::default() };
        self.free = handle.bits();
    }

    pub(crate) fn get(&self, handle: Handle) -> &Slot {
        let (slab, at) = position(handle);
        let slot = &self.slabs[slab][at];
        assert!(slot.refs > 0, "{handle:?} was freed before");
        slot
    }

    pub(crate) fn get_mut(&mut self, handle: Handle) -> &mut Slot {
        let slot = self.raw_mut(handle);
        assert!(slot.refs > 0, "{handle:?} was freed before");
        slot
    }

    fn raw_mut(&mut self, handle: Handle) -> &mut Slot {
        let (slab, at) = position(handle);
        &mut self.slabs[slab][at]
    }

    fn grow(&mut self) -> Option<()> {
        // Handle zero does not exist: bits are positions plus one.
        let first = u32::try_from(self.slabs.len() * SLAB_SLOTS).ok()? + 1;
        let last = first + (SLAB_SLOTS as u32 - 1);
        if last >> HANDLE_BITS != 0 {
            return None;
        }
        let mut slab = vec![Slot::default(); SLAB_SLOTS];
        for (slot, next) in slab.iter_mut().zip(first + 1..=last) {
            slot.place.segment = next;
        }
        self.slabs.push(slab.try_into().expect("as long as a slab"));
        self.free = first;
        Some(())
    }
}

fn position(handle: Handle) -> (usize, usize) {
    let at = handle.bits() as usize - 1;
    (at / SLAB_SLOTS, at % SLAB_SLOTS)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(hash: u64) -> Slot {
        Slot { hash, refs: 1, ..Slot::default() }
    }

    #[test]
    fn slots_are_reused_and_keep_their_content() {
        let mut slots = Slots::default();
        let handles: Vec<_> = (0..3000).map(|n| slots.insert(slot(n)).unwrap()).collect();
        let memory_bytes = slots.memory_bytes();
        for handle in handles.iter().step_by(2) {
            slots.remove(*handle);
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
    #[should_panic(expected = "was freed before")]
    fn a_freed_handle_is_a_bug() {
        let mut slots = Slots::default();
        let handle = slots.insert(slot(1)).unwrap();
        slots.remove(handle);
        slots.get(handle);
    }
}

//! Handle to page: where its bytes are, their checksum, and how many references there are.
//!
//! Slots live in slabs that never move, so growing costs one small slab and no copy. A free slot is a link to the next
//! free one. Slabs are kept when slots are freed: 24 bytes a page of the largest number ever kept.

use crate::arena::Place;
use crate::{HANDLE_BITS, Handle};

/// Slots in a slab. Small, as whoever needs a new one waits while its 6 KiB are page-faulted and chained up.
const SLAB_SLOTS: u32 = 256;
type Slab = [Slot; SLAB_SLOTS as usize];

/// References at which identical pages are stored again instead of sharing this one.
pub(crate) const REFS_MAX: u32 = u32::MAX / 2;
/// References at which the count sticks: only `share` leads here, four billion times, and as it is then unknown how
/// many there are, the page is kept for good.
pub(crate) const REFS_STUCK: u32 = u32::MAX;

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

const _: () = assert!(size_of::<Slot>() == 24);

impl Slot {
    /// A page with one reference.
    pub(crate) fn new(hash: u64, place: Place, len: u16) -> Self {
        Self { hash, place, refs: 1, len }
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
    slabs: Vec<Box<Slab>>,
    /// Head of the free slots, as a handle's bits; zero when there is none.
    free: u32,
}

impl Slots {
    /// Bytes that one more slot would take now: zero, or a slab.
    pub(crate) fn growth_bytes(&self) -> u64 {
        if self.free == 0 { size_of::<Slab>() as u64 } else { 0 }
    }

    /// Bytes taken.
    pub(crate) fn memory_bytes(&self) -> u64 {
        (self.slabs.len() * size_of::<Slab>()) as u64
    }

    /// Puts `slot` into a free slot; `None` when handles have run out.
    pub(crate) fn insert(&mut self, slot: Slot) -> Option<Handle> {
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

    /// One more reference.
    pub(crate) fn share(&mut self, handle: Handle) {
        let slot = self.get_mut(handle);
        slot.refs = slot.refs.saturating_add(1);
    }

    /// One reference less. What the slot held, when that was the last: its bytes are the caller's to free.
    pub(crate) fn release(&mut self, handle: Handle) -> Option<Slot> {
        let next = self.free;
        let slot = self.get_mut(handle);
        match slot.refs {
            REFS_STUCK => return None,
            1 => {}
            _ => {
                slot.refs -= 1;
                return None;
            }
        }
        let held = *slot;
        *slot = Slot { place: Place { segment: next, offset: 0 }, ..Slot::default() };
        self.free = handle.bits();
        Some(held)
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
        let first = u32::try_from(self.slabs.len()).ok()?.checked_mul(SLAB_SLOTS)? + 1;
        let last = first + (SLAB_SLOTS - 1);
        if last >> HANDLE_BITS != 0 {
            return None;
        }
        let mut slab = vec![Slot::default(); SLAB_SLOTS as usize];
        for (slot, next) in slab.iter_mut().zip(first + 1..=last) {
            slot.place.segment = next;
        }
        self.slabs.push(slab.try_into().expect("as long as a slab"));
        self.free = first;
        Some(())
    }
}

fn position(handle: Handle) -> (usize, usize) {
    let at = handle.bits() - 1;
    ((at / SLAB_SLOTS) as usize, (at % SLAB_SLOTS) as usize)
}

#[cfg(test)]
impl Slots {
    /// As if this many references had been made.
    pub(crate) fn set_refs_to(&mut self, handle: Handle, refs: u32) {
        self.get_mut(handle).refs = refs;
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

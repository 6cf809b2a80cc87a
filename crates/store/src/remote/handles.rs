//! Handle to page: which server keeps it, its checksum, how many references there are, and what is under way.
//!
//! Slots live in segments that never move, 16 bytes a page of the largest number ever kept. A handle is given anew only
//! after everything under way for it has ended and the server has forgotten its page ([`State`]), so no late answer can
//! be taken for a newer page's. Segments come from a reserve that [`Handles::top_up`] fills in idle moments.

use super::ledger::{Entry, Ledger, Stage};
use crate::{HANDLE_BITS, Handle};

/// Slots in a segment: 64 KiB.
const SEGMENT_SLOTS: u32 = 4096;
type Segment = [Slot; SEGMENT_SLOTS as usize];
const SEGMENTS_MAX: usize = (1 << HANDLE_BITS) / SEGMENT_SLOTS as usize;
/// Segments in reserve: 8192 pages, which at 100,000 puts a second last 80 ms.
const RESERVE: usize = 2;
/// A count that has reached this is not known any more, and its page is kept for good.
const REFERENCES_STUCK: u16 = u16::MAX;

/// The life of a handle.
///
/// ```text
/// Free --put--> Putting --kept--> Kept --get--> Getting --came--> Kept
///               Putting --declined--> Free, or Leaving where the server may have it
/// Kept, Getting --lose--> Lost --last reference--> Free
/// Kept --last reference--> Leaving --forgotten--> Free
/// Putting, Getting --last reference--> the same, abandoned, until the answer: then Leaving
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum State {
    /// Given to no one.
    #[default]
    Free,
    /// On its way to the server.
    Putting,
    /// At the server.
    Kept,
    /// At the server, and asked for.
    Getting,
    /// No one refers to it; the server is to forget it.
    Leaving,
    /// Gone.
    Lost,
}

/// One stored page.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Slot {
    /// [`crate::hash::PageHash`] of the page. In a free or leaving slot, the next handle of the list it is in.
    pub(crate) checksum: u64,
    /// When it was put, as the server counts: a part of the page's name there.
    pub(crate) epoch: u16,
    references: u16,
    /// What is under way for it, while that is so.
    pub(crate) op: u16,
    /// Where it is.
    pub(crate) server: u8,
    /// What it is doing.
    pub(crate) state: State,
}

const _: () = assert!(size_of::<Slot>() == 16);

impl Slot {
    /// A page that is on its way to a server.
    pub(crate) fn putting(checksum: u64, server: u8) -> Self {
        Self { checksum, server, state: State::Putting, ..Self::default() }
    }
}

/// All slots.
pub(crate) struct Handles {
    segments: Vec<Box<Segment>>,
    reserve: Vec<Box<Segment>>,
    free: List,
    /// References held.
    pub(crate) references: u64,
    /// For whoever takes over.
    pub(crate) ledger: Option<Ledger>,
}

/// Handles in a row, linked through their slots.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct List {
    first: u32,
    count: u32,
}

impl List {
    /// Whether there is none.
    pub(crate) fn is_empty(self) -> bool {
        self.first == 0
    }

    /// How many there are.
    pub(crate) fn len(self) -> usize {
        self.count as usize
    }
}

impl Handles {
    /// None given yet; a reserve ready.
    pub(crate) fn new() -> Self {
        let mut handles = Self {
            // Room for all segments there can be: 2 MiB of addresses, of which only what is used becomes memory.
            segments: Vec::with_capacity(SEGMENTS_MAX),
            reserve: Vec::with_capacity(RESERVE),
            free: List::default(),
            references: 0,
            ledger: None,
        };
        while handles.top_up() {}
        handles
    }

    /// None given yet; all are written down.
    pub(crate) fn lasting(ledger: Ledger) -> Self {
        Self { ledger: Some(ledger), ..Self::new() }
    }

    /// What was left, without references: those pages that so many servers keep, and those that they may have. Both are to be
    /// counted ([`Handles::count`]) or recycled.
    pub(crate) fn take_over(ledger: Ledger, servers: usize) -> (Self, Vec<Handle>) {
        let left: Vec<(Handle, Entry)> =
            ledger.entries().filter(|(_, entry)| usize::from(entry.server) < servers).collect();
        let mut handles = Self::lasting(ledger);
        let most = left.last().map_or(0, |(handle, _)| handle.bits());
        while handles.len() < most && handles.grow().is_some() {}
        for &(handle, Entry { checksum, epoch, server, stage }) in &left {
            let state = if stage == Stage::Kept { State::Kept } else { State::Putting };
            *handles.slot_mut(handle) = Slot { checksum, epoch, server, state, ..Slot::default() };
        }
        let mut free = List::default();
        for handle in (1..=handles.len()).rev().filter_map(Handle::from_bits) {
            if handles.slot(handle).state == State::Free {
                handles.push(&mut free, handle);
            }
        }
        handles.free = free;
        (handles, left.into_iter().map(|(handle, _)| handle).collect())
    }

    /// One more reference, of those that were found.
    pub(crate) fn count(&mut self, handle: Handle) {
        let slot = self.slot_mut(handle);
        slot.references = slot.references.saturating_add(1);
        self.references += 1;
    }

    /// The page is about to be sent to its server.
    pub(crate) fn sent(&mut self, handle: Handle, epoch: u16) {
        self.slot_mut(handle).epoch = epoch;
        self.write_down(handle, Stage::Sent);
    }

    /// Its server keeps the page.
    pub(crate) fn kept(&mut self, handle: Handle) {
        self.slot_mut(handle).state = State::Kept;
        self.write_down(handle, Stage::Kept);
    }

    /// Another server keeps it.
    pub(crate) fn carried(&mut self, handle: Handle, server: u8, epoch: u16) {
        let slot = self.slot_mut(handle);
        (slot.server, slot.epoch) = (server, epoch);
        self.write_down(handle, Stage::Kept);
    }

    fn write_down(&mut self, handle: Handle, stage: Stage) {
        let Slot { checksum, epoch, server, .. } = *self.slot(handle);
        self.ledger.iter_mut().for_each(|ledger| ledger.set(handle, Entry { checksum, epoch, server, stage }));
    }

    /// Fills up the reserve by one segment. Returns whether there is more to do.
    pub(crate) fn top_up(&mut self) -> bool {
        if self.reserve.len() < RESERVE {
            self.reserve.push(segment());
        }
        self.reserve.len() < RESERVE
    }

    /// Bytes taken.
    pub(crate) fn memory_bytes(&self) -> u64 {
        ((self.segments.len() + self.reserve.len()) * size_of::<Segment>()) as u64
    }

    /// A handle with one reference; `None` when they have run out.
    pub(crate) fn insert(&mut self, slot: Slot) -> Option<Handle> {
        if self.free.is_empty() {
            self.grow()?;
        }
        let mut free = self.free;
        let handle = self.pop(&mut free).expect("it is not empty");
        self.free = free;
        *self.slot_mut(handle) = Slot { references: 1, ..slot };
        self.references += 1;
        Some(handle)
    }

    /// One more reference.
    pub(crate) fn share(&mut self, handle: Handle) {
        let slot = self.get_mut(handle);
        slot.references = slot.references.saturating_add(1);
        self.references += 1;
    }

    /// One reference less. Returns whether that was the last one: the slot then stays as it is, for the caller to end.
    pub(crate) fn release(&mut self, handle: Handle) -> bool {
        self.references -= 1;
        let slot = self.get_mut(handle);
        if slot.references != REFERENCES_STUCK {
            slot.references -= 1;
        }
        slot.references == 0
    }

    /// All references less.
    pub(crate) fn release_all(&mut self, handle: Handle) {
        let slot = self.slot_mut(handle);
        let references = std::mem::take(&mut slot.references);
        self.references -= u64::from(references);
    }

    /// Whether nobody refers to it any more.
    pub(crate) fn is_abandoned(&self, handle: Handle) -> bool {
        self.slot(handle).references == 0
    }

    /// Gives a slot without references back.
    pub(crate) fn recycle(&mut self, handle: Handle) {
        let slot = self.slot_mut(handle);
        assert!(slot.references == 0 && slot.state != State::Free, "{handle:?} is not to be recycled: {slot:?}");
        *slot = Slot::default();
        self.ledger.iter_mut().for_each(|ledger| ledger.clear(handle));
        let mut free = self.free;
        self.push(&mut free, handle);
        self.free = free;
    }

    /// The slot of a handle that someone holds.
    pub(crate) fn get_mut(&mut self, handle: Handle) -> &mut Slot {
        let slot = self.slot_mut(handle);
        assert!(slot.references > 0, "{handle:?} was freed before");
        slot
    }

    /// How many slots there are; handles are 1 to that.
    pub(crate) fn len(&self) -> u32 {
        u32::try_from(self.segments.len()).expect("few") * SEGMENT_SLOTS
    }

    /// Those that someone refers to.
    pub(crate) fn held(&self) -> impl Iterator<Item = Handle> + '_ {
        let slots = self.segments.iter().flat_map(|segment| segment.iter());
        let held = (1..).zip(slots).filter(|(_, slot)| slot.references > 0);
        held.filter_map(|(bits, _)| Handle::from_bits(bits))
    }

    /// Puts a slot at a list's head.
    pub(crate) fn push(&mut self, list: &mut List, handle: Handle) {
        self.slot_mut(handle).checksum = u64::from(list.first);
        list.first = handle.bits();
        list.count += 1;
    }

    /// Takes a slot from a list's head.
    pub(crate) fn pop(&mut self, list: &mut List) -> Option<Handle> {
        let handle = Handle::from_bits(list.first)?;
        list.first = u32::try_from(self.slot(handle).checksum).expect("a link");
        list.count -= 1;
        Some(handle)
    }

    /// A slot, whoever holds it.
    pub(crate) fn slot(&self, handle: Handle) -> &Slot {
        let (segment, at) = position(handle);
        &self.segments[segment][at]
    }

    /// A slot, whoever holds it.
    pub(crate) fn slot_mut(&mut self, handle: Handle) -> &mut Slot {
        let (segment, at) = position(handle);
        &mut self.segments[segment][at]
    }

    fn grow(&mut self) -> Option<()> {
        if self.segments.len() + 1 >= SEGMENTS_MAX {
            return None;
        }
        let mut slots = self.reserve.pop().unwrap_or_else(segment);
        // Handle zero does not exist: bits are positions plus one.
        let first = u32::try_from(self.segments.len()).ok()? * SEGMENT_SLOTS + 1;
        for (slot, next) in slots.iter_mut().zip(first + 1..first + SEGMENT_SLOTS) {
            slot.checksum = u64::from(next);
        }
        self.segments.push(slots);
        self.free = List { first, count: SEGMENT_SLOTS };
        Some(())
    }
}

fn segment() -> Box<Segment> {
    vec![Slot::default(); SEGMENT_SLOTS as usize].try_into().expect("as long as a segment")
}

fn position(handle: Handle) -> (usize, usize) {
    let at = handle.bits() - 1;
    ((at / SEGMENT_SLOTS) as usize, (at % SEGMENT_SLOTS) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(checksum: u64) -> Slot {
        Slot { checksum, state: State::Kept, ..Slot::default() }
    }

    #[test]
    fn handles_are_given_again_after_they_were_recycled() {
        let mut handles = Handles::new();
        let given: Vec<Handle> = (0..10_000).map(|n| handles.insert(kept(n)).unwrap()).collect();
        let memory_bytes = handles.memory_bytes();
        for handle in given.iter().step_by(2) {
            assert!(handles.release(*handle));
            handles.recycle(*handle);
        }
        let again: Vec<Handle> = (0..5000).map(|n| handles.insert(kept(n)).unwrap()).collect();
        assert!(again.iter().all(|handle| handle.bits() % 2 == 1));
        assert_eq!((handles.memory_bytes(), handles.references), (memory_bytes, 10_000));
        for (n, handle) in given.iter().enumerate().skip(1).step_by(2) {
            assert_eq!(handles.slot(*handle).checksum, n as u64);
        }
    }

    #[test]
    fn the_last_reference_is_told() {
        let mut handles = Handles::new();
        let handle = handles.insert(kept(7)).unwrap();
        handles.share(handle);
        assert!(!handles.release(handle));
        assert!(handles.release(handle));
        assert!(handles.is_abandoned(handle));
    }

    #[test]
    fn a_count_that_overflows_keeps_the_page() {
        let mut handles = Handles::new();
        let handle = handles.insert(kept(7)).unwrap();
        for _ in 0..70_000 {
            handles.share(handle);
        }
        for _ in 0..70_000 {
            assert!(!handles.release(handle));
        }
        assert_eq!(handles.slot(handle).checksum, 7);
    }

    #[test]
    fn the_reserve_is_used_and_filled_up() {
        let mut handles = Handles::new();
        assert!(!handles.top_up());
        handles.insert(kept(1)).unwrap();
        assert_eq!(handles.reserve.len(), RESERVE - 1);
        assert!(!handles.top_up());
        assert_eq!(handles.reserve.len(), RESERVE);
    }

    #[test]
    #[should_panic(expected = "was freed before")]
    fn a_freed_handle_is_a_bug() {
        let mut handles = Handles::new();
        let handle = handles.insert(kept(1)).unwrap();
        handles.release(handle);
        handles.recycle(handle);
        handles.get_mut(handle);
    }
}

//! Chunks of pages by number: what the page table and the queues of policies are kept in.
//!
//! A chunk exists only where a page needs it, so a sparse region costs what it touches. It stays in its slot as long as it
//! lives. Chunks come from a stock that is refilled outside the fault path ([`Chunks::restock`]), and go back to it.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::{Deref, DerefMut};

use crate::units::PageIndex;

/// Pages in a chunk: 2 MiB of address space.
pub const CHUNK_PAGES: usize = 512;
pub(crate) const CHUNK_PAGES_U64: u64 = CHUNK_PAGES as u64;

/// What a chunk holds of its pages.
pub(crate) trait Holds {
    /// Nothing of any page.
    fn nothing() -> Self;

    /// Makes it hold nothing again, when it holds nothing of any page that counts.
    fn clear(&mut self) {}
}

/// A chunk, which is what it holds and where that belongs.
pub(crate) struct Chunk<C> {
    /// Which one: its first page, divided by [`CHUNK_PAGES`].
    pub(crate) number: u64,
    holds: C,
}

impl<C> Deref for Chunk<C> {
    type Target = C;

    fn deref(&self) -> &C {
        &self.holds
    }
}

impl<C> DerefMut for Chunk<C> {
    fn deref_mut(&mut self) -> &mut C {
        &mut self.holds
    }
}

/// Chunk numbers are small integers that nobody outside chooses: one multiplication spreads them.
#[derive(Default)]
struct ChunkHasher(u64);

impl Hasher for ChunkHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("only chunk numbers are hashed");
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = number.wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(26);
    }
}

/// See the module's documentation.
pub(crate) struct Chunks<C> {
    chunks: Vec<Option<Box<Chunk<C>>>>,
    vacant: Vec<usize>,
    slots: HashMap<u64, usize, BuildHasherDefault<ChunkHasher>>,
    stock: Vec<Box<Chunk<C>>>,
}

impl<C> Default for Chunks<C> {
    fn default() -> Self {
        Self { chunks: Vec::new(), vacant: Vec::new(), slots: HashMap::default(), stock: Vec::new() }
    }
}

impl<C: Holds> Chunks<C> {
    /// Chunks there are.
    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Slots there are, with chunks or without.
    pub(crate) fn slots(&self) -> usize {
        self.chunks.len()
    }

    /// The numbers of the chunks there are, in no order.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = u64> {
        self.slots.keys().copied()
    }

    /// The slot of a chunk.
    pub(crate) fn slot(&self, number: u64) -> Option<usize> {
        self.slots.get(&number).copied()
    }

    /// The chunk of a number.
    pub(crate) fn find(&self, number: u64) -> Option<&Chunk<C>> {
        self.slot(number).and_then(|slot| self.get(slot))
    }

    /// The chunk in a slot, which may be beyond the last.
    pub(crate) fn get(&self, slot: usize) -> Option<&Chunk<C>> {
        self.chunks.get(slot)?.as_deref()
    }

    /// The same, to be changed.
    pub(crate) fn get_mut(&mut self, slot: usize) -> Option<&mut Chunk<C>> {
        self.chunks.get_mut(slot)?.as_deref_mut()
    }

    /// The slot of a chunk, which is made if need be.
    pub(crate) fn slot_or_new(&mut self, number: u64) -> usize {
        match self.slots.get(&number) {
            Some(&slot) => slot,
            None => self.add(number),
        }
    }

    fn add(&mut self, number: u64) -> usize {
        let mut chunk = self.stock.pop().unwrap_or_else(Self::fresh);
        chunk.number = number;
        let slot = self.vacant.pop().unwrap_or_else(|| {
            self.chunks.push(None);
            self.chunks.len() - 1
        });
        self.chunks[slot] = Some(chunk);
        self.slots.insert(number, slot);
        slot
    }

    fn fresh() -> Box<Chunk<C>> {
        Box::new(Chunk { number: 0, holds: C::nothing() })
    }

    /// Gives back the chunk in a slot, which nobody needs any more; to the stock, if that has fewer than `most`.
    pub(crate) fn remove(&mut self, slot: usize, most: usize) {
        let mut chunk = self.chunks[slot].take().expect("its last page was just given up");
        self.slots.remove(&chunk.number);
        self.vacant.push(slot);
        if self.stock.len() < most {
            chunk.clear();
            self.stock.push(chunk);
        }
    }

    /// Refills the stock. Allocates: call it when no fault waits.
    pub(crate) fn restock(&mut self, wanted: usize) {
        while self.stock.len() < wanted {
            self.stock.push(Self::fresh());
        }
        self.chunks.reserve(wanted);
        self.vacant.reserve(wanted);
        self.slots.reserve(wanted);
    }

    /// Chunks there are, and in stock.
    pub(crate) fn held(&self) -> usize {
        self.slots.len() + self.stock.len()
    }

    /// Bytes occupied.
    pub(crate) fn bytes(&self) -> u64 {
        let chunks = self.held() * size_of::<Chunk<C>>();
        let index = self.slots.capacity() * size_of::<(u64, usize)>() + self.chunks.capacity() * size_of::<usize>();
        (chunks + index) as u64
    }
}

/// The chunk that a page is in, and where in it.
pub(crate) fn split(page: PageIndex) -> (u64, usize) {
    (page.0 / CHUNK_PAGES_U64, usize::try_from(page.0 % CHUNK_PAGES_U64).expect("below 512"))
}

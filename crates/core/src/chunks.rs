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
    /// Where to look before `slots`: the slot of the newest chunk by the low bits of its number. It may be another's by now. Numbers
    /// come in rows, so that most are found here: one line of memory, where a hash table takes two.
    newest: Vec<u32>,
    stock: Vec<Box<Chunk<C>>>,
}

impl<C> Default for Chunks<C> {
    fn default() -> Self {
        Self {
            chunks: Vec::new(),
            vacant: Vec::new(),
            slots: HashMap::default(),
            newest: vec![0; 1],
            stock: Vec::new(),
        }
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
    #[inline]
    pub(crate) fn slot(&self, number: u64) -> Option<usize> {
        let newest = self.newest[self.place(number)] as usize;
        match self.get(newest) {
            Some(chunk) if chunk.number == number => Some(newest),
            _ => self.older(number),
        }
    }

    #[cold]
    fn older(&self, number: u64) -> Option<usize> {
        self.slots.get(&number).copied()
    }

    /// Its place in `newest`, the length of which is a power of two.
    fn place(&self, number: u64) -> usize {
        usize::try_from(number & (self.newest.len() as u64 - 1)).expect("below a length")
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
        self.slot(number).unwrap_or_else(|| self.add(number))
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
        let place = self.place(number);
        self.newest[place] = small(slot);
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
        let places = self.chunks.capacity().next_power_of_two();
        if self.newest.len() < places {
            self.newest = vec![0; places];
            for (&number, &slot) in &self.slots {
                let place = self.place(number);
                self.newest[place] = small(slot);
            }
        }
    }

    /// Chunks there are, and in stock.
    pub(crate) fn held(&self) -> usize {
        self.slots.len() + self.stock.len()
    }

    /// Bytes occupied.
    pub(crate) fn bytes(&self) -> u64 {
        let chunks = self.held() * size_of::<Chunk<C>>();
        let index = self.slots.capacity() * size_of::<(u64, usize)>() + self.chunks.capacity() * size_of::<usize>();
        let index = index + self.newest.len() * size_of::<u32>();
        (chunks + index) as u64
    }
}

fn small(slot: usize) -> u32 {
    u32::try_from(slot).expect("chunks of memory that there can be are fewer")
}

/// The chunk that a page is in, and where in it.
pub(crate) fn split(page: PageIndex) -> (u64, usize) {
    (page.0 / CHUNK_PAGES_U64, usize::try_from(page.0 % CHUNK_PAGES_U64).expect("below 512"))
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Holds for u64 {
        fn nothing() -> Self {
            0
        }
    }

    /// Numbers in a row, and others that agree with them in all low bits, come and go in an order that looks like chance.
    #[test]
    fn a_chunk_is_found_by_its_number_whichever_came_and_went_before() {
        let mut chunks = Chunks::<u64>::default();
        let mut model = HashMap::new();
        let mut random = 1_u64;
        for step in 0..20_000_u64 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let number = (random >> 33) % 40 + (((random >> 50) % 3) << 32);
            match chunks.slot(number) {
                Some(slot) if random >> 62 == 0 => {
                    chunks.remove(slot, 4);
                    model.remove(&number);
                }
                _ => {
                    let slot = chunks.slot_or_new(number);
                    **chunks.get_mut(slot).expect("it is there") = step;
                    model.insert(number, step);
                }
            }
            if step % 256 == 0 {
                chunks.restock(4);
            }
            for number in (0..40).flat_map(|low| [0, 1, 2].map(|high| low + (high << 32))) {
                assert_eq!(chunks.find(number).map(|chunk| **chunk), model.get(&number).copied(), "{number}");
            }
        }
        assert!(model.len() > 20 && chunks.len() == model.len());
    }
}

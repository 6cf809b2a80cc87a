//! Finds stored pages by hash.
//!
//! Many small open-addressed tables: growing one moves its few entries and no others, so no put waits long. An entry
//! is half of the hash and a handle, so moving entries and passing over strangers never touches the (cold) slots.

use crate::Handle;

/// Tables: 4 million pages make a thousand entries each.
const SHARD_BITS: u32 = 12;
/// A table's smallest size: one cache line.
const TABLE_MIN: usize = 8;

/// Where each distinct page is, by hash.
pub(crate) struct Index {
    shards: Box<[Shard]>,
    memory_bytes: u64,
}

impl Index {
    pub(crate) fn new() -> Self {
        let shards: Box<[Shard]> = (0..1 << SHARD_BITS).map(|_| Shard::default()).collect();
        let memory_bytes = size_of_val(&*shards) as u64;
        Self { shards, memory_bytes }
    }

    /// Bytes taken.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.memory_bytes
    }

    /// Bytes that one more page of this hash would take now: mostly zero, or as much as its table has.
    pub(crate) fn growth_bytes(&self, hash: u64) -> u64 {
        let shard = &self.shards[shard_of(hash)];
        if shard.is_full() { table_bytes(shard.doubled() - shard.table.len()) } else { 0 }
    }

    /// The first page that `is_it` takes of those that may have this hash: half of it is compared here.
    pub(crate) fn find(&self, hash: u64, mut is_it: impl FnMut(Handle) -> bool) -> Option<Handle> {
        let shard = &self.shards[shard_of(hash)];
        let mut entries = shard.positions(tag_of(hash)).map_while(|at| shard.table[at].handle_of(tag_of(hash)));
        entries.find_map(|handle| handle.filter(|handle| is_it(*handle)))
    }

    /// Adds a page. One hash may have several.
    pub(crate) fn insert(&mut self, hash: u64, handle: Handle) {
        let shard = &mut self.shards[shard_of(hash)];
        if shard.is_full() {
            self.memory_bytes += table_bytes(shard.doubled() - shard.table.len());
            shard.resize(shard.doubled());
        }
        shard.insert(Entry::new(tag_of(hash), handle));
        shard.len += 1;
    }

    /// Takes a page out that was inserted under this hash.
    pub(crate) fn remove(&mut self, hash: u64, handle: Handle) {
        let shard = &mut self.shards[shard_of(hash)];
        shard.remove(Entry::new(tag_of(hash), handle));
        // Far below what doubles it, lest it go to and fro.
        if shard.len * 8 < shard.table.len() && shard.table.len() > TABLE_MIN {
            self.memory_bytes -= table_bytes(shard.table.len() / 2);
            shard.resize(shard.table.len() / 2);
        }
    }
}

fn table_bytes(entries: usize) -> u64 {
    (entries * size_of::<Entry>()) as u64
}

fn shard_of(hash: u64) -> usize {
    usize::try_from(hash >> (u64::BITS - SHARD_BITS)).expect("twelve bits")
}

/// The half that entries keep; of the other, the top chooses the table.
fn tag_of(hash: u64) -> u32 {
    low(hash)
}

fn low(bits: u64) -> u32 {
    u32::try_from(bits & u64::from(u32::MAX)).expect("masked")
}

/// Half a hash and a handle; zero is empty, as handles are not zero.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Entry(u64);

impl Entry {
    fn new(tag: u32, handle: Handle) -> Self {
        Self(u64::from(tag) << 32 | u64::from(handle.bits()))
    }

    fn tag(self) -> u32 {
        low(self.0 >> 32)
    }

    /// `None` ends a search; otherwise the handle, if the tag is this.
    fn handle_of(self, tag: u32) -> Option<Option<Handle>> {
        let handle = Handle::from_bits(low(self.0))?;
        Some((self.tag() == tag).then_some(handle))
    }
}

/// One table: linear probing, removal by moving followers back, so there are no tombstones to sweep.
#[derive(Default)]
struct Shard {
    table: Box<[Entry]>,
    len: usize,
}

impl Shard {
    /// One more would leave less than an eighth empty.
    fn is_full(&self) -> bool {
        (self.len + 1) * 8 > self.table.len() * 7
    }

    fn doubled(&self) -> usize {
        (self.table.len() * 2).max(TABLE_MIN)
    }

    /// Where entries of this tag may be, nearest first.
    fn positions(&self, tag: u32) -> impl Iterator<Item = usize> + use<> {
        let (size, home) = (self.table.len(), tag as usize);
        (0..size).map(move |step| (home + step) & (size - 1))
    }

    fn insert(&mut self, entry: Entry) {
        let mask = self.table.len() - 1;
        let mut at = entry.tag() as usize & mask;
        while self.table[at] != Entry::default() {
            at = (at + 1) & mask;
        }
        self.table[at] = entry;
    }

    fn remove(&mut self, entry: Entry) {
        let mask = self.table.len() - 1;
        let mut hole = entry.tag() as usize & mask;
        while self.table[hole] != entry {
            assert!(self.table[hole] != Entry::default(), "every stored page is in the index");
            hole = (hole + 1) & mask;
        }
        let mut at = hole;
        loop {
            at = (at + 1) & mask;
            let follower = self.table[at];
            if follower == Entry::default() {
                break;
            }
            // It may move back unless its home lies between the hole and itself.
            let home = follower.tag() as usize & mask;
            if at.wrapping_sub(home) & mask >= at.wrapping_sub(hole) & mask {
                self.table[hole] = follower;
                hole = at;
            }
        }
        self.table[hole] = Entry::default();
        self.len -= 1;
    }

    fn resize(&mut self, size: usize) {
        let old = std::mem::replace(&mut self.table, vec![Entry::default(); size].into_boxed_slice());
        for entry in old.iter().filter(|entry| **entry != Entry::default()) {
            self.insert(*entry);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn handle(bits: u32) -> Handle {
        Handle::from_bits(bits).unwrap()
    }

    /// All of a hash's pages, in any order.
    fn all(index: &Index, hash: u64) -> Vec<u32> {
        let mut found = Vec::new();
        index.find(hash, |handle| {
            found.push(handle.bits());
            false
        });
        found.sort_unstable();
        found
    }

    #[test]
    fn pages_are_found_until_removed_and_memory_is_returned() {
        let mut index = Index::new();
        let empty_bytes = index.memory_bytes();
        // One table, so that it grows far and entries displace each other; few homes, so that they also wrap around.
        let hash = |n: u32| u64::from(n % 50 * 0x1001);
        for n in 1..=4000 {
            let expected = index.memory_bytes() + index.growth_bytes(hash(n));
            index.insert(hash(n), handle(n));
            assert_eq!(index.memory_bytes(), expected);
        }
        for n in (1..=4000).filter(|n| n % 3 != 0) {
            index.remove(hash(n), handle(n));
        }
        for n in 1..=50 {
            let expected: Vec<u32> = (1..=4000).filter(|m| m % 3 == 0 && m % 50 == n % 50).collect();
            assert_eq!(all(&index, hash(n)), expected);
        }
        for n in (1..=4000).filter(|n| n % 3 == 0) {
            index.remove(hash(n), handle(n));
        }
        assert_eq!(index.memory_bytes(), empty_bytes + table_bytes(TABLE_MIN));
        assert!(all(&index, hash(1)).is_empty());
    }

    #[test]
    fn tables_differ_by_the_top_bits() {
        let mut index = Index::new();
        for n in 0..1 << SHARD_BITS {
            index.insert(u64::from(n) << (u64::BITS - SHARD_BITS), handle(n + 1));
        }
        assert!(index.shards.iter().all(|shard| shard.len == 1));
    }
}

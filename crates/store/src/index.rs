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

    /// The first page of this hash (or nearly: half of it is compared) that `is_it` takes.
    pub(crate) fn find(&self, hash: u64, mut is_it: impl FnMut(Handle) -> bool) -> Option<Handle> {
        let shard = &self.shards[shard_of(hash)];
        shard
            .positions(hash)
            .map_while(|at| shard.table[at].get())
            .find_map(|(tag, handle)| (tag == tag_of(hash) && is_it(handle)).then_some(handle))
    }

    /// Adds a page. One hash may have several.
    pub(crate) fn insert(&mut self, hash: u64, handle: Handle) {
        let shard = &mut self.shards[shard_of(hash)];
        if (shard.len + 1) * 8 > shard.table.len() * 7 {
            self.memory_bytes += shard.resize((shard.table.len() * 2).max(TABLE_MIN));
        }
        shard.insert(Entry::new(tag_of(hash), handle));
        shard.len += 1;
    }

    /// Takes a page out that was inserted under this hash.
    pub(crate) fn remove(&mut self, hash: u64, handle: Handle) {
        self.shards[shard_of(hash)].remove(Entry::new(tag_of(hash), handle));
    }
}

fn shard_of(hash: u64) -> usize {
    (hash >> (u64::BITS - SHARD_BITS)) as usize
}

fn tag_of(hash: u64) -> u32 {
    (hash & u64::from(u32::MAX)) as u32
}

/// Half a hash and a handle; zero is empty, as handles are not zero.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Entry(u64);

impl Entry {
    fn new(tag: u32, handle: Handle) -> Self {
        Self(u64::from(tag) << 32 | u64::from(handle.bits()))
    }

    fn tag(self) -> u32 {
        (self.0 >> 32) as u32
    }

    fn get(self) -> Option<(u32, Handle)> {
        Handle::from_bits((self.0 & u64::from(u32::MAX)) as u32).map(|handle| (self.tag(), handle))
    }
}

/// One table: linear probing, removal by moving followers back, so there are no tombstones to sweep.
#[derive(Default)]
struct Shard {
    table: Box<[Entry]>,
    len: usize,
}

impl Shard {
    /// Where entries of this hash may be, nearest first.
    fn positions(&self, hash: u64) -> impl Iterator<Item = usize> + use<> {
        let size = self.table.len();
        let home = tag_of(hash) as usize;
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

    /// Returns the bytes by which it grew.
    fn resize(&mut self, size: usize) -> u64 {
        let old = std::mem::replace(&mut self.table, vec![Entry::default(); size].into_boxed_slice());
        for entry in old.iter().filter(|entry| **entry != Entry::default()) {
            self.insert(*entry);
        }
        ((size - old.len()) * size_of::<Entry>()) as u64
    }
}

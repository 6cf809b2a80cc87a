//! A tenant's pages by key.
//!
//! Each entry owns a reference. Neighbouring pages are in one shard, so that a batch of them locks few.

use std::array;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{BuildHasher, Hash};
use std::iter::Flatten;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use spillway_wire::Key;

use crate::mix::Mix;
use crate::sys::pages::Held;

/// So many that none is large: a table doubles under its lock, which takes 2 ms for one of 50,000 pages.
const SHARDS: usize = 256;
/// Neighbours in one shard: as many as a batch has.
const NEIGHBOURS_SHIFT: u32 = 6;

/// Bytes that an entry takes at worst: a table that was just doubled.
pub(crate) const ENTRY_BYTES: u64 = 40;

/// What is stored under a key.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Stored {
    /// A page of zeros.
    Zero,
    /// Any other.
    Page(Held),
}

const _: () = assert!(size_of::<Option<Stored>>() <= 8);

type Shard = HashMap<u64, Stored, Mix>;

/// What was taken out of a table: pages, and the numbers of their keys.
pub(crate) type Taken = Flatten<array::IntoIter<Shard, SHARDS>>;

/// All pages of a tenant.
pub(crate) struct Table {
    mix: Mix,
    shards: [Mutex<Shard>; SHARDS],
    /// Entries in all shards.
    len: AtomicU64,
}

impl Table {
    pub(crate) fn new() -> Self {
        let mix = Mix::random();
        let shards = std::array::from_fn(|_| Mutex::new(Shard::with_hasher(mix)));
        Self { mix, shards, len: AtomicU64::new(0) }
    }

    /// How many pages there are; while others change it, about as many.
    pub(crate) fn len(&self) -> u64 {
        self.len.load(Ordering::Relaxed)
    }

    /// Puts a page under a key: what was there before, or the page back if the key is new and `may_grow` says no.
    pub(crate) fn insert(
        &self,
        key: Key,
        stored: Stored,
        may_grow: impl FnOnce() -> bool,
    ) -> Result<Option<Stored>, Stored> {
        match self.shard(key).entry(number(key)) {
            Entry::Occupied(mut entry) => Ok(Some(entry.insert(stored))),
            Entry::Vacant(_) if !may_grow() => Err(stored),
            Entry::Vacant(entry) => {
                entry.insert(stored);
                self.len.fetch_add(1, Ordering::Relaxed);
                Ok(None)
            }
        }
    }

    /// Takes a page out.
    pub(crate) fn remove(&self, key: Key) -> Option<Stored> {
        let mut shard = self.shard(key);
        let before = shard.remove(&number(key));
        if before.is_some() {
            shrink(&mut shard);
            self.len.fetch_sub(1, Ordering::Relaxed);
        }
        before
    }

    /// Looks at a page, or changes it, with its shard locked.
    pub(crate) fn with<T>(&self, key: Key, look: impl FnOnce(Option<&mut Stored>) -> T) -> T {
        look(self.shard(key).get_mut(&number(key)))
    }

    /// Looks at pages one after the other; each shard is locked only once for neighbours.
    pub(crate) fn with_each(&self, keys: impl Iterator<Item = Key>, mut look: impl FnMut(Option<&Stored>)) {
        let mut locked: Option<(usize, MutexGuard<'_, Shard>)> = None;
        for key in keys {
            let at = self.shard_of(key);
            let shard = match locked.take() {
                Some((same, guard)) if same == at => guard,
                other => {
                    // Let go before the next is locked: two at a time could wait for each other.
                    drop(other);
                    lock(&self.shards[at])
                }
            };
            look(shard.get(&number(key)));
            locked = Some((at, shard));
        }
    }

    /// Takes all pages out at once, however many there are: what is to become of them can be seen to a few at a time.
    pub(crate) fn take_all(&self) -> Taken {
        let shards = self.shards.each_ref().map(|shard| {
            let taken = std::mem::replace(&mut *lock(shard), Shard::with_hasher(self.mix));
            self.len.fetch_sub(taken.len() as u64, Ordering::Relaxed);
            taken
        });
        shards.into_iter().flatten()
    }

    fn shard_of(&self, key: Key) -> usize {
        let hash = self.mix.of(u64::from(key.region) << 32 | u64::from(key.index >> NEIGHBOURS_SHIFT), 1);
        usize::try_from(hash >> 40).unwrap_or(0) % SHARDS
    }

    fn shard(&self, key: Key) -> MutexGuard<'_, Shard> {
        lock(&self.shards[self.shard_of(key)])
    }
}

/// Gives room back that few entries need: what an entry costs is counted for tables that are not emptier than this.
pub(crate) fn shrink<K: Eq + Hash, V, S: BuildHasher>(table: &mut HashMap<K, V, S>) {
    if table.capacity() > 64 && table.len() < table.capacity() / 4 {
        table.shrink_to(table.len() * 2);
    }
}

fn lock(shard: &Mutex<Shard>) -> MutexGuard<'_, Shard> {
    shard.lock().expect("nothing panics with a shard locked")
}

fn number(key: Key) -> u64 {
    u64::from(key.region) << 32 | u64::from(key.index)
}

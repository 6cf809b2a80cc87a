//! Finds stored pages that may be identical to a new one.
//!
//! It only proposes: a page is shared after its bytes, its checksum and its scope were compared. One page is known for
//! each hash; when two differ and collide, the later one is known. Then the other is not shared, which costs room and
//! nothing else, so it does not matter who can make checksums collide.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::num::NonZeroU32;
use std::sync::{Mutex, MutexGuard};

use crate::mix::Mix;
use crate::table::shrink;

/// Enough that threads rarely meet in one.
const SHARDS: usize = 64;

/// Bytes that an entry takes at worst: a table that was just doubled.
pub(crate) const ENTRY_BYTES: u64 = 40;

type Shard = HashMap<u64, NonZeroU32, BuildHasherDefault<AsIs>>;

/// Page numbers by hash.
pub(crate) struct Twins {
    mix: Mix,
    shards: Box<[Mutex<Shard>]>,
}

impl Twins {
    pub(crate) fn new() -> Self {
        Self { mix: Mix::random(), shards: (0..SHARDS).map(|_| Mutex::default()).collect() }
    }

    /// The page of this checksum and scope, if there is one.
    pub(crate) fn find(&self, checksum: u64, scope: u32) -> Option<NonZeroU32> {
        let hash = self.hash(checksum, scope);
        self.shard(hash).get(&hash).copied()
    }

    /// Makes a page known.
    pub(crate) fn insert(&self, checksum: u64, scope: u32, number: NonZeroU32) {
        let hash = self.hash(checksum, scope);
        self.shard(hash).insert(hash, number);
    }

    /// Forgets a page, unless another took its hash.
    pub(crate) fn remove(&self, checksum: u64, scope: u32, number: NonZeroU32) {
        let hash = self.hash(checksum, scope);
        let mut shard = self.shard(hash);
        if shard.get(&hash) == Some(&number) {
            shard.remove(&hash);
            shrink(&mut shard);
        }
    }

    fn hash(&self, checksum: u64, scope: u32) -> u64 {
        self.mix.of(checksum, scope.into())
    }

    fn shard(&self, hash: u64) -> MutexGuard<'_, Shard> {
        // The table uses the lowest and the highest bits.
        let shard = usize::try_from(hash >> 40).unwrap_or(0) % SHARDS;
        lock(&self.shards[shard])
    }
}

fn lock(shard: &Mutex<Shard>) -> MutexGuard<'_, Shard> {
    shard.lock().expect("nothing panics with a shard locked")
}

/// For keys that are hashes.
#[derive(Default)]
pub(crate) struct AsIs(u64);

impl Hasher for AsIs {
    fn write(&mut self, _: &[u8]) {
        unreachable!("keys are numbers of 64 bits");
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_of_a_hash_is_known_until_it_goes() {
        let twins = Twins::new();
        let (one, two) = (NonZeroU32::MIN, NonZeroU32::MAX);
        twins.insert(7, 1, one);
        assert_eq!(twins.find(7, 1), Some(one));
        assert_eq!((twins.find(7, 2), twins.find(8, 1)), (None, None));
        twins.insert(7, 1, two);
        twins.remove(7, 1, one);
        assert_eq!(twins.find(7, 1), Some(two));
        twins.remove(7, 1, two);
        assert_eq!(twins.find(7, 1), None);
    }
}

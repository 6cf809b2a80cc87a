//! Finds stored pages that may be identical to a new one.
//!
//! It only proposes: a page is shared after its bytes, its checksum and its scope were compared. One page is known for
//! each hash; when two differ and collide, the later one is known. Then the other is not shared, which costs room and
//! nothing else.
//!
//! Pages of one tenant are found by their checksums: who lies about its own hurts nobody else. Where tenants share, the
//! server hashes pages itself, too, under a key that is drawn when it starts: a client can then neither make its page
//! collide with another's nor take the place of one.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::num::NonZeroU32;
use std::sync::{Mutex, MutexGuard};

use spillway_core::Page;
use twox_hash::XxHash3_64;

use crate::mix::Mix;
use crate::sys::pages::Identity;
use crate::table::shrink;

/// Enough that threads rarely meet in one, and that none is large: a table doubles under its lock.
const SHARDS: usize = 1024;

/// Bytes that an entry takes at worst: a table that was just doubled.
pub(crate) const ENTRY_BYTES: u64 = 40;

type Shard = HashMap<u64, NonZeroU32, BuildHasherDefault<AsIs>>;

/// As long as XXH3's own, so that every stripe of a page is mixed with different bytes.
const SECRET_BYTES: usize = 192;

/// Page numbers by hash.
pub(crate) struct Twins {
    mix: Mix,
    secret: Box<[u8; SECRET_BYTES]>,
    /// Bits of the hash that count; all but in tests, which make pages collide on purpose.
    mask: u64,
    shards: Box<[Mutex<Shard>]>,
}

impl Twins {
    /// # Panics
    /// When the kernel gives no random bytes, which it always does once booted.
    pub(crate) fn new() -> Self {
        let mut secret = Box::new([0; SECRET_BYTES]);
        getrandom::fill(&mut *secret).expect("getrandom(2) fails only before the system is up");
        Self { mix: Mix::random(), secret, mask: u64::MAX, shards: (0..SHARDS).map(|_| Mutex::default()).collect() }
    }

    #[cfg(test)]
    pub(crate) fn weak(mask: u64) -> Self {
        Self { mask, ..Self::new() }
    }

    /// What pages of several tenants are found by, beside their checksums.
    pub(crate) fn hash_of(&self, page: &Page) -> u64 {
        let hash = XxHash3_64::oneshot_with_secret(&*self.secret, page);
        hash.expect("the secret is long enough") & self.mask
    }

    /// A page that may be this one, if there is one.
    pub(crate) fn find(&self, identity: &Identity) -> Option<NonZeroU32> {
        let key = self.key(identity);
        self.shard(key).get(&key).copied()
    }

    /// Makes a page known.
    pub(crate) fn insert(&self, identity: &Identity, number: NonZeroU32) {
        let key = self.key(identity);
        self.shard(key).insert(key, number);
    }

    /// Forgets a page, unless another took its key.
    pub(crate) fn remove(&self, identity: &Identity, number: NonZeroU32) {
        let key = self.key(identity);
        let mut shard = self.shard(key);
        if shard.get(&key) == Some(&number) {
            shard.remove(&key);
            shrink(&mut shard);
        }
    }

    /// With the checksum, so that whoever lies about that finds only what was put with the same lie.
    fn key(&self, identity: &Identity) -> u64 {
        self.mix.of(identity.hash ^ self.mix.of(identity.checksum, 0), identity.scope.into())
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

    fn identity(hash: u64, checksum: u64, scope: u32) -> Identity {
        Identity { hash, checksum, scope }
    }

    #[test]
    fn the_latest_of_a_hash_is_known_until_it_goes() {
        let twins = Twins::new();
        let (one, two) = (NonZeroU32::MIN, NonZeroU32::MAX);
        twins.insert(&identity(7, 1, 1), one);
        assert_eq!(twins.find(&identity(7, 1, 1)), Some(one));
        for other in [identity(7, 1, 2), identity(7, 2, 1), identity(8, 1, 1)] {
            assert_eq!(twins.find(&other), None);
        }
        twins.insert(&identity(7, 1, 1), two);
        twins.remove(&identity(7, 1, 1), one);
        assert_eq!(twins.find(&identity(7, 1, 1)), Some(two));
        twins.remove(&identity(7, 1, 1), two);
        assert_eq!(twins.find(&identity(7, 1, 1)), None);
    }

    #[test]
    fn every_server_hashes_with_a_key_of_its_own() {
        let (one, two) = (Twins::new(), Twins::new());
        let mut page = [5; spillway_core::PAGE_BYTES];
        let hash = one.hash_of(&page);
        assert_eq!(one.hash_of(&page), hash);
        assert_ne!(two.hash_of(&page), hash);
        page[4095] ^= 1;
        assert_ne!(one.hash_of(&page), hash);
    }
}

//! Two numbers to one hash, keyed so that nobody outside can aim at collisions.

use std::hash::{BuildHasher, Hasher};

/// A folded multiplication (as in wyhash) with a random key.
#[derive(Clone, Copy)]
pub(crate) struct Mix([u64; 2]);

impl Mix {
    /// # Panics
    /// When the kernel gives no random bytes, which it always does once booted.
    pub(crate) fn random() -> Self {
        Self([random_u64(), random_u64() | 1])
    }

    #[inline]
    pub(crate) fn of(&self, a: u64, b: u64) -> u64 {
        let [first, second] = self.0;
        let product = u128::from(a ^ first) * u128::from(second ^ b.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let low = u64::try_from(product & u128::from(u64::MAX)).unwrap_or(0);
        let high = u64::try_from(product >> 64).unwrap_or(0);
        (low ^ high).wrapping_mul(0x9fb2_1c65_1e98_df25) ^ high
    }
}

/// A random number.
///
/// # Panics
/// As [`Mix::random`].
pub(crate) fn random_u64() -> u64 {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).expect("getrandom(2) fails only before the system is up");
    u64::from_ne_bytes(bytes)
}

impl BuildHasher for Mix {
    type Hasher = MixHasher;

    fn build_hasher(&self) -> MixHasher {
        MixHasher { mix: *self, hash: 0 }
    }
}

/// Hashes keys that are one number of 64 bits.
pub(crate) struct MixHasher {
    mix: Mix,
    hash: u64,
}

impl Hasher for MixHasher {
    fn write(&mut self, _: &[u8]) {
        unreachable!("keys are numbers of 64 bits");
    }

    fn write_u64(&mut self, key: u64) {
        self.hash = self.mix.of(key, self.hash);
    }

    fn finish(&self) -> u64 {
        self.hash
    }
}

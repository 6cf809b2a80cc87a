//! The one hash of a page: dedupe key and checksum in a single pass.

use std::sync::Arc;

use spillway_core::Page;
use twox_hash::XxHash3_64;

/// XXH3 takes secrets from 136 bytes; its own is this long, so every stripe of a page is mixed with different bytes.
const SECRET_BYTES: usize = 192;

/// XXH3-64 keyed with a random secret, so that nobody outside this process can aim at collisions.
#[derive(Clone)]
pub(crate) struct PageHash {
    secret: Arc<[u8; SECRET_BYTES]>,
    /// Bits of the hash that count; all but in tests, which make pages collide on purpose.
    mask: u64,
}

impl PageHash {
    /// # Panics
    /// When the kernel gives no random bytes, which it always does once booted.
    pub(crate) fn new() -> Self {
        let mut secret = [0; SECRET_BYTES];
        getrandom::fill(&mut secret).expect("getrandom(2) fails only before the system is up");
        Self { secret: Arc::new(secret), mask: u64::MAX }
    }

    #[cfg(test)]
    pub(crate) fn weak(mask: u64) -> Self {
        Self { mask, ..Self::new() }
    }

    /// The hash of `page`; the same for all clones.
    pub(crate) fn of(&self, page: &Page) -> u64 {
        let hash = XxHash3_64::oneshot_with_secret(&*self.secret, page);
        hash.expect("the secret is long enough") & self.mask
    }
}

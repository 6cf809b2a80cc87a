//! The one hash of a page: dedupe key and checksum in a single pass, or two where nothing but the hash is compared.

use std::sync::Arc;

use spillway_core::Page;
use twox_hash::XxHash3_64;

/// XXH3 takes secrets from 136 bytes; its own is this long, so every stripe of a page is mixed with different bytes.
pub(crate) const SECRET_BYTES: usize = 192;

type Secret = [u8; SECRET_BYTES];

/// XXH3-64 keyed with random secrets, so that nobody outside this process can aim at collisions.
#[derive(Clone)]
pub(crate) struct PageHash {
    secret: Arc<Secret>,
    second: Option<Arc<Secret>>,
    /// Bits of the hash that count; all but in tests, which make pages collide on purpose.
    mask: u64,
}

impl PageHash {
    /// For a store that compares all bytes of what has the same hash.
    ///
    /// # Panics
    /// When the kernel gives no random bytes, which it always does once booted.
    pub(crate) fn new() -> Self {
        Self { secret: secret(), second: None, mask: u64::MAX }
    }

    /// For a store whose pages are elsewhere, which takes those with the same hash for the same.
    ///
    /// One XXH3 will not do for that. Two words of a page that change places, and differ in one bit, meet the same sum if the
    /// upper halves of the secret's words there are equal or opposite. One in 10^7 secrets has such a pair of words, and would
    /// miss each such exchange. Two secrets have none in the same places.
    ///
    /// # Panics
    /// As [`PageHash::new`].
    pub(crate) fn sole_evidence() -> Self {
        Self { second: Some(secret()), ..Self::new() }
    }

    /// The hash that another process made, from its secrets.
    pub(crate) fn with_secrets(secret: Secret, second: Option<Secret>) -> Self {
        Self { secret: Arc::new(secret), second: second.map(Arc::new), mask: u64::MAX }
    }

    /// The secrets that it is made with, one or two.
    pub(crate) fn secrets(&self) -> impl Iterator<Item = Secret> {
        [Some(&self.secret), self.second.as_ref()].into_iter().flatten().map(|secret| **secret)
    }

    #[cfg(test)]
    pub(crate) fn weak(mask: u64) -> Self {
        Self { mask, ..Self::new() }
    }

    /// The hash of `page`; the same for all clones.
    pub(crate) fn of(&self, page: &Page) -> u64 {
        let second = self.second.as_ref().map_or(0, |second| hash(second, page));
        (hash(&self.secret, page) ^ second.rotate_left(u64::BITS / 2)) & self.mask
    }
}

fn secret() -> Arc<Secret> {
    let mut secret = [0; SECRET_BYTES];
    getrandom::fill(&mut secret).expect("getrandom(2) fails only before the system is up");
    Arc::new(secret)
}

fn hash(secret: &Secret, page: &Page) -> u64 {
    XxHash3_64::oneshot_with_secret(secret, page).expect("the secret is long enough")
}

#[cfg(test)]
mod tests {
    use super::*;
    use spillway_core::PAGE_BYTES;

    /// A secret in which the words for the first lane of the first two stripes (bytes 0 and 8) have equal upper halves, and
    /// agree in the lowest bit.
    fn unlucky() -> Arc<Secret> {
        let mut unlucky = *secret();
        unlucky.copy_within(4..8, 12);
        unlucky[8] = unlucky[0];
        Arc::new(unlucky)
    }

    /// A page whose first words of the first two stripes differ in one bit; and the same with those words exchanged.
    fn exchanged() -> [Page; 2] {
        let mut page = [7; PAGE_BYTES];
        page[0] = 6;
        let mut other = page;
        other[..8].copy_from_slice(&page[64..72]);
        other[64..72].copy_from_slice(&page[..8]);
        assert!(page != other);
        [page, other]
    }

    #[test]
    fn one_xxh3_with_an_unlucky_secret_misses_exchanged_words_and_two_do_not() {
        let [page, other] = exchanged();
        let one = PageHash { secret: unlucky(), second: None, mask: u64::MAX };
        assert_eq!(one.of(&page), one.of(&other));
        let two = PageHash { secret: unlucky(), ..PageHash::sole_evidence() };
        assert_ne!(two.of(&page), two.of(&other));
    }
}

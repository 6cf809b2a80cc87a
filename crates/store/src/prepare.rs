//! What another thread may work out of pages before they are put: their hashes, which of them are still what their clean
//! copies are, and the bytes to store for the others.

use spillway_codec::{Codec, Compression, same};
use spillway_core::{PAGE_BYTES, Page};

use crate::Handle;
use crate::hash::PageHash;
use crate::sys::memory::Parts;

/// A stored copy that was lent ([`crate::Store::lend`]) to compare a page with.
#[derive(Clone, Copy, Debug)]
pub struct Lent {
    pub(crate) handle: Handle,
    /// Of the page that it was made of.
    pub(crate) hash: u64,
    /// Which of the parts it is.
    pub(crate) part: usize,
}

/// What is known of a page, and room for its compressed bytes.
#[derive(Clone)]
pub struct Prepared {
    hash: Option<u64>,
    same_as: Option<Handle>,
    packed: Box<Page>,
    /// None are known; a whole page stands for itself, and is not kept here.
    packed_bytes: usize,
}

impl Default for Prepared {
    fn default() -> Self {
        Self { hash: None, same_as: None, packed: Box::new([0; PAGE_BYTES]), packed_bytes: 0 }
    }
}

impl Prepared {
    /// Nothing is known any more.
    pub fn forget(&mut self) {
        (self.hash, self.same_as, self.packed_bytes) = (None, None, 0);
    }

    /// Its hash.
    pub(crate) fn hash(&self) -> Option<u64> {
        self.hash
    }

    /// The stored copy that was found to hold these very bytes.
    pub(crate) fn same_as(&self) -> Option<Handle> {
        self.same_as
    }

    /// The bytes to store for it, which is `page`.
    pub(crate) fn packed<'a>(&'a self, page: &'a Page) -> Option<&'a [u8]> {
        match self.packed_bytes {
            0 => None,
            PAGE_BYTES => Some(page),
            bytes => Some(&self.packed[..bytes]),
        }
    }
}

/// Works it out. Belongs to one store, and goes to whatever thread does the work.
pub struct Preparer {
    hash: PageHash,
    codec: Codec,
    pub(crate) parts: Parts,
}

impl Preparer {
    /// For a store that keeps pages so, with room for so many copies lent at a time.
    pub(crate) fn new(hash: PageHash, compression: Compression, parts: usize) -> Self {
        Self { hash, codec: Codec::new(compression), parts: Parts::with_capacity(parts) }
    }

    /// Hashes a page.
    pub fn hash(&self, page: &Page, into: &mut Prepared) {
        into.forget();
        into.hash = Some(self.hash.of(page));
    }

    /// Hashes a page, compares it with its clean copy if that was lent, and compresses it if it is another.
    pub fn prepare(&mut self, page: &Page, clean: Option<Lent>, into: &mut Prepared) {
        self.hash(page, into);
        let is_same = |lent: &Lent| into.hash == Some(lent.hash) && same(self.parts.get(lent.part), page);
        into.same_as = clean.filter(is_same).map(|lent| lent.handle);
        if into.same_as.is_none() {
            let packed = self.codec.pack(page);
            into.packed_bytes = packed.len();
            if packed.len() < PAGE_BYTES {
                into.packed[..packed.len()].copy_from_slice(packed);
            }
        }
    }

    /// Gives back what was lent. Nothing that was lent before may be compared with from now on.
    pub fn give_back(&mut self) {
        self.parts.end();
    }
}

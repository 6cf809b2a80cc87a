//! What another thread may work out of pages before they are put: their hashes, and which of them are still what their
//! clean copies are.

use spillway_codec::same;
use spillway_core::Page;

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

/// What is known of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prepared {
    pub(crate) hash: u64,
    /// The stored copy that holds these very bytes.
    pub(crate) same_as: Option<Handle>,
}

impl Prepared {
    pub(crate) fn of_hash(hash: u64) -> Self {
        Self { hash, same_as: None }
    }
}

/// Works it out. Belongs to one store, and goes to whatever thread does the work.
pub struct Preparer {
    hash: PageHash,
    pub(crate) parts: Parts,
}

impl Preparer {
    /// With room for so many copies lent at a time.
    pub(crate) fn new(hash: PageHash, parts: usize) -> Self {
        Self { hash, parts: Parts::with_capacity(parts) }
    }

    /// Looks at a page, and compares it with its clean copy if that was lent.
    #[must_use]
    pub fn look(&self, page: &Page, clean: Option<Lent>) -> Prepared {
        let hash = self.hash.of(page);
        let is_same = |lent: &Lent| lent.hash == hash && same(self.parts.get(lent.part), page);
        Prepared { hash, same_as: clean.filter(is_same).map(|lent| lent.handle) }
    }

    /// Gives back what was lent. Nothing that was lent before may be compared with from now on.
    pub fn give_back(&mut self) {
        self.parts.end();
    }
}

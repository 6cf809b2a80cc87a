//! Units that must not be mixed up: a page's content, its identity, an address in a target.

/// Bytes in a page. x86-64's base page; blocks are whole numbers of it.
pub const PAGE_BYTES: usize = 4096;

/// [`PAGE_BYTES`] for address arithmetic.
pub const PAGE_BYTES_U64: u64 = PAGE_BYTES as u64;

/// The content of one page.
pub type Page = [u8; PAGE_BYTES];

/// A virtual address in a target's address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address(pub u64);

impl Address {
    /// The address of the page that holds this one.
    pub fn page(self) -> Self {
        Self(self.0 & !(PAGE_BYTES_U64 - 1))
    }

    /// The address `pages` pages further on.
    pub fn plus_pages(self, pages: u64) -> Self {
        Self(self.0 + pages * PAGE_BYTES_U64)
    }

    /// The address `bytes` further on.
    pub fn plus_bytes(self, bytes: u64) -> Self {
        Self(self.0 + bytes)
    }

    /// Whole pages from `start` to here; zero when `start` is not below.
    pub fn pages_since(self, start: Self) -> u64 {
        self.0.saturating_sub(start.0) / PAGE_BYTES_U64
    }
}

/// A page's identity for as long as it lives, whatever address it is mapped at. Never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageIndex(pub u64);

impl PageIndex {
    /// The index `pages` further on.
    pub fn plus(self, pages: u64) -> Self {
        Self(self.0 + pages)
    }
}

/// One address space under management. Never reused within a pager.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TargetId(pub u32);

/// A half-open range of addresses, page-aligned and not empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// First address.
    pub start: Address,
    /// First address beyond.
    pub end: Address,
}

impl Span {
    /// `pages` pages from `start` on.
    pub fn of_pages(start: Address, pages: u64) -> Self {
        Self { start, end: start.plus_pages(pages) }
    }

    /// Its length in pages.
    pub fn pages(self) -> u64 {
        self.end.pages_since(self.start)
    }

    /// The part that lies in `other` too, if any.
    pub fn intersect(self, other: Self) -> Option<Self> {
        let (start, end) = (self.start.max(other.start), self.end.min(other.end));
        (start < end).then_some(Self { start, end })
    }
}

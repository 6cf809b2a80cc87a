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

/// One address space under management. Used again only when nobody can mean the old one any more
/// ([`Pager::reuse`](crate::pager::Pager::reuse)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TargetId(pub u32);

/// A process that was adopted on its own account, with its descendants: whom a share of local memory belongs to. Never
/// reused within a pager.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TreeId(pub u32);

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

    /// The parts that lie in none of `taken`, in order.
    pub fn without(self, taken: impl Iterator<Item = Self>) -> Vec<Self> {
        let mut taken: Vec<Self> = taken.filter_map(|other| other.intersect(self)).collect();
        taken.sort_unstable_by_key(|other| other.start);
        let (mut left, mut cursor) = (Vec::new(), self.start);
        for other in taken {
            if cursor < other.start {
                left.push(Self { start: cursor, end: other.start });
            }
            cursor = cursor.max(other.end);
        }
        if cursor < self.end {
            left.push(Self { start: cursor, end: self.end });
        }
        left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(start: u64, end: u64) -> Span {
        Span { start: Address(start * PAGE_BYTES_U64), end: Address(end * PAGE_BYTES_U64) }
    }

    #[test]
    fn what_is_left_is_what_nobody_took() {
        assert_eq!(span(0, 10).without([].into_iter()), [span(0, 10)]);
        let taken = [span(8, 20), span(2, 4), span(3, 5)];
        assert_eq!(span(0, 10).without(taken.into_iter()), [span(0, 2), span(5, 8)]);
        assert_eq!(span(0, 10).without([span(0, 10)].into_iter()), []);
    }
}

//! Units that must not be mixed up: a page's content, its identity, a number of pages.

/// Bytes in a page. x86-64's base page; blocks are whole numbers of it.
pub const PAGE_BYTES: usize = 4096;

/// The content of one page.
pub type Page = [u8; PAGE_BYTES];

//! Memory that outlives the pager: what it is for, and in what form the core keeps it.
//!
//! A pager may be killed between any two instructions. Whoever finds this memory afterwards has the entries of all pages, in
//! *sheets*, and the regions, in the *book* ([`crate::book`]). Each change that counts is one store of eight bytes, made
//! after everything that it vouches for. What can be told from these is not kept: counts, free buffers, references.
//!
//! The words come from the driver, which maps them. Without any the core lives on the heap and dies with its process.

use std::fmt;
use std::ops::Deref;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Release};

use crate::chunks::CHUNK_PAGES;

/// The entries of one chunk of the page table, and which chunk that is.
#[derive(Clone, Copy)]
pub struct Sheet {
    /// The chunk's number plus one; zero when the sheet is in no use, and then all its entries are zero.
    pub number: &'static AtomicU64,
    /// The entries, as [`crate::page::Entry`] has them.
    pub entries: &'static [AtomicU64; CHUNK_PAGES],
}

impl Sheet {
    /// The chunk that it is of.
    pub(crate) fn chunk(&self) -> Option<u64> {
        self.number.load(Acquire).checked_sub(1)
    }

    pub(crate) fn assign(&self, chunk: Option<u64>) {
        self.number.store(chunk.map_or(0, |number| number + 1), Release);
    }

    pub(crate) fn clear(&self) {
        self.entries.iter().for_each(|entry| entry.store(0, Release));
    }
}

/// What a pager is given that is to outlive it.
pub struct Lasting {
    /// For the book: at least [`crate::book::WORDS_MIN`].
    pub book: &'static [AtomicU64],
    /// Sheets that were in use, or may have been, when this memory was found.
    pub sheets: Vec<Sheet>,
    /// More sheets, in no use. None when there are no more: the pager then cannot be outlived any longer.
    pub more: Box<dyn FnMut() -> Option<Sheet> + Send>,
}

impl fmt::Debug for Lasting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} words, {} sheets", self.book.len(), self.sheets.len())
    }
}

/// The entries of a chunk, wherever they are.
pub(crate) enum Leaf {
    /// On the heap.
    Own(Box<[AtomicU64; CHUNK_PAGES]>),
    /// In memory that outlives the pager.
    Lasting(Sheet),
}

impl Leaf {
    /// Of pages that nobody has touched, on the heap.
    pub(crate) fn new() -> Self {
        Self::Own(Box::new([const { AtomicU64::new(0) }; CHUNK_PAGES]))
    }
}

impl Deref for Leaf {
    type Target = [AtomicU64; CHUNK_PAGES];

    fn deref(&self) -> &Self::Target {
        match self {
            Self::Own(entries) => entries,
            Self::Lasting(sheet) => sheet.entries,
        }
    }
}

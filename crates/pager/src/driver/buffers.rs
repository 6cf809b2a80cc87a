//! The pager's buffers for pages that have left their targets.

use spillway_core::page::BufferIndex;
use spillway_core::{PAGE_BYTES, Page};
use spillway_store::Prepared;

/// A page's memory, all in one page of ours.
#[derive(Clone)]
#[repr(align(4096))]
pub(super) struct Aligned(pub(super) Page);

/// A page, and what is known of it.
#[derive(Clone)]
pub(super) struct Buffer {
    pub(super) page: Box<Aligned>,
    pub(super) known: Prepared,
}

/// See the module's documentation. Those that are lent are not there.
pub(super) struct Buffers(Vec<Option<Buffer>>);

impl Buffers {
    /// So many.
    pub(super) fn new(count: u32) -> Self {
        let buffer = || Buffer { page: Box::new(Aligned([0; PAGE_BYTES])), known: Prepared::default() };
        Self((0..count).map(|_| Some(buffer())).collect())
    }

    /// What is in a buffer, unless it is lent; and what is known of it.
    pub(super) fn page(&self, buffer: BufferIndex) -> Option<(&Page, &Prepared)> {
        self.0[buffer.0 as usize].as_ref().map(|buffer| (&buffer.page.0, &buffer.known))
    }

    /// Copies one buffer to another; neither is lent.
    pub(super) fn copy(&mut self, from: BufferIndex, to: BufferIndex) {
        let copy = self.0[from.0 as usize].clone();
        assert!(copy.is_some(), "it is not lent");
        self.0[to.0 as usize] = copy;
    }

    /// Lends a buffer.
    ///
    /// # Panics
    /// When it is lent already.
    pub(super) fn lend(&mut self, buffer: BufferIndex) -> Buffer {
        self.0[buffer.0 as usize].take().expect("it is not lent")
    }

    /// Takes it back.
    pub(super) fn give_back(&mut self, buffer: BufferIndex, lent: Buffer) {
        self.0[buffer.0 as usize] = Some(lent);
    }
}

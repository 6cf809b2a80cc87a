//! The pager's buffers for pages that have left their targets.

use spillway_core::page::BufferIndex;
use spillway_core::{PAGE_BYTES, Page};
use spillway_store::Prepared;

/// A page's memory, all in one page of ours.
#[repr(align(4096))]
pub(super) struct Aligned(pub(super) Page);

struct Buffer {
    /// None while it is lent.
    page: Option<Box<Aligned>>,
    /// What is known of what is in it.
    known: Option<Prepared>,
}

/// See the module's documentation.
pub(super) struct Buffers(Vec<Buffer>);

impl Buffers {
    /// So many.
    pub(super) fn new(count: u32) -> Self {
        Self((0..count).map(|_| Buffer { page: Some(Box::new(Aligned([0; PAGE_BYTES]))), known: None }).collect())
    }

    /// What is in a buffer, unless it is lent; and what is known of it.
    pub(super) fn page(&self, buffer: BufferIndex) -> Option<(&Page, Option<Prepared>)> {
        let Buffer { page, known } = &self.0[buffer.0 as usize];
        page.as_ref().map(|page| (&page.0, *known))
    }

    /// Copies one buffer to another; neither is lent.
    pub(super) fn copy(&mut self, from: BufferIndex, to: BufferIndex) {
        let (page, known) = self.page(from).expect("it is not lent");
        let page = *page;
        let to = &mut self.0[to.0 as usize];
        to.page.as_mut().expect("it is not lent").0 = page;
        to.known = known;
    }

    /// Lends the memory of a buffer.
    ///
    /// # Panics
    /// When it is lent already.
    pub(super) fn lend(&mut self, buffer: BufferIndex) -> Box<Aligned> {
        self.0[buffer.0 as usize].page.take().expect("it is not lent")
    }

    /// Takes it back, filled with what this is known of.
    pub(super) fn give_back(&mut self, buffer: BufferIndex, page: Box<Aligned>, known: Option<Prepared>) {
        self.0[buffer.0 as usize] = Buffer { page: Some(page), known };
    }
}

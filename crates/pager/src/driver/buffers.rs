//! The pager's buffers for pages that have left their targets.

use spillway_core::page::BufferIndex;
use spillway_core::{PAGE_BYTES, Page};
use spillway_store::{Prepared, vault};

/// A page's memory, all in one page of ours.
#[repr(align(4096))]
pub(super) struct Aligned(Page);

/// Where a buffer's page is.
enum Memory {
    /// In this process alone.
    Own(Box<Aligned>),
    /// In memory that outlives it.
    Lasting(vault::Buffer),
}

impl Memory {
    fn page(&self) -> &Page {
        match self {
            Self::Own(page) => &page.0,
            Self::Lasting(buffer) => buffer.page(),
        }
    }
}

/// A page, and what is known of it.
pub(super) struct Buffer {
    memory: Memory,
    pub(super) known: Prepared,
}

impl Buffer {
    pub(super) fn page(&self) -> &Page {
        self.memory.page()
    }

    /// The page, and what is known of it, to be changed.
    pub(super) fn parts(&mut self) -> (&Page, &mut Prepared) {
        (self.memory.page(), &mut self.known)
    }

    pub(super) fn page_mut(&mut self) -> &mut Page {
        match &mut self.memory {
            Memory::Own(page) => &mut page.0,
            Memory::Lasting(buffer) => buffer.page_mut(),
        }
    }
}

/// See the module's documentation. Those that are lent are not there.
pub(super) struct Buffers(Vec<Option<Buffer>>);

impl Buffers {
    /// So many.
    pub(super) fn new(count: u32) -> Self {
        Self::of((0..count).map(|_| Memory::Own(Box::new(Aligned([0; PAGE_BYTES])))))
    }

    /// These, with what is in them.
    pub(super) fn lasting(buffers: Vec<vault::Buffer>) -> Self {
        Self::of(buffers.into_iter().map(Memory::Lasting))
    }

    fn of(memory: impl Iterator<Item = Memory>) -> Self {
        Self(memory.map(|memory| Some(Buffer { memory, known: Prepared::default() })).collect())
    }

    /// What is in a buffer, unless it is lent; and what is known of it.
    pub(super) fn page(&self, buffer: BufferIndex) -> Option<(&Page, &Prepared)> {
        self.0[buffer.0 as usize].as_ref().map(|buffer| (buffer.page(), &buffer.known))
    }

    /// Copies one buffer to another; neither is lent.
    pub(super) fn copy(&mut self, from: BufferIndex, to: BufferIndex) {
        let (page, known) = self.page(from).expect("it is not lent");
        let (page, known) = (*page, known.clone());
        let to = self.0[to.0 as usize].as_mut().expect("it is not lent");
        *to.page_mut() = page;
        to.known = known;
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

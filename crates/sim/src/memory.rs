//! An address space as the kernel sees it: mappings and contents, page by page.
//!
//! A page's content is one number; zero stands for a page of zeros. Pages are named by their *slot*, counted from the
//! lowest address that a guest may use.

use std::collections::VecDeque;
use std::ops::Range;

use spillway_core::{Address, Span};

use crate::shadow::Shadow;
use crate::uffd::Uffd;

/// The page number of slot 0.
const BASE_PAGE: u64 = 0x100;

/// The address of a slot.
pub fn address(at: usize) -> Address {
    Address(0).plus_pages(BASE_PAGE + at as u64)
}

/// The slot at an address.
pub fn slot(address: Address) -> usize {
    usize::try_from(address.pages_since(self::address(0))).expect("guests have few pages")
}

/// The span of some slots.
pub fn span(range: &Range<usize>) -> Span {
    Span { start: address(range.start), end: address(range.end) }
}

/// The slots of a span.
pub fn range(span: Span) -> Range<usize> {
    slot(span.start)..slot(span.end)
}

/// Whether two ranges have a slot in common.
pub fn overlap(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}

/// A page in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Frame {
    /// What it holds.
    pub value: u64,
    /// Not exclusive: a fork left it to two address spaces, or the kernel has merged it with equal ones; and it was not written
    /// to since.
    pub shared: bool,
    /// Held for a device.
    pub pinned: bool,
    /// Given up with `MADV_FREE` and not written since: the kernel may drop it whenever it likes.
    pub lazy: bool,
}

/// What the page table says of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Nothing: an access faults.
    Absent,
    /// A page.
    Present(Frame),
    /// Poisoned by the pager: an access raises SIGBUS.
    Poison,
}

/// What a forked child gets of a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heritage {
    /// Its pages.
    Pages,
    /// Zeros (`MADV_WIPEONFORK`).
    Zeros,
    /// Nothing (`MADV_DONTFORK`).
    Nothing,
}

/// The mapping that a slot belongs to. Neighbours with equal mappings are one to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// Tells mappings apart that were made by different calls.
    pub serial: u32,
    /// Backed by a file: not ours to manage.
    pub file: bool,
    /// Registered with the userfaultfd.
    pub registered: bool,
    /// Under `mlock`.
    pub locked: bool,
    /// What a forked child gets of it.
    pub heritage: Heritage,
}

/// One page of address space.
#[derive(Clone, Copy, Debug)]
pub struct Slot {
    /// None where nothing is mapped.
    pub mapping: Option<Mapping>,
    /// Absent where nothing is mapped.
    pub content: Content,
}

impl Slot {
    /// Nothing mapped.
    pub const EMPTY: Self = Self { mapping: None, content: Content::Absent };

    /// Whether it is private anonymous memory.
    pub fn is_anonymous(&self) -> bool {
        self.mapping.is_some_and(|mapping| !mapping.file)
    }

    /// Whether missing pages here raise faults to the pager.
    pub fn is_registered(&self) -> bool {
        self.mapping.is_some_and(|mapping| mapping.registered)
    }

    /// The page in it.
    pub fn frame(&self) -> Option<Frame> {
        match self.content {
            Content::Present(frame) => Some(frame),
            Content::Absent | Content::Poison => None,
        }
    }
}

/// `madvise` under way, from its call to its return.
#[derive(Clone, Debug)]
pub struct Removal {
    /// Who called.
    pub thread: usize,
    /// Which pages.
    pub range: Range<usize>,
    /// `MADV_FREE` rather than `MADV_DONTNEED`.
    pub free: bool,
    /// When it was called.
    pub since: u64,
}

/// An address space.
#[derive(Clone, Debug)]
pub struct Space {
    /// Its pages.
    pub slots: Vec<Slot>,
    /// What its pages must hold.
    pub shadow: Shadow,
    /// How the pager hears of it.
    pub uffd: Uffd,
    /// False once its process is gone.
    pub alive: bool,
    /// Calls that hold its mappings in place (`mmap_read_lock`).
    pub readers: u32,
    /// A move by the agent is under way: nothing that changes mappings can begin (`map_changing_lock`).
    pub moving: bool,
    /// Removals under way.
    pub removals: Vec<Removal>,
    /// Its limit is reached: the pager may not add pages.
    pub tight: bool,
    /// What its calls were about of late: where programs collide.
    pub recent: VecDeque<Range<usize>>,
}

impl Space {
    /// An empty address space of `pages` pages.
    pub fn new(pages: usize) -> Self {
        Self {
            slots: vec![Slot::EMPTY; pages],
            shadow: Shadow::new(pages),
            uffd: Uffd::default(),
            alive: true,
            readers: 0,
            moving: false,
            removals: Vec::new(),
            tight: false,
            recent: VecDeque::new(),
        }
    }

    /// A call is about `range`.
    pub fn remember(&mut self, range: &Range<usize>) {
        const RECENT: usize = 4;
        self.recent.truncate(RECENT - 1);
        self.recent.push_front(range.clone());
    }

    /// Whether mappings may change now.
    pub fn may_change(&self) -> bool {
        self.readers == 0 && !self.moving
    }

    /// The one mapping that holds all of `range`.
    pub fn mapping_of(&self, range: &Range<usize>) -> Option<Mapping> {
        let mapping = self.slots.get(range.start)?.mapping?;
        let slots = self.slots.get(range.clone())?;
        slots.iter().all(|slot| slot.mapping == Some(mapping)).then_some(mapping)
    }

    /// The part of the mapping at `at` from there on.
    pub fn mapping_from(&self, at: usize) -> Range<usize> {
        let mapping = self.slots[at].mapping;
        let beyond = self.slots[at..].iter().position(|slot| slot.mapping.is_none() || slot.mapping != mapping);
        at..beyond.map_or(self.slots.len(), |pages| at + pages)
    }

    /// All mappings of anonymous memory, as `/proc/PID/maps` lists them.
    pub fn anonymous(&self) -> Vec<Range<usize>> {
        let (mut all, mut at) = (Vec::new(), 0);
        while at < self.slots.len() {
            let range = self.mapping_from(at);
            let next = range.end.max(at + 1);
            if self.slots[at].is_anonymous() {
                all.push(range);
            }
            at = next;
        }
        all
    }

    /// Whether any page of `range` is registered.
    pub fn any_registered(&self, range: &Range<usize>) -> bool {
        self.slots[range.clone()].iter().any(Slot::is_registered)
    }

    /// Whether nothing is mapped in `range`.
    pub fn is_free(&self, range: &Range<usize>) -> bool {
        self.slots.get(range.clone()).is_some_and(|slots| slots.iter().all(|slot| slot.mapping.is_none()))
    }

    /// The runs of present pages in `range`.
    pub fn populated(&self, range: &Range<usize>) -> Vec<Range<usize>> {
        let mut runs: Vec<Range<usize>> = Vec::new();
        for at in range.clone() {
            if self.slots[at].content == Content::Absent {
                continue;
            }
            match runs.last_mut() {
                Some(run) if run.end == at => run.end += 1,
                _ => runs.push(at..at + 1),
            }
        }
        runs
    }
}

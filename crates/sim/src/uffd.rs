//! userfaultfd, with the kernel's order of things (`fs/userfaultfd.c`).
//!
//! Faults are read before events. What changes mappings announces itself after the fact, `madvise` before; either way the
//! context counts as *changing* from before the change until the thread that made it has woken from the reading of its
//! event, and as long as it does, no page can be installed or moved.
//!
//! One thing is idealised: the first event of a call is queued in the step that makes the change. The kernel leaves a
//! window of a few instructions there in which the events of two threads may swap, and no reader could tell.

use std::collections::VecDeque;
use std::ops::Range;

use spillway_core::pager::{Outcome, Stop};

use crate::memory::{Content, Frame, Space, overlap};

/// A thread that waits for a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Who.
    pub thread: usize,
    /// For which slot.
    pub at: usize,
    /// Whether it means to write.
    pub write: bool,
}

/// A change of mappings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// `madvise` is about to drop pages.
    Remove(Range<usize>),
    /// A mapping is gone.
    Unmap(Range<usize>),
    /// A mapping moved.
    Remap {
        /// From here.
        from: Range<usize>,
        /// To here.
        to: usize,
    },
    /// The address space was duplicated into this one.
    Fork(usize),
}

/// What a read gives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// A thread waits.
    Fault(Fault),
    /// Something changed.
    Event(Event),
}

/// One context.
#[derive(Clone, Debug, Default)]
pub struct Uffd {
    /// Faults that nobody has read.
    pending: VecDeque<Fault>,
    /// Faults that were read; their threads wait on.
    read: Vec<Fault>,
    /// Events that nobody has read, with the threads that wait for that.
    events: VecDeque<(usize, Event)>,
    /// `mmap_changing`.
    pub changing: u32,
    /// All descriptors are closed: nobody is told of anything any more.
    closed: bool,
}

impl Uffd {
    /// Whether a read would give something.
    pub fn is_readable(&self) -> bool {
        !self.pending.is_empty() || !self.events.is_empty()
    }

    /// Whether `thread` sleeps here.
    pub fn holds(&self, thread: usize) -> bool {
        self.pending.iter().chain(&self.read).any(|fault| fault.thread == thread) || self.announces(thread)
    }

    /// Whether `thread` waits for its event to be read.
    pub fn announces(&self, thread: usize) -> bool {
        self.events.iter().any(|(of, _)| *of == thread)
    }

    /// A thread goes to sleep until its fault is served.
    pub fn raise(&mut self, fault: Fault) {
        self.pending.push_back(fault);
    }

    /// A thread goes to sleep until its event is read.
    pub fn announce(&mut self, thread: usize, event: Event) {
        if !self.closed {
            self.events.push_back((thread, event));
        }
    }

    /// Reads up to `most` messages.
    pub fn take(&mut self, most: usize) -> Vec<Message> {
        let mut messages = Vec::new();
        while messages.len() < most {
            if let Some(fault) = self.pending.pop_front() {
                self.read.push(fault);
                messages.push(Message::Fault(fault));
            } else if let Some((_, event)) = self.events.pop_front() {
                messages.push(Message::Event(event));
            } else {
                break;
            }
        }
        messages
    }

    /// Wakes who waits for a page in `range`.
    pub fn wake(&mut self, range: &Range<usize>) {
        self.pending.retain(|fault| !range.contains(&fault.at));
        self.read.retain(|fault| !range.contains(&fault.at));
    }

    /// All descriptors are closed, or the address space is gone: nobody waits any more. Returns the children whose forks
    /// nobody has read: theirs are closed with it.
    pub fn close(&mut self) -> Vec<usize> {
        let closed = Self { changing: self.changing, closed: true, ..Self::default() };
        let unread = std::mem::replace(self, closed).events;
        unread
            .into_iter()
            .filter_map(|(_, event)| if let Event::Fork(child) = event { Some(child) } else { None })
            .collect()
    }
}

impl Space {
    /// `UFFDIO_COPY`, and `UFFDIO_ZEROPAGE` where the values are zeros.
    pub fn install(&mut self, at: usize, values: &[u64]) -> Outcome {
        let refused = |stop| Outcome { done: 0, stop: Some(stop) };
        if !self.alive {
            return refused(Stop::Gone);
        }
        if self.uffd.changing > 0 {
            return refused(Stop::Changing);
        }
        if !self.mapping_of(&(at..at + values.len())).is_some_and(|mapping| mapping.registered) {
            return refused(Stop::Gone);
        }
        if self.tight {
            return refused(Stop::NoMemory);
        }
        let mut done = 0;
        let mut stop = None;
        for (slot, &value) in self.slots[at..].iter_mut().zip(values) {
            if slot.content != Content::Absent {
                stop = Some(if done == 0 { Stop::Exists } else { Stop::Changing });
                break;
            }
            slot.content = Content::Present(Frame { value, ..Frame::default() });
            done += 1;
        }
        self.uffd.wake(&(at..at + done));
        Outcome { done: done as u64, stop }
    }

    /// `UFFDIO_POISON`.
    pub fn poison(&mut self, at: usize) -> Outcome {
        let outcome = self.install(at, &[0]);
        if outcome.done == 1 {
            self.slots[at].content = Content::Poison;
        }
        outcome
    }

    /// `UFFDIO_REGISTER`: all that is mapped in `range`, unless nothing is or some of it cannot be managed. To be called
    /// while mappings may change.
    pub fn register(&mut self, range: &Range<usize>) -> bool {
        let mappings = || self.slots[range.clone()].iter().filter_map(|slot| slot.mapping);
        if !self.alive || mappings().next().is_none() || mappings().any(|mapping| mapping.file) {
            return false;
        }
        let mappings = self.slots[range.clone()].iter_mut().filter_map(|slot| slot.mapping.as_mut());
        mappings.for_each(|mapping| mapping.registered = true);
        true
    }

    /// What of `range` is mapped.
    pub fn mapped(&self, range: &Range<usize>) -> Vec<Range<usize>> {
        let mut found: Vec<Range<usize>> = Vec::new();
        for at in range.clone().filter(|&at| self.slots[at].mapping.is_some()) {
            match found.last_mut().filter(|last| last.end == at) {
                Some(last) => last.end = at + 1,
                None => found.push(at..at + 1),
            }
        }
        found
    }

    /// `UFFDIO_UNREGISTER`: waiting faults proceed.
    pub fn unregister(&mut self, range: &Range<usize>) {
        let mapped = self.slots[range.clone()].iter_mut().filter_map(|slot| slot.mapping.as_mut());
        mapped.for_each(|mapping| mapping.registered = false);
        self.uffd.wake(range);
    }

    /// Whether a thread is inside `madvise` on the page at `at`.
    pub fn is_removing(&self, at: usize) -> bool {
        self.removals.iter().any(|removal| overlap(&removal.range, &(at..at + 1)))
    }
}

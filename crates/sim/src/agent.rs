//! The agent's two chores: `UFFDIO_MOVE`, a page at a time, and `MADV_POPULATE_WRITE`.

use std::ops::Range;

use crate::kernel::{Kernel, Work};
use crate::memory::{Content, Frame};
use crate::rng::Rng;
use crate::uffd::Fault;

/// Why a move ended before its last page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Mappings were changing, or some pages were moved before another reason (EAGAIN).
    Again,
    /// The first page is pinned, shared or merged (EBUSY).
    Busy,
    /// The range is not one mapping, or one that staging does not match (EINVAL).
    Invalid,
    /// The first page is poisoned (EFAULT).
    Fault,
}

/// The outcome of one move.
#[derive(Clone, Debug, Default)]
pub struct Moved {
    /// What the pages held, holes as zeros.
    pub values: Vec<u64>,
    /// What ended it early.
    pub refusal: Option<Refusal>,
}

/// A list of moves under way.
#[derive(Clone, Debug)]
pub struct Moves {
    runs: Vec<Range<usize>>,
    /// One for each run that was begun.
    pub outcomes: Vec<Moved>,
    /// Whether the last of them is still under way.
    inside: bool,
}

impl Moves {
    /// Moves of `runs`, none of them begun.
    pub fn new(runs: Vec<Range<usize>>) -> Self {
        Self { runs, outcomes: Vec::new(), inside: false }
    }

    /// Whether all are done.
    pub fn is_done(&self) -> bool {
        self.outcomes.len() == self.runs.len() && !self.inside
    }
}

impl Kernel {
    /// One step of a list of moves: a call begins, or a page moves.
    pub(crate) fn move_page(&mut self, thread: usize, mut moves: Moves, rng: &mut Rng) {
        let index = self.threads[thread].space;
        let space = &mut self.spaces[index];
        if !moves.inside && !moves.is_done() {
            let range = &moves.runs[moves.outcomes.len()];
            // Staging is neither locked nor backed by a file. Whether the source is registered makes no difference.
            let fits = space.mapping_of(range).is_some_and(|mapping| !mapping.locked && !mapping.file);
            let refusal = if space.uffd.changing > 0 {
                self.events.moves_again += 1;
                Some(Refusal::Again)
            } else if !fits {
                self.events.moves_invalid += 1;
                Some(Refusal::Invalid)
            } else {
                None
            };
            self.trace.note(self.now, || format!("agent of {index} moves {range:?}: {refusal:?}"));
            moves.inside = refusal.is_none();
            moves.outcomes.push(Moved { values: Vec::new(), refusal });
        } else if moves.inside {
            let run = &moves.runs[moves.outcomes.len() - 1];
            let moved = moves.outcomes.last_mut().expect("inside of it");
            let slot = &mut space.slots[run.start + moved.values.len()];
            let first = moved.values.is_empty();
            match slot.content {
                Content::Absent => moved.values.push(0),
                Content::Present(Frame { shared: false, pinned: false, value, lazy }) => {
                    slot.content = Content::Absent;
                    // What was given up may be dropped from staging as well as from where it was.
                    moved.values.push(if lazy && rng.percent(20) { 0 } else { value });
                }
                Content::Present(_) => {
                    self.events.moves_busy += 1;
                    moved.refusal = Some(if first { Refusal::Busy } else { Refusal::Again });
                }
                Content::Poison => moved.refusal = Some(if first { Refusal::Fault } else { Refusal::Again }),
            }
            moves.inside = moved.refusal.is_none() && moved.values.len() < run.len();
        }
        self.spaces[index].moving = moves.inside;
        self.threads[thread].work = Work::Moves(moves);
    }

    /// Makes one page exclusive; faults where none is.
    pub(crate) fn populate(&mut self, thread: usize, mut pages: Vec<usize>) {
        let Some(&at) = pages.last() else { return };
        let index = self.threads[thread].space;
        self.trace.note(self.now, || format!("agent of {index} populates {pages:?}"));
        let space = &mut self.spaces[index];
        let slot = &mut space.slots[at];
        let (registered, anonymous) = (slot.is_registered(), slot.is_anonymous());
        match &mut slot.content {
            Content::Absent if registered => {
                space.uffd.raise(Fault { thread, at, write: true });
                self.events.faults += 1;
            }
            content @ Content::Absent if anonymous => *content = Content::Present(Frame::default()),
            Content::Present(frame) if frame.shared => frame.shared = false,
            _ => {
                pages.pop();
            }
        }
        self.threads[thread].work = Work::Populate(pages);
    }
}

//! The virtual kernel: address spaces, and threads that take one step at a time.

use std::ops::Range;

use crate::agent::Moves;
use crate::calls::Call;
use crate::failure::Failure;
use crate::guest::Habits;
use crate::memory::{Content, Frame, Heritage, Space};
use crate::rng::Rng;
use crate::shadow::Truth;
use crate::trace::Trace;
use crate::uffd::Fault;

/// What a thread is doing.
#[derive(Clone, Debug)]
pub enum Work {
    /// Nothing: a guest's thread chooses next, an agent waits for a list.
    Idle,
    /// Touches pages one after the other, passing over what is not mapped.
    Run {
        /// The next.
        next: usize,
        /// How many.
        left: usize,
        /// Whether it writes them.
        write: bool,
    },
    /// In a system call.
    Call(Call),
    /// An agent that moves pages out.
    Moves(Moves),
    /// An agent that makes pages exclusive (`MADV_POPULATE_WRITE`), the last first.
    Populate(Vec<usize>),
}

/// A thread, of a guest or of ours in a guest.
#[derive(Clone, Debug)]
pub struct Thread {
    /// Its address space.
    pub space: usize,
    /// Whether it is ours.
    pub agent: bool,
    /// What it does.
    pub work: Work,
    /// It ended.
    pub dead: bool,
    /// Others have the CPU until then.
    pub away_until: u64,
}

/// What happened in a run, in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Events {
    /// Reads and writes carried out.
    pub accesses: u64,
    /// Faults raised to the pager.
    pub faults: u64,
    /// Calls of `munmap`, and of `mmap` over what was mapped.
    pub unmaps: u64,
    /// Mappings moved.
    pub moves: u64,
    /// Calls of `madvise`.
    pub removals: u64,
    /// Forks.
    pub forks: u64,
    /// Accesses that raised SIGBUS, because the store had lost the page.
    pub losses: u64,
    /// Moves refused because mappings were changing.
    pub moves_again: u64,
    /// Moves refused because a page was pinned or shared.
    pub moves_busy: u64,
    /// Moves refused because mappings did not fit.
    pub moves_invalid: u64,
    /// Pages merged.
    pub merged: u64,
}

impl Events {
    /// Adds what happened in another run.
    pub fn add(&mut self, other: &Self) {
        self.accesses += other.accesses;
        self.faults += other.faults;
        self.unmaps += other.unmaps;
        self.moves += other.moves;
        self.removals += other.removals;
        self.forks += other.forks;
        self.losses += other.losses;
        self.moves_again += other.moves_again;
        self.moves_busy += other.moves_busy;
        self.moves_invalid += other.moves_invalid;
        self.merged += other.merged;
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Kernel {
    /// All address spaces there ever were.
    pub spaces: Vec<Space>,
    /// All threads there ever were.
    pub threads: Vec<Thread>,
    /// Steps so far: the only clock.
    pub now: u64,
    /// Counts.
    pub events: Events,
    /// What was done, when someone wants to know.
    pub trace: Trace,
    /// Values whose only stored copy the store has lost, on request.
    pub lost: std::collections::BTreeSet<u64>,
    /// What guests like to do.
    pub habits: Habits,
    /// Guests finish what they do, and begin nothing.
    pub quiet: bool,
    /// Address spaces that were not forked.
    pub(crate) natives: usize,
    pub(crate) serial: u32,
    pub(crate) value: u64,
}

impl Kernel {
    /// A kernel without processes.
    pub fn new(habits: Habits, trace: Trace) -> Self {
        Self {
            spaces: Vec::new(),
            threads: Vec::new(),
            now: 0,
            events: Events::default(),
            trace,
            lost: std::collections::BTreeSet::new(),
            habits,
            quiet: false,
            natives: 0,
            serial: 0,
            value: 0x1000,
        }
    }

    /// A new process with some threads; the slots of `range` are mapped.
    pub fn spawn(&mut self, pages: usize, range: Range<usize>, threads: usize) -> usize {
        self.spaces.push(Space::new(pages));
        let space = self.spaces.len() - 1;
        self.natives = self.spaces.len();
        self.map(space, range, false, Heritage::Pages);
        self.start_threads(space, threads, false);
        space
    }

    /// Adds threads to a process; returns the last.
    pub fn start_threads(&mut self, space: usize, count: usize, agent: bool) -> usize {
        let thread = Thread { space, agent, work: Work::Idle, dead: false, away_until: 0 };
        self.threads.extend(std::iter::repeat_n(thread, count));
        self.threads.len() - 1
    }

    /// Whether a step of `thread` would do something.
    pub fn may_run(&self, thread: usize) -> bool {
        let Thread { space, agent, work, dead, away_until } = &self.threads[thread];
        let idle = match work {
            Work::Idle => true,
            Work::Moves(moves) => moves.is_done(),
            _ => false,
        };
        let may = !dead && *away_until <= self.now && !(idle && (*agent || self.quiet));
        may && !self.spaces[*space].uffd.holds(thread)
    }

    /// One step of a thread.
    ///
    /// # Errors
    /// When the guest saw what it must not see.
    pub fn step(&mut self, thread: usize, rng: &mut Rng) -> Result<(), Failure> {
        match std::mem::replace(&mut self.threads[thread].work, Work::Idle) {
            Work::Idle => self.begin(thread, rng),
            Work::Run { next, left, write } => self.run(thread, next, left, write, rng)?,
            Work::Call(call) => self.advance(thread, call, rng),
            Work::Moves(moves) => self.move_page(thread, moves, rng),
            Work::Populate(pages) => self.populate(thread, pages),
        }
        Ok(())
    }

    fn run(&mut self, thread: usize, next: usize, left: usize, write: bool, rng: &mut Rng) -> Result<(), Failure> {
        let space = self.threads[thread].space;
        if left == 0 || next >= self.spaces[space].slots.len() {
            return Ok(());
        }
        let value = if write { Some(self.choose_value(rng)) } else { None };
        let reached = self.access(thread, next, value)?;
        let step = usize::from(reached);
        self.threads[thread].work = Work::Run { next: next + step, left: left - step, write };
        Ok(())
    }

    /// Reads or writes a page; false when the thread waits for it now.
    fn access(&mut self, thread: usize, at: usize, write: Option<u64>) -> Result<bool, Failure> {
        let index = self.threads[thread].space;
        let now = self.now;
        let space = &mut self.spaces[index];
        let removing = space.is_removing(at);
        let slot = &mut space.slots[at];
        if !slot.is_anonymous() {
            return Ok(true);
        }
        let registered = slot.is_registered();
        match &mut slot.content {
            Content::Absent if registered => {
                self.trace.note(now, || format!("thread {thread} of {index} faults at {at}"));
                space.uffd.raise(Fault { thread, at, write: write.is_some() });
                self.events.faults += 1;
                return Ok(false);
            }
            Content::Absent => {
                slot.content = Content::Present(Frame::default());
                return Ok(false);
            }
            Content::Poison => {
                let truth = space.shadow.at(at);
                self.events.losses += 1;
                if !self.lost.contains(&truth.value) {
                    return Err(Failure::new(format!("SIGBUS at {at} of {index}, whose {truth:?} was never lost")));
                }
            }
            Content::Present(frame) => {
                if let Some(value) = write {
                    *frame = Frame { value, shared: false, lazy: false, pinned: frame.pinned };
                    space.shadow.write(at, value, removing, now);
                    self.trace.note(now, || format!("thread {thread} of {index} writes {value:#x} at {at}"));
                } else {
                    let (got, truth) = (frame.value, space.shadow.at(at));
                    self.trace.note(now, || format!("thread {thread} of {index} reads {got:#x} at {at}"));
                    if !space.shadow.read(at, got, removing) {
                        return Err(wrong(index, at, got, truth));
                    }
                }
            }
        }
        self.events.accesses += 1;
        Ok(true)
    }

    /// Mostly a value that no page ever had; sometimes one that many have, or zeros.
    fn choose_value(&mut self, rng: &mut Rng) -> u64 {
        match rng.below(100) {
            0..8 => 0,
            8..20 => 1 + rng.below(4) as u64,
            _ => {
                self.value += 1;
                self.value
            }
        }
    }

    /// A process ends, with all of its threads.
    pub fn exit(&mut self, space: usize) {
        self.trace.note(self.now, || format!("{space} exits"));
        let dying: Vec<usize> = (0..self.threads.len()).filter(|&t| self.threads[t].space == space).collect();
        for thread in dying {
            let Thread { dead, work, .. } = &mut self.threads[thread];
            *dead = true;
            if let Work::Call(call) = std::mem::replace(work, Work::Idle)
                && let Some(child) = call.unborn()
            {
                self.exit(child);
            }
        }
        let space = &mut self.spaces[space];
        space.alive = false;
        space.slots.fill(crate::memory::Slot::EMPTY);
        space.removals.clear();
        space.uffd.close();
    }

    /// Threads of guests that have not come to rest.
    pub fn restless(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.threads.len()).filter(|&thread| {
            let Thread { agent, work, dead, .. } = &self.threads[thread];
            !dead && !agent && !matches!(work, Work::Idle)
        })
    }

    /// A thread of a guest in `space`.
    pub fn guest_of(&self, space: usize) -> Option<usize> {
        self.threads.iter().position(|thread| thread.space == space && !thread.agent && !thread.dead)
    }
}

fn wrong(space: usize, at: usize, got: u64, truth: Truth) -> Failure {
    Failure::new(format!("wrong bytes: page {at} of {space} reads {got:#x}, but must hold {truth:?}"))
}

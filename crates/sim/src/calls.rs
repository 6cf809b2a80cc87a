//! System calls that change an address space, and how they tell of it.
//!
//! A call changes mappings at once, then announces its events one by one, each after the one before was read; `madvise`
//! announces first and drops the pages afterwards, when it has got the lock again. A call of several events is what
//! lets other threads' events come between them.

use std::collections::VecDeque;
use std::ops::Range;

use crate::kernel::{Kernel, Work};
use crate::memory::{Content, Frame, Heritage, Mapping, Removal, Slot, Space, overlap};
use crate::rng::Rng;
use crate::uffd::Event;

/// What a call does after its announcements.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Then {
    /// It returns.
    Return,
    /// It drops pages, when it has the lock again.
    Zap { range: Range<usize>, free: bool },
    /// It drops the pages from `next` on, up to `end`, and then does the same with what else there is of `range`.
    Zapping { range: Range<usize>, free: bool, next: usize, end: usize },
    /// It returns in the child as well.
    Birth(usize),
}

/// A system call under way.
#[derive(Clone, Debug)]
pub struct Call {
    queue: VecDeque<Event>,
    /// An event of this call was queued, and its thread has not woken from its reading.
    announced: bool,
    then: Then,
}

impl Call {
    /// The child that will not live if the caller dies now.
    pub fn unborn(&self) -> Option<usize> {
        if let Then::Birth(child) = self.then { Some(child) } else { None }
    }

    /// Whether a mapping has moved of which nobody could hear yet.
    fn conceals_move(&self) -> bool {
        self.queue.iter().any(|event| matches!(event, Event::Remap { .. }))
    }

    /// Whether it has yet to say that something in `range` is unmapped. Nobody could tell that word from another about
    /// what is mapped there since, if it were unmapped too.
    fn owes_unmap(&self, range: &Range<usize>) -> bool {
        self.queue.iter().any(|event| matches!(event, Event::Unmap(unmapped) if overlap(range, unmapped)))
    }

    /// Whether another thread of a program with any order in it keeps away from `range`.
    fn claims(&self, range: &Range<usize>, removals_too: bool) -> bool {
        let moving = self.queue.iter().any(|event| match event {
            Event::Remap { from, to } => overlap(range, from) || overlap(range, &(*to..to + from.len())),
            _ => false,
        });
        let zapping =
            matches!(&self.then, Then::Zap { range: of, .. } | Then::Zapping { range: of, .. } if overlap(range, of));
        moving || (zapping && removals_too)
    }
}

impl Kernel {
    /// Whether other threads of `space` are about to change `range`.
    pub(crate) fn is_claimed(&self, space: usize, range: &Range<usize>, removals_too: bool) -> bool {
        self.calls_in(space).any(|call| call.claims(range, removals_too))
    }

    /// Whether other threads of `space` have yet to say that something in `range` is unmapped.
    pub(crate) fn owes_unmap(&self, space: usize, range: &Range<usize>) -> bool {
        self.calls_in(space).any(|call| call.owes_unmap(range))
    }

    /// Whether a fork now would copy a move of which nobody could hear yet.
    pub(crate) fn conceals_move(&self, space: usize) -> bool {
        self.calls_in(space).any(Call::conceals_move)
    }

    fn calls_in(&self, space: usize) -> impl Iterator<Item = &Call> {
        self.threads
            .iter()
            .filter(move |thread| thread.space == space && !thread.dead)
            .filter_map(|thread| if let Work::Call(call) = &thread.work { Some(call) } else { None })
    }

    /// Goes on with a call.
    pub(crate) fn advance(&mut self, thread: usize, mut call: Call, rng: &mut Rng) {
        let index = self.threads[thread].space;
        let now = self.now;
        let space = &mut self.spaces[index];
        if call.announced {
            // Its event was read, and it runs again.
            call.announced = false;
            space.uffd.changing -= 1;
            if let (Then::Zap { .. }, 1..) = (&call.then, self.habits.lock_wait_most) {
                // It waits for the lock on its mappings.
                self.threads[thread].away_until = now + rng.below(self.habits.lock_wait_most) as u64;
            }
        } else if let Some(event) = call.queue.pop_front() {
            self.trace.note(now, || format!("thread {thread} of {index} announces {event:?}"));
            space.uffd.announce(thread, event);
            call.announced = true;
        } else {
            match &mut call.then {
                Then::Return => return,
                Then::Birth(child) => {
                    let child = *child;
                    self.start_threads(child, rng.between(1, 2), false);
                    return;
                }
                Then::Zap { range, free } => {
                    // Whatever is mapped there by now.
                    let end = space.mapping_from(range.start).end.min(range.end);
                    let fits = space.mapping_of(&(range.start..end)).is_some_and(|it| !it.file && !it.locked);
                    space.readers += 1;
                    call.then = Then::Zapping { range: range.clone(), free: *free, next: range.start, end };
                    if !fits {
                        return self.end_removal(thread, false);
                    }
                }
                Then::Zapping { range, free, next, end } => {
                    let most = if rng.percent(50) { range.len() } else { 1 };
                    let zapped = *next..(*end).min(*next + most);
                    self.trace.note(now, || format!("thread {thread} of {index} drops {zapped:?}, free {free}"));
                    *next = zapped.end;
                    let (rest, free, done) = (*end..range.end, *free, *next >= *end);
                    space.slots[zapped].iter_mut().for_each(|slot| zap(slot, free));
                    if done {
                        return self.remove_rest(thread, rest, free, rng);
                    }
                }
            }
        }
        self.threads[thread].work = Work::Call(call);
    }

    /// Where the mapping was split meanwhile: the same again for what is mapped behind.
    fn remove_rest(&mut self, thread: usize, rest: Range<usize>, free: bool, rng: &mut Rng) {
        let space = &mut self.spaces[self.threads[thread].space];
        let Some(start) = rest.clone().find(|&at| space.slots[at].mapping.is_some()) else {
            return self.end_removal(thread, true);
        };
        space.readers -= 1;
        let rest = start..rest.end;
        let queue = if space.any_registered(&rest) { vec![Event::Remove(rest.clone())] } else { Vec::new() };
        self.call(thread, queue, Then::Zap { range: rest, free }, rng);
    }

    fn end_removal(&mut self, thread: usize, complete: bool) {
        let index = self.threads[thread].space;
        let space = &mut self.spaces[index];
        space.readers -= 1;
        let at = space.removals.iter().position(|removal| removal.thread == thread).expect("it is under way");
        let Removal { range, free, since, .. } = space.removals.remove(at);
        self.trace
            .note(self.now, || format!("thread {thread} of {index} returns from madvise of {range:?}, {complete}"));
        if complete {
            space.shadow.removed(range, free, since);
        } else {
            range.for_each(|at| space.shadow.doubt(at, free));
        }
    }

    /// Begins a call whose changes, if any, were made in this step.
    fn call(&mut self, thread: usize, queue: Vec<Event>, then: Then, rng: &mut Rng) {
        let space = &mut self.spaces[self.threads[thread].space];
        space.uffd.changing += u32::try_from(queue.len()).expect("a few");
        let announces = !queue.is_empty();
        let call = Call { queue: queue.into(), announced: false, then };
        if announces {
            self.advance(thread, call, rng);
        } else {
            self.threads[thread].work = Work::Call(call);
        }
    }

    /// `madvise(MADV_DONTNEED)`, or `MADV_FREE`, of a part of one mapping.
    pub(crate) fn remove(&mut self, thread: usize, range: Range<usize>, free: bool, rng: &mut Rng) {
        let space = &mut self.spaces[self.threads[thread].space];
        self.events.removals += 1;
        space.removals.push(Removal { thread, range: range.clone(), free, since: self.now });
        if space.any_registered(&range) {
            let zap = Then::Zap { range: range.clone(), free };
            self.call(thread, vec![Event::Remove(range)], zap, rng);
        } else {
            // Nobody to tell: the lock is kept all the while.
            space.readers += 1;
            let (next, end) = (range.start, range.end);
            self.call(thread, Vec::new(), Then::Zapping { range, free, next, end }, rng);
        }
    }

    /// `munmap`.
    pub(crate) fn unmap(&mut self, thread: usize, range: Range<usize>, rng: &mut Rng) {
        let event = self.clear(self.threads[thread].space, range);
        self.call(thread, event.into_iter().collect(), Then::Return, rng);
    }

    /// `mmap(MAP_FIXED)` over what is mapped.
    pub(crate) fn map_over(&mut self, thread: usize, range: Range<usize>, rng: &mut Rng) {
        let space = self.threads[thread].space;
        let event = self.clear(space, range.clone());
        self.map(space, range, false, Heritage::Pages);
        self.call(thread, event.into_iter().collect(), Then::Return, rng);
    }

    /// `mmap` of free pages: nobody is told.
    pub(crate) fn map(&mut self, space: usize, range: Range<usize>, file: bool, heritage: Heritage) {
        self.trace.note(self.now, || format!("{space} maps {range:?}, file {file}, {heritage:?}"));
        self.serial += 1;
        let mapping = Some(Mapping { serial: self.serial, file, registered: false, locked: false, heritage });
        self.spaces[space].slots[range.clone()].fill(Slot { mapping, content: Content::Absent });
        self.spaces[space].shadow.reset(range, self.now);
    }

    /// `mremap` of a part of one mapping to `to`, with `more` pages added. `keep` is `MREMAP_DONTUNMAP`.
    pub(crate) fn relocate(
        &mut self,
        thread: usize,
        from: Range<usize>,
        to: usize,
        more: usize,
        keep: bool,
        rng: &mut Rng,
    ) {
        let index = self.threads[thread].space;
        let dest = to..to + from.len();
        let mut queue: Vec<Event> = Vec::new();
        if !self.spaces[index].is_free(&(to..dest.end + more)) {
            queue.extend(self.clear(index, to..dest.end + more));
        }
        self.trace.note(self.now, || format!("thread {thread} of {index} moves {from:?} to {to}+{more}, keep {keep}"));
        self.serial += 1;
        self.events.moves += 1;
        let serial = self.serial;
        let space = &mut self.spaces[index];
        let Some(mapping) = space.slots[from.start].mapping else { return };
        for (old, new) in from.clone().zip(dest.clone()) {
            let content = std::mem::replace(&mut space.slots[old].content, Content::Absent);
            space.slots[new] = Slot { mapping: Some(Mapping { serial, ..mapping }), content };
            let removing = space.is_removing(old);
            space.shadow.relocate(old, new, removing, self.now);
        }
        let grown = Slot { mapping: Some(Mapping { serial, ..mapping }), content: Content::Absent };
        space.slots[dest.end..dest.end + more].fill(grown);
        space.shadow.reset(dest.end..dest.end + more, self.now);
        let registered = mapping.registered;
        if registered {
            queue.push(Event::Remap { from: from.clone(), to });
        }
        if keep {
            let kept = Some(Mapping { locked: false, ..mapping });
            space.slots[from].iter_mut().for_each(|slot| slot.mapping = kept);
        } else {
            queue.extend(self.clear(index, from));
        }
        self.call(thread, queue, Then::Return, rng);
    }

    /// `mremap` in place: the mapping that ends at `end` gets `more` pages, of which nobody is told.
    pub(crate) fn grow(&mut self, space: usize, end: usize, more: usize) {
        self.trace.note(self.now, || format!("{space} grows at {end} by {more}"));
        let mapping = self.spaces[space].slots[end - 1].mapping;
        self.spaces[space].slots[end..end + more].fill(Slot { mapping, content: Content::Absent });
        self.spaces[space].shadow.reset(end..end + more, self.now);
    }

    /// `fork`.
    pub(crate) fn fork(&mut self, thread: usize, rng: &mut Rng) {
        let index = self.threads[thread].space;
        self.events.forks += 1;
        let space = &mut self.spaces[index];
        let mut child = Space::new(space.slots.len());
        child.shadow = space.shadow.clone();
        for removal in &space.removals {
            removal.range.clone().for_each(|at| child.shadow.doubt(at, removal.free));
        }
        for (at, mine) in space.slots.iter_mut().enumerate() {
            let Some(mapping) = mine.mapping else { continue };
            let mapping = Some(Mapping { locked: false, ..mapping });
            match mapping.map_or(Heritage::Nothing, |mapping| mapping.heritage) {
                Heritage::Pages => child.slots[at] = Slot { mapping, content: inherited(&mut mine.content) },
                Heritage::Zeros => child.slots[at] = Slot { mapping, content: Content::Absent },
                Heritage::Nothing => {}
            }
            if mapping.is_some_and(|mapping| mapping.heritage != Heritage::Pages) {
                child.shadow.reset(at..at + 1, self.now);
            }
        }
        self.spaces.push(child);
        let child = self.spaces.len() - 1;
        self.trace.note(self.now, || format!("thread {thread} of {index} forks {child}"));
        self.call(thread, vec![Event::Fork(child)], Then::Birth(child), rng);
    }

    /// Unmaps `range`; the event that tells of it, if anyone is to be told.
    fn clear(&mut self, space: usize, range: Range<usize>) -> Option<Event> {
        self.trace.note(self.now, || format!("{space} unmaps {range:?}"));
        self.events.unmaps += 1;
        let now = self.now;
        let space = &mut self.spaces[space];
        let registered = space.any_registered(&range);
        space.slots[range.clone()].fill(Slot::EMPTY);
        space.shadow.reset(range.clone(), now);
        registered.then_some(Event::Unmap(range))
    }
}

/// What a child gets of a page: a copy of a pinned one, else the page itself, shared until someone writes.
fn inherited(content: &mut Content) -> Content {
    if let Content::Present(frame) = content {
        frame.shared |= !frame.pinned;
        return Content::Present(Frame { pinned: false, ..*frame });
    }
    *content
}

fn zap(slot: &mut Slot, free: bool) {
    match &mut slot.content {
        Content::Present(frame) if free => frame.lazy |= !frame.shared && !frame.pinned,
        _ if free => {}
        content => *content = Content::Absent,
    }
}

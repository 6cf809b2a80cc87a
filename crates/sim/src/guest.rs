//! What guests do: random programs with just enough order in them that their own answers are known.

use std::ops::Range;

use crate::kernel::{Kernel, Work};
use crate::memory::{Content, Heritage, overlap};
use crate::rng::Rng;

/// Most pages that one call is about.
const PAGES_MOST: usize = 24;

/// What a thread chooses from, in the order of [`Habits::weights`].
const CHOICES: usize = 16;

/// What a run is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Theme {
    /// A little of everything.
    Anything,
    /// `madvise`, of pages that others touch and give up again.
    Removals,
    /// New mappings, given up before the pager knows what is in them.
    Fresh,
    /// Mappings that move.
    Moves,
    /// Forks, by parents whose buffers are short.
    Forks,
    /// Little is local, and what is on its way is removed and moved meanwhile.
    Journeys,
}

/// What guests like to do.
#[derive(Clone, Debug)]
pub struct Habits {
    /// How much they like each thing that they can do.
    pub weights: [usize; CHOICES],
    /// Processes alive at most.
    pub processes_most: usize,
    /// Threads of one process change pages that another is just giving up: no program means to, some do.
    pub rude: bool,
    /// The longest run of pages touched one after the other.
    pub run_most: usize,
    /// How many of a hundred steps of a thread end with a long pause.
    pub drowsy: usize,
    /// Steps for which a thread waits for a lock at most, between the announcement of a removal and the removal.
    pub lock_wait_most: usize,
    /// How many of a hundred things they do where they did something of late.
    pub locality: usize,
}

impl Habits {
    /// What the guests of one run like.
    pub fn of(theme: Theme, rng: &mut Rng) -> Self {
        let calls = rng.between(0, 12);
        let mut weights = [0; CHOICES];
        weights[0] = rng.between(5, 60);
        weights[1] = rng.between(5, 60);
        for weight in &mut weights[2..12] {
            *weight = if rng.percent(70) { rng.between(0, calls) } else { 0 };
        }
        weights[12] = if rng.percent(50) { rng.between(1, 2) } else { 0 };
        weights[13] = usize::from(rng.percent(20));
        weights[14] = if rng.percent(20) { 1 } else { 0 };
        weights[15] = if rng.percent(20) { 1 } else { 0 };
        match theme {
            Theme::Anything => {}
            Theme::Removals => weights = [20, 20, 15, 15, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            Theme::Fresh => weights = [40, 20, 20, 0, 5, 10, 10, 0, 0, 0, 2, 0, 0, 0, 0, 0],
            Theme::Moves => weights = [30, 10, 3, 0, 2, 3, 0, 20, 10, 5, 3, 3, 0, 0, 0, 0],
            Theme::Forks => weights = [60, 30, 0, 0, 1, 2, 0, 0, 0, 0, 0, 0, 15, 4, 0, 0],
            Theme::Journeys => weights = [40, 30, calls, 0, 2, 3, 1, calls, 1, 1, 0, 0, 1, 0, 0, 0],
        }
        let contended = matches!(theme, Theme::Removals | Theme::Fresh);
        Self {
            weights,
            processes_most: rng.between(if theme == Theme::Forks { 2 } else { 1 }, 5),
            rude: rng.percent(15),
            run_most: rng.between(1, 60),
            locality: if rng.percent(70) { rng.between(0, 95) } else { 0 },
            drowsy: if rng.percent(50) { rng.between(0, 8) } else { 0 },
            lock_wait_most: if contended || rng.percent(50) { rng.between(1, 400) } else { 0 },
        }
    }
}

impl Kernel {
    /// An idle thread chooses what to do next. A choice that is not possible now is passed over.
    pub(crate) fn begin(&mut self, thread: usize, rng: &mut Rng) {
        let space = self.threads[thread].space;
        let choice = rng.weighted(&self.habits.weights);
        if choice >= 2 && !self.spaces[space].may_change() {
            return;
        }
        match choice {
            0 => self.touch(thread, 1, rng),
            1 => {
                let most = rng.between(1, self.habits.run_most);
                self.touch(thread, most, rng);
            }
            2 | 3 => {
                let Some(range) = self.choose(space, false, rng) else { return };
                if self.spaces[space].mapping_of(&range).is_some_and(|mapping| !mapping.locked) {
                    self.remove(thread, range, choice == 3, rng);
                }
            }
            4 => {
                let Some(range) = self.choose(space, true, rng) else { return };
                if !self.owes_unmap(space, &range) {
                    self.unmap(thread, range, rng);
                }
            }
            5 => {
                let pages = rng.between(1, PAGES_MOST);
                let Some(range) = self.choose_free(space, pages, rng) else { return };
                let heritage = match rng.below(100) {
                    0..8 => Heritage::Zeros,
                    8..16 => Heritage::Nothing,
                    _ => Heritage::Pages,
                };
                let file = rng.percent(4);
                self.map(space, range, file, heritage);
            }
            6 => {
                let Some(range) = self.choose(space, true, rng) else { return };
                if !self.owes_unmap(space, &range) {
                    self.map_over(thread, range, rng);
                }
            }
            7 | 9 => {
                let Some(range) = self.choose(space, true, rng) else { return };
                let more = if choice == 7 && rng.percent(30) { rng.between(1, 6) } else { 0 };
                let Some(to) = self.choose_free(space, range.len() + more, rng) else { return };
                self.relocate(thread, range, to.start, more, choice == 9, rng);
            }
            8 => {
                let (Some(from), Some(over)) = (self.choose(space, true, rng), self.choose(space, true, rng)) else {
                    return;
                };
                let pages = from.len().min(over.len());
                let from = from.start..from.start + pages;
                if !overlap(&from, &over) && !self.owes_unmap(space, &over) {
                    self.relocate(thread, from, over.start, 0, false, rng);
                }
            }
            10 => self.choose_to_grow(space, rng),
            11 => {
                let Some(range) = self.choose(space, true, rng) else { return };
                // The tail goes, to the end of the mapping.
                let tail = self.spaces[space].mapping_from(range.start);
                let tail = tail.end - range.len().min(tail.len())..tail.end;
                if !self.is_claimed(space, &tail, true) && !self.owes_unmap(space, &tail) {
                    self.unmap(thread, tail, rng);
                }
            }
            12 => self.choose_to_fork(thread, rng),
            13 => {
                // Most programs run for long, and most of their children do not.
                if rng.percent(if space < self.natives { 20 } else { 60 }) {
                    self.exit(space);
                }
            }
            14 => {
                let Some(range) = self.choose(space, true, rng) else { return };
                let lock = rng.percent(50);
                let slots = &mut self.spaces[space].slots[range];
                slots.iter_mut().filter_map(|slot| slot.mapping.as_mut()).for_each(|mapping| mapping.locked = lock);
            }
            _ => {
                let Some(range) = self.choose(space, true, rng) else { return };
                let pin = rng.percent(50);
                for slot in &mut self.spaces[space].slots[range] {
                    if let Content::Present(frame) = &mut slot.content {
                        // Pinning for writing breaks sharing first.
                        frame.pinned = pin;
                        frame.shared &= !pin;
                    }
                }
            }
        }
    }

    fn touch(&mut self, thread: usize, pages: usize, rng: &mut Rng) {
        let next = self.somewhere(self.threads[thread].space, rng);
        self.threads[thread].work = Work::Run { next, left: pages, write: rng.percent(50) };
    }

    fn choose_to_grow(&mut self, space: usize, rng: &mut Rng) {
        let Some(range) = self.choose(space, true, rng) else { return };
        let end = self.spaces[space].mapping_from(range.start).end;
        let more = end..end + rng.between(1, 8);
        if self.spaces[space].is_free(&more) && !self.is_claimed(space, &more, true) {
            self.grow(space, end, more.len());
        }
    }

    fn choose_to_fork(&mut self, thread: usize, rng: &mut Rng) {
        let space = self.threads[thread].space;
        let alive = self.spaces.iter().filter(|space| space.alive).count();
        let everything = 0..self.spaces[space].slots.len();
        let managed = self.spaces[space].any_registered(&everything);
        if managed && alive < self.habits.processes_most && !self.conceals_move(space) && rng.percent(30) {
            self.fork(thread, rng);
        }
    }

    /// A part of one anonymous mapping that no other thread is about to change.
    fn choose(&mut self, space: usize, removals_too: bool, rng: &mut Rng) -> Option<Range<usize>> {
        let of = &self.spaces[space];
        let start = (0..8).map(|_| self.somewhere(space, rng)).find(|&at| of.slots[at].is_anonymous())?;
        let whole = of.mapping_from(start);
        let range = start..start + rng.between(1, whole.len().min(PAGES_MOST));
        let free = !self.is_claimed(space, &range, removals_too && !self.habits.rude);
        self.spaces[space].remember(&range);
        free.then_some(range)
    }

    /// A slot: any, or one that a call was about of late.
    fn somewhere(&self, space: usize, rng: &mut Rng) -> usize {
        let of = &self.spaces[space];
        if of.recent.is_empty() || !rng.percent(self.habits.locality) {
            return rng.below(of.slots.len());
        }
        let recent = &of.recent[rng.below(of.recent.len())];
        if rng.percent(50) { recent.start } else { recent.start + rng.below(recent.len()) }
    }

    /// Free pages: the highest that fit, as the kernel chooses, or any.
    fn choose_free(&mut self, space: usize, pages: usize, rng: &mut Rng) -> Option<Range<usize>> {
        let of = &self.spaces[space];
        let last = of.slots.len().checked_sub(pages)?;
        let fits = |at: &usize| of.is_free(&(*at..at + pages));
        let at = if rng.percent(40) {
            (0..=last).rev().find(fits)
        } else {
            (0..8).map(|_| self.somewhere(space, rng).min(last)).find(fits)
        }?;
        let range = at..at + pages;
        let free = !self.is_claimed(space, &range, true);
        self.spaces[space].remember(&range);
        free.then_some(range)
    }
}

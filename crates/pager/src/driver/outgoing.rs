//! How pages leave memory that several targets have mapped, in place of an agent.

use spillway_core::evict::{Bytes, Captured, Run};
use spillway_core::page::{BufferIndex, State};
use spillway_core::{Page, Span, TargetId};
use spillway_store::is_zero;

use super::buffers::Buffer;
use super::{Driver, index};
use crate::commons::{Backing, Taken, View};
use crate::sys::agent::BATCH_PAGES;
use crate::sys::clock::now_ns;
use crate::tally::Tally;

/// Pages of a run of which the same has become.
struct Outgoing {
    run: Run,
    buffers: Vec<(BufferIndex, Buffer)>,
    taken: Taken,
    /// The number by which the first of them is written down, if they are.
    noted: Option<usize>,
}

impl Outgoing {
    fn home(&self) -> Span {
        Span::of_pages(self.run.address, self.run.pages)
    }
}

impl Driver {
    /// Takes pages of a commons out.
    pub(super) fn take_out(&mut self, at: usize, mut runs: Vec<Run>) {
        let Some(target) = &self.targets[at] else { return };
        let (id, commons) = (target.id, target.commons.as_ref());
        // Where a mapping is said to be gone, another may be in its place that is not known yet.
        let is_sure =
            |view: &View| self.targets[view.target.0 as usize].as_ref().is_none_or(|it| it.unmapped.is_empty());
        let Some(commons) = commons.filter(|commons| commons.views.iter().all(is_sure)) else {
            let pages = runs.iter().flat_map(|run| (0..run.pages).map(|nth| run.page.plus(nth)));
            pages.for_each(|page| self.core.captured(page, Captured::Untried));
            return self.pause_captures(now_ns());
        };
        let file = commons.backing();
        // Another thread is asked once for all of them.
        let at_a_time = if file.may_be_open { BATCH_PAGES } else { 1 };
        let mut odd = None;
        self.outgone = (0, 0);
        for some in runs.chunks(at_a_time) {
            let mut outgoing = Vec::with_capacity(some.len());
            for &run in some {
                let (pieces, who) = self.begin_leaving(id, run);
                odd = who.or(odd);
                for piece in pieces {
                    match piece.taken {
                        Taken::Out => outgoing.push(piece),
                        Taken::Stays | Taken::Untried => self.end_leaving(id, piece),
                    }
                }
            }
            if outgoing.is_empty() {
                continue;
            }
            self.note_leaving(id, &mut outgoing);
            let pieces = outgoing.iter().map(|piece| (piece.home(), piece.noted)).collect();
            // What this thread does itself is over when it is.
            let estate = self.hands.estate.clone().filter(|_| file.may_be_open);
            let mut outgoing = outgoing.into_iter();
            let punch = move |file: &Backing, (home, noted): (Span, Option<usize>)| {
                let noted = noted.map(|first| first..first + index(home.pages()));
                estate.iter().for_each(|estate| estate.set_punching(id, noted.clone()));
                let is_out = file.punch(home);
                estate.iter().for_each(|estate| estate.set_punching(id, None));
                is_out
            };
            self.call_on(id, file.clone(), pieces, punch, move |driver, is_out| {
                let Some(piece) = outgoing.next() else { return };
                let taken = if is_out { Taken::Out } else { Taken::Stays };
                driver.end_leaving(id, Outgoing { taken, ..piece });
            });
        }
        runs.clear();
        if let Some(target) = &mut self.targets[at] {
            target.runs = runs;
        }
        odd.into_iter().for_each(|odd| self.look_at_views(odd.0 as usize));
        match self.outgone {
            (0, 0) => self.pause_captures(now_ns()),
            (captured, stuck) => self.note_yield(captured, stuck),
        }
    }

    /// Reads a run into buffers while nobody can write to it: its pieces, of each of which the same becomes; and who has not mapped what
    /// was known.
    fn begin_leaving(&mut self, id: TargetId, run: Run) -> (Vec<Outgoing>, Option<TargetId>) {
        // `next_capture` chose no more pages than buffers are free.
        let take = |_| self.core.take_buffer().expect("a buffer for each page chosen");
        let buffers: Vec<BufferIndex> = (0..run.pages).map(take).collect();
        let mut buffers: Vec<_> = buffers.into_iter().map(|index| (index, self.hands.buffers.lend(index))).collect();
        let mut pages: Vec<&mut Page> = buffers.iter_mut().map(|(_, buffer)| buffer.page_mut()).collect();
        let home = Span::of_pages(run.address, run.pages);
        let (taken, odd) = match self.common_mut(id) {
            Some(commons) => commons.begin_leaving(home, &mut pages),
            None => (vec![Taken::Untried; pages.len()], None),
        };
        let (mut pieces, mut nth, mut buffers) = (Vec::new(), 0, buffers.into_iter());
        for alike in taken.chunk_by(|one, next| one == next) {
            let pages = alike.len() as u64;
            let run = Run { address: run.address.plus_pages(nth), page: run.page.plus(nth), pages };
            let buffers = buffers.by_ref().take(alike.len()).collect();
            pieces.push(Outgoing { run, buffers, taken: alike[0], noted: None });
            nth += pages;
        }
        (pieces, odd)
    }

    /// Says what became of pages of a run.
    fn end_leaving(&mut self, id: TargetId, piece: Outgoing) {
        self.common_mut(id).into_iter().for_each(|commons| commons.end_leaving(piece.home()));
        let Outgoing { run, buffers, taken, noted } = piece;
        match taken {
            Taken::Out => {
                self.outgone.0 += run.pages;
                self.tape.iter_mut().for_each(|tape| tape.evicted(run, run.pages));
                self.target(id).into_iter().for_each(|it| Tally::add(&it.tally.evicted_pages, run.pages));
            }
            Taken::Stays => self.outgone.1 += run.pages,
            Taken::Untried => {}
        }
        for (nth, (buffer, mut memory)) in buffers.into_iter().enumerate() {
            let page = run.page.plus(nth as u64);
            memory.known.forget();
            let bytes = if is_zero(memory.page()) { Bytes::Zero } else { Bytes::Here };
            self.hands.buffers.give_back(buffer, memory);
            // What was given up while it was on its way is found to be gone when that is over.
            let is_wanted = taken == Taken::Out && !self.core.is_being_removed(page);
            debug_assert_eq!(self.core.state_of(page), State::Mapped, "nothing becomes of what is on its way out");
            let outcome = match taken {
                _ if is_wanted => Captured::Moved(buffer),
                Taken::Stays => Captured::Stuck,
                Taken::Out | Taken::Untried => Captured::Untried,
            };
            if !is_wanted {
                self.core.return_buffer(buffer);
            }
            self.core.captured(page, outcome);
            if is_wanted {
                self.core.read(page, buffer, bytes);
            }
        }
        if let (Some(first), Some(estate)) = (noted, &self.hands.estate) {
            estate.end_leaving(id, first, index(run.pages));
        }
    }

    /// Writes down where the bytes of pages are that are about to be nowhere else.
    fn note_leaving(&self, id: TargetId, outgoing: &mut [Outgoing]) {
        let Some(estate) = &self.hands.estate else { return };
        let pages = outgoing.iter().flat_map(|piece| {
            let buffers = piece.buffers.iter().map(|(index, _)| *index);
            (0..).map(|nth| piece.run.page.plus(nth)).zip(buffers)
        });
        estate.begin_leaving(id, pages);
        let mut next = 0;
        for piece in outgoing {
            piece.noted = Some(next);
            next += piece.buffers.len();
        }
    }
}

//! How pages leave memory that several targets have mapped, in place of an agent.

use spillway_core::evict::{Bytes, Captured, Run};
use spillway_core::page::BufferIndex;
use spillway_core::{Page, Span, TargetId};
use spillway_store::is_zero;

use super::Driver;
use super::buffers::Buffer;
use crate::commons::{Backing, Taken, View};
use crate::sys::agent::BATCH_PAGES;
use crate::sys::clock::now_ns;
use crate::tally::Tally;

/// A run on its way out.
struct Outgoing {
    run: Run,
    buffers: Vec<(BufferIndex, Buffer)>,
    taken: Vec<Taken>,
}

impl Outgoing {
    fn home(&self) -> Span {
        Span::of_pages(self.run.address, self.run.pages)
    }

    fn count(&self, what: Taken) -> u64 {
        self.taken.iter().filter(|taken| **taken == what).count() as u64
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
        let (mut captured, mut stuck, mut odd) = (0, 0, None);
        for some in runs.chunks(at_a_time) {
            let mut outgoing = Vec::with_capacity(some.len());
            for &run in some {
                let (begun, who) = self.begin_leaving(id, run);
                odd = who.or(odd);
                outgoing.push(begun);
            }
            let spans = outgoing.iter_mut().map(|it| (it.home(), std::mem::take(&mut it.taken))).collect();
            let punch = |file: &Backing, (home, mut taken): (Span, Vec<Taken>)| {
                file.punch(home, &mut taken);
                taken
            };
            let mut outgoing = outgoing.into_iter();
            // One after the other: who has the file's lock by turns with us may need what is out already.
            self.call_on(file.clone(), spans, punch, |driver, taken| {
                let Some(left) = outgoing.next().map(|left| Outgoing { taken, ..left }) else { return };
                captured += left.count(Taken::Out);
                stuck += left.count(Taken::Stays);
                driver.end_leaving(id, left);
            });
        }
        runs.clear();
        if let Some(target) = &mut self.targets[at] {
            target.runs = runs;
            Tally::add(&target.tally.evicted_pages, captured);
        }
        odd.into_iter().for_each(|odd| self.look_at_views(odd.0 as usize));
        if captured + stuck == 0 {
            self.pause_captures(now_ns());
        } else {
            self.note_yield(captured, stuck);
        }
    }

    /// Reads a run into buffers while nobody can write to it; and who has not mapped what was known.
    fn begin_leaving(&mut self, id: TargetId, run: Run) -> (Outgoing, Option<TargetId>) {
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
        (Outgoing { run, buffers, taken }, odd)
    }

    /// Says what became of a run.
    fn end_leaving(&mut self, id: TargetId, left: Outgoing) {
        self.common_mut(id).into_iter().for_each(|commons| commons.end_leaving(left.home()));
        let Outgoing { run, .. } = left;
        if let Some(tape) = self.tape.as_mut().filter(|_| left.count(Taken::Out) == run.pages) {
            tape.evicted(run, run.pages);
        }
        for (nth, ((buffer, mut memory), taken)) in left.buffers.into_iter().zip(left.taken).enumerate() {
            let page = run.page.plus(nth as u64);
            memory.known.forget();
            let bytes = if is_zero(memory.page()) { Bytes::Zero } else { Bytes::Here };
            self.hands.buffers.give_back(buffer, memory);
            // What was given up while it was on its way is found to be gone when that is over.
            let is_wanted = taken == Taken::Out && !self.core.is_being_removed(page);
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
    }
}

//! Captures and writes: how room is made.

use spillway_core::TargetId;
use spillway_core::evict::{Bytes, Captured, Run};
use spillway_store::Put;

use std::sync::atomic::Ordering::Relaxed;

use super::hands::{to_bits, to_handle};
use super::moved::Moved;
use super::{Driver, RETRY_NS};
use crate::estate::Stage;
use crate::sys::agent::BATCH_PAGES;
use crate::sys::clock::now_ns;
use crate::tally::Tally;
use crate::target::{Flight, Target};

/// How far faults may go past the budget at a time, while nothing can be captured.
pub(super) const OVERDRAFT_PAGES: u64 = 64;

/// Pages written to the store between two looks for faults: about 6 us.
pub(super) const WRITES_PER_TURN: usize = 4;

/// How long it is taken for known what cannot leave at all.
const FIXED_FOR_NS: u64 = 10_000_000;

/// How well captures do. Where most of what is left is pinned, locked, or shared with a forked child, sweeping on and on
/// would take a CPU and bring nothing. Where it is in targets that nothing can be captured from, the others would be left with
/// nothing: each page that they touch would leave for the next. They are left an eighth of the budget, also beyond it.
#[derive(Default)]
pub(super) struct Yield {
    /// Pages tried, and captured, since the sweep was last round.
    tried: u64,
    captured: u64,
    /// Pages of targets that nothing can be captured from, and until when that is taken for known.
    fixed: (u64, u64),
    /// When to try again; zero while captures do well.
    pub(super) until_ns: u64,
    /// How long the next rest is.
    rest_ns: u64,
}

/// In pages: what targets hold, what of it is never tried, and how much may be local.
struct All {
    mapped: u64,
    fixed: u64,
    budget: u64,
}

impl Yield {
    /// The first rest, and the longest.
    const RESTS_NS: (u64, u64) = (200_000, 50_000_000);
    /// Fewer captures than one in so many tried are not worth it.
    const WORTH: u64 = 8;
    /// Where others are left less of the budget than one part in so many, they are left that, and for so long.
    const LEFT: u64 = 8;
    const LEFT_FOR_NS: u64 = 5_000_000;

    /// A batch brought so much, of `all`. Once the sweep has been round it may rest: then, how far faults may go past the budget
    /// meanwhile.
    fn note(&mut self, captured: u64, stuck: u64, all: &All, now_ns: u64) -> Option<u64> {
        self.captured += captured;
        self.tried += captured + stuck;
        if self.tried < all.mapped.saturating_sub(all.fixed) {
            return None;
        }
        let in_vain = self.captured * Self::WORTH < self.tried;
        (self.tried, self.captured) = (0, 0);
        if in_vain {
            self.rest_ns = (self.rest_ns * 2).clamp(Self::RESTS_NS.0, Self::RESTS_NS.1);
            self.until_ns = now_ns + self.rest_ns;
            return Some(u64::MAX / 2);
        }
        self.rest_ns = 0;
        let left = all.budget / Self::LEFT;
        if all.fixed.saturating_add(left) <= all.budget {
            return None;
        }
        self.until_ns = now_ns + Self::LEFT_FOR_NS;
        Some(left.max(OVERDRAFT_PAGES))
    }

    /// Waits a moment.
    fn pause(&mut self, now_ns: u64) {
        self.until_ns = self.until_ns.max(now_ns + RETRY_NS);
    }

    pub(super) fn is_resting(&self, now_ns: u64) -> bool {
        now_ns < self.until_ns
    }
}

impl Driver {
    /// Starts a capture, if one is wanted and possible.
    #[inline(never)]
    pub(super) fn evict(&mut self) {
        if self.yields.is_resting(now_ns()) {
            return;
        }
        if !self.targets.iter().flatten().any(Target::may_capture) {
            // Of what is on its way out nothing will ever be captured.
            if !self.targets.iter().flatten().any(Target::takes_orders) {
                self.empty_buffers();
            }
            return;
        }
        // Neither makes sense without buffers.
        if self.core.capturable_pages() > 0 && (self.free_staging() || self.capture_unshared() || self.unshare()) {
            return;
        }
        let most = self.core.next_batch_pages().min(BATCH_PAGES as u64);
        let mut runs: Vec<Run> = Vec::new();
        if let Some(spare) = self.targets.iter_mut().flatten().find(|target| target.may_capture()) {
            std::mem::swap(&mut runs, &mut spare.runs);
        }
        runs.clear();
        let targets = &self.targets;
        let may = |id: TargetId| targets[id.0 as usize].as_ref().is_some_and(Target::may_capture);
        let whose = self.core.next_capture(most, may, &mut self.access, &mut runs);
        let Some(at) = whose.map(|id| id.0 as usize).filter(|&at| self.targets[at].is_some()) else {
            let unswept = |it: &Target| it.takes_orders() && !it.may_capture();
            if self.targets.iter().flatten().any(unswept) {
                (0..WRITES_PER_TURN).take_while(|_| self.write_one(true)).count();
                self.awaits_agent = self.targets.iter().flatten().any(|target| target.flight != Flight::Idle);
            } else {
                self.empty_buffers();
            }
            return;
        };
        self.capture(at, runs, false);
    }

    /// Nothing can leave targets now: what is in buffers still can, and that may be enough.
    fn empty_buffers(&mut self) {
        let written = (0..WRITES_PER_TURN).filter(|_| self.write_one(true)).count();
        if self.journeys.writes() > 0 {
            // What the store keeps makes room as well.
            self.awaits_store = true;
        } else if written == 0 {
            self.note_yield(0, self.core.mapped_pages().max(1));
        }
    }

    /// Starts to capture `runs`, which were refused just now if `again`.
    pub(super) fn capture(&mut self, at: usize, mut runs: Vec<Run>, again: bool) {
        let Some(target) = &mut self.targets[at] else { return };
        if target.commons.is_some() {
            return self.take_out(at, runs);
        }
        if target.single > 0 {
            target.single -= 1;
            let singles = runs
                .iter()
                .flat_map(|run| {
                    (0..run.pages).map(|i| Run { address: run.address.plus_pages(i), page: run.page.plus(i), pages: 1 })
                })
                .collect();
            runs = singles;
        }
        for _ in 0..runs.iter().map(|run| run.pages).sum() {
            // `next_capture` chose no more pages than buffers are free.
            target.buffers.push(self.core.take_buffer().expect("a buffer for each page chosen"));
        }
        target.runs = runs;
        let pages = target.buffers.len();
        if self.placement.may_share_with(self.hands.reader.thread(), &self.shared) {
            self.hands.reader.announce(pages);
        }
        self.errand_begins(at);
        let Some(target) = &mut self.targets[at] else { return };
        let estate = self.hands.estate.as_ref();
        target.start_capture(again, |id, runs| {
            if let Some(estate) = estate {
                estate.prepare_batch(id, runs);
                estate.set_batch(id, Some(Stage::Begun));
            }
        });
    }

    /// A batch brought `captured` pages, and `stuck` would not leave. Faults must not wait for those, and may go past the
    /// budget: a little while the sweep goes on, and freely once it has been round in vain.
    pub(super) fn note_yield(&mut self, captured: u64, stuck: u64) {
        let now_ns = now_ns();
        let fixed = self.fixed_pages(now_ns);
        let all = All { mapped: self.core.mapped_pages(), fixed, budget: self.core.budget_pages() };
        let rests = self.yields.note(captured, stuck, &all, now_ns);
        self.core.set_overdraft(rests.unwrap_or(if captured == 0 { OVERDRAFT_PAGES } else { 0 }));
    }

    /// Pages of targets that nothing can be captured from: forked children that are not equipped yet, for want of descriptors, say.
    fn fixed_pages(&mut self, now_ns: u64) -> u64 {
        let is_fixed = |target: &&Target| !target.takes_orders() && !target.leaving;
        let mut them = self.targets.iter().flatten().filter(is_fixed).peekable();
        if them.peek().is_none() {
            return 0;
        }
        if now_ns >= self.yields.fixed.1 {
            let pages = them.map(|target| self.core.held_by(target.id).0).sum();
            self.yields.fixed = (pages, now_ns + FIXED_FOR_NS);
        }
        self.yields.fixed.0
    }

    /// Captures what has become a target's own since it was refused: the kernel may soon merge it again. False when there is
    /// nothing of that kind.
    fn capture_unshared(&mut self) -> bool {
        for at in 0..self.targets.len() {
            let ready = |target: &&mut Target| !target.unshared.is_empty() && target.may_capture();
            let Some(target) = self.targets[at].as_mut().filter(ready) else { continue };
            let runs = self.core.capturable_again(target.id, &target.unshared);
            target.unshared.clear();
            if !runs.is_empty() {
                self.capture(at, runs, true);
                return true;
            }
        }
        false
    }

    /// Starts to give a target copies of its own of what it shares, with forked children that have ended or because it is
    /// merged; false when there is nothing of that kind.
    fn unshare(&mut self) -> bool {
        let parents: Vec<TargetId> = self.targets.iter().flatten().filter_map(|target| target.parent).collect();
        for at in 0..self.targets.len() {
            let ready = |it: &&mut Target| it.may_capture() && !it.shared_runs.is_empty() && !parents.contains(&it.id);
            let Some(target) = self.targets[at].as_mut().filter(ready) else { continue };
            // Not what has left meanwhile: it would come home.
            let runs = self.core.capturable_again(target.id, &target.shared_runs);
            target.shared_runs.clear();
            if runs.is_empty() {
                continue;
            }
            self.errand_begins(at);
            if self.targets[at].as_mut().is_some_and(|target| target.unshare(runs)) {
                return true;
            }
        }
        false
    }

    /// The agent of this target is about to be sent on an errand.
    pub(super) fn errand_begins(&mut self, at: usize) {
        self.place_agent(at);
        if let Some(target) = &mut self.targets[at] {
            target.ordered_ns = now_ns();
            if let Some(estate) = &self.hands.estate {
                estate.set_ordered(target.id, true);
            }
        }
        self.shared.errands_begun.fetch_add(1, Relaxed);
    }

    /// Has staging unlocked and emptied where that could not be emptied; false when there is nothing of that kind.
    fn free_staging(&mut self) -> bool {
        let ready = |target: &Option<Target>| {
            target.as_ref().is_some_and(|target| target.staging_locked && target.may_capture())
        };
        let Some(at) = self.targets.iter().position(ready) else { return false };
        self.errand_begins(at);
        self.targets[at].as_mut().is_some_and(Target::drop_staged)
    }

    #[inline(never)]
    pub(super) fn drop_staged(&mut self) {
        for at in 0..self.targets.len() {
            if self.targets[at].as_ref().is_some_and(|target| target.staged && target.may_capture()) {
                self.errand_begins(at);
                self.targets[at].as_mut().map(Target::drop_staged);
            }
        }
    }

    /// Takes over what a capture brought, and begins to read it.
    pub(super) fn collect(&mut self, at: usize, first_call: usize, again: bool) {
        // Another target's, which was captured at the same time.
        self.hands.finish_reading(true, &mut self.core);
        let Some(target) = &mut self.targets[at] else { return };
        let Some(agent) = &target.agent else { return };
        let mut buffers = target.buffers.drain(..);
        let (mut captured, mut stuck) = (0, 0);
        let mut staging = agent.layout.staging;
        // Then it is staging that refuses, and not what was to leave.
        target.staging_locked = agent.memory.result(0) == -i64::from(libc::EINVAL);
        for (i, run) in target.runs.iter().enumerate() {
            let moved = Moved::of(agent, target.pagemap.as_ref(), i, run, staging);
            staging = staging.plus_pages(run.pages);
            let refused = i32::try_from(-agent.memory.result(first_call + i)).unwrap_or(0);
            if refused == libc::EINVAL && run.pages > 1 && !target.staging_locked {
                target.single = 64;
            }
            if let Some(tape) = &mut self.tape {
                tape.evicted(*run, moved.pages());
            }
            for (n, buffer) in (0..run.pages).zip(&mut buffers) {
                let page = run.page.plus(n);
                let is_lost = moved.has_lost(n);
                let outcome = if moved.has(n) || is_lost {
                    Captured::Moved(buffer)
                } else if n == moved.told
                    && !target.staging_locked
                    && !matches!(refused, 0 | libc::EAGAIN | libc::EINTR)
                {
                    Captured::Stuck
                } else {
                    Captured::Untried
                };
                // Where one page is shared, those behind it mostly are. What is still refused afterwards is pinned.
                if outcome == Captured::Stuck
                    && refused == libc::EBUSY
                    && !again
                    && target.shared_runs.len() < BATCH_PAGES
                {
                    let rest = Run { address: run.address.plus_pages(n), page, pages: run.pages - n };
                    target.shared_runs.push(rest);
                }
                let was_moved = matches!(outcome, Captured::Moved(_));
                captured += u64::from(was_moved);
                stuck += u64::from(outcome == Captured::Stuck);
                if !was_moved {
                    self.core.return_buffer(buffer);
                }
                self.core.captured(page, outcome);
                if is_lost {
                    self.core.read(page, buffer, Bytes::Lost);
                }
                self.hands.reader.note((was_moved && !is_lost).then_some(page), buffer);
            }
        }
        drop(buffers);
        target.runs.clear();
        Tally::add(&target.tally.evicted_pages, captured);
        let elsewhere = self.placement.may_share_with(self.hands.reader.thread(), &self.shared);
        self.hands.begin_reading(target.id, agent, elsewhere, &self.core);
        self.hands.finish_reading(false, &mut self.core);
        if captured + stuck == 0 {
            self.pause_captures(now_ns());
        } else {
            self.note_yield(captured, stuck);
        }
    }

    /// The agent has ended in the middle of a capture. Whoever has the same memory and lives on (`CLONE_VM`) finds no page of it where
    /// it was; and staging cannot be read for certain through a process that has ended, or has called exec.
    pub(super) fn lose_capture(&mut self, at: usize) {
        let Some(target) = &mut self.targets[at] else { return };
        let Some(agent) = &target.agent else { return };
        let mut buffers = target.buffers.drain(..);
        let mut staging = agent.layout.staging;
        for (i, run) in target.runs.iter().enumerate() {
            let moved = Moved::of(agent, target.pagemap.as_ref(), i, run, staging);
            staging = staging.plus_pages(run.pages);
            for (n, buffer) in (0..run.pages).zip(&mut buffers) {
                let page = run.page.plus(n);
                if moved.has(n) || moved.has_lost(n) {
                    self.core.captured(page, Captured::Moved(buffer));
                    self.core.read(page, buffer, Bytes::Gone);
                } else {
                    self.core.return_buffer(buffer);
                    self.core.captured(page, Captured::Untried);
                }
            }
        }
        drop(buffers);
        target.runs.clear();
    }

    /// Mappings are changing: whoever changes them needs the CPU to say so.
    pub(super) fn pause_captures(&mut self, now_ns: u64) {
        self.yields.pause(now_ns);
    }

    pub(super) fn write_one(&mut self, all: bool) -> bool {
        if !self.hands.store.accepts() {
            // With something under way it is busy, and the ends will tell. Without, it is away: targets must not wait for it.
            if self.journeys.writes() == 0
                && !self.journeys.are_under_way()
                && let Some(write) = self.core.next_write(all)
            {
                self.core.write_declined(write);
            }
            return false;
        }
        let Some(write) = self.core.next_write(all) else { return false };
        let (page, known) = self.hands.buffers.page(write.buffer).expect("what is written has been read");
        let previous = write.previous.map(to_handle);
        let put = self.hands.store.put_prepared(page, known, previous);
        if let (Ok(_), Some(previous)) = (put, write.previous) {
            self.journeys.write_ends(previous);
        }
        match put {
            Ok(Put::Unchanged(handle)) => self.core.written(write, to_bits(handle), true),
            Ok(Put::Stored(handle)) => self.core.written(write, to_bits(handle), false),
            Ok(Put::Pending(handle)) => {
                self.journeys.write_begins(write.page, to_bits(handle));
                self.core.handed(write, to_bits(handle));
            }
            Err(_) => {
                self.core.write_declined(write);
                return false;
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::{All, OVERDRAFT_PAGES, Yield};

    #[test]
    fn a_sweep_that_is_round_in_vain_rests_ever_longer() {
        let mut yields = Yield::default();
        let all = All { mapped: 100, fixed: 0, budget: 100 };
        assert_eq!(yields.note(0, 90, &all, 0), None, "it is not round yet");
        assert_eq!(yields.note(1, 9, &all, 0), Some(u64::MAX / 2));
        assert!(yields.is_resting(Yield::RESTS_NS.0 - 1) && !yields.is_resting(Yield::RESTS_NS.0));
        assert_eq!(yields.note(0, 100, &all, 0), Some(u64::MAX / 2));
        assert!(yields.is_resting(2 * Yield::RESTS_NS.0 - 1));
        assert_eq!(yields.note(50, 50, &all, 0), None, "half of it could leave");
    }

    /// A child that had an agent was left with nothing by ten that had none, for want of descriptors: its two pages took turns.
    #[test]
    fn who_alone_can_be_captured_from_is_left_something() {
        let beside = |fixed, budget| {
            let mut yields = Yield::default();
            let all = All { mapped: fixed + 100, fixed, budget };
            (yields.note(99, 0, &all, 0), yields.note(1, 0, &all, 0), yields.is_resting(0))
        };
        assert_eq!(beside(10_000, 1600), (None, Some(200), true));
        assert_eq!(beside(1500, 1600), (None, Some(200), true));
        assert_eq!(beside(100, 80), (None, Some(OVERDRAFT_PAGES), true));
        assert_eq!(beside(1400, 1600), (None, None, false), "an eighth is left");
        assert_eq!(beside(0, 100), (None, None, false));
    }
}

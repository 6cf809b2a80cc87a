//! The driver's captures: choosing, starting and collecting them, and what to do when nothing can leave.

use spillway_core::TargetId;
use spillway_core::evict::{Captured, Run};

use crate::agent::{Moves, Refusal};
use crate::death::{Batch, Killed};
use crate::driver::Driver;
use crate::kernel::{Kernel, Work};
use crate::letters::Report;
use crate::mutation::Mutation;
use crate::target::Target;

/// Pages in one batch.
const BATCH_PAGES: u64 = 64;
/// Pages remembered that a forked child may share.
const SHARED_MOST: usize = 64;
/// How far faults may go past the budget at a time, while nothing can be captured.
pub const OVERDRAFT_PAGES: u64 = 64;

/// How long to wait between two attempts to capture, at first and at last, in steps.
const REST_LEAST: u64 = 10;
/// See [`REST_LEAST`].
pub const REST_MOST: u64 = 40;
/// How long to wait for the end of a change of mappings, in steps.
const RETRY: u64 = 5;

/// What an agent is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flight {
    /// Nothing.
    Idle,
    /// Moving pages out: no event may be read meanwhile.
    Capture {
        /// Pages that were refused just now, and made the target's own since.
        again: bool,
    },
    /// Something that does not mind events.
    Other,
}

/// How well captures do. Where most of what is left is pinned, locked, or shared with a forked child, sweeping on and on
/// would take a CPU and bring nothing. Times in steps.
#[derive(Clone, Copy, Debug, Default)]
pub struct Yield {
    tried: u64,
    captured: u64,
    until: u64,
    rest: u64,
}

impl Yield {
    /// Fewer captures than one in so many tried are not worth it.
    const WORTH: u64 = 8;

    /// A batch brought so much, of `mapped` pages in all. True when the sweep has been round in vain: then it rests.
    fn note(&mut self, captured: u64, stuck: u64, mapped: u64, now: u64) -> bool {
        self.captured += captured;
        self.tried += captured + stuck;
        if self.tried < mapped {
            return false;
        }
        let in_vain = self.captured * Self::WORTH < self.tried;
        (self.tried, self.captured) = (0, 0);
        if in_vain {
            self.rest = (self.rest * 2).clamp(REST_LEAST, REST_MOST);
            self.until = now + self.rest;
        } else {
            self.rest = 0;
        }
        in_vain
    }
}

impl Driver {
    /// Whether an agent moves pages out.
    pub(crate) fn is_capturing(&self) -> bool {
        self.targets.iter().flatten().any(|target| matches!(target.flight, Flight::Capture { .. }))
    }

    /// Hears that an agent is done, or gone.
    pub(crate) fn hear_agent(&mut self, kernel: &mut Kernel, at: usize) {
        let Some(target) = &mut self.targets[at] else { return };
        let Some(agent) = target.agent else { return };
        if kernel.threads[agent].dead {
            target.agent = None;
            target.flight = Flight::Idle;
            target.buffers.drain(..).for_each(|buffer| self.core.return_buffer(buffer));
            let id = target.id;
            if !self.reader.is_at_work() {
                self.lose_batch(id);
            }
            self.reports.push_back(Report::AgentGone(id));
            return;
        }
        match (target.flight, &mut kernel.threads[agent].work) {
            (Flight::Capture { again }, Work::Moves(moves)) if moves.is_done() => {
                target.flight = Flight::Idle;
                let outcomes = std::mem::take(&mut moves.outcomes);
                kernel.threads[agent].work = Work::Idle;
                let id = target.id;
                let taken_up = target.runs.is_empty();
                self.batches.entry(id).and_modify(|batch| batch.outcomes = Some(outcomes.clone()));
                if taken_up {
                    return self.collect_again(kernel, id);
                }
                self.collect(kernel, at, &outcomes, again);
            }
            (Flight::Other, Work::Idle) => target.flight = Flight::Idle,
            _ => {}
        }
    }

    /// Takes over what a capture brought.
    fn collect(&mut self, kernel: &mut Kernel, at: usize, outcomes: &[crate::agent::Moved], again: bool) {
        if !self.is(Mutation::CaptureUnread) {
            // Another target's, which was captured at the same time.
            self.finish_reading(kernel.now, true);
        }
        let Some(target) = &mut self.targets[at] else { return };
        let mut buffers = target.buffers.drain(..);
        let (mut captured, mut stuck) = (0, 0);
        let mut staged = Vec::new();
        for (run, moved) in target.runs.iter().zip(outcomes) {
            if moved.refusal == Some(Refusal::Invalid) && run.pages > 1 {
                target.single = 64;
            }
            for (n, buffer) in (0..run.pages).zip(&mut buffers) {
                let page = run.page.plus(n);
                let within = usize::try_from(n).expect("a block");
                let outcome = match moved.values.get(within) {
                    Some(&value) => {
                        staged.push((page, buffer, value));
                        Captured::Moved(buffer)
                    }
                    None if within == moved.values.len() && moved.refusal != Some(Refusal::Again) => Captured::Stuck,
                    None => Captured::Untried,
                };
                let room = target.shared.len() < SHARED_MOST;
                if outcome == Captured::Stuck && moved.refusal == Some(Refusal::Busy) && !again && room {
                    let rest = Run { address: run.address.plus_pages(n), page, pages: run.pages - n };
                    target.shared.push(rest);
                }
                let was_moved = matches!(outcome, Captured::Moved(_));
                captured += u64::from(was_moved);
                stuck += u64::from(outcome == Captured::Stuck);
                if !was_moved {
                    self.core.return_buffer(buffer);
                }
                self.core.captured(page, outcome);
                if let Some(left) = &mut self.lives {
                    if *left == 0 {
                        std::panic::resume_unwind(Box::new(Killed));
                    }
                    *left -= 1;
                }
            }
        }
        drop(buffers);
        kernel.trace.note(kernel.now, || format!("pager collects {:?} of {}: {outcomes:?}", target.runs, target.space));
        target.runs.clear();
        let id = target.id;
        self.begin_reading(id, &staged, kernel.now);
        if captured + stuck == 0 {
            // Mappings are changing: whoever changes them needs the CPU to say so.
            self.yields.until = self.yields.until.max(kernel.now + RETRY);
        } else {
            self.note_yield(captured, stuck, kernel.now);
        }
    }

    /// Starts a capture, if one is wanted and possible.
    pub(crate) fn evict(&mut self, kernel: &mut Kernel) {
        if kernel.now < self.yields.until {
            return;
        }
        // A sweep takes the second chances of those that it passes over: it should pass over nobody for long.
        let mut equipped = self.targets.iter().flatten().filter(|target| target.agent.is_some());
        let any = if kernel.quiet { equipped.all(Target::may_capture) } else { equipped.any(Target::may_capture) };
        if !any {
            if !self.waits_for_agents() && !self.write_some(kernel.now) {
                self.note_yield(0, self.core.mapped_pages().max(1), kernel.now);
            }
            return;
        }
        // Neither makes sense without buffers.
        if self.core.capturable_pages() > 0 && (self.capture_unshared(kernel) || self.unshare(kernel)) {
            return;
        }
        let most = self.core.next_batch_pages().min(BATCH_PAGES);
        let mut runs: Vec<Run> = Vec::new();
        let targets = &self.targets;
        let may = |id: TargetId| targets[id.0 as usize].as_ref().is_some_and(Target::may_capture);
        let whose = self.core.next_capture(most, may, &mut (), &mut runs);
        let Some(target) = whose.filter(|id| self.targets[id.0 as usize].is_some()) else {
            if !self.write_some(kernel.now) {
                self.note_yield(0, self.core.mapped_pages().max(1), kernel.now);
            }
            return;
        };
        self.capture(kernel, target, runs, false);
    }

    /// Starts to capture `runs`, which were refused just now if `again`.
    fn capture(&mut self, kernel: &mut Kernel, target: TargetId, mut runs: Vec<Run>, again: bool) {
        let Some(target) = &mut self.targets[target.0 as usize] else { return };
        if target.single > 0 {
            target.single -= 1;
            let single = |run: Run| {
                (0..run.pages).map(move |i| Run {
                    address: run.address.plus_pages(i),
                    page: run.page.plus(i),
                    pages: 1,
                })
            };
            runs = runs.into_iter().flat_map(single).collect();
        }
        for _ in 0..runs.iter().map(|run| run.pages).sum() {
            target.buffers.push(self.core.take_buffer().expect("a buffer for each page chosen"));
        }
        kernel.trace.note(kernel.now, || format!("pager captures {runs:?} of {}", target.space));
        let moves = Moves::new(runs.iter().map(Self::slots_of).collect());
        if self.estate.is_some() {
            let batch = Batch { runs: runs.clone(), outcomes: None, collected: false };
            self.batches.insert(target.id, batch);
        }
        target.runs = runs;
        (target.flight, target.looked) = (Flight::Capture { again }, false);
        let agent = target.agent.expect("it may be captured");
        self.point();
        kernel.threads[agent].work = Work::Moves(moves);
    }

    /// A batch brought `captured` pages, and `stuck` would not leave. Faults must not wait for those, and may go past the
    /// budget: a little while the sweep goes on, and freely once it has been round in vain.
    fn note_yield(&mut self, captured: u64, stuck: u64, now: u64) {
        if self.is(Mutation::NoOverdraft) {
            return;
        }
        let in_vain = self.yields.note(captured, stuck, self.core.mapped_pages(), now);
        self.overdraw(match (in_vain, captured) {
            (true, _) => u64::MAX / 2,
            (false, 0) => OVERDRAFT_PAGES,
            (false, _) => 0,
        });
    }

    /// Faults may make so many more pages local than the budget says.
    pub(crate) fn overdraw(&mut self, pages: u64) {
        self.core.set_overdraft(pages);
        self.overdraws = pages > 0;
        self.excused |= pages > 0;
    }

    /// Nothing can leave targets now: what is in buffers still can, and that may be enough. So may what leaves them now.
    fn write_some(&mut self, now: u64) -> bool {
        let leaving = self.journeys.writes() > 0;
        (0..4).filter(|_| self.write_one(now, true)).count() > 0 || leaving
    }

    /// Whether something may be captured soon.
    fn waits_for_agents(&self) -> bool {
        self.targets.iter().flatten().any(|target| target.agent.is_some())
    }

    /// Captures what has become a target's own since it was refused: the kernel may soon merge it again. False when there is
    /// nothing of that kind.
    fn capture_unshared(&mut self, kernel: &mut Kernel) -> bool {
        for at in 0..self.targets.len() {
            let ready = |target: &&mut Target| !target.unshared.is_empty() && target.may_capture();
            let Some(target) = self.targets[at].as_mut().filter(ready) else { continue };
            let (id, named) = (target.id, std::mem::take(&mut target.unshared));
            let runs = self.again(id, &named);
            if !runs.is_empty() {
                self.capture(kernel, id, runs, true);
                return true;
            }
        }
        false
    }

    fn again(&self, target: TargetId, named: &[Run]) -> Vec<Run> {
        let mut runs = self.core.capturable_again(target, named);
        runs.truncate(usize::try_from(BATCH_PAGES).expect("a batch"));
        runs
    }

    /// Starts to give a target copies of its own of what it shares, with forked children that have ended or because it is
    /// merged; false when there is nothing of that kind.
    fn unshare(&mut self, kernel: &mut Kernel) -> bool {
        let parents: Vec<TargetId> = self.targets.iter().flatten().filter_map(|target| target.parent).collect();
        for at in 0..self.targets.len() {
            let ready = |it: &&mut Target| it.may_capture() && !it.shared.is_empty() && !parents.contains(&it.id);
            let Some(target) = self.targets[at].as_mut().filter(ready) else { continue };
            let (id, named) = (target.id, std::mem::take(&mut target.shared));
            // Not what has left meanwhile: it would come home.
            let runs = self.again(id, &named);
            let Some(target) = self.targets[at].as_mut().filter(|_| !runs.is_empty()) else { continue };
            target.flight = Flight::Other;
            let agent = target.agent.expect("it may be captured");
            kernel.threads[agent].work = Work::Populate(runs.iter().flat_map(Self::slots_of).collect());
            target.unshared = runs;
            return true;
        }
        false
    }
}

//! Recording: records into a ring, and windows in which first touches show.

use spillway_core::evict::Run;
use spillway_core::pager::{Blocks, Pager, Plan};
use spillway_core::sample::HASHES;
use spillway_core::streams::BLOCK_PAGES_MAX;
use spillway_core::{Span, TargetId};
use spillway_study::record::{Access, Fault, Record, What};

use super::{BUFFERS, Driver};
use crate::recording::Recording;
use crate::sys::agent::BATCH_PAGES;
use crate::sys::clock::now_ns;
use crate::target::{Flight, Target, Waiting};

/// A recording under way.
pub(super) struct Tape {
    recording: Recording,
    /// When the next window begins, in monotonic nanoseconds.
    next_ns: u64,
}

impl Tape {
    /// Begins a recording. In windows a fault moves no page but its own, whose first touch would not show; but where only a
    /// sample is looked at, blocks of zeros may go on: a page in one just seems to be touched later.
    pub(super) fn begin(recording: Recording, core: &mut Pager) -> Self {
        if let Some(windows) = recording.windows {
            let fill_pages = if windows.hash_below < HASHES { BLOCK_PAGES_MAX } else { 1 };
            core.set_blocks(Blocks { fill_pages, fetch_pages: 1, ..Blocks::LARGEST });
        }
        Self { recording, next_ns: 0 }
    }

    /// Which pages leave in windows.
    pub(super) fn hash_below(&self) -> u64 {
        self.recording.windows.map_or(HASHES, |windows| windows.hash_below)
    }

    fn put(&mut self, time_ns: u64, what: What) {
        self.recording.to.put(Record { time_ns, what });
    }

    /// A fault was served, by `plan`. One in no region has no page yet, and one for a page that was on its way is part of
    /// the fault that it waited for.
    pub(super) fn fault(&mut self, plan: Plan, fault: Waiting, served_ns: u64) {
        let (page, kind) = match plan {
            Plan::Zero { page: Some(page), .. } => (page, Fault::FirstTouch),
            Plan::Buffer { page, .. } => (page, Fault::Refault),
            Plan::Fetch { page, asked, .. } => (page.plus(asked), Fault::Fetch),
            Plan::Zero { page: None, .. } | Plan::Lost { .. } | Plan::Coming | Plan::NoRoom => return,
        };
        let access = if fault.write { Access::Write } else { Access::Read };
        let service_ns = served_ns.saturating_sub(fault.since_ns);
        self.put(served_ns, What::Fault { page: page.0, fault: kind, access, service_ns });
    }

    /// The first `pages` of a run were captured.
    pub(super) fn evicted(&mut self, run: Run, pages: u64) {
        if pages > 0 {
            self.put(now_ns(), What::Evicted { page: run.page.0, pages });
        }
    }

    /// The pages at `span` are `target`'s no more, or read as zeros.
    pub(super) fn removed(&mut self, core: &Pager, target: TargetId, span: Span) {
        for region in core.regions().within(target, span) {
            self.put(now_ns(), What::Removed { page: region.first.0, pages: region.span.pages() });
        }
    }

    /// A target is gone.
    pub(super) fn ended(&mut self, core: &Pager, target: TargetId) {
        let regions: Vec<Span> = core.regions().of(target).map(|region| region.span).collect();
        regions.into_iter().for_each(|span| self.removed(core, target, span));
    }
}

impl Driver {
    /// Whether the sweep of a window can go on: pages can leave buffers, and there are buffers for a batch.
    pub(super) fn may_sweep(&self) -> bool {
        let free = u64::from(BUFFERS).saturating_sub(self.core.buffered_pages());
        self.core.is_sweeping() && !self.core.is_store_full() && free >= BATCH_PAGES as u64
    }

    /// Lets the sweep go on by a batch. Every target that has an agent must be ready: pages that were passed over would
    /// not leave in this window.
    #[inline(never)]
    pub(super) fn sweep(&mut self) {
        let mut equipped = self.targets.iter().flatten().filter(|target| target.agent.is_some());
        if !equipped.all(Target::may_capture) {
            self.awaits_agent = self.targets.iter().flatten().any(|target| target.flight != Flight::Idle);
            return;
        }
        let Some(hash_below) = self.tape.as_ref().map(Tape::hash_below) else { return };
        let targets = &self.targets;
        let may = |id: TargetId| targets[id.0 as usize].as_ref().is_some_and(Target::may_capture);
        let mut runs: Vec<Run> = Vec::with_capacity(BATCH_PAGES);
        if let Some(whose) = self.core.next_window_capture(BATCH_PAGES as u64, hash_below, may, &mut runs) {
            self.capture(whose.0 as usize, runs, false);
        }
    }

    /// Begins a window when it is time, unless the sweep of the last is under way or pages come home for good.
    pub(super) fn begin_window(&mut self) {
        let Some(tape) = &mut self.tape else { return };
        let Some(windows) = tape.recording.windows else { return };
        if self.core.is_sweeping() || self.release.is_some() || !self.targets.iter().flatten().any(Target::may_look) {
            return;
        }
        let now_ns = now_ns();
        if now_ns >= tape.next_ns {
            tape.next_ns = now_ns + u64::try_from(windows.length.as_nanos()).unwrap_or(u64::MAX / 2);
            tape.put(now_ns, What::Window);
            self.core.begin_window();
        }
    }

    /// How long until the next window is to begin; none when none is.
    pub(super) fn until_window(&self) -> Option<u64> {
        let tape = self.tape.as_ref().filter(|tape| tape.recording.windows.is_some())?;
        let any = self.targets.iter().flatten().any(Target::may_look);
        (any && self.release.is_none() && !self.core.is_sweeping()).then(|| tape.next_ns.saturating_sub(now_ns()))
    }
}

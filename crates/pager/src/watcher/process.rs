//! What is known of one process.

use std::sync::Arc;
use std::time::{Duration, Instant};

use spillway_core::{Span, TargetId};

use crate::adopt;
use crate::error::Error;
use crate::procfs::{self, Size};
use crate::sys::pagemap::Pagemap;
use crate::sys::ptrace::Seized;
use crate::tally::Tally;

/// Between adoptions of a process that fail for what may pass: at first, then twice as long each time, and at last. One that does
/// not stop holds up the watcher while it is tried.
const ADOPT_AGAIN_SOONEST: Duration = Duration::from_secs(1);
const ADOPT_AGAIN_LATEST: Duration = Duration::from_secs(64);

/// How often it is looked whether a debugger traces a target.
const TRACER_EVERY: Duration = Duration::from_millis(100);

/// What came of the last attempt to adopt a process.
#[derive(Clone, Copy)]
pub(super) struct Refusal {
    /// When that is tried again, if ever.
    again_at: Option<Instant>,
    waited: Duration,
}

impl Refusal {
    /// What `error` means for a process, which was refused `before`, if it was.
    pub(super) fn new(error: &Error, before: Option<Self>, now: Instant) -> Self {
        let waited = before.map_or(ADOPT_AGAIN_SOONEST, |before| (before.waited * 2).min(ADOPT_AGAIN_LATEST));
        Self { again_at: error.may_pass().then(|| now + waited), waited }
    }

    /// Whether it is not to be tried now.
    pub(super) fn stands(self, now: Instant) -> bool {
        self.again_at.is_none_or(|at| now < at)
    }
}

/// What is known of a process.
pub(super) struct Process {
    pub(super) started: u64,
    /// What is told of its tree.
    pub(super) tally: Arc<Tally>,
    pub(super) target: Option<TargetId>,
    pub(super) pagemap: Option<Pagemap>,
    /// Its agent's thread,
    pub(super) agent: i32,
    /// where that is kept seized,
    pub(super) seized: Option<Seized>,
    /// and when it was last looked whether someone else traces the process.
    tracer_at: Option<Instant>,
    /// Our own mapping in it that looks like any other.
    pub(super) staging: Option<Span>,
    /// What it has handed over, with a userfaultfd of its own: nothing else of it is managed.
    pub(super) handed: Option<Vec<Span>>,
    /// At the last reading of its mappings.
    pub(super) seen: Size,
    pub(super) read_at: Option<Instant>,
    /// Adoption failed.
    pub(super) refusal: Option<Refusal>,
    /// It came by a fork that was told of: all that it had then was registered when it was born.
    pub(super) was_forked: bool,
    /// A forked child that has an agent only so that its userfaultfd outlives us: its memory is still its parent's.
    pub(super) kept_only: bool,
    /// When its private memory was last measured, and how long to wait for the next time.
    pub(super) private_at: Option<Instant>,
    pub(super) private_wait: Duration,
}

impl Process {
    pub(super) fn new(started: u64, tally: Arc<Tally>) -> Self {
        Self {
            started,
            tally,
            target: None,
            pagemap: None,
            agent: 0,
            seized: None,
            tracer_at: None,
            staging: None,
            handed: None,
            seen: Size::default(),
            read_at: None,
            refusal: None,
            was_forked: false,
            kept_only: false,
            private_at: None,
            private_wait: Duration::ZERO,
        }
    }

    /// Leads the agent of a process that is stopped as a whole (Ctrl-Z) on, once it is to leave: what it was in the middle of is waited for.
    /// One that is kept seized is led always; where we may not, it goes on when its process does.
    pub(super) fn lead_agent(&mut self, pid: i32) {
        let is_stopped = || procfs::thread_stat(pid, self.agent).is_ok_and(|stat| stat.state == b'T');
        if self.agent != 0 && self.seized.is_none() && is_stopped() {
            self.seized = Seized::to_lead(self.agent);
        }
    }

    /// Keeps a seized agent running, and lets go of it while a debugger traces the process: one that finds a thread which it
    /// cannot have tries again for ever.
    pub(super) fn tend_agent(&mut self, pid: i32) {
        if let Some(seized) = &mut self.seized {
            seized.tend();
        }
        if self.target.is_none() || self.agent == 0 || self.tracer_at.is_some_and(|at| at.elapsed() < TRACER_EVERY) {
            return;
        }
        let living = procfs::living_thread(pid).unwrap_or(pid);
        let traced = procfs::status_field(living, "TracerPid").is_some_and(|tracer| tracer != "0");
        match (&mut self.seized, traced) {
            (Some(seized), true) => {
                // Stopped and dropped: that detaches. A failure means that it is dying.
                let _ = seized.stop();
                self.seized = None;
            }
            (None, false) if self.tracer_at.is_some() && adopt::keeps_seized() => {
                self.seized = Seized::unfiltered(self.agent).ok();
            }
            _ => {}
        }
        self.tracer_at = Some(Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_pass_is_tried_again_ever_more_seldom_and_nothing_else_is() {
        let now = Instant::now();
        assert!(Refusal::new(&Error::Not64Bit(1), None, now).stands(now + Duration::from_secs(1 << 20)));
        let (mut refusal, mut waits) = (None, Vec::new());
        for _ in 0..9 {
            let next = Refusal::new(&Error::DidNotStop(1), refusal, now);
            waits.push((0..100).find(|&seconds| !next.stands(now + Duration::from_secs(seconds))));
            refusal = Some(next);
        }
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 64, 64, 64].map(Some));
    }
}

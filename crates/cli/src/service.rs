//! A pager at work, as the control socket and the command line see it.
//!
//! Invariants: at most one detachment is under way; once it has succeeded the pages are home and nothing else is asked
//! of the pager but its counters; a failed one leaves everything managed.

use serde::{Deserialize, Serialize};
use spillway_pager::{Local, Pager, Snapshot};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// What the command line asks of a pager: [`Pager`], or a stand-in under test.
pub(crate) trait Paging: Send + Sync {
    /// The counters now.
    fn snapshot(&self) -> Snapshot;
    /// Changes the budget.
    fn set_local(&self, local: Local);
    /// Brings all pages home.
    fn detach(&self, progress: &mut dyn FnMut(u64, u64)) -> Result<(), String>;
    /// Whether any process is managed or watched.
    fn has_targets(&self) -> bool;
}

impl Paging for Pager {
    fn snapshot(&self) -> Snapshot {
        Self::snapshot(self)
    }

    fn set_local(&self, local: Local) {
        Self::set_local(self, local);
    }

    fn detach(&self, progress: &mut dyn FnMut(u64, u64)) -> Result<(), String> {
        Self::detach(self, progress).map_err(|error| error.to_string())
    }

    fn has_targets(&self) -> bool {
        Self::has_targets(self)
    }
}

/// How far a detachment is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Detachment {
    /// None was asked for, or the last one failed.
    None,
    /// Pages done and pages in all, since when.
    Running(u64, u64, Instant),
    /// All pages are home.
    Done,
}

/// A pager and what its host knows beyond it.
pub(crate) struct Service<P = Pager> {
    pager: P,
    /// The process that stands for the tree; 0 as long as it is not started.
    target: AtomicI32,
    /// The `spillway run` process, or 0.
    front: i32,
    detachment: Mutex<Detachment>,
}

/// One pager in a listing: what it manages, and its counters.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Listing {
    /// The process that serves the faults.
    pub(crate) pager_pid: i32,
    /// The `spillway run` process, or 0.
    pub(crate) front_pid: i32,
    /// Whether all pages went home, so that nothing is managed any more.
    pub(crate) detached: bool,
    /// The counters, `pid` among them.
    #[serde(flatten)]
    pub(crate) snapshot: Snapshot,
}

impl<P: Paging> Service<P> {
    /// Serves `pager`, whose tree is known by `target`; `front` is the `spillway run` process, or 0.
    pub(crate) fn new(pager: P, target: i32, front: i32) -> Self {
        Self { pager, target: AtomicI32::new(target), front, detachment: Mutex::new(Detachment::None) }
    }

    /// The process that stands for the tree; 0 as long as it is not started.
    pub(crate) fn target(&self) -> i32 {
        self.target.load(Ordering::Relaxed)
    }

    /// Tells which process stands for the tree.
    pub(crate) fn set_target(&self, pid: i32) {
        self.target.store(pid, Ordering::Relaxed);
    }

    /// The counters now.
    pub(crate) fn snapshot(&self) -> Snapshot {
        Snapshot { pid: self.target(), ..self.pager.snapshot() }
    }

    /// The counters now, and who is who.
    pub(crate) fn listing(&self) -> Listing {
        let pager_pid = i32::try_from(std::process::id()).unwrap_or(0);
        let detached = matches!(self.detachment(), Detachment::Done);
        Listing { pager_pid, front_pid: self.front, detached, snapshot: self.snapshot() }
    }

    /// Changes the budget.
    pub(crate) fn set_local(&self, local: Local) {
        self.pager.set_local(local);
    }

    /// Whether any process is left to serve.
    pub(crate) fn has_targets(&self) -> bool {
        self.pager.has_targets()
    }

    /// How far a detachment is.
    pub(crate) fn detachment(&self) -> Detachment {
        *self.state()
    }

    /// Brings all pages home; `progress` is told pages done and pages in all.
    pub(crate) fn detach(&self, progress: &mut dyn FnMut(u64, u64)) -> Result<(), String> {
        let since = Instant::now();
        match &mut *self.state() {
            Detachment::Done => return Ok(()),
            Detachment::Running(..) => return Err("the pages are on their way home already".into()),
            state @ Detachment::None => *state = Detachment::Running(0, 0, since),
        }
        let done = self.pager.detach(&mut |done, total| {
            *self.state() = Detachment::Running(done, total, since);
            progress(done, total);
        });
        *self.state() = if done.is_ok() { Detachment::Done } else { Detachment::None };
        done
    }

    /// A panic elsewhere cannot leave this value half-written.
    fn state(&self) -> MutexGuard<'_, Detachment> {
        self.detachment.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

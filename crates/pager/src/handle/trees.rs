//! A pager that serves any number of trees of processes, which come and go.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use spillway_core::shares::Share;
use spillway_core::{PAGE_BYTES_U64, TreeId};

use super::Pager;
use crate::driver::Command;
use crate::error::Error;
use crate::estate::TARGETS;
use crate::tally::Tally;
use crate::watcher::Request;
use crate::{Local, Options, TreeSnapshot, merging, procfs};

/// How long the fault thread may take to count pages.
const COUNT_WITHIN: Duration = Duration::from_secs(1);

impl Pager {
    /// A pager without processes: a daemon's.
    ///
    /// # Errors
    /// When this machine cannot adopt anything.
    pub fn serve(options: Options) -> Result<Self, Error> {
        crate::doctor::usable()?;
        let mut pager = Self::start(0, None, options)?;
        pager.estate.iter().for_each(|estate| estate.set_daemon(true));
        pager.stays = true;
        Ok(pager)
    }

    /// Serves a process with its descendants on their own account: from now on, or from when they have grown. Equal pages of
    /// it and others are kept once in memory if it `shares` them.
    ///
    /// # Errors
    /// As [`Error`] says; the process is unharmed then.
    pub fn adopt_tree(&self, pid: i32, at_once: bool, share: Share, shares: bool) -> Result<(), Error> {
        let _fitting = self.fit(None, share)?;
        if self.estate.is_some() && self.managed.lock().is_ok_and(|pids| pids.len() >= TARGETS) {
            return Err(Error::TooManyTargets(TARGETS));
        }
        match crate::adopt::examine(pid) {
            // Each thread that was looked at ended just then. It is looked at again when it has grown.
            Err(Error::NoSuchProcess(_) | Error::Ended(_)) if !at_once && procfs::living_thread(pid).is_some() => {}
            examined => examined?,
        }
        crate::doctor::usable_for(pid)?;
        if shares {
            merging::usable()?;
        }
        let started = procfs::stat(pid).map_err(|_| Error::NoSuchProcess(pid))?.started;
        let tally = Tally::new(TreeId(self.next_tree.fetch_add(1, Relaxed)), (pid, started), share, shares);
        self.ask(pid, |reply| Request::Adopt { tally, at_once, reply })?
    }

    /// What one tree may have of local memory from now on. `pid` is its root, or one of its managed processes.
    ///
    /// # Errors
    /// When there is none, or the minima of all would not fit into the budget; nothing is changed then.
    pub fn change_share(&self, pid: i32, change: &mut dyn FnMut(&mut Share)) -> Result<(), Error> {
        let tree = self.trees.of(pid).ok_or(Error::NotManaged(pid))?;
        let tally = self.trees.tally(tree).ok_or(Error::NotManaged(pid))?;
        let mut share = tally.share();
        change(&mut share);
        let _fitting = self.fit(Some(tree), share)?;
        *tally.share.lock().unwrap_or_else(PoisonError::into_inner) = share;
        let _ = self.commands.send(Command::Share(tree, share));
        self.bell.ring();
        Ok(())
    }

    /// Whether equal pages of one tree and others are kept once in memory, from now on; of all that there is where `pid` is none.
    /// Agents see to it when they have nothing else to do.
    ///
    /// # Errors
    /// When there is no such tree, or the kernel merges nothing; nothing is changed then.
    pub fn share_pages(&self, pid: Option<i32>, on: bool) -> Result<(), Error> {
        if on {
            merging::usable()?;
        }
        let tallies = match pid {
            Some(pid) => {
                let tally = self.trees.of(pid).and_then(|tree| self.trees.tally(tree));
                vec![tally.ok_or(Error::NotManaged(pid))?]
            }
            None => self.trees.tallies().into_iter().chain([Arc::clone(&self.first)]).collect(),
        };
        for tally in tallies {
            // Before it is looked what is marked: whoever is adopted meanwhile looks as well.
            tally.merges.store(on, Relaxed);
            let managed = || self.managed.lock().map(|pids| pids.clone()).unwrap_or_default();
            let pids = self.trees.pids(tally.tree).unwrap_or_else(managed);
            let marked = if on { pids.iter().map(|&pid| (pid, merging::marked(pid))).collect() } else { Vec::new() };
            let _ = self.commands.send(Command::Merge { tree: tally.tree, marked });
        }
        self.bell.ring();
        Ok(())
    }

    /// Whether the minima of all fit into the budget, if `tree`, or one more, has this share. Nobody else asks meanwhile.
    fn fit(&self, tree: Option<TreeId>, share: Share) -> Result<MutexGuard<'_, Local>, Error> {
        let local = self.local.lock().unwrap_or_else(PoisonError::into_inner);
        if share.min_pages > share.max_pages {
            return Err(Error::MinAboveMax);
        }
        let others = self.trees.shares().into_iter().filter(|(other, _)| Some(*other) != tree);
        let minima = others.fold(share.min_pages, |sum, (_, share)| sum.saturating_add(share.min_pages));
        promised(*local, minima).map(|()| local)
    }

    /// Changes the budget, unless the minima of all would not fit into it.
    ///
    /// # Errors
    /// When they do not; nothing is changed then.
    pub fn resize(&self, to: Local) -> Result<(), Error> {
        let mut local = self.local.lock().unwrap_or_else(PoisonError::into_inner);
        let minima = self.trees.shares().iter().fold(0, |sum: u64, (_, share)| sum.saturating_add(share.min_pages));
        promised(to, minima)?;
        *local = to;
        self.set_local(to);
        Ok(())
    }

    /// Brings the pages of one tree home, and leaves nothing behind in it; the others are served on. `pid` is its root, or one
    /// of its managed processes. `progress` is told pages done and pages in all.
    ///
    /// # Errors
    /// When there is none, or its own memory limit leaves no room; everything stays managed then.
    pub fn release_tree(&self, pid: i32, progress: &mut dyn FnMut(u64, u64)) -> Result<(), Error> {
        let tree = self.trees.of(pid).ok_or(Error::NotManaged(pid))?;
        self.hear_departure(|reply| Request::LetGo(tree, reply), progress).unwrap_or(Ok(()))
    }

    /// All trees now, and those that have ended of late.
    pub fn trees(&self) -> Vec<TreeSnapshot> {
        let (reply, answer) = channel();
        let _ = self.commands.send(Command::Count { reply });
        self.bell.ring();
        // Of one that is busy, the numbers are those of the last count.
        let _ = answer.recv_timeout(COUNT_WITHIN);
        self.trees.snapshots()
    }

    /// Sends a request, and waits for its answer.
    fn ask<T>(&self, pid: i32, request: impl FnOnce(Sender<T>) -> Request) -> Result<T, Error> {
        let (reply, answer) = channel();
        let _ = self.requests.send(request(reply));
        answer.recv().map_err(|_| Error::Ended(pid))
    }
}

fn promised(local: Local, minima: u64) -> Result<(), Error> {
    let (promised, budget) =
        (minima.saturating_mul(PAGE_BYTES_U64), if let Local::Bytes(bytes) = local { bytes } else { u64::MAX });
    if promised > budget { Err(Error::TooManyPromises { promised, budget }) } else { Ok(()) }
}

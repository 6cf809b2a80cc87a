//! A pager that serves any number of trees of processes, which come and go.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use spillway_core::TreeId;

use super::Pager;
use crate::driver::Command;
use crate::error::Error;
use crate::tally::Tally;
use crate::watcher::{Departure, Request};
use crate::{Options, TreeSnapshot, procfs};

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

    /// Serves a process with its descendants on their own account: from now on, or from when they have grown.
    ///
    /// # Errors
    /// As [`Error`] says; the process is unharmed then.
    pub fn adopt_tree(&self, pid: i32, at_once: bool) -> Result<(), Error> {
        crate::adopt::examine(pid)?;
        crate::doctor::usable_for(pid)?;
        let started = procfs::stat(pid).map_err(|_| Error::NoSuchProcess(pid))?.started;
        let tally = Tally::new(TreeId(self.next_tree.fetch_add(1, Relaxed)), (pid, started));
        self.ask(pid, |reply| Request::Adopt { tally, at_once, reply })?
    }

    /// Brings the pages of one tree home, and leaves nothing behind in it; the others are served on. `pid` is its root, or one
    /// of its managed processes. `progress` is told pages done and pages in all.
    ///
    /// # Errors
    /// When there is none, or its own memory limit leaves no room; everything stays managed then.
    pub fn release_tree(&self, pid: i32, progress: &mut dyn FnMut(u64, u64)) -> Result<(), Error> {
        let tree = self.trees.of(pid).ok_or(Error::NotManaged(pid))?;
        let (reply, answer) = channel();
        let _ = self.requests.send(Request::LetGo(tree, reply));
        let mut all = 0;
        for step in answer {
            match step {
                Departure::Left(left) => {
                    all = all.max(left);
                    progress(all - left, all);
                }
                Departure::Done(result) => return result.inspect(|()| progress(all, all)),
            }
        }
        Ok(())
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

    fn ask<T>(&self, pid: i32, request: impl FnOnce(Sender<T>) -> Request) -> Result<T, Error> {
        let (reply, answer) = channel();
        let _ = self.requests.send(request(reply));
        answer.recv().map_err(|_| Error::Ended(pid))
    }
}

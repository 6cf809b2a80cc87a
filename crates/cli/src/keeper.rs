//! Who manages the program of `spillway run`: a pager for it alone, or the daemon of this host.

use crate::daemon::client::Client;
use crate::failure::Failure;
use crate::pager_process::PagerProcess;
use crate::recorder::Totals;
use crate::report::{self, StatsFile};
use crate::say;
use spillway_pager::procfs::living_thread;
use std::time::Duration;

/// How often it is looked whether another daemon serves.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// See the module's documentation.
pub(crate) enum Keeper {
    /// Tied to this process: without it the program cannot go on.
    Own(PagerProcess),
    /// It may end, and another takes over; the program waits meanwhile. Which program, and whether its pages are shared.
    Daemon(Client, i32, bool),
}

impl Keeper {
    /// Tells which process was started.
    pub(crate) fn set_target(&mut self, pid: i32) {
        match self {
            Self::Own(pager) => pager.set_target(pid),
            Self::Daemon(client, target, share_pages) => {
                *target = pid;
                let own = i32::try_from(std::process::id()).unwrap_or(0);
                if let Err(failure) = client.adopt(pid, true, own, *share_pages)
                    && living_thread(pid).is_some()
                {
                    say::note(format!("the program runs without a budget: {failure}"));
                }
            }
        }
    }

    /// How long nothing need be looked at.
    pub(crate) fn patience(&self) -> Option<Duration> {
        match self {
            Self::Own(_) => None,
            Self::Daemon(..) => Some(LOOK_EVERY),
        }
    }

    /// Looks whether another daemon has taken the place of the one that was asked: it may not know the program.
    pub(crate) fn look(&mut self) {
        if let Self::Daemon(client, target, _) = self
            && client.is_another()
        {
            let target = *target;
            self.set_target(target);
        }
    }

    /// Tells that this process is about to stop itself, or goes on.
    pub(crate) fn announce_stop(&mut self, now: bool) {
        match self {
            Self::Own(pager) => pager.announce_stop(now),
            Self::Daemon(client, target, _) => client.announce_stop(*target, now),
        }
    }

    /// Whether the program must end because its memory is gone.
    pub(crate) fn is_dead(&mut self) -> bool {
        match self {
            Self::Own(pager) => pager.is_dead(),
            Self::Daemon(..) => false,
        }
    }

    /// Whether the program's end may be that of its pager, as an agent was first to see it.
    pub(crate) fn may_have_ended_it(&self) -> bool {
        matches!(self, Self::Own(pager) if pager.has_pages())
    }

    /// Ends the recording.
    pub(crate) fn end_recording(&mut self) -> Result<Totals, String> {
        match self {
            Self::Own(pager) => pager.end_recording(),
            Self::Daemon(..) => Err("a daemon records nothing".into()),
        }
    }

    /// Tells, once the program has ended, what it took. False when its pager gives no answer.
    pub(crate) fn tell(&mut self, quiet: bool, stats: Option<StatsFile>) -> bool {
        let (summary, refused, written) = match self {
            Self::Own(pager) => {
                let Some(of) = pager.snapshot() else { return false };
                let written = stats.map_or(Ok(()), |stats| stats.write(&of));
                (report::summary(&of), of.refused, written)
            }
            Self::Daemon(client, target, _) => {
                let Some(of) = client.show(*target) else { return false };
                let written = stats.map_or(Ok(()), |stats| stats.write(&of));
                (report::summary_of_target(&of, client.pid), None, written)
            }
        };
        if !quiet {
            say::note(summary);
        }
        if let Some(why) = refused {
            say::note(format!("a process ran without a budget: {why}"));
        }
        // The program did its work: its status counts, whatever became of the counters.
        written.unwrap_or_else(|failure: Failure| say::note(failure));
        true
    }
}

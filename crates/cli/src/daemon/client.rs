//! `run` and `attach` where a daemon runs: it is asked to manage the process, unless the user wants a pager for it alone.
//!
//! Invariant: what contradicts the daemon's own settings is refused before anything is started or touched.

use super::{TargetListing, share};
use crate::control::{self, Request};
use crate::failure::Failure;
use crate::request::ShareText;
use crate::{local, pool, replacement, say, sockets};
use serde_json::Value;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

/// How long an adoption may take: other requests may have to be carried out first.
const ADOPT_LIMIT: Duration = Duration::from_secs(30);

/// Whether a daemon is asked, and for which share.
#[derive(Clone, clap::Args)]
pub(crate) struct Choice {
    /// With a pager for it alone, even where a daemon runs
    #[arg(long)]
    no_daemon: bool,
    /// Where a daemon runs: local memory that is not taken from it for others
    #[arg(long, value_name = "SIZE|PERCENT")]
    min: Option<String>,
    /// Where a daemon runs: what its memory above --min is worth beside that of others, who have 100
    #[arg(long, value_name = "NUMBER")]
    weight: Option<u32>,
}

/// What else the user has said.
pub(crate) struct Wanted<'a> {
    /// `--local`: under a daemon, its maximum.
    pub(crate) local: Option<&'a str>,
    /// `--pool`.
    pub(crate) pool: Option<&'a str>,
    /// `--policy` and its like.
    pub(crate) replacement: &'a replacement::Choices,
}

/// The daemon that is to manage a process, and what that may have.
pub(crate) struct Client {
    /// Its process.
    pub(crate) pid: i32,
    share: ShareText,
    /// The socket that it listens at, among all there ever were.
    socket: Option<(u64, i64, i64)>,
}

/// What tells a socket from the one that the next daemon makes in its place.
fn socket() -> Option<(u64, i64, i64)> {
    let there = std::fs::metadata(super::path()?).ok()?;
    Some((there.ino(), there.ctime(), there.ctime_nsec()))
}

/// Why `--shared-memory` is not for one program of a daemon.
pub(crate) fn shared_memory_is_its() -> Failure {
    Failure::refused(
        "the daemon says for all programs whether memory that they share is managed: leave --shared-memory out (`spillway daemon \
         --shared-memory` does so), or add --no-daemon",
    )
}

impl Choice {
    /// The daemon to ask; none where none runs, or none is wanted.
    pub(crate) fn daemon(&self, wanted: &Wanted<'_>) -> Result<Option<Client>, Failure> {
        // How little it may be depends on who manages it.
        wanted.local.map(|text| local::parse_from(text, 0)).transpose()?;
        wanted.pool.map(pool::parse).transpose()?;
        let share = ShareText { min: self.min.clone(), max: wanted.local.map(Into::into), weight: self.weight };
        let found = if self.no_daemon { None } else { sockets::daemon()? };
        let Some(found) = found else {
            return match (&self.min, self.weight) {
                (None, None) => Ok(None),
                _ => Err(Failure::refused(
                    "--min and --weight divide a daemon's memory: start `spillway daemon`, or leave them out",
                )),
            };
        };
        wanted.local.map(local::parse).transpose()?;
        let refused = |what: String| {
            Err(Failure::refused(format!("{what}: leave that out, or add --no-daemon for a pager of its own")))
        };
        if let Some(pool) = wanted.pool.filter(|pool| *pool != found.listing.pool) {
            return refused(format!(
                "the daemon keeps pages in `{}`, not in `{}`",
                found.listing.pool,
                say::clean(pool)
            ));
        }
        if let Some((key, theirs)) = wanted.replacement.against(&found.listing.snapshot) {
            return refused(format!("{key} is `{theirs}` for all targets of the daemon"));
        }
        let _checked = share::change(&share).map_err(Failure::refused)?;
        Ok(Some(Client { pid: found.listing.pager_pid, share, socket: socket() }))
    }
}

impl Client {
    fn ask(request: &Request, limit: Duration) -> Result<Value, Failure> {
        let found = sockets::daemon()?;
        let mut found = found.ok_or_else(|| Failure::refused("the daemon has ended: start `spillway daemon` again"))?;
        control::ask(&mut found.lines, request, limit, &mut |_, _| {}).map_err(Failure::refused)
    }

    /// It manages the process from now on, or from when that has grown; how long a thread was stopped for that, in
    /// microseconds. `front` is the `spillway run` process, or 0.
    pub(crate) fn adopt(&self, pid: i32, when_grown: bool, front: i32, share_pages: bool) -> Result<f64, Failure> {
        let request = Request::Adopt { pid, when_grown, front, share_pages, share: self.share.clone() };
        let answer = Self::ask(&request, ADOPT_LIMIT)?;
        Ok(answer.get("adopt_pause_us").and_then(Value::as_f64).unwrap_or_default())
    }

    /// Whether another daemon listens since this was last asked.
    pub(crate) fn is_another(&mut self) -> bool {
        let now = socket();
        now.is_some() && std::mem::replace(&mut self.socket, now) != now
    }

    /// The counters of a target, also when it has just ended.
    pub(crate) fn show(&self, pid: i32) -> Option<TargetListing> {
        let answer = Self::ask(&Request::Show { pid }, sockets::ANSWER_LIMIT).ok()?;
        serde_json::from_value(answer).ok()
    }

    /// Tells that this `spillway run` is about to stop itself because its program has stopped, or goes on.
    pub(crate) fn announce_stop(&self, pid: i32, now: bool) {
        let _ = Self::ask(&Request::Pausing { pid, now }, sockets::ANSWER_LIMIT);
    }
}

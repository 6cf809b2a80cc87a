//! What can be asked over a control socket, and what is answered: a JSON value a line. docs/CONTROL.md tells users.
//!
//! `{"op":"resize","local":"512M"}`; answers are `{"ok":..}` or `{"error":".."}`, after any number of
//! `{"progress":[done,total]}`. Invariant: whatever bytes come, they are a request or one line that says why not.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// What can be asked of a pager.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Request {
    /// The counters, and who is managed.
    Stats,
    /// Another budget.
    Resize {
        /// As for `--local`.
        local: String,
    },
    /// Other replacement settings; those that are not named stay as they are.
    Set {
        /// Of the form `policy=lru`.
        settings: Vec<String>,
    },
    /// All pages home.
    Detach,
    /// End at once: another pager takes over what is written down in this layout.
    HandOver {
        /// The layout that the other knows.
        version: u64,
    },
    /// Only a daemon: manage a process, with its descendants, as a target.
    Adopt {
        /// The process.
        pid: i32,
        /// Not at once, but when it and its descendants have grown, as under `spillway run`.
        #[serde(default)]
        when_grown: bool,
        /// The `spillway run` process that stops and goes on with it, or 0.
        #[serde(default)]
        front: i32,
        /// Whether equal pages of it and others are kept once in memory.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        share_pages: bool,
        /// What it may have of local memory.
        #[serde(default)]
        share: ShareText,
    },
    /// Whether equal pages of a target and others are kept once in memory, from now on.
    SharePages {
        /// The target, or a process of it; a pager of one target takes any.
        pid: i32,
        /// Which of the two.
        on: bool,
    },
    /// Only a daemon: what one target may have of local memory; what is not named stays as it is.
    Share {
        /// The target, or a process of it.
        pid: i32,
        /// What changes.
        share: ShareText,
    },
    /// Only a daemon: all pages of one target home, and nothing of ours stays in it.
    Release {
        /// The target, or a process of it.
        pid: i32,
    },
    /// Only a daemon: the counters of one target, also a while after its end.
    Show {
        /// The target.
        pid: i32,
    },
    /// Only a daemon: a `spillway run` is about to stop itself because its program stopped, or goes on.
    Pausing {
        /// The program.
        pid: i32,
        /// Which of the two.
        now: bool,
    },
    /// Only a daemon: all pages of all targets home, then its end.
    Shutdown,
    /// Only from `spillway run`: the process it started.
    Target {
        /// Its id.
        pid: i32,
    },
    /// Only from `spillway run`: it is about to stop itself because the target stopped, or goes on.
    Stopping {
        /// Which of the two.
        now: bool,
    },
    /// Only from `spillway run`: what is recorded is to be complete; how much it was is answered.
    EndRecording,
}

/// What a target may have of local memory, as users write it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ShareText {
    /// Not taken from it for others: a size, or a share of this host's memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) min: Option<String>,
    /// It never has more; `all` for no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) max: Option<String>,
    /// What its pages above the minimum are worth beside those of others; 100 if nothing is said.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) weight: Option<u32>,
}

impl Request {
    /// Reads a line.
    pub(crate) fn parse(line: &[u8]) -> Result<Self, String> {
        serde_json::from_slice(line).map_err(|error| format!("not a request: {error}"))
    }
}

/// What a pager answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Reply {
    /// Done.
    Ok(Value),
    /// Not done.
    Error(String),
    /// Under way: pages done and pages in all.
    Progress(u64, u64),
}

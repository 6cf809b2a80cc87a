//! Equal pages that are in targets: the kernel keeps them once (KSM), where it is asked to.
//!
//! A process is asked as a whole (`PR_SET_MEMORY_MERGE`, Linux 6.4), and only a thread of its own may ask: the agent. What a
//! page holds never changes by it; a store to a merged page makes the kernel copy it first. docs/decisions/0026.

use std::fs;

use spillway_core::Span;

use crate::error::Error;
use crate::procfs::{living_thread, mappings_with_flag, read_short};
use crate::sys::process::may_be_merged;

/// Whether the kernel's thread that merges runs: 1, for the whole machine.
const RUNS: &str = "/sys/kernel/mm/ksm/run";

/// Whether the kernel merges pages of a target, and who wants it to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Merging {
    /// Nobody has asked for it here: it is as the target has it.
    #[default]
    Untold,
    /// We do, and nobody did before: it ends when the target is let go.
    Ours,
    /// We do, and the target did before: it stays.
    Its,
}

/// What the kernel has merged in a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Merged {
    /// Pages of it that the kernel keeps once for all who have them.
    pub pages: u64,
    /// Bytes that this saves, less what the kernel needs to remember for it; below zero where it does not pay.
    pub profit_bytes: i64,
}

impl Merged {
    /// That of `pid`; nothing where the kernel does not say.
    pub fn of(pid: i32) -> Self {
        let pid = living_thread(pid).unwrap_or(pid);
        let text = read_short(&format!("/proc/{pid}/ksm_stat"));
        text.ok().and_then(|text| parse_merged(&text)).unwrap_or_default()
    }

    /// That of all of `pids`.
    pub fn of_all(pids: &[i32]) -> Self {
        pids.iter().map(|&pid| Self::of(pid)).fold(Self::default(), |sum, it| Self {
            pages: sum.pages + it.pages,
            profit_bytes: sum.profit_bytes + it.profit_bytes,
        })
    }
}

/// The mappings of `pid` that are merged: before the process as a whole is, those that it has asked for itself.
pub fn marked(pid: i32) -> Vec<Span> {
    mappings_with_flag(pid, &["mg"]).unwrap_or_default().into_iter().map(|(span, _)| span).collect()
}

/// Parses `/proc/PID/ksm_stat`.
pub fn parse_merged(text: &str) -> Option<Merged> {
    let field = |name: &str| {
        text.lines().find_map(|line| {
            let (key, value) = line.split_once(' ')?;
            (key == name).then_some(value)
        })
    };
    let pages = field("ksm_merging_pages")?.parse().ok()?;
    Some(Merged { pages, profit_bytes: field("ksm_process_profit")?.parse().ok()? })
}

/// Refuses a machine that merges nothing.
///
/// # Errors
/// With what is to be done about it.
pub fn usable() -> Result<(), Error> {
    may_be_merged().map_err(Error::NoMerging)?;
    if is_on() { Ok(()) } else { Err(Error::MergingOff) }
}

/// Whether the kernel's thread that merges runs.
pub fn is_on() -> bool {
    fs::read_to_string(RUNS).is_ok_and(|text| text.trim() == "1")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_merged_is_read() {
        let text = "ksm_rmap_items 33041\nksm_merging_pages 32910\nksm_process_profit -7\nksm_merge_any: yes\n";
        assert_eq!(parse_merged(text), Some(Merged { pages: 32910, profit_bytes: -7 }));
        assert_eq!(parse_merged("ksm_merging_pages -1\nksm_process_profit 0\n"), None);
        assert_eq!(parse_merged(""), None);
    }
}

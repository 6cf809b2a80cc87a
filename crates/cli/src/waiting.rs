//! Processes whose pager has died. They go on until they touch a page that is out, and wait then for a pager that takes over.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use spillway_pager::{Lost, lost_by};

use crate::processes;

/// What one dead pager has left.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Waiting {
    /// At least one, in ascending order.
    pids: Vec<i32>,
    lost: Lost,
}

impl Waiting {
    /// That this process waits, if it does.
    pub(crate) fn of(pid: i32) -> Option<Self> {
        lost_by(pid).map(|lost| Self { pids: vec![pid], lost })
    }

    /// All whom this user may help; those in `managed` are not asked.
    pub(crate) fn all(managed: &BTreeSet<i32>) -> Vec<Self> {
        let mut left: BTreeMap<Lost, Vec<i32>> = BTreeMap::new();
        for pid in processes::all().filter(|pid| !managed.contains(pid)).collect::<BTreeSet<i32>>() {
            if let Some(lost) = lost_by(pid) {
                left.entry(lost).or_default().push(pid);
            }
        }
        left.into_iter().map(|(lost, pids)| Self { pids, lost }).collect()
    }
}

impl fmt::Display for Waiting {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let first = self.pids[0];
        let one = self.pids.len() == 1;
        let whose = if one { format!("process {first}") } else { format!("processes {}", listed(&self.pids)) };
        let waits = if one { "the process waits" } else { "they wait" };
        if self.lost.daemon {
            write!(out, "the daemon that managed {whose} has died, and {waits}: `spillway daemon` takes over")
        } else {
            write!(out, "the pager of {whose} has died, and {waits}: `spillway attach {first}` takes over")
        }
    }
}

/// How many are named; there may be thousands.
const NAMED: usize = 4;

fn listed(pids: &[i32]) -> String {
    let named: Vec<String> = pids.iter().take(NAMED).map(i32::to_string).collect();
    match pids.len().saturating_sub(NAMED) {
        0 => named.join(", "),
        more => format!("{} and {more} more", named.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(pids: &[i32], daemon: bool) -> String {
        Waiting { pids: pids.to_vec(), lost: Lost { pager: (1, 1), daemon } }.to_string()
    }

    #[test]
    fn who_waits_is_told_what_to_type() {
        assert_eq!(
            said(&[7], false),
            "the pager of process 7 has died, and the process waits: `spillway attach 7` takes over"
        );
        let several = said(&[7, 8], true);
        assert_eq!(
            several,
            "the daemon that managed processes 7, 8 has died, and they wait: `spillway daemon` takes over"
        );
        let many = said(&[2, 3, 4, 5, 6, 7], false);
        assert!(many.contains("processes 2, 3, 4, 5 and 2 more has died") && many.contains("attach 2"), "{many}");
    }

    #[test]
    fn nobody_waits_who_never_had_a_pager() {
        let me = i32::try_from(std::process::id()).expect("a pid");
        assert_eq!(Waiting::of(me), None);
    }
}

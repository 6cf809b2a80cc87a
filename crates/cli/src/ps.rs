//! `spillway ps`: the pagers at work, and what they hold.

use crate::daemon::TargetListing;
use crate::failure::{FAILED, Failure};
use crate::service::Listing;
use crate::waiting::Waiting;
use crate::{processes, say, sockets};
use serde_json::Value;
use spillway_core::size::Bytes;
use spillway_pager::{FaultTimes, Snapshot};

/// What `spillway ps` is given.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// All counters, as a JSON array
    #[arg(long)]
    json: bool,
}

/// One line of the listing.
struct Row {
    pid: i32,
    cells: Cells,
    /// All of it.
    value: Value,
}

/// Lists the pagers that answer this user, and the targets of daemons; and says which processes wait for a pager.
pub(crate) fn ps(args: &Args) -> Result<u8, Failure> {
    let failed = |error: serde_json::Error| Failure::new(FAILED, error.to_string());
    let found: Vec<Listing> = sockets::pagers().into_iter().map(|found| found.listing).collect();
    let targets = found.iter().flat_map(|listing| listing.targets.iter().flatten());
    let managed =
        found.iter().flat_map(|listing| &listing.snapshot.pids).chain(targets.flat_map(|target| &target.pids));
    let waiting = Waiting::all(&managed.copied().collect());
    let mut rows = Vec::new();
    for listing in found.into_iter().filter(|listing| !listing.detached) {
        if listing.daemon {
            for target in listing.targets.iter().flatten() {
                rows.push(of_target(&listing, target).map_err(failed)?);
            }
            let pid = listing.pager_pid;
            rows.push(
                of_pager(Listing { targets: None, snapshot: Snapshot { pid, ..listing.snapshot }, ..listing })
                    .map_err(failed)?,
            );
        } else if listing.snapshot.pid > 0 {
            rows.push(of_pager(listing).map_err(failed)?);
        }
    }
    rows.sort_by_key(|row| row.pid);
    let text = if args.json {
        let values: Vec<&Value> = rows.iter().map(|row| &row.value).collect();
        serde_json::to_string_pretty(&values).map_err(failed)? + "\n"
    } else {
        table(&rows.into_iter().map(|row| row.cells).collect::<Vec<_>>())
    };
    say::print(&text)?;
    waiting.iter().for_each(say::note);
    Ok(0)
}

fn command(pid: i32) -> String {
    processes::command(pid).unwrap_or_else(|| "(ended)".into())
}

fn of_pager(listing: Listing) -> Result<Row, serde_json::Error> {
    let of = &listing.snapshot;
    let command = command(of.pid);
    let sizes = [of.touched_bytes, of.local_bytes, of.budget_bytes, of.stored_bytes];
    let merged = of.share_pages.then_some(of.merged_bytes);
    let cells = cells(of.pid, of.processes, sizes, merged, of.faults_per_s, of.fault_us, &command);
    let pid = of.pid;
    let mut value = serde_json::to_value(listing)?;
    value["command"] = command.into();
    Ok(Row { pid, cells, value })
}

/// A target of a daemon: what is the same for all of them stands in each.
fn of_target(daemon: &Listing, of: &TargetListing) -> Result<Row, serde_json::Error> {
    let command = command(of.pid);
    let budget = of.max_bytes.unwrap_or(u64::MAX).min(daemon.snapshot.budget_bytes);
    let sizes = [of.touched_bytes, of.local_bytes, budget, of.stored_bytes];
    let merged = of.share_pages.then_some(of.merged_bytes);
    let cells = cells(of.pid, of.processes, sizes, merged, of.faults_per_s, of.fault_us, &command);
    let mut value = serde_json::to_value(of)?;
    let Snapshot { policy, evict, scope, block, .. } = &daemon.snapshot;
    for (key, name) in [("policy", policy), ("evict", evict), ("scope", scope), ("block", block)] {
        value[key] = name.as_str().into();
    }
    value["command"] = command.into();
    value["budget_bytes"] = budget.into();
    value["pager_pid"] = daemon.pager_pid.into();
    value["daemon_pid"] = daemon.pager_pid.into();
    value["daemon"] = false.into();
    value["detached"] = false.into();
    Ok(Row { pid: of.pid, cells, value })
}

const COMMAND_CHARS_MAX: usize = 60;
const COLUMNS: usize = 11;
const HEAD: [&str; COLUMNS] =
    ["PID", "PROCS", "TOUCHED", "LOCAL", "MERGED", "BUDGET", "STORED", "FAULTS/S", "P50 US", "P99 US", "COMMAND"];
/// The column that is left out where it is empty for all.
const MERGED: usize = 4;
type Cells = [String; COLUMNS];

fn cells(
    pid: i32,
    processes: u64,
    sizes: [u64; 4],
    merged: Option<u64>,
    rate: f64,
    times: FaultTimes,
    command: &str,
) -> Cells {
    let [touched, local, budget, stored] = sizes.map(|size| Bytes(size).to_string());
    let merged = merged.map_or_else(String::new, |size| Bytes(size).to_string());
    let (pid, processes, rate) = (pid.to_string(), processes.to_string(), format!("{rate:.0}"));
    let (p50, p99) = (format!("{:.1}", times.p50), format!("{:.1}", times.p99));
    [pid, processes, touched, local, merged, budget, stored, rate, p50, p99, short(command)]
}

/// Enough of a command line to know it by; the whole of it is in the JSON.
fn short(command: &str) -> String {
    let mut text: String = command.chars().take(COMMAND_CHARS_MAX).collect();
    if text.len() < command.len() {
        text.push_str("...");
    }
    text
}

/// Right-aligned columns but the last.
fn table(rows: &[Cells]) -> String {
    let any_merged = rows.iter().any(|row| !row[MERGED].is_empty());
    let mut widths = HEAD.map(str::len);
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.len());
        }
    }
    let mut text = String::new();
    for row in std::iter::once(&HEAD.map(String::from)).chain(rows) {
        for (at, (cell, width)) in row[..COLUMNS - 1].iter().zip(widths).enumerate() {
            if at != MERGED || any_merged {
                text += &format!("{cell:>width$}  ");
            }
        }
        text += &row[COLUMNS - 1];
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_merged_is_shown_where_anyone_shares() {
        let row = |pid, merged| cells(pid, 1, [1 << 20; 4], merged, 0.0, FaultTimes::default(), "program");
        assert!(!table(&[row(1, None), row(2, None)]).contains("MERGED"));
        let text = table(&[row(1, None), row(2, Some(3 << 20))]);
        let lines: Vec<&str> = text.lines().collect();
        let ends = lines[0].find("MERGED").map(|at| at + 6);
        assert!(ends.is_some_and(|ends| lines[2][..ends].ends_with("3.0 MiB")), "{text}");
        assert!(
            lines[1].starts_with("  1") && lines[1].ends_with("program") && lines[1].len() == lines[2].len(),
            "{text}"
        );
    }
}

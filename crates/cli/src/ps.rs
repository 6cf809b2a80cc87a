//! `spillway ps`: the pagers at work, and what they hold.

use crate::failure::Failure;
use crate::service::Listing;
use crate::{processes, say, sockets};
use serde::Serialize;
use spillway_core::size::Bytes;

/// What `spillway ps` is given.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// All counters, as a JSON array
    #[arg(long)]
    json: bool,
}

/// One line of the listing.
#[derive(Serialize)]
struct Row {
    command: String,
    #[serde(flatten)]
    listing: Listing,
}

/// Lists the pagers that answer this user.
pub(crate) fn ps(args: &Args) -> Result<u8, Failure> {
    let mut rows: Vec<Row> = sockets::pagers()
        .into_iter()
        .filter(|found| found.listing.snapshot.pid > 0 && !found.listing.detached)
        .map(|found| Row {
            command: processes::command(found.listing.snapshot.pid).unwrap_or_else(|| "(ended)".into()),
            listing: found.listing,
        })
        .collect();
    rows.sort_by_key(|row| row.listing.snapshot.pid);
    let text = if args.json {
        serde_json::to_string_pretty(&rows).map_err(|error| Failure::new(crate::failure::FAILED, error.to_string()))?
            + "\n"
    } else {
        table(&rows.iter().map(columns).collect::<Vec<_>>())
    };
    say::print(&text);
    Ok(0)
}

const COMMAND_CHARS_MAX: usize = 60;
const HEAD: [&str; 10] =
    ["PID", "PROCS", "TOUCHED", "LOCAL", "BUDGET", "STORED", "FAULTS/S", "P50 US", "P99 US", "COMMAND"];

fn columns(row: &Row) -> [String; 10] {
    let of = &row.listing.snapshot;
    [
        of.pid.to_string(),
        of.processes.to_string(),
        Bytes(of.touched_bytes).to_string(),
        Bytes(of.local_bytes).to_string(),
        Bytes(of.budget_bytes).to_string(),
        Bytes(of.stored_bytes).to_string(),
        format!("{:.0}", of.faults_per_s),
        format!("{:.1}", of.fault_us.p50),
        format!("{:.1}", of.fault_us.p99),
        short(&row.command),
    ]
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
fn table(rows: &[[String; 10]]) -> String {
    let mut widths = HEAD.map(str::len);
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.len());
        }
    }
    let mut text = String::new();
    for row in std::iter::once(&HEAD.map(String::from)).chain(rows) {
        for (cell, width) in row[..9].iter().zip(widths) {
            text += &format!("{cell:>width$}  ");
        }
        text += &row[9];
        text.push('\n');
    }
    text
}

//! `spillway pool status`: what a pool's servers say of themselves, and how the groups are that pagers of this host keep.

use crate::failure::{FAILED, Failure, REFUSED};
use crate::service::Listing;
use crate::{pool_drain, say, sockets};
use serde::Serialize;
use spillway_core::size::Bytes;
use spillway_store::Protection;
use spillway_store::pool::{self, OpenErrorKind, ServerReport};
use std::collections::BTreeSet;

/// What `spillway pool` is given.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    /// What each server of a pool has, and how it is
    Status {
        /// The pool, as for `run --pool`: tcp://a:7070,b:7070
        #[arg(value_name = "URL")]
        url: String,
        /// As a JSON array, in bytes, pages and microseconds
        #[arg(long)]
        json: bool,
    },
    /// Have a server leave: its pages move to the others, and then it may be stopped
    Drain(pool_drain::Args),
}

/// One server as JSON.
#[derive(Serialize)]
struct Row<'a> {
    server: &'a str,
    domain: Option<&'a str>,
    error: Option<&'a str>,
    capacity_bytes: Option<u64>,
    used_bytes: Option<u64>,
    pages: Option<u64>,
    distinct_pages: Option<u64>,
    spilled_pages: Option<u64>,
    stored_bytes: Option<u64>,
    tenants: Option<u64>,
    connections: Option<u64>,
    load_percent: Option<u32>,
    leaving: Option<bool>,
    latency_us: Option<u128>,
}

impl<'a> Row<'a> {
    fn new(report: &'a ServerReport) -> Self {
        Self {
            server: &report.server,
            domain: report.domain.as_deref(),
            error: report.error.as_deref(),
            capacity_bytes: report.capacity_bytes,
            used_bytes: report.used_bytes,
            pages: report.pages,
            distinct_pages: report.distinct_pages,
            spilled_pages: report.spilled_pages,
            stored_bytes: report.stored_bytes,
            tenants: report.tenants,
            connections: report.connections,
            load_percent: load_percent(report),
            leaving: report.leaving,
            latency_us: report.latency.map(|latency| latency.as_micros()),
        }
    }
}

fn load_percent(report: &ServerReport) -> Option<u32> {
    report.load.map(|load| u32::from(load) * 100 / 255)
}

/// Asks the servers. The status is 1 if one does not answer.
pub(crate) fn pool(args: &Args) -> Result<u8, Failure> {
    let (url, json) = match &args.command {
        Command::Status { url, json } => (url, json),
        Command::Drain(args) => return pool_drain::drain(args),
    };
    let reports = pool::status(url).map_err(|error| {
        let status = if error.kind == OpenErrorKind::Unreachable { FAILED } else { REFUSED };
        Failure::new(status, say::clean(&error.to_string()))
    })?;
    let text = if *json {
        let rows: Vec<Row<'_>> = reports.iter().map(Row::new).collect();
        serde_json::to_string_pretty(&rows).map_err(|error| Failure::new(FAILED, error.to_string()))? + "\n"
    } else {
        let pagers = sockets::pagers();
        let of_it: Vec<&Listing> = pagers.iter().map(|found| &found.listing).filter(|it| is_of(it, url)).collect();
        table(&reports) + &groups(&of_it) + &warnings(url, &of_it, &reports)
    };
    say::print(&text)?;
    Ok(if reports.iter().any(|report| report.error.is_some()) { FAILED } else { 0 })
}

fn table(reports: &[ServerReport]) -> String {
    let width = reports.iter().map(|report| report.server.len()).max().unwrap_or(0).max("SERVER".len());
    let mut text = format!(
        "{:width$} {:>9} {:>9} {:>10} {:>6} {:>6} {:>7} {:>5} {:>8}",
        "SERVER", "CAPACITY", "USED", "PAGES", "DEDUP", "COMPR", "TENANTS", "LOAD", "LATENCY"
    );
    text += if reports.iter().any(|report| report.domain.is_some()) { " DOMAIN\n" } else { "\n" };
    for report in reports {
        let server = say::clean(&report.server);
        if let Some(error) = &report.error {
            text += &format!("{server:width$} {}\n", say::clean(error));
            continue;
        }
        let bytes = |bytes: Option<u64>| bytes.map(|bytes| Bytes(bytes).to_string());
        let count = |count: Option<u64>| count.map(|count| count.to_string());
        let percent = |percent: Option<u64>| percent.map(|percent| format!("{percent}%"));
        let cells = [
            (9, bytes(report.capacity_bytes)),
            (9, bytes(report.used_bytes)),
            (10, count(report.pages)),
            (6, percent(report.deduplicated_percent())),
            (6, percent(report.compressed_percent())),
            (7, count(report.tenants)),
            (5, load_percent(report).map(|load| format!("{load}%"))),
            (8, report.latency.map(|latency| format!("{} us", latency.as_micros()))),
        ];
        text += &format!("{server:width$}");
        for (width, cell) in cells {
            text += &format!(" {:>width$}", cell.as_deref().unwrap_or("-"));
        }
        text += &report.domain.as_ref().map_or_else(String::new, |domain| format!(" {}", say::clean(domain)));
        text += if report.leaving == Some(true) { " leaving" } else { "" };
        text.push('\n');
    }
    text
}

/// Whether a pager keeps pages in the pool of a URL.
fn is_of(listing: &Listing, url: &str) -> bool {
    !listing.detached && pool::is_same(&listing.pool, url)
}

/// How the groups are that pagers of this host keep: only they know.
fn groups(pagers: &[&Listing]) -> String {
    let mut text = String::new();
    for listing in pagers {
        let Some(protection) = listing.snapshot.protection else { continue };
        let Protection { groups, degraded, rebuilding, .. } = protection;
        let healthy = groups.saturating_sub(degraded);
        text += &format!("pager {}: {healthy} groups healthy, {degraded} degraded", listing.pager_pid);
        if rebuilding > 0 {
            text += &format!(", {rebuilding} pieces being rebuilt");
        }
        if protection.left_seconds > 0 {
            text += &format!(", about {} s left", protection.left_seconds);
        }
        text.push('\n');
    }
    text
}

/// What is not survived where the pool is used as `url` says, or as pagers of this host use it.
fn warnings(url: &str, pagers: &[&Listing], reports: &[ServerReport]) -> String {
    let uses = pagers.iter().map(|listing| &listing.pool[..]).chain([url]);
    let lines: BTreeSet<String> = uses.filter_map(|url| pool::warning(url, reports)).collect();
    lines.iter().map(|line| format!("{line}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use spillway_pager::Snapshot;

    fn listing(pager_pid: i32, pool: &str, degraded: u64) -> Listing {
        let protection = Some(Protection { groups: 100, degraded, ..Protection::default() });
        let snapshot = Snapshot { protection, ..Snapshot::default() };
        let pool = pool.into();
        Listing { pager_pid, front_pid: 0, detached: false, daemon: false, pool, targets: None, snapshot }
    }

    fn server(name: &str, domain: &str) -> ServerReport {
        ServerReport { server: name.into(), domain: Some(domain.into()), ..ServerReport::default() }
    }

    #[test]
    fn groups_are_those_of_the_pool_that_was_asked_for() {
        let pool = "tcp://a,b,c?data=2&parity=1";
        let detached = Listing { detached: true, ..listing(4, pool, 0) };
        let all = [listing(1, pool, 3), listing(2, "tcp://a,b,d?data=2&parity=1", 0), listing(3, "", 0), detached];
        let shown: Vec<&Listing> = all.iter().filter(|it| is_of(it, "tcp://c,b,a:7070")).collect();
        assert_eq!(groups(&shown), "pager 1: 97 groups healthy, 3 degraded\n");
    }

    #[test]
    fn domains_that_are_too_few_are_told_of_the_pool_as_it_is_used() {
        let servers = [server("a:1", "x"), server("b:1", "y"), server("c:1", "y")];
        let line = "groups of 3 pieces over 2 domains: losing a domain loses data\n";
        let used = listing(1, "etcd://e/pool?data=2&parity=1", 0);
        assert_eq!(warnings("etcd://e/pool", &[&used, &used], &servers), line);
        assert_eq!(warnings("etcd://e/pool?data=2&parity=1", &[], &servers), line);
        assert_eq!(warnings("etcd://e/pool", &[], &servers), "");
        assert_eq!(warnings("etcd://e/pool?replicas=2", &[], &servers), "");
    }
}

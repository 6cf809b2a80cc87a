//! `spillway sim`: replays a trace through the pager's core, under each policy, with each share of it local.

mod plot;
mod report;

use crate::failure::{FAILED, Failure};
use crate::replacement::block;
use crate::{cost, say, trace};
pub(crate) use report::faithful;
use report::{Case, Report};
use spillway_core::PAGE_BYTES_U64;
use spillway_core::policy::{Block, Kind, Scheme};
use spillway_core::size::{Bytes, parse_bytes};
use spillway_study::optimal::optimum;
use spillway_study::references::References;
use spillway_study::replay::{Costs, LOCAL_PAGES_LEAST, Setting, replay};
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

/// What the optimum is called among the policies.
const OPTIMUM: &str = "opt";

/// What is computed without a trace.
#[derive(clap::Subcommand)]
enum Other {
    /// Say what larger servers, more servers and pooled memory give for a dollar
    Cost(cost::Args),
}

/// What `spillway sim` is given.
#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    other: Option<Other>,
    /// A trace of `spillway trace`, or a list of addresses: lackey's, Pin's, or one hexadecimal address a line
    #[arg(value_name = "FILE", required = true)]
    file: Option<PathBuf>,
    /// Policies, with commas between; opt is what none can beat. All of them if none is named
    ///
    /// nru sees those touches of local pages that the trace has: the first in each window of an exact one, none in others.
    #[arg(long, value_name = "NAME,..", value_delimiter = ',')]
    policy: Vec<String>,
    /// Local memory, with commas between: sizes, or shares of the most that the trace touches at one time
    #[arg(long, value_name = "SIZE|PERCENT,..", value_delimiter = ',', default_value = "25%,50%,75%")]
    local: Vec<String>,
    /// When pages leave, with commas between: pre-evict, on-demand
    #[arg(long, value_name = "SCHEME,..", value_delimiter = ',', default_value = Scheme::default().name())]
    evict: Vec<Scheme>,
    /// How many adjacent pages move together, with commas between: elastic, 4k, 8k, 16k, 32k, 64k
    #[arg(long, value_name = "BLOCK,..", value_delimiter = ',', value_parser = block, default_value = Block::default().name())]
    block: Vec<Block>,
    /// What a page takes to cross the link to the pool; one crosses at a time
    #[arg(long, value_name = "TIME", default_value = "4us")]
    link: String,
    /// What a fault takes besides link and evictions; as recorded, if the trace tells, or 5us
    #[arg(long, value_name = "TIME")]
    fault: Option<String>,
    /// What it takes to choose a page and to take it out of the program
    #[arg(long, value_name = "TIME", default_value = "1us")]
    capture: String,
    /// What a reference takes in a list of addresses, which has no times
    #[arg(long, value_name = "TIME", default_value = "1ns")]
    reference: String,
    /// How long the program takes with all of its memory local; by the trace it is longer, because recording takes time
    #[arg(long, value_name = "TIME")]
    ran: Option<String>,
    /// As JSON
    #[arg(long)]
    json: bool,
    /// Draw the miss ratios, as SVG: a line for each policy, scheme and block
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

/// A fault without link and evictions where no trace tells: what one from the pager's buffers takes (docs/bench/0001, p50
/// less the decompression).
pub(crate) const FAULT_NS: u64 = 5_000;

/// A policy that ships, or the bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Contestant {
    Policy(Kind),
    Optimum,
}

/// Replays, and prints what came out.
pub(crate) fn sim(args: &Args) -> Result<u8, Failure> {
    let file = match (&args.other, &args.file) {
        (Some(Other::Cost(args)), _) => return cost::cost(args),
        (None, Some(file)) => file,
        (None, None) => unreachable!("one of them is required"),
    };
    let contestants = contestants(&args.policy)?;
    let ns = |text: &str| trace::time(text).map(|time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    let (link_ns, capture_ns, reference_ns) = (ns(&args.link)?, ns(&args.capture)?, ns(&args.reference)?);
    let fault_ns = args.fault.as_deref().map(ns).transpose()?;
    let ran_ns = args.ran.as_deref().map(ns).transpose()?;
    args.local.iter().try_for_each(|local| local_pages(local, u64::MAX >> 12).map(drop))?;

    let read = References::read(open(file)?, reference_ns);
    let (mut references, about) = read.map_err(|error| unreadable(file, &error))?;
    if let Some(ran_ns) = ran_ns {
        references.set_ran(ran_ns);
    }
    let fault_ns = fault_ns.or(references.refault_ns()).unwrap_or(FAULT_NS);
    let costs = Costs { link_ns, fault_ns, capture_ns };
    let mut report = Report::new(file, &references, about, costs);
    for local in &args.local {
        let pages = local_pages(local, references.peak_pages())?;
        for &contestant in &contestants {
            match contestant {
                Contestant::Optimum => {
                    report.cases.push(Case::optimum(local, pages, optimum(&references, pages), &references, costs));
                }
                Contestant::Policy(policy) => {
                    let each =
                        args.evict.iter().flat_map(|&scheme| args.block.iter().map(move |&block| (scheme, block)));
                    report.cases.extend(each.map(|(scheme, block)| {
                        let setting = Setting { local_pages: pages, policy, scheme, block, costs };
                        Case::replayed(local, setting, replay(&references, setting), &references)
                    }));
                }
            }
        }
    }
    if let Some(path) = &args.plot {
        plot::draw(path, &report)?;
    }
    let json = || serde_json::to_string_pretty(&report).map(|text| text + "\n");
    let text = if args.json { json().map_err(|e| Failure::new(FAILED, e.to_string()))? } else { report.table() };
    say::print(&text)?;
    Ok(0)
}

fn contestants(names: &[String]) -> Result<Vec<Contestant>, Failure> {
    if names.is_empty() {
        let all = Kind::ALL.iter().map(|kind| Contestant::Policy(*kind));
        return Ok(all.chain([Contestant::Optimum]).collect());
    }
    let known = |name: &String| match name.as_str() {
        OPTIMUM => Ok(Contestant::Optimum),
        name => name.parse().map(Contestant::Policy),
    };
    let found: Result<_, _> = names.iter().map(known).collect();
    found.map_err(|error| Failure::refused(format!("{error}, {OPTIMUM}")))
}

/// A budget in pages, of a program that has `all` of them.
fn local_pages(text: &str, all: u64) -> Result<u64, Failure> {
    let pages = match text.strip_suffix('%').map(str::parse::<u64>) {
        Some(Ok(percent @ 1..=100)) => all.saturating_mul(percent) / 100,
        Some(_) => {
            return Err(Failure::refused(format!("`{text}` is no share: give 1% to 100%, or a size such as 512M")));
        }
        None => parse_bytes(text).map_err(|error| Failure::refused(error.to_string()))? / PAGE_BYTES_U64,
    };
    if pages < LOCAL_PAGES_LEAST {
        let (least, all) = (Bytes(LOCAL_PAGES_LEAST * PAGE_BYTES_U64), Bytes(all * PAGE_BYTES_U64));
        return Err(Failure::refused(format!(
            "{text} of the {all} that the trace touches is less than the {least} that a pager needs; give --local more"
        )));
    }
    Ok(pages)
}

/// Opens a trace.
pub(crate) fn open(path: &Path) -> Result<BufReader<File>, Failure> {
    let opened = File::open(path).and_then(|file| match file.metadata()?.is_dir() {
        true => Err(std::io::ErrorKind::IsADirectory.into()),
        false => Ok(file),
    });
    let refuse = |error| {
        let path = say::clean(&path.to_string_lossy());
        Failure::refused(format!("cannot read {path}: {}; `spillway trace` makes traces", say::error(&error)))
    };
    opened.map(|file| BufReader::with_capacity(1 << 16, file)).map_err(refuse)
}

/// Why a trace cannot be used.
pub(crate) fn unreadable(path: &Path, error: &spillway_study::error::Error) -> Failure {
    Failure::refused(say::plain(&format!("{} {error}", say::clean(&path.to_string_lossy()))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_replayed_is_refused_with_a_remedy() {
        for (failed, word) in [
            (contestants(&["random".into()]).expect_err("no policy"), "sieve, opt"),
            (local_pages("0%", 1000).expect_err("nothing"), "1% to 100%"),
            (local_pages("1%", 1000).expect_err("too little"), "give --local more"),
            (local_pages("half", 1000).expect_err("no size"), "such as 512M"),
        ] {
            assert_eq!(failed.status, crate::failure::REFUSED);
            assert!(failed.to_string().contains(word), "{failed}");
        }
        assert_eq!(local_pages("25%", 1000).ok(), Some(250));
        assert_eq!(contestants(&[]).expect("all").len(), Kind::ALL.len() + 1);
    }
}

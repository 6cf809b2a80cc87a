//! `spillway advise`: how much local memory a program needs, from a trace or from the program as it runs.
//!
//! Invariants: of a running process only a sample of the pages is taken out, a bounded number in each window, so that it
//! hardly slows down; it is let go of with all of its pages in place, or stays managed and is told of.

mod live;
mod report;

use crate::failure::{FAILED, Failure};
use crate::sim::{FAULT_NS, faithful, open, unreadable};
use crate::{say, trace};
use report::{Report, Seen};
use spillway_study::advice::{Observed, WindowSizes};
use spillway_study::error::Error;
use spillway_study::footprint::Footprint;
use spillway_study::sampled::{Halved, SAMPLE_PAGES};
use spillway_study::source::{self, Kind, Step};
use std::path::Path;
use std::time::Duration;

/// What `spillway advise` is given.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The process to watch, or a trace of --exact or list of addresses (`./4711` if its name is a number)
    ///
    /// A trace without --exact has the faults under one budget, and nothing of pages that stayed local: no other budget
    /// follows from it.
    #[arg(value_name = "PID|FILE")]
    of: String,
    /// How long to watch a process
    #[arg(long = "for", value_name = "TIME", default_value = "30s")]
    lasts: String,
    /// How often a sampled page of a process may be seen
    #[arg(long, value_name = "TIME", default_value = "200ms")]
    window: String,
    /// What a miss costs; as measured on a process, or 9us: 5us for the fault and 4us on a link
    #[arg(long, value_name = "TIME")]
    miss: Option<String>,
    /// What a reference takes in a list of addresses, which has no times
    #[arg(long, value_name = "TIME", default_value = "1ns")]
    reference: String,
    /// How long the program takes with all of its memory local; by a trace it is longer, because recording takes time
    #[arg(long, value_name = "TIME")]
    ran: Option<String>,
    /// As JSON, with the whole curve
    #[arg(long)]
    json: bool,
    /// Say nothing while a process is watched
    #[arg(short, long)]
    quiet: bool,
}

/// What a miss costs where nothing was measured: a fault, and a page on the link of Lim et al.
const MISS_NS: u64 = FAULT_NS + 4_000;

/// Watches or reads, and says what came out.
pub(crate) fn advise(args: &Args) -> Result<u8, Failure> {
    let ns = |text: &str| trace::time(text).map(|time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    let miss_ns = args.miss.as_deref().map(ns).transpose()?;
    let (reference_ns, lasts) = (ns(&args.reference)?, trace::time(&args.lasts)?);
    let ran_ns = args.ran.as_deref().map(ns).transpose()?;
    let window = Duration::from_nanos(trace::window_ns(&args.window)?);
    let report = match args.of.parse() {
        Ok(pid) => live::watch(&live::Watch { pid, lasts, window, miss_ns, quiet: args.quiet })?,
        Err(_) => of_file(Path::new(&args.of), reference_ns, miss_ns, ran_ns)?,
    };
    let json = || serde_json::to_string_pretty(&report).map(|text| text + "\n");
    let text = if args.json { json().map_err(|e| Failure::new(FAILED, e.to_string()))? } else { report.text() };
    say::print(&text)?;
    Ok(0)
}

/// Reads a file once; memory is bounded by the sample, and by an index of what was touched.
fn of_file(path: &Path, reference_ns: u64, miss_ns: Option<u64>, ran_ns: Option<u64>) -> Result<Report, Failure> {
    let mut halved = Halved::new(SAMPLE_PAGES, spillway_core::sample::HASHES);
    let mut gathered = Gathered::default();
    let read = source::read(open(path)?, reference_ns, &mut |step| {
        halved.push(step);
        gathered.push(step)
    });
    let about = read.map_err(|error| unreadable(path, &error))?;
    let known_from_pages = match about.kind {
        Kind::Faults { .. } => return Err(no_budget_follows(path)),
        Kind::Addresses => 0,
        Kind::Windows { .. } => gathered.windows.pages(),
    };
    if gathered.touches == 0 {
        return Err(unreadable(path, &Error::Empty));
    }
    let observed = Observed {
        pages: gathered.footprint.peak_pages(),
        ran_ns: ran_ns.unwrap_or(gathered.ran_ns),
        miss_ns: miss_ns.unwrap_or(MISS_NS),
        known_from_pages,
    };
    let seen =
        Seen { pages: halved.whole.pages() as u64, touches: halved.whole.seen(), all: halved.whole.rate() >= 1.0 };
    Ok(Report::new(halved.curves(None), None, observed, seen, faithful(&about)))
}

/// Why a trace of faults is no ground for advice. What a program uses all the time stays local and raises no fault: with less
/// memory it would be missed, and with more it takes up room, so that distances among faults are too small for either.
fn no_budget_follows(path: &Path) -> Failure {
    Failure::refused(format!(
        "{} has the faults under one budget, and nothing of what stayed local: what another budget costs does not follow from \
         it; record with `spillway trace --exact`, or watch the program: `spillway advise PID`",
        say::clean(&path.to_string_lossy())
    ))
}

/// What is to be known of a trace besides its curve.
#[derive(Default)]
struct Gathered {
    footprint: Footprint,
    windows: WindowSizes,
    touches: u64,
    ran_ns: u64,
}

impl Gathered {
    fn push(&mut self, step: Step) -> Result<(), Error> {
        match step {
            Step::Window => self.windows.begin(),
            Step::Touch { page, ran_ns, .. } => {
                self.footprint.touch(page)?;
                self.windows.touch();
                self.touches += 1;
                self.ran_ns = self.ran_ns.saturating_add(ran_ns);
            }
            Step::Removed { page, pages } => drop(self.footprint.remove(page, pages)),
        }
        Ok(())
    }
}

//! `spillway trace`: records what a pager sees of a program, for `sim`, `advise` and others (docs/TRACE.md).

use crate::behind::Behind;
use crate::failure::{FAILED, Failure};
use crate::recorder::{Recorder, Sink, Totals};
use crate::replace::Place;
use crate::terms::Terms;
use crate::{attach, local, pool, replacement, run, say};
use spillway_core::PAGE_BYTES_U64;
use spillway_core::sample::HASHES;
use spillway_core::time::parse_ns;
use spillway_pager::{Choice, Local, Recording, Windows};
use spillway_study::record::Record;
use spillway_study::trace::{Header, Writer};
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The shortest window: shorter ones are over before their pages have left.
const WINDOW_LEAST_NS: u64 = 10_000_000;

/// What `spillway trace` is given.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The process to trace, with its descendants; Ctrl-C ends that and lets it go
    #[arg(value_name = "PID", value_parser = clap::value_parser!(i32).range(1..), required_unless_present = "command", conflicts_with = "command")]
    pid: Option<i32>,
    /// Where the trace goes
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Records the first touch of every page in each window, also of local ones; makes the program slow
    ///
    /// At the start of each window every page leaves once, so that the next touch of it is seen. A program that touches
    /// most of its memory in a window spends most of its time waiting for faults.
    #[arg(long)]
    exact: bool,
    /// The length of a window of --exact
    #[arg(long, value_name = "TIME", default_value = "100ms", requires = "exact")]
    window: String,
    /// Local memory: 512M, 2G, a share of what is touched, or all. What stays local raises no fault. 50%, or all with --exact
    #[arg(long, value_name = "SIZE|PERCENT|all")]
    local: Option<String>,
    /// Where the rest goes; local: is this host, compressed
    #[arg(long, value_name = "URL", default_value = pool::DEFAULT)]
    pool: String,
    #[command(flatten)]
    replacement: replacement::Choices,
    /// Ends after this time and lets the process go
    #[arg(long = "for", value_name = "TIME", conflicts_with = "command")]
    lasts: Option<String>,
    /// Say nothing but what went wrong
    #[arg(short, long)]
    quiet: bool,
    /// The program to run and trace, and its arguments, after `--`
    #[arg(last = true, value_name = "CMD")]
    command: Vec<OsString>,
}

/// Traces until the process ends, or as long as was asked.
pub(crate) fn trace(args: &Args) -> Result<u8, Failure> {
    if args.pid.is_some() {
        attach::begin_guardian(args.quiet);
    }
    let window_ns = if args.exact { Some(window_ns(&args.window)?) } else { None };
    let local = args.local.as_deref().unwrap_or(if args.exact { local::ALL } else { "50%" });
    let lasts = args.lasts.as_deref().map(time).transpose()?;
    let tape = Tape { path: args.output.clone(), window_ns };
    let terms = Terms {
        share_pages: false,
        local,
        choice: Choice::default(),
        pool: &args.pool,
        replacement: args.replacement.settings(),
        stats: None,
        quiet: args.quiet,
        tape: Some(&tape),
    };
    match args.pid {
        Some(pid) => attach::manage(pid, &terms, lasts),
        None => run::manage(&args.command, &terms),
    }
}

/// Reads a time that a user gave.
pub(crate) fn time(text: &str) -> Result<Duration, Failure> {
    parse_ns(text).map(Duration::from_nanos).map_err(|error| Failure::refused(error.to_string()))
}

/// Reads the length of a window.
pub(crate) fn window_ns(text: &str) -> Result<u64, Failure> {
    let ns = parse_ns(text).map_err(|error| Failure::refused(error.to_string()))?;
    if ns < WINDOW_LEAST_NS {
        return Err(Failure::refused(format!(
            "a window of {text} is over before its pages have left: give 10ms or more"
        )));
    }
    Ok(ns)
}

/// A trace that is to be written.
#[derive(Clone, Debug)]
pub(crate) struct Tape {
    /// To here.
    pub(crate) path: PathBuf,
    /// An exact one, with windows of this length.
    pub(crate) window_ns: Option<u64>,
}

/// A recorder that writes a file.
pub(crate) type FileRecorder = Recorder<TraceFile>;

impl Tape {
    /// Makes sure that the file can be written, and begins.
    pub(crate) fn start(&self, local: Local) -> Result<(Recording, FileRecorder), Failure> {
        let header = Header { window_ns: self.window_ns.unwrap_or(0), budget_pages: budget_pages(local) };
        let started =
            Place::prepare(&self.path).and_then(|place| Recorder::start(TraceFile::Awaited(Some(place), header)));
        let (to, recorder) = started.map_err(|error| {
            let (path, why) = (shown(&self.path), say::error(&error));
            Failure::refused(format!("cannot write a trace to {path}: {why}; give --output another file"))
        })?;
        let windows = self.window_ns.map(|ns| Windows { length: Duration::from_nanos(ns), hash_below: HASHES });
        Ok((Recording { to, windows }, recorder))
    }

    /// Tells what was recorded.
    pub(crate) fn tell(&self, totals: Result<Totals, String>, quiet: bool) -> Result<(), Failure> {
        let Totals { faults, dropped, windows } = totals.map_err(|error| Failure::new(FAILED, error))?;
        let path = shown(&self.path);
        if dropped > 0 {
            say::note(format!(
                "{dropped} records are missing from {path}: they came faster than they could be written; use a faster disk, or a \
                 larger --local"
            ));
        }
        if !quiet {
            let windows = if self.window_ns.is_some() { format!(" in {windows} windows") } else { String::new() };
            say::note(format!("{faults} references{windows} are in {path}; next: `spillway sim {path}`"));
        }
        Ok(())
    }
}

/// A trace, which replaces an older one only once there is something to record: until then adoption may yet be refused.
pub(crate) enum TraceFile {
    /// Nothing was recorded so far. The place is gone when the file could not be begun.
    Awaited(Option<Place>, Header),
    /// There is a file.
    Begun(Writer<Behind>),
}

impl Sink for TraceFile {
    fn put(&mut self, record: &Record) -> io::Result<()> {
        if let Self::Awaited(place, header) = self {
            let (place, header) = (place.take().ok_or(io::ErrorKind::NotFound)?, *header);
            *self = Self::Begun(place.replace(|file| Writer::new(Behind::new(file)?, header))?);
        }
        if let Self::Begun(writer) = self { writer.push(record) } else { Ok(()) }
    }

    fn flush(&mut self) -> io::Result<()> {
        if let Self::Begun(writer) = self { writer.flush() } else { Ok(()) }
    }

    fn close(&mut self) -> io::Result<()> {
        self.flush()?;
        if let Self::Begun(writer) = self { writer.get_mut().close() } else { Ok(()) }
    }
}

/// A share is of what will have been touched, which nobody knows yet: none is said then.
fn budget_pages(local: Local) -> u64 {
    match local {
        Local::Bytes(bytes) => bytes / PAGE_BYTES_U64,
        Local::Percent(_) | Local::All => u64::MAX,
    }
}

fn shown(path: &Path) -> String {
    say::clean(&path.to_string_lossy())
}

//! Watches a running process, by a sample of its pages.

use super::MISS_NS;
use super::report::{Report, Seen};
use crate::failure::{FAILED, Failure};
use crate::recorder::{Recorder, Sink, Totals};
use crate::{pool, say, sockets, sys};
use spillway_core::PAGE_BYTES_U64;
use spillway_core::policy::Settings;
use spillway_core::sample::{HASHES, hash};
use spillway_core::size::Bytes;
use spillway_pager::{Choice, Local, OnPagerDeath, Options, Pager, Recording, Snapshot, Windows, procfs};
use spillway_study::advice::Observed;
use spillway_study::record::{Fault, Record, What};
use spillway_study::sampled::Halved;
use spillway_study::source::Steps;
use spillway_study::workingset::WorkingSet;
use std::io;
use std::time::{Duration, Instant};

/// Pages taken out in each window: at 10 us for each that is touched again, a window of 200 ms loses 3% at most.
const SAMPLED_PAGES: u64 = 512;
/// How often it is looked whether the time is over.
const TICK: Duration = Duration::from_millis(50);
/// How soon a release that failed is tried again.
const RETRY: Duration = Duration::from_secs(2);
/// Fetches from which the cost of a miss is known.
const FETCHES_ENOUGH: usize = 50;
/// Fetches that are remembered for it.
const FETCHES_MOST: usize = 1 << 16;

/// What is to be watched, and how.
pub(super) struct Watch {
    pub(super) pid: i32,
    pub(super) lasts: Duration,
    pub(super) window: Duration,
    pub(super) miss_ns: Option<u64>,
    pub(super) quiet: bool,
}

/// What is seen of the sample.
struct Sample {
    halved: Halved,
    steps: Steps,
    within: WorkingSet,
    hash_below: u64,
    fetches_ns: Vec<u64>,
    served_ns: u64,
}

impl Sink for Sample {
    fn put(&mut self, record: &Record) -> io::Result<()> {
        // The program's own time: it stands still while it waits.
        let ran_ns = record.time_ns.saturating_sub(self.served_ns);
        match record.what {
            What::Window => self.within.begin(ran_ns),
            What::Evicted { page, pages } => (page..page + pages).for_each(|page| self.within.left(page, ran_ns)),
            What::Fault { page, service_ns, .. } if hash(page) < self.hash_below => {
                self.within.touch(page, ran_ns.saturating_sub(service_ns));
            }
            What::Removed { page, pages } => self.within.remove(page, page.saturating_add(pages)),
            _ => {}
        }
        if let What::Fault { fault, service_ns, .. } = record.what {
            self.served_ns = self.served_ns.saturating_add(service_ns);
            if fault == Fault::Fetch && self.fetches_ns.len() < FETCHES_MOST {
                self.fetches_ns.push(service_ns);
            }
        }
        if let Some(step) = self.steps.next(record.time_ns, record.what) {
            self.halved.push(step);
        }
        Ok(())
    }
}

/// Watches the process for a while, lets go of it, and says what was seen.
pub(super) fn watch(watch: &Watch) -> Result<Report, Failure> {
    let Watch { pid, window, .. } = *watch;
    if let Ok(found) = sockets::pager_of(pid)
        && !found.listing.detached
    {
        return Err(Failure::refused(format!(
            "process {pid} is managed already: `spillway detach {pid}`, then try again"
        )));
    }
    let pages = procfs::size(pid).map_or(1, |size| size.anonymous_pages.max(1));
    let hash_below = (HASHES / pages.div_ceil(SAMPLED_PAGES)).max(1);
    let sample = Sample {
        // The sample has the size that it has: the process may grow.
        halved: Halved::new(usize::MAX, hash_below),
        steps: Steps::default(),
        within: WorkingSet::default(),
        hash_below,
        fetches_ns: Vec::new(),
        served_ns: 0,
    };
    sys::block_signals();
    let failed = |error: io::Error| Failure::new(FAILED, format!("cannot begin to record: {}", say::error(&error)));
    let (to, recorder) = Recorder::start(sample).map_err(failed)?;
    let pager = Pager::adopt(
        pid,
        Options {
            local: Local::All,
            choice: Choice::default(),
            replacement: Settings::default(),
            store: pool::open(pool::DEFAULT)?,
            on_pager_death: OnPagerDeath::HoldTarget,
            recording: Some(Recording { to, windows: Some(Windows { length: window, hash_below }) }),
            share_pages: false,
            lasting: None,
        },
    )?;
    if !watch.quiet {
        let part = HASHES / hash_below;
        say::note(format!(
            "watching 1 in {part} pages of process {pid} for {} s; Ctrl-C ends that",
            watch.lasts.as_secs()
        ));
    }
    let began = Instant::now();
    let mut touched_bytes = 0;
    while began.elapsed() < watch.lasts && pager.has_targets() {
        let caught = sys::next_signal(Some(TICK.min(watch.lasts.saturating_sub(began.elapsed()))));
        touched_bytes = touched_bytes.max(pager.snapshot().touched_bytes);
        if caught
            .is_some_and(|caught| [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT].contains(&caught.number))
        {
            break;
        }
    }
    let watched = began.elapsed();
    let recorded = recorder.finish();
    let last = let_go(&pager);
    let (sample, totals) = recorded.map_err(|error| Failure::new(FAILED, error))?;
    report(watch, sample, totals, watched, touched_bytes.max(last.touched_bytes))
}

/// Returns when the process is as it was, or gone.
fn let_go(pager: &Pager) -> Snapshot {
    let last = pager.snapshot();
    while pager.has_targets() {
        match pager.detach(&mut |_, _| {}) {
            Ok(()) => break,
            Err(error) => say::note(error),
        }
        std::thread::sleep(RETRY);
    }
    last
}

fn report(
    watch: &Watch,
    mut sample: Sample,
    totals: Totals,
    watched: Duration,
    touched_bytes: u64,
) -> Result<Report, Failure> {
    let seen = Seen {
        pages: sample.halved.whole.pages() as u64,
        touches: sample.halved.whole.seen(),
        all: sample.hash_below == HASHES,
    };
    let pages = (touched_bytes / PAGE_BYTES_U64).max(1);
    if seen.pages == 0 {
        return Err(Failure::new(
            FAILED,
            format!(
                "none of the {} that process {} has was touched in {:.1} s; try again with a longer --for",
                Bytes(touched_bytes),
                watch.pid,
                watched.as_secs_f64()
            ),
        ));
    }
    sample.fetches_ns.sort_unstable();
    let middle = sample.fetches_ns.get(sample.fetches_ns.len() / 2).copied();
    let measured = middle.filter(|_| sample.fetches_ns.len() >= FETCHES_ENOUGH);
    let watched_ns = u64::try_from(watched.as_nanos()).unwrap_or(u64::MAX);
    let rate = sample.hash_below as f64 / HASHES as f64;
    let observed = Observed {
        pages,
        // Threads that wait at the same time may together wait for longer than it was watched.
        ran_ns: watched_ns.saturating_sub(sample.served_ns).max(watched_ns / 10),
        miss_ns: watch.miss_ns.or(measured).unwrap_or(MISS_NS),
        known_from_pages: 0,
    };
    let mut faithful = format!(
        "faithful: to what it did in these {:.1} s, by first touches in windows of {} ms and by working sets within them",
        watched.as_secs_f64(),
        watch.window.as_millis()
    );
    if totals.dropped > 0 {
        faithful += &format!("; {} records are missing", totals.dropped);
    }
    // References beyond those of the sample were not counted: the sample stands for them.
    let references = seen.touches as f64 / rate;
    Ok(Report::new(sample.halved.curves(Some(references)), Some(&sample.within), observed, seen, faithful))
}

//! `spillway attach`: adopts a process that runs already, and serves it until it ends or is let go.
//!
//! Invariants: we end only when the target has ended or all of its pages are home; no signal but SIGKILL shortens that.
//! If we are killed, the target stops rather than reads zeros.

use crate::failure::Failure;
use crate::progress::{self, Progress};
use crate::report::{self, StatsFile};
use crate::service::{Detachment, Service};
use crate::terms::Terms;
use crate::trouble::Trouble;
use crate::{control, local, pool, replacement, say, sockets, sys};
use spillway_core::size::Bytes;
use spillway_pager::{OnPagerDeath, Options, Pager};
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// How often the target's end and the progress of a detachment are looked at.
const TICK: Duration = Duration::from_millis(100);

/// What `spillway attach` is given.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The process to adopt, with its descendants
    #[arg(value_name = "PID", value_parser = clap::value_parser!(i32).range(1..))]
    pid: i32,
    /// Local memory for all of it: 512M, 2G, or a share of what it touches
    #[arg(long, value_name = "SIZE|PERCENT", default_value = "50%")]
    local: String,
    /// Where the rest goes; local: is this host, compressed
    #[arg(long, value_name = "URL", default_value = pool::DEFAULT)]
    pool: String,
    #[command(flatten)]
    replacement: replacement::Choices,
    /// Write the final counters to this file, as JSON
    #[arg(long, value_name = "FILE")]
    stats: Option<PathBuf>,
    /// Say nothing but what went wrong
    #[arg(short, long)]
    quiet: bool,
}

/// Adopts the process and stays until it is gone or free.
pub(crate) fn attach(args: &Args) -> Result<u8, Failure> {
    let terms = Terms {
        local: &args.local,
        pool: &args.pool,
        replacement: args.replacement.settings(),
        stats: args.stats.as_deref(),
        quiet: args.quiet,
        tape: None,
    };
    manage(args.pid, &terms, None)
}

/// Does what `attach` does, and lets the process go unasked when so much time has passed.
pub(crate) fn manage(pid: i32, terms: &Terms<'_>, lasts: Option<Duration>) -> Result<u8, Failure> {
    let local = local::parse(terms.local)?;
    pool::parse(terms.pool)?;
    let stats = terms.stats.map(StatsFile::prepare).transpose()?;
    sys::block_signals();
    if let Ok(found) = sockets::pager_of(pid)
        && !found.listing.detached
    {
        return Err(Failure::refused(format!(
            "process {pid} is managed already: `spillway resize {pid} SIZE` changes its budget"
        )));
    }
    let (recording, recorder) = terms.tape.map(|tape| tape.start(local)).transpose()?.unzip();
    let (replacement, on_pager_death) = (terms.replacement, OnPagerDeath::HoldTarget);
    let options = Options { local, replacement, store: pool::open(terms.pool)?, on_pager_death, recording };
    let service = Arc::new(Service::new(Pager::adopt(pid, options)?, pid, 0));
    let listening = sockets::bind().and_then(|(listener, bound)| {
        let listening = control::listen(listener, Arc::clone(&service)).map_err(|error| error.to_string());
        listening.map(|()| bound)
    });
    if !terms.quiet {
        let now = service.snapshot();
        let (pause, touched) = (now.adopt_pause_us, Bytes(now.touched_bytes));
        say::note(format!("adopted process {} in a pause of {pause:.0} us, {touched} touched; Ctrl-C lets it go", pid));
        if let Err(warning) = &listening {
            say::note(warning);
        }
    }
    let until = lasts.map(|lasts| Instant::now() + lasts);
    serve(&service, until);
    service.finish_answers();
    let last = service.snapshot();
    if !terms.quiet {
        say::note(report::summary(&last));
    }
    if let (Some(tape), Some(recorder)) = (terms.tape, recorder) {
        tape.tell(recorder.finish().map(|(_, totals)| totals), terms.quiet)?;
    }
    stats.map_or(Ok(0), |stats| stats.write(&last).map(|()| 0))
}

/// Returns when the target has ended or all pages are home, for which it asks at `until`.
fn serve(service: &Arc<Service>, mut until: Option<Instant>) {
    let mut progress: Option<(Progress, u64, Instant)> = None;
    let (told, failures) = mpsc::channel();
    let mut leaving = false;
    let mut trouble = Trouble::default();
    loop {
        let asked = sys::next_signal(Some(TICK))
            .is_some_and(|caught| matches!(caught.number, libc::SIGINT | libc::SIGTERM | libc::SIGHUP | libc::SIGQUIT));
        let asked = asked || until.take_if(|until| Instant::now() >= *until).is_some();
        if let Ok(failure) = failures.try_recv() {
            say::note(failure);
            leaving = false;
        }
        match service.detachment() {
            Detachment::Done => {
                if let Some((line, total, since)) = &mut progress {
                    line.show(*total, *total, *since);
                }
                return;
            }
            Detachment::None => {
                progress = None;
                trouble.tell(&service.snapshot());
                if !service.has_targets() {
                    return;
                }
                if asked && !leaving {
                    leaving = true;
                    detach(service, &told);
                }
            }
            Detachment::Running(done, total, since) => {
                let (line, last_total, _) = progress.get_or_insert_with(|| (Progress::new(), total, since));
                line.show(done, total, since);
                *last_total = total;
                if asked {
                    *line = Progress::new();
                    let left = progress::left(done, total, since.elapsed());
                    say::note(format!("{done} of {total} pages are home{left}; stopping now would lose the rest"));
                }
            }
        }
    }
}

fn detach(service: &Arc<Service>, told: &mpsc::Sender<String>) {
    let (service, by_thread) = (Arc::clone(service), told.clone());
    let work = move || {
        if let Err(failure) = service.detach(&mut |_, _| {}) {
            let _ = by_thread.send(failure);
        }
    };
    if let Err(error) = control::thread("detach").spawn(work) {
        let _ = told.send(format!("cannot begin to detach: {}; try again", say::error(&error)));
    }
}

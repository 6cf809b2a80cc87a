//! `spillway attach`: adopts a process that runs already, and serves it until it ends or is let go.
//!
//! Invariants: we end only when the target has ended or all of its pages are home; no signal but SIGKILL shortens that.
//! If we are killed, the target stops rather than reads zeros.

use crate::daemon::{
    self,
    client::{Client, Wanted},
};
use crate::failure::Failure;
use crate::progress::{self, Progress};
use crate::report::{self, StatsFile};
use crate::service::{Detachment, Service};
use crate::terms::Terms;
use crate::trouble::Trouble;
use crate::{control, local, pool, replacement, say, sockets, sys};
use spillway_core::policy::Settings;
use spillway_core::size::{Bytes, parse_bytes};
use spillway_pager::guardian::{self, Duty};
use spillway_pager::{Choice, Error, LOCAL_FLOOR_BYTES, Local, OnPagerDeath, Options, Pager, Remains};
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// How often the target's end and the progress of a detachment are looked at.
const TICK: Duration = Duration::from_millis(100);

/// What `--local` is when it is not given.
pub(crate) const DEFAULT_LOCAL: &str = "50%";

/// What `spillway attach` is given.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The process to adopt, with its descendants
    #[arg(value_name = "PID", value_parser = clap::value_parser!(i32).range(1..))]
    pid: i32,
    /// Local memory for all of it: 512M, 2G, or a share of what it touches [default: 50%, or what it was]
    #[arg(long, value_name = "SIZE|PERCENT")]
    local: Option<String>,
    /// Manage only mappings so large: a guest's memory, not its monitor's own; down to 4K
    #[arg(long, value_name = "SIZE", value_parser = least_mapping)]
    least_mapping: Option<u64>,
    /// Where the rest goes; local: is this host, compressed [default: local:, or where it is]
    #[arg(long, value_name = "URL")]
    pool: Option<String>,
    #[command(flatten)]
    replacement: replacement::Choices,
    #[command(flatten)]
    daemon: daemon::client::Choice,
    /// Keep equal pages of it and of others once in memory, too (the kernel does: KSM)
    #[arg(long)]
    share: bool,
    /// Also memory that processes share (MAP_SHARED, memfd): read docs/SHARED.md first
    #[arg(long)]
    shared_memory: bool,
    /// Write the final counters to this file, as JSON
    #[arg(long, value_name = "FILE")]
    stats: Option<PathBuf>,
    /// Say nothing but what went wrong
    #[arg(short, long)]
    quiet: bool,
}

/// Parses what `--least-mapping` is given.
fn least_mapping(text: &str) -> Result<u64, String> {
    match parse_bytes(text) {
        Err(error) => Err(error.to_string()),
        Ok(bytes) if bytes < LOCAL_FLOOR_BYTES => {
            let least = Bytes(LOCAL_FLOOR_BYTES);
            Err(format!("smaller mappings than {least} are what a program itself works with: give the guest's size"))
        }
        Ok(bytes) => Ok(bytes),
    }
}

/// Adopts the process and stays until it is gone or free.
pub(crate) fn attach(args: &Args) -> Result<u8, Failure> {
    begin_guardian(args.quiet);
    if args.share {
        spillway_pager::merging::usable()?;
    }
    if args.shared_memory {
        spillway_pager::shared_memory_usable()?;
    }
    // Not by asking all pagers first: one that does not answer would keep a process waiting that waits already.
    match Remains::find(args.pid) {
        Ok(Some(remains)) => return take_over(args, remains),
        Ok(None) | Err(Error::Managed { .. }) => {}
        Err(error) => return Err(error.into()),
    }
    let wanted = Wanted { local: args.local.as_deref(), pool: args.pool.as_deref(), replacement: &args.replacement };
    if let Some(client) = args.daemon.daemon(&wanted)? {
        return hand_to(&client, args);
    }
    let terms = Terms {
        local: args.local.as_deref().unwrap_or(DEFAULT_LOCAL),
        choice: Choice {
            least_mapping_bytes: args.least_mapping.unwrap_or(0),
            shared_memory: args.shared_memory,
            ..Choice::default()
        },
        pool: args.pool.as_deref().unwrap_or(pool::DEFAULT),
        replacement: args.replacement.settings(),
        share_pages: args.share,
        stats: args.stats.as_deref(),
        quiet: args.quiet,
        tape: None,
    };
    manage(args.pid, &terms, None)
}

/// Lets the daemon manage the process.
fn hand_to(client: &Client, args: &Args) -> Result<u8, Failure> {
    let pid = args.pid;
    if args.stats.is_some() {
        return Err(Failure::refused(
            "the daemon keeps the counters: `spillway ps --json` shows them; leave --stats out, or add --no-daemon",
        ));
    }
    if args.least_mapping.is_some() {
        return Err(Failure::refused(
            "the daemon manages all mappings of a process: leave --least-mapping out, or add --no-daemon",
        ));
    }
    if args.shared_memory {
        return Err(daemon::client::shared_memory_is_its());
    }
    refuse_managed(pid)?;
    let pause = client.adopt(pid, false, 0, args.share)?;
    if !args.quiet {
        say::note(format!(
            "adopted process {pid} by the daemon (process {}), in a pause of {pause:.0} us; `spillway detach {pid}` lets it go",
            client.pid
        ));
    }
    Ok(0)
}

fn refuse_managed(pid: i32) -> Result<(), Failure> {
    match sockets::pager_of(pid) {
        Ok(found) if !found.listing.detached && !found.is_daemon_itself() => Err(Failure::refused(format!(
            "process {pid} is managed already: `spillway resize {pid} SIZE` changes its budget"
        ))),
        _ => Ok(()),
    }
}

/// Serves on where a pager has died.
fn take_over(args: &Args, remains: Remains) -> Result<u8, Failure> {
    if remains.is_daemon() {
        return Err(Failure::refused(format!(
            "the daemon that managed process {} has died: start `spillway daemon` again, which takes over",
            args.pid
        )));
    }
    let begun = Instant::now();
    let url = remains.pool();
    if let Some(other) = args.pool.as_ref().filter(|pool| **pool != url) {
        return Err(Failure::refused(format!("the pages of process {} are in `{url}`, not in `{other}`", args.pid)));
    }
    let choice = remains.choice();
    if let Some(other) = args.least_mapping.filter(|bytes| *bytes != choice.least_mapping_bytes) {
        let (other, was) = (Bytes(other), Bytes(choice.least_mapping_bytes));
        return Err(Failure::refused(format!(
            "mappings of process {} are managed from {was} on, not from {other}: leave --least-mapping out, or detach it first",
            args.pid
        )));
    }
    let parse = |text| local::parse_from(text, choice.floor_bytes());
    let local = args.local.as_deref().map(parse).transpose()?;
    // What is not said stays as it was.
    let chosen = args.replacement.settings();
    let replacement = (chosen != Settings::default()).then_some(chosen);
    let changes = Changes { local, replacement, share_pages: args.share };
    let told = Told { stats: args.stats.as_deref(), quiet: args.quiet };
    serve_on(args.pid, remains, begun, "its dead pager", changes, told)
}

/// What is to be different from now on.
#[derive(Clone, Copy, Default)]
pub(crate) struct Changes {
    local: Option<Local>,
    replacement: Option<Settings>,
    share_pages: bool,
}

/// What the user is told, and where.
#[derive(Clone, Copy)]
pub(crate) struct Told<'a> {
    /// For the final counters.
    pub(crate) stats: Option<&'a Path>,
    /// Say nothing but what went wrong.
    pub(crate) quiet: bool,
}

/// Takes over what a pager has left, and stays until the process is gone or free.
pub(crate) fn serve_on(
    pid: i32,
    remains: Remains,
    begun: Instant,
    from: &str,
    changes: Changes,
    told: Told<'_>,
) -> Result<u8, Failure> {
    let stats = told.stats.map(StatsFile::prepare).transpose()?;
    sys::block_signals();
    let local = changes.local.unwrap_or_else(|| remains.local());
    let replacement = changes.replacement.unwrap_or_else(|| remains.replacement());
    let url = remains.pool();
    let store = pool::take_over(&url, remains.vault())?;
    let pager = Pager::take_over(remains, local, replacement, store)?;
    if changes.share_pages {
        pager.share_pages(None, true)?;
    }
    let service = Arc::new(Service::new(pager, pid, 0).in_pool(&url));
    let milliseconds = begun.elapsed().as_secs_f64() * 1e3;
    let note = format!("took process {pid} over from {from} in {milliseconds:.1} ms; Ctrl-C lets it go");
    serve_until_gone(&service, None, (!told.quiet).then_some(note));
    stats.map_or(Ok(0), |stats| stats.write(&service.snapshot()).map(|()| 0))
}

/// Does what `attach` does, and lets the process go unasked when so much time has passed.
pub(crate) fn manage(pid: i32, terms: &Terms<'_>, lasts: Option<Duration>) -> Result<u8, Failure> {
    let local = local::parse_from(terms.local, terms.choice.floor_bytes())?;
    pool::parse(terms.pool)?;
    let stats = terms.stats.map(StatsFile::prepare).transpose()?;
    refuse_managed(pid)?;
    sys::block_signals();
    let (recording, recorder) = terms.tape.map(|tape| tape.start(local)).transpose()?.unzip();
    let (choice, replacement, on_pager_death) = (terms.choice, terms.replacement, OnPagerDeath::HoldTarget);
    let (store, lasting) = pool::open_lasting(terms.pool)?;
    let share_pages = terms.share_pages;
    let options = Options { local, choice, replacement, store, on_pager_death, recording, share_pages, lasting };
    let service = Arc::new(Service::new(Pager::adopt(pid, options)?, pid, 0).in_pool(terms.pool));
    let pause = service.snapshot().adopt_pause_us;
    local::warning(local).into_iter().for_each(say::note);
    let note = format!("adopted process {pid} in a pause of {pause:.0} us; Ctrl-C lets it go");
    serve_until_gone(&service, lasts, (!terms.quiet).then_some(note));
    let last = service.snapshot();
    if let (Some(tape), Some(recorder)) = (terms.tape, recorder) {
        tape.tell(recorder.finish().map(|(_, totals)| totals), terms.quiet)?;
    }
    stats.map_or(Ok(0), |stats| stats.write(&last).map(|()| 0))
}

/// Makes who keeps what forked children need, should this process be killed: before there is any thread.
pub(crate) fn begin_guardian(quiet: bool) {
    if let Err(error) = guardian::begin(Duty::Keep)
        && !quiet
    {
        let why = say::error(&error);
        say::note(format!(
            "there is no guardian ({why}): children that were just forked are lost if this pager is killed"
        ));
    }
}

/// Serves, and answers other commands, until the target has ended or was let go. Says `note`, and more, if there is one.
pub(crate) fn serve_until_gone(service: &Arc<Service>, lasts: Option<Duration>, note: Option<String>) {
    let listening = sockets::bind().and_then(|(listener, bound)| {
        let listening = control::listen(listener, Arc::clone(service)).map_err(|error| error.to_string());
        listening.map(|()| bound)
    });
    let quiet = note.is_none();
    note.into_iter().chain(listening.as_ref().err().cloned().filter(|_| !quiet)).for_each(say::note);
    serve(service, lasts.map(|lasts| Instant::now() + lasts));
    service.end();
    if !quiet {
        say::note(report::summary(&service.snapshot()));
    }
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
                let (line, last_total, _) =
                    progress.get_or_insert_with(|| (Progress::new("pages come home"), total, since));
                line.show(done, total, since);
                *last_total = total;
                if asked {
                    *line = Progress::new("pages come home");
                    let left = progress::left(done, total, since.elapsed());
                    say::note(format!("{done} of {total} pages are home{left}; stopping now would lose the rest"));
                }
            }
        }
    }
}

pub(crate) fn detach(service: &Arc<Service>, told: &mpsc::Sender<String>) {
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

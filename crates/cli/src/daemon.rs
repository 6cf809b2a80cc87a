//! `spillway daemon`: one pager for all targets of a host.
//!
//! Invariants: at most one daemon listens at a place; it ends when all pages are home, or when it is told to leave its
//! targets to the next one, which takes over before it answers anyone. If it is killed, its targets stop rather than read
//! zeros.

mod asked;
pub(crate) mod client;
mod config;
mod host;
mod notify;
mod place;
pub(crate) mod share;

use crate::failure::{FAILED, Failure};
use crate::service::{Detachment, Service};
use crate::trouble::Trouble;
use crate::{attach, control, local, pool, say, sys};
use config::Config;
pub(crate) use host::{Host, TargetListing};
pub(crate) use place::path;
use spillway_core::policy::Settings;
use spillway_core::size::Bytes;
use spillway_pager::{Choice, Local, OnPagerDeath, Options, Pager, Remains};
use spillway_store::vault::{VERSION, host_memory_bytes};
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// How often it is looked at what nobody tells: stops of programs, how far pages are on their way home.
const TICK: Duration = Duration::from_millis(100);
/// What `local` is when nothing is said: so much of this host's memory.
const DEFAULT_LOCAL: &str = "50%";

/// What `spillway daemon` is given.
#[derive(Clone, clap::Args)]
pub(crate) struct Args {
    /// Settings in TOML: local, pool, policy, evict, scope, block (docs/CONTROL.md)
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Local memory for all: 8G, or a share of the host's [default: 50%, or what it was]
    #[arg(long, value_name = "SIZE|PERCENT")]
    local: Option<String>,
    /// Where the rest goes; local: is this host, compressed [default: local:]
    #[arg(long, value_name = "URL")]
    pool: Option<String>,
    /// Also memory that processes share (MAP_SHARED, memfd): read docs/SHARED.md first
    #[arg(long)]
    shared_memory: bool,
    /// Say nothing but what went wrong
    #[arg(short, long)]
    quiet: bool,
}

/// What was said of how to serve; what was not is as it was, or the default.
struct Said {
    local: Option<Local>,
    pool: Option<String>,
    replacement: Option<Settings>,
    shared_memory: bool,
}

/// Serves until it is told to end.
pub(crate) fn daemon(args: &Args) -> Result<u8, Failure> {
    let said = Said::of(args)?;
    if said.shared_memory {
        spillway_pager::shared_memory_usable()?;
    }
    let given = Args {
        config: args.config.as_ref().map(|path| std::path::absolute(path).unwrap_or_else(|_| path.clone())),
        ..args.clone()
    };
    // Before any other thread begins: signals come to this one alone.
    sys::block_signals();
    attach::begin_guardian(args.quiet);
    let place = place::Place::take()?;
    let begun = Instant::now();
    let (pager, url, note) = match Remains::of_daemon()? {
        Some(remains) => take_over(&said, remains, begun)?,
        None => start(&said)?,
    };
    let outlived = pager.can_be_outlived();
    let service = Arc::new(Service::new(pager, 0, 0).of_daemon(Host::new(url.clone())));
    let listener = place.bind()?;
    control::listen(listener, Arc::clone(&service)).map_err(|error| {
        Failure::new(FAILED, format!("the control socket cannot be served: {}", say::error(&error)))
    })?;
    notify::tell("READY=1");
    if !args.quiet {
        say::note(note);
        say::note(format!("listening at {}", say::clean(&place.path().to_string_lossy())));
        if !outlived {
            say::note(format!(
                "pages in `{url}` cannot be taken over: should this daemon be killed, its targets wait for ever"
            ));
        }
    }
    serve(&service, || may_go_on(&given, (service.snapshot().processes > 0).then_some(&url)));
    service.end();
    drop(place);
    Ok(0)
}

impl Said {
    fn of(args: &Args) -> Result<Self, Failure> {
        let config = args.config.as_deref().map_or_else(|| Ok(Config::default()), read)?;
        let local =
            args.local.as_ref().or(config.local.as_ref()).map(|text| of_host(local::parse(text)?)).transpose()?;
        let pool = args.pool.clone().or(config.pool);
        pool.as_ref().map(|url| pool::parse(url)).transpose()?;
        Ok(Self { local, pool, replacement: config.replacement, shared_memory: args.shared_memory })
    }

    /// The pool that is named, if it is not this one.
    fn another_pool(&self, pool: &str) -> Option<&String> {
        self.pool.as_ref().filter(|named| *named != pool)
    }
}

fn read(path: &Path) -> Result<Config, Failure> {
    let name = say::clean(&path.to_string_lossy());
    let text = std::fs::read_to_string(path).map_err(|error| {
        Failure::refused(format!("cannot read {name}: {}; give --config another file", say::error(&error)))
    })?;
    Config::parse(&text).map_err(|why| Failure::refused(format!("{name}: {why}")))
}

/// The bytes that a share of this host's memory is: a daemon's budget does not follow what its targets touch.
pub(crate) fn of_host(local: Local) -> Result<Local, Failure> {
    let Local::Percent(percent) = local else { return Ok(local) };
    let total = host_memory_bytes()
        .map_err(|_| Failure::refused("/proc/meminfo tells no MemTotal: give a size, such as 8G"))?;
    Ok(Local::Bytes(total / 100 * u64::from(percent)))
}

fn start(said: &Said) -> Result<(Pager, String, String), Failure> {
    let local = said.local.map_or_else(|| of_host(local::parse(DEFAULT_LOCAL)?), Ok)?;
    let url = said.pool.clone().unwrap_or_else(|| pool::DEFAULT.into());
    let (store, lasting) = pool::open_lasting(&url)?;
    let options = Options {
        local,
        choice: Choice { shared_memory: said.shared_memory, ..Choice::default() },
        replacement: said.replacement.unwrap_or_default(),
        store,
        on_pager_death: OnPagerDeath::HoldTarget,
        recording: None,
        share_pages: false,
        lasting,
    };
    let _ = std::env::set_current_dir("/"); // A file system that nobody else needs can be unmounted.
    let size = match local {
        Local::Bytes(bytes) => Bytes(bytes).to_string(),
        _ => "all".into(),
    };
    Ok((Pager::serve(options)?, url, format!("serving; {size} of local memory for all targets")))
}

/// Serves on where a daemon was killed.
fn take_over(said: &Said, remains: Remains, begun: Instant) -> Result<(Pager, String, String), Failure> {
    let url = remains.pool();
    let pids = remains.pids();
    if let Some(other) = said.another_pool(&url) {
        return Err(Failure::refused(format!(
            "a daemon was killed whose pages are in `{url}`, not in `{other}`: start with --pool '{url}', shut that down, \
             then change it"
        )));
    }
    let local = said.local.unwrap_or_else(|| remains.local());
    let replacement = said.replacement.unwrap_or_else(|| remains.replacement());
    let store = pool::take_over(&url, remains.vault())?;
    let pager = Pager::take_over(remains, local, replacement, store)?;
    let milliseconds = begun.elapsed().as_secs_f64() * 1e3;
    let note = format!("took {} processes over from the last daemon in {milliseconds:.1} ms", pids.len());
    Ok((pager, url, note))
}

/// Whether a daemon that is started as this one was can go on where this one leaves, with pages in `pool` if there are any: its
/// settings may have changed since.
fn may_go_on(args: &Args, pool: Option<&String>) -> Result<(), Failure> {
    let said = Said::of(args)?;
    let Some((pool, other)) = pool.and_then(|pool| Some((pool, said.another_pool(pool)?))) else { return Ok(()) };
    Err(Failure::refused(format!(
        "the settings name the pool `{other}` now, and the pages are in `{pool}`: shut the daemon down to change that"
    )))
}

/// Returns when all pages are home for good. `may_leave` tells what would keep the next daemon from going on.
fn serve(service: &Arc<Service>, may_leave: impl Fn() -> Result<(), Failure>) {
    let (told, failures) = mpsc::channel();
    let mut leaving = false;
    let mut trouble = Trouble::default();
    loop {
        let signal = sys::next_signal(Some(TICK)).map(|caught| caught.number);
        if let Ok(failure) = failures.try_recv() {
            say::note(failure);
            leaving = false;
        }
        if let Some(host) = service.host() {
            host.mend_stops();
        }
        match (service.detachment(), signal) {
            (Detachment::Done, _) => {
                // One that was asked for over the socket may have failed until now: then this daemon would have served on.
                if !leaving {
                    notify::tell("STOPPING=1");
                }
                return;
            }
            (Detachment::None, Some(libc::SIGHUP)) => {
                let may_leave = may_leave().map_err(|failure| failure.to_string());
                match may_leave.and_then(|()| service.hand_over(VERSION)) {
                    // What is written down is good as it is: the next daemon goes on from there.
                    Ok(()) => std::process::exit(0),
                    Err(why) => say::note(format!("stays: {why}")),
                }
            }
            (Detachment::None, Some(libc::SIGINT | libc::SIGTERM | libc::SIGQUIT)) if !leaving => {
                leaving = true;
                notify::tell("STOPPING=1");
                attach::detach(service, &told);
            }
            (Detachment::None, _) => trouble.tell(&service.snapshot()),
            // A service manager must not take pages on their way home for a daemon that hangs.
            (Detachment::Running(..), _) => notify::tell("EXTEND_TIMEOUT_USEC=30000000"),
        }
    }
}

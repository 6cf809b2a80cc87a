//! `spillway run`: a program inside a budget, to its parent and its terminal as if it ran alone.
//!
//! Invariants: the target starts only when its pager is ready, in our process group, with the descriptors, signal mask
//! and dispositions that we were given. It never outlives its memory: if the pager dies, the target is killed; if we
//! are killed, the kernel kills the target. Where a daemon manages it, it waits for the next one instead.
//!
//! Signals: keys on the terminal reach the whole group, so the target has its own; what another process sends to us is
//! sent on, unless it was sent to the whole group. When the target stops or goes on, so do we.

use crate::daemon::{self, client::Wanted};
use crate::failure::{FAILED, Failure, NOT_EXECUTABLE, NOT_FOUND, PAGER_DIED};
use crate::keeper::Keeper;
use crate::pager_process::PagerProcess;
use crate::report::StatsFile;
use crate::stops;
use crate::sys::{self, Caught, Change};
use crate::terms::Terms;
use crate::trace::Tape;
use crate::witness::Witness;
use crate::{local, pool, processes, replacement, say};
use spillway_pager::Choice;
use std::ffi::OsString;
use std::io::{self, ErrorKind};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, ExitStatus};
use std::time::Duration;

/// What `--local` is when it is not given, and no daemon runs.
const DEFAULT_LOCAL: &str = "50%";

/// What `spillway run` is given.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Local memory for all of it: 512M, 2G, or a share of what it touches [default: 50%, or a daemon's]
    #[arg(long, value_name = "SIZE|PERCENT")]
    local: Option<String>,
    /// Where the rest goes; local: is this host, compressed [default: local:, or the daemon's]
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
    /// No summary at the end
    #[arg(short, long)]
    quiet: bool,
    /// The program to run and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
    command: Vec<OsString>,
}

/// Runs the program to its end; the exit status is its own.
pub(crate) fn run(args: &Args) -> Result<u8, Failure> {
    if args.share {
        spillway_pager::merging::usable()?;
    }
    if args.shared_memory {
        spillway_pager::shared_memory_usable()?;
    }
    let (local, pool) = (args.local.as_deref(), args.pool.as_deref());
    let wanted = Wanted { local, pool, replacement: &args.replacement };
    if let Some(client) = args.daemon.daemon(&wanted)? {
        if args.shared_memory {
            return Err(daemon::client::shared_memory_is_its());
        }
        let stats = args.stats.as_deref().map(StatsFile::prepare).transpose()?;
        return go(&args.command, Keeper::Daemon(client, 0, args.share), None, stats, args.quiet);
    }
    let terms = Terms {
        local: local.unwrap_or(DEFAULT_LOCAL),
        choice: Choice { shared_memory: args.shared_memory, ..Choice::default() },
        pool: pool.unwrap_or(pool::DEFAULT),
        replacement: args.replacement.settings(),
        share_pages: args.share,
        stats: args.stats.as_deref(),
        quiet: args.quiet,
        tape: None,
    };
    manage(&args.command, &terms)
}

/// Does what `run` does, with a pager for the program alone.
pub(crate) fn manage(argv: &[OsString], terms: &Terms<'_>) -> Result<u8, Failure> {
    local::parse(terms.local)?;
    pool::parse(terms.pool)?;
    let stats = terms.stats.map(StatsFile::prepare).transpose()?;
    let (pager, warning) = PagerProcess::start(terms)?;
    if let Some(warning) = warning.filter(|_| !terms.quiet) {
        say::note(warning);
    }
    go(argv, Keeper::Own(pager), terms.tape, stats, terms.quiet)
}

/// Runs the program to its end.
fn go(
    argv: &[OsString],
    mut keeper: Keeper,
    tape: Option<&Tape>,
    stats: Option<StatsFile>,
    quiet: bool,
) -> Result<u8, Failure> {
    // Until here a signal ends us as it would end any program.
    let inherited = sys::block_signals();
    let witness = Witness::place();
    let mut command = Command::new(&argv[0]);
    command.args(&argv[1..]);
    sys::prepare_target(&mut command, inherited);
    let target = command.spawn().map_err(|error| not_started(&argv[0], &error))?;
    let target = i32::try_from(target.id()).unwrap_or(0);
    keeper.set_target(target);

    let mut front = Front { target, keeper, witness, interrupted: None };
    let Some(status) = front.wait_for_end() else { return Err(front.end_orphan()) };
    if let Some(tape) = tape {
        // The program did its work: its status counts, whatever became of the trace.
        tape.tell(front.keeper.end_recording(), quiet).unwrap_or_else(say::note);
    }
    if !front.keeper.tell(quiet, stats) {
        // The agent in the target was first to see that the pager died.
        if status.signal() == Some(libc::SIGKILL) && front.keeper.may_have_ended_it() {
            return Err(pager_died());
        }
        say::note("the pager gave no final counters; the program had ended by then");
    }
    Ok(front.exit_status(status))
}

fn pager_died() -> Failure {
    Failure::new(PAGER_DIED, "the pager died; the target was stopped because its memory is gone")
}

fn not_started(program: &OsString, error: &io::Error) -> Failure {
    let program = say::clean(&program.to_string_lossy());
    match error.kind() {
        ErrorKind::NotFound => Failure::new(NOT_FOUND, format!("{program}: no such program")),
        _ => Failure::new(NOT_EXECUTABLE, format!("{program}: cannot be executed: {}", say::error(error))),
    }
}

/// The process between the shell and the target.
struct Front {
    target: i32,
    keeper: Keeper,
    witness: Witness,
    /// The last of SIGINT and SIGQUIT that a key on the terminal sent to our group.
    interrupted: Option<i32>,
}

impl Front {
    /// Passes signals, stops and continuations between the target and the world until the target ends. `None` when
    /// its pager ended first.
    fn wait_for_end(&mut self) -> Option<ExitStatus> {
        loop {
            let mut continued = false;
            let mut next = sys::next_signal(self.keeper.patience());
            if next.is_none() {
                self.keeper.look();
            }
            while let Some(caught) = next {
                continued |= self.pass_on(caught);
                next = sys::next_signal(Some(Duration::ZERO));
            }
            if continued {
                self.continue_target();
            }
            while let Some(change) = sys::child_change(self.target) {
                match change {
                    Change::Ended(status) => return Some(status),
                    Change::Stopped(signal) => self.stop(signal),
                    Change::Continued => {}
                }
            }
            if self.keeper.is_dead() {
                return None;
            }
        }
    }

    /// Handles one signal; true when we were continued.
    fn pass_on(&mut self, caught: Caught) -> bool {
        match route(caught, sys::is_session_leader()) {
            Route::Forward if caught.code <= 0 && self.witness.saw(caught.number) => {}
            Route::Forward => sys::forward(self.target, caught),
            Route::Keep if matches!(caught.number, libc::SIGINT | libc::SIGQUIT) => {
                self.interrupted = Some(caught.number)
            }
            Route::Keep => {}
            Route::Continue => return true,
        }
        false
    }

    /// Continues the target if whoever continued us did not do it for the whole group.
    fn continue_target(&self) {
        for _ in 0..5 {
            if !stops::stopped(processes::state(self.target)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        sys::send(self.target, libc::SIGCONT);
    }

    /// Stops us as the target was stopped, so that the shell takes the terminal back.
    fn stop(&mut self, signal: i32) {
        self.keeper.announce_stop(true);
        sys::stop_self(signal);
        self.keeper.announce_stop(false);
    }

    /// Ends the target and its descendants, whose memory is gone.
    fn end_orphan(&self) -> Failure {
        sys::send(self.target, libc::SIGSTOP); // No new children while the present ones are ended.
        for _ in 0..8 {
            let left = processes::descendants(self.target);
            if left.is_empty() {
                break;
            }
            left.into_iter().for_each(|pid| sys::send(pid, libc::SIGKILL));
        }
        sys::send(self.target, libc::SIGKILL);
        for _ in 0..100 {
            if let Some(Change::Ended(_)) = sys::child_change(self.target) {
                break;
            }
            sys::next_signal(Some(Duration::from_millis(20)));
        }
        pager_died()
    }

    /// Our exit status for the target's. After an interrupt from the terminal that ended the target we end the same
    /// way: a shell that runs a loop ends it only then.
    fn exit_status(&self, status: ExitStatus) -> u8 {
        if let Some(signal) = status.signal() {
            if self.interrupted == Some(signal) {
                sys::die_of(signal);
            }
            return u8::try_from(128 + signal).unwrap_or(FAILED);
        }
        status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(FAILED)
    }
}

/// What is done with a signal that reached us.
#[derive(Debug, PartialEq, Eq)]
enum Route {
    /// The target needs it from us.
    Forward,
    /// The target has its own, or it was meant for us.
    Keep,
    /// We were continued.
    Continue,
}

fn route(caught: Caught, session_leader: bool) -> Route {
    let by_kernel = caught.code > 0;
    match caught.number {
        libc::SIGCHLD => Route::Keep,
        libc::SIGCONT => Route::Continue,
        // Terminal keys, resizes and limits: every process has its own.
        // A hang-up is told to the session's leader alone; an alarm set before exec is the program's.
        libc::SIGHUP if by_kernel && session_leader => Route::Forward,
        libc::SIGALRM if by_kernel => Route::Forward,
        _ if by_kernel => Route::Keep,
        _ => Route::Forward,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_find_their_way() {
        let (user, queue, thread, kernel) = (libc::SI_USER, libc::SI_QUEUE, libc::SI_TKILL, libc::SI_KERNEL);
        let route = |number, code, leader| super::route(Caught::new(number, code), leader);
        for number in [libc::SIGTERM, libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGUSR1, libc::SIGTSTP, 40] {
            for code in [user, queue, thread] {
                assert_eq!(route(number, code, false), Route::Forward, "{number}");
            }
            assert_eq!(route(number, kernel, false), Route::Keep, "{number}");
        }
        assert_eq!(route(libc::SIGHUP, kernel, true), Route::Forward);
        assert_eq!(route(libc::SIGALRM, kernel, false), Route::Forward);
        assert_eq!(route(libc::SIGCONT, user, false), Route::Continue);
        assert_eq!(route(libc::SIGCHLD, user, false), Route::Keep);
    }
}

//! The pager of `spillway run`: a process beside the target's, started by the front and tied to it by a socket.
//!
//! Invariants: it has a session of its own, blocks all signals and holds none of the target's descriptors, so nothing
//! that is meant for the target reaches it and nothing waits for it. It ends when the front is gone and no target is
//! left, not earlier: whoever outlives the command still has memory here.

use crate::control::{self, Peer, Reply, Request};
use crate::failure::{FAILED, Failure};
use crate::lines::Lines;
use crate::recorder::Totals;
use crate::service::{Listing, Service};
use crate::terms::Terms;
use crate::trace::{FileRecorder, Tape};
use crate::trouble::Trouble;
use crate::{local, pool, replacement, say, sockets, sys};
use serde_json::{Value, json};
use spillway_pager::guardian::{self, Duty};
use spillway_pager::{Choice, OnPagerDeath, Options, Pager, Snapshot};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

/// How long the pager may take to start: it checks the machine and reserves its memory.
const START_LIMIT: Duration = Duration::from_secs(60);
/// How long the final counters may take.
const STATS_LIMIT: Duration = Duration::from_secs(5);
/// How long the end of a recording may take: a disk may have to take what the ring holds.
const RECORDING_LIMIT: Duration = Duration::from_secs(60);
/// How long what a dead pager has said is waited for: it is there.
const LAST_WORDS_LIMIT: Duration = Duration::from_millis(1);
/// How often the pager looks at what nobody tells it: stops, what is stored, whether targets are left.
const TICK: Duration = Duration::from_millis(250);

/// What the front is told unasked, as progress, once all pages are home: the program needs no pager any more.
const ALL_HOME: (u64, u64) = (0, 0);

/// What the front hands over.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The inherited socket
    #[arg(long)]
    socket: i32,
    /// The process whose descendants are followed
    #[arg(long)]
    front: i32,
    /// As for `run`
    #[arg(long)]
    local: String,
    /// As for `run`
    #[arg(long)]
    pool: String,
    /// Where to record to
    #[arg(long)]
    trace: Option<std::path::PathBuf>,
    /// The windows of an exact trace
    #[arg(long)]
    window_ns: Option<u64>,
    #[command(flatten)]
    replacement: replacement::Choices,
    /// As for `run`
    #[arg(long)]
    share: bool,
    /// As for `run`
    #[arg(long)]
    shared_memory: bool,
}

/// The pager's process as the front sees it.
pub(crate) struct PagerProcess {
    child: Child,
    lines: Lines,
    /// It manages nothing any more.
    let_go: bool,
}

impl PagerProcess {
    /// Starts the pager of this process's future children, and waits until it is ready.
    pub(crate) fn start(terms: &Terms<'_>) -> Result<(Self, Option<String>), Failure> {
        let failed = |error: std::io::Error| {
            Failure::new(FAILED, format!("the pager could not be started: {}", say::error(&error)))
        };
        let (ours, theirs) = UnixStream::pair().map_err(failed)?;
        // The name in /proc is right even when the file was replaced or deleted meanwhile.
        let mut command = Command::new("/proc/self/exe");
        command.arg0("spillway").arg("__pager");
        command.arg(format!("--socket={}", theirs.as_raw_fd()));
        command.arg(format!("--front={}", std::process::id()));
        command.arg(format!("--local={}", terms.local)).arg(format!("--pool={}", terms.pool));
        command.args(replacement::options(terms.replacement));
        command.args(terms.share_pages.then_some("--share"));
        command.args(terms.choice.shared_memory.then_some("--shared-memory"));
        if let Some(Tape { path, window_ns }) = terms.tape {
            command.arg("--trace").arg(path);
            command.args(window_ns.map(|ns| format!("--window-ns={ns}")));
        }
        command.stdin(Stdio::null()).stdout(Stdio::null());
        sys::prepare_pager(&mut command, theirs.as_raw_fd());
        let mut child = command.spawn().map_err(failed)?;
        drop(theirs);
        let mut lines = Lines::new(ours).map_err(failed)?;
        let answer = lines.next(Some(START_LIMIT)).map_err(|error| error.to_string());
        match answer.and_then(|line| serde_json::from_slice(&line).map_err(|error| error.to_string())) {
            Ok(Reply::Ok(ready)) => {
                let warning = ready.get("warning").and_then(|text| text.as_str()).map(str::to_owned);
                Ok((Self { child, lines, let_go: false }, warning))
            }
            Ok(Reply::Error(text)) => {
                let _ = child.wait();
                Err(Failure::refused(text))
            }
            Ok(Reply::Progress(..)) | Err(_) => {
                let _ = child.kill();
                let _ = child.wait();
                Err(Failure::new(FAILED, "the pager did not start: see the lines above, and try `spillway doctor`"))
            }
        }
    }

    fn ask(&mut self, request: &Request, limit: Duration) -> Result<Value, String> {
        let let_go = &mut self.let_go;
        control::ask(&mut self.lines, request, limit, &mut |done, total| *let_go |= (done, total) == ALL_HOME)
    }

    /// Tells which process was started.
    pub(crate) fn set_target(&mut self, pid: i32) {
        let _ = self.ask(&Request::Target { pid }, STATS_LIMIT);
    }

    /// Tells that this process is about to stop itself, or goes on.
    pub(crate) fn announce_stop(&mut self, now: bool) {
        let _ = self.ask(&Request::Stopping { now }, STATS_LIMIT);
    }

    /// The counters now; `None` when the pager does not answer.
    pub(crate) fn snapshot(&mut self) -> Option<Snapshot> {
        let answer = self.ask(&Request::Stats, STATS_LIMIT).ok()?;
        serde_json::from_value::<Listing>(answer).ok().map(|listing| listing.snapshot)
    }

    /// Ends the recording.
    pub(crate) fn end_recording(&mut self) -> Result<Totals, String> {
        let answer = self.ask(&Request::EndRecording, RECORDING_LIMIT)?;
        serde_json::from_value(answer).map_err(|error| error.to_string())
    }

    /// Whether the process has ended that has pages of the program.
    pub(crate) fn is_dead(&mut self) -> bool {
        if self.let_go || !matches!(self.child.try_wait(), Ok(Some(_))) {
            return false;
        }
        while let Ok(line) = self.lines.next(Some(LAST_WORDS_LIMIT)) {
            self.let_go |=
                matches!(serde_json::from_slice(&line), Ok(Reply::Progress(done, total)) if (done, total) == ALL_HOME);
        }
        !self.let_go
    }

    /// Whether it has pages of the program, as far as is known.
    pub(crate) fn has_pages(&self) -> bool {
        !self.let_go
    }
}

/// Serves until the front and all targets are gone.
pub(crate) fn serve(args: &Args) -> Result<u8, Failure> {
    let failed = |error: std::io::Error| Failure::new(FAILED, error.to_string());
    let socket = sys::take_inherited_socket(args.socket).map_err(failed)?;
    sys::block_signals();
    // Without it a child that is just forked, and whose parent has ended, reads zeros should this process be killed.
    let _ = guardian::begin(Duty::Refuse);
    let mut front = Lines::new(socket).map_err(failed)?;
    let service = match start(args) {
        Ok((pager, recorder)) => {
            let service = Service::new(pager, 0, args.front).in_pool(&args.pool);
            Arc::new(service.recording(recorder))
        }
        Err(failure) => {
            let _ = front.send(&Reply::Error(failure.to_string()));
            return Ok(failure.status);
        }
    };
    let (bound, warning) = match sockets::bind() {
        Ok((listener, bound)) => (control::listen(listener, Arc::clone(&service)).map(|()| bound).ok(), None),
        Err(warning) => (None, Some(warning)),
    };
    if front.send(&Reply::Ok(json!({ "warning": warning }))).is_err() {
        return Ok(FAILED); // The front was ended meanwhile: nobody is left to tell.
    }
    let mut unasked = front.twin().map_err(failed)?;
    let (gone, wait_gone) = mpsc::channel::<()>();
    let for_front = Arc::clone(&service);
    let answer = move || {
        control::answer_all(&mut front, &for_front, Peer::Front);
        drop(gone);
    };
    control::thread("front").spawn(answer).map_err(failed)?;
    let (mut trouble, mut let_go) = (Trouble::default(), false);
    while wait_gone.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
        if service.is_detached() && !std::mem::replace(&mut let_go, true) {
            let _ = unasked.send(&Reply::Progress(ALL_HOME.0, ALL_HOME.1));
        }
        service.mend_stops();
        trouble.tell(&service.snapshot());
    }
    sys::silence_stderr();
    while service.has_targets() {
        std::thread::sleep(TICK);
    }
    service.end();
    drop(bound);
    Ok(0)
}

fn start(args: &Args) -> Result<(Pager, Option<FileRecorder>), Failure> {
    let local = local::parse(&args.local)?;
    let tape = args.trace.clone().map(|path| Tape { path, window_ns: args.window_ns });
    let (recording, recorder) = tape.map(|tape| tape.start(local)).transpose()?.unzip();
    let options = Options {
        local,
        choice: Choice { shared_memory: args.shared_memory, ..Choice::default() },
        replacement: args.replacement.settings(),
        store: pool::open(&args.pool)?,
        on_pager_death: OnPagerDeath::KillTarget,
        recording,
        share_pages: args.share,
        // Its targets die with it.
        lasting: None,
    };
    let _ = std::env::set_current_dir("/"); // A file system that the target has left can be unmounted.
    Ok((Pager::follow(args.front, options)?, recorder))
}

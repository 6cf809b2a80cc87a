//! Programs that a comparison starts.
//!
//! Invariants: signals are blocked in us and arrive where we wait, so nothing is left half-way; whatever was started ends with
//! its [`Child`], whatever group or session it is in, and the kernel kills it should we be killed. A program gets the signal mask that we
//! were given. Only processes are signalled that were not waited for yet, so that none has its number from another.

use crate::failure::Failure;
use crate::sys::{self, Change, Inherited};
use std::collections::hash_map::DefaultHasher;
use std::hash::Hasher;
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicI32, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long a program may take to end when it is asked to.
const GRACE: Duration = Duration::from_secs(5);
/// How long what a program leaves running may take to end by itself.
const ORPHANS_GRACE: Duration = Duration::from_secs(1);
/// So much of the end of what a program said is kept.
const KEPT_BYTES: usize = 64 << 10;
/// Between looks at what tells no signal.
const TICK: Duration = Duration::from_millis(100);

/// Why a comparison does not go on.
#[derive(Debug)]
pub(super) enum Stop {
    /// Somebody wants us to end.
    Signal(i32),
    /// A step failed; the text says how.
    Failed(String),
}

impl Stop {
    /// A step failed.
    pub(super) fn failed(text: impl Into<String>) -> Self {
        Self::Failed(text.into())
    }
}

impl From<Stop> for Failure {
    fn from(stop: Stop) -> Self {
        match stop {
            Stop::Signal(number) => {
                let status = u8::try_from(128 + number).unwrap_or(crate::failure::FAILED);
                Self::new(status, "bench: ended by a signal; what it had set up is undone")
            }
            Stop::Failed(text) => Self::new(crate::failure::FAILED, format!("bench: {text}")),
        }
    }
}

/// A signal that wants us to end and came while a child was being ended.
static WISH: AtomicI32 = AtomicI32::new(0);

/// Whether somebody wants us to end: who asks cannot say so himself, and whoever heeds signals next will.
pub(super) fn is_unwanted() -> bool {
    let Err(Stop::Signal(number)) = heed(Duration::ZERO) else { return false };
    WISH.store(number, Relaxed);
    true
}

/// Waits for the next signal, no longer than `limit`; one that wants us to end is an error.
pub(super) fn heed(limit: Duration) -> Result<(), Stop> {
    heed_with(limit, None).map(drop)
}

/// The same; a program that is out of the terminal's reach stands still with us, and for how long is told.
fn heed_with(limit: Duration, group: Option<&Child>) -> Result<Duration, Stop> {
    let wish = WISH.load(Relaxed);
    if wish != 0 {
        return Err(Stop::Signal(wish));
    }
    match sys::next_signal(Some(limit)).map(|caught| caught.number) {
        Some(number) if sys::wants_end(number) => Err(Stop::Signal(number)),
        Some(number @ (libc::SIGTSTP | libc::SIGTTIN | libc::SIGTTOU)) => {
            let began = Instant::now();
            group.inspect(|group| group.signal(libc::SIGSTOP));
            sys::stop_self(number);
            group.inspect(|group| group.signal(libc::SIGCONT));
            Ok(began.elapsed())
        }
        _ => Ok(Duration::ZERO),
    }
}

/// Those that are a [`Child`] and were not waited for.
static STARTED: Mutex<Vec<i32>> = Mutex::new(Vec::new());

fn started() -> std::sync::MutexGuard<'static, Vec<i32>> {
    STARTED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends what programs have left running that have ended: it has become our child.
fn end_orphans() {
    let began = Instant::now();
    let own = i32::try_from(std::process::id()).unwrap_or(0);
    while began.elapsed() < GRACE {
        let mut orphans = spillway_pager::procfs::children(own).unwrap_or_default();
        orphans.retain(|pid| !started().contains(pid) && !matches!(sys::child_change(*pid), Some(Change::Ended(_))));
        if orphans.is_empty() {
            return;
        }
        if began.elapsed() > ORPHANS_GRACE {
            orphans.iter().for_each(|&pid| sys::send(pid, libc::SIGKILL));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A program that runs, with its streams.
pub(super) struct Child {
    inner: std::process::Child,
    pid: i32,
    name: String,
    /// It is one of several, in a process group of their own.
    group: bool,
    began: Instant,
    ended: Option<ExitStatus>,
    /// It was stopped for wanting the terminal.
    asks: bool,
}

/// How a program ended.
pub(super) struct Ended {
    pub(super) status: ExitStatus,
    pub(super) out: String,
    pub(super) err: String,
    /// A hash of all that it said on standard output; none of nothing.
    pub(super) said: Option<u64>,
    /// From its start to its end.
    pub(super) took: Duration,
    /// The kernel killed a process of it for lack of memory.
    pub(super) starved: bool,
}

/// What a stream said: the end of it, and a hash of all, if it said anything.
struct Heard {
    end: Vec<u8>,
    hash: Option<u64>,
}

/// Hears a stream up to its end, on a thread of its own, as a program must not wait for us to read.
fn hear(mut stream: impl Read + Send + 'static) -> Receiver<Heard> {
    let (tell, heard) = channel();
    std::thread::spawn(move || {
        let (mut end, mut hasher, mut bytes) = (Vec::new(), DefaultHasher::new(), [0; 4096]);
        // What cannot be read has ended.
        while let Ok(count @ 1..) = stream.read(&mut bytes) {
            hasher.write(&bytes[..count]);
            end.extend_from_slice(&bytes[..count]);
            end.drain(..end.len().saturating_sub(KEPT_BYTES));
        }
        // Nobody may want to know any more.
        let hash = (!end.is_empty()).then(|| hasher.finish());
        let _ = tell.send(Heard { end, hash });
    });
    heard
}

impl Child {
    /// Starts a program and its children, out of reach of the terminal's keys: they end with it.
    pub(super) fn start_group(mut command: Command, inherited: Inherited) -> Result<Self, Stop> {
        command.process_group(0);
        let mut leader = Self::start(command, inherited)?;
        leader.group = true;
        Ok(leader)
    }

    /// Starts a program. It must say less than a pipe holds before it is waited for.
    pub(super) fn start(mut command: Command, inherited: Inherited) -> Result<Self, Stop> {
        let name = command.get_program().to_string_lossy().into_owned();
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        sys::prepare_target(&mut command, inherited);
        let began = Instant::now();
        let inner = command.spawn().map_err(|error| Stop::failed(format!("{name}: {}", crate::say::error(&error))))?;
        let pid = i32::try_from(inner.id()).unwrap_or(0);
        started().push(pid);
        Ok(Self { inner, pid, name, group: false, began, ended: None, asks: false })
    }

    /// Its process.
    pub(super) fn pid(&self) -> i32 {
        self.pid
    }

    /// Gives it a line to read. One that has ended does not read it.
    pub(super) fn say_go(&mut self) {
        if let Some(mut stdin) = self.inner.stdin.take() {
            let _ = stdin.write_all(b"\n");
        }
    }

    /// A program that serves: waits until `ready` has an answer.
    pub(super) fn await_ready<T>(
        &mut self,
        limit: Duration,
        mut ready: impl FnMut(&mut Self) -> Option<T>,
    ) -> Result<T, Stop> {
        let until = Instant::now() + limit;
        loop {
            if let Some(answer) = ready(self) {
                return Ok(answer);
            }
            if self.has_ended() || Instant::now() > until {
                let last_words = self.last_words();
                return Err(Stop::failed(format!("{} did not start{last_words}", self.name)));
            }
            heed(Duration::from_millis(5))?;
        }
    }

    /// One line of what it says on standard error, up to its end.
    pub(super) fn hear_line(&mut self) -> String {
        let (mut line, mut byte) = (Vec::new(), [0]);
        if let Some(stderr) = self.inner.stderr.as_mut() {
            while stderr.read(&mut byte).is_ok_and(|read| read == 1) && byte != *b"\n" {
                line.push(byte[0]);
            }
        }
        String::from_utf8_lossy(&line).into_owned()
    }

    /// Waits for its end. One that takes longer than `limit` is ended.
    pub(super) fn finish(mut self, limit: Duration) -> Result<Ended, Stop> {
        let until = Instant::now() + limit;
        let streams = self.inner.stdout.take().map(hear).zip(self.inner.stderr.take().map(hear));
        let mut stood_still = Duration::ZERO;
        while !self.has_ended() {
            if Instant::now() > until {
                return Err(Stop::failed(format!("it took longer than {} s; give it less to do", limit.as_secs())));
            }
            if self.asks {
                return Err(Stop::failed("it wants to read from the terminal; give a line that asks nothing"));
            }
            stood_still += heed_with(TICK, Some(&self).filter(|child| child.group))?;
        }
        let took = self.began.elapsed().saturating_sub(stood_still);
        end_orphans();
        let heard = streams.and_then(|(out, err)| out.recv_timeout(GRACE).ok().zip(err.recv_timeout(GRACE).ok()));
        let (out, err) = heard.ok_or_else(|| Stop::failed("somebody else holds its output; give that a file"))?;
        let status = self.ended.ok_or_else(|| Stop::failed("it has not ended"))?;
        let text = |heard: &Heard| String::from_utf8_lossy(&heard.end).into_owned();
        Ok(Ended { status, out: text(&out), err: text(&err), said: out.hash, took, starved: false })
    }

    fn signal(&self, number: i32) {
        if self.group {
            sys::send_group(self.pid, number);
        } else {
            sys::send(self.pid, number);
        }
    }

    fn has_ended(&mut self) -> bool {
        while let (None, Some(change)) = (self.ended, sys::child_change(self.pid)) {
            match change {
                Change::Ended(status) => {
                    started().retain(|pid| *pid != self.pid);
                    self.ended = Some(status);
                }
                Change::Stopped(libc::SIGTTIN | libc::SIGTTOU) => self.asks = self.group,
                Change::Stopped(_) | Change::Continued => {}
            }
        }
        self.ended.is_some()
    }

    fn last_words(&mut self) -> String {
        let mut text = String::new();
        match (self.ended, self.inner.stderr.as_mut()) {
            (Some(status), Some(stderr)) => {
                let _ = stderr.read_to_string(&mut text);
                format!(" ({status}): {}", text.trim())
            }
            _ => " in time".into(),
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        for signal in [libc::SIGTERM, libc::SIGKILL] {
            let until = Instant::now() + GRACE;
            while !self.has_ended() {
                self.signal(signal);
                if Instant::now() > until {
                    break;
                }
                // Whoever wants us to end is heard when this one is gone.
                if let Some(number) =
                    sys::next_signal(Some(TICK)).map(|caught| caught.number).filter(|it| sys::wants_end(*it))
                {
                    WISH.store(number, Relaxed);
                }
            }
        }
        if self.group {
            // Others of it may have heeded the first signal less than their leader did.
            end_orphans();
        }
    }
}

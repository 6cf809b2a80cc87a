//! The control socket: what other commands ask of a running pager.
//!
//! Requests and replies are lines of JSON: `{"op":"stats"}`, `{"op":"resize","local":"512M"}`, `{"op":"detach"}`;
//! answers are `{"ok":..}` or `{"error":".."}`, after any number of `{"progress":[done,total]}`.
//!
//! Invariants: only the pager's own user and root are answered; a request is bounded in length and time, and the
//! connections in number, so a stranger's garbage costs an error line and nothing else.

use crate::lines::{LineError, Lines};
use crate::service::{Paging, Service};
use crate::{local, say, sys};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How long a connection may be silent.
const REQUEST_LIMIT: Duration = Duration::from_secs(5);
/// Connections served at once; each has a thread.
const CONNECTIONS_MAX: usize = 8;

/// How often a peer is told how far its request is: often enough for eyes, too rarely to slow the pages down.
const PROGRESS_EVERY: Duration = Duration::from_millis(100);

/// What can be asked of a pager.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Request {
    /// The counters, as a [`crate::service::Listing`].
    Stats,
    /// Another budget.
    Resize {
        /// As for `--local`.
        local: String,
    },
    /// All pages home.
    Detach,
    /// Only from `spillway run`: the process it started.
    Target {
        /// Its id.
        pid: i32,
    },
}

/// What a pager answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Reply {
    /// Done.
    Ok(Value),
    /// Not done.
    Error(String),
    /// Under way: pages done and pages in all.
    Progress(u64, u64),
}

/// Answers whoever connects to the socket, in threads of its own, until the process ends.
pub(crate) fn listen<P: Paging + 'static>(listener: UnixListener, service: Arc<Service<P>>) -> io::Result<()> {
    let serving = Arc::new(AtomicUsize::new(0));
    let accept = move || {
        for stream in listener.incoming() {
            match stream {
                Ok(stream) => admit(stream, &service, &serving),
                // Out of descriptors or memory: no reason to spin.
                Err(_) => std::thread::sleep(Duration::from_millis(100)),
            }
        }
    };
    std::thread::Builder::new().name("control".into()).spawn(accept).map(drop)
}

fn admit<P: Paging + 'static>(stream: UnixStream, service: &Arc<Service<P>>, serving: &Arc<AtomicUsize>) {
    let Ok(peer) = sys::peer_uid(&stream) else { return };
    let Ok(mut lines) = Lines::new(stream) else { return };
    if peer != 0 && peer != sys::effective_uid() {
        let _ = lines.send(&Reply::Error("this pager belongs to another user: try as root".into()));
        return;
    }
    let place = Place::take(serving);
    if place.0.load(Ordering::Relaxed) > CONNECTIONS_MAX {
        let _ = lines.send(&Reply::Error("this pager answers too many others: try again".into()));
        return;
    }
    let service = Arc::clone(service);
    let serve = move || {
        let _place = place;
        answer_all(&mut lines, &service, Some(REQUEST_LIMIT));
    };
    // Without a thread to spare the connection is closed, which the peer sees.
    let _ = std::thread::Builder::new().name("control-peer".into()).spawn(serve);
}

/// One of the connections that are served at once.
struct Place(Arc<AtomicUsize>);

impl Place {
    fn take(serving: &Arc<AtomicUsize>) -> Self {
        serving.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(serving))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Answers requests until the peer is done, fails, or is silent for longer than `limit`.
pub(crate) fn answer_all<P: Paging>(lines: &mut Lines, service: &Service<P>, limit: Option<Duration>) {
    loop {
        let reply = match lines.next(limit) {
            Ok(line) => match serde_json::from_slice(&line) {
                Ok(request) => answer(request, lines, service),
                Err(error) => Reply::Error(format!("not a request: {error}")),
            },
            Err(error @ (LineError::TooLong | LineError::TimedOut)) => {
                let _ = lines.send(&Reply::Error(error.to_string()));
                return;
            }
            Err(_) => return,
        };
        if lines.send(&reply).is_err() {
            return;
        }
    }
}

fn answer<P: Paging>(request: Request, lines: &mut Lines, service: &Service<P>) -> Reply {
    match request {
        Request::Stats => {
            serde_json::to_value(service.listing()).map_or_else(|e| Reply::Error(e.to_string()), Reply::Ok)
        }
        Request::Resize { local } => match local::parse(&local) {
            Ok(local) => {
                service.set_local(local);
                Reply::Ok(json!({}))
            }
            Err(failure) => Reply::Error(failure.to_string()),
        },
        Request::Detach => {
            // A peer that goes away does not stop the pages from coming home.
            let (mut listening, mut told) = (true, None);
            let mut progress = |done, total| {
                if listening && told.is_none_or(|told: Instant| told.elapsed() >= PROGRESS_EVERY) {
                    told = Some(Instant::now());
                    listening = lines.send(&Reply::Progress(done, total)).is_ok();
                }
            };
            service.detach(&mut progress).map_or_else(Reply::Error, |()| Reply::Ok(json!({})))
        }
        Request::Target { pid } => {
            service.set_target(pid);
            Reply::Ok(json!({}))
        }
    }
}

/// Sends a request and waits for its answer; each line of it may take `limit`.
pub(crate) fn ask(
    lines: &mut Lines,
    request: &Request,
    limit: Duration,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Value, String> {
    lines.send(request).map_err(|error| format!("the pager does not listen: {error}"))?;
    loop {
        let line = lines.next(Some(limit)).map_err(|error| format!("no answer from the pager: {error}"))?;
        match serde_json::from_slice(&line) {
            Ok(Reply::Ok(value)) => return Ok(value),
            Ok(Reply::Error(text)) => return Err(say::clean(&text)),
            Ok(Reply::Progress(done, total)) => progress(done, total),
            Err(error) => return Err(format!("the pager's answer is not understood: {error}")),
        }
    }
}

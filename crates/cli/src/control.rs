//! The control socket: what other commands ask of a running pager.
//!
//! What they look like is in [`crate::request`], and for users in docs/CONTROL.md.
//!
//! Invariants: only the pager's own user and root are answered; a request is bounded in length and time, and the
//! connections in number, so a stranger's garbage costs an error line and nothing else.

pub(crate) use crate::request::{Reply, Request};

use crate::lines::{LineError, Lines};
use crate::service::{Listing, Paging, Service};
use crate::{say, sys};
use serde::Serialize;
use serde_json::{Value, json};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How long a stranger's connection may be silent.
const REQUEST_LIMIT: Duration = Duration::from_secs(5);
/// Connections served at once; each has a thread.
const CONNECTIONS_MAX: usize = 8;

/// The stack of a thread that parses requests; JSON that nests deeply is refused far earlier.
const STACK_BYTES: usize = 256 << 10;
/// How often a peer is told how far its request is: often enough for eyes, too rarely to slow the pages down.
const PROGRESS_EVERY: Duration = Duration::from_millis(100);

/// Who asks.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Peer {
    /// `spillway run`, over the socket it made for its pager; it may be silent as long as the program runs.
    Front,
    /// Any command.
    Command,
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
    thread("control").spawn(accept).map(drop)
}

fn admit<P: Paging + 'static>(stream: UnixStream, service: &Arc<Service<P>>, serving: &Arc<AtomicUsize>) {
    let Ok(peer) = spillway_pager::peer(stream.as_fd()) else { return };
    let Ok(mut lines) = Lines::new(stream) else { return };
    if peer.uid != 0 && peer.uid != sys::effective_uid() {
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
        answer_all(&mut lines, &service, Peer::Command);
    };
    // Without a thread to spare the connection is closed, which the peer sees.
    let _ = thread("control-peer").spawn(serve);
}

/// A thread beside the pager's, whose memory is locked: the default stack of 2 MiB would be resident to its end.
pub(crate) fn thread(name: &str) -> std::thread::Builder {
    std::thread::Builder::new().name(name.into()).stack_size(STACK_BYTES)
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

/// Answers requests until the peer is done, fails, or is silent for too long.
pub(crate) fn answer_all<P: Paging>(lines: &mut Lines, service: &Service<P>, peer: Peer) {
    let limit = (peer == Peer::Command).then_some(REQUEST_LIMIT);
    loop {
        let line = lines.next(limit);
        let _under_way = service.answering();
        let sent = match line {
            Ok(line) => match Request::parse(&line) {
                Ok(Request::Target { .. } | Request::Stopping { .. } | Request::EndRecording)
                    if peer != Peer::Front =>
                {
                    lines.send(&Reply::Error("only `spillway run` may say that".into()))
                }
                // It asks once its program has ended.
                Ok(Request::Stats) if peer == Peer::Front => lines.send(&Listed { ok: service.last_listing() }),
                Ok(request) => answer(request, lines, service),
                Err(why) => lines.send(&Reply::Error(why)),
            },
            Err(error @ (LineError::TooLong | LineError::TimedOut)) => {
                let _ = lines.send(&Reply::Error(error.to_string()));
                return;
            }
            Err(_) => return,
        };
        if sent.is_err() {
            return;
        }
    }
}

fn reply(done: Result<Value, String>) -> Reply {
    done.map_or_else(Reply::Error, Reply::Ok)
}

/// What a [`Reply::Ok`] of a listing looks like, written as it is: a [`Value`] of many targets is several times as large, and what the
/// allocator once had for it stays with the daemon, in an arena for each thread that answers at the same time.
#[derive(Serialize)]
struct Listed {
    ok: Listing,
}

fn answer<P: Paging>(request: Request, lines: &mut Lines, service: &Service<P>) -> io::Result<()> {
    let reply = match request {
        Request::Stats => return lines.send(&Listed { ok: service.listing() }),
        Request::Resize { .. } if service.is_detached() => {
            Reply::Error("this pager has let its processes go: there is nothing to resize".into())
        }
        Request::Set { .. } if service.is_detached() => {
            Reply::Error("this pager has let its processes go: there is nothing to set".into())
        }
        Request::Set { settings } => match service.set(&settings) {
            Ok(()) => Reply::Ok(json!({})),
            Err(error) => Reply::Error(error.to_string()),
        },
        Request::Resize { local } => match service.resize_to(&local) {
            Ok(()) => Reply::Ok(json!({})),
            Err(failure) => Reply::Error(failure.to_string()),
        },
        Request::Detach | Request::Release { .. } | Request::Shutdown => {
            // A peer that goes away does not stop the pages from coming home.
            let (mut listening, mut told) = (true, None);
            let mut progress = |done, total| {
                if listening && told.is_none_or(|told: Instant| told.elapsed() >= PROGRESS_EVERY) {
                    told = Some(Instant::now());
                    listening = lines.send(&Reply::Progress(done, total)).is_ok();
                }
            };
            let done = match request {
                Request::Release { pid } => service.release(pid, &mut progress),
                Request::Shutdown => service.shut_down(&mut progress),
                _ => service.detach_all(&mut progress),
            };
            done.map_or_else(Reply::Error, |()| Reply::Ok(json!({})))
        }
        Request::Adopt { pid, when_grown, front, share_pages, share } => {
            reply(service.adopt(pid, !when_grown, front, share_pages, &share))
        }
        Request::SharePages { .. } if service.is_detached() => {
            Reply::Error("this pager has let its processes go: there is nothing to share".into())
        }
        Request::SharePages { pid, on } => reply(service.share_pages(pid, on)),
        Request::Share { pid, share } => reply(service.share(pid, &share)),
        Request::Show { pid } => reply(service.show(pid)),
        Request::HandOver { version } => match service.hand_over(version) {
            Err(why) => Reply::Error(why),
            Ok(()) => {
                let _ = lines.send(&Reply::Ok(json!({})));
                // Nothing is put in order: what is written down is good as it is.
                std::process::exit(0);
            }
        },
        Request::Target { pid } => {
            service.set_target(pid);
            Reply::Ok(json!({}))
        }
        Request::Stopping { now } => {
            service.set_front_stopping(now);
            Reply::Ok(json!({}))
        }
        Request::Pausing { pid, now } => {
            service.pause(pid, now);
            Reply::Ok(json!({}))
        }
        Request::EndRecording => match service.end_recording() {
            Some(Ok(totals)) => Reply::Ok(json!(totals)),
            Some(Err(error)) => Reply::Error(error),
            None => Reply::Error("this pager records nothing".into()),
        },
    };
    lines.send(&reply)
}

/// Sends a request and waits for its answer; each line of it may take `limit`.
pub(crate) fn ask(
    lines: &mut Lines,
    request: &Request,
    limit: Duration,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Value, String> {
    send(lines, request)?;
    loop {
        match next_reply(lines, limit)? {
            Reply::Ok(value) => return Ok(value),
            Reply::Error(text) => return Err(say::clean(&text)),
            Reply::Progress(done, total) => progress(done, total),
        }
    }
}

/// The same of a question that is answered at once: `limit` is all the time that there is, whatever else is said.
pub(crate) fn ask_shortly(lines: &mut Lines, request: &Request, limit: Duration) -> Result<Value, String> {
    send(lines, request)?;
    match next_reply(lines, limit)? {
        Reply::Ok(value) => Ok(value),
        Reply::Error(text) => Err(say::clean(&text)),
        Reply::Progress(..) => Err("the pager answers something else".into()),
    }
}

fn send(lines: &mut Lines, request: &Request) -> Result<(), String> {
    lines.send(request).map_err(|error| format!("the pager does not listen: {error}"))
}

fn next_reply(lines: &mut Lines, limit: Duration) -> Result<Reply, String> {
    let line = lines.next(Some(limit)).map_err(|error| format!("no answer from the pager: {error}"))?;
    serde_json::from_slice(&line).map_err(|error| format!("the pager's answer is not understood: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::Host;
    use crate::lines::LINE_BYTES_MAX;
    use spillway_core::policy::{Kind, Scope, Settings};
    use spillway_pager::{Choice, Local, Share, Snapshot, TreeSnapshot};
    use std::io::{Read, Write};
    use std::sync::Mutex;

    /// A pager with one process that moves ten pages when it lets go, or refuses to.
    #[derive(Default)]
    struct Fake {
        local: Mutex<Option<Local>>,
        replacement: Mutex<Settings>,
        trees: Mutex<Vec<(i32, Share)>>,
        sharing: Mutex<(Option<i32>, bool)>,
        refuses: bool,
    }

    impl Paging for Fake {
        fn end(&self) {}

        fn can_be_outlived(&self) -> bool {
            false
        }

        fn stand_still(&self) -> bool {
            false
        }

        fn snapshot(&self) -> Snapshot {
            Snapshot { processes: 1, faults: 3, ..Snapshot::default() }
        }
        fn set_local(&self, local: Local) {
            *self.local.lock().expect("sound") = Some(local);
        }
        fn change_replacement(&self, change: &mut dyn FnMut(&mut Settings)) {
            change(&mut self.replacement.lock().expect("sound"));
        }
        fn detach(&self, progress: &mut dyn FnMut(u64, u64)) -> Result<(), String> {
            (0..=10).for_each(|page| progress(page, 10));
            if self.refuses { Err("no room".into()) } else { Ok(()) }
        }
        fn has_targets(&self) -> bool {
            true
        }
        fn adopt_tree(&self, pid: i32, _: bool, share: Share, _: bool) -> Result<(), String> {
            self.trees.lock().expect("sound").push((pid, share));
            Ok(())
        }
        fn change_share(&self, pid: i32, change: &mut dyn FnMut(&mut Share)) -> Result<(), String> {
            let mut trees = self.trees.lock().expect("sound");
            let tree = trees.iter_mut().find(|tree| tree.0 == pid).ok_or("not managed")?;
            change(&mut tree.1);
            Ok(())
        }
        fn share_pages(&self, pid: Option<i32>, on: bool) -> Result<(), String> {
            *self.sharing.lock().expect("sound") = (pid, on);
            Ok(())
        }
        fn release_tree(&self, pid: i32, progress: &mut dyn FnMut(u64, u64)) -> Result<(), String> {
            progress(1, 2);
            self.trees.lock().expect("sound").retain(|tree| tree.0 != pid);
            Ok(())
        }
        fn trees(&self) -> Vec<TreeSnapshot> {
            let trees = self.trees.lock().expect("sound");
            trees.iter().map(|&(root, share)| TreeSnapshot { root, share, ..TreeSnapshot::default() }).collect()
        }
        fn resize(&self, local: Local) -> Result<(), String> {
            *self.local.lock().expect("sound") = Some(local);
            Ok(())
        }
        fn choice(&self) -> Choice {
            Choice::default()
        }
    }

    /// Sends raw bytes as a command would, and returns everything that is answered.
    fn answers(service: &Service<Fake>, peer: Peer, bytes: &[u8]) -> String {
        let (ours, mut theirs) = UnixStream::pair().expect("a pair");
        std::thread::scope(|scope| {
            scope.spawn(move || answer_all(&mut Lines::new(ours).expect("lines"), service, peer));
            // A refusal may come, and the connection go, before all is written.
            let _ = theirs.write_all(bytes);
            let _ = theirs.shutdown(std::net::Shutdown::Write);
            let mut said = Vec::new();
            let _ = theirs.read_to_end(&mut said);
            String::from_utf8(said).expect("text")
        })
    }

    fn service(refuses: bool) -> Service<Fake> {
        Service::new(Fake { refuses, ..Fake::default() }, 7, 0)
    }

    #[test]
    fn requests_are_answered_in_order() {
        let service = service(false);
        let said = answers(&service, Peer::Command, b"{\"op\":\"stats\"}\n{\"op\":\"resize\",\"local\":\"25%\"}\n");
        let lines: Vec<Value> = said.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        assert_eq!((lines[0]["ok"]["pid"].as_i64(), lines[0]["ok"]["faults"].as_i64()), (Some(7), Some(3)));
        assert_eq!((lines.len(), &lines[1]), (2, &json!({"ok": {}})));
        let said =
            answers(&service, Peer::Command, b"{\"op\":\"set\",\"settings\":[\"policy=lru3\",\"scope=target\"]}\n");
        assert_eq!(said, "{\"ok\":{}}\n");
        let wanted = Settings { policy: Kind::Lru3, scope: Scope::Target, ..Settings::default() };
        assert_eq!(service.replacement(), wanted);
        let said = answers(&service, Peer::Command, b"{\"op\":\"detach\"}\n{\"op\":\"resize\",\"local\":\"25%\"}\n");
        let lines: Vec<&str> = said.lines().collect();
        assert_eq!((lines[0], lines[1]), ("{\"progress\":[0,10]}", "{\"ok\":{}}"));
        assert!(lines[2].contains("let its processes go"), "{said}");
    }

    #[test]
    fn what_cannot_be_done_is_an_error_and_changes_nothing() {
        let service = service(true);
        for line in [
            "{\"op\":\"resize\",\"local\":\"1K\"}",
            "{\"op\":\"resize\",\"local\":7}",
            "{\"op\":\"resize\"}",
            "{\"op\":\"resize\",\"local\":\"8M\",\"more\":1}",
            "{\"op\":\"set\"}",
            "{\"op\":\"set\",\"settings\":\"policy=lru\"}",
            "{\"op\":\"set\",\"settings\":[\"policy=lru\",\"evict=never\"]}",
            "{\"op\":\"target\",\"pid\":1}",
            "{\"op\":\"stopping\",\"now\":true}",
            "{\"op\":\"what\"}",
            "{}",
            "[]",
            "",
            "\0\u{1}",
            "{\"op\":",
        ] {
            let said = answers(&service, Peer::Command, format!("{line}\n").as_bytes());
            assert!(said.starts_with("{\"error\":\"") && said.lines().count() == 1, "{line}: {said}");
        }
        assert_eq!((service.target(), service.detachment().is_none()), (7, true));
        assert_eq!(service.replacement(), Settings::default());
        let said = answers(&service, Peer::Command, b"{\"op\":\"detach\"}\n");
        assert!(said.ends_with("{\"error\":\"no room\"}\n") && service.detachment().is_none(), "{said}");
    }

    #[test]
    fn a_daemon_is_asked_for_one_target_at_a_time() {
        let daemon = Service::new(Fake::default(), 0, 0).of_daemon(Host::new("local:".into()));
        let lines = |text: &str| -> Vec<Value> {
            let said = answers(&daemon, Peer::Command, text.as_bytes());
            said.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
        };
        assert_eq!(lines("{\"op\":\"stats\"}\n")[0]["ok"]["targets"], json!([]));
        let said = lines("{\"op\":\"adopt\",\"pid\":5}\n{\"op\":\"adopt\",\"pid\":6,\"share\":{\"max\":\"8M\"}}\n");
        assert!(said.iter().all(|line| line.get("ok").is_some()), "{said:?}");
        lines("{\"op\":\"share\",\"pid\":5,\"share\":{\"min\":\"4M\",\"weight\":300}}\n");
        let said = lines("{\"op\":\"stats\"}\n");
        let targets = &said[0]["ok"]["targets"];
        assert_eq!((targets[0]["pid"].as_i64(), targets[0]["min_bytes"].as_u64()), (Some(5), Some(4 << 20)));
        assert_eq!((targets[1]["max_bytes"].as_u64(), targets[1]["weight"].as_u64()), (Some(8 << 20), Some(100)));
        assert_eq!(said[0]["ok"]["daemon"], json!(true));
        assert_eq!(lines("{\"op\":\"share_pages\",\"pid\":6,\"on\":true}\n")[0]["ok"], json!({}));
        assert_eq!(*daemon.pager().sharing.lock().expect("sound"), (Some(6), true));
        let said = lines("{\"op\":\"release\",\"pid\":5}\n{\"op\":\"show\",\"pid\":6}\n{\"op\":\"show\",\"pid\":5}\n");
        assert_eq!((&said[0]["progress"], &said[1]["ok"]), (&json!([1, 2]), &json!({})));
        assert_eq!(said[2]["ok"]["pid"], json!(6));
        assert!(said[3]["error"].as_str().is_some_and(|why| why.contains("not managed here")));
        for wrong in [
            "{\"op\":\"detach\"}",
            "{\"op\":\"adopt\",\"pid\":7,\"share\":{\"min\":\"1K\"}}",
            "{\"op\":\"adopt\",\"pid\":7,\"share\":{\"least\":\"1G\"}}",
            "{\"op\":\"share\",\"pid\":6,\"share\":{\"weight\":0}}",
            "{\"op\":\"share\",\"pid\":99,\"share\":{}}",
            "{\"op\":\"adopt\"}",
            "{\"op\":\"share_pages\",\"pid\":6}",
        ] {
            assert!(lines(&format!("{wrong}\n"))[0].get("error").is_some(), "{wrong}");
        }
        lines("{\"op\":\"shutdown\"}\n");
        assert!(daemon.is_detached());
        assert!(
            lines("{\"op\":\"adopt\",\"pid\":8}\n")[0]["error"].as_str().is_some_and(|why| why.contains("letting"))
        );
        assert!(lines("{\"op\":\"share_pages\",\"pid\":6,\"on\":false}\n")[0].get("error").is_some());
        // One that serves one program shares all of it.
        let alone = service(false);
        assert!(answers(&alone, Peer::Command, b"{\"op\":\"share_pages\",\"pid\":6,\"on\":true}\n").contains("ok"));
        assert_eq!(*alone.pager().sharing.lock().expect("sound"), (None, true));
        // And knows nothing of the rest.
        for text in ["{\"op\":\"adopt\",\"pid\":5}\n", "{\"op\":\"release\",\"pid\":5}\n", "{\"op\":\"shutdown\"}\n"] {
            assert!(answers(&service(false), Peer::Command, text.as_bytes()).contains("only `spillway daemon`"));
        }
    }

    #[test]
    fn garbage_ends_the_connection_and_not_the_pager() {
        let service = service(false);
        let flood = vec![b'x'; 3 * LINE_BYTES_MAX];
        let said = answers(&service, Peer::Command, &flood);
        assert!(said.is_empty() || said.contains("longer than"), "{said}");
        let said = answers(&service, Peer::Command, &[0xff, 0xfe, b'\n', b'{', b'[', b'\n']);
        assert_eq!(said.lines().count(), 2, "{said}");
        let deep = [vec![b'['; 60_000], b"\n".to_vec()].concat();
        assert!(answers(&service, Peer::Command, &deep).starts_with("{\"error\""));
        assert!(answers(&service, Peer::Command, b"{\"op\":\"stats\"}\n").starts_with("{\"ok\""));
    }

    #[test]
    fn only_the_front_names_the_target() {
        let service = service(false);
        let said =
            answers(&service, Peer::Front, b"{\"op\":\"target\",\"pid\":9}\n{\"op\":\"stopping\",\"now\":false}\n");
        assert_eq!((said.as_str(), service.target()), ("{\"ok\":{}}\n{\"ok\":{}}\n", 9));
    }

    #[test]
    fn what_a_pager_answers_is_not_trusted() {
        let ask = |answer: &[u8]| {
            let (ours, mut theirs) = UnixStream::pair().expect("a pair");
            theirs.write_all(answer).expect("written");
            let mut lines = Lines::new(ours).expect("lines");
            ask(&mut lines, &Request::Stats, Duration::from_millis(50), &mut |_, _| {})
        };
        assert_eq!(ask(b"{\"progress\":[1,2]}\n{\"ok\":5}\n"), Ok(json!(5)));
        assert_eq!(ask(b"{\"error\":\"\\u001b[31mred\"}\n"), Err("?[31mred".into()));
        assert!(ask(b"nonsense\n").is_err_and(|text| text.contains("not understood")));
        assert!(ask(b"{\"ok\":").is_err_and(|text| text.contains("nothing came in time")));
    }
}

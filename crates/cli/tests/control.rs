//! `attach`, `ps`, `resize` and `detach`, and what others may do to a control socket.

mod common;
use common::{Running, alive, can_page, done, err, eventually, kill, out, pager_of, spillway, stat};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// A program to adopt; ended with the test.
struct Sleeper(Child);

impl Sleeper {
    fn start() -> Self {
        Self(Command::new("sleep").arg("63").stdin(Stdio::null()).stdout(Stdio::null()).spawn().expect("sleep"))
    }

    fn pid(&self) -> String {
        self.0.id().to_string()
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The entry of `spillway ps --json` for a process.
fn listed(pid: &str) -> Option<Value> {
    let ps = done(&["ps", "--json"]);
    assert!(ps.status.success(), "{}", err(&ps));
    let all: Vec<Value> = serde_json::from_slice(&ps.stdout).expect("JSON");
    all.into_iter().find(|entry| entry["pid"].as_u64() == pid.parse().ok())
}

/// Waits until a budget is in force: the pager takes it up when it next looks.
fn await_budget(pid: &str, bytes: u64) {
    eventually("the new budget", || listed(pid).filter(|entry| entry["budget_bytes"].as_u64() == Some(bytes)));
}

fn attach(sleeper: &Sleeper, more: &[&str]) -> Running {
    let running = Running::start(&[&["attach", &sleeper.pid(), "--local", "8M"], more].concat());
    eventually("the process to be listed", || listed(&sleeper.pid()));
    running
}

/// Where the socket of a pager is.
fn socket(pager: u32) -> PathBuf {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(|path| PathBuf::from(path).join("spillway"));
    let uid = Command::new("id").arg("-u").output().expect("id");
    let places = [Some("/run/spillway".into()), runtime, Some(format!("/tmp/spillway-{}", out(&uid).trim()).into())];
    let mut paths = places.into_iter().flatten().map(|place: PathBuf| place.join(format!("{pager}.sock")));
    paths.find(|path| path.exists()).expect("a socket")
}

#[test]
fn an_adopted_process_is_listed_resized_and_let_go() {
    if !can_page() {
        return;
    }
    let sleeper = Sleeper::start();
    let running = attach(&sleeper, &[]);
    let entry = listed(&sleeper.pid()).expect("listed");
    assert_eq!(entry["command"].as_str(), Some("sleep 63"));
    await_budget(&sleeper.pid(), 8 << 20);
    let table = out(&done(&["ps"]));
    let head = table.lines().next().unwrap_or_default().split("  ").map(str::trim).filter(|name| !name.is_empty());
    let names = ["PID", "PROCS", "TOUCHED", "LOCAL", "BUDGET", "STORED", "FAULTS/S", "P50 US", "P99 US", "COMMAND"];
    assert_eq!(head.collect::<Vec<_>>(), names, "{table}");
    assert!(table.lines().any(|line| line.contains(&sleeper.pid()) && line.ends_with("sleep 63")), "{table}");
    let resized = done(&["resize", &sleeper.pid(), "16M"]);
    assert_eq!((resized.status.code(), err(&resized).as_str()), (Some(0), ""));
    await_budget(&sleeper.pid(), 16 << 20);
    let names =
        |entry: &Value| ["policy", "evict", "scope", "block"].map(|key| entry[key].as_str().unwrap_or("").to_owned());
    assert_eq!(names(&listed(&sleeper.pid()).expect("listed")), ["clock", "pre-evict", "global", "elastic"]);
    let set = done(&["set", &sleeper.pid(), "policy=lru3", "scope=target", "block=16k"]);
    assert_eq!((set.status.code(), err(&set).as_str()), (Some(0), ""));
    assert_eq!(names(&listed(&sleeper.pid()).expect("listed")), ["lru3", "pre-evict", "target", "16k"]);
    let again = done(&["attach", &sleeper.pid()]);
    assert_eq!(again.status.code(), Some(2));
    assert!(err(&again).contains("managed already"), "{}", err(&again));
    let path = socket(running.pid());
    let detached = done(&["detach", &sleeper.pid()]);
    assert_eq!((detached.status.code(), err(&detached).as_str()), (Some(0), ""));
    let (said, told, status) = running.end();
    assert_eq!((said.as_str(), status), ("", Some(0)));
    assert!(told.starts_with(&format!("spillway: adopted process {}", sleeper.pid())), "{told}");
    assert!(told.contains("\nspillway: peak ") && told.lines().count() == 2, "{told}");
    assert!(alive(sleeper.0.id()) && !path.exists());
    assert!(listed(&sleeper.pid()).is_none());
    assert_eq!(done(&["detach", &sleeper.pid()]).status.code(), Some(2), "nobody manages it any more");
}

#[test]
fn signals_let_an_adopted_process_go() {
    if !can_page() {
        return;
    }
    for signal in ["INT", "TERM", "HUP"] {
        let sleeper = Sleeper::start();
        let running = attach(&sleeper, &["-q"]);
        kill("TSTP", &running.pid().to_string()); // A stopped pager would hold up its target.
        kill(signal, &running.pid().to_string());
        kill(signal, &running.pid().to_string());
        let (_, told, status) = running.end();
        assert_eq!(status, Some(0), "{signal}: {told}");
        assert!(alive(sleeper.0.id()), "{signal}");
    }
}

#[test]
fn the_end_of_an_adopted_process_is_the_end_of_its_pager() {
    if !can_page() {
        return;
    }
    let path = std::env::temp_dir().join(format!("spillway-attach-{}.json", std::process::id()));
    let sleeper = Sleeper::start();
    let running = attach(&sleeper, &["-q", "--stats", path.to_str().expect("text")]);
    drop(sleeper);
    let (said, told, status) = running.end();
    assert_eq!((said.as_str(), told.as_str(), status), ("", "", Some(0)));
    let stats: Value = serde_json::from_slice(&std::fs::read(&path).expect("written")).expect("JSON");
    assert!(stats["local_peak_bytes"].is_u64());
    std::fs::remove_file(path).expect("removed");
}

#[test]
fn a_program_that_was_run_can_be_resized_and_let_go() {
    if !can_page() {
        return;
    }
    let mut running = Running::shell("echo pid=$$; trap 'exit 8' TERM; while :; do sleep 0.05; done");
    let target = running.number("pid=").to_string();
    let entry = eventually("the program to be listed", || listed(&target));
    assert_eq!(entry["front_pid"].as_u64(), Some(running.pid().into()));
    for pid in [&target, &running.pid().to_string()] {
        let resized = done(&["resize", pid, "12M"]);
        assert!(resized.status.success(), "{}", err(&resized));
    }
    await_budget(&target, 12 << 20);
    let detached = done(&["detach", &target]);
    assert!(detached.status.success(), "{}", err(&detached));
    assert!(listed(&target).is_none());
    assert_eq!(done(&["resize", &target, "9M"]).status.code(), Some(2));
    kill("TERM", &target);
    assert_eq!(running.end().2, Some(8));
}

#[test]
fn strangers_on_the_socket_harm_nothing() {
    if !can_page() {
        return;
    }
    let mut running = Running::shell("echo pid=$$; while :; do sleep 0.05; done");
    let target = running.number("pid=");
    let pager = pager_of(running.pid());
    let path = socket(pager);
    let connect = || UnixStream::connect(&path).expect("connected");
    let mut garbage = connect();
    garbage.write_all(b"GET / HTTP/1.0\r\n").expect("written");
    let mut line = String::new();
    BufReader::new(&garbage).read_line(&mut line).expect("answered");
    assert!(line.starts_with("{\"error\":"), "{line}");
    let mut flood = connect();
    assert!((0..64).any(|_| flood.write_all(&[b'x'; 65536]).is_err()), "an endless line was read");
    // Silent ones hold their places for a while, and then no more.
    let silent: Vec<_> = (0..20).map(|_| connect()).collect();
    let mut said = String::new();
    silent[19].try_clone().expect("cloned").read_to_string(&mut said).expect("answered");
    assert!(said.contains("too many"), "{said}");
    eventually("places to be free again", || listed(&target.to_string()));
    drop(silent);
    assert!(alive(target) && alive(pager));
}

#[test]
fn a_dead_pagers_socket_is_cleared_away() {
    if !can_page() {
        return;
    }
    let sleeper = Sleeper::start();
    let mut running = attach(&sleeper, &["-q"]);
    let path = socket(running.pid());
    running.child.kill().expect("killed");
    running.child.wait().expect("ended");
    // The pager is another process, which ends with that one, a moment later. Whoever lists pagers then clears it away: here, or
    // in a test beside this one.
    eventually("it to be cleared away", || (listed(&sleeper.pid()).is_none() && !path.exists()).then_some(()));
}

#[test]
fn an_absent_or_foreign_directory_is_no_reason_to_fail() {
    let ps = spillway(&["ps"]).env("XDG_RUNTIME_DIR", "/nonexistent").output().expect("starts");
    assert!(ps.status.success() && out(&ps).trim_start().starts_with("PID"), "{}{}", out(&ps), err(&ps));
    let ps = spillway(&["ps", "--json"]).env("XDG_RUNTIME_DIR", "/").output().expect("starts");
    assert!(ps.status.success() && out(&ps).starts_with('['), "{}{}", out(&ps), err(&ps));
}

#[test]
fn a_process_stopped_by_its_user_stays_stopped_while_it_is_managed() {
    if !can_page() {
        return;
    }
    let sleeper = Sleeper::start();
    kill("STOP", &sleeper.pid());
    eventually("a stop", || stat(sleeper.0.id()).filter(|(state, _)| *state == 'T'));
    let running = attach(&sleeper, &["-q"]);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(stat(sleeper.0.id()).map(|(state, _)| state), Some('T'));
    assert!(done(&["detach", &sleeper.pid()]).status.success());
    assert_eq!(running.end().2, Some(0));
    assert_eq!(stat(sleeper.0.id()).map(|(state, _)| state), Some('T'));
}

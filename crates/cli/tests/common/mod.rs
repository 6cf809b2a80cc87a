//! Starting `spillway` and watching processes, without help from the crate under test.
#![allow(dead_code, unreachable_pub, reason = "a part of each test file, which uses its own share of it")]

use std::fs;
use std::io::Read;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// The binary under test.
pub const SPILLWAY: &str = env!("CARGO_BIN_EXE_spillway");

/// `spillway` with these arguments, its streams captured. It ignores no signal, though whoever runs the tests may: a shell's
/// jobs in the background ignore SIGINT and SIGQUIT.
pub fn spillway(args: &[&str]) -> Command {
    let mut command = Command::new("env");
    command
        .args(["--default-signal", SPILLWAY])
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Runs `spillway` to its end.
pub fn done(args: &[&str]) -> Output {
    spillway(args).output().expect("spillway starts")
}

/// Runs a shell script in which `$SPILLWAY` is the binary, to its end.
pub fn script(text: &str) -> Output {
    let mut command = Command::new("sh");
    command.args(["-c", text]).env("SPILLWAY", SPILLWAY).stdin(Stdio::null()).output().expect("sh starts")
}

/// Whether programs can be run here; what lacks is said. Without the kernel's help there is nothing to test, and with
/// `SPILLWAY_TESTS_STRICT=1` that is a failure.
pub fn can_page() -> bool {
    let doctor = done(&["doctor", "--json"]);
    let able = doctor.status.success() && out(&doctor).contains("\"name\"");
    if !able {
        let strict = std::env::var("SPILLWAY_TESTS_STRICT").is_ok_and(|strict| strict == "1");
        assert!(!strict, "`spillway doctor` is not content with this machine:\n{}", out(&doctor));
        eprintln!("SKIPPED: `spillway doctor` is not content with this machine:\n{}", out(&doctor));
    }
    able
}

/// Standard output as text.
pub fn out(of: &Output) -> String {
    String::from_utf8_lossy(&of.stdout).into_owned()
}

/// Standard error as text.
pub fn err(of: &Output) -> String {
    String::from_utf8_lossy(&of.stderr).into_owned()
}

/// Waits for a value; fails naming what was waited for.
pub fn eventually<T>(what: &str, condition: impl FnMut() -> Option<T>) -> T {
    within_patience(condition).unwrap_or_else(|| panic!("waited in vain: {what}"))
}

fn within_patience<T>(mut condition: impl FnMut() -> Option<T>) -> Option<T> {
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(15) {
        if let Some(value) = condition() {
            return Some(value);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    None
}

/// What a process, its descendants and all of their threads are doing, for whoever has to find out why they do not end.
fn doings(pid: u32) -> String {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let own = threads.map(|thread| {
        let text = |file| fs::read_to_string(thread.path().join(file)).unwrap_or_default();
        let status = text("status");
        let told = |line: &&str| {
            ["Name", "State", "PPid", "TracerPid", "Sig", "Shd"].iter().any(|field| line.starts_with(field))
        };
        let lines: Vec<&str> = status.lines().filter(told).collect();
        format!("{pid}/{}: {}\n{}{}", thread.file_name().display(), lines.join(", "), text("syscall"), text("stack"))
    });
    own.chain(children(pid).into_iter().map(doings)).collect()
}

/// The state's letter and the parent of a process.
pub fn stat(pid: u32) -> Option<(char, u32)> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = text[text.rfind(')')? + 2..].split(' ');
    Some((fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
}

/// Whether a process runs or is stopped, not a zombie.
pub fn alive(pid: u32) -> bool {
    stat(pid).is_some_and(|(state, _)| !"ZX".contains(state))
}

/// The short name of a process.
pub fn name(pid: u32) -> String {
    fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim_end().to_owned()
}

/// The children of a process.
pub fn children(pid: u32) -> Vec<u32> {
    let all = fs::read_dir("/proc").expect("proc").flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|&child| stat(child).is_some_and(|(_, parent)| parent == pid)).collect()
}

/// The pager's process of a `spillway run`.
pub fn pager_of(front: u32) -> u32 {
    eventually("a pager", || children(front).into_iter().find(|&pid| name(pid) == "spillway-pager"))
}

/// Sends a signal, by name, to a process or to a group (`-PGID`).
pub fn kill(signal: &str, whom: &str) {
    let status = Command::new("bash").args(["-c", &format!("kill -{signal} -- {whom}")]).status();
    assert!(status.expect("kill").success(), "kill -{signal} {whom}");
}

/// A `spillway` that runs while the test goes on; killed at the end, whatever happened.
pub struct Running {
    /// The process; its group is its own.
    pub child: Child,
    heard: String,
}

impl Running {
    /// Starts it as the leader of a process group.
    pub fn start(args: &[&str]) -> Self {
        use std::os::unix::process::CommandExt;
        let child = spillway(args).process_group(0).spawn().expect("spillway starts");
        Self { child, heard: String::new() }
    }

    /// Runs a shell script under `spillway run -q`.
    pub fn shell(script: &str) -> Self {
        Self::start(&["run", "-q", "--", "sh", "-c", script])
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Reads standard output until it contains `text`.
    pub fn hear(&mut self, text: &str) -> &str {
        let stdout = self.child.stdout.as_mut().expect("captured");
        let mut byte = [0];
        while !self.heard.contains(text) {
            assert_eq!(stdout.read(&mut byte).expect("readable"), 1, "ended after: {}", self.heard);
            self.heard.push(byte[0].into());
        }
        &self.heard
    }

    /// The number that standard output says in a line after `label`.
    pub fn number(&mut self, label: &str) -> u32 {
        self.hear(label);
        let rest = self.heard.len();
        self.hear_line();
        self.heard[rest..].trim().parse().expect("a number")
    }

    fn hear_line(&mut self) {
        let stdout = self.child.stdout.as_mut().expect("captured");
        let mut byte = [0];
        while stdout.read(&mut byte).expect("readable") == 1 {
            self.heard.push(byte[0].into());
            if byte == *b"\n" {
                return;
            }
        }
    }

    /// Waits for the end; all of standard output, standard error and the exit status.
    pub fn end(mut self) -> (String, String, Option<i32>) {
        let mut stdout = self.child.stdout.take().expect("captured");
        let mut stderr = self.child.stderr.take().expect("captured");
        let status = within_patience(|| self.child.try_wait().expect("waited"))
            .unwrap_or_else(|| panic!("waited in vain for the end, after: {}\n{}", self.heard, doings(self.pid())));
        let (mut out, mut err) = (std::mem::take(&mut self.heard), String::new());
        stdout.read_to_string(&mut out).expect("text");
        stderr.read_to_string(&mut err).expect("text");
        (out, err, status.code())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

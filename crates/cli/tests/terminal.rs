//! Keys on a terminal: a shell that runs `spillway run` sees what it would see of the program alone.

mod common;
use common::{SPILLWAY, can_page};
use std::io::{Read, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// An interactive shell on a terminal of its own, made by script(1).
struct Terminal {
    script: Child,
    keys: ChildStdin,
    screen: Receiver<Vec<u8>>,
    seen: String,
}

impl Terminal {
    fn open() -> Self {
        let mut script = Command::new("script")
            .args(["-qec", "env PS1='prompt> ' bash --norc --noprofile -i", "/dev/null"])
            .env("SPILLWAY", SPILLWAY)
            .env("TERM", "dumb")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("script(1)");
        let keys = script.stdin.take().expect("piped");
        let mut stdout = script.stdout.take().expect("piped");
        let (send, screen) = channel();
        std::thread::spawn(move || {
            let mut some = [0; 4096];
            while let Ok(count @ 1..) = stdout.read(&mut some) {
                if send.send(some[..count].to_vec()).is_err() {
                    return;
                }
            }
        });
        let mut terminal = Self { script, keys, screen, seen: String::new() };
        terminal.expect("prompt> ");
        // No echo: what is expected on the screen must not be what was typed.
        terminal.keys("stty -echo\n");
        terminal.expect("prompt> ");
        terminal
    }

    fn keys(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).expect("typed");
        self.keys.flush().expect("typed");
    }

    /// Waits until the screen shows `text`, and forgets all up to there; returns what came before.
    // A word of the program's own is typed with a backslash in it: else its echo would be taken for it.
    fn expect(&mut self, text: &str) -> String {
        let deadline = Instant::now() + Duration::from_secs(15);
        loop {
            if let Some(at) = self.seen.find(text) {
                let before = self.seen[..at].to_owned();
                self.seen.drain(..at + text.len());
                return before;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let Ok(more) = self.screen.recv_timeout(left) else { panic!("no {text:?} after: {:?}", self.seen) };
            self.seen += &String::from_utf8_lossy(&more);
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.script.kill();
        let _ = self.script.wait();
    }
}

#[test]
fn control_c_is_the_programs_alone() {
    if !can_page() {
        return;
    }
    let mut terminal = Terminal::open();
    terminal.keys(
        "$SPILLWAY run -q -- sh -c 'trap \"echo caught\" INT; echo g\\o; sleep 9; sleep 0.5; exit 9'; echo status=$?\n",
    );
    terminal.expect("go");
    std::thread::sleep(Duration::from_millis(300));
    terminal.keys("\x03");
    let between = terminal.expect("status=9");
    assert_eq!(between.matches("caught").count(), 1, "{between}");
}

#[test]
fn control_c_ends_a_loop_as_it_would_without_us() {
    if !can_page() {
        return;
    }
    let mut terminal = Terminal::open();
    terminal.keys("for i in 1 2 3; do echo rou\\nd; $SPILLWAY run -q -- sleep 20; done\n");
    terminal.expect("round");
    std::thread::sleep(Duration::from_millis(700));
    terminal.keys("\x03");
    terminal.expect("prompt> ");
    terminal.keys("echo status=$?\n");
    let between = terminal.expect("status=130");
    assert!(!between.contains("round"), "{between}");
}

#[test]
fn control_z_stops_and_fg_goes_on() {
    if !can_page() {
        return;
    }
    let mut terminal = Terminal::open();
    terminal.keys("$SPILLWAY run -q -- sh -c 'trap \"echo continued\" CONT; echo g\\o; cat; exit 5'; echo status=$?\n");
    terminal.expect("go");
    std::thread::sleep(Duration::from_millis(300));
    terminal.keys("\x1a");
    terminal.expect("Stopped");
    terminal.expect("prompt> ");
    terminal.keys("jobs; echo alive\n");
    terminal.expect("Stopped");
    terminal.expect("alive");
    terminal.keys("fg; echo status=$?\n");
    terminal.expect("exit 5'"); // The job's command line, which the shell shows.
    std::thread::sleep(Duration::from_millis(300));
    terminal.keys("typed\n");
    let mut between = terminal.expect("typed");
    terminal.keys("\x04");
    between += &terminal.expect("status=5");
    assert_eq!(between.matches("continued").count(), 1, "{between}");
}

#[test]
fn reading_in_the_background_stops_and_the_foreground_goes_on() {
    if !can_page() {
        return;
    }
    let mut terminal = Terminal::open();
    terminal.keys("$SPILLWAY run -q -- cat &\n");
    // It stops once it reads: until then it is said to run.
    let deadline = Instant::now() + Duration::from_secs(15);
    loop {
        assert!(Instant::now() < deadline, "it does not stop");
        terminal.keys("jobs; echo asked\n");
        let said = terminal.expect("\nasked");
        if said.contains("Stopped") {
            break;
        }
        assert!(said.contains("Running"), "{said}");
        std::thread::sleep(Duration::from_millis(100));
    }
    terminal.keys("fg\n");
    std::thread::sleep(Duration::from_millis(300));
    terminal.keys("typed\n");
    terminal.expect("typed");
    terminal.keys("\x03");
    terminal.expect("prompt> ");
}

#[test]
fn kill_of_a_job_reaches_the_program_once() {
    if !can_page() {
        return;
    }
    let mut terminal = Terminal::open();
    terminal.keys("$SPILLWAY run -q -- sh -c 'trap \"echo got\" TERM; echo g\\o; sleep 1; sleep 1; exit 3' &\n");
    terminal.expect("go");
    terminal.keys("kill %1; wait; echo status=$?\n");
    let between = terminal.expect("status=");
    assert_eq!(between.matches("\ngot").count(), 1, "{between}");
}

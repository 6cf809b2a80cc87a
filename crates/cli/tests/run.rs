//! `spillway run`: to the world outside, the program runs as if it were alone.

mod common;
use common::{Running, alive, can_page, children, done, err, eventually, kill, out, pager_of, script, spillway, stat};
use std::fs;
use std::io::Write;
use std::process::Stdio;
use std::time::{Duration, Instant};

#[test]
fn exit_statuses_are_the_programs_own() {
    if !can_page() {
        return;
    }
    for status in ["0", "3", "70", "255"] {
        let done = done(&["run", "-q", "--", "sh", "-c", &format!("exit {status}")]);
        assert_eq!(done.status.code().map(|code| code.to_string()).as_deref(), Some(status));
        assert_eq!(err(&done), "");
    }
    for (signal, status) in [("TERM", 143), ("KILL", 137), ("INT", 130), ("SEGV", 139), ("USR1", 138)] {
        let done = done(&["run", "-q", "--", "sh", "-c", &format!("kill -{signal} $$")]);
        assert_eq!(done.status.code(), Some(status), "{signal}");
    }
}

#[test]
fn programs_that_cannot_be_started() {
    if !can_page() {
        return;
    }
    for (program, status) in
        [("/nonexistent", 127), ("no-such-program", 127), ("", 127), ("/etc/passwd", 126), ("/", 126)]
    {
        let done = done(&["run", "--", program]);
        assert_eq!(done.status.code(), Some(status), "{program}");
        assert_eq!(err(&done).lines().count(), 1, "{}", err(&done));
        assert!(err(&done).starts_with(&format!("spillway: {program}: ")), "{}", err(&done));
    }
}

#[test]
fn streams_pass_and_our_words_go_to_standard_error() {
    if !can_page() {
        return;
    }
    let mut child =
        spillway(&["run", "--", "sh", "-c", "cat; echo oops >&2"]).stdin(Stdio::piped()).spawn().expect("starts");
    child.stdin.take().expect("piped").write_all(b"through and\0through").expect("written");
    let done = child.wait_with_output().expect("ends");
    assert_eq!(done.stdout, b"through and\0through");
    let (oops, summary) = err(&done).split_once('\n').map(|(a, b)| (a.to_owned(), b.to_owned())).expect("two lines");
    assert_eq!(oops, "oops");
    assert!(
        summary.starts_with("spillway: peak ") && summary.contains(" p99 ") && summary.lines().count() == 1,
        "{summary}"
    );
    // Options after the command are the command's.
    assert_eq!(out(&common::done(&["run", "-q", "echo", "-q", "--local", "--", "x"])), "-q --local -- x\n");
}

#[test]
fn the_program_inherits_what_it_would_without_us() {
    if !can_page() {
        return;
    }
    let show =
        "sh -c 'grep -E \"^Sig(Blk|Ign|Cgt)\" /proc/self/status; ulimit -a; umask; pwd; env | grep -v ^_= | sort'";
    for with in ["", "trap '' PIPE CHLD INT HUP USR1;", "trap '' TERM; ulimit -n 99; umask 027; cd /usr; export X=y;"] {
        let native = script(&format!("{with} exec {show}"));
        let ours = script(&format!("{with} exec \"$SPILLWAY\" run -q -- {show}"));
        assert_eq!(out(&ours), out(&native), "{with}{}", err(&ours));
    }
    // Descriptors: those that were open, and no others; closed streams stay closed.
    let show = "sh -c 'for i in 0 1 2 3 4 5 6 7 8 9; do [ -e /proc/$$/fd/$i ] && echo $i; done'";
    for with in ["", "7</dev/null", "<&-", "2>&-", "<&- 2>&- 5>/dev/null"] {
        let native = script(&format!("{show} {with}"));
        let ours = script(&format!("\"$SPILLWAY\" run -q -- {show} {with}"));
        assert_eq!(out(&ours), out(&native), "{with}{}", err(&ours));
    }
}

#[test]
fn statistics_are_written_with_the_programs_end() {
    if !can_page() {
        return;
    }
    let path = std::env::temp_dir().join(format!("spillway-stats-{}.json", std::process::id()));
    let done = done(&["run", "-q", "--stats", path.to_str().expect("text"), "--", "sh", "-c", "exit 5"]);
    assert_eq!(done.status.code(), Some(5), "{}", err(&done));
    let text = fs::read_to_string(&path).expect("written");
    let stats: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    for key in [
        "touched_bytes",
        "local_peak_bytes",
        "stored_bytes",
        "kept_bytes",
        "stored_compressed_bytes",
        "faults",
        "zero_fills",
        "refaults",
        "fetched_pages",
        "evicted_pages",
        "written_pages",
        "clean_drops",
    ] {
        assert!(stats[key].is_u64(), "{key}: {text}");
    }
    for key in ["p50", "p99", "p999", "max"] {
        assert!(stats["fault_us"][key].is_number(), "{key}: {text}");
    }
    fs::remove_file(path).expect("removed");
}

#[test]
fn signals_from_other_processes_reach_the_program_once() {
    if !can_page() {
        return;
    }
    let count = "trap 'echo got' TERM; trap 'exit 7' USR2; echo ready; while :; do sleep 0.05; done";
    for to_group in [false, true] {
        let mut running = Running::shell(count);
        running.hear("ready\n");
        let whom = if to_group { format!("-{}", running.pid()) } else { running.pid().to_string() };
        kill("TERM", &whom);
        running.hear("got\n");
        std::thread::sleep(Duration::from_millis(300));
        kill("TERM", &whom);
        std::thread::sleep(Duration::from_millis(300));
        kill("USR2", &running.pid().to_string());
        let (said, _, status) = running.end();
        assert_eq!((said.as_str(), status), ("ready\ngot\ngot\n", Some(7)), "to the group: {to_group}");
    }
    for (signal, status) in
        [("HUP", 129), ("INT", 130), ("QUIT", 131), ("USR1", 138), ("ALRM", 142), ("TERM", 143), ("35", 163)]
    {
        let mut running = Running::shell("ulimit -c 0; echo ready; exec sleep 60");
        running.hear("ready\n");
        eprintln!("sending {signal}"); // Shown if this fails.
        kill(signal, &running.pid().to_string());
        assert_eq!(running.end().2, Some(status), "{signal}");
    }
}

#[test]
fn an_alarm_that_was_set_for_the_program_rings_there() {
    if !can_page() {
        return;
    }
    let done = script("exec perl -e 'alarm 1; exec @ARGV' \"$SPILLWAY\" run -q -- sleep 30");
    assert_eq!(done.status.code(), Some(142), "{}", err(&done));
}

#[test]
fn the_program_stops_and_goes_on_with_us() {
    if !can_page() {
        return;
    }
    let mut running = Running::shell("echo pid=$$; trap 'exit 4' TERM; while :; do sleep 0.05; done");
    let (front, target) = (running.pid(), running.number("pid="));
    let state = |pid, wanted: &str| {
        eventually(&format!("{pid} in state {wanted}"), || {
            stat(pid).filter(|(state, _)| wanted.contains(*state)).map(drop)
        });
    };
    // Whoever is stopped, the other follows; whoever is continued, too.
    for (stopped, continued) in [(target, front), (target, target), (front, front)] {
        kill("STOP", &stopped.to_string());
        state(target, "T");
        state(front, "T");
        std::thread::sleep(Duration::from_millis(600));
        state(target, "T");
        state(front, "T");
        kill("CONT", &continued.to_string());
        state(front, "SR");
        state(target, "SR");
        std::thread::sleep(Duration::from_millis(600));
        state(front, "SR");
        state(target, "SR");
    }
    kill("STOP", &target.to_string());
    state(front, "T");
    kill("KILL", &target.to_string());
    assert_eq!(running.end().2, Some(137), "a program killed while stopped");
}

#[test]
fn a_dead_pager_is_the_programs_end() {
    if !can_page() {
        return;
    }
    let mut running = Running::shell("sleep 61 & echo child=$!; wait");
    let child = running.number("child=");
    let pager = pager_of(running.pid());
    let target = stat(child).expect("alive").1;
    kill("KILL", &pager.to_string());
    let (_, said, status) = running.end();
    assert_eq!(said, "spillway: the pager died; the target was stopped because its memory is gone\n");
    assert_eq!(status, Some(70));
    eventually("the program's end", || (!alive(target) && !alive(child)).then_some(()));
}

#[test]
fn a_killed_front_takes_the_program_and_the_pager_along() {
    if !can_page() {
        return;
    }
    let mut running = Running::start(&["run", "-q", "--", "sh", "-c", "echo pid=$$; exec sleep 62"]);
    let target = running.number("pid=");
    let all = children(running.pid());
    assert!(all.contains(&target) && all.len() >= 2);
    kill("KILL", &running.pid().to_string());
    eventually("the end of all", || (!all.iter().any(|&pid| alive(pid))).then_some(()));
}

#[test]
fn signals_for_the_program_do_not_end_its_pager() {
    if !can_page() {
        return;
    }
    let mut running = Running::shell("echo ready; exec sleep 60");
    running.hear("ready\n");
    let pager = pager_of(running.pid());
    for signal in ["TERM", "INT", "HUP", "QUIT", "TSTP", "USR1", "PIPE"] {
        kill(signal, &pager.to_string());
    }
    std::thread::sleep(Duration::from_millis(100));
    assert!(alive(pager));
}

#[test]
fn what_outlives_the_command_is_served_until_it_ends() {
    if !can_page() {
        return;
    }
    let began = Instant::now();
    let mut running = Running::shell("sleep 30 >/dev/null 2>&1 </dev/null & echo child=$!; sleep 0.6");
    let child = running.number("child=");
    let pager = pager_of(running.pid());
    let (_, _, status) = running.end(); // Reads the streams to their end: nobody holds them open.
    assert_eq!(status, Some(0));
    assert!(began.elapsed() < Duration::from_secs(20), "the command was held up");
    assert!(alive(child));
    kill("KILL", &child.to_string());
    eventually("the pager's end", || (!alive(pager)).then_some(()));
}

//! Bad input is one line on standard error that names the remedy, exit status 2, and nothing has happened.

mod common;
use common::{can_page, done, err, out, spillway};
use std::fs;

/// Runs `spillway`, expects a refusal, and returns its one line.
fn refusal(args: &[&str]) -> String {
    let done = done(args);
    let text = err(&done);
    assert_eq!(done.status.code(), Some(2), "{args:?}: {text}");
    assert_eq!(out(&done), "", "{args:?}");
    assert!(text.starts_with("spillway: ") && text.ends_with('\n'), "{args:?}: {text}");
    assert_eq!(text.lines().count(), 1, "{args:?}: {text}");
    assert!(!text.contains("os error"), "{args:?}: {text}");
    text
}

#[test]
fn command_lines_that_make_no_sense() {
    assert!(refusal(&[]).contains("spillway run -- CMD"));
    assert!(refusal(&["run"]).contains("<CMD>... is missing: `spillway run"));
    assert!(refusal(&["run", "--"]).contains("<CMD>... is missing"));
    assert!(refusal(&["run", "--lcoal", "4M", "true"]).contains("--local"));
    assert!(refusal(&["atach", "1"]).contains("did you mean"));
    assert!(refusal(&["attach"]).contains("<PID> is missing"));
    for pid in ["abc", "0", "-5", "99999999999999"] {
        assert!(refusal(&["attach", pid]).contains("see `spillway --help`"), "{pid}");
        refusal(&["detach", pid]);
        refusal(&["resize", pid, "8M"]);
    }
    refusal(&["resize", "1"]);
    refusal(&["ps", "more"]);
}

#[test]
fn sizes_and_pools() {
    for size in ["", "x", "12Q", "1.5.5G", "1M", "0%", "101%", "-1", "-5%", "99999999999999999999G"] {
        let flag = format!("--local={size}");
        refusal(&["run", &flag, "--", "true"]);
        refusal(&["attach", &flag, "1"]);
        refusal(&["resize", "1", size]);
    }
    assert!(refusal(&["attach", "1", "--least-mapping", "1M"]).contains("4.0 MiB"));
    assert!(refusal(&["attach", "1", "--least-mapping", "64M", "--local", "4095"]).contains("4.0 KiB"));
    for url in ["", "local", "nosuch://x", "local:?size=1", "local:?compress=zip", "local:?x=1"] {
        let flag = format!("--pool={url}");
        refusal(&["run", &flag, "--", "true"]);
        refusal(&["attach", &flag, "1"]);
    }
}

#[test]
fn settings_that_do_not_exist_name_those_that_do() {
    for (key, valid) in [
        ("policy", "rr, clock, nru, fifo, lru, lru3, s3fifo, sieve"),
        ("evict", "on-demand, pre-evict"),
        ("scope", "target, global"),
        ("block", "elastic, 4k, 8k, 16k, 32k, 64k"),
    ] {
        let flag = format!("--{key}=nosuch");
        assert!(refusal(&["run", &flag, "--", "true"]).contains(valid), "{key}");
        assert!(refusal(&["attach", &flag, "1"]).contains(valid), "{key}");
        assert!(refusal(&["set", "1", &format!("{key}=nosuch")]).contains(valid), "{key}");
    }
    assert!(refusal(&["set", "1", "nosuch=1"]).contains("the keys are policy, evict, scope, block"));
    assert!(refusal(&["set", "1", "policy"]).contains("KEY=VALUE"));
    // One that is wrong refuses all, before anyone is asked.
    assert!(refusal(&["set", "1", "policy=lru", "evict=never"]).contains("on-demand"));
    assert!(refusal(&["set", "1"]).contains("<KEY=VALUE>... is missing"));
    assert!(refusal(&["set", "4194305", "policy=lru"]).contains("no process 4194305"));
}

#[test]
fn daemons_that_cannot_be() {
    let directory = std::env::temp_dir().join(format!("spillway-config-{}", std::process::id()));
    fs::create_dir_all(&directory).expect("made");
    let file = directory.join("daemon.toml");
    let path = file.to_str().expect("text");
    for (text, expected) in [
        ("local = \"8G\"\nlocla = \"8G\"\n", "line 2: unknown field `locla`"),
        ("local = 8\n", "line 1: "),
        ("local = \"8\"\n", "at least"),
        ("pool = \"nosuch://x\"\n", "nosuch"),
        ("policy = \"fast\"\n", "one of rr, clock"),
    ] {
        fs::write(&file, text).expect("written");
        assert!(refusal(&["daemon", "--config", path]).contains(expected), "{text}");
    }
    fs::remove_dir_all(&directory).expect("removed");
    assert!(refusal(&["daemon", "--config", path]).contains("give --config another file"));
    assert!(refusal(&["daemon", "--local", "1K"]).contains("at least"));
    let none = spillway(&["daemon"]).env("SPILLWAY_DAEMON", "off").output().expect("spillway starts");
    assert!(none.status.code() == Some(2) && err(&none).contains("no daemon"), "{}", err(&none));
    assert!(refusal(&["run", "--no-daemon", "--min", "8M", "--", "true"]).contains("start `spillway daemon`"));
    assert!(refusal(&["set", "4194305", "min=8M", "weight=0"]).contains("no weight"));
}

#[test]
fn processes_that_are_not_there() {
    // One more than the kernel's largest.
    for args in [&["detach", "4194305"][..], &["resize", "4194305", "8M"]] {
        assert!(refusal(args).contains("no process 4194305"));
    }
    assert!(refusal(&["detach", "1"]).contains("no pager of yours manages process 1"));
    if can_page() {
        assert!(refusal(&["attach", "4194305"]).contains("no process 4194305"));
    }
}

#[test]
fn an_unwritable_statistics_file_is_refused_before_the_program_starts() {
    let ran = std::env::temp_dir().join(format!("spillway-ran-{}", std::process::id()));
    let touch = ["--", "touch", ran.to_str().expect("text")];
    for path in ["/nonexistent/x.json", "/", "/proc/x", ""] {
        let args = [&["run", "--stats", path], &touch[..]].concat();
        assert!(refusal(&args).contains("--stats"), "{path}");
        assert!(!ran.exists());
    }
}

#[test]
fn help_and_version() {
    let help = done(&["--help"]);
    assert!(help.status.success() && err(&help).is_empty());
    for text in [
        "run ",
        "attach ",
        "detach ",
        "resize ",
        "set ",
        "ps ",
        "pool ",
        "serve ",
        "doctor ",
        "Exit status:",
        "70 ",
        "127 ",
    ] {
        assert!(out(&help).contains(text), "{text}");
    }
    assert!(!out(&help).contains("__pager") && !out(&help).contains('\x1b'));
    assert!(out(&help).lines().all(|line| line.len() <= 112), "{}", out(&help));
    for command in ["run", "attach", "daemon", "detach", "resize", "set", "ps", "pool", "serve", "doctor"] {
        let help = done(&[command, "--help"]);
        assert!(help.status.success() && out(&help).contains("Usage:"), "{command}");
        assert!(out(&help).lines().all(|line| line.len() <= 112), "{}", out(&help));
    }
    assert_eq!(out(&done(&["--version"])).trim(), concat!("spillway ", env!("CARGO_PKG_VERSION")));
}

#[test]
fn a_reader_that_goes_away_is_no_crash() {
    for args in [&["--help"][..], &["ps", "--json"], &["doctor"]] {
        let full = fs::OpenOptions::new().write(true).open("/dev/full").expect("opened");
        let done = spillway(args).stdout(full).output().expect("spillway starts");
        assert!(done.status.code().is_some_and(|code| code < 2), "{args:?}: {}", err(&done));
        assert!(!err(&done).contains("panicked"), "{args:?}");
    }
}

#[test]
fn the_pagers_own_command_is_not_for_people() {
    for socket in ["-1", "0", "2", "77"] {
        let done = done(&["__pager", &format!("--socket={socket}"), "--front=1", "--local=50%", "--pool=local:"]);
        assert_eq!(done.status.code(), Some(1), "{}", err(&done));
        assert_eq!(err(&done).lines().count(), 1, "{}", err(&done));
        assert!(!err(&done).contains("panicked") && !err(&done).contains("os error"), "{}", err(&done));
    }
}

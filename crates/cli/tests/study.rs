//! `spillway sim` and `spillway advise` on files whose contents are known.

mod common;
use common::{done, err, out};
use spillway_study::record::{Access, Fault, Record, What};
use spillway_study::trace::{Header, Writer};
use std::fs;
use std::path::{Path, PathBuf};

/// A directory of a test's own, gone with it.
struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("spillway-study-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).expect("made");
        Self(path)
    }

    fn file(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, bytes).expect("written");
        path
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Runs a command on `file`; its status, and what it says on both streams.
fn said(command: &[&str], file: &Path) -> (Option<i32>, String, String) {
    let done = done(&[command, &[file.to_str().expect("text")]].concat());
    (done.status.code(), out(&done), err(&done))
}

/// That a command refuses `file` in one line.
fn refusal(command: &[&str], file: &Path) -> String {
    let (status, out, err) = said(command, file);
    assert_eq!((status, out.as_str(), err.lines().count()), (Some(2), "", 1), "{err}");
    err
}

/// What is recorded of a program that touches a hot set of 400 pages in each of 100 windows of 10 ms, and of 600 others the
/// next 20: an exact trace, or the faults under a budget in which the hot ones stay.
fn hot_set(exact: bool, budget_pages: u64) -> Vec<u8> {
    const WINDOW_NS: u64 = 10_000_000;
    let header = Header { window_ns: if exact { WINDOW_NS } else { 0 }, budget_pages };
    let (mut bytes, mut now_ns) = (Vec::new(), 0);
    let mut writer = Writer::new(&mut bytes, header).expect("memory takes it");
    let mut push = |time_ns, what| writer.push(&Record { time_ns, what }).expect("memory takes it");
    for window in 0..100 {
        now_ns = window * WINDOW_NS;
        if exact {
            push(now_ns, What::Window);
        }
        let cold = (0..20).map(|i| 400 + (20 * window + i) % 600);
        for page in (0..400).chain(cold) {
            let is_first = if page < 400 { window == 0 } else { window < 30 };
            let fault = if is_first { Fault::FirstTouch } else { Fault::Fetch };
            now_ns += 10_000;
            if exact || is_first || page >= 400 {
                push(now_ns, What::Fault { page, fault, access: Access::Read, service_ns: 5_000 });
            }
        }
    }
    push(now_ns, What::End);
    writer.flush().expect("memory takes it");
    drop(writer);
    bytes
}

#[test]
fn advice_is_not_taken_from_faults_alone() {
    let directory = Directory::new("advice");
    for budget_pages in [u64::MAX, 500] {
        let faults = directory.file("faults.trace", hot_set(false, budget_pages));
        let line = refusal(&["advise"], &faults);
        assert!(line.contains("--exact") && line.contains("advise PID"), "{line}");
        let (status, table, err) = said(&["sim", "--local", "100%"], &faults);
        assert_eq!(status, Some(0), "{err}");
        assert!(table.contains("also with that one, it misses more"), "{table}");
    }
    // Where hot pages are seen, they are what it needs at least.
    let exact = directory.file("exact.trace", hot_set(true, u64::MAX));
    let (status, advice, err) = said(&["advise", "--json"], &exact);
    assert_eq!(status, Some(0), "{err}");
    let advice: serde_json::Value = serde_json::from_str(&advice).expect("JSON");
    let enough = advice["enough"]["local_bytes"].as_u64().expect("a number") / 4096;
    assert!((400..=440).contains(&enough), "{enough} pages: {}", advice["advice"]);
}

#[test]
fn the_last_pages_of_all_are_no_program_s() {
    let directory = Directory::new("last");
    let last = directory.file("last", "0x1000 R\nffffffffffffffff\n");
    for command in [&["sim"][..], &["advise"]] {
        let line = refusal(command, &last);
        assert!(line.contains("line 2") && line.contains("leave that line out"), "{line}");
    }
    let page = (1 << 52) - 1;
    let mut bytes = Vec::new();
    let mut writer = Writer::new(&mut bytes, Header { window_ns: 0, budget_pages: 64 }).expect("memory takes it");
    let what = What::Fault { page, fault: Fault::FirstTouch, access: Access::Read, service_ns: 1 };
    writer.push(&Record { time_ns: 1, what }).expect("memory takes it");
    writer.flush().expect("memory takes it");
    drop(writer);
    let line = refusal(&["sim"], &directory.file("last.trace", bytes));
    assert!(line.contains("garbled"), "{line}");
    // Those before them are taken: programs call into the page of vsyscall.
    let before = directory.file("before", "ffffffffff600000\nffffffffffc00000 R\nffffffffffdfffff R\n");
    for command in [&["sim", "--local", "256K"][..], &["advise"]] {
        let (status, _, err) = said(command, &before);
        assert_eq!(status, Some(0), "{err}");
    }
}

#[test]
fn a_chart_has_a_line_for_each_block_and_scheme() {
    let directory = Directory::new("chart");
    let addresses: String = (0..4000_u64).map(|i| format!("{:x}\n", (i * 7919 % 500) << 12)).collect();
    let file = directory.file("addresses", addresses);
    let plot = directory.0.join("chart.svg");
    let path = plot.to_str().expect("text");
    let draw = |more: &[&str]| {
        let command = [&["sim", "--policy", "lru,opt", "--plot", path][..], more].concat();
        let (status, _, err) = said(&command, &file);
        assert_eq!(status, Some(0), "{err}");
        fs::read_to_string(&plot).expect("drawn").lines().map(str::trim).map(String::from).collect::<Vec<_>>()
    };
    let names = |drawn: &[String]| {
        drawn.iter().filter(|line| line.starts_with("lru") || *line == "opt").cloned().collect::<Vec<_>>()
    };
    assert_eq!(names(&draw(&[])), ["lru", "opt"]);
    assert_eq!(names(&draw(&["--block", "4k,64k"])), ["lru 4k", "lru 64k", "opt"]);
    let all = names(&draw(&["--block", "4k,64k", "--evict", "pre-evict,on-demand"]));
    assert_eq!(all, ["lru on-demand 4k", "lru on-demand 64k", "lru pre-evict 4k", "lru pre-evict 64k", "opt"]);
}

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


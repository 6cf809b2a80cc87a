//! What /proc tells about processes.
//!
//! Invariant: everything here may be out of date when it is read; a process that is gone is an absence, never an error.

use std::fs;

/// The fields of /proc/PID/stat after the name, which may contain anything: state first, then the parent.
fn stat(pid: i32) -> Option<String> {
    let text = fs::read(format!("/proc/{pid}/stat")).ok()?;
    let text = String::from_utf8_lossy(&text);
    Some(text[text.rfind(')')? + 1..].trim_start().to_owned())
}

/// Whether there is such a process.
pub(crate) fn exists(pid: i32) -> bool {
    stat(pid).is_some()
}

/// The state's letter: `T` when stopped by a signal.
pub(crate) fn state(pid: i32) -> Option<char> {
    stat(pid)?.chars().next()
}

/// The parent's id.
pub(crate) fn parent(pid: i32) -> Option<i32> {
    stat(pid)?.split_ascii_whitespace().nth(1)?.parse().ok()
}

/// All that are there now, in no order.
pub(crate) fn all() -> impl Iterator<Item = i32> {
    fs::read_dir("/proc").into_iter().flatten().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// The descendants of a process that are there now, parents before children.
pub(crate) fn descendants(pid: i32) -> Vec<i32> {
    let all: Vec<(i32, i32)> = all().filter_map(|pid| Some((pid, parent(pid)?))).collect();
    let mut found = vec![pid];
    let mut next = 0;
    while let Some(&parent) = found.get(next) {
        found.extend(
            all.iter()
                .filter(|(child, of)| *of == parent && !found.contains(child))
                .map(|(child, _)| *child)
                .collect::<Vec<_>>(),
        );
        next += 1;
    }
    found.remove(0);
    found
}

/// The command line for eyes, or the short name in brackets where there is none.
pub(crate) fn command(pid: i32) -> Option<String> {
    let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let line = String::from_utf8_lossy(&line).trim_end_matches('\0').replace('\0', " ");
    if !line.is_empty() {
        return Some(crate::say::clean(&line));
    }
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    Some(format!("[{}]", crate::say::clean(name.trim_end())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn a_tree_is_found() {
        let me = i32::try_from(std::process::id()).expect("a pid");
        assert!(exists(me) && parent(me).is_some() && command(me).is_some());
        let mut shell = Command::new("sh").args(["-c", "sleep 60 & wait"]).stdout(Stdio::null()).spawn().expect("sh");
        let pid = i32::try_from(shell.id()).expect("a pid");
        let mut tries = 0..200;
        let sleep = loop {
            match descendants(pid).first() {
                Some(&sleep) if command(sleep).is_some_and(|line| line == "sleep 60") => break sleep,
                _ => assert!(tries.next().is_some(), "sleep did not start"),
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        };
        assert_eq!(parent(sleep), Some(pid));
        crate::sys::send(sleep, libc::SIGKILL);
        shell.wait().expect("ended");
        assert!(!exists(pid) && command(pid).is_none() && descendants(pid).is_empty());
    }
}

//! What a userfaultfd's next message will be, and what the thread is at that it tells of: nobody may go on before that is known.
//!
//! The kernel tells of `MADV_DONTNEED` and `MADV_REMOVE` in the same words. Of private memory both give pages up; of shared memory
//! only the latter does. Whoever is told of waits until the message is read, within the very call, whose arguments the kernel
//! shows (`/proc/PID/task/TID/syscall`).

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use spillway_core::{Address, PAGE_BYTES_U64, Span};

use crate::procfs;
use crate::sys::fd::{poll, readable};
use crate::sys::uffd::Uffd;

/// How often threads are looked at while none is seen to wait: between being in the queue and asleep there are a few instructions.
const LOOKS_MAX: usize = 50;

/// See the module's documentation.
pub struct Outlook {
    /// What the kernel says of our descriptor: among it how many faults are not read yet.
    about: Option<File>,
    /// What threads are about to remove, of those that waited to be heard of at the last look, and which they are.
    removals: Vec<(Span, i32)>,
    /// Threads were looked at for what is read next.
    has_looked: bool,
}

impl Outlook {
    /// That of a userfaultfd.
    pub fn of(uffd: &Uffd) -> Self {
        Self {
            about: File::open(format!("/proc/self/fdinfo/{}", uffd.as_raw_fd())).ok(),
            removals: Vec::new(),
            has_looked: false,
        }
    }

    /// What threads are about to remove, as was last seen.
    pub fn removals(&self) -> impl Iterator<Item = Span> {
        self.removals.iter().map(|(span, _)| *span)
    }

    /// The threads that are about to give up the pages of `span` themselves, as was last seen: none of them when it is only shown no more.
    pub fn removers(&self, span: Span) -> Vec<i32> {
        let its = self.removals.iter().filter(|(removed, _)| removed.intersect(span) == Some(span));
        its.map(|(_, thread)| *thread).collect()
    }

    /// How many messages of process `pid` may be read now: faults, or a change of which it is known what it is of. Of a child just
    /// forked it is not known yet which process it is, and one of `vfork` works in its parent's memory: so `relatives` are looked at as
    /// well. Another of them that removes what it has at these very addresses removes the same.
    pub fn look(&mut self, uffd: &Uffd, pid: Option<i32>, relatives: impl FnOnce() -> Vec<i32>) -> usize {
        self.removals.clear();
        self.has_looked = false;
        // They come first.
        let faults = self.faults();
        if faults > 0 {
            // But one may go away meanwhile, as it need not wait any more; then a change takes its place.
            if uffd.is_changing() {
                self.look_at_all(pid, relatives);
            }
            return faults;
        }
        if !poll(&mut [readable(uffd.as_raw_fd())], Some(0)) {
            return 0;
        }
        // It may have got faults since; then the first of those is read.
        self.look_at_all(pid, relatives);
        1
    }

    /// A change was read where only faults were expected, as one of those has gone (a signal does that, or an end of protection): looks
    /// at threads late.
    pub fn look_late(&mut self, pid: Option<i32>, relatives: impl FnOnce() -> Vec<i32>) {
        if !self.has_looked {
            self.look_at_all(pid, relatives);
        }
    }

    fn look_at_all(&mut self, pid: Option<i32>, relatives: impl FnOnce() -> Vec<i32>) {
        self.has_looked = true;
        let is_seen = self.look_at(pid.as_slice()) || self.faults() > 0;
        if !is_seen {
            self.look_at(&relatives());
        }
    }

    /// Notes what threads are about to remove; whether any was seen in a call that is told of.
    fn look_at(&mut self, pids: &[i32]) -> bool {
        for _ in 0..LOOKS_MAX {
            let (mut waiting, mut running) = (false, false);
            for &pid in pids {
                let (waits, runs) = self.look_at_threads(pid);
                (waiting, running) = (waiting | waits, running | runs);
            }
            if waiting || !running {
                return waiting;
            }
        }
        false
    }

    /// How many faults there are that were not read.
    fn faults(&self) -> usize {
        let mut text = [0; 512];
        let read = self.about.as_ref().and_then(|about| about.read_at(&mut text, 0).ok());
        read.and_then(|bytes| pending(&text[..bytes])).unwrap_or(0)
    }

    /// Notes what threads are about to remove: whether any is in a call that is told of, and whether any cannot be looked at.
    fn look_at_threads(&mut self, pid: i32) -> (bool, bool) {
        let (mut waiting, mut running) = (false, false);
        for thread in procfs::threads(pid).unwrap_or_default() {
            let line = fs::read_to_string(format!("/proc/{pid}/task/{thread}/syscall")).unwrap_or_default();
            match call(&line) {
                Some((number, arguments)) => {
                    waiting |= CHANGES.contains(&number);
                    self.removals.extend(removed(number, arguments).map(|span| (span, thread)));
                }
                None => running |= line.starts_with("running"),
            }
        }
        (waiting, running)
    }
}

/// Calls that change mappings.
const CHANGES: [i64; 12] = [
    libc::SYS_madvise,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_mmap,
    libc::SYS_brk,
    libc::SYS_clone,
    libc::SYS_clone3,
    libc::SYS_fork,
    libc::SYS_shmat,
    libc::SYS_shmdt,
    libc::SYS_process_madvise,
    libc::SYS_io_uring_enter,
];

/// What a call removes from shared memory.
fn removed(number: i64, [start, bytes, advice]: [u64; 3]) -> Option<Span> {
    let is_it = number == libc::SYS_madvise && advice == u64::from(libc::MADV_REMOVE.unsigned_abs());
    // The last page is given up whole.
    let end = start.checked_add(bytes)?.checked_next_multiple_of(PAGE_BYTES_U64)?;
    is_it.then_some(Span { start: Address(start), end: Address(end) })
}

/// Reads `/proc/PID/task/TID/syscall`: the call that a thread is in, and its first arguments.
fn call(line: &str) -> Option<(i64, [u64; 3])> {
    let mut words = line.split_ascii_whitespace();
    let number = words.next()?.parse().ok()?;
    let mut argument = || u64::from_str_radix(words.next()?.strip_prefix("0x")?, 16).ok();
    Some((number, [argument()?, argument()?, argument()?]))
}

/// Reads what `/proc/self/fdinfo` says of a userfaultfd: how many faults are not read yet.
fn pending(text: &[u8]) -> Option<usize> {
    let text = std::str::from_utf8(text).ok()?;
    text.lines().find_map(|line| line.strip_prefix("pending:"))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_says_is_read() {
        assert_eq!(pending(b"pos:\t0\nflags:\t02004002\npending:\t3\ntotal:\t4\nAPI:\taa:1:2\n"), Some(3));
        assert_eq!(pending(b"pos:\t0\n"), None);
        assert_eq!(pending(b"pending:\tmany\n"), None);
        let line = "28 0x7f0000001000 0x2000 0x9 0x0 0x0 0x0 0x7ffd 0x7f12\n";
        assert_eq!(call(line), Some((28, [0x7f00_0000_1000, 0x2000, 9])));
        for nothing in ["running\n", "", "-1 0x7ffd 0x7f12\n", "28 0x1", "x 0x1 0x2 0x3"] {
            assert_eq!(call(nothing), None, "{nothing}");
        }
        let span = Span::of_pages(Address(0x1000), 2);
        assert_eq!(removed(libc::SYS_madvise, [0x1000, 0x2000, 9]), Some(span));
        assert_eq!(removed(libc::SYS_madvise, [0x1000, 0x2000, 4]), None);
        assert_eq!(removed(libc::SYS_munmap, [0x1000, 0x2000, 9]), None);
        assert_eq!(removed(libc::SYS_madvise, [u64::MAX, 0x2000, 9]), None);
    }

    #[test]
    fn who_removes_what_is_told() {
        let span = |first: u64, pages| Span::of_pages(Address(first << 12), pages);
        let removals = vec![(span(8, 4), 11), (span(0, 2), 12), (span(8, 1), 13)];
        let outlook = Outlook { about: None, removals, has_looked: true };
        // The kernel tells of parts, one mapping at a time.
        assert_eq!(outlook.removers(span(8, 1)), [11, 13]);
        assert_eq!(outlook.removers(span(9, 3)), [11]);
        assert_eq!(outlook.removers(span(1, 2)), [0; 0]);
        assert_eq!(outlook.removals().collect::<Vec<_>>(), [span(8, 4), span(0, 2), span(8, 1)]);
    }
}

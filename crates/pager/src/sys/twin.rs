//! A process that shares this one's descriptor table, which therefore outlives either of them.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

use super::fd::{checked, poll, readable};
use super::process::pidfd_of_process;
use super::uffd::Uffd;
use crate::procfs;

/// How long after its end a process may still be its children's parent.
const SOON: Duration = Duration::from_micros(200);

/// How often those of its threads that have not ended are hurried: one may have been about to slow down as it was killed.
const HURRY_AGAIN_NS: u64 = 10_000_000;

/// What tells the second that the first's first thread has ended. It is blocked, and waited for.
const TOLD: libc::c_int = libc::SIGUSR2;

/// Which of the two processes this is.
pub enum Twin {
    /// The one that was there before.
    First {
        /// The other.
        pid: i32,
        /// Its stable name, which is readable once it has ended.
        name: OwnedFd,
        /// The first's own, which the other waits for: to be kept.
        own: OwnedFd,
    },
    /// The one that was made: a copy of the first as it was.
    Second(Second),
}

/// Makes another process. What either opens or closes from now on, both do. The second gets no signal that can be kept from it, and
/// leads a session of its own.
///
/// # Errors
/// When the kernel makes none, and where there are other threads, whose locks the second would find held for ever.
pub fn split() -> io::Result<Twin> {
    if std::fs::read_dir("/proc/self/task")?.count() != 1 {
        return Err(io::Error::other("there are threads already"));
    }
    let own = std::process::id().cast_signed();
    let first = pidfd_of_process(own)?;
    let mut second: RawFd = -1;
    let flags = libc::CLONE_FILES | libc::CLONE_PIDFD;
    // SAFETY: as `fork` with one thread: the child runs on in a copy of this memory, in which nobody holds a lock. `second` is
    // writable; no stack is given, as the child has the copy of ours. No signal is sent at its end, which would interrupt calls.
    let pid = checked(unsafe { libc::syscall(libc::SYS_clone, flags, 0, &raw mut second, 0, 0) })?;
    if pid != 0 {
        let pid = i32::try_from(pid).map_err(|_| io::ErrorKind::InvalidData)?;
        // SAFETY: the kernel has just opened it for us (CLONE_PIDFD).
        return Ok(Twin::First { pid, name: unsafe { OwnedFd::from_raw_fd(second) }, own: first });
    }
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: the set is filled before it is read; the other call takes no pointer.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::sigprocmask(libc::SIG_SETMASK, all.as_ptr(), std::ptr::null_mut());
        libc::setsid();
    }
    Ok(Twin::Second(Second { first: (first, own) }))
}

/// The process that was made.
pub struct Second {
    /// The first's stable name, and its number.
    first: (OwnedFd, i32),
}

/// A process that was made so, and has the descriptors for itself: the first has ended. What it has of them as values is not to be used
/// any more, as they are closed by their numbers.
pub struct Left(());

impl Second {
    /// Waits for the end of the first. Once its first thread has ended, which is early on, the others are `hurried` until they have, too:
    /// the process ends with the slowest of them.
    pub fn outlive(self, hurried: impl Fn(i32)) -> Left {
        let (name, pid) = self.first;
        tell_of_the_parents_end();
        // It is this process's parent for as long as it lives, whatever has become of the descriptor.
        while std::os::unix::process::parent_id().cast_signed() == pid {
            if procfs::is_alive(procfs::stat(pid)) {
                wait_to_be_told();
                // That is told a little before it can be seen.
                std::thread::sleep(SOON);
                continue;
            }
            hurried(pid);
            let ended = poll(&mut [readable(name.as_raw_fd())], Some(HURRY_AGAIN_NS));
            std::thread::sleep(if ended { SOON } else { Duration::ZERO });
        }
        // Its number is closed with the others.
        std::mem::forget(name);
        Left(())
    }
}

/// Has the kernel tell this process when the thread that has made it ends (PR_SET_PDEATHSIG(2const): of the thread, not the process).
fn tell_of_the_parents_end() {
    // SAFETY: takes numbers.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, TOLD) };
}

/// Waits for [`TOLD`], which anyone may have sent.
fn wait_to_be_told() {
    let mut told = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: the set is emptied before it is read; what came with the signal is not asked for.
    unsafe {
        libc::sigemptyset(told.as_mut_ptr());
        libc::sigaddset(told.as_mut_ptr(), TOLD);
        libc::sigwaitinfo(told.as_ptr(), std::ptr::null_mut());
    }
}

impl Left {
    /// Closes all descriptors but those that are to be kept, by their numbers and what they are called. Those that are left.
    ///
    /// # Errors
    /// When it cannot be seen which there are.
    pub fn close_all_but(&mut self, is_kept: impl Fn(RawFd, &str) -> bool) -> io::Result<Vec<RawFd>> {
        let list = || std::fs::read_dir("/proc/self/fd");
        let all = list().or_else(|_| {
            // As many may be open as can be: without its standard streams, which Rust has seen to at the start, there is room to look.
            for number in 0..=2 {
                // SAFETY: as below: nothing of this process reads, or says anything.
                unsafe { libc::close(number) };
            }
            list()
        });
        let mut numbers: Vec<(RawFd, bool)> = all?
            .flatten()
            .filter_map(|entry| {
                let number = entry.file_name().to_str()?.parse().ok()?;
                let link = std::fs::read_link(entry.path()).unwrap_or_default();
                Some((number, link.to_str().is_some_and(|link| is_kept(number, link))))
            })
            .collect();
        numbers.retain(|&(number, is_kept)| {
            if !is_kept {
                // SAFETY: the first has ended, and nothing of this process uses a descriptor that it has from there. What was opened here
                // for this list is closed already.
                unsafe { libc::close(number) };
            }
            is_kept
        });
        Ok(numbers.into_iter().map(|(number, _)| number).collect())
    }
}

/// A copy of descriptor `number`, a userfaultfd.
pub fn uffd(number: RawFd) -> Option<Uffd> {
    // SAFETY: it is only duplicated, which fails where it is not open.
    unsafe { BorrowedFd::borrow_raw(number) }.try_clone_to_owned().ok().map(Uffd::from)
}

/// Names this process, as `ps` shows it.
pub fn set_name(name: &CStr) {
    // SAFETY: the kernel copies the name.
    unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) };
}

/// Ends this process, and runs nothing of its own before.
pub fn end() -> ! {
    // SAFETY: takes a number.
    unsafe { libc::_exit(0) }
}

/// Ends a process at once.
pub fn kill(name: BorrowedFd<'_>) {
    // SAFETY: no signal information is given. One that has ended needs no signal.
    unsafe { libc::syscall(libc::SYS_pidfd_send_signal, name.as_raw_fd(), libc::SIGKILL, 0, 0) };
}

/// Waits for the end of a process that [`split`] has made.
pub fn reap(pid: i32) {
    // SAFETY: the status is not asked for. Such a process sends no signal at its end: `__WALL`.
    unsafe { libc::waitpid(pid, std::ptr::null_mut(), libc::__WALL) };
}

//! System calls of the command line: signals, waiting, and what a child does between fork and exec.
//!
//! Invariants: the crate's unsafe code is here and in `bench::sys`; nothing here allocates or locks between fork and exec;
//! [`block_signals`] is called before any other thread exists, so that every thread inherits the mask and signals
//! arrive only where [`next_signal`] asks for them.

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus};
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::time::Duration;

/// Faults of our own code: blocked, they would end us without a core dump, and nobody sends them on purpose.
const SYNCHRONOUS: [i32; 7] =
    [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP, libc::SIGSYS, libc::SIGABRT];

/// SIGPIPE's disposition before the standard library ignored it.
static SIGPIPE_INHERITED: AtomicUsize = AtomicUsize::new(libc::SIG_DFL);
/// SIGSETXID of glibc (nptl/internal-signals.h): the first thread that a process starts installs a handler for it, so an
/// inherited SIG_IGN would reach the target as SIG_DFL. `libc::sigaction` refuses this number.
const SIGSETXID: i32 = 33;
/// SIGSETXID's disposition before any thread was started.
static SIGSETXID_INHERITED: AtomicUsize = AtomicUsize::new(libc::SIG_DFL);
/// Bit n: standard stream n was closed when we were started (the standard library opens /dev/null there).
static STREAMS_CLOSED: AtomicU8 = AtomicU8::new(0);

/// `struct sigaction` as the kernel has it (include/linux/signal_types.h).
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct KernelAction {
    handler: usize,
    flags: libc::c_ulong,
    restorer: usize,
    mask: u64,
}

/// rt_sigaction without the C library, which hides its own signals: sets `new` where there is one, and returns what was.
fn kernel_action(signal: i32, new: Option<KernelAction>) -> KernelAction {
    let mut old = KernelAction::default();
    let new = new.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: both actions have the kernel's layout and are valid or null for the call; the last argument is the mask's
    // size. The call is async-signal-safe. Who passes a handler answers for it; here only SIG_DFL and SIG_IGN are.
    unsafe { libc::syscall(libc::SYS_rt_sigaction, signal, new, &raw mut old, size_of::<u64>()) };
    old
}

/// Runs before the standard library changes what the target must inherit.
extern "C" fn remember_inheritance() {
    SIGPIPE_INHERITED.store(kernel_action(libc::SIGPIPE, None).handler, Ordering::Relaxed);
    SIGSETXID_INHERITED.store(kernel_action(SIGSETXID, None).handler, Ordering::Relaxed);
    let mut closed = 0;
    for stream in 0..3u8 {
        // SAFETY: F_GETFD only asks whether the descriptor is open.
        if unsafe { libc::fcntl(i32::from(stream), libc::F_GETFD) } == -1 {
            closed |= 1 << stream;
        }
    }
    STREAMS_CLOSED.store(closed, Ordering::Relaxed);
}

// SAFETY: the loader calls what this section lists, with the C ABI, before main; the function needs nothing that main
// sets up. Nothing else runs earlier than the standard library's own start-up.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_START: extern "C" fn() = remember_inheritance;

/// What the target must get as we got it.
#[derive(Clone, Copy)]
pub(crate) struct Inherited {
    mask: libc::sigset_t,
    sigchld: libc::sighandler_t,
}

fn asynchronous_signals() -> libc::sigset_t {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigfillset initialises the whole set; sigdelset gets valid signal numbers.
    unsafe {
        libc::sigfillset(set.as_mut_ptr());
        for signal in SYNCHRONOUS {
            libc::sigdelset(set.as_mut_ptr(), signal);
        }
        set.assume_init()
    }
}

/// Blocks every signal but those our own faults raise, and makes ended children wait for us.
pub(crate) fn block_signals() -> Inherited {
    let set = asynchronous_signals();
    let mut mask = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: both sets are valid; `mask` is written when the call succeeds, which it does for SIG_BLOCK. Setting a
    // disposition to SIG_DFL installs no code.
    unsafe {
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, mask.as_mut_ptr());
        let sigchld = libc::signal(libc::SIGCHLD, libc::SIG_DFL);
        Inherited { mask: mask.assume_init(), sigchld }
    }
}

/// A signal that arrived, and who sent it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Caught {
    /// Its number.
    pub(crate) number: i32,
    /// `si_code`: positive when the kernel sent it (a terminal key, a timer), otherwise a process did.
    pub(crate) code: i32,
    /// The value sent along with `sigqueue`.
    value: usize,
}

impl Caught {
    /// A signal as it would arrive, for tests.
    #[cfg(test)]
    pub(crate) fn new(number: i32, code: i32) -> Self {
        Self { number, code, value: 0 }
    }
}

/// Waits for the next signal; `None` when the time is over. Without a limit it waits for ever.
pub(crate) fn next_signal(limit: Option<Duration>) -> Option<Caught> {
    let set = asynchronous_signals();
    let deadline = limit.map(|limit| std::time::Instant::now() + limit);
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(std::time::Instant::now()));
        let left = left.map(|left| libc::timespec {
            tv_sec: libc::time_t::try_from(left.as_secs()).unwrap_or(libc::time_t::MAX),
            tv_nsec: left.subsec_nanos().into(),
        });
        let limit = left.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
        // SAFETY: set, info and limit are valid or null for the duration of the call; zeroed is a valid siginfo.
        let (number, info) =
            unsafe { (libc::sigtimedwait(&raw const set, info.as_mut_ptr(), limit), info.assume_init()) };
        if number > 0 {
            // SAFETY: for SI_QUEUE the kernel filled the value; otherwise these bytes are initialised and unused.
            let value = unsafe { info.si_value() }.sival_ptr as usize;
            return Some(Caught { number, code: info.si_code, value });
        }
        if io::Error::last_os_error().raw_os_error() != Some(libc::EINTR) {
            return None;
        }
    }
}

/// Whether a signal asks a program to end.
pub(crate) fn wants_end(signal: i32) -> bool {
    matches!(signal, libc::SIGINT | libc::SIGTERM | libc::SIGHUP | libc::SIGQUIT)
}

/// Sends a caught signal on, with its value if it has one.
pub(crate) fn forward(pid: i32, caught: Caught) {
    if caught.code == libc::SI_QUEUE {
        let value = libc::sigval { sival_ptr: caught.value as *mut libc::c_void };
        // SAFETY: the value is only carried; this process never dereferences it.
        unsafe { libc::sigqueue(pid, caught.number, value) };
    } else {
        send(pid, caught.number);
    }
}

/// Sends a signal; a process that is gone or out of reach is not an error here.
pub(crate) fn send(pid: i32, signal: i32) {
    if pid > 0 {
        // SAFETY: kill touches no memory of ours; pid names one process, never a group.
        unsafe { libc::kill(pid, signal) };
    }
}

/// Makes whoever loses its parent our child, if it is of our children or theirs (`PR_SET_CHILD_SUBREAPER`).
pub(crate) fn adopt_orphans() {
    // SAFETY: no pointers.
    unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1) };
}

/// Sends a signal to a process group that a child of ours leads; one that is gone is not an error here.
pub(crate) fn send_group(leader: i32, signal: i32) {
    if leader > 1 {
        // SAFETY: kill touches no memory of ours; the number names one group, neither ours (0) nor everybody (-1).
        unsafe { libc::kill(-leader, signal) };
    }
}

/// What happened to a child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// It ended; its exit status, or the signal that ended it.
    Ended(ExitStatus),
    /// It was stopped by this signal.
    Stopped(i32),
    /// It goes on.
    Continued,
}

/// The next change of a child's state that was not reported yet, without waiting.
pub(crate) fn child_change(pid: i32) -> Option<Change> {
    let mut status = 0;
    let flags = libc::WNOHANG | libc::WUNTRACED | libc::WCONTINUED;
    // SAFETY: status is valid for writes.
    if unsafe { libc::waitpid(pid, &raw mut status, flags) } != pid {
        return None;
    }
    let status = ExitStatus::from_raw(status);
    Some(match status.stopped_signal() {
        Some(signal) => Change::Stopped(signal),
        None if status.continued() => Change::Continued,
        None => Change::Ended(status),
    })
}

/// Lets the child inherit what we inherited, and ties its life to this thread.
pub(crate) fn prepare_target(command: &mut Command, inherited: Inherited) {
    let parent = std::process::id();
    let sigpipe = SIGPIPE_INHERITED.load(Ordering::Relaxed);
    let sigsetxid = KernelAction { handler: SIGSETXID_INHERITED.load(Ordering::Relaxed), ..KernelAction::default() };
    let closed = STREAMS_CLOSED.load(Ordering::Relaxed);
    let prepare = move || {
        // SAFETY: only async-signal-safe calls, no memory but copied values. The dispositions are SIG_DFL or SIG_IGN:
        // exec keeps no handlers, so we inherited none.
        unsafe {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            if u32::try_from(libc::getppid()) != Ok(parent) {
                libc::_exit(1); // The parent died before the line above took effect.
            }
            libc::signal(libc::SIGPIPE, sigpipe);
            libc::signal(libc::SIGCHLD, inherited.sigchld);
            kernel_action(SIGSETXID, Some(sigsetxid));
            for stream in 0..3u8 {
                if closed & 1 << stream != 0 {
                    libc::close(stream.into());
                }
            }
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const inherited.mask, std::ptr::null_mut());
        }
        Ok(())
    };
    // SAFETY: see inside; the closure does nothing that is forbidden between fork and exec.
    unsafe { command.pre_exec(prepare) };
}

/// Gives the child a session of its own, out of reach of the terminal's keys, and `socket` to inherit.
pub(crate) fn prepare_pager(command: &mut Command, socket: RawFd) {
    let prepare = move || {
        // SAFETY: two async-signal-safe calls; clearing FD_CLOEXEC concerns the child's own table.
        let cleared = unsafe {
            libc::setsid();
            libc::fcntl(socket, libc::F_SETFD, 0)
        };
        if cleared == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
    };
    // SAFETY: see inside; the closure does nothing that is forbidden between fork and exec.
    unsafe { command.pre_exec(prepare) };
}

/// Takes over the socket which [`prepare_pager`] left to us, and closes every other inherited descriptor but the
/// standard streams: the pager may outlive the command and must not hold its pipes open.
pub(crate) fn take_inherited_socket(socket: RawFd) -> io::Result<UnixStream> {
    if socket < 3 {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    let number = u32::try_from(socket).unwrap_or(3);
    // SAFETY: called first in the process, before anything that owns a descriptor exists, so no owner loses one; from
    // here on the stream is the socket's only owner. A failed fcntl shows that it is not open.
    unsafe {
        if libc::fcntl(socket, libc::F_SETFD, libc::FD_CLOEXEC) == -1 {
            return Err(io::Error::last_os_error());
        }
        if number > 3 {
            libc::syscall(libc::SYS_close_range, 3u32, number - 1, 0u32);
        }
        libc::syscall(libc::SYS_close_range, number + 1, u32::MAX, 0u32);
        libc::prctl(libc::PR_SET_NAME, c"spillway-pager".as_ptr());
        Ok(UnixStream::from_raw_fd(socket))
    }
}

/// Forks a child that, for each byte read from `socket`, takes the signal of that number from those it was sent, and
/// answers 1 if there was one, otherwise 0. It ends when the other end is closed. Signals must be blocked.
pub(crate) fn fork_witness(socket: &UnixStream) -> io::Result<()> {
    let socket = socket.as_raw_fd();
    // SAFETY: no other thread runs yet, so no lock is held across the fork; the child makes system calls on its own
    // stack only and never returns.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => witness(socket),
        _ => Ok(()),
    }
}

fn witness(socket: RawFd) -> ! {
    let mut byte = 0u8;
    // SAFETY: system calls on descriptors of this process and on values on this stack, which outlive the calls. Closing
    // every other descriptor harms nobody: no destructor runs in this process.
    unsafe {
        libc::prctl(libc::PR_SET_NAME, c"spillway-group".as_ptr());
        let socket = libc::dup2(socket, 0);
        libc::syscall(libc::SYS_close_range, 1u32, u32::MAX, 0u32);
        while libc::read(socket, (&raw mut byte).cast(), 1) == 1 {
            let mut only = MaybeUninit::<libc::sigset_t>::uninit();
            libc::sigemptyset(only.as_mut_ptr());
            libc::sigaddset(only.as_mut_ptr(), byte.into());
            let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
            byte = u8::from(libc::sigtimedwait(only.as_ptr(), std::ptr::null_mut(), &raw const now) > 0);
            libc::write(socket, (&raw const byte).cast(), 1);
        }
        libc::_exit(0)
    }
}

/// Sends what is written to standard error to nowhere.
pub(crate) fn silence_stderr() {
    if let Ok(null) = std::fs::OpenOptions::new().write(true).open("/dev/null") {
        // SAFETY: both descriptors are open; dup2 replaces 2 atomically.
        unsafe { libc::dup2(null.as_raw_fd(), 2) };
    }
}

/// Runs `act` with the signal unblocked and at its default disposition, which normally stops or ends us in `raise`.
fn suffer(signal: i32) {
    let mut only = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: the set is initialised by sigemptyset; SIG_DFL installs no code; the previous state is put back.
    unsafe {
        libc::sigemptyset(only.as_mut_ptr());
        libc::sigaddset(only.as_mut_ptr(), signal);
        let old = libc::signal(signal, libc::SIG_DFL);
        libc::raise(signal);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, only.as_ptr(), std::ptr::null_mut());
        libc::pthread_sigmask(libc::SIG_BLOCK, only.as_ptr(), std::ptr::null_mut());
        if old != libc::SIG_ERR {
            libc::signal(signal, old);
        }
    }
}

/// Stops this process by `signal` until it is continued. Returns at once where the kernel ignores the signal, as it
/// does for a process group that no shell looks after.
pub(crate) fn stop_self(signal: i32) {
    suffer(signal);
}

/// Ends this process by `signal`, without a core dump.
pub(crate) fn die_of(signal: i32) {
    // SAFETY: only clears the dumpable flag.
    unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0) };
    suffer(signal);
}

/// Whether this process leads its session, so that a hang-up reaches it alone.
pub(crate) fn is_session_leader() -> bool {
    // SAFETY: takes and returns numbers.
    unsafe { libc::getsid(0) == libc::getpid() }
}

/// Locks a file against other processes that do so, for as long as it is open here; false when another has it.
pub(crate) fn lock(file: &File) -> io::Result<bool> {
    // SAFETY: flock only takes a descriptor, which is open.
    if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } == 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    if error.kind() == io::ErrorKind::WouldBlock { Ok(false) } else { Err(error) }
}

/// The effective user.
pub(crate) fn effective_uid() -> u32 {
    // SAFETY: takes and returns numbers.
    unsafe { libc::geteuid() }
}

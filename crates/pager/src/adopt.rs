//! Adoption: an agent and a userfaultfd for a process that already runs.
//!
//! One thread of the target is stopped for two system calls: a mapping and a `clone`. Everything else happens in the
//! threads that this makes, while the target runs on:
//!
//! 1. the *helper* shares the target's descriptor table; it makes the memory file, the userfaultfd and a socket pair,
//!    of which we take copies;
//! 2. the *agent* is made by the helper with a descriptor table of its own, keeps of it the userfaultfd and its end of the
//!    socket, and runs the code of [`crate::sys::agent`];
//! 3. the helper closes its descriptors and ends.
//!
//! A target that later closes all of its descriptors, or whose limit is low, thus keeps its agent; and `fork` does not
//! copy anything of ours (MADV_DONTFORK).
//!
//! [`checks`] refuses before anything is touched; [`borrowed`] is the thread that is stopped; [`setup`] is the helper at work; [`leaving`]
//! takes an agent out again.

mod borrowed;
mod checks;
mod leaving;
mod setup;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use spillway_core::{Address, PAGE_BYTES_U64, Span};

use crate::error::Error;
use crate::estate::Found;
use crate::procfs;
use crate::restart;
use crate::stray;
use crate::sys::agent::{BATCH_PAGES, CODE_BYTES, CONTROL_BYTES, Layout, Memory};
use crate::sys::detour::Detour;
use crate::sys::epoll::Ear;
use crate::sys::fd::{Heard, receive_byte};
use crate::sys::process::{pidfd_of_thread, take_fd};
use crate::sys::ptrace::{CallError, Registers, STOP_DEADLINE_NS, Seized, let_go_of_strays};
use crate::sys::sched::Hurried;
use crate::sys::uffd::Uffd;

use borrowed::Borrowed;
use checks::{THREAD_TRIES, Vdso, quiet_thread, unadopted, vdso};
pub use checks::{examine, keeps_seized, untraced};
pub use leaving::{end_agent_left_alone, end_stray};
use setup::Setup;

/// The name of the agent's thread and of its memory file: how an adopted process is recognised.
pub const NAME: &str = "spillway-agent";

const STAGING_BYTES: u64 = BATCH_PAGES as u64 * PAGE_BYTES_U64;
const SCRATCH_BYTES: u64 = PAGE_BYTES_U64;
/// The instruction `syscall`.
const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// Of the scratch page, what adoption itself does not use.
const SPARE_OFFSET: u64 = 2048;
/// How long the thread of a process that is served already may take to stop: one that faults waits for us, who wait for it.
const FORKED_STOP_NS: u64 = 50_000_000;

/// An agent in place.
pub struct Agent {
    /// The process.
    pub pid: i32,
    /// The agent's thread.
    pub thread: i32,
    /// The same thread's number in the target's own pid namespace, which faults are told with.
    pub known_as: i32,
    /// Listens to the next while it lives.
    pub ear: Option<Ear>,
    /// Our end of the socket: a byte starts a list, a byte comes back.
    pub socket: OwnedFd,
    /// The number of its own end in its table.
    pub orders: i32,
    /// The control pages.
    pub memory: Memory,
    /// Where things are in the target.
    pub layout: Layout,
    /// The userfaultfd's number in the agent's table.
    pub uffd: i32,
    /// How long a thread of the target was stopped.
    pub pause_ns: u64,
    /// Held while the agent must not run under a seccomp filter of the target, present or future.
    pub seized: Option<Seized>,
    /// What it keeps open for another pager, if it does.
    pub kept: Option<Kept>,
    /// If the kernel is to merge no more when it leaves: but for this.
    pub unmerges: Option<Vec<Span>>,
    instruction: u64,
}

/// Descriptors in an agent's table, by which another pager finds it.
#[derive(Clone, Copy, Debug)]
pub struct Kept {
    /// Our end of the socket. While it is open there, the agent waits for whoever takes it.
    pub socket: i32,
    /// The file of the control pages.
    pub memory: i32,
}

/// The userfaultfd that a process has already, if it has one.
#[derive(Clone, Copy)]
pub enum Given<'a> {
    /// None: it is made.
    Nothing,
    /// The kernel made it when the process was forked from one under management.
    Forked(&'a Uffd),
    /// The process made it, and handed it over with this memory. What it may not tell of is made impossible there: children
    /// do not get it, and its mappings stay.
    Handed(&'a Uffd, &'a [Span]),
}

/// Puts an agent into `pid`; a userfaultfd that is not `given` is made. With a `vault`, the agent keeps that open, and waits for
/// another pager should ours die. `while_stopped` is called while one thread of the process, which may be its only one, is
/// stopped.
///
/// Must be called from the thread that will later call [`Agent::leave`].
///
/// # Errors
/// As [`Error`] says; the target is as it was then.
pub fn adopt(
    pid: i32,
    given: Given<'_>,
    kill_on_death: bool,
    vault: Option<BorrowedFd<'_>>,
    while_stopped: impl FnOnce(),
) -> Result<(Agent, Option<Uffd>), Error> {
    let adopted = put_agent(pid, given, kill_on_death, vault, while_stopped);
    if adopted.is_err() {
        let_go_of_strays(pid);
    }
    adopted
}

fn put_agent(
    pid: i32,
    given: Given<'_>,
    kill_on_death: bool,
    vault: Option<BorrowedFd<'_>>,
    while_stopped: impl FnOnce(),
) -> Result<(Agent, Option<Uffd>), Error> {
    stray::end(pid)?;
    // A program may put a filter on all of its threads at any time later (SECCOMP_FILTER_FLAG_TSYNC), ours among them.
    let seccomp = keeps_seized();
    let (thread, vdso, mut first) = seize_one(pid, seccomp)?;
    let explain = |error| explain(pid, error);
    if seccomp {
        first.exempt();
    }
    // Some kernels let only a tracer write there.
    let detour = Detour::new(procfs::living_thread(pid).unwrap_or(thread), vdso.span);
    // Whose lock it was before us may have adopted it since we looked.
    unadopted(pid)?;

    let slept_ns = restart::asleep_ns(pid, thread);
    // On a busy machine each step of ours would wait for a turn of the target's.
    let _hurried = Hurried::new(0);
    let deadline_ns = if matches!(given, Given::Nothing) { STOP_DEADLINE_NS } else { FORKED_STOP_NS };
    let mut borrowed = Borrowed::stop(pid, first, &vdso, detour, deadline_ns)?;
    let begun = borrowed.make_helper();
    while_stopped();
    let spare = begun.as_ref().ok().map(|(staging, _)| staging.plus_pages(BATCH_PAGES as u64).plus_bytes(SPARE_OFFSET));
    let (detour, pause_ns) = borrowed.let_go(slept_ns, spare).map_err(explain)?;

    let (staging, helper) = begun.map_err(explain)?;
    let mut setup = Setup::new(pid, helper, vdso.instruction, staging, detour).map_err(explain)?;
    let result = setup.run(given, kill_on_death, vault, seccomp);
    setup.finish(result.is_err())?;
    let (mut agent, uffd) = result?;
    agent.pause_ns = pause_ns;
    Ok((agent, uffd))
}

/// Seizes a thread to borrow.
fn seize_one(pid: i32, may_exempt: bool) -> Result<(i32, Vdso, Seized), Error> {
    let mut refused = None;
    for _ in 0..THREAD_TRIES {
        examine(pid)?;
        let thread = quiet_thread(pid)?;
        let filtered = procfs::status_field(thread, "Seccomp").is_some_and(|mode| mode != "0");
        if filtered && !may_exempt {
            return Err(Error::Seccomp(pid));
        }
        let seized = vdso(pid, thread).and_then(|vdso| {
            let first = Seized::new(thread).map_err(|error| match error.raw_os_error() {
                Some(libc::ESRCH) => Error::NoSuchProcess(pid),
                _ => Error::NoPermission(pid),
            })?;
            Ok((thread, vdso, first))
        });
        // What is told of memory is that of the first thread, or of one that may be ending just now.
        let goes_on = procfs::thread_stat(pid, thread).is_ok_and(|thread| !thread.is_ending);
        if seized.is_ok() || goes_on && procfs::is_alive(procfs::stat(pid)) {
            return seized;
        }
        refused = seized.err().filter(|_| goes_on);
    }
    Err(refused.unwrap_or(Error::Ended(pid)))
}

impl Agent {
    /// Where in the target there is a system call.
    pub fn instruction(&self) -> u64 {
        self.instruction
    }

    /// The agent that another pager has left behind.
    pub fn again(found: &Found, socket: OwnedFd, orders: i32, memory: Memory) -> Self {
        Self {
            pid: found.pid,
            thread: found.thread,
            known_as: found.known_as,
            ear: None,
            socket,
            orders,
            memory,
            layout: found.layout,
            uffd: found.uffd,
            pause_ns: 0,
            seized: None,
            kept: Some(Kept { socket: found.socket, memory: found.memory }),
            unmerges: None,
            instruction: found.instruction,
        }
    }

    /// What is at the other end of this socket, as if it were `thread` of a process: it has no order left unread.
    #[cfg(test)]
    pub fn of_test(thread: i32, socket: OwnedFd, memory: Memory) -> Self {
        let [staging, scratch, control, code] = [Address(0); 4];
        Self {
            pid: thread,
            thread,
            known_as: thread,
            ear: None,
            socket,
            orders: -1,
            memory,
            layout: Layout { staging, scratch, control, code },
            uffd: -1,
            pause_ns: 0,
            seized: None,
            kept: None,
            unmerges: None,
            instruction: 0,
        }
    }

    /// Takes back the order that it was given; false if it has begun.
    pub fn take_back_order(&self) -> bool {
        // Before 6.9 only the process's own table can be reached.
        let taken = pidfd_of_thread(self.thread).and_then(|pidfd| take_fd(pidfd.as_fd(), self.orders));
        taken.is_ok_and(|socket| receive_byte(socket.as_fd()) == Heard::Byte)
    }

    /// The staging area.
    pub fn staging(&self) -> Span {
        Span::of_pages(self.layout.staging, BATCH_PAGES as u64)
    }

    /// The one mapping of ours that looks like the target's own memory.
    pub fn staging_and_scratch(&self) -> Span {
        Span::of_pages(self.layout.staging, BATCH_PAGES as u64 + SCRATCH_BYTES / PAGE_BYTES_U64)
    }
}

fn pieces(layout: &Layout) -> [(Address, u64); 3] {
    [(layout.staging, STAGING_BYTES + SCRATCH_BYTES), (layout.code, CODE_BYTES), (layout.control, CONTROL_BYTES)]
}

/// The registers of a thread that has just made a call there.
fn behind(instruction: u64, registers: &Registers) -> Registers {
    Registers { rip: instruction + SYSCALL.len() as u64, orig_rax: u64::MAX, ..*registers }
}

fn explain(pid: i32, error: CallError) -> Error {
    match error {
        CallError::Ended => Error::Ended(pid),
        CallError::Stuck => Error::DidNotStop(pid),
        CallError::Refused(error) => Error::System { what: "tracing the target", error },
        CallError::Answered(error) => match error.raw_os_error() {
            Some(libc::EMFILE | libc::ENFILE) => Error::NoRoom { pid, what: "file descriptors" },
            Some(libc::EAGAIN) => Error::NoRoom { pid, what: "threads" },
            Some(libc::ENOMEM) => Error::NoRoom { pid, what: "address space" },
            _ => Error::System { what: "a system call in the target", error },
        },
    }
}

fn bits(value: i32) -> u64 {
    u64::from(value.cast_unsigned())
}

//! What can go wrong, and what the user may do about it.

use std::fmt;
use std::io;

use spillway_core::Span;
use spillway_core::size::Bytes;

use crate::doctor::CAPABILITIES;

/// Why something could not be done; the text tells the user what to do about it.
#[derive(Debug)]
pub enum Error {
    /// There is no such process.
    NoSuchProcess(i32),
    /// It is a kernel thread, or has ended and waits to be reaped.
    NoMemoryOfItsOwn(i32),
    /// We may not trace it.
    NoPermission(i32),
    /// It is a 32-bit program.
    Not64Bit(i32),
    /// Someone traces it already.
    Traced {
        /// The target.
        pid: i32,
        /// Who traces it.
        tracer: i32,
        /// That program's name.
        name: String,
    },
    /// An agent is in it already.
    AlreadyAdopted(i32),
    /// The kernel is too old, or lacks what such a kernel has.
    KernelTooOld {
        /// What runs here, and what its userfaultfd offers if that tells more.
        found: String,
    },
    /// The kernel lacks a part of userfaultfd.
    NoUserfaultfd(io::Error),
    /// The kernel has userfaultfd, and gives a target none.
    UserfaultfdForbidden {
        /// Why `/dev/userfaultfd` could not be opened for it.
        device: io::Error,
    },
    /// Nobody may trace anybody.
    PtraceForbidden,
    /// Fork events are refused.
    NoForkEvents,
    /// A seccomp filter forbids what adoption needs, and may not be suspended.
    Seccomp(i32),
    /// The target has no room for what adoption needs.
    NoRoom {
        /// The target.
        pid: i32,
        /// What it ran out of.
        what: &'static str,
    },
    /// The target did not stop.
    DidNotStop(i32),
    /// A forked child's userfaultfd belongs to another process.
    OtherMemory(i32),
    /// The userfaultfd that a process handed over is another's.
    NotItsMemory(i32),
    /// Shared memory that a process handed over cannot be managed.
    NotSharable {
        /// Whose.
        pid: i32,
        /// Where.
        span: Span,
    },
    /// The kernel cannot keep mappings in their place.
    NoSeals,
    /// It cannot be seen which pages of shared memory may leave.
    NoSharedMemory(io::Error),
    /// The target ended while it was adopted, or called `exec`.
    Ended(i32),
    /// The machine refused something that a pager needs.
    System {
        /// What was tried.
        what: &'static str,
        /// What the kernel said.
        error: io::Error,
    },
    /// What a dead pager has left cannot be read.
    Unreadable(spillway_core::book::Unreadable),
    /// What a dead pager has left is not what this version can take over.
    Foreign {
        /// The target.
        pid: i32,
        /// Why not.
        why: String,
    },
    /// The kernel merges no pages of processes.
    NoMerging(io::Error),
    /// The kernel could merge pages, and its thread that does so is switched off.
    MergingOff,
    /// Its pager lives.
    Managed {
        /// The target.
        pid: i32,
        /// Its pager.
        pager: i32,
    },
    /// Another process has the right to take it over, and does not serve yet.
    BeingTakenOver(i32),
    /// Another user's pager manages the target, or did and died.
    OthersPager(i32),
    /// A minimum is above its maximum.
    MinAboveMax,
    /// More local memory is promised than there is.
    TooManyPromises {
        /// All minima together, in bytes.
        promised: u64,
        /// The budget.
        budget: u64,
    },
    /// No more could be taken over.
    TooManyTargets(usize),
    /// It is not this pager's.
    NotManaged(i32),
    /// It is being let go already.
    Leaving,
    /// The pager has let go of everything, and ends.
    Ending,
    /// Pages could not be brought home.
    NoRoomAtHome {
        /// How many are still outside.
        pages: u64,
    },
}

impl Error {
    /// Whether what has kept a process from being adopted may be over by and by.
    pub(crate) fn may_pass(&self) -> bool {
        matches!(self, Self::DidNotStop(_) | Self::NoRoom { .. } | Self::Traced { .. })
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoSuchProcess(pid) => write!(f, "there is no process {pid}; `ps -e` lists those that run"),
            Self::NoMemoryOfItsOwn(pid) => {
                write!(f, "process {pid} has no memory of its own (a kernel thread or a zombie); choose another")
            }
            Self::NoPermission(pid) => write!(
                f,
                "no permission to adopt process {pid}; run as root or give spillway CAP_SYS_PTRACE \
                 (`spillway doctor` shows how)"
            ),
            Self::Not64Bit(pid) => {
                write!(f, "process {pid} is a 32-bit program; only 64-bit x86 programs can be adopted")
            }
            Self::Traced { pid, tracer, name } => {
                write!(
                    f,
                    "process {pid} is being traced by {name} (pid {tracer}); have that detach first, then try again"
                )
            }
            Self::AlreadyAdopted(pid) => write!(
                f,
                "process {pid} is adopted already; `spillway resize {pid} SIZE` changes its budget, \
                 `spillway detach {pid}` releases it"
            ),
            Self::KernelTooOld { found } => {
                write!(f, "this kernel ({found}) lacks UFFDIO_MOVE; boot Linux 6.8 or newer")
            }
            Self::NoUserfaultfd(error) => write!(
                f,
                "the kernel gives no usable userfaultfd ({error}); `spillway doctor` shows what is missing and how to mend it"
            ),
            Self::UserfaultfdForbidden { device } => write!(
                f,
                "the kernel gives the target no userfaultfd (/dev/userfaultfd: {device}); run as root, or: sudo chmod 666 \
                 /dev/userfaultfd, or: sudo sysctl vm.unprivileged_userfaultfd=1"
            ),
            Self::PtraceForbidden => write!(
                f,
                "kernel.yama.ptrace_scope is 3: until the next boot nobody, root neither, may adopt a process; take that out of \
                 /etc/sysctl.conf and /etc/sysctl.d, and reboot"
            ),
            Self::NoForkEvents => write!(
                f,
                "the kernel refuses fork events without CAP_SYS_PTRACE, and children would read zeros; run as root or \
                 `setcap {CAPABILITIES}` the spillway binary"
            ),
            Self::Seccomp(pid) => write!(
                f,
                "process {pid} runs under a seccomp filter that only CAP_SYS_ADMIN may suspend; run spillway as root"
            ),
            Self::NoRoom { pid, what } => {
                write!(
                    f,
                    "process {pid} has no {what} left for adoption; raise that limit (`prlimit --pid {pid}`) and try again"
                )
            }
            Self::DidNotStop(pid) => write!(
                f,
                "process {pid} did not stop within 2 s (it waits for a device, see its state in `ps`); try again later"
            ),
            Self::OtherMemory(pid) => {
                write!(f, "process {pid} is not the forked child that it was taken for; nothing was changed, try again")
            }
            Self::NotItsMemory(pid) => write!(
                f,
                "the userfaultfd that process {pid} handed over is not of its own memory; the process whose memory it is must \
                 connect itself"
            ),
            Self::NotSharable { pid, span } => write!(
                f,
                "the memory of process {pid} at {:#x}-{:#x} cannot be managed as shared memory: it is in huge pages, reaches \
                 beyond its file, or is another userfaultfd's",
                span.start.0, span.end.0
            ),
            Self::NoSeals => write!(
                f,
                "a userfaultfd that is handed over does not tell of all changes of mappings, and this kernel cannot forbid them \
                 (mseal); boot Linux 6.10 or newer"
            ),
            Self::Ended(pid) => write!(
                f,
                "process {pid} ended, or became another program, while it was being adopted; if `ps -p {pid}` shows it, try again"
            ),
            Self::System { what, error } => {
                let remedy = match error.raw_os_error() {
                    Some(libc::EMFILE) => "raise the limit of open files (`ulimit -n`), and try again",
                    _ => "`spillway doctor` shows what this machine lacks",
                };
                write!(f, "{what} failed: {error}; {remedy}")
            }
            Self::Unreadable(why) => write!(
                f,
                "what its dead pager has left cannot be taken over: {why}; the process waits for ever: end it (`kill -9`)"
            ),
            Self::Foreign { pid, why } => write!(
                f,
                "what the dead pager of process {pid} has left cannot be taken over: {why}; the process waits on"
            ),
            Self::NoMerging(error) => write!(
                f,
                "this kernel merges no equal pages of programs ({error}); boot Linux 6.4 or newer with CONFIG_KSM=y, or share none"
            ),
            Self::NoSharedMemory(error) => write!(
                f,
                "shared memory cannot be managed here ({error}): that takes Linux 6.11 or newer with CONFIG_DEBUG_INFO_BTF=y and \
                 CONFIG_PROC_PAGE_MONITOR=y, and root; leave --shared-memory out, or make guest memory private"
            ),
            Self::MergingOff => f.write_str(
                "the kernel's merging of equal pages is switched off on this machine; switch it on \
                 (`echo 1 | sudo tee /sys/kernel/mm/ksm/run`), or share none",
            ),
            Self::Managed { pid, pager } => write!(
                f,
                "process {pid} is managed by process {pager}, which runs; `spillway ps` shows it, if it is yours"
            ),
            Self::BeingTakenOver(pid) => {
                write!(f, "another pager is about to take over process {pid}; `spillway ps` shows it once it does")
            }
            Self::OthersPager(pid) => write!(
                f,
                "process {pid} is managed by another user's pager, or was until that died: type this as that user"
            ),
            Self::MinAboveMax => f.write_str("the minimum is above the maximum: give a smaller min, or a larger max"),
            Self::TooManyPromises { promised, budget } => write!(
                f,
                "the minima of all targets would be {} of a budget of {}: give a smaller minimum, or a larger budget",
                Bytes(*promised),
                Bytes(*budget)
            ),
            Self::TooManyTargets(most) => write!(
                f,
                "{most} processes are managed already, and of no more could another pager take over: let one go first, or add \
                 --no-daemon for a pager of its own"
            ),
            Self::NotManaged(pid) => write!(f, "process {pid} is not managed here; `spillway ps` shows those that are"),
            Self::Leaving => {
                f.write_str("its pages are on their way home already; `spillway ps` shows it until they are")
            }
            Self::Ending => {
                f.write_str("this pager is ending and takes nobody in any more: start another one, then try again")
            }
            Self::NoRoomAtHome { pages } => write!(
                f,
                "{pages} pages could not come home because the target's memory limit is reached; it stays managed: raise \
                 the limit of its cgroup, then detach again"
            ),
        }
    }
}

impl std::error::Error for Error {}

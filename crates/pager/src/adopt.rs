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

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use spillway_core::{Address, PAGE_BYTES_U64, Span};

use crate::error::Error;
use crate::procfs;
use crate::restart;
use crate::sys::agent::{BATCH_PAGES, CODE_BYTES, CONTROL_BYTES, Layout, Memory};
use crate::sys::clock::now_ns;
use crate::sys::fd::{Rights, send_fd};
use crate::sys::process;
use crate::sys::ptrace::{CallError, Registers, STOP_DEADLINE_NS, Seized};
use crate::sys::sched::{Class, Hurried, set_class};
use crate::sys::uffd::{self, Uffd};

/// The name of the agent's thread and of its memory file: how an adopted process is recognised.
pub const NAME: &str = "spillway-agent";

const STAGING_BYTES: u64 = BATCH_PAGES as u64 * PAGE_BYTES_U64;
const SCRATCH_BYTES: u64 = PAGE_BYTES_U64;
/// The instruction `syscall`.
const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// Of the scratch page, what adoption itself does not use.
const SPARE_OFFSET: u64 = 2048;
/// How long the thread of a forked child may take to stop: one that faults waits for us, who wait for it.
const FORKED_STOP_NS: u64 = 50_000_000;

/// An agent in place.
pub struct Agent {
    /// The process.
    pub pid: i32,
    /// The agent's thread.
    pub thread: i32,
    /// The same thread's number in the target's own pid namespace, which faults are told with.
    pub known_as: i32,
    /// Our end of the socket: a byte starts a list, a byte comes back.
    pub socket: OwnedFd,
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
    instruction: u64,
}

/// Refuses what cannot be adopted, before anything is touched.
///
/// # Errors
/// As [`Error`] says.
pub fn examine(pid: i32) -> Result<(), Error> {
    let field = |name| procfs::status_field(pid, name);
    let Some(state) = field("State") else { return Err(Error::NoSuchProcess(pid)) };
    if state.starts_with(['Z', 'X']) || field("VmSize").is_none() {
        return Err(Error::NoMemoryOfItsOwn(pid));
    }
    match field("TracerPid").and_then(|tracer| tracer.parse().ok()) {
        Some(0) | None => {}
        Some(tracer) => {
            let name = procfs::status_field(tracer, "Name").unwrap_or_else(|| "another program".into());
            let own = procfs::threads(pid).is_ok_and(|all| all.iter().any(|&thread| is_agent(pid, thread)));
            return Err(if own { Error::AlreadyAdopted(pid) } else { Error::Traced { pid, tracer, name } });
        }
    }
    match File::open(format!("/proc/{pid}/exe")) {
        Ok(mut file) => {
            let mut head = [0_u8; 5];
            if io::Read::read_exact(&mut file, &mut head).is_ok() && head[..4] == *b"\x7fELF" && head[4] != 2 {
                return Err(Error::Not64Bit(pid));
            }
        }
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Err(Error::NoPermission(pid)),
        // A deleted or otherwise unreadable program: the registers will tell.
        Err(_) => {}
    }
    if procfs::threads(pid).is_ok_and(|all| all.iter().any(|&thread| is_agent(pid, thread))) {
        return Err(Error::AlreadyAdopted(pid));
    }
    Ok(())
}

/// Whether `thread` of `pid` is an agent, of whichever pager.
pub fn is_agent(pid: i32, thread: i32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/task/{thread}/comm")).is_ok_and(|name| name.trim_end() == NAME)
}

/// Puts an agent into `pid`. `forked` is the userfaultfd that the kernel made when the process was forked from one under
/// management; without it a new one is made. `while_stopped` is called while one thread of the process, which may be its only
/// one, is stopped.
///
/// Must be called from the thread that will later call [`Agent::leave`].
///
/// # Errors
/// As [`Error`] says; the target is as it was then.
pub fn adopt(
    pid: i32,
    forked: Option<&Uffd>,
    kill_on_death: bool,
    while_stopped: impl FnOnce(),
) -> Result<(Agent, Option<Uffd>), Error> {
    examine(pid)?;
    let filtered = procfs::status_field(pid, "Seccomp").is_some_and(|mode| mode != "0");
    // A program may put a filter on all of its threads at any time later (SECCOMP_FILTER_FLAG_TSYNC), ours among them.
    let seccomp = keeps_seized();
    if filtered && !seccomp {
        return Err(Error::Seccomp(pid));
    }
    let instruction = syscall_instruction(pid)?;
    let thread = quiet_thread(pid)?;
    let mut first = Seized::new(thread, seccomp).map_err(|error| match error.raw_os_error() {
        Some(libc::ESRCH) => Error::NoSuchProcess(pid),
        _ => Error::NoPermission(pid),
    })?;
    let explain = |error| explain(pid, error);

    let slept_ns = restart::asleep_ns(pid, thread);
    // On a busy machine each step of ours would wait for a turn of the target's, and the other way round.
    let _hurried_ourselves = Hurried::new(0);
    let hurried = Hurried::new(thread);
    let started = now_ns();
    first.stop_within(if forked.is_some() { FORKED_STOP_NS } else { STOP_DEADLINE_NS }).map_err(explain)?;
    let mut saved = first.registers().map_err(explain)?;
    // An exec since we looked has put something else there, or nothing.
    let mut there = [0_u8; 2];
    if process::read_memory(pid, Address(instruction), &mut there).is_err() || there != SYSCALL {
        return Err(Error::Ended(pid));
    }
    if saved.cs != 0x33 {
        return Err(Error::Not64Bit(pid));
    }
    let mask = first.signal_mask().map_err(explain)?;
    first.set_signal_mask(u64::MAX).map_err(explain)?;
    let begun = begin(&mut first, &saved, instruction);
    while_stopped();
    let spare = begun.as_ref().ok().map(|(staging, _)| staging.plus_pages(BATCH_PAGES as u64).plus_bytes(SPARE_OFFSET));
    restart::repeat(pid, thread, &mut saved, slept_ns, spare);
    // The thread is put back exactly as it was, whatever happened.
    first.set_registers(&saved).and_then(|()| first.set_signal_mask(mask)).map_err(explain)?;
    drop(first);
    drop(hurried);
    let pause_ns = now_ns() - started;

    let (staging, mut helper) = begun.map_err(explain)?;
    helper.await_first_stop().map_err(explain)?;
    let registers = helper.registers().map_err(explain)?;
    let mut setup = Setup { pid, helper, registers, instruction, staging, open: Vec::new() };
    let result = setup.run(forked, kill_on_death, seccomp);
    setup.finish(result.is_err())?;
    let (mut agent, uffd) = result?;
    agent.pause_ns = pause_ns;
    Ok((agent, uffd))
}

fn begin(first: &mut Seized, saved: &Registers, instruction: u64) -> Result<(Address, Seized), CallError> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let (staging, _) = first.call(
        saved,
        instruction,
        libc::SYS_mmap,
        [0, STAGING_BYTES + SCRATCH_BYTES, bits(libc::PROT_READ | libc::PROT_WRITE), bits(flags), u64::MAX, 0],
    )?;
    let shared = libc::CLONE_VM | libc::CLONE_FS | libc::CLONE_SIGHAND | libc::CLONE_THREAD | libc::CLONE_SYSVSEM;
    let cloned = first.call(saved, instruction, libc::SYS_clone, [bits(shared | libc::CLONE_FILES), 0, 0, 0, 0, 0]);
    match cloned {
        Ok((_, Some(helper))) => Ok((Address(staging), helper)),
        other => {
            first.call(saved, instruction, libc::SYS_munmap, [staging, STAGING_BYTES + SCRATCH_BYTES, 0, 0, 0, 0])?;
            Err(other.err().unwrap_or(CallError::Ended))
        }
    }
}

/// The helper at work.
struct Setup {
    pid: i32,
    helper: Seized,
    registers: Registers,
    instruction: u64,
    staging: Address,
    /// Descriptors in the target's table that the helper has yet to close.
    open: Vec<i32>,
}

impl Setup {
    fn run(
        &mut self,
        forked: Option<&Uffd>,
        kill_on_death: bool,
        seccomp: bool,
    ) -> Result<(Agent, Option<Uffd>), Error> {
        let pid = self.pid;
        let system = |what| move |error| Error::System { what, error };
        let pidfd = process::pidfd(pid).map_err(system("opening the target"))?;
        let take =
            |number| process::take_fd(pidfd.as_fd(), number).map_err(system("taking a descriptor of the target"));
        let scratch = self.staging.plus_pages(BATCH_PAGES as u64);

        let mut name = NAME.as_bytes().to_vec();
        name.push(0);
        process::write_memory(pid, scratch, &name).map_err(system("writing to the target"))?;
        let file = self.open(libc::SYS_memfd_create, [scratch.0, bits(libc::MFD_CLOEXEC.cast_signed()), 0, 0, 0, 0])?;
        let memory = Memory::new(take(file)?).map_err(system("mapping the agent's memory"))?;

        let stream = bits(libc::SOCK_STREAM | libc::SOCK_CLOEXEC);
        self.call(libc::SYS_socketpair, [bits(libc::AF_UNIX), stream, 0, scratch.0, 0, 0])?;
        let mut pair = [0_u8; 8];
        process::read_memory(pid, scratch, &mut pair).map_err(system("reading from the target"))?;
        let [a0, a1, a2, a3, b0, b1, b2, b3] = pair;
        let (ours, theirs) = (i32::from_ne_bytes([a0, a1, a2, a3]), i32::from_ne_bytes([b0, b1, b2, b3]));
        self.open.extend([ours, theirs]);
        let socket = take(ours)?;

        let (uffd_number, fresh) = match forked {
            Some(uffd) => {
                let number = self.receive(socket.as_fd(), uffd.borrow(), theirs, scratch)?;
                self.check_memory(number, scratch)?;
                (number, None)
            }
            None => {
                let number = self.userfaultfd(socket.as_fd(), theirs, scratch)?;
                let uffd = Uffd::from(take(number)?);
                uffd.handshake().map_err(|error| match error.raw_os_error() {
                    Some(libc::EPERM) => Error::NoForkEvents,
                    _ => Error::NoUserfaultfd(error),
                })?;
                (number, Some(uffd))
            }
        };

        let map = |setup: &mut Self, bytes, protection, offset| {
            setup.call(libc::SYS_mmap, [0, bytes, bits(protection), bits(libc::MAP_SHARED), bits(file), offset])
        };
        let code = Address(map(self, CODE_BYTES, libc::PROT_READ | libc::PROT_EXEC, 0)?);
        let control = Address(map(self, CONTROL_BYTES, libc::PROT_READ | libc::PROT_WRITE, CODE_BYTES)?);
        let layout = Layout { staging: self.staging, scratch, control, code };
        for (start, bytes) in pieces(&layout) {
            self.call(libc::SYS_madvise, [start.0, bytes, bits(libc::MADV_DONTFORK), 0, 0, 0])?;
            self.call(libc::SYS_madvise, [start.0, bytes, bits(libc::MADV_DONTDUMP), 0, 0, 0])?;
        }
        let staging = [layout.staging.0, STAGING_BYTES, bits(libc::MADV_NOHUGEPAGE), 0, 0, 0];
        // A kernel without huge pages says EINVAL, and needs no advice.
        let _ = self.helper.call(&self.registers, self.instruction, libc::SYS_madvise, staging);

        let shared = libc::CLONE_VM | libc::CLONE_FS | libc::CLONE_SIGHAND | libc::CLONE_THREAD | libc::CLONE_SYSVSEM;
        let (known_as, created) = self
            .helper
            .call(&self.registers, self.instruction, libc::SYS_clone, [bits(shared), 0, 0, 0, 0, 0])
            .map_err(|error| explain(pid, error))?;
        let mut seized = created.ok_or(Error::Ended(pid))?;
        let thread = seized.thread();
        self.start_agent(&mut seized, &layout, uffd_number, theirs, kill_on_death)?;
        let seized = if seccomp {
            seized.resume().map_err(|error| explain(pid, error))?;
            Some(seized)
        } else {
            None
        };
        let instruction = self.instruction;
        let known_as = i32::try_from(known_as).unwrap_or(0);
        let agent = Agent {
            pid,
            thread,
            known_as,
            socket,
            memory,
            layout,
            uffd: uffd_number,
            pause_ns: 0,
            seized,
            instruction,
        };
        Ok((agent, fresh))
    }

    /// Closes what is open in the agent's own table but for two descriptors, and points it at its code.
    fn start_agent(
        &self,
        agent: &mut Seized,
        layout: &Layout,
        uffd: i32,
        socket: i32,
        kill_on_death: bool,
    ) -> Result<(), Error> {
        let explain = |error| explain(self.pid, error);
        agent.await_first_stop().map_err(explain)?;
        let registers = agent.registers().map_err(explain)?;
        let (low, high) = (bits(uffd.min(socket)), bits(uffd.max(socket)));
        for (from, to) in [(0, low.wrapping_sub(1)), (low + 1, high.wrapping_sub(1)), (high + 1, u64::from(u32::MAX))] {
            if from <= to && to != u64::MAX {
                agent
                    .call(&registers, self.instruction, libc::SYS_close_range, [from, to, 0, 0, 0, 0])
                    .map_err(explain)?;
            }
        }
        let mut name = NAME.as_bytes().to_vec();
        name.push(0);
        process::write_memory(self.pid, layout.scratch, &name)
            .map_err(|error| Error::System { what: "writing to the target", error })?;
        let arguments = [bits(libc::PR_SET_NAME), layout.scratch.0, 0, 0, 0, 0];
        agent.call(&registers, self.instruction, libc::SYS_prctl, arguments).map_err(explain)?;
        let mut start = registers;
        start.rip = layout.code.0;
        start.orig_rax = u64::MAX;
        start.r15 = layout.control.0;
        start.r14 = bits(socket);
        start.r13 = u64::from(kill_on_death);
        // It inherited the haste of the thread that it came from.
        let _ = set_class(agent.thread(), Class::Normal);
        agent.set_registers(&start).map_err(explain)
    }

    /// A new userfaultfd for the target. `/dev/userfaultfd`, opened with our rights and handed over, works whatever the
    /// target's own rights are; the system call is for those who may not open the device.
    fn userfaultfd(&mut self, socket: BorrowedFd<'_>, theirs: i32, scratch: Address) -> Result<i32, Error> {
        let flags = bits(libc::O_CLOEXEC | libc::O_NONBLOCK);
        if let Ok(device) = File::options().read(true).write(true).open("/dev/userfaultfd") {
            let number = self.receive(socket, device.as_fd(), theirs, scratch)?;
            return self.open(libc::SYS_ioctl, [bits(number), uffd::IOC_NEW, flags, 0, 0, 0]);
        }
        let answer = self.helper.call(&self.registers, self.instruction, libc::SYS_userfaultfd, [flags, 0, 0, 0, 0, 0]);
        match answer {
            Ok((number, _)) => self.opened(number),
            Err(CallError::Answered(error)) => Err(Error::NoUserfaultfd(error)),
            Err(error) => Err(explain(self.pid, error)),
        }
    }

    /// Hands `fd` to the target; returns its number there.
    fn receive(
        &mut self,
        socket: BorrowedFd<'_>,
        fd: BorrowedFd<'_>,
        theirs: i32,
        scratch: Address,
    ) -> Result<i32, Error> {
        let system = |what| move |error| Error::System { what, error };
        send_fd(socket, fd).map_err(system("handing a descriptor to the target"))?;
        // struct msghdr { name, namelen, iov, iovlen, control, controllen, flags } and what it points to.
        let (vector, byte, control) = (scratch.0 + 64, scratch.0 + 96, scratch.0 + 128);
        let length = size_of::<Rights>() as u64;
        let header = [0, 0, vector, 1, control, length, 0, 0, byte, 1];
        let image: Vec<u8> = header.iter().flat_map(|word: &u64| word.to_ne_bytes()).collect();
        process::write_memory(self.pid, scratch, &image).map_err(system("writing to the target"))?;
        let close_on_exec = bits(libc::MSG_CMSG_CLOEXEC);
        self.call(libc::SYS_recvmsg, [bits(theirs), scratch.0, close_on_exec, 0, 0, 0])?;
        let mut number = [0_u8; 4];
        process::read_memory(self.pid, Address(control + 16), &mut number)
            .map_err(system("reading from the target"))?;
        let number = i32::from_ne_bytes(number);
        self.open.push(number);
        Ok(number)
    }

    /// Makes sure that userfaultfd `number` belongs to this very address space: the kernel tells only whose child the fork
    /// was, and there may be several. It refuses a move for another address space (EINVAL) before it looks for the
    /// destination, which does not exist (ENOENT).
    fn check_memory(&mut self, number: i32, scratch: Address) -> Result<(), Error> {
        const TRIES: usize = 1000;
        let pid = self.pid;
        let words = [uffd::NOWHERE.0, self.staging.0, PAGE_BYTES_U64, 0, 0];
        let image: Vec<u8> = words.iter().flat_map(|word: &u64| word.to_ne_bytes()).collect();
        process::write_memory(pid, scratch, &image)
            .map_err(|error| Error::System { what: "writing to the target", error })?;
        for _ in 0..TRIES {
            let arguments = [bits(number), uffd::IOC_MOVE, scratch.0, 0, 0, 0];
            match self.helper.call(&self.registers, self.instruction, libc::SYS_ioctl, arguments) {
                Err(CallError::Answered(error)) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(()),
                // An event of the child waits to be read: soon.
                Err(CallError::Answered(error)) if error.raw_os_error() == Some(libc::EAGAIN) => {
                    std::thread::sleep(std::time::Duration::from_micros(20));
                }
                Err(CallError::Answered(_)) | Ok(_) => return Err(Error::OtherMemory(pid)),
                Err(error) => return Err(explain(pid, error)),
            }
        }
        Err(Error::DidNotStop(pid))
    }

    fn open(&mut self, number: libc::c_long, arguments: [u64; 6]) -> Result<i32, Error> {
        let fd = self.call(number, arguments)?;
        self.opened(fd)
    }

    fn opened(&mut self, fd: u64) -> Result<i32, Error> {
        let fd = i32::try_from(fd).map_err(|_| Error::Ended(self.pid))?;
        self.open.push(fd);
        Ok(fd)
    }

    fn call(&mut self, number: libc::c_long, arguments: [u64; 6]) -> Result<u64, Error> {
        let answer = self.helper.call(&self.registers, self.instruction, number, arguments);
        answer.map(|(value, _)| value).map_err(|error| explain(self.pid, error))
    }

    /// Ends the helper; `undo` also takes back the mapping it works in.
    fn finish(mut self, undo: bool) -> Result<(), Error> {
        for fd in std::mem::take(&mut self.open) {
            let _ = self.call(libc::SYS_close, [bits(fd), 0, 0, 0, 0, 0]);
        }
        if undo {
            let _ = self.call(libc::SYS_munmap, [self.staging.0, STAGING_BYTES + SCRATCH_BYTES, 0, 0, 0, 0]);
        }
        self.helper.exit(&self.registers, self.instruction).map_err(|error| explain(self.pid, error))
    }
}

impl Agent {
    /// The staging area.
    pub fn staging(&self) -> Span {
        Span::of_pages(self.layout.staging, BATCH_PAGES as u64)
    }

    /// The one mapping of ours that looks like the target's own memory.
    pub fn staging_and_scratch(&self) -> Span {
        Span::of_pages(self.layout.staging, BATCH_PAGES as u64 + SCRATCH_BYTES / PAGE_BYTES_U64)
    }

    /// Takes the agent and everything of ours out of the target. Its regions must be unregistered.
    ///
    /// # Errors
    /// When the target ended meanwhile.
    pub fn leave(self) -> Result<(), Error> {
        let pid = self.pid;
        let explain = |error| explain(pid, error);
        let mut seized = match self.seized {
            Some(seized) => seized,
            None => Seized::new(self.thread, false).map_err(|error| explain(error.into()))?,
        };
        seized.stop().map_err(explain)?;
        let registers = seized.registers().map_err(explain)?;
        for (start, bytes) in pieces(&self.layout) {
            seized
                .call(&registers, self.instruction, libc::SYS_munmap, [start.0, bytes, 0, 0, 0, 0])
                .map_err(explain)?;
        }
        seized.exit(&registers, self.instruction).map_err(explain)
    }
}

fn pieces(layout: &Layout) -> [(Address, u64); 3] {
    [(layout.staging, STAGING_BYTES + SCRATCH_BYTES), (layout.code, CODE_BYTES), (layout.control, CONTROL_BYTES)]
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

/// Whether agents are kept seized, out of reach of seccomp filters: that takes `CAP_SYS_ADMIN`.
pub fn keeps_seized() -> bool {
    const CAP_SYS_ADMIN: u32 = 21;
    procfs::status_field(std::process::id().cast_signed(), "CapEff")
        .and_then(|set| u64::from_str_radix(&set, 16).ok())
        .is_some_and(|set| set >> CAP_SYS_ADMIN & 1 == 1)
}

/// The address of a `syscall` instruction in the target's vDSO.
fn syscall_instruction(pid: i32) -> Result<u64, Error> {
    let system = |what| move |error| Error::System { what, error };
    let mappings = procfs::mappings(pid).map_err(|_| Error::NoPermission(pid))?;
    let vdso = mappings
        .iter()
        .find(|mapping| mapping.name == "[vdso]")
        .ok_or_else(|| Error::System { what: "finding the target's vDSO", error: io::ErrorKind::NotFound.into() })?;
    let mut image = vec![0_u8; usize::try_from(vdso.span.pages() * PAGE_BYTES_U64).unwrap_or(0)];
    process::read_memory(pid, vdso.span.start, &mut image).map_err(system("reading the target's vDSO"))?;
    let offset = image.windows(2).position(|bytes| bytes == SYSCALL).ok_or_else(|| Error::System {
        what: "finding a system call in the target's vDSO",
        error: io::ErrorKind::NotFound.into(),
    })?;
    Ok(vdso.span.start.0 + offset as u64)
}

/// A thread to borrow: rather one that sleeps, never one that cannot be stopped.
fn quiet_thread(pid: i32) -> Result<i32, Error> {
    let threads = procfs::threads(pid).map_err(|_| Error::NoSuchProcess(pid))?;
    let rank = |thread: &i32| match procfs::thread_stat(pid, *thread).map(|stat| stat.state) {
        Ok(b'S') => 0,
        Ok(b'R') => 1,
        Ok(b'T') => 2,
        Ok(b'D') => 3,
        _ => 4,
    };
    threads.into_iter().min_by_key(rank).ok_or(Error::NoSuchProcess(pid))
}

fn bits(value: i32) -> u64 {
    u64::from(value.cast_unsigned())
}

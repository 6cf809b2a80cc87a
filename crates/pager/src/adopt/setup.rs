//! The helper at work: what an agent needs is made by a thread of ours in the target, while the target runs on.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};

use spillway_core::{Address, PAGE_BYTES_U64, Span};

use super::{Agent, Given, Kept, NAME, SCRATCH_BYTES, STAGING_BYTES, behind, bits, explain, pieces};
use crate::error::Error;
use crate::sys::agent::{
    BATCH_PAGES, CODE_BYTES, CONTROL_BYTES, FILE_BYTES, Layout, Memory, last_call, last_call_offset,
};
use crate::sys::detour::Detour;
use crate::sys::fd::{Rights, send_fd};
use crate::sys::process;
use crate::sys::ptrace::{ALL_SIGNALS, CallError, Registers, Seized};
use crate::sys::sched::{Class, Hurried, set_class};
use crate::sys::uffd::{self, Uffd};
use crate::target::hold_calls;

/// The helper at work.
pub(super) struct Setup {
    pid: i32,
    helper: Seized,
    /// As long as it is at work.
    _hurried: Option<Hurried>,
    registers: Registers,
    /// A system call in the target, and the one that the helper's are made at.
    vdso: u64,
    instruction: u64,
    staging: Address,
    /// What is mapped besides that.
    mapped: Vec<(Address, u64)>,
    /// Where it stands until the agent's code is there; else `aside`.
    detour: Option<Detour>,
    aside: Option<Address>,
    /// Descriptors in its table, which may be the target's, that the helper has yet to close.
    open: Vec<i32>,
}

impl Setup {
    /// `helper` has just been made and has not run yet.
    pub(super) fn new(
        pid: i32,
        mut helper: Seized,
        vdso: u64,
        staging: Address,
        detour: Option<Detour>,
    ) -> Result<Self, CallError> {
        // On a busy machine each of its steps would wait for a turn.
        let hurried = Hurried::new(helper.thread());
        helper.await_first_stop()?;
        let registers = helper.registers()?;
        let instruction = detour.as_ref().map_or(vdso, Detour::last_call);
        let (mapped, open) = (Vec::new(), Vec::new());
        let _hurried = hurried;
        Ok(Self { pid, helper, _hurried, registers, vdso, instruction, staging, mapped, detour, aside: None, open })
    }

    pub(super) fn run(
        &mut self,
        given: Given<'_>,
        kill_on_death: bool,
        vault: Option<BorrowedFd<'_>>,
        seccomp: bool,
    ) -> Result<(Agent, Option<Uffd>), Error> {
        let pid = self.pid;
        let system = |what| move |error| Error::System { what, error };
        if self.detour.is_none() {
            self.step_aside()?;
        }
        let pidfd = match process::pidfd_of_thread(self.helper.thread()) {
            Ok(pidfd) => {
                // A table of its own: a child that the program forks meanwhile gets nothing of ours, and whatever numbers the program
                // closes or gives anew are its own. A filter may forbid that.
                let _ = self.call(libc::SYS_unshare, [bits(libc::CLONE_FILES), 0, 0, 0, 0, 0]);
                pidfd
            }
            // Before 6.9 only the process's own table can be reached.
            Err(_) => process::pidfd_of_process(pid).map_err(system("opening the target"))?,
        };
        let take =
            |number| process::take_fd(pidfd.as_fd(), number).map_err(system("taking a descriptor of the target"));
        let scratch = self.staging.plus_pages(BATCH_PAGES as u64);

        let mut name = NAME.as_bytes().to_vec();
        name.push(0);
        process::write_memory(self.helper.thread(), scratch, &name).map_err(system("writing to the target"))?;
        let flags = u64::from(libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING);
        let file = self.open(libc::SYS_memfd_create, [scratch.0, flags, 0, 0, 0, 0])?;
        let memory = Memory::new(take(file)?).map_err(system("mapping the agent's memory"))?;
        let behind = self.behind();
        let code = self.map(file, behind, (0, CODE_BYTES), libc::PROT_READ | libc::PROT_EXEC)?;
        self.stand_at(code.plus_bytes(last_call_offset()))?;
        if let Some(aside) = self.aside.take() {
            self.call(libc::SYS_munmap, [aside.0, PAGE_BYTES_U64, 0, 0, 0, 0])?;
        }

        let packets = bits(libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC);
        self.call(libc::SYS_socketpair, [bits(libc::AF_UNIX), packets, 0, scratch.0, 0, 0])?;
        let mut pair = [0_u8; 8];
        process::read_memory(self.helper.thread(), scratch, &mut pair).map_err(system("reading from the target"))?;
        let [a0, a1, a2, a3, b0, b1, b2, b3] = pair;
        let (ours, theirs) = (i32::from_ne_bytes([a0, a1, a2, a3]), i32::from_ne_bytes([b0, b1, b2, b3]));
        self.open.extend([ours, theirs]);
        let socket = take(ours)?;

        let (uffd_number, fresh) = match given {
            Given::Forked(uffd) | Given::Handed(uffd, _) => {
                let number = self.receive(socket.as_fd(), uffd.borrow(), theirs, scratch)?;
                self.check_memory(number, scratch)?;
                if let Given::Handed(_, memory) = given {
                    memory.iter().try_for_each(|span| self.hold(*span))?;
                }
                (number, None)
            }
            Given::Nothing => {
                let number = self.userfaultfd(socket.as_fd(), theirs, scratch)?;
                let uffd = Uffd::from(take(number)?);
                uffd.handshake().map_err(|error| match error.raw_os_error() {
                    Some(libc::EPERM) => Error::NoForkEvents,
                    _ => Error::NoUserfaultfd(error),
                })?;
                (number, Some(uffd))
            }
        };

        let vault = vault.map(|vault| self.receive(socket.as_fd(), vault, theirs, scratch)).transpose()?;
        let kept = vault.map(|_| Kept { socket: ours, memory: file });

        let control = self.map(file, behind, (CODE_BYTES, CONTROL_BYTES), libc::PROT_READ | libc::PROT_WRITE)?;
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
        let keeps = kept.map(|kept| [kept.socket, kept.memory]).into_iter().flatten().chain(vault);
        let keeps = [uffd_number, theirs].into_iter().chain(keeps).collect();
        self.start_agent(&mut seized, &layout, theirs, keeps, kill_on_death)?;
        let seized = if seccomp {
            seized.resume().map_err(|error| explain(pid, error))?;
            Some(seized)
        } else {
            None
        };
        let instruction = self.vdso;
        let known_as = i32::try_from(known_as).unwrap_or(0);
        let agent = Agent {
            pid,
            thread,
            known_as,
            ear: None,
            socket,
            orders: theirs,
            memory,
            layout,
            uffd: uffd_number,
            pause_ns: 0,
            seized,
            kept,
            unmerges: None,
            instruction,
        };
        Ok((agent, fresh))
    }

    /// Gives the helper code of its own to stand in, before there is any of the agent's: until then it is killed with us, and takes the
    /// program with it.
    fn step_aside(&mut self) -> Result<(), Error> {
        let (at, flags) = (self.behind().plus_bytes(FILE_BYTES), libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let readable = bits(libc::PROT_READ | libc::PROT_EXEC);
        let arguments = [at.0, PAGE_BYTES_U64, readable, bits(flags), u64::MAX, 0];
        let aside = match self.helper.call(&self.registers, self.instruction, libc::SYS_mmap, arguments) {
            Ok((aside, _)) => Address(aside),
            // A policy may forbid code that is in no file.
            Err(CallError::Answered(_)) => return Ok(()),
            Err(error) => return Err(explain(self.pid, error)),
        };
        self.aside = Some(aside);
        self.helper.write_code(aside, last_call()).map_err(|error| explain(self.pid, error))?;
        self.stand_at(aside)
    }

    /// Its calls are made there from now on. Should we be killed, it ends: it would take the program with it, or go on behind a call of
    /// the program's own.
    fn stand_at(&mut self, last_call: Address) -> Result<(), Error> {
        self.instruction = last_call.0;
        self.helper.stop_at_calls();
        let stands = self
            .helper
            .set_registers(&behind(last_call.0, &self.registers))
            .and_then(|()| self.helper.set_killed_with_us(false));
        stands.map_err(|error| explain(self.pid, error))
    }

    /// What is mapped near the staging area is mapped here.
    fn behind(&self) -> Address {
        self.staging.plus_bytes(STAGING_BYTES + SCRATCH_BYTES)
    }

    /// Maps a part of the agent's file near its place behind `from`.
    fn map(
        &mut self,
        file: i32,
        from: Address,
        (offset, bytes): (u64, u64),
        protection: i32,
    ) -> Result<Address, Error> {
        let arguments = [from.0 + offset, bytes, bits(protection), bits(libc::MAP_SHARED), bits(file), offset];
        let mapped = Address(self.call(libc::SYS_mmap, arguments)?);
        self.mapped.push((mapped, bytes));
        Ok(mapped)
    }

    /// Closes what is open in the agent's own table but for what it `keeps`, and points it at its code.
    fn start_agent(
        &self,
        agent: &mut Seized,
        layout: &Layout,
        socket: i32,
        mut keeps: Vec<i32>,
        kill_on_death: bool,
    ) -> Result<(), Error> {
        let explain = |error| explain(self.pid, error);
        let hurried = Hurried::new(agent.thread());
        agent.await_first_stop().map_err(explain)?;
        let registers = agent.registers().map_err(explain)?;
        keeps.sort_unstable();
        let ends = keeps.iter().map(|&kept| bits(kept)).chain([1 << 32]);
        let mut from = 0;
        for end in ends {
            if from < end {
                let arguments = [from, end - 1, 0, 0, 0, 0];
                agent.call(&registers, self.instruction, libc::SYS_close_range, arguments).map_err(explain)?;
            }
            from = end + 1;
        }
        let mut name = NAME.as_bytes().to_vec();
        name.push(0);
        process::write_memory(self.helper.thread(), layout.scratch, &name)
            .map_err(|error| Error::System { what: "writing to the target", error })?;
        let arguments = [bits(libc::PR_SET_NAME), layout.scratch.0, 0, 0, 0, 0];
        agent.call(&registers, self.instruction, libc::SYS_prctl, arguments).map_err(explain)?;
        let mut start = registers;
        start.rip = layout.code.0;
        start.orig_rax = u64::MAX;
        start.r15 = layout.control.0;
        start.r14 = bits(socket);
        start.r13 = u64::from(kill_on_death);
        drop(hurried);
        let _ = set_class(agent.thread(), Class::Normal);
        agent.set_signal_mask(ALL_SIGNALS).and_then(|()| agent.set_registers(&start)).map_err(explain)
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
        process::write_memory(self.helper.thread(), scratch, &image).map_err(system("writing to the target"))?;
        let close_on_exec = bits(libc::MSG_CMSG_CLOEXEC);
        self.call(libc::SYS_recvmsg, [bits(theirs), scratch.0, close_on_exec, 0, 0, 0])?;
        let mut number = [0_u8; 4];
        process::read_memory(self.helper.thread(), Address(control + 16), &mut number)
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
        process::write_memory(self.helper.thread(), scratch, &image)
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

    /// Keeps memory that no event may tell of from forked children, and in its place.
    fn hold(&mut self, span: Span) -> Result<(), Error> {
        for (number, arguments) in hold_calls(span) {
            match self.helper.call(&self.registers, self.instruction, number, arguments) {
                Ok(_) => {}
                Err(CallError::Answered(error)) if error.raw_os_error() == Some(libc::ENOSYS) => {
                    return Err(Error::NoSeals);
                }
                Err(CallError::Answered(error)) => {
                    return Err(Error::System { what: "keeping the memory that was handed over in its place", error });
                }
                Err(error) => return Err(explain(self.pid, error)),
            }
        }
        Ok(())
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

    /// Ends the helper; `undo` also takes back what was mapped.
    pub(super) fn finish(mut self, undo: bool) -> Result<(), Error> {
        for fd in std::mem::take(&mut self.open) {
            let _ = self.call(libc::SYS_close, [bits(fd), 0, 0, 0, 0, 0]);
        }
        if undo {
            let aside = self.aside.take().map(|aside| (aside, PAGE_BYTES_U64));
            let staging = (self.staging, STAGING_BYTES + SCRATCH_BYTES);
            let mapped = std::mem::take(&mut self.mapped).into_iter().chain(aside).chain([staging]);
            let stands_in = |&(start, bytes): &(Address, u64)| (start.0..start.0 + bytes).contains(&self.instruction);
            let (own, others): (Vec<_>, Vec<_>) = mapped.partition(stands_in);
            self.unmap(others);
            if !own.is_empty() {
                match &self.detour {
                    Some(detour) => self.instruction = detour.last_call(),
                    None => {
                        self.helper.set_killed_with_us(true).map_err(|error| explain(self.pid, error))?;
                        self.instruction = self.vdso;
                    }
                }
                self.unmap(own);
            }
        }
        if let Some(page) = self.detour.as_ref().filter(|_| !undo).and_then(Detour::page) {
            // It stands in the agent's code: the target needs no page of its own there any more.
            let own_page = [page.start.0, PAGE_BYTES_U64, bits(libc::MADV_DONTNEED), 0, 0, 0];
            if self.call(libc::SYS_madvise, own_page).is_ok() {
                self.detour = None;
            }
        }
        self.helper.exit(&self.registers, self.instruction, 0).map_err(|error| explain(self.pid, error))?;
        // Where the process has ended there is nothing to clear.
        self.detour.iter().for_each(|detour| drop(detour.clear()));
        Ok(())
    }

    fn unmap(&mut self, pieces: Vec<(Address, u64)>) {
        for (start, bytes) in pieces {
            let _ = self.call(libc::SYS_munmap, [start.0, bytes, 0, 0, 0, 0]);
        }
    }
}

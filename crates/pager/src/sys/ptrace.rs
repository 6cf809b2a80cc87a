//! Running system calls in another process, without patching its code and without stopping its other threads.
//!
//! A thread is seized and interrupted, its registers point at a `syscall` instruction in the vDSO, and one single step
//! carries the call out. All calls about one thread must come from the thread of ours that seized it.

use std::cell::RefCell;
use std::io;
use std::ops::RangeInclusive;

use spillway_core::Address;

use super::clock::now_ns;
use super::fd::checked;
use crate::procfs;

/// `PTRACE_O_TRACECLONE`: threads it creates are seized too, before their first instruction. Only while it stands still and runs
/// calls of ours: what the program creates is no business of ours.
const TRACE_CLONE: usize = 1 << 3;
/// `PTRACE_O_EXITKILL`: it is killed when this thread of ours ends. Only while it stands still and runs calls of ours: let go in the
/// middle of one, it would go on behind it, with registers that are not its own.
const KILLED_WITH_US: usize = 1 << 20;
/// `PTRACE_O_SUSPEND_SECCOMP`: its seccomp filters do not apply while it is traced. Needs `CAP_SYS_ADMIN`.
const SUSPEND_SECCOMP: usize = 1 << 21;
/// `PTRACE_GET_RSEQ_CONFIGURATION`, since 5.13.
const GET_RSEQ_CONFIGURATION: libc::c_uint = 0x420f;
const EVENT_CLONE: i32 = 3;
/// What a call that is to be made again answers to the kernel itself (`include/linux/errno.h`).
const RESTARTS: RangeInclusive<i64> = -516..=-512;
const EVENT_STOP: i32 = 128;

/// How long a thread may take to stop. Only a thread in an uninterruptible wait (a dead disk, say) takes longer than
/// a few microseconds.
pub const STOP_DEADLINE_NS: u64 = 2_000_000_000;

/// All signals, as far as they can be blocked.
pub const ALL_SIGNALS: u64 = u64::MAX;
/// What to block in a thread that runs calls of ours: all but SIGTRAP. The end of a step raises it, and where it is blocked, the kernel
/// takes the program's handler for it away (`force_sig_info_to_task`).
pub const ALL_BUT_TRAPS: u64 = ALL_SIGNALS & !(1 << (libc::SIGTRAP - 1));

/// Registers of a thread.
pub type Registers = libc::user_regs_struct;

/// `struct ptrace_rseq_configuration`.
#[repr(C)]
#[derive(Default)]
struct RseqConfiguration {
    area: u64,
    size: u32,
    signature: u32,
    flags: u32,
    padding: u32,
}

/// A thread that this thread of ours has seized. Dropping it lets go of it, wherever it is.
#[derive(Debug)]
pub struct Seized {
    thread: i32,
    /// `PTRACE_O_…`, while it is not stopped.
    options: usize,
    stopped: bool,
    /// It has ended, and its end was taken note of.
    reaped: bool,
}

/// Between two looks for a stop: a system call in a target takes about this long.
const NAP: std::time::Duration = std::time::Duration::from_micros(5);
/// Naps between two looks whether the thread is dead.
const NAPS_PER_LOOK: u32 = 64;
/// How long a thread that is being killed may take to end.
const END_DEADLINE_NS: u64 = 100_000_000;

/// Why a call in a target did not happen.
#[derive(Debug)]
pub enum CallError {
    /// The thread ended.
    Ended,
    /// It did not stop within the deadline.
    Stuck,
    /// ptrace refused.
    Refused(io::Error),
    /// The call itself answered this.
    Answered(io::Error),
}

impl From<io::Error> for CallError {
    fn from(error: io::Error) -> Self {
        if error.raw_os_error() == Some(libc::ESRCH) { Self::Ended } else { Self::Refused(error) }
    }
}

fn request(what: libc::c_uint, thread: i32, address: usize, data: usize) -> io::Result<()> {
    // SAFETY: every caller passes either integers or the address of a live, correctly sized object for this request.
    checked(unsafe { libc::ptrace(what, thread, address, data) })?;
    Ok(())
}

impl Seized {
    /// Seizes `thread`, which goes on running.
    ///
    /// # Errors
    /// EPERM without rights over it or when someone else traces it, ESRCH when it is gone.
    pub fn new(thread: i32) -> io::Result<Self> {
        Self::with(thread, 0)
    }

    /// The same of a thread of ours, to which seccomp filters do not apply from now on.
    ///
    /// # Errors
    /// As [`Seized::new`], and EPERM without `CAP_SYS_ADMIN`.
    pub fn unfiltered(thread: i32) -> io::Result<Self> {
        Self::with(thread, SUSPEND_SECCOMP)
    }

    fn with(thread: i32, options: usize) -> io::Result<Self> {
        request(libc::PTRACE_SEIZE, thread, 0, options)?;
        Ok(Self { thread, options, stopped: false, reaped: false })
    }

    /// Seccomp filters are not to apply to calls of ours: to a thread of the program, from its stop on.
    pub fn exempt(&mut self) {
        self.options |= SUSPEND_SECCOMP;
    }

    /// Its thread id.
    pub fn thread(&self) -> i32 {
        self.thread
    }

    /// Stops it.
    ///
    /// # Errors
    /// When it ended or did not stop in time.
    pub fn stop(&mut self) -> Result<(), CallError> {
        self.stop_within(STOP_DEADLINE_NS)
    }

    /// The same, with a deadline of the caller's.
    ///
    /// # Errors
    /// When it ended or did not stop in time.
    pub fn stop_within(&mut self, deadline_ns: u64) -> Result<(), CallError> {
        request(libc::PTRACE_INTERRUPT, self.thread, 0, 0)?;
        let until_ns = now_ns() + deadline_ns;
        // A signal may have been on its way to the program; we are only to be told of it.
        while let (0, signal) = self.wait_stop(Some(until_ns))? {
            self.stopped = false;
            request(libc::PTRACE_CONT, self.thread, 0, usize::try_from(signal).unwrap_or(0))?;
        }
        Ok(request(libc::PTRACE_SETOPTIONS, self.thread, 0, self.options | TRACE_CLONE | KILLED_WITH_US)?)
    }

    /// Waits for its next stop; returns the ptrace event in it (zero for a plain trap) and its signal.
    ///
    /// Never blocks in `waitpid`: the end of a process's first thread is told only after that of the others, which may be
    /// waiting for us to take note of theirs.
    fn wait_stop(&mut self, deadline_ns: Option<u64>) -> Result<(i32, i32), CallError> {
        let mut naps = 0_u32;
        loop {
            let mut status = 0;
            // SAFETY: `status` is writable.
            match unsafe { libc::waitpid(self.thread, &raw mut status, libc::__WALL | libc::WNOHANG) } {
                0 if deadline_ns.is_some_and(|deadline| now_ns() > deadline) => return Err(CallError::Stuck),
                0 => {
                    naps += 1;
                    if naps.is_multiple_of(NAPS_PER_LOOK) && self.is_dead() {
                        return Err(CallError::Ended);
                    }
                    std::thread::sleep(NAP);
                }
                -1 => return Err(io::Error::last_os_error().into()),
                _ if libc::WIFSTOPPED(status) => {
                    self.stopped = true;
                    return Ok((status >> 16, libc::WSTOPSIG(status)));
                }
                _ => {
                    (self.stopped, self.reaped) = (false, true);
                    return Err(CallError::Ended);
                }
            }
        }
    }

    fn is_dead(&self) -> bool {
        !procfs::is_alive(procfs::stat(self.thread))
    }

    /// Lets it run on if it has stopped: a process that is stopped and continued as a whole leaves seized threads to
    /// their tracer. False when it has ended, which this also reaps: until then its process cannot end or exec.
    pub fn tend(&mut self) -> bool {
        let mut status = 0;
        // SAFETY: `status` is writable.
        match unsafe { libc::waitpid(self.thread, &raw mut status, libc::__WALL | libc::WNOHANG) } {
            0 => true,
            -1 => false,
            _ if libc::WIFSTOPPED(status) => request(libc::PTRACE_CONT, self.thread, 0, signal_of(status)).is_ok(),
            _ => {
                self.reaped = true;
                false
            }
        }
    }

    /// Its registers.
    ///
    /// # Errors
    /// When it ended.
    pub fn registers(&self) -> Result<Registers, CallError> {
        // SAFETY: plain integers, for which zeros are valid.
        let mut registers: Registers = unsafe { std::mem::zeroed() };
        request(libc::PTRACE_GETREGS, self.thread, 0, &raw mut registers as usize)?;
        Ok(registers)
    }

    /// Sets its registers.
    ///
    /// # Errors
    /// When it ended.
    pub fn set_registers(&self, registers: &Registers) -> Result<(), CallError> {
        Ok(request(libc::PTRACE_SETREGS, self.thread, 0, std::ptr::from_ref(registers) as usize)?)
    }

    /// Where it tells the kernel of its restartable sequences (`struct rseq`), if it does; it must have stopped.
    pub fn sequences(&self) -> Option<Address> {
        let mut told = RseqConfiguration::default();
        request(GET_RSEQ_CONFIGURATION, self.thread, size_of_val(&told), &raw mut told as usize).ok()?;
        (told.area != 0).then_some(Address(told.area))
    }

    /// Its signal mask.
    ///
    /// # Errors
    /// When it ended.
    pub fn signal_mask(&self) -> Result<u64, CallError> {
        let mut mask = 0_u64;
        request(libc::PTRACE_GETSIGMASK, self.thread, 8, &raw mut mask as usize)?;
        Ok(mask)
    }

    /// Sets its signal mask. SIGKILL and SIGSTOP cannot be blocked.
    ///
    /// # Errors
    /// When it ended.
    pub fn set_signal_mask(&self, mask: u64) -> Result<(), CallError> {
        Ok(request(libc::PTRACE_SETSIGMASK, self.thread, 8, &raw const mask as usize)?)
    }

    /// Runs system call `number` at `instruction`, the address of a `syscall` instruction, on top of `registers`;
    /// returns its result and the thread that it created, if it did.
    ///
    /// # Errors
    /// [`CallError::Answered`] with the call's own error.
    pub fn call(
        &mut self,
        registers: &Registers,
        instruction: u64,
        number: libc::c_long,
        arguments: [u64; 6],
    ) -> Result<(u64, Option<Self>), CallError> {
        let [rdi, rsi, rdx, r10, r8, r9] = arguments;
        let mut call = Registers { rip: instruction, rdi, rsi, rdx, r10, r8, r9, ..*registers };
        call.rax = number.cast_unsigned();
        // No system call to restart: otherwise the kernel would rewind what we set (arch_do_signal_or_restart).
        call.orig_rax = u64::MAX;
        self.set_registers(&call)?;
        let mut created = None;
        let mut deliver = 0;
        loop {
            request(libc::PTRACE_SINGLESTEP, self.thread, 0, deliver)?;
            deliver = 0;
            match self.wait_stop(None)? {
                (EVENT_CLONE, _) => {
                    let mut thread = 0_u64;
                    request(libc::PTRACE_GETEVENTMSG, self.thread, 0, &raw mut thread as usize)?;
                    let thread = i32::try_from(thread).map_err(|_| CallError::Ended)?;
                    created = Some(Self { thread, options: self.options, stopped: false, reaped: false });
                }
                // The process was stopped as a whole; the step has not happened yet.
                (EVENT_STOP, _) => {}
                (_, signal) if signal != libc::SIGTRAP => deliver = usize::try_from(signal).unwrap_or(0),
                _ => {
                    let after = self.registers()?;
                    // A signal to all threads broke it off: the kernel has not yet said so, and makes the call again as we go on.
                    if after.rip != instruction && !RESTARTS.contains(&after.rax.cast_signed()) {
                        return match after.rax.cast_signed() {
                            -4095..=-1 => Err(CallError::Answered(io::Error::from_raw_os_error(
                                i32::try_from(-after.rax.cast_signed()).unwrap_or(libc::EINVAL),
                            ))),
                            _ => Ok((after.rax, created)),
                        };
                    }
                }
            }
        }
    }

    /// Waits until a thread that [`Seized::call`] created has stopped at its first instruction.
    ///
    /// # Errors
    /// When it ended.
    pub fn await_first_stop(&mut self) -> Result<(), CallError> {
        self.wait_stop(None).map(|_| ())
    }

    /// Lets it run on, still seized, with registers of which it may make what it likes.
    ///
    /// # Errors
    /// When it ended.
    pub fn resume(&mut self) -> Result<(), CallError> {
        request(libc::PTRACE_SETOPTIONS, self.thread, 0, self.options)?;
        request(libc::PTRACE_CONT, self.thread, 0, 0)?;
        self.stopped = false;
        Ok(())
    }

    /// Runs `exit` in it, for this one thread, with that status, and waits for its end.
    ///
    /// # Errors
    /// When ptrace refuses.
    pub fn exit(mut self, registers: &Registers, instruction: u64, status: u8) -> Result<(), CallError> {
        match self.call(registers, instruction, libc::SYS_exit, [status.into(), 0, 0, 0, 0, 0]) {
            Err(CallError::Ended) | Ok(_) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

impl Drop for Seized {
    fn drop(&mut self) {
        if self.reaped || (self.stopped && request(libc::PTRACE_DETACH, self.thread, 0, 0).is_ok()) {
            return;
        }
        // Only what is stopped can be let go. And if it is dying: unless its end is taken note of, its process can neither end
        // nor exec.
        let _ = request(libc::PTRACE_INTERRUPT, self.thread, 0, 0);
        let deadline_ns = now_ns() + END_DEADLINE_NS;
        while !is_let_go(self.thread) {
            if now_ns() >= deadline_ns {
                return LEFT.with_borrow_mut(|left| left.push(self.thread));
            }
            std::thread::sleep(std::time::Duration::from_micros(20));
        }
    }
}

thread_local! {
    /// Threads that this one has seized and does not want any more, and that have not stopped yet.
    static LEFT: RefCell<Vec<i32>> = const { RefCell::new(Vec::new()) };
}

/// Lets go of threads that had not stopped when they were to be let go: they would stay stopped for ever when they do.
pub fn let_go_of_left() {
    LEFT.with_borrow_mut(|left| left.retain(|&thread| !is_let_go(thread)));
}

/// Lets go of threads of `pid`, which is ending, that are seized without our knowledge: one that is killed in the very call that creates
/// another does not tell of it, and until the other's end is taken note of, the process cannot end.
pub fn let_go_of_strays(pid: i32) {
    let strays =
        procfs::threads(pid).unwrap_or_default().into_iter().filter(|&thread| thread != pid && !is_let_go(thread));
    LEFT.with_borrow_mut(|left| left.extend(strays));
}

/// Lets go of a seized thread if it has stopped; true when it is not ours any more, or has ended.
fn is_let_go(thread: i32) -> bool {
    let mut status = 0;
    // SAFETY: `status` is writable.
    match unsafe { libc::waitpid(thread, &raw mut status, libc::__WALL | libc::WNOHANG) } {
        0 => false,
        _ if !libc::WIFSTOPPED(status) => true,
        _ => request(libc::PTRACE_DETACH, thread, 0, signal_of(status)).is_ok(),
    }
}

/// The signal that was on its way when a thread stopped, which is to be delivered; 0 where it stopped for another reason.
fn signal_of(status: i32) -> usize {
    let signal = if status >> 16 == 0 { libc::WSTOPSIG(status) } else { 0 };
    usize::try_from(signal).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::super::test::{Program, comes_true};
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU64, Ordering::Relaxed};
    use std::time::Duration;

    /// A process that cannot stop for `busy_ms`: it waits in the kernel for its child to end, as after vfork(2).
    fn unstoppable(busy_ms: u32) -> i32 {
        // SAFETY: each has memory of its own, and until they end, the child and its child make nothing but system calls.
        unsafe {
            let pid = libc::fork();
            if pid == 0 {
                if libc::syscall(libc::SYS_clone, libc::CLONE_VFORK | libc::SIGCHLD, 0, 0, 0, 0) == 0 {
                    libc::usleep(busy_ms * 1000);
                    libc::_exit(0);
                }
                libc::sleep(20);
                libc::_exit(0);
            }
            assert!(pid > 0, "no process");
            pid
        }
    }

    /// Torture seed 1795283334032: it stopped after it had been given up, and stayed stopped.
    #[test]
    fn a_thread_that_stops_too_late_is_let_go_when_it_does() {
        let pid = unstoppable(600);
        std::thread::sleep(Duration::from_millis(50));
        let mut seized = Seized::new(pid).expect("a child of ours");
        assert!(matches!(seized.stop_within(20_000_000), Err(CallError::Stuck)));
        drop(seized);
        let tracer = || procfs::status_field(pid, "TracerPid");
        assert_ne!(tracer().as_deref(), Some("0"), "it has not stopped yet");
        let until_ns = now_ns() + 5_000_000_000;
        while tracer().as_deref() != Some("0") && now_ns() < until_ns {
            let_go_of_left();
            std::thread::sleep(Duration::from_millis(10));
        }
        let state = procfs::stat(pid).map(|stat| stat.state);
        // SAFETY: no pointers but a null one; the process is our child.
        unsafe {
            libc::kill(pid, libc::SIGKILL);
            libc::waitpid(pid, std::ptr::null_mut(), 0);
        }
        assert_eq!((tracer_was_gone(until_ns), state.ok()), (true, Some(b'S')));
    }

    /// What a program and this test both see: how often it has done what it does.
    fn shared_counter() -> &'static AtomicU64 {
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping, which is never unmapped; zeros are an atomic.
        unsafe {
            let page = libc::mmap(std::ptr::null_mut(), 4096, protection, flags, -1, 0);
            assert_ne!(page, libc::MAP_FAILED);
            &*page.cast::<AtomicU64>()
        }
    }

    /// What `clone` is told that makes a thread.
    const A_THREAD: [u64; 6] = {
        let shared = libc::CLONE_VM | libc::CLONE_FS | libc::CLONE_SIGHAND | libc::CLONE_THREAD;
        [shared.cast_unsigned() as u64, 0, 0, 0, 0, 0]
    };

    /// Where there is a `syscall` instruction, in a forked child as well.
    fn system_call() -> u64 {
        let code = (libc::syscall as *const u8).cast::<[u8; 2]>();
        // SAFETY: code of libc's; a system call is within the few instructions of this function.
        let at =
            (0..64).find(|&at| unsafe { code.byte_add(at).read_unaligned() } == [0x0f, 0x05]).expect("a system call");
        (code.addr() + at) as u64
    }

    /// Seizes it, lets it go on for a moment as adoption does, stops it, and lets it go.
    fn seize_and_let_go(program: &Program) {
        let mut seized = Seized::new(program.pid()).expect("a child of ours");
        std::thread::sleep(Duration::from_micros(100));
        seized.stop().expect("it runs");
    }

    /// What a tracer that ends leaves behind, after `until` of what it does to a program.
    fn left_by_a_tracer(until: impl FnOnce(&mut Seized) + Send + 'static) -> Program {
        let program = Program::run(|| {
            loop {
                std::hint::spin_loop();
            }
        });
        let pid = program.pid();
        let tracer = std::thread::spawn(move || {
            let mut seized = Seized::new(pid).expect("a child of ours");
            seized.stop().expect("it runs");
            until(&mut seized);
            std::mem::forget(seized);
        });
        tracer.join().expect("it does not fail");
        program
    }

    /// A program went on with the registers of a call of ours when the pager was killed in the middle of adopting it.
    #[test]
    fn a_program_does_not_outlive_a_tracer_in_the_middle_of_a_call() {
        let program = left_by_a_tracer(|seized| {
            let registers = seized.registers().expect("it has stopped");
            seized.set_registers(&Registers { rax: 1, ..registers }).expect("the same");
        });
        assert!(comes_true(|| program.ended_by() == Some(libc::SIGKILL)));
    }

    #[test]
    fn a_program_outlives_a_tracer_that_has_let_it_run_on() {
        let program = left_by_a_tracer(|seized| seized.resume().expect("it has stopped"));
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(program.ended_by(), None);
    }

    /// A thread that a program was just making when it was adopted never ran, and the program never ended.
    #[test]
    fn a_thread_that_is_made_while_its_maker_is_seized_runs() {
        static mut STACK: [u128; 4096] = [0; 4096];
        static LIVES: AtomicI32 = AtomicI32::new(0);
        extern "C" fn end(_: *mut libc::c_void) -> i32 {
            0
        }
        let made = shared_counter();
        let shared = libc::CLONE_VM | libc::CLONE_FS | libc::CLONE_FILES | libc::CLONE_SIGHAND | libc::CLONE_THREAD;
        let (none, flags) = (std::ptr::null_mut::<libc::c_void>(), shared | libc::CLONE_CHILD_CLEARTID);
        let program = Program::run(|| {
            loop {
                LIVES.store(1, Relaxed);
                // SAFETY: the thread only ends, which the kernel tells, and the next is made then: the stack is nobody else's.
                unsafe { libc::clone(end, (&raw mut STACK).add(1).cast(), flags, none, none, none, LIVES.as_ptr()) };
                while LIVES.load(Relaxed) != 0 {
                    std::hint::spin_loop();
                }
                made.fetch_add(1, Relaxed);
            }
        });
        for round in 0..200 {
            seize_and_let_go(&program);
            let before = made.load(Relaxed);
            assert!(comes_true(|| made.load(Relaxed) > before + 1), "after {round} rounds");
        }
    }

    /// Where a thread of ours was killed as it made another, nobody knew of that one, and `spillway run` waited for ever.
    #[test]
    fn a_program_that_is_killed_while_a_thread_is_made_in_it_ends() {
        for round in 0..300 {
            let program = Program::run(|| {
                loop {
                    std::hint::spin_loop();
                }
            });
            let pid = program.pid();
            let mut seized = Seized::new(pid).expect("a child of ours");
            seized.stop().expect("it runs");
            let registers = seized.registers().expect("it has stopped");
            let killer = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_micros(round % 100));
                // SAFETY: no pointers.
                unsafe { libc::kill(pid, libc::SIGKILL) };
            });
            let called = seized.call(&registers, system_call(), libc::SYS_clone, A_THREAD);
            // Let go before that, either would go on behind a call that is not its own.
            killer.join().expect("it has killed it");
            drop((called, seized));
            let_go_of_strays(pid);
            // SAFETY: a null pointer is none.
            let ended = || unsafe { libc::waitpid(pid, std::ptr::null_mut(), libc::WNOHANG) } != 0;
            assert!(
                comes_true(|| {
                    let_go_of_left();
                    ended()
                }),
                "in round {round}"
            );
        }
    }

    /// A program that was stopped and continued all the time could not be adopted: its `clone` was broken off, which counted as its answer.
    #[test]
    fn a_call_that_a_stop_breaks_off_is_made_again() {
        let program = Program::run(|| {
            loop {
                std::hint::spin_loop();
            }
        });
        let pid = program.pid();
        let is_over = Arc::new(AtomicBool::new(false));
        let stopper = std::thread::spawn({
            let is_over = Arc::clone(&is_over);
            move || {
                while !is_over.load(Relaxed) {
                    // SAFETY: no pointers.
                    unsafe { libc::kill(pid, libc::SIGSTOP) };
                    // SAFETY: no pointers.
                    unsafe { libc::kill(pid, libc::SIGCONT) };
                }
            }
        });
        let mut seized = Seized::new(pid).expect("a child of ours");
        seized.stop().expect("it runs");
        let registers = seized.registers().expect("it has stopped");
        let a_millisecond = [0, 0, 1, 0, 0, 0];
        let calls: Vec<_> =
            (0..100).map(|_| seized.call(&registers, system_call(), libc::SYS_poll, a_millisecond)).collect();
        is_over.store(true, Relaxed);
        stopper.join().expect("it ends");
        let broken_off: Vec<_> = calls.iter().filter_map(|call| call.as_ref().err()).collect();
        assert!(broken_off.is_empty(), "{broken_off:?}");
    }

    #[test]
    fn a_signal_on_its_way_to_who_is_seized_arrives() {
        const SENT: u64 = 20_000;
        static HEARD: AtomicPtr<AtomicU64> = AtomicPtr::new(std::ptr::null_mut());
        extern "C" fn hear(_: i32) {
            // SAFETY: set before the handler is, to a counter that lives for ever.
            unsafe { &*HEARD.load(Relaxed) }.fetch_add(1, Relaxed);
        }
        let heard = shared_counter();
        let is_ready = shared_counter();
        HEARD.store(std::ptr::from_ref(heard).cast_mut(), Relaxed);
        let program = Program::run(|| {
            let handler: extern "C" fn(i32) = hear;
            // SAFETY: the handler only counts.
            unsafe { libc::signal(libc::SIGRTMIN(), handler as libc::sighandler_t) };
            is_ready.store(1, Relaxed);
            loop {
                std::hint::spin_loop();
            }
        });
        assert!(comes_true(|| is_ready.load(Relaxed) == 1));
        let pid = program.pid();
        // Signals of this kind are queued: none stands for two.
        let sender = std::thread::spawn(move || {
            for _ in 0..SENT {
                // SAFETY: no pointers.
                assert_eq!(unsafe { libc::kill(pid, libc::SIGRTMIN()) }, 0);
                std::thread::sleep(Duration::from_micros(5));
            }
        });
        while !sender.is_finished() {
            seize_and_let_go(&program);
        }
        sender.join().expect("all were sent");
        assert!(comes_true(|| heard.load(Relaxed) == SENT), "{} of {SENT}", heard.load(Relaxed));
    }

    fn tracer_was_gone(until_ns: u64) -> bool {
        now_ns() < until_ns
    }
}

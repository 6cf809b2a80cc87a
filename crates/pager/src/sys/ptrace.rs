//! Running system calls in another process, without patching its code and without stopping its other threads.
//!
//! A thread is seized and interrupted, its registers point at a `syscall` instruction in the vDSO, and one single step
//! carries the call out. All calls about one thread must come from the thread of ours that seized it.

use std::cell::RefCell;
use std::io;
use std::ops::RangeInclusive;
use std::time::Duration;

use spillway_core::Address;

use super::clock::now_ns;
use super::fd::checked;
use super::sched::nap;
use crate::procfs;

/// `PTRACE_O_TRACECLONE`: threads it creates are seized too, before their first instruction. Only while it stands still and runs
/// calls of ours: what the program creates is no business of ours.
const TRACE_CLONE: usize = 1 << 3;
/// `PTRACE_O_TRACESYSGOOD`: a stop before or behind a call looks like no other.
const TELL_CALLS: usize = 1;
/// What that looks like.
const CALL_STOP: i32 = libc::SIGTRAP | 0x80;
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
    /// See [`Seized::stop_at_calls`].
    at_calls: bool,
    /// It has ended, and its end was taken note of.
    reaped: bool,
    /// When it was last seen not to have stopped.
    seen_ns: u64,
}

/// Looks for a stop between which the CPU is only offered to others, some 20 us: most stops come within them, and a nap takes longer.
const LOOKS: u32 = 32;
/// The same for a thread that is not hurried, and may be on another CPU.
const FIRST_LOOKS: u32 = 12;
/// Between two looks from then on while a thread that is not hurried has yet to stop: some kernels end a shorter one before the CPU is free.
const FIRST_NAP: Duration = Duration::from_micros(30);
/// Between two looks for a stop: a system call in a target takes about this long.
const NAP: Duration = Duration::from_micros(5);
/// Naps after which it takes longer than any call should: somebody else needs the CPU.
const NAPS_MAX: u32 = 200;
/// Between two looks from then on.
const LONG_NAP: Duration = Duration::from_micros(200);
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
    /// Seizes `thread`, which goes on running; one that this thread of ours has yet to let go of is seized already.
    ///
    /// # Errors
    /// EPERM without rights over it or when someone else traces it, ESRCH when it is gone.
    pub fn new(thread: i32) -> io::Result<Self> {
        if is_left(thread) {
            LEFT.with_borrow_mut(|left| left.retain(|&other| other != thread));
            return Ok(Self::running(thread, 0));
        }
        Self::with(thread, 0)
    }

    /// The same of a thread of ours, to which seccomp filters do not apply from now on.
    ///
    /// # Errors
    /// As [`Seized::new`], and EPERM without `CAP_SYS_ADMIN`.
    pub fn unfiltered(thread: i32) -> io::Result<Self> {
        Self::with(thread, SUSPEND_SECCOMP)
    }

    /// The same, or as [`Seized::new`] without `CAP_SYS_ADMIN`; none where it cannot be had. For one that is to be led on while its process is
    /// stopped.
    pub fn to_lead(thread: i32) -> Option<Self> {
        Self::unfiltered(thread).or_else(|_| Self::new(thread)).ok()
    }

    fn with(thread: i32, options: usize) -> io::Result<Self> {
        request(libc::PTRACE_SEIZE, thread, 0, options)?;
        Ok(Self::running(thread, options))
    }

    /// One that is seized.
    fn running(thread: i32, options: usize) -> Self {
        Self { thread, options, stopped: false, at_calls: false, reaped: false, seen_ns: 0 }
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
        self.stop_within(STOP_DEADLINE_NS).map(|_| ())
    }

    /// The same, with a deadline of the caller's. Returns when, by the monotonic clock, it last was seen not to have stopped: until then it
    /// runs, or waits for its turn to, as ever.
    ///
    /// # Errors
    /// When it ended or did not stop in time.
    pub fn stop_within(&mut self, deadline_ns: u64) -> Result<u64, CallError> {
        self.seen_ns = now_ns();
        let until_ns = self.seen_ns + deadline_ns;
        request(libc::PTRACE_INTERRUPT, self.thread, 0, 0)?;
        // A signal may have been on its way to the program; we are only to be told of it.
        while let (0, signal) = self.wait_stop(Some(until_ns))? {
            self.stopped = false;
            request(libc::PTRACE_CONT, self.thread, 0, usize::try_from(signal).unwrap_or(0))?;
        }
        self.set_killed_with_us(false)?;
        Ok(self.seen_ns)
    }

    /// Whether it, and any thread that it makes, is killed when this thread of ours ends; it stands still, and runs calls of ours.
    ///
    /// # Errors
    /// When it ended.
    pub fn set_killed_with_us(&self, is_killed: bool) -> Result<(), CallError> {
        let killed = if is_killed { KILLED_WITH_US } else { 0 };
        Ok(request(libc::PTRACE_SETOPTIONS, self.thread, 0, self.options | TRACE_CLONE | TELL_CALLS | killed)?)
    }

    /// From now on it stops before and behind each call, rather than behind each instruction: that one was to be the last is not taken
    /// back when this thread of ours ends, and a trap behind it would end the process.
    pub fn stop_at_calls(&mut self) {
        self.at_calls = true;
    }

    /// Waits for its next stop; returns the ptrace event in it (zero for a plain trap) and its signal.
    ///
    /// Never blocks in `waitpid`: the end of a process's first thread is told only after that of the others, which may be
    /// waiting for us to take note of theirs.
    fn wait_stop(&mut self, deadline_ns: Option<u64>) -> Result<(i32, i32), CallError> {
        let mut naps = 0_u32;
        loop {
            let looked_ns = now_ns();
            let mut status = 0;
            // SAFETY: `status` is writable.
            match unsafe { libc::waitpid(self.thread, &raw mut status, libc::__WALL | libc::WNOHANG) } {
                0 if deadline_ns.is_some_and(|deadline| looked_ns > deadline) => return Err(CallError::Stuck),
                0 => {
                    (naps, self.seen_ns) = (naps + 1, looked_ns);
                    if naps.is_multiple_of(NAPS_PER_LOOK) && self.is_dead() {
                        return Err(CallError::Ended);
                    }
                    match naps {
                        // With a deadline, it runs as ever, and may need our CPU.
                        FIRST_LOOKS..NAPS_MAX if deadline_ns.is_some() => nap(FIRST_NAP),
                        ..LOOKS => std::thread::yield_now(),
                        LOOKS..NAPS_MAX => nap(NAP),
                        NAPS_MAX.. => nap(LONG_NAP),
                    }
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

    /// Writes whole words to where it may not write itself, ending with zeros.
    ///
    /// # Errors
    /// When it ended, or has nothing there.
    pub fn write_code(&self, at: Address, code: &[u8]) -> Result<(), CallError> {
        for (place, piece) in (at.0..).step_by(size_of::<usize>()).zip(code.chunks(size_of::<usize>())) {
            let mut word = [0; size_of::<usize>()];
            word[..piece.len()].copy_from_slice(piece);
            let place = usize::try_from(place).expect("addresses fit");
            request(libc::PTRACE_POKETEXT, self.thread, place, usize::from_ne_bytes(word))?;
        }
        Ok(())
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
        let (mut created, mut deliver, mut is_inside) = (None, 0, false);
        loop {
            let further = if self.at_calls { libc::PTRACE_SYSCALL } else { libc::PTRACE_SINGLESTEP };
            request(further, self.thread, 0, deliver)?;
            deliver = 0;
            match self.wait_stop(None)? {
                (EVENT_CLONE, _) => {
                    let mut thread = 0_u64;
                    request(libc::PTRACE_GETEVENTMSG, self.thread, 0, &raw mut thread as usize)?;
                    let thread = i32::try_from(thread).map_err(|_| CallError::Ended)?;
                    created = Some(Self { thread, stopped: false, reaped: false, ..*self });
                }
                // The process was stopped as a whole; the step has not happened yet.
                (EVENT_STOP, _) => {}
                (_, CALL_STOP) if !is_inside => is_inside = true,
                (_, signal) if !matches!(signal, libc::SIGTRAP | CALL_STOP) => {
                    deliver = usize::try_from(signal).unwrap_or(0)
                }
                _ => {
                    let after = self.registers()?;
                    is_inside = false;
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
            nap(Duration::from_micros(20));
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

/// Whether this thread of ours has seized it, does not want it any more, and could not let go of it yet.
pub fn is_left(thread: i32) -> bool {
    let_go_of_left();
    LEFT.with_borrow(|left| left.contains(&thread))
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
mod tests;

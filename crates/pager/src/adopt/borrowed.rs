//! The thread of the target that is stopped: it makes a mapping and another thread for us, and goes on as it was.

use std::hash::{BuildHasher, RandomState};

use spillway_core::{Address, PAGE_BYTES_U64};

use super::checks::Vdso;
use super::{SCRATCH_BYTES, STAGING_BYTES, SYSCALL, bits, explain};
use crate::error::Error;
use crate::restart;
use crate::sys::clock::now_ns;
use crate::sys::detour::Detour;
use crate::sys::process;
use crate::sys::ptrace::{ALL_BUT_TRAPS, CallError, Registers, Seized};
use crate::sys::sched::Hurried;
use crate::sys::sequence;

/// See the module's documentation. From [`Borrowed::stop`] on until [`Borrowed::let_go`] begins to put its registers back, should we be
/// killed, it goes on as it was, but for a call that was broken off; without a detour it is killed with us.
pub(super) struct Borrowed {
    thread: Seized,
    saved: Registers,
    mask: u64,
    /// When it stopped.
    since_ns: u64,
    /// A system call in the target.
    instruction: u64,
    detour: Option<Detour>,
    hurried: Option<Hurried>,
}

impl Borrowed {
    /// Stops a thread.
    ///
    /// # Errors
    /// When it does not stop, or is not what it was when it was looked at; it goes on as it was.
    pub(super) fn stop(
        pid: i32,
        mut thread: Seized,
        vdso: &Vdso,
        detour: Option<Detour>,
        deadline_ns: u64,
    ) -> Result<Self, Error> {
        let (id, instruction) = (thread.thread(), vdso.instruction);
        let explain = |error| explain(pid, error);
        let since_ns = thread.stop_within(deadline_ns).map_err(explain)?;
        let mut saved = thread.registers().map_err(explain)?;
        // An exec since we looked has put something else there, or nothing.
        let mut there = [0_u8; 2];
        if process::read_memory(id, Address(instruction), &mut there).is_err() || there != SYSCALL {
            return Err(Error::Ended(pid));
        }
        if saved.cs != 0x33 {
            return Err(Error::Not64Bit(pid));
        }
        sequence::give_up(&thread, &mut saved);
        let mask = thread.signal_mask().map_err(explain)?;
        let hurried = Hurried::planned(id);
        let detour = detour.filter(|detour| detour.lead(id, &saved, mask, hurried.as_ref()).is_ok());
        if let Some(detour) = &detour {
            thread.stop_at_calls();
            thread.set_registers(&detour.back(&saved)).map_err(explain)?;
        } else {
            thread.set_killed_with_us(true).map_err(explain)?;
        }
        // Not before it stands still: told to hurry, it would run on alone, and touch all of its memory.
        let hurried = hurried.and_then(Hurried::begun);
        thread.set_signal_mask(ALL_BUT_TRAPS).map_err(explain)?;
        Ok(Self { thread, saved, mask, since_ns, instruction, detour, hurried })
    }

    /// Lets it map the staging area and make the helper.
    ///
    /// # Errors
    /// As the calls say; what was mapped is unmapped.
    pub(super) fn make_helper(&mut self) -> Result<(Address, Seized), CallError> {
        let at = |of: fn(&Detour) -> u64| self.detour.as_ref().map_or(self.instruction, of);
        let (call, clone_call) = (at(Detour::call), at(Detour::clone_call));
        let bytes = STAGING_BYTES + SCRATCH_BYTES;
        let protection = bits(libc::PROT_READ | libc::PROT_WRITE);
        let flags = bits(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
        let staging = [far_from_others(), bytes, protection, flags, u64::MAX, 0];
        let (staging, _) = self.thread.call(&self.saved, call, libc::SYS_mmap, staging)?;
        let shared = libc::CLONE_VM | libc::CLONE_FS | libc::CLONE_SIGHAND | libc::CLONE_THREAD | libc::CLONE_SYSVSEM;
        let helper = [bits(shared | libc::CLONE_FILES), 0, 0, 0, 0, 0];
        match self.thread.call(&self.saved, clone_call, libc::SYS_clone, helper) {
            Ok((_, Some(helper))) => Ok((Address(staging), helper)),
            other => {
                self.thread.call(&self.saved, call, libc::SYS_munmap, [staging, bytes, 0, 0, 0, 0])?;
                Err(other.err().unwrap_or(CallError::Ended))
            }
        }
    }

    /// Lets it go on; returns how long it stood still. A call that the stop broke off is made again, without the time that it has slept;
    /// `spare` is memory for that.
    ///
    /// # Errors
    /// When it has ended.
    pub(super) fn let_go(mut self, slept_ns: u64, spare: Option<Address>) -> Result<(Option<Detour>, u64), CallError> {
        self.thread.set_signal_mask(self.mask)?;
        restart::repeat(self.thread.thread(), &mut self.saved, self.mask, slept_ns, spare);
        self.thread.set_registers(&self.saved)?;
        match &self.detour {
            // Where that fails the process has ended.
            Some(detour) => drop(detour.forget()),
            None => self.thread.set_killed_with_us(false)?,
        }
        // It keeps the CPU that it goes on with: what it was hurried by is taken back last.
        drop(self.thread);
        drop(self.hurried);
        Ok((self.detour, now_ns() - self.since_ns))
    }
}

/// Where our mappings may be, as a hint: the program may put its own back to where they were (`MREMAP_FIXED`) and takes the place for
/// free, over ours. The kernel looks for places among the program's mappings; nothing else comes to the middle of the address space,
/// but sanitizers' shadows, which are there before.
fn far_from_others() -> u64 {
    const FROM: u64 = 32 << 40;
    let anywhere = RandomState::new().hash_one(FROM) % FROM;
    FROM + anywhere / PAGE_BYTES_U64 * PAGE_BYTES_U64
}

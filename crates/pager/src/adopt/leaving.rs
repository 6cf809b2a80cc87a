//! Taking an agent out of a target.

use spillway_core::Address;

use super::{Agent, NAME, SCRATCH_BYTES, STAGING_BYTES, behind, explain, pieces, untraced, vdso};
use crate::error::Error;
use crate::procfs::{self, Mapping};
use crate::sys::detour::Detour;
use crate::sys::ptrace::{ALL_BUT_TRAPS, CallError, Registers, Seized};
use crate::target::mark_again;

/// Ends the agent `thread` of `pid` if none of the process's own threads is left: where those end one by one (`exit`, and
/// not `exit_group`), the process ends with the last, and has its status. Of those only the first one's can be learnt.
///
/// # Errors
/// When it has ended.
pub fn end_agent_left_alone(pid: i32, thread: i32, seized: &mut Option<Seized>) -> Result<(), Error> {
    let Ok(first) = procfs::stat(pid) else { return Ok(()) };
    let is_there = procfs::is_alive(procfs::thread_stat(pid, thread)) && procfs::is_agent(pid, thread);
    if first.state != b'Z' || !is_there || procfs::living_thread(pid).is_some() {
        return Ok(());
    }
    Halted::new(pid, thread, seized.take())?.exit(first.exit_status)
}

/// Ends the agent `thread` of `pid`, of which nobody has heard and which nobody will ask for anything, and takes what is left of its
/// adoption out as far as it is known by its names.
///
/// # Errors
/// When it has ended.
pub fn end_stray(pid: i32, thread: i32) -> Result<(), Error> {
    let mut halted = Halted::new(pid, thread, None)?;
    let mappings = procfs::mappings(pid).map_err(|_| Error::NoSuchProcess(pid))?;
    let is_ours = |mapping: &&Mapping| mapping.name == format!("/memfd:{NAME} (deleted)");
    for ours in mappings.iter().filter(is_ours) {
        halted.unmap(ours.span.start, ours.span.end.0 - ours.span.start.0)?;
        // The code is mapped behind the staging area, if there was room.
        let bytes = STAGING_BYTES + SCRATCH_BYTES;
        let before = ours.span.start.0.saturating_sub(bytes);
        if mappings.iter().any(|it| it.span.start.0 == before && it.span.end == ours.span.start && it.name.is_empty()) {
            halted.unmap(Address(before), bytes)?;
        }
    }
    halted.exit(0)
}

/// An agent's thread that stands still for calls of ours. Should we be killed meanwhile, it ends; without a detour, its process does.
struct Halted {
    pid: i32,
    thread: Seized,
    registers: Registers,
    instruction: u64,
    detour: Option<Detour>,
}

impl Halted {
    /// It may be seized already.
    fn new(pid: i32, thread: i32, seized: Option<Seized>) -> Result<Self, Error> {
        let explain = |error| explain(pid, error);
        let seized = seized.map_or_else(|| Seized::new(thread).map_err(CallError::from), Ok);
        let mut seized = seized.and_then(|mut seized| seized.stop().map(|()| seized)).map_err(|error| match error {
            CallError::Refused(_) => untraced(pid, thread).err().unwrap_or_else(|| explain(error)),
            _ => explain(error),
        })?;
        let registers = seized.registers().map_err(explain)?;
        seized.set_signal_mask(ALL_BUT_TRAPS).map_err(explain)?;
        let vdso = vdso(thread, thread)?;
        let first = procfs::living_thread(pid).unwrap_or(thread);
        let detour = Detour::new(first, vdso.span).filter(|detour| detour.end(thread).is_ok());
        let instruction = detour.as_ref().map_or(vdso.instruction, Detour::last_call);
        if detour.is_some() {
            seized.stop_at_calls();
            seized.set_registers(&behind(instruction, &registers)).map_err(explain)?;
        } else {
            seized.set_killed_with_us(true).map_err(explain)?;
        }
        Ok(Self { pid, thread: seized, registers, instruction, detour })
    }

    fn call(&mut self, number: libc::c_long, arguments: [u64; 6]) -> Result<(), CallError> {
        self.thread.call(&self.registers, self.instruction, number, arguments).map(|_| ())
    }

    fn unmap(&mut self, start: Address, bytes: u64) -> Result<(), Error> {
        self.call(libc::SYS_munmap, [start.0, bytes, 0, 0, 0, 0]).map_err(|error| explain(self.pid, error))
    }

    fn exit(self, status: u8) -> Result<(), Error> {
        self.thread.exit(&self.registers, self.instruction, status).map_err(|error| explain(self.pid, error))?;
        // Where its process ends with it there is nothing to clear.
        self.detour.iter().for_each(|detour| drop(detour.clear()));
        Ok(())
    }
}

impl Agent {
    /// Takes the agent and everything of ours out of the target. Its regions must be unregistered.
    ///
    /// # Errors
    /// When the target ended meanwhile. [`Error::Traced`], also: a debugger has come to have it, and until that has gone the agent
    /// is there as before.
    pub fn leave(&mut self) -> Result<(), Error> {
        let pid = self.pid;
        let mut halted = Halted::new(pid, self.thread, self.seized.take())?;
        if let Some(marked) = &self.unmerges {
            let what = u64::from(libc::PR_SET_MEMORY_MERGE.unsigned_abs());
            let end = (libc::SYS_prctl, [what, 0, 0, 0, 0, 0]);
            for (number, arguments) in
                [end].into_iter().chain(marked.iter().map(|&it| (libc::SYS_madvise, mark_again(it))))
            {
                match halted.call(number, arguments) {
                    // Its own limit leaves no room for all the copies: it goes on merging, which harms nobody. Or what was
                    // marked is no more.
                    Ok(()) | Err(CallError::Answered(_)) => {}
                    Err(error) => return Err(explain(pid, error)),
                }
            }
        }
        for (start, bytes) in pieces(&self.layout) {
            halted.unmap(start, bytes)?;
        }
        halted.exit(0)
    }
}

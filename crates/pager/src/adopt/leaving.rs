//! Taking an agent out of a target.

use super::{Agent, explain, pieces, syscall_instruction, untraced};
use crate::error::Error;
use crate::procfs;
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
    let explain = |error| explain(pid, error);
    let (seized, registers) = halted(thread, seized.take()).map_err(explain)?;
    let instruction = syscall_instruction(thread, thread)?;
    seized.exit(&registers, instruction, first.exit_status).map_err(explain)
}

/// An agent's thread, which may be seized already, standing still for calls of ours on top of these registers.
fn halted(thread: i32, seized: Option<Seized>) -> Result<(Seized, Registers), CallError> {
    let mut seized = seized.map_or_else(|| Seized::new(thread), Ok)?;
    seized.stop()?;
    seized.set_killed_with_us(true)?;
    seized.set_signal_mask(ALL_BUT_TRAPS)?;
    let registers = seized.registers()?;
    Ok((seized, registers))
}

impl Agent {
    /// Takes the agent and everything of ours out of the target. Its regions must be unregistered.
    ///
    /// # Errors
    /// When the target ended meanwhile. [`Error::Traced`], also: a debugger has come to have it, and until that has gone the agent
    /// is there as before.
    pub fn leave(&mut self) -> Result<(), Error> {
        let pid = self.pid;
        let explain = |error| explain(pid, error);
        let halted = halted(self.thread, self.seized.take());
        if let Err(CallError::Refused(_)) = &halted {
            untraced(pid, self.thread)?;
        }
        let (mut seized, registers) = halted.map_err(explain)?;
        if let Some(marked) = &self.unmerges {
            let what = u64::from(libc::PR_SET_MEMORY_MERGE.unsigned_abs());
            let end = (libc::SYS_prctl, [what, 0, 0, 0, 0, 0]);
            for (number, arguments) in
                [end].into_iter().chain(marked.iter().map(|&it| (libc::SYS_madvise, mark_again(it))))
            {
                match seized.call(&registers, self.instruction, number, arguments) {
                    // Its own limit leaves no room for all the copies: it goes on merging, which harms nobody. Or what was
                    // marked is no more.
                    Ok(_) | Err(CallError::Answered(_)) => {}
                    Err(error) => return Err(explain(error)),
                }
            }
        }
        for (start, bytes) in pieces(&self.layout) {
            seized
                .call(&registers, self.instruction, libc::SYS_munmap, [start.0, bytes, 0, 0, 0, 0])
                .map_err(explain)?;
        }
        seized.exit(&registers, self.instruction, 0).map_err(explain)
    }
}

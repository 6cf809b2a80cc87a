//! Taking an agent out of a target.

use super::{Agent, explain, pieces, syscall_instruction};
use crate::error::Error;
use crate::procfs;
use crate::sys::ptrace::{ALL_BUT_TRAPS, CallError, Seized};
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
    let mut seized = match seized.take() {
        Some(seized) => seized,
        None => Seized::new(thread).map_err(|error| explain(error.into()))?,
    };
    seized.stop().and_then(|()| seized.set_signal_mask(ALL_BUT_TRAPS)).map_err(explain)?;
    let registers = seized.registers().map_err(explain)?;
    let instruction = syscall_instruction(thread, thread)?;
    seized.exit(&registers, instruction, first.exit_status).map_err(explain)
}

impl Agent {
    /// Takes the agent and everything of ours out of the target. Its regions must be unregistered.
    ///
    /// # Errors
    /// When the target ended meanwhile.
    pub fn leave(self) -> Result<(), Error> {
        let pid = self.pid;
        let explain = |error| explain(pid, error);
        let mut seized = match self.seized {
            Some(seized) => seized,
            None => Seized::new(self.thread).map_err(|error| explain(error.into()))?,
        };
        seized.stop().and_then(|()| seized.set_signal_mask(ALL_BUT_TRAPS)).map_err(explain)?;
        let registers = seized.registers().map_err(explain)?;
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

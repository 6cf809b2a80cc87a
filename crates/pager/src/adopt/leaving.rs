//! Taking an agent out of a target.

use super::{Agent, explain, pieces};
use crate::error::Error;
use crate::sys::ptrace::Seized;

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

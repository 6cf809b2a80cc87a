//! Bringing everything home, and leaving.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Instant;

use super::looks::{LOOK_LATEST, LOOK_SOONEST};
use super::process::Process;
use super::{Departure, Watcher};
use crate::adopt::{self, Agent};
use crate::driver::{Command, Homeward};
use crate::error::Error;

impl Watcher {
    pub(super) fn release(&mut self, reply: &Sender<Departure>) {
        if let Err(traced) = self.can_be_taken_out(|_| true) {
            let _ = reply.send(Departure::Done(Err(traced)));
            return;
        }
        let (homeward, answer) = channel();
        self.tell_inheritances();
        self.send(Command::Release { reply: homeward });
        let mut heard_at = Instant::now();
        loop {
            if heard_at.elapsed() >= LOOK_LATEST {
                self.hear_while_releasing();
                heard_at = Instant::now();
            }
            let step = match answer.recv_timeout(LOOK_SOONEST) {
                Ok(step) => step,
                Err(RecvTimeoutError::Timeout) => {
                    self.guard(Instant::now());
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => return,
            };
            match step {
                Homeward::Left(pages) => {
                    let _ = reply.send(Departure::Left(pages));
                }
                Homeward::NoRoom(pages) => {
                    let _ = reply.send(Departure::Done(Err(Error::NoRoomAtHome { pages })));
                    return;
                }
                Homeward::Done(mut agents) => {
                    let mut result = self.take_out(&mut agents);
                    while !agents.is_empty() {
                        std::thread::sleep(LOOK_LATEST);
                        result = result.and(self.take_out(&mut agents));
                    }
                    // Children that were let go with it are nobody's to look after either.
                    self.hear_reports();
                    self.ended = true;
                    self.processes.clear();
                    self.commons.clear();
                    self.orphans.clear();
                    self.uffds.clear();
                    self.tell_managed();
                    let _ = reply.send(Departure::Done(result));
                    return;
                }
            }
        }
    }

    /// Whether we can have these agents leave: not while a debugger has one of them.
    pub(super) fn can_be_taken_out(&self, whose: impl Fn(&Process) -> bool) -> Result<(), Error> {
        let mut theirs = self.processes.iter().filter(|(_, it)| it.agent != 0 && it.seized.is_none() && whose(it));
        theirs.try_for_each(|(&pid, process)| match adopt::untraced(pid, process.agent) {
            Err(Error::Ended(_)) => Ok(()),
            told => told,
        })
    }

    /// Has all these agents leave, each of them whatever happens to another. Those stay in the list that a debugger has come to
    /// have: it is waited for, as without us they would end their processes, or be left for good.
    ///
    /// # Errors
    /// The first that is not the end of the process.
    pub(super) fn take_out(&mut self, agents: &mut Vec<Agent>) -> Result<(), Error> {
        let mut result = Ok(());
        agents.retain_mut(|agent| {
            if let Some(process) = self.processes.get_mut(&agent.pid) {
                agent.seized = process.seized.take();
            }
            let left = agent.leave();
            let stays = matches!(left, Err(Error::Traced { .. }));
            if result.is_ok() && !stays && !matches!(left, Err(Error::Ended(_))) {
                result = left;
            }
            stays
        });
        result
    }

    /// Targets fork and end while their pages come home, and a child's pages come only once it is known what it inherits.
    fn hear_while_releasing(&mut self) {
        // One that was stopped and continued with its process waits for its tracer.
        self.processes.iter_mut().for_each(|(&pid, process)| {
            process.lead_agent(pid);
            process.tend_agent(pid);
        });
        self.hear_reports();
        self.tell_inheritances();
        self.bury_orphans();
    }
}

//! Which processes get an agent, and what becomes of a process that has lost it.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use spillway_core::{PAGE_BYTES_U64, TargetId};
use spillway_store::vault::Vault;

use super::forks::Orphan;
use super::mappings::Whose;
use super::process::{Process, Refusal};
use super::{Inherited, Watcher};
use crate::adopt::{self, Given};
use crate::driver::Command;
use crate::error::Error;
use crate::procfs;
use crate::sys::pagemap::Pagemap;
use crate::sys::process::share_memory;
use crate::sys::ptrace::Seized;
use crate::sys::sched::spare_descriptors;
use crate::tally::Tally;
use crate::{Local, OnPagerDeath, merging};

/// A process smaller than this is never worth an agent: 8 MiB.
const ADOPT_PAGES: u64 = 2048;
/// How long a dying agent may take: it is on its last instructions when we hear of it.
const REAP_WITHIN: Duration = Duration::from_millis(100);

impl Watcher {
    /// Unmanaged pages that the tree may have before its larger processes are adopted: half of a fixed budget, so that a
    /// program which fits well is never touched, and one that does not is adopted before it is past it.
    pub(super) fn adoption_threshold(&self) -> u64 {
        let of_all = match self.local {
            Local::Bytes(bytes) => {
                let local = self.shared.numbers.local_pages.load(Relaxed);
                (bytes / PAGE_BYTES_U64 / 2).saturating_sub(local)
            }
            Local::Percent(_) | Local::All => ADOPT_PAGES,
        };
        of_all.min(self.least_max_pages() / 2)
    }

    /// The smallest maximum that a tree has.
    fn least_max_pages(&self) -> u64 {
        self.roots.iter().map(|root| root.share().max_pages).min().unwrap_or(u64::MAX)
    }

    pub(super) fn adopt_the_grown(&mut self, unmanaged_pages: u64) -> bool {
        // Children of those who share what was handed over are watched, and not managed.
        if self.choice.handed_alone || unmanaged_pages < self.adoption_threshold() {
            return false;
        }
        let least = match self.local {
            Local::Bytes(bytes) => (self.least_max_pages().min(bytes / PAGE_BYTES_U64) / 16).clamp(512, ADOPT_PAGES),
            Local::Percent(_) | Local::All => ADOPT_PAGES,
        };
        let now = Instant::now();
        let candidates: Vec<i32> = self
            .processes
            .iter()
            .filter(|(_, process)| process.target.is_none() && process.handed.is_none())
            .filter(|(_, process)| process.refusal.is_none_or(|refusal| !refusal.stands(now)))
            .filter(|(_, process)| !self.is_leaving(process.tally.tree))
            .map(|(&pid, _)| pid)
            .collect();
        let large = |pid: &i32| procfs::size(*pid).is_ok_and(|size| self.weight(*pid, size) >= least);
        let candidates: Vec<i32> = candidates.into_iter().filter(large).collect();
        if !candidates.is_empty() {
            self.hear_of_forks();
        }
        let mut adopted = false;
        for pid in candidates {
            // Memory that is registered already belongs to a fork: those get their agents as such.
            if !self.orphans.is_empty() && procfs::has_registered_memory(pid).unwrap_or(true) {
                continue;
            }
            // A child of vfork has its parent's memory until it calls exec.
            let managed = self.processes.iter().filter(|(_, process)| process.target.is_some());
            if managed.into_iter().any(|(&other, _)| share_memory(pid, other)) {
                continue;
            }
            match self.adopt(pid, None) {
                Ok(()) => {
                    adopted = true;
                    self.read_mappings(pid);
                }
                Err(Error::Ended(_) | Error::NoSuchProcess(_)) => self.forget_if_ended(pid),
                Err(Error::NoMemoryOfItsOwn(_)) => self.forget(pid),
                Err(_) if procfs::living_thread(pid).is_none() => self.forget(pid),
                Err(error) => self.refuse(pid, &error),
            }
        }
        adopted
    }

    /// It could not be adopted, and runs on as it is.
    pub(super) fn refuse(&mut self, pid: i32, error: &Error) {
        let now = Instant::now();
        self.processes
            .entry(pid)
            .and_modify(|process| process.refusal = Some(Refusal::new(error, process.refusal, now)));
        self.tell_refused(pid, Some(error));
    }

    /// Tells why a process runs without a budget, or no more that it does.
    pub(super) fn tell_refused(&self, pid: i32, error: Option<&Error>) {
        let Ok(mut refused) = self.shared.refused.lock() else { return };
        if error.is_some() || refused.as_ref().is_some_and(|(of, _)| *of == pid) {
            *refused = error.map(|error| (pid, error.to_string()));
        }
    }

    /// A forked child can be seen once the event of the fork has been read, and the report of it comes later, when the fault
    /// thread has divided what was evicted. Adopted before as if it were nobody's, the child would get a second userfaultfd,
    /// which none of its memory is registered with: it would be served, and never evicted.
    pub(super) fn hear_of_forks(&mut self) {
        let (reply, answer) = channel();
        self.send(Command::Answer { reply });
        self.hear(&answer);
        self.hear_reports();
    }

    pub(super) fn adopt(&mut self, pid: i32, forked: Option<usize>) -> Result<(), Error> {
        let none_left = |error| Error::System { what: "keeping descriptors for one more process", error };
        spare_descriptors(self.bell.as_fd(), 0).map_err(none_left)?;
        let kill = self.on_pager_death == OnPagerDeath::KillTarget;
        let memory = self.processes.get(&pid).and_then(|process| process.handed.clone());
        let mut told = Ok(());
        let inheritance = || {
            if let Some(at) = forked.filter(|_| memory.is_none()) {
                told = self.tell_inheritance_of(&self.orphans[at], pid);
            }
        };
        let vault = self.vault.as_ref().map(Vault::name_only);
        let given = match (forked.map(|at| &self.orphans[at].uffd), &memory) {
            (None, _) => Given::Nothing,
            (Some(uffd), None) => Given::Forked(uffd),
            (Some(uffd), Some(memory)) => Given::Handed(uffd, memory),
        };
        let (mut agent, fresh) = adopt::adopt(pid, given, kill, vault, inheritance)?;
        let seized = agent.seized.take();
        let agent_thread = agent.thread;
        let pause_ns = agent.pause_ns;
        self.shared.pause_ns.fetch_max(pause_ns, Relaxed);
        let system = |error| Error::System { what: "opening the target's page map", error };
        // Without an agent it is told, later, when it faults.
        let pagemap = match told.and_then(|()| Pagemap::open(pid)) {
            Ok(pagemap) => pagemap,
            Err(error) => {
                // Without a word of ours, it would end its process as it does when its pager dies.
                agent.seized = seized;
                let _ = agent.leave();
                return Err(system(error));
            }
        };
        let staging = agent.staging_and_scratch();
        let tally = self.tally_of(pid, forked);
        tally.pause_ns.fetch_max(pause_ns, Relaxed);
        let started = procfs::stat(pid).map_or(0, |stat| stat.started);
        // What had an agent before has called exec.
        let had_agent = self.processes.get(&pid).is_some_and(|process| process.agent != 0);
        let inherits_merging = tally.hands_on_merging(if had_agent { u64::MAX } else { started });
        let was_forked = fresh.is_none();
        let target = match (fresh, forked) {
            (Some(uffd), _) => {
                let copy = uffd.clone();
                let (reply, answer) = channel();
                let (tally, share) = (Arc::clone(&tally), tally.share());
                let asks = tally.merges.load(Relaxed) && !inherits_merging;
                let marked = if asks { merging::marked(pid) } else { Vec::new() };
                self.send(Command::Add { pid, uffd, agent, tally, share, inherits_merging, marked, reply });
                let target = self.hear(&answer).ok_or(Error::Ended(pid))?;
                self.uffds.push((target, copy));
                target
            }
            (None, Some(at)) => {
                let orphan = self.orphans.remove(at);
                self.send(Command::Equip { target: orphan.target, agent });
                self.uffds.push((orphan.target, orphan.uffd));
                orphan.target
            }
            (None, None) => return Err(Error::Ended(pid)),
        };
        let process = self.processes.entry(pid).or_insert_with(|| Process::new(started, tally));
        process.refusal = None;
        process.was_forked = was_forked;
        process.target = Some(target);
        process.pagemap = Some(pagemap);
        process.staging = Some(staging);
        process.seized = seized;
        process.agent = agent_thread;
        process.read_at = None;
        self.tell_refused(pid, None);
        self.tell_managed();
        Ok(())
    }

    /// What is told of the tree that a process is of: of which it is the root, or that it is known to be of.
    pub(super) fn tally_of(&self, pid: i32, forked: Option<usize>) -> Arc<Tally> {
        let known = self.processes.get(&pid).map(|process| &process.tally);
        let forked = || forked.map(|at| &self.orphans[at].tally);
        let root = || self.roots.iter().find(|root| root.root.0 == pid);
        Arc::clone(known.or_else(forked).or_else(root).unwrap_or(&self.first))
    }

    /// A target that another pager has left behind.
    pub(super) fn take_over(&mut self, inherited: Inherited) {
        let Inherited { target, pid, started, agent, staging, uffd, tally } = inherited;
        let process = self.processes.entry(pid).or_insert_with(|| Process::new(started, Arc::clone(&tally)));
        if !self.roots.iter().any(|root| root.tree == tally.tree) {
            self.roots.push(Arc::clone(&tally));
            self.trees.add(tally);
        }
        process.target = Some(target);
        process.pagemap = Pagemap::open(pid).ok();
        process.staging = Some(staging);
        process.seized = adopt::keeps_seized().then(|| Seized::unfiltered(agent).ok()).flatten();
        process.agent = agent;
        process.read_at = None;
        self.uffds.push((target, uffd));
        self.tell_managed();
        // Nothing of it is captured before this has been looked at.
        self.find_resident(pid, Whose::Anyones);
        self.read_mappings(pid);
    }

    /// The agent is dying: its process can end, or exec, only after we have taken note.
    pub(super) fn reap_agent(&mut self, target: TargetId) {
        let Some(process) = self.processes.values_mut().find(|process| process.target == Some(target)) else { return };
        let Some(mut seized) = process.seized.take() else { return };
        let begun = Instant::now();
        while seized.tend() && begun.elapsed() < REAP_WITHIN {
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Its process has ended, and its address space with it, as a rule; if not, that is served on for whoever has it.
    pub(super) fn lose_process(&mut self, target: TargetId) {
        self.lose_agent(target);
        self.orphans.iter_mut().filter(|orphan| orphan.target == target).for_each(|orphan| orphan.pid = None);
    }

    /// The agent is gone. Its address space ended with it, as a rule (exit, exec); if not, it is served on and gets another.
    pub(super) fn lose_agent(&mut self, target: TargetId) {
        let Some(at) = self.uffds.iter().position(|(id, _)| *id == target) else { return };
        let pid = self.processes.iter().find(|(_, process)| process.target == Some(target)).map(|(&pid, _)| pid);
        if !self.uffds[at].1.is_alive() {
            return self.end_target(target);
        }
        let (_, uffd) = self.uffds.swap_remove(at);
        let tally = pid.map_or_else(|| Arc::clone(&self.first), |pid| self.tally_of(pid, None));
        if let Some(process) = pid.and_then(|pid| self.processes.get_mut(&pid)) {
            process.target = None;
        }
        self.orphans.push(Orphan::new(target, None, uffd, pid, tally));
        self.tell_managed();
    }
}

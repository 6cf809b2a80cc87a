//! Memory that several processes have mapped: who has it, so that all of them are managed before any of it leaves.
//!
//! Its pages are missing to whoever maps the file and is not registered: it would read zeros, and nobody would be asked. Of
//! anonymous shared memory all mappings come from one by forks, which are told of; a memfd can be handed to anyone, at any time,
//! and who maps one is seen afterwards. That is why it is managed only where a user says so.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::File;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, channel};
use std::time::{Duration, Instant};

use spillway_core::{Address, PAGE_BYTES_U64, Span, TargetId};

use super::Watcher;
use super::process::Process;
use crate::driver::{Command, Joined, portions};
use crate::error::Error;
use crate::outside::Ticks;
use crate::procfs::{self, FileId, Mapping, Size};
use crate::sys::clock::thread_time;
use crate::sys::process::share_memory;
use crate::sys::procmap::ProcMap;
use crate::sys::window::{is_memory, next_data};
use crate::tally::Tally;

/// How long after a look all processes are looked through again for who has mapped it: while not all are managed, and afterwards.
const LOOK_UNTIL_READY: Duration = Duration::from_millis(4);
/// Who has mapped it since reads zeros until then, and is to be adopted within a second of that.
const LOOK_WHEN_READY: Duration = Duration::from_millis(400);
/// Looks in a row that find everyone managed, once no fork is under way of which nothing was told.
const LOOKS_AGREE: u32 = 2;
/// How long pages are put back before it is looked for other things again.
const RESTORE_WITHIN: Duration = Duration::from_millis(50);
/// What does not come to be managed in so many looks is looked at seldom.
const REFUSALS_MAX: u32 = 50;

/// How long it is waited for what is there of a file, before other things are looked at again.
const FIND_WITHIN: Duration = Duration::from_millis(20);

/// A file of memory, managed by the fault thread.
pub struct InheritedCommons {
    /// Which file.
    pub id: FileId,
    /// What it is to the core.
    pub joined: Joined,
    /// The file.
    pub file: Arc<File>,
    /// What is told of the tree that it belongs to.
    pub tally: Arc<Tally>,
}

/// A file of memory that is managed.
pub(super) struct Common {
    id: FileId,
    /// What it is to the core.
    joined: Joined,
    file: Arc<File>,
    /// What is told of the tree that it belongs to.
    pub(super) tally: Arc<Tally>,
    /// Looks in a row that found everyone managed.
    agreed: u32,
    /// Of each process that was found to have it mapped, the threads that may be at a fork that began before: the child has it mapped,
    /// nothing of it is registered, and it is in no list before the fork is over.
    forking: HashMap<i32, Vec<Ticks>>,
    is_ready: bool,
    /// Looks in a row that did not.
    refusals: u32,
    /// Nobody has it mapped.
    is_deserted: bool,
    /// Where what is there of it is told, when it is being looked for.
    finding: Option<Receiver<Vec<Span>>>,
}

impl Common {
    /// Whether no fork that began before these processes were managed was under way any more when they were last looked at: then whoever
    /// came of one was in the list of which they are.
    fn had_forked(&mut self, pids: &[i32]) -> bool {
        let had_forked = pids.iter().all(|pid| self.forking.get(pid).is_some_and(Vec::is_empty));
        self.forking.retain(|pid, _| pids.contains(pid));
        for &pid in pids {
            if let Entry::Vacant(entry) = self.forking.entry(pid)
                && let Some(threads) = Ticks::of(pid)
            {
                entry.insert(threads);
            }
            self.forking.entry(pid).and_modify(|threads| threads.retain(|thread| !thread.is_outside()));
        }
        had_forked
    }
}

/// What is there of a file, whose first page is at `home`.
fn data_of(file: &File, home: Address) -> Vec<Span> {
    let place = |offset: u64| Address(home.0 + offset).page();
    let (mut found, mut from) = (Vec::new(), 0);
    while let Some((start, end)) = next_data(file, from) {
        found.push(Span { start: place(start), end: place(end.next_multiple_of(PAGE_BYTES_U64)) });
        from = end;
    }
    found
}

impl Watcher {
    /// Has what a process shares with others managed, too, where that is wanted.
    pub(super) fn join_commons(&mut self, pid: i32, mappings: &[Mapping]) {
        let Some(target) = self.processes.get(&pid).and_then(|process| process.target) else { return };
        let choice = self.choice;
        for mapping in mappings.iter().filter(|mapping| choice.takes_shared(mapping)) {
            // Also what was seen before: it may have been unmapped, and mapped again at the same place.
            let _ = mapping.file.is_some_and(|id| self.join(target, pid, id, mapping));
        }
    }

    pub(super) fn join(&mut self, target: TargetId, pid: i32, id: FileId, mapping: &Mapping) -> bool {
        let known = self.commons.iter().position(|common| common.id == id);
        let file = match known {
            Some(at) => Arc::clone(&self.commons[at].file),
            None => {
                let file = procfs::open_mapped(pid, mapping.span).ok().filter(is_memory);
                let Some(file) = file else { return false };
                Arc::new(file)
            }
        };
        let Ok(about) = file.metadata() else { return false };
        let pages = about.len().div_ceil(PAGE_BYTES_U64);
        let (reply, answer) = channel();
        let (copy, mapping) = (Arc::clone(&file), Box::new(mapping.clone()));
        self.send(Command::Join { target, file: copy, pages, mapping, reply });
        let Some(Some(joined)) = self.hear(&answer) else { return false };
        if known.is_none() {
            let tally = self.tally_of(pid, None);
            self.add_common(InheritedCommons { id, joined, file, tally });
        }
        self.commons.iter_mut().filter(|common| common.id == id).for_each(|common| common.is_deserted = false);
        true
    }

    /// What is managed from now on.
    pub(super) fn add_common(&mut self, InheritedCommons { id, joined, file, tally }: InheritedCommons) {
        let (agreed, is_ready, refusals, is_deserted) = (0, false, 0, false);
        let (finding, forking) = (None, HashMap::new());
        self.commons.push(Common {
            id,
            joined,
            file,
            tally,
            agreed,
            forking,
            is_ready,
            refusals,
            is_deserted,
            finding,
        });
    }

    /// Looks for who has mapped what is managed, and manages them as well.
    pub(super) fn tend_commons(&mut self) {
        self.end_deserted();
        let is_ready = self.commons.iter().all(|common| common.is_ready || common.refusals >= REFUSALS_MAX);
        let least = if is_ready { LOOK_WHEN_READY } else { LOOK_UNTIL_READY };
        // Half of a CPU's time at most. Not half of all time: who waits for a CPU, or for a process to stop, is not to be late again.
        let rests = self.commons_looked.is_some_and(|(at, worked)| at.elapsed() < least.max(worked));
        if self.commons.is_empty() || rests {
            return;
        }
        let worked = thread_time();
        let Some(having) = self.who_has_commons() else { return };
        for at in 0..self.commons.len() {
            let (id, tally) = (self.commons[at].id, Arc::clone(&self.commons[at].tally));
            if self.is_leaving(tally.tree) {
                continue;
            }
            let (mut all, mut may_fork) = (true, Vec::new());
            for (pid, mappings) in &having {
                let its: Vec<&Mapping> = mappings.iter().filter(|mapping| mapping.file == Some(id)).collect();
                if its.is_empty() {
                    continue;
                }
                // What it forks before all of them are registered is not told of. What can be mapped anew only by who has it mapped stays
                // registered, and may be elsewhere since it was listed.
                let is_managed = self.is_managed_in(*pid, &its, &tally);
                let common = &self.commons[at];
                let was_managed = common.forking.contains_key(pid) && !its.iter().any(|mapping| mapping.may_be_open());
                let may_have_forked = (is_managed || was_managed) && self.may_have_forked(*pid, common.is_ready);
                may_fork.extend(may_have_forked.then_some(*pid));
                all &= is_managed;
            }
            let common = &mut self.commons[at];
            common.refusals = if all { 0 } else { common.refusals.saturating_add(1) };
            let had_forked = common.had_forked(&may_fork);
            common.agreed = if all { common.agreed.saturating_add(1) } else { 0 };
            if !all && common.finding.as_ref().is_some_and(|finding| finding.try_recv() != Err(TryRecvError::Empty)) {
                // It was of an earlier moment.
                common.finding = None;
            }
            let (has_agreed, was_ready) = (had_forked && common.agreed >= LOOKS_AGREE, common.is_ready);
            let is_ready = has_agreed && (was_ready || self.find_in_common(at));
            let common = &mut self.commons[at];
            // It may have been closed meanwhile, where mappings could not be registered.
            if std::mem::replace(&mut common.is_ready, is_ready) || is_ready {
                let commons = common.joined.commons;
                self.send(Command::Open { commons, is_ready });
            }
        }
        self.commons_looked = Some((Instant::now(), thread_time() - worked));
    }

    /// Ends what nobody has mapped any more. Who has it open may map it again, and is given all of it back; without, it is gone.
    fn end_deserted(&mut self) {
        while let Some(at) = self.commons.iter().position(|common| common.is_deserted) {
            let Common { id, joined, .. } = self.commons[at];
            if procfs::is_open_elsewhere(id) && !self.restore(joined) {
                return;
            }
            let (reply, answer) = channel();
            self.send(Command::EndCommons { commons: joined.commons, reply });
            self.commons[at].is_deserted = false;
            if self.hear(&answer) == Some(true) {
                self.commons.swap_remove(at);
            }
        }
    }

    /// All processes but this one that have any of it mapped, and those mappings; none where we could not ask.
    pub(super) fn who_has_commons(&self) -> Option<Vec<(i32, Vec<Mapping>)>> {
        let own = std::process::id().cast_signed();
        let mut having = Vec::new();
        let is_common = |file: FileId| self.commons.iter().any(|common| file == common.id);
        for pid in procfs::processes().ok()?.into_iter().filter(|pid| *pid != own) {
            let has_any = ProcMap::open(pid).and_then(|procmap| procmap.has_any(is_common));
            match has_any.and_then(|any| if any { procfs::mappings(pid) } else { Ok(Vec::new()) }) {
                Ok(mut mappings) => {
                    mappings.retain(|mapping| mapping.file.is_some_and(is_common));
                    having.extend((!mappings.is_empty()).then_some((pid, mappings)));
                }
                Err(error) if procfs::is_for_want_of(&error) => return None,
                // It is gone, or not to be looked into: then it has not been handed what is ours.
                Err(_) => {}
            }
        }
        Some(having)
    }

    /// Whether a process is managed, and all of its mappings of a file; if not, it is made to be.
    fn is_managed_in(&mut self, pid: i32, its: &[&Mapping], tally: &Arc<Tally>) -> bool {
        // What a process has for itself of the file it would have to be asked for, too, and may differ.
        if its.iter().any(|mapping| mapping.private) {
            return false;
        }
        let process = self.processes.get(&pid);
        // Until there is an agent, what its userfaultfd does not tell of is possible.
        if process.is_some_and(|process| process.handed.is_some() && process.target.is_none()) {
            return false;
        }
        if process.is_none_or(|process| process.target.is_none()) {
            // Of a forked child whose process is not known yet all is registered that its parent had. That it was forked may not
            // have been heard of yet.
            self.hear_of_forks();
            let is_covered = |flag, span: Span| {
                let registered = procfs::mappings_with_flag(pid, &[flag]).unwrap_or_default();
                span.without(registered.iter().map(|(span, _)| *span)).is_empty()
            };
            let is_whole = |mapping: &&Mapping| ["um", "uw"].iter().all(|flag| is_covered(flag, mapping.span));
            if !self.orphans.is_empty() && its.iter().all(is_whole) {
                return self.orphans.iter().all(|orphan| orphan.has_known_views);
            }
            // A child of vfork has its parent's memory until it calls exec.
            if self.has_memory_of_managed(pid) {
                return true;
            }
            if self.adopt_for_commons(pid, tally).is_none() {
                return false;
            }
        }
        let Some(target) = self.processes.get(&pid).and_then(|process| process.target) else { return false };
        its.iter().all(|mapping| mapping.file.is_some_and(|id| self.join(target, pid, id, mapping)))
    }

    /// Whether a process that has mapped what is managed may have begun to fork before it was. `is_ready`: nobody did of those that had it
    /// mapped, and whoever has come since was born of them, be it to have their very memory (`CLONE_VM`).
    fn may_have_forked(&self, pid: i32, is_ready: bool) -> bool {
        let process = self.processes.get(&pid).filter(|process| process.target.is_some());
        process.map_or_else(|| !is_ready && self.has_memory_of_managed(pid), |process| !process.was_forked)
    }

    fn has_memory_of_managed(&self, pid: i32) -> bool {
        let mut managed = self.processes.iter().filter(|(_, process)| process.target.is_some());
        managed.any(|(&other, _)| share_memory(pid, other))
    }

    /// A process that has mapped what is managed is managed, too, with the tree that it shares that with.
    fn adopt_for_commons(&mut self, pid: i32, tally: &Arc<Tally>) -> Option<()> {
        // Another pager has it mapped to look at it, and would be served by one that it serves.
        if procfs::is_of_our_program(pid) {
            return None;
        }
        // Who was let go stays so, unless that was with these others, who are managed again.
        if self.let_go_of.get(&pid).is_some_and(|gone| gone.root != tally.root) {
            return None;
        }
        self.let_go_of.remove(&pid);
        let started = procfs::stat(pid).ok()?.started;
        let process = self.processes.entry(pid).or_insert_with(|| Process::new(started, Arc::clone(tally)));
        if process.refusal.is_some_and(|refusal| refusal.stands(Instant::now())) {
            return None;
        }
        match self.adopt(pid, None) {
            Ok(()) => {
                self.read_mappings(pid);
                return Some(());
            }
            Err(Error::Ended(_) | Error::NoSuchProcess(_)) => self.forget_if_ended(pid),
            Err(Error::NoMemoryOfItsOwn(_)) => self.forget(pid),
            // It may be in a fault that is to be served first: it is tried again.
            Err(Error::DidNotStop(_)) => {}
            Err(error) => self.refuse(pid, &error),
        }
        None
    }

    /// Tells the fault thread which pages of a commons are there; false while that is not known. It is looked for on another thread: a
    /// program that writes to the file may hold that up, until we have told what a child of its has inherited.
    fn find_in_common(&mut self, at: usize) -> bool {
        let Common { file, joined, finding, .. } = &mut self.commons[at];
        let joined = *joined;
        let answer = finding.get_or_insert_with(|| {
            let (reply, answer) = channel();
            let file = Arc::clone(file);
            // Where there is no thread, the answer never comes, and it is tried again.
            let _ =
                std::thread::Builder::new().name("files".into()).spawn(move || reply.send(data_of(&file, joined.home)));
            answer
        });
        let found = answer.recv_timeout(FIND_WITHIN);
        if !matches!(found, Err(RecvTimeoutError::Timeout)) {
            *finding = None;
        }
        let Ok(found) = found else { return false };
        for spans in portions(found) {
            self.send(Command::Found { target: joined.commons, spans });
        }
        true
    }

    /// Nobody has this mapped any more.
    pub(super) fn hear_deserted(&mut self, commons: TargetId) {
        let found = self.commons.iter_mut().find(|common| common.joined.commons == commons);
        found.into_iter().for_each(|common| (common.is_deserted, common.agreed) = (true, 0));
    }

    /// Puts all pages of a commons back where they were; false where there was no time for all of them.
    fn restore(&mut self, Joined { commons, home }: Joined) -> bool {
        self.send(Command::Open { commons, is_ready: false });
        let (begun, mut from, mut found) = (Instant::now(), home, false);
        while begun.elapsed() < RESTORE_WITHIN {
            let (reply, answer) = channel();
            self.send(Command::Restore { commons, from, reply });
            match self.hear(&answer).flatten() {
                Some((any, next)) => (from, found) = (next, found | any),
                // A pass that has found none is the last.
                None if !found => return true,
                None => (from, found) = (home, false),
            }
        }
        false
    }

    /// What a process has that could be managed, in pages: with what it shares, where that is wanted.
    pub(super) fn weight(&self, pid: i32, size: Size) -> u64 {
        let shared =
            || procfs::status_field(pid, "RssShmem").and_then(|text| text.split(' ').next()?.parse::<u64>().ok());
        let shared = if self.choice.shared_memory { shared() } else { None };
        size.anonymous_pages + shared.map_or(0, |kib| kib * 1024 / PAGE_BYTES_U64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outside::tests::until_asleep;
    use crate::watcher::tests::watcher_of;

    /// Two looks a few milliseconds apart found all managed while a third process was being born.
    #[test]
    fn who_may_be_at_a_fork_since_before_it_was_managed_is_waited_for() {
        let file = Arc::new(File::open("/dev/null").expect("it is everywhere"));
        let joined = Joined { commons: TargetId(1), home: Address(0) };
        let mut watcher = watcher_of(Vec::new());
        watcher.add_common(InheritedCommons {
            id: FileId { device: (0, 0), inode: 1 },
            joined,
            file,
            tally: Arc::default(),
        });
        let common = &mut watcher.commons[0];
        let mut sleep = std::process::Command::new("sleep").arg("60").spawn().expect("sleep");
        let mut spin = std::process::Command::new("sh").args(["-c", "while :; do :; done"]).spawn().expect("sh");
        let (asleep, running) = (sleep.id().cast_signed(), spin.id().cast_signed());
        until_asleep(asleep);
        // What was found of them in the same look came before they were looked at.
        let first = common.had_forked(&[asleep]);
        let second = common.had_forked(&[asleep]);
        let with_another = [common.had_forked(&[asleep, running]), common.had_forked(&[asleep, running])];
        let mut waits = (0..10_000).map(|_| {
            std::thread::sleep(Duration::from_millis(1));
            common.had_forked(&[asleep, running])
        });
        let in_the_end = waits.any(|had_forked| had_forked);
        for child in [&mut sleep, &mut spin] {
            child.kill().and_then(|()| child.wait()).expect("it ends");
        }
        assert!(!first && second, "{first} {second}");
        assert_eq!(with_another, [false, false], "it runs, and might be at a fork");
        assert!(in_the_end, "it has been in user mode since");
    }
}

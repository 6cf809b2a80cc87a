//! Forked children: whose address space it is, what it has inherited, and when it gets an agent.
//!
//! A child is served from its fork on, before it is known which process it is. Until then it is an [`Orphan`].

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use spillway_core::{Address, PAGE_BYTES_U64, Span, TargetId};

use super::Watcher;
use super::mappings::Whose;
use super::process::Refusal;
use crate::driver::{Command, Seen};
use crate::error::Error;
use crate::guardian;
use crate::procfs::{self, Size};
use crate::sys::clock::ticks_since_boot;
use crate::sys::process::share_memory;
use crate::sys::uffd::Uffd;
use crate::tally::Tally;

/// A forked child that lives longer gets an agent, if it grows: most call exec at once and are never worth it. Or if too much is local, as
/// nothing leaves a process without one, and what it shares with its parent does not leave that either. Or if there is no guardian, as the
/// agent keeps its userfaultfd open should this pager die.
const KEEP_AFTER: Duration = Duration::from_millis(10);
/// And any other: one that has become what it was forked for within this time is not stopped for nothing, and an adoption that is broken
/// off, as its pager is killed, ends the child.
const EQUIP_AFTER: Duration = Duration::from_millis(100);
/// How much it has grown then: 4 MiB.
const GROWN_PAGES: u64 = 1024;
/// And when one that would not stop is tried again.
const TRY_AGAIN_AFTER: Duration = Duration::from_secs(1);
/// A child that has become known started no earlier than so long before, in clock ticks.
const BORN_WITHIN_TICKS: u64 = 100;
/// Measuring private memory may take this share of the time: one part in fifty.
const PRIVATE_SHARE: u32 = 50;
/// And comes no sooner than this.
const PRIVATE_SOONEST: Duration = Duration::from_millis(20);

/// A forked child's address space whose process is not known yet.
pub(super) struct Orphan {
    pub(super) target: TargetId,
    /// Whose child it is, as long as that is there: its number is given to others afterwards.
    parent: Option<TargetId>,
    pub(super) uffd: Uffd,
    pub(super) pid: Option<i32>,
    since: Instant,
    /// When it became known, in clock ticks since boot.
    known_ticks: u64,
    refusal: Option<Refusal>,
    /// What is told of its tree.
    pub(super) tally: Arc<Tally>,
    /// Processes that turned out not to be it.
    strangers: Vec<i32>,
    /// How often its mappings had changed when that was last told.
    changes: u64,
    /// What it sees of shared memory is known.
    pub(super) has_known_views: bool,
    /// How large it was when that was looked at first.
    first_pages: Option<u64>,
}

impl Orphan {
    pub(super) fn new(
        target: TargetId,
        parent: Option<TargetId>,
        uffd: Uffd,
        pid: Option<i32>,
        tally: Arc<Tally>,
    ) -> Self {
        Self {
            target,
            parent,
            uffd,
            pid,
            since: Instant::now(),
            known_ticks: ticks_since_boot(),
            refusal: None,
            tally,
            strangers: Vec::new(),
            changes: 0,
            has_known_views: true,
            first_pages: None,
        }
    }

    /// The same, which another pager was told of at that time.
    pub(super) fn taken_over(self, known_ticks: u64) -> Self {
        Self { known_ticks, ..self }
    }

    /// This target is buried.
    pub(super) fn forget_parent(&mut self, buried: TargetId) {
        self.parent = self.parent.filter(|parent| *parent != buried);
    }

    /// Whether a process that started at this time may be it, as far as that says.
    fn was_born(&self, started_ticks: u64) -> bool {
        (self.known_ticks.saturating_sub(BORN_WITHIN_TICKS)..=self.known_ticks).contains(&started_ticks)
    }

    /// Whether it is time for an agent; `soon`: as early as for one that grows.
    fn is_due(&mut self, soon: bool) -> bool {
        let age = self.since.elapsed();
        let is_refused = self.refusal.is_some_and(|refusal| refusal.stands(Instant::now()));
        let Some(pid) = self.pid.filter(|_| !is_refused) else { return false };
        let may_stay = age >= KEEP_AFTER;
        if age >= EQUIP_AFTER || (soon && may_stay) {
            return true;
        }
        if !may_stay && self.first_pages.is_some() {
            return false;
        }
        let pages = procfs::size(pid).map_or(0, |size| size.anonymous_pages);
        let first_pages = *self.first_pages.get_or_insert(pages);
        may_stay && pages > first_pages + GROWN_PAGES
    }

    /// It would not stop now.
    pub(super) fn try_later(&mut self) {
        self.since = Instant::now() + TRY_AGAIN_AFTER;
    }
}

impl Watcher {
    /// A thread of a forked child has faulted for the first time, or its mappings changed while they were read.
    pub(super) fn hear_of_child(&mut self, target: TargetId, seen: Seen) {
        let asked = procfs::process_of(seen.thread).and_then(|pid| match pid {
            Some(pid) => Ok(self.may_be(target, pid)?.then_some(pid)),
            None => Ok(None),
        });
        let told = asked.and_then(|pid| self.tell_inheritance(target, pid, seen.changes).map(|()| pid));
        if told.is_err() {
            self.untold.push((target, seen));
        }
        let Some(orphan) = self.orphans.iter_mut().find(|orphan| orphan.target == target) else { return };
        orphan.changes = seen.changes.unwrap_or(orphan.changes);
        if let Ok(Some(pid)) = told {
            orphan.pid = Some(pid);
        }
    }

    /// Whether a process that is said to have faulted may be this forked child: a thread's number of another pid namespace names anyone,
    /// and others fault in a child's memory, too, that read it.
    ///
    /// # Errors
    /// When we could not ask.
    fn may_be(&self, target: TargetId, pid: i32) -> io::Result<bool> {
        let Some(orphan) = self.orphans.iter().find(|orphan| orphan.target == target) else {
            // It has an agent by now.
            return Ok(self.process_of(target) == Some(pid));
        };
        let another = self.processes.get(&pid).is_some_and(|process| process.target.is_some())
            || self.orphans.iter().any(|other| other.target != target && other.pid == Some(pid));
        if orphan.pid == Some(pid) {
            return Ok(true);
        }
        if another {
            return Ok(false);
        }
        let stat = match procfs::stat(pid) {
            Err(error) if procfs::is_for_want_of(&error) => return Err(error),
            stat => stat,
        };
        let parent = orphan.parent.and_then(|parent| self.process_of(parent));
        // Of one that has ended just now it is nobody's child any more, or another's.
        let living = parent.filter(|&parent| procfs::is_alive(procfs::stat(parent)));
        Ok(stat.is_ok_and(|stat| living.map_or_else(|| orphan.was_born(stat.started), |parent| stat.parent == parent)))
    }

    pub(super) fn process_of(&self, target: TargetId) -> Option<i32> {
        self.processes.iter().find(|(_, process)| process.target == Some(target)).map(|(&pid, _)| pid)
    }

    /// Tries again what could not be told.
    pub(super) fn hear_of_the_untold(&mut self) {
        std::mem::take(&mut self.untold).into_iter().for_each(|(target, seen)| self.hear_of_child(target, seen));
    }

    /// Finds out what a forked child has of its parent's memory, from the child's own mappings: they are as they were at
    /// the fork, but for `changes` that were heard of, if no more come meanwhile. No event tells of MADV_DONTFORK and
    /// MADV_WIPEONFORK.
    ///
    /// # Errors
    /// When we could not ask: nothing is told then. That it had inherited nothing would give it zeros for all it has.
    fn tell_inheritance(&self, target: TargetId, pid: Option<i32>, changes: Option<u64>) -> io::Result<()> {
        // Without a process: thread ids of another pid namespace mean nothing here. The parent's mappings must do.
        let Some(pid) = pid.filter(|_| changes.is_some()) else { return self.tell_inheritance_from_parent(target) };
        let of = |flag| procfs::mappings_with_flag(pid, &[flag]);
        let has = of("um")?;
        if has.is_empty() {
            return self.tell_inheritance_from_parent(target);
        }
        let spans = |marked: Vec<(Span, String)>| marked.into_iter().map(|(span, _)| span).collect();
        let seen = Some(Seen { thread: pid, changes });
        self.send(Command::Inherit { target, wiped: spans(of("wf")?), has: spans(has), seen });
        Ok(())
    }

    /// Tells it of one that is about to get an agent, and may have raised no fault yet.
    pub(super) fn tell_inheritance_of(&self, orphan: &Orphan, pid: i32) -> io::Result<()> {
        self.tell_inheritance(orphan.target, Some(pid), Some(orphan.changes))
    }

    /// The same from the parent's mappings, which may have changed since the fork: what is not there any more was there then, and
    /// of a parent that has ended nothing is known. So the child has all but what is marked not to be inherited.
    fn tell_inheritance_from_parent(&self, target: TargetId) -> io::Result<()> {
        let parent = self.orphans.iter().find(|orphan| orphan.target == target).and_then(|orphan| orphan.parent);
        let flags = |pid| procfs::mappings_with_flag(pid, &["dc", "wf"]);
        let marked = parent.and_then(|parent| self.process_of(parent)).map_or(Ok(Vec::new()), flags)?;
        let with = |flag| marked.iter().filter(move |(_, carried)| carried == flag).map(|(span, _)| *span);
        let everything = Span { start: Address(0), end: Address(!(PAGE_BYTES_U64 - 1)) };
        let (wiped, has) = (with("wf").collect(), everything.without(with("dc")));
        self.send(Command::Inherit { target, wiped, has, seen: None });
        Ok(())
    }

    /// Tells what all forked children have inherited that run on meanwhile: what they move would be missed in their own mappings.
    pub(super) fn tell_inheritances(&self) {
        self.orphans.iter().for_each(|orphan| drop(self.tell_inheritance_from_parent(orphan.target)));
    }

    /// A child of a managed parent that appeared after a fork, and is the only one that can be meant.
    pub(super) fn match_orphans(&mut self) {
        for at in 0..self.orphans.len() {
            if self.orphans[at].pid.is_some() {
                continue;
            }
            let parent = self.orphans[at].parent.and_then(|parent| self.process_of(parent));
            let rivals = self.orphans.iter().filter(|o| o.pid.is_none()).count();
            let Some(parent) = parent.filter(|_| rivals == 1) else { continue };
            let has_agent = |pid: &i32| self.processes.get(pid).is_some_and(|process| process.target.is_some());
            let taken = |pid: &i32| has_agent(pid) || self.orphans.iter().any(|orphan| orphan.pid == Some(*pid));
            let mut children = procfs::children(parent).unwrap_or_default();
            let strangers = &self.orphans[at].strangers;
            children.retain(|pid| {
                !taken(pid)
                    && !strangers.contains(pid)
                    && !share_memory(*pid, parent)
                    && procfs::has_registered_memory(*pid).unwrap_or(false)
            });
            if let [pid] = children[..] {
                self.orphans[at].pid = Some(pid);
            }
        }
    }

    /// Forked children that stay get an agent.
    pub(super) fn keep_orphans(&mut self) {
        let numbers = &self.shared.numbers;
        let is_over = numbers.local_pages.load(Relaxed) > numbers.budget_pages.load(Relaxed);
        let soon = guardian::ours().is_none() || !self.commons.is_empty() || is_over;
        let is_due =
            |this: &mut Self, at: usize| !this.is_leaving(this.orphans[at].tally.tree) && this.orphans[at].is_due(soon);
        while let Some(at) = (0..self.orphans.len()).find(|&at| is_due(self, at)) {
            let Some(pid) = self.orphans[at].pid else { return };
            let target = self.orphans[at].target;
            let adopted = self.adopt(pid, Some(at));
            if self.processes.get(&pid).is_some_and(|process| process.handed.is_some()) {
                // What it says is kept for `ps`.
                let _ = self.settle_handed(target, pid, adopted);
                continue;
            }
            let Some(orphan) = self.orphans.iter_mut().find(|orphan| orphan.target == target) else {
                self.processes.entry(pid).and_modify(|process| process.kept_only = true);
                continue;
            };
            match adopted {
                // Not the one that it was taken for, or it ended: the right one may yet be found.
                Err(Error::OtherMemory(_) | Error::Ended(_) | Error::NoSuchProcess(_)) => {
                    orphan.pid = None;
                    orphan.strangers.push(pid);
                }
                // It may be in a fault that waits for what it has inherited to be told.
                Err(Error::DidNotStop(_)) => {
                    orphan.try_later();
                    let _ = self.tell_inheritance_from_parent(target);
                }
                Err(error) => orphan.refusal = Some(Refusal::new(&error, orphan.refusal, Instant::now())),
                Ok(()) => {}
            }
        }
    }

    /// A kept child is managed in full once most of its memory is its own: before, evicting it would only copy what its
    /// parent has. But what is its own already counts, and may leave: what it has written to, or its parent, since the fork.
    /// The kernel copies a page then, and tells nobody.
    pub(super) fn promote(&mut self, pid: i32, size: Size) {
        let Some(process) = self.processes.get(&pid) else { return };
        if process.private_at.is_some_and(|at| at.elapsed() < process.private_wait) {
            return;
        }
        let begun = Instant::now();
        let private = self.find_resident(pid, Whose::ItsOwn);
        let Some(process) = self.processes.get_mut(&pid) else { return };
        process.private_wait = (begun.elapsed() * PRIVATE_SHARE).max(PRIVATE_SOONEST);
        process.private_at = Some(begun);
        if private * 2 > size.anonymous_pages {
            process.kept_only = false;
            self.read_mappings(pid);
            self.find_resident(pid, Whose::Anyones);
        }
    }

    /// Forked address spaces end without a word: ask.
    pub(super) fn bury_orphans(&mut self) {
        let dead: Vec<TargetId> =
            self.orphans.iter().filter(|orphan| !orphan.uffd.is_alive()).map(|orphan| orphan.target).collect();
        for target in dead {
            self.orphans.retain(|orphan| orphan.target != target);
            self.send(Command::Ended { target });
            self.tell_managed();
        }
    }
}

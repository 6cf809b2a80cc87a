//! The watcher: the thread that finds processes and mappings, adopts, and settles what the kernel leaves open.
//!
//! It does everything that may wait or allocate, so that the fault thread need not. It is the only thread that traces
//! targets. It looks at a process often while it grows towards the budget and seldom otherwise.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use spillway_core::{Address, PAGE_BYTES_U64, Span, TargetId};

use crate::adopt;
use crate::driver::{Command, Homeward, Report};
use crate::error::Error;
use crate::procfs::{self, Mapping, Size};
use crate::removals::Removals;
use crate::shared::Shared;
use crate::sys::fd::Bell;
use crate::sys::pagemap::Pagemap;
use crate::sys::process::{robust_list, share_memory};
use crate::sys::ptrace::{Seized, let_go_of_left};
use crate::sys::sched;
use crate::sys::uffd::Uffd;
use crate::watchdog::Watchdog;
use crate::{Local, OnPagerDeath};

/// The shortest time between two looks: what a program can touch meanwhile, at 4 GiB/s, is 4 MiB.
const LOOK_SOONEST: Duration = Duration::from_millis(1);
/// The longest, while nothing changes.
const LOOK_LATEST: Duration = Duration::from_millis(20);
/// How often while the fault thread is in the idle class: each look, on whichever CPU, may drive the faulting thread away
/// from it.
const LOOK_WHILE_IDLE: Duration = Duration::from_millis(8);
/// How long nothing must have changed for that: who maps memory, maps more.
const QUIET_AFTER: Duration = Duration::from_millis(300);
/// How often the process tree is walked,
const TREE_EVERY: Duration = Duration::from_millis(10);
/// and how often when it has just changed.
const YOUNG_TREE_EVERY: Duration = Duration::from_millis(2);
/// How long a tree counts as just changed.
const TREE_YOUNG_FOR: Duration = Duration::from_millis(500);
/// How often mappings are read even when nothing seems to have changed.
const MAPS_EVERY: Duration = Duration::from_secs(1);
/// Reading mappings may take this share of the watcher's time: one part in twenty.
const MAPS_SHARE: u32 = 20;
/// How often mappings are read in a row while they change.
const READINGS_MAX: u32 = 4;
/// Pages that memory may grow by, unexplained, before mappings are read again: 1 MiB.
const GROWTH_PAGES: u64 = 256;
/// A process smaller than this is never worth an agent: 8 MiB.
const ADOPT_PAGES: u64 = 2048;
/// What a program can touch in a second, in pages: 8 GiB.
const TOUCH_PAGES_PER_S: u64 = 1 << 21;
/// How often it is looked whether a debugger traces a target.
const TRACER_EVERY: Duration = Duration::from_millis(100);
/// How far before its robust list a thread's descriptor may begin, with its thread id in it: 0x2e0 bytes in glibc 2.36.
const DESCRIPTOR_BYTES: u64 = 0x300;
/// How long a dying agent may take: it is on its last instructions when we hear of it.
const REAP_WITHIN: Duration = Duration::from_millis(100);
/// A forked child that lives longer gets an agent, which keeps its userfaultfd open should this pager die. Most forked
/// children call exec at once and are never worth it.
const KEEP_AFTER: Duration = Duration::from_millis(10);
/// And when one that would not stop is tried again.
const TRY_AGAIN_AFTER: Duration = Duration::from_secs(1);
/// Measuring private memory may take this share of the time: one part in fifty.
const PRIVATE_SHARE: u32 = 50;
/// And comes no sooner than this.
const PRIVATE_SOONEST: Duration = Duration::from_millis(20);

/// What other threads ask of the watcher.
pub enum Request {
    /// Something from the fault thread.
    Report(Report),
    /// Adopt this process now; the answer is sent back.
    Adopt(i32, Sender<Result<(), Error>>),
    /// A new budget.
    Budget(Local),
    /// Bring everything home and leave; progress and the answer are sent back.
    Release(Sender<Departure>),
}

/// How far a release has come.
pub enum Departure {
    /// Pages still outside.
    Left(u64),
    /// Done, or why not.
    Done(Result<(), Error>),
}

/// What is known of a process.
struct Process {
    started: u64,
    target: Option<TargetId>,
    pagemap: Option<Pagemap>,
    /// Its agent's thread,
    agent: i32,
    /// where that is kept seized,
    seized: Option<Seized>,
    /// and when it was last looked whether someone else traces the process.
    tracer_at: Option<Instant>,
    /// Our own mapping in it that looks like any other.
    staging: Option<Span>,
    /// At the last reading of its mappings.
    seen: Size,
    read_at: Option<Instant>,
    /// Adoption failed; not tried again.
    refused: bool,
    /// A forked child that has an agent only so that its userfaultfd outlives us: its memory is still its parent's.
    kept_only: bool,
    /// When its private memory was last measured, and how long to wait for the next time.
    private_at: Option<Instant>,
    private_wait: Duration,
}

/// A forked child's address space whose process is not known yet.
struct Orphan {
    target: TargetId,
    parent: TargetId,
    uffd: Uffd,
    pid: Option<i32>,
    since: Instant,
    refused: bool,
    /// Processes that turned out not to be it.
    strangers: Vec<i32>,
}

/// See the module's documentation.
pub struct Watcher {
    /// The process whose descendants are watched; it is not watched itself.
    pub parent: Option<i32>,
    /// Processes watched on their own account, with their descendants.
    pub roots: Vec<i32>,
    /// What the agents do when this pager dies.
    pub on_pager_death: OnPagerDeath,
    /// The budget.
    pub local: Local,
    /// To the fault thread.
    pub commands: Sender<Command>,
    /// Wakes it.
    pub bell: Arc<Bell>,
    /// To this thread.
    pub requests: Receiver<Request>,
    /// What the fault thread publishes.
    pub shared: Arc<Shared>,
    /// Which processes are managed, for everyone to see.
    pub managed: Arc<std::sync::Mutex<Vec<i32>>>,
    processes: HashMap<i32, Process>,
    orphans: Vec<Orphan>,
    uffds: Vec<(TargetId, Uffd)>,
    removals: Removals,
    tree_at: Option<Instant>,
    tree_changed_at: Option<Instant>,
    watchdog: Watchdog,
    maps_rest_until: Option<Instant>,
    /// When mappings or sizes were last seen to have changed.
    changed_at: Option<Instant>,
    /// Asked for during a release, and to be answered after it.
    postponed: Vec<Request>,
    ended: bool,
}

impl Watcher {
    /// A watcher that has seen nothing yet.
    #[expect(clippy::too_many_arguments, reason = "its public fields, and nothing else")]
    pub fn new(
        parent: Option<i32>,
        on_pager_death: OnPagerDeath,
        local: Local,
        commands: Sender<Command>,
        bell: Arc<Bell>,
        requests: Receiver<Request>,
        shared: Arc<Shared>,
        managed: Arc<std::sync::Mutex<Vec<i32>>>,
    ) -> Self {
        Self {
            parent,
            roots: Vec::new(),
            on_pager_death,
            local,
            commands,
            bell,
            requests,
            shared,
            managed,
            processes: HashMap::new(),
            orphans: Vec::new(),
            uffds: Vec::new(),
            removals: Removals::default(),
            tree_at: None,
            tree_changed_at: None,
            watchdog: Watchdog::new(),
            maps_rest_until: None,
            changed_at: None,
            postponed: Vec::new(),
            ended: false,
        }
    }

    /// Watches until nobody can ask for anything any more.
    pub fn run(mut self) {
        // Without the right to it, looks come later where CPUs are busy, and targets grow further meanwhile.
        let _ = sched::set_nice(-20);
        let mut pause = LOOK_SOONEST;
        loop {
            match self.requests.recv_timeout(pause) {
                Ok(request) => {
                    self.answer(request);
                    while let Ok(request) = self.requests.try_recv() {
                        self.answer(request);
                    }
                    for request in std::mem::take(&mut self.postponed) {
                        self.answer(request);
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            if !self.ended {
                pause = self.look();
            }
        }
    }

    fn answer(&mut self, request: Request) {
        match request {
            Request::Report(report) => self.take_note(report),
            Request::Adopt(pid, reply) => {
                self.roots.push(pid);
                let _ = reply.send(self.adopt(pid, None).inspect(|()| self.read_mappings(pid)));
            }
            Request::Budget(local) => self.local = local,
            Request::Release(reply) => self.release(&reply),
        }
    }

    fn take_note(&mut self, report: Report) {
        match report {
            Report::Rescan(target) => {
                if let Some(process) = self.processes.values_mut().find(|process| process.target == Some(target)) {
                    process.read_at = None;
                }
            }
            Report::Removal(target, span, number) => {
                self.removals.announced(target, span, number);
            }
            Report::Forked { parent, child, uffd } => {
                self.tree_at = None;
                self.orphans.push(Orphan {
                    target: child,
                    parent,
                    uffd,
                    pid: None,
                    since: Instant::now(),
                    refused: false,
                    strangers: Vec::new(),
                });
                self.tell_managed();
            }
            Report::Thread(target, thread) => {
                let pid = procfs::status_field(thread, "Tgid").and_then(|pid| pid.parse().ok());
                self.tell_inheritance(target, pid);
                if let (Some(pid), Some(orphan)) = (pid, self.orphans.iter_mut().find(|o| o.target == target)) {
                    orphan.pid = Some(pid);
                }
            }
            Report::AgentGone(target) => {
                self.reap_agent(target);
                self.lose_agent(target);
                self.tree_at = None;
            }
        }
    }

    /// Finds out what a forked child has of its parent's memory, from the child's own mappings: they are as they were at
    /// the fork, and only the child itself can change them. No event tells of MADV_DONTFORK and MADV_WIPEONFORK.
    fn tell_inheritance(&self, target: TargetId, pid: Option<i32>) {
        let registered = |pid| procfs::mappings_with_flag(pid, &["um"]);
        let has = pid.map(registered).unwrap_or_default();
        if has.is_empty() {
            // Not the child: thread ids of another pid namespace mean nothing here. The parent's mappings must do.
            return self.tell_inheritance_from_parent(target);
        }
        let wiped = pid.map(|pid| procfs::mappings_with_flag(pid, &["wf"])).unwrap_or_default();
        let spans = |marked: Vec<(Span, String)>| marked.into_iter().map(|(span, _)| span).collect();
        self.send(Command::Inherit { target, wiped: spans(wiped), has: spans(has) });
    }

    fn tell_inheritance_from_parent(&self, target: TargetId) {
        let parent = self.orphans.iter().find(|orphan| orphan.target == target).map(|orphan| orphan.parent);
        let process = self.processes.iter().find(|(_, process)| parent.is_some() && process.target == parent);
        let marked = process.map(|(&pid, _)| procfs::mappings_with_flag(pid, &["dc", "wf", "um"])).unwrap_or_default();
        let with = |flag: &str| marked.iter().filter(|(_, carried)| carried == flag).map(|(span, _)| *span).collect();
        let everything = Span { start: Address(0), end: Address(!(PAGE_BYTES_U64 - 1)) };
        let has = if process.is_some() { [with("um"), with("wf")].concat() } else { vec![everything] };
        self.send(Command::Inherit { target, wiped: with("wf"), has });
    }

    /// The agent is gone. Its address space ended with it, as a rule (exit, exec); if not, it is served on and gets another.
    fn lose_agent(&mut self, target: TargetId) {
        let Some(at) = self.uffds.iter().position(|(id, _)| *id == target) else { return };
        let pid = self.processes.iter().find(|(_, process)| process.target == Some(target)).map(|(&pid, _)| pid);
        if !self.uffds[at].1.is_alive() {
            return self.end_target(target);
        }
        let (_, uffd) = self.uffds.swap_remove(at);
        if let Some(process) = pid.and_then(|pid| self.processes.get_mut(&pid)) {
            process.target = None;
        }
        let (since, strangers) = (Instant::now(), Vec::new());
        self.orphans.push(Orphan { target, parent: target, uffd, pid, since, refused: false, strangers });
        self.tell_managed();
    }

    /// The agent is dying: its process can end, or exec, only after we have taken note.
    fn reap_agent(&mut self, target: TargetId) {
        let Some(process) = self.processes.values_mut().find(|process| process.target == Some(target)) else { return };
        let Some(mut seized) = process.seized.take() else { return };
        let begun = Instant::now();
        while seized.tend() && begun.elapsed() < REAP_WITHIN {
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    fn send(&self, command: Command) {
        // The fault thread is gone only when the process ends.
        let _ = self.commands.send(command);
        self.bell.ring();
    }

    fn end_target(&mut self, target: TargetId) {
        self.send(Command::Ended { target });
        self.uffds.retain(|(id, _)| *id != target);
        self.removals.forget(target);
        for process in self.processes.values_mut().filter(|process| process.target == Some(target)) {
            process.target = None;
            process.kept_only = false;
            process.pagemap = None;
            process.seen = Size::default();
        }
        self.tell_managed();
    }

    fn tell_managed(&self) {
        let mut pids: Vec<i32> =
            self.processes.iter().filter(|(_, process)| process.target.is_some()).map(|(&pid, _)| pid).collect();
        pids.sort_unstable();
        if let Ok(mut managed) = self.managed.lock() {
            *managed = pids;
        }
        self.shared.orphans.store(self.orphans.len() as u64, Relaxed);
    }

    /// One look at everything; returns how long until the next.
    fn look(&mut self) -> Duration {
        let now = Instant::now();
        let young = self.tree_changed_at.is_some_and(|at| now - at < TREE_YOUNG_FOR);
        let tree_every = if young { YOUNG_TREE_EVERY } else { TREE_EVERY };
        if self.tree_at.is_none_or(|at| now - at >= tree_every) {
            self.tree_at = Some(now);
            self.walk_tree();
            self.bury_orphans();
        }
        let pids: Vec<i32> = self.processes.keys().copied().collect();
        let (mut unmanaged_pages, mut changed) = (0, false);
        for pid in pids {
            let Ok(size) = procfs::size(pid) else {
                self.forget(pid);
                continue;
            };
            let Some(process) = self.processes.get_mut(&pid) else { continue };
            process.tend_agent(pid);
            if process.kept_only {
                self.promote(pid, size);
                continue;
            }
            if process.target.is_none() {
                unmanaged_pages += size.anonymous_pages;
                continue;
            }
            let grown = size.anonymous_pages > process.seen.anonymous_pages + GROWTH_PAGES;
            let due = process.read_at.is_none_or(|at| now - at >= MAPS_EVERY);
            let rested = self.maps_rest_until.is_none_or(|until| now >= until);
            if rested && (due || grown || size.total_pages != process.seen.total_pages) {
                changed = true;
                self.read_mappings(pid);
            } else if size.anonymous_pages < process.seen.anonymous_pages {
                // It shrank by eviction: growth is measured from here.
                self.processes.entry(pid).and_modify(|process| process.seen.anonymous_pages = size.anonymous_pages);
            }
        }
        self.keep_orphans();
        let_go_of_left();
        changed |= self.adopt_the_grown(unmanaged_pages);
        self.settle_removals();
        let agents = self.processes.iter().map(|(pid, process)| (*pid, process.agent)).filter(|(_, agent)| *agent != 0);
        self.watchdog.look(now, &self.shared, agents);
        if changed {
            self.changed_at = Some(now);
        }
        self.next_look(unmanaged_pages, changed)
    }

    /// Soon while something changes, or while what is left of the budget could be touched soon.
    fn next_look(&self, unmanaged_pages: u64, changed: bool) -> Duration {
        if changed || self.removals.are_waiting() {
            return LOOK_SOONEST;
        }
        let idle = self.shared.idle.load(Relaxed);
        let quiet = self.changed_at.is_none_or(|at| at.elapsed() >= QUIET_AFTER);
        let room = self.adoption_threshold().saturating_sub(unmanaged_pages);
        let budget_room = self
            .shared
            .numbers
            .budget_pages
            .load(Relaxed)
            .saturating_sub(self.shared.numbers.local_pages.load(Relaxed));
        let managed = self.processes.values().any(|process| process.target.is_some());
        let pages = if managed { budget_room.max(GROWTH_PAGES) } else { room };
        let reach = Duration::from_micros(pages.saturating_mul(1_000_000) / TOUCH_PAGES_PER_S / 2);
        let young = self.tree_changed_at.is_some_and(|at| at.elapsed() < TREE_YOUNG_FOR);
        if idle && managed {
            return if quiet { LOOK_WHILE_IDLE } else { LOOK_SOONEST };
        }
        reach.clamp(LOOK_SOONEST, if young { YOUNG_TREE_EVERY } else { LOOK_LATEST })
    }

    /// Unmanaged pages that the tree may have before its larger processes are adopted: half of a fixed budget, so that a
    /// program which fits well is never touched, and one that does not is adopted before it is past it.
    fn adoption_threshold(&self) -> u64 {
        match self.local {
            Local::Bytes(bytes) => {
                let local = self.shared.numbers.local_pages.load(Relaxed);
                (bytes / PAGE_BYTES_U64 / 2).saturating_sub(local)
            }
            Local::Percent(_) | Local::All => ADOPT_PAGES,
        }
    }

    fn adopt_the_grown(&mut self, unmanaged_pages: u64) -> bool {
        if unmanaged_pages < self.adoption_threshold() {
            return false;
        }
        let least = match self.local {
            Local::Bytes(bytes) => (bytes / PAGE_BYTES_U64 / 16).clamp(512, ADOPT_PAGES),
            Local::Percent(_) | Local::All => ADOPT_PAGES,
        };
        let candidates: Vec<i32> = self
            .processes
            .iter()
            .filter(|(_, process)| process.target.is_none() && !process.refused)
            .map(|(&pid, _)| pid)
            .collect();
        let mut adopted = false;
        for pid in candidates {
            let Ok(size) = procfs::size(pid) else { continue };
            // Memory that is registered already belongs to a fork: those get their agents as such.
            if size.anonymous_pages < least || (!self.orphans.is_empty() && procfs::has_registered_memory(pid)) {
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
                Err(Error::Ended(_) | Error::NoSuchProcess(_)) => self.forget(pid),
                Err(error) => {
                    self.processes.entry(pid).and_modify(|process| process.refused = true);
                    if let Ok(mut refused) = self.shared.refused.lock() {
                        *refused = Some(error.to_string());
                    }
                }
            }
        }
        adopted
    }

    /// Forked children that stay get an agent.
    fn keep_orphans(&mut self) {
        let due = |orphan: &Orphan| orphan.pid.is_some() && !orphan.refused && orphan.since.elapsed() >= KEEP_AFTER;
        while let Some(at) = self.orphans.iter().position(due) {
            let Some(pid) = self.orphans[at].pid else { return };
            let target = self.orphans[at].target;
            let adopted = self.adopt(pid, Some(at));
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
                    orphan.since = Instant::now() + TRY_AGAIN_AFTER;
                    self.tell_inheritance(target, Some(pid));
                }
                _ => orphan.refused = true,
            }
        }
    }

    /// A kept child is managed in full once most of its memory is its own: before, evicting it would only copy what its
    /// parent has.
    fn promote(&mut self, pid: i32, size: Size) {
        let Some(process) = self.processes.get_mut(&pid) else { return };
        if process.private_at.is_some_and(|at| at.elapsed() < process.private_wait) {
            return;
        }
        let begun = Instant::now();
        let private = procfs::private_pages(pid).unwrap_or(0);
        process.private_wait = (begun.elapsed() * PRIVATE_SHARE).max(PRIVATE_SOONEST);
        process.private_at = Some(begun);
        if private * 2 > size.anonymous_pages {
            process.kept_only = false;
            self.read_mappings(pid);
            self.find_resident(pid);
        }
    }

    fn adopt(&mut self, pid: i32, forked: Option<usize>) -> Result<(), Error> {
        let kill = self.on_pager_death == OnPagerDeath::KillTarget;
        // A forked child that has raised no fault yet: as long as its one thread is stopped, nobody can change its mappings.
        let inheritance = || {
            if let Some(at) = forked {
                self.tell_inheritance(self.orphans[at].target, Some(pid));
            }
        };
        let (mut agent, fresh) = adopt::adopt(pid, forked.map(|at| &self.orphans[at].uffd), kill, inheritance)?;
        let seized = agent.seized.take();
        let agent_thread = agent.thread;
        self.shared.pause_ns.fetch_max(agent.pause_ns, Relaxed);
        let system = |error| Error::System { what: "opening the target's page map", error };
        let pagemap = match Pagemap::open(pid) {
            Ok(pagemap) => pagemap,
            Err(error) => {
                agent.seized = seized;
                let _ = agent.leave();
                return Err(system(error));
            }
        };
        let staging = agent.staging_and_scratch();
        let target = match (fresh, forked) {
            (Some(uffd), _) => {
                let copy = uffd.borrow().try_clone_to_owned().map_err(system)?;
                let (reply, answer) = channel();
                self.send(Command::Add { pid, uffd, agent, reply });
                let target = answer.recv().map_err(|_| Error::Ended(pid))?;
                self.uffds.push((target, copy.into()));
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
        let started = procfs::stat(pid).map_or(0, |stat| stat.started);
        let process = self.processes.entry(pid).or_insert_with(|| Process::new(started));
        process.target = Some(target);
        process.pagemap = Some(pagemap);
        process.staging = Some(staging);
        process.seized = seized;
        process.agent = agent_thread;
        process.read_at = None;
        self.tell_managed();
        Ok(())
    }

    /// Tells the fault thread which pages are resident in regions that a child has from its parent.
    fn find_resident(&mut self, pid: i32) {
        let Some(&Process { target: Some(target), staging, .. }) = self.processes.get(&pid) else { return };
        let Ok(mappings) = procfs::mappings(pid) else { return };
        let (reply, begun) = channel();
        self.send(Command::Register { target, spans: Vec::new(), reply });
        if begun.recv().is_err() {
            return;
        }
        let Some(pagemap) = self.processes.get(&pid).and_then(|process| process.pagemap.as_ref()) else { return };
        let mut found = Vec::new();
        for span in manageable(&mappings, staging) {
            // A process that is gone has nothing to be found.
            let _ = pagemap.populated(span, |span| found.push(span));
        }
        self.send(Command::Found { target, spans: found });
        self.send(Command::Scanned { target });
    }

    /// Registers what is new in a process, and tells the fault thread which pages of it are resident.
    fn read_mappings(&mut self, pid: i32) {
        let begun = Instant::now();
        let Some(&Process { target: Some(target), staging, .. }) = self.processes.get(&pid) else { return };
        let (mut size, mut new) = (Size::default(), Vec::new());
        for _ in 0..READINGS_MAX {
            size = procfs::size(pid).unwrap_or_default();
            let Ok(mappings) = procfs::mappings(pid) else { return };
            let spans = manageable(&mappings, staging);
            let (reply, answer) = channel();
            self.send(Command::Register { target, spans, reply });
            let Ok(registered) = answer.recv() else { return };
            let none = registered.is_empty();
            new.extend(registered);
            // Of a mapping that grew meanwhile a part is registered: two mappings to the kernel, and `mremap` takes only one.
            if none || procfs::size(pid).is_ok_and(|now| now.total_pages == size.total_pages) {
                break;
            }
        }
        let Some(process) = self.processes.get_mut(&pid) else { return };
        if let Some(pagemap) = &process.pagemap {
            for span in new {
                let mut found = Vec::new();
                // A process that is gone has nothing to be found.
                let _ = pagemap.populated(span, |span| found.push(span));
                if !found.is_empty() {
                    let _ = self.commands.send(Command::Found { target, spans: found });
                    self.bell.ring();
                }
            }
        }
        let _ = self.commands.send(Command::Scanned { target });
        // A thread that ends cannot wait for a fault: what the kernel reads and clears of it then must be there.
        let threads = procfs::threads(pid).unwrap_or_default();
        let lists = threads.iter().filter_map(|&thread| robust_list(thread));
        let addresses = lists.flat_map(|head| [Address(head.0.saturating_sub(DESCRIPTOR_BYTES)), head]).collect();
        let _ = self.commands.send(Command::Keep { target, addresses });
        process.seen = size;
        process.read_at = Some(begun);
        self.maps_rest_until = Some(Instant::now() + begun.elapsed() * MAPS_SHARE);
    }

    /// Finds descendants, and forgets who ended.
    fn walk_tree(&mut self) {
        let mut queue: Vec<i32> = self.roots.clone();
        let own = std::process::id().cast_signed();
        if let Some(parent) = self.parent {
            queue.extend(procfs::children(parent).unwrap_or_default());
        }
        queue.extend(self.processes.keys());
        let mut seen = std::collections::HashSet::new();
        while let Some(pid) = queue.pop() {
            if pid == own || !seen.insert(pid) {
                continue;
            }
            let Ok(stat) = procfs::stat(pid) else { continue };
            if matches!(stat.state, b'Z' | b'X') {
                continue;
            }
            if !self.processes.contains_key(&pid) {
                self.tree_changed_at = Some(Instant::now());
            }
            let known = self.processes.entry(pid).or_insert_with(|| Process::new(stat.started));
            if known.started != stat.started {
                // Another process under the same number, and none of ours unless its parent is.
                let target = known.target;
                self.processes.remove(&pid);
                target.into_iter().for_each(|target| self.end_target(target));
                continue;
            }
            queue.extend(procfs::children(pid).unwrap_or_default());
        }
        let gone: Vec<i32> = self.processes.keys().copied().filter(|pid| !is_alive(*pid)).collect();
        gone.into_iter().for_each(|pid| self.forget(pid));
        self.match_orphans();
    }

    /// A child of a managed parent that appeared after a fork, and is the only one that can be meant.
    fn match_orphans(&mut self) {
        for at in 0..self.orphans.len() {
            if self.orphans[at].pid.is_some() {
                continue;
            }
            let parent = self.orphans[at].parent;
            let parent = self.processes.iter().find(|(_, p)| p.target == Some(parent)).map(|(&pid, _)| pid);
            let rivals = self.orphans.iter().filter(|o| o.pid.is_none()).count();
            let Some(parent) = parent.filter(|_| rivals == 1) else { continue };
            let taken = |pid: &i32| self.orphans.iter().any(|orphan| orphan.pid == Some(*pid));
            let mut children = procfs::children(parent).unwrap_or_default();
            let strangers = &self.orphans[at].strangers;
            children.retain(|pid| {
                !taken(pid)
                    && !strangers.contains(pid)
                    && !share_memory(*pid, parent)
                    && procfs::has_registered_memory(*pid)
            });
            if let [pid] = children[..] {
                self.orphans[at].pid = Some(pid);
            }
        }
    }

    /// Forked address spaces end without a word: ask.
    fn bury_orphans(&mut self) {
        let dead: Vec<TargetId> =
            self.orphans.iter().filter(|orphan| !orphan.uffd.is_alive()).map(|orphan| orphan.target).collect();
        for target in dead {
            self.orphans.retain(|orphan| orphan.target != target);
            self.send(Command::Ended { target });
            self.tell_managed();
        }
    }

    fn forget(&mut self, pid: i32) {
        if let Some(target) = self.processes.get(&pid).and_then(|process| process.target) {
            self.reap_agent(target);
        }
        if let Some(target) = self.processes.remove(&pid).and_then(|process| process.target) {
            self.end_target(target);
        }
        self.roots.retain(|root| *root != pid);
        self.tell_managed();
    }

    fn settle_removals(&mut self) {
        let processes = &self.processes;
        let process_of = |target| {
            let found = processes.iter().find(|(_, process)| process.target == Some(target));
            found.and_then(|(&pid, process)| Some((pid, process.pagemap.as_ref()?)))
        };
        let (commands, bell) = (&self.commands, &self.bell);
        self.removals.settle(process_of, |command| {
            let _ = commands.send(command);
            bell.ring();
        });
    }

    /// Targets fork and end while their pages come home, and a child's pages come only once it is known what it inherits.
    fn hear_while_releasing(&mut self) {
        while let Ok(request) = self.requests.try_recv() {
            match request {
                Request::Report(report) => self.take_note(report),
                other => self.postponed.push(other),
            }
        }
        self.tell_inheritances();
        self.bury_orphans();
    }

    fn tell_inheritances(&self) {
        self.orphans.iter().for_each(|orphan| self.tell_inheritance(orphan.target, orphan.pid));
    }

    fn release(&mut self, reply: &Sender<Departure>) {
        let (homeward, answer) = channel();
        self.tell_inheritances();
        self.send(Command::Release { reply: homeward });
        let mut heard_at = Instant::now();
        loop {
            if heard_at.elapsed() >= LOOK_LATEST {
                self.hear_while_releasing();
                heard_at = Instant::now();
            }
            let step = match answer.recv_timeout(LOOK_LATEST) {
                Ok(step) => step,
                Err(RecvTimeoutError::Timeout) => continue,
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
                Homeward::Done(agents) => {
                    let processes = &mut self.processes;
                    let left = agents.into_iter().map(|mut agent| {
                        agent.seized = processes.get_mut(&agent.pid).and_then(|process| process.seized.take());
                        agent.leave()
                    });
                    let left = left.filter(|left| !matches!(left, Err(Error::Ended(_))));
                    let result = left.collect::<Result<(), Error>>();
                    self.ended = true;
                    self.processes.clear();
                    self.orphans.clear();
                    self.uffds.clear();
                    self.tell_managed();
                    let _ = reply.send(Departure::Done(result));
                    return;
                }
            }
        }
    }
}

impl Process {
    /// Keeps a seized agent running, and lets go of it while a debugger traces the process: one that finds a thread which it
    /// cannot have tries again for ever.
    fn tend_agent(&mut self, pid: i32) {
        if let Some(seized) = &mut self.seized {
            seized.tend();
        }
        if self.target.is_none() || self.agent == 0 || self.tracer_at.is_some_and(|at| at.elapsed() < TRACER_EVERY) {
            return;
        }
        let traced = procfs::status_field(pid, "TracerPid").is_some_and(|tracer| tracer != "0");
        match (&mut self.seized, traced) {
            (Some(seized), true) => {
                // Stopped and dropped: that detaches. A failure means that it is dying.
                let _ = seized.stop();
                self.seized = None;
            }
            (None, false) if self.tracer_at.is_some() && adopt::keeps_seized() => {
                self.seized = Seized::new(self.agent, true).ok();
            }
            _ => {}
        }
        self.tracer_at = Some(Instant::now());
    }

    fn new(started: u64) -> Self {
        Self {
            started,
            target: None,
            pagemap: None,
            agent: 0,
            seized: None,
            tracer_at: None,
            staging: None,
            seen: Size::default(),
            read_at: None,
            refused: false,
            kept_only: false,
            private_at: None,
            private_wait: Duration::ZERO,
        }
    }
}

fn is_alive(pid: i32) -> bool {
    procfs::stat(pid).is_ok_and(|stat| !matches!(stat.state, b'Z' | b'X'))
}

/// What may be registered: not our own mapping.
fn manageable(mappings: &[Mapping], staging: Option<Span>) -> Vec<Span> {
    let spans = mappings.iter().filter(|mapping| mapping.is_manageable()).map(|mapping| mapping.span);
    spans.filter(|span| staging.is_none_or(|staging| span.intersect(staging).is_none())).collect()
}

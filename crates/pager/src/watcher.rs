//! The watcher: the thread that finds processes and mappings, adopts, and settles what the kernel leaves open.
//!
//! It does everything that may wait or allocate, so that the fault thread need not. It is the only thread that traces
//! targets. It looks at a process often while it grows towards the budget and seldom otherwise.
//!
//! [`looks`] says when and in what order; [`tree`] finds processes, [`process`] is what is known of one; [`adoption`] gives
//! agents, [`mappings`] registers memory, [`commons`] what processes share, [`forks`] follows forked children, [`handed`] takes
//! in monitors that hand over their userfaultfd, [`release`] lets go of everything, [`departure`] of one tree.

mod adoption;
mod commons;
mod departure;
mod forks;
mod handed;
mod looks;
mod mappings;
mod process;
mod release;
#[cfg(test)]
mod tests;
mod tree;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::Instant;

use spillway_core::{Span, TargetId, TreeId};
use spillway_store::vault::Vault;

use crate::driver::{Command, Report, Seen};
use crate::error::Error;
use crate::handed::{Placed, Plugged};
use crate::procfs::Size;
use crate::removals::Removals;
use crate::shared::Shared;
use crate::sys::fd::Bell;
use crate::sys::process::those_with_memory_of;
use crate::sys::sched::{Class, set_class};
use crate::sys::uffd::Uffd;
use crate::tally::{Tally, Trees};
use crate::watchdog::Watchdog;
use crate::{Choice, Local, OnPagerDeath};

use commons::Common;
pub use commons::InheritedCommons;
use departure::{Leaving, LetGo};
use forks::Orphan;
use looks::LOOK_SOONEST;
use process::Process;

/// What other threads ask of the watcher.
pub enum Request {
    /// Something from the fault thread.
    Report(Report),
    /// Adopt this process with its descendants: now, or when they have grown. The answer is sent back.
    Adopt {
        /// What is told of them.
        tally: Arc<Tally>,
        /// Whether now.
        at_once: bool,
        /// For the answer.
        reply: Sender<Result<(), Error>>,
    },
    /// Watch these, whose agents were found, and look at all of their memory; with what they share.
    TakeOver(Vec<Inherited>, Vec<InheritedCommons>),
    /// Manage what a monitor has handed over; the answer is sent back.
    TakeIn(Box<Placed>, Sender<Result<(), Error>>),
    /// And what was plugged into its guest since; the answer is sent back.
    PlugIn(Plugged, Sender<Result<(), Error>>),
    /// Tell that nothing is half done, and do nothing until nobody can say any more that it may go on.
    StandStill(Sender<()>, Receiver<()>),
    /// A new budget.
    Budget(Local),
    /// Tell whether anyone is left who is served. If not, nobody will be again.
    IsAnyoneLeft(Sender<bool>),
    /// Bring everything home and leave; progress and the answer are sent back.
    Release(Sender<Departure>),
    /// The same for one tree.
    LetGo(TreeId, Sender<Departure>),
}

/// What the watcher must know of a target that was taken over.
pub struct Inherited {
    /// Its identity.
    pub target: TargetId,
    /// Its process, and when that was started.
    pub pid: i32,
    /// In ticks.
    pub started: u64,
    /// Its agent's thread.
    pub agent: i32,
    /// Our own mapping in it that looks like any other.
    pub staging: Span,
    /// Its userfaultfd.
    pub uffd: Uffd,
    /// What is told of its tree.
    pub tally: Arc<Tally>,
}

/// How far a release has come.
pub enum Departure {
    /// Pages still outside.
    Left(u64),
    /// Done, or why not.
    Done(Result<(), Error>),
}

/// See the module's documentation.
pub struct Watcher {
    /// The process whose descendants are watched; it is not watched itself.
    pub parent: Option<i32>,
    /// What is told of the descendants of [`Watcher::parent`].
    first: Arc<Tally>,
    /// Trees of which the first process lives.
    roots: Vec<Arc<Tally>>,
    /// All trees but that of the parent, for everyone to see.
    pub trees: Trees,
    leaving: Vec<Leaving>,
    /// Processes that were let go: nobody's descendants any more.
    let_go_of: HashMap<i32, LetGo>,
    /// What the agents do when this pager dies.
    pub on_pager_death: OnPagerDeath,
    /// The budget.
    pub local: Local,
    /// Which mappings are managed.
    pub choice: Choice,
    /// To the fault thread.
    pub commands: Sender<Command>,
    /// Wakes it.
    pub bell: Arc<Bell>,
    /// To this thread.
    pub requests: Receiver<Request>,
    /// Memory that outlives this pager, which agents keep open.
    pub vault: Option<Vault>,
    /// What the fault thread publishes.
    pub shared: Arc<Shared>,
    /// Which processes are managed, for everyone to see.
    pub managed: Arc<std::sync::Mutex<Vec<i32>>>,
    processes: HashMap<i32, Process>,
    /// Files of memory that several have mapped.
    commons: Vec<Common>,
    /// When all processes were last looked through for who has them mapped, and how much of a CPU's time that took.
    commons_looked: Option<(Instant, std::time::Duration)>,
    orphans: Vec<Orphan>,
    /// Forked children of which it could not be found out what they have inherited: until then their faults wait.
    untold: Vec<(TargetId, Seen)>,
    uffds: Vec<(TargetId, Uffd)>,
    removals: Removals,
    tree_at: Option<Instant>,
    tree_changed_at: Option<Instant>,
    watchdog: Watchdog,
    /// Until when mappings are not read again, and until when not even because memory has grown.
    maps_rest_until: Option<Instant>,
    growth_rests_until: Option<Instant>,
    /// When mappings or sizes were last seen to have changed.
    changed_at: Option<Instant>,
    /// Asked for while only reports are heard, and to be answered afterwards.
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
        choice: Choice,
        commands: Sender<Command>,
        bell: Arc<Bell>,
        requests: Receiver<Request>,
        vault: Option<Vault>,
        shared: Arc<Shared>,
        managed: Arc<std::sync::Mutex<Vec<i32>>>,
        trees: Trees,
        first: Arc<Tally>,
    ) -> Self {
        Self {
            parent,
            first,
            roots: Vec::new(),
            trees,
            leaving: Vec::new(),
            let_go_of: HashMap::new(),
            on_pager_death,
            local,
            choice,
            commands,
            bell,
            requests,
            vault,
            shared,
            managed,
            processes: HashMap::new(),
            commons: Vec::new(),
            commons_looked: None,
            orphans: Vec::new(),
            untold: Vec::new(),
            uffds: Vec::new(),
            removals: Removals::default(),
            tree_at: None,
            tree_changed_at: None,
            watchdog: Watchdog::new(),
            maps_rest_until: None,
            growth_rests_until: None,
            changed_at: None,
            postponed: Vec::new(),
            ended: false,
        }
    }

    /// Watches until nobody can ask for anything any more.
    pub fn run(mut self) {
        // Without the right to it, looks come later where CPUs are busy, and targets grow further meanwhile.
        let _ = set_class(0, Class::Normal);
        let mut pause = LOOK_SOONEST;
        loop {
            match self.requests.recv_timeout(pause) {
                Ok(request) => {
                    self.answer(request);
                    while let Ok(request) = self.requests.try_recv() {
                        self.answer(request);
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            for request in std::mem::take(&mut self.postponed) {
                self.answer(request);
            }
            if !self.ended {
                pause = self.look();
            }
        }
    }

    fn answer(&mut self, request: Request) {
        match request {
            // Who came now would be left without a pager.
            Request::Adopt { reply, .. } if self.ended => drop(reply.send(Err(Error::Ending))),
            Request::TakeIn(_, reply) if self.ended => drop(reply.send(Err(Error::Ending))),
            Request::PlugIn(_, reply) if self.ended => drop(reply.send(Err(Error::Ending))),
            Request::LetGo(_, reply) if self.ended => drop(reply.send(Departure::Done(Err(Error::Ending)))),
            Request::Report(report) => self.take_note(report),
            Request::Adopt { tally, at_once, reply } => {
                let _ = reply.send(self.plant(&tally, at_once));
            }
            Request::TakeOver(inherited, commons) => {
                // What is mapped of it is not to be taken for something new.
                commons.into_iter().for_each(|it| self.add_common(it));
                inherited.into_iter().for_each(|it| self.take_over(it));
            }
            Request::TakeIn(placed, reply) => {
                let _ = reply.send(self.take_in(*placed));
            }
            Request::PlugIn(plugged, reply) => {
                let _ = reply.send(self.plug_in(plugged));
            }
            Request::StandStill(still, until) => {
                if still.send(()).is_ok() {
                    let _ = until.recv();
                }
            }
            Request::Budget(local) => self.local = local,
            Request::IsAnyoneLeft(reply) => {
                self.ended |= !self.is_anyone_left();
                let _ = reply.send(!self.ended);
            }
            Request::Release(reply) => self.release(&reply),
            Request::LetGo(tree, reply) => self.let_go(tree, reply),
        }
    }

    /// Waits for an answer of the fault thread's, which may need the watchdog's help to give it; none when it is gone.
    fn hear<T>(&mut self, answer: &Receiver<T>) -> Option<T> {
        loop {
            match answer.recv_timeout(LOOK_SOONEST) {
                Ok(answer) => return Some(answer),
                Err(RecvTimeoutError::Timeout) => self.guard(Instant::now()),
                Err(RecvTimeoutError::Disconnected) => return None,
            }
        }
    }

    /// Has the watchdog look.
    fn guard(&mut self, now: Instant) {
        let agents = self.processes.iter().map(|(pid, process)| (*pid, process.agent)).filter(|(_, agent)| *agent != 0);
        self.watchdog.look(now, &self.shared, &agents);
    }

    /// Takes note of what the fault thread has told, and of nothing else.
    fn hear_reports(&mut self) {
        while let Ok(request) = self.requests.try_recv() {
            match request {
                Request::Report(report) => self.take_note(report),
                other => self.postponed.push(other),
            }
        }
    }

    fn take_note(&mut self, report: Report) {
        match report {
            Report::Rescan(target) => {
                if let Some(process) = self.processes.values_mut().find(|process| process.target == Some(target)) {
                    process.read_at = None;
                }
            }
            Report::Removal { target, span, number, by } => {
                self.removals.announced(target, span, number, by);
            }
            // It was let go, with all others.
            Report::Forked { .. } if self.ended => {}
            Report::Forked { parent, child, uffd, tally, has_known_views, taken_over } => {
                self.tree_at = None;
                let mut orphan = Orphan::new(child, parent, uffd, None, tally);
                orphan.has_known_views = has_known_views;
                self.orphans.push(taken_over.into_iter().fold(orphan, Orphan::taken_over));
                self.tell_managed();
            }
            Report::Thread(target, seen) => self.hear_of_child(target, seen),
            Report::AgentGone(target) => {
                self.reap_agent(target);
                self.lose_agent(target);
                self.tree_at = None;
            }
            Report::Unmergeable(target, answer) => self.tell_unmergeable(target, answer),
            Report::Deserted(commons) => self.hear_deserted(commons),
            Report::Buried(target) => {
                self.removals.forget(target);
                self.untold.retain(|(untold, _)| *untold != target);
                self.orphans.iter_mut().for_each(|orphan| orphan.forget_parent(target));
                self.send(Command::Reuse { target });
            }
        }
    }

    fn tell_unmergeable(&self, target: TargetId, answer: i64) {
        let of = self.process_of(target).unwrap_or(0);
        let error = std::io::Error::from_raw_os_error(i32::try_from(-answer).unwrap_or(0));
        if let Ok(mut refused) = self.shared.share_refused.lock() {
            *refused = Some(format!("process {of}: {error}"));
        }
    }

    fn settle_removals(&mut self) {
        let processes = &self.processes;
        let process_of = |target| {
            let found = processes.iter().find(|(_, process)| process.target == Some(target));
            found.and_then(|(&pid, process)| Some((pid, process.pagemap.as_ref()?)))
        };
        let (commands, bell) = (&self.commands, &self.bell);
        let tell = |command| {
            let _ = commands.send(command);
            bell.ring();
        };
        let mut removals = std::mem::take(&mut self.removals);
        // Who has let go of it meanwhile has done what it was at.
        let sharers = || Some(self.who_has_commons()?.into_iter().map(|(pid, _)| pid).collect());
        removals.settle(process_of, those_with_memory_of, sharers, tell);
        self.removals = removals;
    }

    fn end_target(&mut self, target: TargetId) {
        self.send(Command::Ended { target });
        self.uffds.retain(|(id, _)| *id != target);
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
        self.trees.each(|tree| {
            let ours = self.processes.iter().filter(|(_, it)| it.target.is_some() && it.tally.tree == tree.tally.tree);
            tree.pids = ours.map(|(&pid, _)| pid).collect();
            tree.pids.sort_unstable();
        });
        self.shared.orphans.store(self.orphans.len() as u64, Relaxed);
    }

    fn send(&self, command: Command) {
        // The fault thread is gone only when the process ends.
        let _ = self.commands.send(command);
        self.bell.ring();
    }
}

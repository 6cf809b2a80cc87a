//! Letting one tree go while the others are watched on.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::time::Instant;

use spillway_core::{TargetId, TreeId};

use super::process::Process;
use super::{Departure, Watcher};
use crate::adopt::Agent;
use crate::driver::{Command, Homeward};
use crate::error::Error;
use crate::procfs;
use crate::sys::process::share_memory;
use crate::tally::Tally;

/// A process that was let go.
pub(super) struct LetGo {
    /// When it was started.
    pub(super) started: u64,
    /// The root of the tree that it was let go with, and when that was started.
    pub(super) root: (i32, u64),
}

/// A tree on its way out.
pub(super) struct Leaving {
    tree: TreeId,
    answer: Receiver<Homeward>,
    reply: Sender<Departure>,
    /// All is home, and these are still to leave.
    agents: Vec<Agent>,
}

impl Watcher {
    /// A process and its descendants are a tree from now on: adopted now, or when they have grown.
    pub(super) fn plant(&mut self, tally: &Arc<Tally>, at_once: bool) -> Result<(), Error> {
        let pid = tally.root.0;
        self.hear_of_forks();
        let forked = !self.orphans.is_empty() && procfs::has_registered_memory(pid).unwrap_or(true);
        let managed = self.processes.iter().filter(|(_, process)| process.target.is_some());
        if forked || managed.into_iter().any(|(&other, _)| other != pid && share_memory(pid, other)) {
            return Err(Error::AlreadyAdopted(pid));
        }
        if let Some(process) = self.processes.get(&pid) {
            // Another's descendant may become a tree of its own as long as it has no agent.
            if process.target.is_some() || self.roots.iter().any(|root| root.root.0 == pid) {
                return Err(Error::AlreadyAdopted(pid));
            }
            self.processes.remove(&pid);
        }
        self.roots.push(Arc::clone(tally));
        self.trees.add(Arc::clone(tally));
        self.tree_at = None;
        if at_once && let Err(error) = self.adopt(pid, None) {
            self.roots.retain(|root| root.tree != tally.tree);
            self.trees.remove(tally.tree);
            return Err(error);
        }
        // Whatever tree it and its descendants were let go with, they are of this one.
        let mut its = vec![pid];
        while let Some(pid) = its.pop() {
            self.let_go_of.remove(&pid);
            its.extend(procfs::children(pid).unwrap_or_default());
        }
        if at_once {
            let _ = self.read_mappings(pid);
        }
        Ok(())
    }

    /// Begins to let a tree go.
    pub(super) fn let_go(&mut self, tree: TreeId, reply: Sender<Departure>) {
        if self.is_leaving(tree) {
            let _ = reply.send(Departure::Done(Err(Error::Leaving)));
            return;
        }
        if let Err(traced) = self.can_be_taken_out(|it| it.tally.tree == tree) {
            let _ = reply.send(Departure::Done(Err(traced)));
            return;
        }
        let (homeward, answer) = channel();
        self.tell_inheritances();
        self.trees.change(tree, |tree| tree.leaving = true);
        self.send(Command::Depart { tree, reply: homeward });
        self.leaving.push(Leaving { tree, answer, reply, agents: Vec::new() });
    }

    pub(super) fn is_leaving(&self, tree: TreeId) -> bool {
        self.leaving.iter().any(|leaving| leaving.tree == tree)
    }

    /// Hears how far the trees are that leave.
    pub(super) fn tend_departures(&mut self) {
        if self.leaving.is_empty() {
            return;
        }
        // Targets fork while their pages come home, and a child's pages come only once it is known what it inherits.
        self.tell_inheritances();
        for (&pid, process) in &mut self.processes {
            if self.leaving.iter().any(|leaving| leaving.tree == process.tally.tree) {
                process.lead_agent(pid);
            }
        }
        for mut leaving in std::mem::take(&mut self.leaving) {
            let result = loop {
                if !leaving.agents.is_empty() {
                    let result = self.take_out(&mut leaving.agents);
                    break leaving.agents.is_empty().then_some(result);
                }
                match leaving.answer.try_recv() {
                    Ok(Homeward::Left(pages)) => {
                        let _ = leaving.reply.send(Departure::Left(pages));
                    }
                    Ok(Homeward::NoRoom(pages)) => break Some(Err(Error::NoRoomAtHome { pages })),
                    Ok(Homeward::Done(mut agents)) => {
                        // A child that was let go with it may not have been heard of yet.
                        self.hear_reports();
                        let result = self.take_out(&mut agents);
                        self.uproot(leaving.tree);
                        leaving.agents = agents;
                        break leaving.agents.is_empty().then_some(result);
                    }
                    Err(TryRecvError::Empty) => break None,
                    Err(TryRecvError::Disconnected) => break Some(Ok(())),
                }
            };
            match result {
                Some(result) => {
                    self.trees.change(leaving.tree, |tree| tree.leaving = false);
                    let _ = leaving.reply.send(Departure::Done(result));
                }
                None => self.leaving.push(leaving),
            }
        }
    }

    /// Forgets a tree that was let go.
    fn uproot(&mut self, tree: TreeId) {
        let of_orphans = self.orphans.iter().filter(|orphan| orphan.tally.tree == tree).map(|orphan| orphan.target);
        let of_processes = self.processes.values().filter(|it| it.tally.tree == tree).filter_map(|it| it.target);
        let targets: Vec<TargetId> = of_orphans.chain(of_processes).collect();
        targets.into_iter().for_each(|target| self.end_target(target));
        self.orphans.retain(|orphan| orphan.tally.tree != tree);
        // An ancestor may be in another tree, and this one's are not to be found again as its descendants.
        let gone = self.processes.iter().filter(|(_, process)| process.tally.tree == tree);
        let let_go = |process: &Process| LetGo { started: process.started, root: process.tally.root };
        self.let_go_of.extend(gone.map(|(&pid, process)| (pid, let_go(process))));
        self.processes.retain(|_, process| process.tally.tree != tree);
        self.roots.retain(|root| root.tree != tree);
        self.commons.retain(|common| common.tally.tree != tree);
        self.end_trees();
        self.tell_managed();
    }

    /// Takes note of trees that nothing is left of.
    pub(super) fn end_trees(&mut self) {
        let over = self.trees_over();
        if over.is_empty() {
            return;
        }
        // As is said of [`Watcher::is_anyone_left`].
        self.hear_of_forks();
        let over = self.trees_over();
        self.trees.each(|tree| {
            if over.contains(&tree.tally.tree) {
                (tree.ended, tree.pids) = (Some(Instant::now()), Vec::new());
            }
        });
    }

    /// Those that nobody is known of.
    fn trees_over(&self) -> HashSet<TreeId> {
        let mut over: HashSet<TreeId> = self.trees.tallies().iter().map(|tally| tally.tree).collect();
        let processes = self.processes.values().map(|process| &process.tally);
        let orphans = self.orphans.iter().map(|orphan| &orphan.tally);
        processes.chain(&self.roots).chain(orphans).for_each(|tally| {
            over.remove(&tally.tree);
        });
        over
    }
}

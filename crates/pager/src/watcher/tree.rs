//! The process tree: who appeared, and who ended.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use super::Watcher;
use super::process::Process;
use crate::adopt;
use crate::procfs;
use crate::tally::Tally;

impl Watcher {
    /// Finds descendants, and forgets who ended.
    pub(super) fn walk_tree(&mut self) {
        let own = std::process::id().cast_signed();
        let mut queue: Vec<(i32, Arc<Tally>)> = Vec::new();
        if let Some(parent) = self.parent {
            let children = procfs::children(parent).unwrap_or_default();
            queue.extend(children.into_iter().map(|pid| (pid, Arc::clone(&self.first))));
        }
        // What is known comes before who is found to be its child: a tree may begin within another.
        queue.extend(self.roots.iter().map(|tally| (tally.root.0, Arc::clone(tally))));
        queue.extend(self.processes.iter().map(|(&pid, process)| (pid, Arc::clone(&process.tally))));
        self.let_go_of.retain(|&pid, gone| procfs::stat(pid).is_ok_and(|stat| stat.started == gone.started));
        let mut seen = HashSet::new();
        let roots: HashMap<i32, Arc<Tally>> =
            self.roots.iter().map(|tally| (tally.root.0, Arc::clone(tally))).collect();
        while let Some((pid, tally)) = queue.pop() {
            if pid == own || self.let_go_of.contains_key(&pid) || !seen.insert(pid) {
                continue;
            }
            let tally = roots.get(&pid).cloned().unwrap_or(tally);
            let Ok(stat) = procfs::stat(pid) else { continue };
            if procfs::living_thread(pid).is_none() {
                continue;
            }
            if !self.processes.contains_key(&pid) {
                self.tree_changed_at = Some(Instant::now());
            }
            let reused = tally.root.0 == pid && tally.root.1 != stat.started;
            if reused && !self.processes.contains_key(&pid) {
                continue;
            }
            let known = self.processes.entry(pid).or_insert_with(|| Process::new(stat.started, tally));
            let tally = Arc::clone(&known.tally);
            if known.started != stat.started {
                // Another process under the same number, and none of ours unless its parent is.
                let target = known.target;
                target.into_iter().for_each(|target| self.lose_process(target));
                self.processes.remove(&pid);
                continue;
            }
            if known.handed.is_none() {
                let children = procfs::children(pid).unwrap_or_default();
                queue.extend(children.into_iter().map(|child| (child, Arc::clone(&tally))));
            }
        }
        let known: Vec<i32> = self.processes.keys().copied().collect();
        known.into_iter().for_each(|pid| self.forget_if_ended(pid));
        self.roots.retain(|root| self.processes.contains_key(&root.root.0));
        self.match_orphans();
    }

    /// Something failed as it does with a process that has ended, and with a thread of it.
    pub(super) fn forget_if_ended(&mut self, pid: i32) {
        if procfs::living_thread(pid).is_none() {
            self.forget(pid);
        }
    }

    /// A process has ended, or is not to be watched.
    pub(super) fn forget(&mut self, pid: i32) {
        if let Some(process) = self.processes.get_mut(&pid).filter(|process| process.agent != 0) {
            // An error says that it is ending with its process, as agents do.
            let _ = adopt::end_agent_left_alone(pid, process.agent, &mut process.seized);
            let target = process.target;
            target.into_iter().for_each(|target| self.reap_agent(target));
        }
        if let Some(target) = self.processes.get(&pid).and_then(|process| process.target) {
            self.lose_process(target);
        }
        self.processes.remove(&pid);
        self.roots.retain(|root| root.root.0 != pid);
        self.tell_managed();
    }

    /// Whether anyone is left who is served. Who has ended had forked before, and nothing more can be read of that; but what was read may
    /// not have been told of yet, for as long as a slow store is waited for.
    pub(super) fn is_anyone_left(&mut self) -> bool {
        let is_known =
            |this: &Self| !this.orphans.is_empty() || this.processes.values().any(|process| process.target.is_some());
        is_known(self) || {
            self.hear_of_forks();
            is_known(self)
        }
    }
}

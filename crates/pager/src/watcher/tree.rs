//! The process tree: who appeared, and who ended.

use std::collections::HashSet;
use std::time::Instant;

use super::Watcher;
use super::process::Process;
use crate::adopt;
use crate::procfs;

impl Watcher {
    /// Finds descendants, and forgets who ended.
    pub(super) fn walk_tree(&mut self) {
        let mut queue: Vec<i32> = self.roots.clone();
        let own = std::process::id().cast_signed();
        if let Some(parent) = self.parent {
            queue.extend(procfs::children(parent).unwrap_or_default());
        }
        queue.extend(self.processes.keys());
        let mut seen = HashSet::new();
        while let Some(pid) = queue.pop() {
            if pid == own || !seen.insert(pid) {
                continue;
            }
            let Ok(stat) = procfs::stat(pid) else { continue };
            if procfs::living_thread(pid).is_none() {
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
            if known.handed.is_none() {
                queue.extend(procfs::children(pid).unwrap_or_default());
            }
        }
        let gone: Vec<i32> =
            self.processes.keys().copied().filter(|pid| procfs::living_thread(*pid).is_none()).collect();
        gone.into_iter().for_each(|pid| self.forget(pid));
        self.match_orphans();
    }

    pub(super) fn forget(&mut self, pid: i32) {
        if let Some(process) = self.processes.get_mut(&pid).filter(|process| process.agent != 0) {
            // An error says that it is ending with its process, as agents do.
            let _ = adopt::end_agent_left_alone(pid, process.agent, &mut process.seized);
            let target = process.target;
            target.into_iter().for_each(|target| self.reap_agent(target));
        }
        if let Some(target) = self.processes.remove(&pid).and_then(|process| process.target) {
            self.end_target(target);
        }
        self.roots.retain(|root| *root != pid);
        self.tell_managed();
    }
}

//! What other threads ask of the fault thread, and what it tells them.

use std::fs::File;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError};

use spillway_core::pager::Budget;
use spillway_core::policy::Settings;
use spillway_core::shares::Share;
use spillway_core::{Address, Span, TargetId, TreeId};
use spillway_store::Handle;

use super::Driver;
use super::commons::Joined;
use super::release::Release;
use crate::adopt::Agent;
use crate::procfs::Mapping;
use crate::removals::By;
use crate::stretch::Stretch;
use crate::sys::uffd::Uffd;
use crate::tally::Tally;
use crate::target::Target;
use crate::watcher::Request;

/// What other threads ask of this one.
pub enum Command {
    /// Manage an address space; its identity is sent back.
    Add {
        /// The process.
        pid: i32,
        /// Its userfaultfd.
        uffd: Uffd,
        /// Its agent.
        agent: Agent,
        /// What is told of its tree.
        tally: Arc<Tally>,
        /// What that may have of local memory.
        share: Share,
        /// If the kernel merges its pages, then because whoever it comes from was made to.
        inherits_merging: bool,
        /// What of it is merged at its own wish.
        marked: Vec<Span>,
        /// For the answer.
        reply: Sender<TargetId>,
    },
    /// Manage an address space that has its userfaultfd from itself; its identity is sent back. It is served once
    /// [`Command::Inherit`] has come.
    Hand {
        /// The process.
        pid: i32,
        /// Its userfaultfd.
        uffd: Uffd,
        /// What is told of its tree.
        tally: Arc<Tally>,
        /// What that may have of local memory.
        share: Share,
        /// Whether it is seen what it has mapped: it shares its memory.
        looks_into: bool,
        /// For the answer.
        reply: Sender<TargetId>,
    },
    /// Have the agent of a target keep memory from forked children, and in its place, for good. Whether it could is sent back; none
    /// while it cannot be asked.
    Hold {
        /// Whose.
        target: TargetId,
        /// Where.
        span: Span,
        /// For the answer.
        reply: Sender<Option<bool>>,
    },
    /// What is missing here is in the store.
    LayOut {
        /// Whose.
        target: TargetId,
        /// Where.
        span: Span,
        /// What the first page is called; those that follow are counted on.
        first: Handle,
        /// For the answer.
        reply: Sender<()>,
    },
    /// An agent for a target that has none: it was forked from another, or handed over.
    Equip {
        /// Which.
        target: TargetId,
        /// Its agent.
        agent: Agent,
    },
    /// What a forked child has of its parent's memory is known.
    Inherit {
        /// Which child.
        target: TargetId,
        /// It reads zeros here (`MADV_WIPEONFORK`).
        wiped: Vec<Span>,
        /// It has what is registered here and, of its parent's mappings, nothing else (`MADV_DONTFORK`).
        has: Vec<Span>,
        /// In whose mappings that was seen, if in its own.
        seen: Option<Seen>,
    },
    /// Register these mappings; what was not registered before is reported back. Also the beginning of a scan, which
    /// [`Command::Scanned`] ends.
    Register {
        /// Whose.
        target: TargetId,
        /// Which, in order.
        stretches: Vec<Stretch>,
        /// For the answer.
        reply: Sender<Vec<Span>>,
    },
    /// A target has mapped a file of memory that others may have mapped, too; what it is to the core is sent back, or none where it
    /// cannot be managed.
    Join {
        /// Whose.
        target: TargetId,
        /// The file.
        file: Arc<File>,
        /// Its size.
        pages: u64,
        /// The mapping.
        mapping: Box<Mapping>,
        /// For the answer.
        reply: Sender<Option<Joined>>,
    },
    /// Every mapping of such a file is managed, or not any more: its pages may leave, or may not.
    Open {
        /// Which.
        commons: TargetId,
        /// Whether.
        is_ready: bool,
    },
    /// Nobody has a commons mapped any more: its file gets what is outside of it, from `from` on. Whether there was any in a part of it
    /// is answered, and where to go on; none at its end.
    Restore {
        /// Which.
        commons: TargetId,
        /// From where.
        from: Address,
        /// For the answer.
        reply: Sender<Option<(bool, Address)>>,
    },
    /// A commons that nobody has mapped is no more; whether that is so is answered.
    EndCommons {
        /// Which.
        commons: TargetId,
        /// For the answer.
        reply: Sender<bool>,
    },
    /// The pages at these addresses must not leave.
    Keep {
        /// Whose.
        target: TargetId,
        /// Where.
        addresses: Vec<Address>,
    },
    /// These pages are resident: a portion ([`portions`]).
    Found {
        /// Whose.
        target: TargetId,
        /// Which.
        spans: Vec<Span>,
    },
    /// No more pages will be found by the scan under way.
    Scanned {
        /// Whose.
        target: TargetId,
    },
    /// None of these pages was resident any more when a scan was made after the removal of a span that holds them.
    RemovalSeen {
        /// Whose.
        target: TargetId,
        /// The youngest removal announced before the scan.
        number: u64,
        /// Which.
        gone: Vec<Span>,
    },
    /// This removal cannot be under way any more, nor any older one of the same pages.
    RemovalOver {
        /// Whose.
        target: TargetId,
        /// Its number.
        number: u64,
        /// Where.
        span: Span,
        /// Others share the memory.
        is_shared: bool,
    },
    /// Answer, once every event that was read before has been acted on and told of.
    Answer {
        /// For the answer.
        reply: Sender<()>,
    },
    /// The address space is gone. [`Report::Buried`] is the last that is told of it.
    Ended {
        /// Whose.
        target: TargetId,
    },
    /// That was heard: its identity means nobody any more, and may be another's.
    Reuse {
        /// Which.
        target: TargetId,
    },
    /// A new budget.
    Budget(Budget),
    /// Which pages leave, when and whose.
    Replacement(Settings),
    /// Bring everything home and unregister it; the agents are sent back, to be taken out.
    Release {
        /// For progress (pages still outside) and at last the agents.
        reply: Sender<Homeward>,
    },
    /// The same for one tree, while the others are served on.
    Depart {
        /// Which.
        tree: TreeId,
        /// As for [`Command::Release`].
        reply: Sender<Homeward>,
    },
    /// What a tree may have of local memory, from now on.
    Share(TreeId, Share),
    /// Whether the kernel is to merge pages of a tree has changed, in what is told of it.
    Merge {
        /// Which.
        tree: TreeId,
        /// What of its processes is merged now.
        marked: Vec<(i32, Vec<Span>)>,
    },
    /// Count the pages of each tree, into what is told of it; then answer.
    Count {
        /// For the answer.
        reply: Sender<()>,
    },
    /// Read no message any more, as this process is to end at once, if another pager can take over then: what a program does from
    /// now on is told to that one.
    Halt {
        /// Whether one can.
        stands: Sender<bool>,
        /// Once nobody holds the other end, all goes on.
        until: Receiver<()>,
    },
    /// Nobody needs this thread any more, nor what it has stored.
    End,
}

/// The mappings of a forked child.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    /// Its process, or one of its threads.
    pub thread: i32,
    /// How often they had changed before; none where they change so often that its parent's are to be asked.
    pub changes: Option<u64>,
}

/// How far a release has come.
pub enum Homeward {
    /// Pages still outside.
    Left(u64),
    /// The target's own limit leaves no room; everything stays managed.
    NoRoom(u64),
    /// All home; these agents can leave.
    Done(Vec<Agent>),
}

/// What this thread tells the scanner.
pub enum Report {
    /// A target has mappings that the table does not know.
    Rescan(TargetId),
    /// A removal was announced for resident pages, or for shared ones.
    Removal {
        /// By whom.
        target: TargetId,
        /// Of what.
        span: Span,
        /// Its number, which only grows.
        number: u64,
        /// Whose threads are at it.
        by: By,
    },
    /// A target forked; the userfaultfd is a copy of the child's.
    Forked {
        /// The parent, if it is there.
        parent: Option<TargetId>,
        /// The child.
        child: TargetId,
        /// The child's userfaultfd.
        uffd: Uffd,
        /// What is told of their tree.
        tally: Arc<Tally>,
        /// What the child sees of shared memory is known.
        has_known_views: bool,
        /// When that was, in clock ticks since boot, if another pager was told of it.
        taken_over: Option<u64>,
    },
    /// A thread of a forked child raised a fault: so this is whose address space it is. What it has inherited is to be told.
    Thread(TargetId, Seen),
    /// The agent of a target is gone: it ended, or called exec.
    AgentGone(TargetId),
    /// The kernel would not do what it was told of merging, and answered this.
    Unmergeable(TargetId, i64),
    /// Nobody has mapped this shared memory any more.
    Deserted(TargetId),
    /// Nothing more will be told of this target.
    Buried(TargetId),
}

/// How often a forked child's own mappings are asked for what it has inherited, if they change all the while.
const ASKED_MOST: u32 = 100;

/// Pages in a portion: the fault thread takes well below a millisecond for them.
const PORTION_PAGES: u64 = 4096;

/// Spans of pages that were found, in portions.
pub fn portions(spans: impl IntoIterator<Item = Span>) -> Vec<Vec<Span>> {
    let (mut all, mut last, mut room) = (Vec::new(), Vec::new(), PORTION_PAGES);
    for mut span in spans {
        while span.pages() >= room {
            let end = span.start.plus_pages(room);
            last.push(Span { start: span.start, end });
            all.push(std::mem::take(&mut last));
            (span.start, room) = (end, PORTION_PAGES);
        }
        if span.pages() > 0 {
            room -= span.pages();
            last.push(span);
        }
    }
    if !last.is_empty() {
        all.push(last);
    }
    all
}

impl Driver {
    /// Carries out commands; false when no more will come. What is found of a large process comes in portions, and faults of others
    /// between them.
    #[inline(never)]
    pub(super) fn obey(&mut self) -> bool {
        loop {
            match self.commands.try_recv() {
                Ok(Command::End) => return false,
                Ok(command) => {
                    let is_portion = matches!(command, Command::Found { .. });
                    self.carry_out(command);
                    if is_portion {
                        self.bell.ring();
                        return true;
                    }
                }
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
    }

    fn carry_out(&mut self, command: Command) {
        (0..self.targets.len()).for_each(|at| self.settle_unmapped(at, None));
        match command {
            Command::Add { pid, uffd, agent, tally, share, inherits_merging, marked, reply } => {
                let id = self.core.add_target();
                self.core.assign(id, tally.tree, share);
                self.write_down(id, &agent, &tally);
                self.add(Target { inherits_merging, marked, ..Target::new(id, pid, uffd, Some(agent), tally) });
                self.owes_errands = true;
                let _ = reply.send(id);
            }
            Command::Hand { pid, uffd, tally, share, looks_into, reply } => {
                let _ = reply.send(self.hand(pid, uffd, tally, share, looks_into));
            }
            Command::Hold { target, span, reply } => self.hold(target, span, reply),
            Command::LayOut { target, span, first, reply } => {
                self.lay_out(target, span, first);
                let _ = reply.send(());
            }
            Command::Equip { target: id, agent } => {
                if let Some(tally) = self.target(id).map(|target| Arc::clone(&target.tally)) {
                    self.write_down(id, &agent, &tally);
                    self.watch(id, Some(agent.pid));
                }
                if let Some(target) = self.target(id) {
                    target.pid = agent.pid;
                    target.look_into(agent.pid);
                    target.parent = None;
                    target.agent = Some(agent);
                    target.placed = 0;
                }
                self.come_to_know_views(id.0 as usize);
                self.owes_errands = true;
            }
            Command::Inherit { target, wiped, has, seen } => self.inherit(target, &wiped, &has, seen),
            Command::Register { target, stretches, reply } => {
                let _ = reply.send(self.register(target, &stretches));
            }
            Command::Join { target, file, pages, mapping, reply } => {
                let _ = reply.send(self.join(target, &file, pages, &mapping));
            }
            Command::Restore { commons, from, reply } => {
                let _ = reply.send(self.restore(commons, from));
            }
            Command::EndCommons { commons, reply } => {
                let _ = reply.send(self.end_commons(commons));
            }
            Command::Open { commons, is_ready } => self.open_commons(commons, is_ready),
            Command::Keep { target, addresses } => self.core.keep(target, &addresses),
            Command::Found { target, spans } => {
                self.doubt(target, &spans);
                spans.iter().for_each(|&span| self.found(target, span));
            }
            Command::Scanned { target } => {
                if let Some(target) = self.target(target) {
                    target.announced.scan_ends();
                    target.doubtful = false;
                }
            }
            Command::RemovalSeen { target, number, gone } => {
                for span in gone {
                    let still = self.target(target).map(|target| target.announced.unchanged_since(number, span));
                    still.into_iter().flatten().for_each(|span| self.core.removal_seen(target, span));
                }
            }
            Command::RemovalOver { target: id, number, span, is_shared } => {
                if is_shared {
                    self.shared_removal_over(id, number);
                }
                let Some(target) = self.target(id) else { return };
                target.announced.settled(number, span);
                let still = target.announced.unchanged_since(number, span);
                still.into_iter().for_each(|span| self.core.removal_over(id, span));
            }
            Command::Answer { reply } => {
                let _ = reply.send(());
            }
            Command::Ended { target } => self.ended(target),
            Command::Reuse { target } => {
                // What is read for the old one must not end the record of a capture of the new one. And a trace names targets.
                self.hands.finish_reading(true, &mut self.core);
                if self.tape.is_none() && self.target(target).is_none() {
                    self.core.reuse(target);
                }
            }
            Command::Budget(budget) => self.core.set_budget(budget),
            Command::Replacement(settings) => self.set_replacement(settings),
            Command::Release { reply } => {
                self.release = Some(Release { reply, budget: self.core.budget() });
                self.core.set_budget(Budget::Pages(u64::MAX));
                // Nor does any tree's maximum hold.
                self.core.lend(u64::MAX);
            }
            Command::Share(tree, share) => {
                self.core.set_share(tree, share);
                if let Some(estate) = &self.hands.estate {
                    let of_it = self.targets.iter().flatten().filter(|target| target.tally.tree == tree);
                    of_it.for_each(|target| estate.set_share(target.id, share));
                }
            }
            Command::Merge { tree, marked } => self.merge_anew(tree, &marked),
            Command::Depart { tree, reply } => self.depart(tree, reply),
            Command::Count { reply } => {
                self.count_trees();
                let _ = reply.send(());
            }
            Command::Halt { stands, until } => {
                let can = self.can_be_outlived();
                if stands.send(can).is_ok() && can {
                    let _ = until.recv();
                }
            }
            Command::End => unreachable!("nothing is carried out any more"),
        }
        self.core.restock();
        self.publish();
    }

    /// What was seen in the child's own mappings is asked again if they have changed since, or change now: one that has moved in the
    /// kernel and not in the table would be forgotten, and read as zeros.
    fn inherit(&mut self, id: TargetId, wiped: &[Span], has: &[Span], seen: Option<Seen>) {
        let Some(target) = self.target(id) else { return };
        if target.inherits {
            return;
        }
        if let Some(seen) = seen
            && (seen.changes != Some(target.changes) || target.uffd.is_changing())
        {
            target.asked += 1;
            let changes = (target.asked < ASKED_MOST).then_some(target.changes);
            let _ = self.reports.send(Request::Report(Report::Thread(id, Seen { changes, ..seen })));
            return;
        }
        target.inherits = true;
        let is_handed = target.handed;
        self.forget_views_but(id, has);
        let regions: Vec<Span> = self.core.regions().of(id).map(|region| region.span).collect();
        for region in regions {
            for gap in region.without(has.iter().copied()) {
                self.core.unmapped(id, gap, &[]);
            }
        }
        for &span in wiped {
            if self.core.removed(id, span) {
                self.announce(id, span);
            }
        }
        self.hands.estate.iter().for_each(|estate| estate.set_inherits(id));
        if !is_handed {
            // What it has mapped since its fork may be registered from now on.
            let _ = self.reports.send(Request::Report(Report::Rescan(id)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_found_comes_in_portions() {
        let span = |start: u64, pages| Span::of_pages(Address(start * 4096), pages);
        let found = [span(0, 1), span(8, 3 * PORTION_PAGES), span(1 << 20, PORTION_PAGES - 1), span(1 << 21, 5)];
        let portions = portions(found);
        let pages = |portion: &Vec<Span>| portion.iter().map(|span| span.pages()).sum::<u64>();
        assert_eq!(portions.iter().map(pages).collect::<Vec<_>>(), [vec![PORTION_PAGES; 4], vec![5]].concat());
        // One behind the other they are what was found.
        let mut joined: Vec<Span> = Vec::new();
        for span in portions.into_iter().flatten() {
            match joined.last_mut().filter(|last| last.end == span.start) {
                Some(last) => last.end = span.end,
                None => joined.push(span),
            }
        }
        assert_eq!(joined, found);
        assert!(super::portions([]).is_empty());
    }
}

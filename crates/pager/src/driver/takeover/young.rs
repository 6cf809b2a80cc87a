//! Targets without an agent, of a pager that was killed: children that were just forked, and who had lost theirs.

use std::sync::Arc;

use spillway_core::TargetId;
use spillway_core::evict::Bytes;

use super::super::Driver;
use super::Heir;
use crate::estate::{Batch, Estate, FoundYoung};
use crate::guardian::{self, Named};
use crate::merging::Merging;
use crate::remains::tally_of;
use crate::sys::clock::ticks_since_boot;
use crate::sys::uffd::{Event, Uffd};
use crate::tally::Tally;
use crate::target::Target;

/// A target without an agent.
pub struct YoungHeir {
    /// What was written down of it.
    pub found: FoundYoung,
    /// Its userfaultfd.
    pub uffd: Uffd,
    /// What is told of its tree.
    pub tally: Arc<Tally>,
}

/// Whose messages were read last, and who has ended since: a child of its may be there that nobody has heard of yet.
pub(super) struct Gone {
    /// Its identity in the core.
    pub(super) id: TargetId,
    /// What was being captured of it.
    pub(super) batch: Option<Batch>,
    tally: Arc<Tally>,
}

impl Gone {
    /// If there is one.
    pub(super) fn of(estate: &Estate, known: &[TargetId], heirs: &[Heir]) -> Option<Self> {
        let (id, _) = estate.last_inbox();
        let left = (!known.contains(&id)).then(|| estate.left_of(id)).flatten()?;
        let tally = tally_of(heirs, left.tree, left.root, left.share);
        Some(Self { id, batch: left.batch, tally })
    }
}

impl Driver {
    /// A target without an agent; `known` are all that are there.
    pub(super) fn take_up_young(&mut self, YoungHeir { found, uffd, tally }: YoungHeir, known: &[TargetId]) {
        let FoundYoung { id, tree, share, inherits, .. } = found;
        self.core.assign(id, tree, share);
        let young = Target::new(id, 0, uffd, None, tally);
        let mut target = Target { doubtful: true, inherits, has_known_views: false, ..young };
        if let Some(parent) = found.parent.filter(|parent| known.contains(parent)) {
            target.parent = Some(parent);
            target.inherits_merging = self.target(parent).is_some_and(|parent| parent.merging == Merging::Ours);
        }
        self.add_young(target, Some(found.since_ticks));
        self.announce_again(id);
    }

    /// Records of those that are lost, or had yet to come to be, would be taken for those of others that are called so later.
    pub(super) fn strike_out_young_but(&self, known: &[TargetId]) {
        let Some(estate) = &self.hands.estate else { return };
        let left = estate.young().into_iter().map(|young| young.id);
        left.filter(|id| !known.contains(id)).for_each(|id| estate.remove(id));
    }

    /// What was captured of somebody who has ended, and was not read, is nobody's any more.
    pub(super) fn lose_batch(&mut self, gone: &Gone) {
        for run in gone.batch.iter().flat_map(|batch| &batch.runs) {
            for page in (0..run.pages).map(|n| run.page.plus(n)) {
                if let Some(buffer) = self.core.unread_buffer(page) {
                    self.core.read(page, buffer, Bytes::Gone);
                }
            }
        }
    }

    /// What somebody has done before it ended. Nobody is left to be asked what came of it.
    pub(super) fn change_of_gone(&mut self, gone: &Gone, event: Event) {
        let id = gone.id;
        match event {
            Event::Fork(uffd) => {
                self.core.assign(id, gone.tally.tree, gone.tally.share());
                let child = self.child_of(id, uffd, Arc::clone(&gone.tally));
                self.add_young(child, Some(ticks_since_boot()));
            }
            Event::Remove(span) => drop(self.core.removed(id, span)),
            Event::Unmap(span) => self.core.unmapped(id, span, &[]),
            Event::Remap { from, to, bytes } => {
                let span = spillway_core::Span { start: from, end: from.plus_bytes(bytes) };
                self.core.remapped(id, span, to);
            }
            Event::Fault { .. } | Event::Unknown => {}
        }
    }

    /// From now on our guardian keeps what the dead pager's kept, if we have one.
    pub(super) fn change_guardians(&mut self, mut others: Vec<Named>) {
        let Some(estate) = &self.hands.estate else { return };
        others.extend(estate.guardian());
        let ours = guardian::ours();
        if let Some(ours) = ours {
            self.targets.iter().flatten().for_each(|target| estate.set_kept(target.id, &target.uffd, ours));
        }
        estate.set_guardian(ours);
        if ours.is_some() {
            others.into_iter().for_each(Named::end);
        }
    }

    /// Writes down whose a child is that is about to come to be.
    pub(in crate::driver) fn write_down_child(
        &mut self,
        child: TargetId,
        parent: TargetId,
        uffd: &Uffd,
        tally: &Tally,
    ) {
        let (Some(estate), Some(guardian)) = (&self.hands.estate, guardian::ours()) else { return };
        let is_recorded = estate.add_child(child, parent, self.core.last_event(), uffd, guardian, tally);
        if let Some(share) = self.core.share_of(parent) {
            estate.set_share(child, share);
        }
        self.note_recorded(child, is_recorded);
    }
}

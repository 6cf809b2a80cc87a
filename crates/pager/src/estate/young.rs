//! What is written down of targets without an agent: forked children, from their fork on, and who has lost theirs. A guardian keeps their
//! userfaultfds ([`crate::guardian`]).

use std::os::fd::AsRawFd;

use spillway_core::shares::Share;
use spillway_core::{TargetId, TreeId};

use super::{Batch, COMMONS, Estate, GUARDIAN, WHO};
use crate::guardian::Named;
use crate::sys::clock::ticks_since_boot;
use crate::sys::uffd::Uffd;
use crate::tally::Tally;

// Words of such a target, in the place of those of a file of memory.
/// Which descriptor of which guardian; zero as soon as it has an agent.
pub(super) const KEPT_BY: usize = COMMONS + 1;
const PARENT: usize = COMMONS + 2;
const SINCE: usize = COMMONS + 3;
/// The event by which it came to be: without that the core knows nothing of it.
const EVENT: usize = COMMONS + 4;
/// It is known what it has inherited, also of one that has an agent by now.
pub(super) const INHERITS: usize = COMMONS + 5;

/// Bits of a number of a descriptor, more than one: the kernel gives fewer than 2^20.
const NUMBER_BITS: u32 = 21;
/// Bits of a process's: it is below 2^22.
const PID_BITS: u32 = 22;

/// What is known of a target without an agent.
#[derive(Clone, Debug)]
pub struct FoundYoung {
    /// Its identity in the core.
    pub id: TargetId,
    /// The tree that it belongs to,
    pub tree: TreeId,
    /// by which process that is known, and when it was started.
    pub root: (i32, u64),
    /// and what it may have of local memory.
    pub share: Share,
    /// Whose child it is, where that is known.
    pub parent: Option<TargetId>,
    /// Since when it is known, in clock ticks since boot.
    pub since_ticks: u64,
    /// The event by which it came to be, or 0.
    pub event: u64,
    /// It is known, and in the table, what it has inherited.
    pub inherits: bool,
    /// Who keeps its userfaultfd,
    pub guardian: Named,
    /// by which number.
    pub number: i32,
}

/// What counts of a target that has ended.
#[derive(Clone, Debug)]
pub struct Left {
    /// The tree that it belongs to,
    pub tree: TreeId,
    /// by which process that is known, and when it was started.
    pub root: (i32, u64),
    /// and what it may have of local memory.
    pub share: Share,
    /// What was being captured.
    pub batch: Option<Batch>,
}

fn word(guardian: Named, number: i32) -> u64 {
    let number = u64::from(number.unsigned_abs()) + 1;
    number | u64::from(guardian.pid.unsigned_abs()) << NUMBER_BITS | guardian.started << (NUMBER_BITS + PID_BITS)
}

/// A guardian, and the number of a descriptor of it.
fn told(word: u64) -> Option<(Named, i32)> {
    let part = |from: u32, bits: u32| i32::try_from(word >> from & ((1 << bits) - 1)).ok();
    let number = part(0, NUMBER_BITS)?.checked_sub(1).filter(|number| *number >= 0)?;
    Some((Named { pid: part(NUMBER_BITS, PID_BITS)?, started: word >> (NUMBER_BITS + PID_BITS) }, number))
}

impl Estate {
    /// Who keeps what is read of forks that are not written down yet.
    pub fn set_guardian(&self, guardian: Option<Named>) {
        self.set(GUARDIAN, guardian.map_or(0, |guardian| word(guardian, 0)));
    }

    /// The same.
    pub fn guardian(&self) -> Option<Named> {
        told(self.get(GUARDIAN)).map(|(guardian, _)| guardian)
    }

    /// `child` is about to come to be, by this event. False when there is no room for it.
    pub fn add_child(&self, child: TargetId, parent: TargetId, event: u64, uffd: &Uffd, by: Named, of: &Tally) -> bool {
        let Some(slot) = self.slot_for(child, of) else { return false };
        self.set(slot + COMMONS, 0);
        self.set(slot + PARENT, u64::from(parent.0) + 1);
        self.set(slot + SINCE, ticks_since_boot());
        self.set(slot + EVENT, event);
        self.set(slot + INHERITS, 0);
        self.set(slot + KEPT_BY, word(by, uffd.as_raw_fd()));
        self.set(slot + WHO, u64::from(child.0) + 1);
        true
    }

    /// Where a process is written down: no file of memory, whose words are others.
    fn slot_of_process(&self, id: TargetId) -> Option<usize> {
        self.slot_of(id).filter(|slot| self.get(slot + COMMONS) == 0)
    }

    /// The agent of this target is gone.
    pub fn lose_agent(&self, id: TargetId, uffd: &Uffd, by: Named) {
        let Some(slot) = self.slot_of_process(id) else { return };
        self.set(slot + PARENT, 0);
        self.set(slot + SINCE, ticks_since_boot());
        self.set(slot + EVENT, 0);
        self.set(slot + INHERITS, 1);
        self.set(slot + KEPT_BY, word(by, uffd.as_raw_fd()));
    }

    /// Its userfaultfd is kept by this guardian from now on.
    pub fn set_kept(&self, id: TargetId, uffd: &Uffd, by: Named) {
        let slot = self.slot_of_process(id).filter(|slot| self.get(slot + KEPT_BY) != 0);
        slot.into_iter().for_each(|slot| self.set(slot + KEPT_BY, word(by, uffd.as_raw_fd())));
    }

    /// What a child has inherited is in the table.
    pub fn set_inherits(&self, id: TargetId) {
        let slot = self.slot_of_process(id);
        slot.into_iter().for_each(|slot| self.set(slot + INHERITS, 1));
    }

    /// What is written down of a process, even of one that has ended.
    pub fn left_of(&self, id: TargetId) -> Option<Left> {
        let slot = self.slot_of_process(id)?;
        let ((tree, root), share, batch) = (self.tree(slot), self.share(slot), self.batch(slot));
        Some(Left { tree, root, share, batch })
    }

    /// All targets without an agent.
    pub fn young(&self) -> Vec<FoundYoung> {
        self.slots().filter_map(|slot| self.found_young(slot)).collect()
    }

    fn found_young(&self, slot: usize) -> Option<FoundYoung> {
        let id = self.who(slot).filter(|_| self.get(slot + COMMONS) == 0)?;
        let (guardian, number) = told(self.get(slot + KEPT_BY))?;
        let ((tree, root), share) = (self.tree(slot), self.share(slot));
        let parent = self.get(slot + PARENT).checked_sub(1).and_then(|id| u32::try_from(id).ok()).map(TargetId);
        let (since_ticks, event) = (self.get(slot + SINCE), self.get(slot + EVENT));
        let inherits = self.get(slot + INHERITS) != 0;
        Some(FoundYoung { id, tree, root, share, parent, since_ticks, event, inherits, guardian, number })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_names_a_descriptor_of_a_guardian() {
        for (pid, started, number) in [(1, 0, 0), (4_194_303, (1 << 21) - 1, 1_048_575), (77, 5, 12)] {
            let guardian = Named { pid, started };
            assert_eq!(told(word(guardian, number)), Some((guardian, number)));
        }
        assert_eq!(told(0), None);
    }
}

//! Letting one tree of several go, while the others are served on.
//!
//! Its pages come home a few at a time between faults. They count as lent: nobody else's leave to make room for them, and
//! when the tree is gone, so are they.

use std::collections::HashMap;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::Sender;

use spillway_core::{Address, PageIndex, TargetId, TreeId};

use super::release::{Brought, Poisoned};
use super::{Driver, Homeward, RETRY_NS};
use crate::target::{Flight, Target};

/// Pages that are brought home between two looks for faults: a few blocks, so that a fault waits for no more than that.
const PAGES_PER_TURN: usize = 64;
/// And how much of the table may be looked at for them, in chunks.
const CHUNKS_PER_TURN: usize = 16;

/// A tree that is let go.
pub(super) struct Leaving {
    tree: TreeId,
    reply: Sender<Homeward>,
    /// Where the pass over its pages stands; none before its first target.
    at: Option<(TargetId, Address)>,
    /// This pass has found a page outside.
    found: bool,
    /// Nothing could be brought home the last time: it is tried again by the clock.
    rests: bool,
    /// Pages that came home, beyond the budget.
    lent: u64,
}

impl Driver {
    /// From now on `tree` is on its way out.
    pub(super) fn depart(&mut self, tree: TreeId, reply: Sender<Homeward>) {
        self.mark_leaving(tree, true);
        self.leaving.push(Leaving { tree, reply, at: None, found: false, rests: false, lent: 0 });
    }

    fn mark_leaving(&mut self, tree: TreeId, leaving: bool) {
        self.targets.iter_mut().flatten().filter(|it| it.tally.tree == tree).for_each(|it| it.leaving = leaving);
    }

    /// How soon there is something to do for trees that leave.
    pub(super) fn until_homeward(&self) -> Option<u64> {
        let leaving = self.leaving.first()?;
        let tree = leaving.tree;
        let busy = self.targets.iter().flatten().any(|it| it.tally.tree == tree && it.flight != Flight::Idle);
        // A busy agent is heard of.
        (!busy && self.release.is_none()).then_some(if leaving.rests { RETRY_NS } else { 0 })
    }

    /// Brings a few pages of the first tree home that leaves, and lets go of it when none is left outside.
    #[inline(never)]
    pub(super) fn bring_some_home(&mut self) {
        if self.until_homeward().is_none() {
            return;
        }
        let mut leaving = self.leaving.swap_remove(0);
        let mut outside = Vec::with_capacity(PAGES_PER_TURN);
        if self.look_for(&mut leaving, &mut outside) && self.all_is_home(leaving.tree) {
            match self.poison_lost(|it| it.tally.tree == leaving.tree) {
                Poisoned::Later => leaving.rests = true,
                Poisoned::NoRoom => return self.stays(&leaving),
                Poisoned::All => {
                    // Nothing that is being read may be of a target that is gone.
                    self.hands.finish_reading(true, &mut self.core);
                    let agents = self.let_go(|it| it.tally.tree == leaving.tree);
                    let _ = leaving.reply.send(Homeward::Done(agents));
                    return self.lend();
                }
            }
        } else if !outside.is_empty() {
            leaving.found = true;
            let before = self.core.local_pages();
            // Its own pages wait for no room.
            self.core.lend(u64::MAX / 2);
            let brought = self.install_outside(&outside);
            leaving.lent += self.core.local_pages().saturating_sub(before);
            leaving.rests = brought == Brought::Nothing;
            let _ = leaving.reply.send(Homeward::Left(self.outside_pages(leaving.tree)));
            if brought == Brought::NoRoom {
                return self.stays(&leaving);
            }
        }
        self.leaving.insert(0, leaving);
        self.lend();
    }

    /// Looks on for pages outside; true when a whole pass has found none.
    fn look_for(&self, leaving: &mut Leaving, outside: &mut Vec<(TargetId, Address, PageIndex)>) -> bool {
        for _ in 0..CHUNKS_PER_TURN {
            let ids = || self.members(leaving.tree).map(|target| target.id);
            let (id, from) = match leaving.at {
                Some((id, from)) => (id, from),
                None => match ids().next() {
                    Some(first) => (first, Address(0)),
                    None => return true,
                },
            };
            leaving.at = match self.core.outside_of(id, from, PAGES_PER_TURN, outside) {
                Some(next) => Some((id, next)),
                None => ids().find(|next| *next > id).map(|next| (next, Address(0))),
            };
            if !outside.is_empty() {
                return false;
            }
            if leaving.at.is_none() && !std::mem::take(&mut leaving.found) {
                return true;
            }
        }
        false
    }

    /// Whether what a whole pass has not found is not there. Mappings that moved meanwhile, and children that were forked, may be where it
    /// had been before; then there is another pass.
    fn all_is_home(&self, tree: TreeId) -> bool {
        let lost: usize = self.members(tree).map(|target| self.core.lost_in(target.id).len()).sum();
        self.outside_pages(tree) == lost as u64
    }

    fn members(&self, tree: TreeId) -> impl Iterator<Item = &Target> {
        self.targets.iter().flatten().filter(move |target| target.tally.tree == tree)
    }

    fn outside_pages(&self, tree: TreeId) -> u64 {
        let held = self.members(tree).map(|target| self.core.held_by(target.id));
        held.map(|(mapped, used)| used - mapped).sum()
    }

    /// Letting go of `tree`, if that is under way, has failed.
    pub(super) fn stay_on(&mut self, tree: TreeId) {
        if let Some(at) = self.leaving.iter().position(|leaving| leaving.tree == tree) {
            let leaving = self.leaving.swap_remove(at);
            self.stays(&leaving);
        }
    }

    fn stays(&mut self, leaving: &Leaving) {
        self.mark_leaving(leaving.tree, false);
        self.owes_errands = true;
        let _ = leaving.reply.send(Homeward::NoRoom(self.outside_pages(leaving.tree)));
        self.lend();
    }

    /// What came home of trees that leave is lent, and nothing else.
    pub(super) fn lend(&mut self) {
        self.core.lend(self.leaving.iter().map(|leaving| leaving.lent).sum());
    }

    /// Counts the pages of each tree.
    pub(super) fn count_trees(&self) {
        let mut sums: HashMap<TreeId, (u64, u64)> = HashMap::new();
        for target in self.targets.iter().flatten() {
            let (mapped, used) = self.core.held_by(target.id);
            let sum = sums.entry(target.tally.tree).or_default();
            *sum = (sum.0 + mapped, sum.1 + used);
        }
        for target in self.targets.iter().flatten() {
            let (mapped, used) = sums[&target.tally.tree];
            target.tally.mapped_pages.store(mapped, Relaxed);
            target.tally.used_pages.store(used, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::skipped::skipped;
    use std::sync::Arc;
    use std::sync::mpsc::{TryRecvError, channel};

    use spillway_core::Span;
    use spillway_store::Handle;

    use super::*;
    use crate::driver::tests::driver;
    use crate::sys::uffd::new_of_our_own;
    use crate::tally::Tally;

    /// A program that moved its memory, or forked, while it was let go had pages where they had been looked for already: they were not
    /// found, and read as zeros from then on.
    #[test]
    fn what_is_out_behind_a_pass_is_looked_for_again() {
        let mut driver = driver();
        let uffd = match new_of_our_own() {
            Ok(uffd) => uffd,
            Err(error) => return skipped(error),
        };
        let (id, tally) = (driver.core.add_target(), Arc::<Tally>::default());
        driver.add(Target::new(id, 0, uffd, None, Arc::clone(&tally)));
        let span = Span::of_pages(Address(1 << 30), 2);
        driver.core.add_region(id, span);
        let (reply, answer) = channel();
        driver.depart(tally.tree, reply);

        driver.lay_out(id, span, Handle::from_bits(1).expect("not zero"));
        driver.leaving[0].at = Some((id, span.end));
        driver.bring_some_home();
        assert!(driver.target(id).is_some(), "it was let go of");
        assert_eq!(answer.try_recv().err(), Some(TryRecvError::Empty));

        driver.core.unmapped(id, span, &[]);
        (0..2).for_each(|_| driver.bring_some_home());
        assert!(driver.target(id).is_none());
        assert!(matches!(answer.try_recv(), Ok(Homeward::Done(agents)) if agents.is_empty()));
    }
}

//! Local memory divided between trees of processes: what each has, and whose turn it is to pay ([`crate::shares`]).

use crate::evict::{batch_of, low};
use crate::page::State;
use crate::shares::{self, Claim, Payer, Share};
use crate::units::TreeId;

/// A tree that has targets.
struct Tree {
    id: TreeId,
    targets: usize,
    claim: Claim,
}

/// See the module's documentation. A tree keeps its number as long as it has targets.
#[derive(Default)]
pub(crate) struct Divided {
    trees: Vec<Option<Tree>>,
    /// Any of them has a share of its own.
    is_divided: bool,
}

impl Divided {
    pub(crate) fn is_divided(&self) -> bool {
        self.is_divided
    }

    /// One more target of the tree that nobody named.
    pub(crate) fn join_first(&mut self) -> usize {
        let first = self.trees.iter().flatten().find(|tree| tree.id == TreeId::default());
        self.join(TreeId::default(), first.map_or(Share::default(), |tree| tree.claim.share))
    }

    /// One more target of `id`; the tree's number.
    pub(crate) fn join(&mut self, id: TreeId, share: Share) -> usize {
        let known = self.trees.iter().position(|tree| tree.as_ref().is_some_and(|tree| tree.id == id));
        let at = known.or_else(|| self.trees.iter().position(Option::is_none)).unwrap_or_else(|| {
            self.trees.push(None);
            self.trees.len() - 1
        });
        let new = Tree { id, targets: 0, claim: Claim { share, pages: 0, pays: false } };
        let tree = self.trees[at].get_or_insert(new);
        tree.targets += 1;
        tree.claim.share = share;
        self.look();
        at
    }

    /// One more target of a tree that there is.
    pub(crate) fn enter(&mut self, at: usize) {
        self.trees[at].as_mut().expect("it has targets").targets += 1;
    }

    /// One target fewer.
    pub(crate) fn leave(&mut self, at: usize) {
        let Some(tree) = &mut self.trees[at] else { return };
        tree.targets -= 1;
        if tree.targets == 0 {
            self.trees[at] = None;
            self.look();
        }
    }

    /// Another share, where there is such a tree.
    pub(crate) fn set(&mut self, id: TreeId, share: Share) {
        self.trees.iter_mut().flatten().filter(|tree| tree.id == id).for_each(|tree| tree.claim.share = share);
        self.look();
    }

    /// The share of a tree.
    pub(crate) fn share(&self, at: usize) -> Option<Share> {
        self.trees.get(at)?.as_ref().map(|tree| tree.claim.share)
    }

    fn look(&mut self) {
        self.is_divided = self.trees.iter().flatten().any(|tree| tree.claim.share != Share::default());
    }

    /// Nothing is known of pages.
    pub(crate) fn begin_anew(&mut self) {
        self.trees.iter_mut().flatten().for_each(|tree| tree.claim.pages = 0);
    }

    /// A page of a target of this tree goes from one state to another.
    pub(crate) fn count(&mut self, at: usize, before: State, after: State) {
        let is_local = |state| matches!(state, State::Mapped | State::Fetching);
        let Some(tree) = &mut self.trees[at] else { return };
        match (is_local(before), is_local(after)) {
            (false, true) => tree.claim.pages += 1,
            (true, false) => tree.claim.pages = tree.claim.pages.saturating_sub(1),
            _ => {}
        }
    }

    /// What each has, by number.
    pub(crate) fn pages(&self) -> Vec<u64> {
        self.trees.iter().map(|tree| tree.as_ref().map_or(0, |tree| tree.claim.pages)).collect()
    }

    /// Numbers that were given.
    pub(crate) fn len(&self) -> usize {
        self.trees.len()
    }

    pub(crate) fn nobody_pays(&mut self) {
        self.trees.iter_mut().flatten().for_each(|tree| tree.claim.pays = false);
    }

    /// Pages can be taken from a target of this tree.
    pub(crate) fn pays(&mut self, at: usize) {
        self.trees[at].iter_mut().for_each(|tree| tree.claim.pays = true);
    }

    /// Who pays.
    pub(crate) fn payer(&self, short: bool) -> Option<Payer> {
        // Numbers that are nobody's have nothing to pay with.
        let nobody = Claim { share: Share::default(), pages: 0, pays: false };
        let claims = self.trees.iter().map(|tree| tree.as_ref().map_or(nobody, |tree| tree.claim));
        shares::payer(&claims, short, |share| 2 * reserve(share))
    }

    /// See [`shares::room`].
    pub(crate) fn room(&self, at: usize, room: u64, kept: u64, overdraft: u64) -> u64 {
        let Some(tree) = &self.trees[at] else { return room };
        let below = |(other, tree): (usize, &Option<Tree>)| {
            other != at && tree.as_ref().is_some_and(|it| it.claim.pages < it.claim.share.min_pages)
        };
        let others_below = self.trees.iter().enumerate().any(below);
        let share = Share { max_pages: tree.claim.share.max_pages.saturating_add(overdraft), ..tree.claim.share };
        shares::room(Claim { share, ..tree.claim }, others_below, room, kept)
    }

    /// Pages to capture because trees are close to their maxima: down to twice the reserve, once it is touched. And whether
    /// little of it is left.
    pub(crate) fn own_excess(&self) -> (u64, bool) {
        let (mut pages, mut is_low) = (0, false);
        for Claim { share, pages: has, .. } in self.trees.iter().flatten().map(|tree| tree.claim) {
            let left = share.max_pages.saturating_sub(has);
            if left < reserve(&share) {
                pages += (2 * reserve(&share)).saturating_sub(left) + has.saturating_sub(share.max_pages);
            }
            is_low |= left < low(reserve(&share));
        }
        (pages, is_low)
    }
}

/// Pages that a tree's faults find free below its maximum: as the whole has a reserve ([`crate::evict`]).
fn reserve(share: &Share) -> u64 {
    if share.max_pages == u64::MAX { 0 } else { batch_of(share.max_pages) }
}

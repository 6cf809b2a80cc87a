//! The policies at work: one for all targets, or one each; who pays for the room that is wanted; how early.

use super::{Arrival, Policy, Scheme, Scope, Settings};
use crate::page::State;
use crate::policy::divided::Divided;
use crate::shares::{Payer, Share};
use crate::units::{PageIndex, TargetId, TreeId};

/// What is kept of a target.
#[derive(Default)]
struct Account {
    /// It has not ended.
    lives: bool,
    /// Its own policy, where each target has one, and it is not gone.
    policy: Option<Box<dyn Policy>>,
    /// Its pages that are in it.
    mapped: u64,
    /// Pages that its faults made local while room was short, and that it has not paid for with others.
    owes: u64,
    /// It was asked for pages, and none has left since.
    in_vain: bool,
    /// The tree that it belongs to, as [`Divided`] numbers them.
    tree: usize,
}

impl Account {
    /// It has pages, and has not been asked for them in vain.
    fn can_pay(&self) -> bool {
        self.mapped > 0 && !self.in_vain
    }

    /// That of a target without pages.
    fn new(settings: Settings, is_shared: bool, tree: usize) -> Self {
        Self { lives: true, policy: (!is_shared).then(|| settings.policy.policy()), tree, ..Self::default() }
    }
}

/// See the module's documentation.
pub(crate) struct Replacement {
    settings: Settings,
    /// One sweep over all targets; none where each has a policy of its own.
    everyone: Option<Box<dyn Policy>>,
    accounts: Vec<Account>,
    trees: Divided,
    /// Victims of one batch, to be put in order.
    pub(crate) drawn: Vec<PageIndex>,
    /// Those that were asked for beside them, and may not leave.
    pub(crate) passed: Vec<PageIndex>,
    random: u64,
    /// A fault found no room since the last batch.
    short: bool,
    /// Pages of the reserve beyond its base.
    more: u64,
}

impl Replacement {
    pub(crate) fn new(batch_pages_max: u64) -> Self {
        let settings = Settings::default();
        Self {
            settings,
            everyone: Some(settings.policy.policy()),
            trees: Divided::default(),
            accounts: Vec::new(),
            drawn: Vec::with_capacity(usize::try_from(batch_pages_max).expect("a batch is small")),
            passed: Vec::new(),
            random: 0x2545_F491_4F6C_DD1D,
            short: false,
            more: 0,
        }
    }

    pub(crate) fn settings(&self) -> Settings {
        self.settings
    }

    /// Changes what users choose; true when policies must be told of every page anew.
    pub(crate) fn set(&mut self, settings: Settings) -> bool {
        let before = std::mem::replace(&mut self.settings, settings);
        if (before.policy, before.scope) == (settings.policy, settings.scope) {
            return false;
        }
        self.begin_anew();
        self.is_told()
    }

    /// No policy knows of any page.
    fn begin_anew(&mut self) {
        let (settings, is_shared) = (self.settings, !self.is_told());
        self.everyone = is_shared.then(|| settings.policy.policy());
        for account in self.accounts.iter_mut().filter(|account| account.lives) {
            *account = Account::new(settings, is_shared, account.tree);
        }
        self.trees.begin_anew();
    }

    /// Whether policies have to be told of pages: a sweep of everyone finds them in the table.
    pub(crate) fn is_told(&self) -> bool {
        self.settings.scope == Scope::Target || !self.settings.policy.is_sweep() || self.is_divided()
    }

    /// Whether any tree has a share of its own.
    pub(crate) fn is_divided(&self) -> bool {
        self.trees.is_divided()
    }

    /// `target`, which has no pages, belongs to `tree`, which has this share; true when policies must be told of every page anew.
    pub(crate) fn assign(&mut self, target: TargetId, tree: TreeId, share: Share) -> bool {
        let (at, before) = (target.0 as usize, self.is_told());
        self.trees.leave(self.accounts[at].tree);
        self.accounts[at].tree = self.trees.join(tree, share);
        self.turn(before)
    }

    /// The share of the tree that `target` belongs to.
    pub(crate) fn share_of(&self, target: TargetId) -> Option<Share> {
        self.trees.share(self.accounts[target.0 as usize].tree)
    }

    /// `child` belongs to whom `parent` belongs to.
    pub(crate) fn join(&mut self, child: TargetId, parent: TargetId) {
        let tree = self.accounts[parent.0 as usize].tree;
        self.trees.leave(std::mem::replace(&mut self.accounts[child.0 as usize].tree, tree));
        self.trees.enter(tree);
    }

    /// `tree` has another share; true when policies must be told of every page anew.
    pub(crate) fn set_share(&mut self, tree: TreeId, share: Share) -> bool {
        let before = self.is_told();
        self.trees.set(tree, share);
        self.turn(before)
    }

    fn turn(&mut self, was_told: bool) -> bool {
        let turns = self.is_told() != was_told;
        if turns {
            self.begin_anew();
        }
        turns && self.is_told()
    }

    /// Whether victims come in the table's order.
    pub(crate) fn sweeps(&self) -> bool {
        self.settings.policy.is_sweep()
    }

    pub(crate) fn add_target(&mut self) {
        self.accounts.push(Account::new(self.settings, !self.is_told(), self.trees.join_first()));
    }

    /// A target under the identity of one that has ended.
    pub(crate) fn renew_target(&mut self, target: TargetId) {
        let tree = self.trees.join_first();
        self.accounts[target.0 as usize] = Account::new(self.settings, !self.is_told(), tree);
    }

    pub(crate) fn end_target(&mut self, target: TargetId) {
        let was_told = self.is_told();
        let account = std::mem::take(&mut self.accounts[target.0 as usize]);
        if account.lives {
            self.trees.leave(account.tree);
        }
        // With the last of a tree that has a share of its own, one sweep goes over everyone again, who needs to be told nothing.
        self.turn(was_told);
    }

    /// The policy that chooses among the pages of `target`, or of all; give it back with [`Replacement::put_back`].
    pub(crate) fn take(&mut self, target: Option<TargetId>) -> Option<Box<dyn Policy>> {
        match target {
            None => self.everyone.take(),
            Some(target) => self.accounts[target.0 as usize].policy.take(),
        }
    }

    pub(crate) fn put_back(&mut self, target: Option<TargetId>, policy: Box<dyn Policy>) {
        match target {
            None => self.everyone = Some(policy),
            Some(target) => self.accounts[target.0 as usize].policy = Some(policy),
        }
    }

    /// The policy of `target`, if it has one of its own.
    pub(crate) fn of(&mut self, target: TargetId) -> Option<&mut dyn Policy> {
        match &mut self.accounts[target.0 as usize].policy {
            Some(policy) => Some(policy.as_mut()),
            None => None,
        }
    }

    pub(crate) fn arrived(&mut self, target: TargetId, page: PageIndex, how: Arrival, room_is_short: bool) {
        let account = &mut self.accounts[target.0 as usize];
        account.mapped += 1;
        account.owes += u64::from(room_is_short && how != Arrival::Found);
        if let Some(policy) = &mut account.policy {
            policy.arrived(page, how);
        }
    }

    /// `page` left `target`; `captured` when it waits in a buffer now.
    pub(crate) fn left(&mut self, target: TargetId, page: PageIndex, captured: bool) {
        let account = &mut self.accounts[target.0 as usize];
        account.in_vain = false;
        account.mapped = account.mapped.saturating_sub(1);
        account.owes = account.owes.saturating_sub(u64::from(!captured));
        match &mut account.policy {
            Some(policy) if captured => policy.captured(page),
            Some(policy) => policy.gone(page),
            None => {}
        }
    }

    /// A page that was not in `target` exists no more.
    pub(crate) fn gone(&mut self, target: TargetId, page: PageIndex) {
        if let Some(policy) = self.of(target) {
            policy.gone(page);
        }
    }

    /// What policies were told against the table, whose every page `pages` names: whose it is, and where.
    pub(crate) fn audit(&self, pages: impl FnOnce(&mut dyn FnMut(TargetId, PageIndex, State))) {
        if !self.is_told() {
            return;
        }
        let mut mapped = vec![0; self.accounts.len()];
        let mut of_trees = vec![0; self.trees.len()];
        pages(&mut |target, page, state| {
            let is_mapped = state == State::Mapped;
            let account = &self.accounts[target.0 as usize];
            mapped[target.0 as usize] += u64::from(is_mapped);
            of_trees[account.tree] += u64::from(is_mapped || state == State::Fetching);
            let policy = account.policy.as_deref().expect("whoever has pages is not gone");
            assert!(self.sweeps() || policy.knows(page) == is_mapped, "{page:?} of {target:?}, in it: {is_mapped}");
        });
        let told: Vec<u64> = self.accounts.iter().map(|account| account.mapped).collect();
        assert_eq!(told, mapped, "pages in each target");
        assert_eq!(self.trees.pages(), of_trees, "pages of each tree");
    }

    /// Whose pages should leave next, of those who may, and how many at most. `short`: of anyone's, for want of room for all.
    pub(crate) fn payer(&mut self, short: bool, may: impl Fn(TargetId) -> bool) -> Option<(TargetId, u64)> {
        if self.is_divided() {
            // Whoever has given nothing is asked again after everyone else was who must pay: its pages may all be stuck.
            let Payer { at, most_pages } = self.owing_tree(short, &may).or_else(|| {
                self.accounts.iter_mut().for_each(|account| account.in_vain = false);
                self.owing_tree(short, &may)
            })?;
            let target = self.draw(|account, target| account.tree == at && account.can_pay() && may(target))?;
            return Some((target, most_pages));
        }
        let able = |account: &Account, target| account.mapped > 0 && may(target);
        // The same.
        if (0_u32..).zip(&self.accounts).all(|(at, account)| account.in_vain || !able(account, TargetId(at))) {
            self.accounts.iter_mut().for_each(|account| account.in_vain = false);
        }
        self.draw(|account, target| account.can_pay() && may(target)).map(|target| (target, u64::MAX))
    }

    fn owing_tree(&mut self, short: bool, may: impl Fn(TargetId) -> bool) -> Option<Payer> {
        self.trees.nobody_pays();
        for (at, account) in (0_u32..).zip(&self.accounts) {
            if account.can_pay() && may(TargetId(at)) {
                self.trees.pays(account.tree);
            }
        }
        self.trees.payer(short)
    }

    /// Who of those that are `able` pays.
    fn draw(&mut self, able: impl Fn(&Account, TargetId) -> bool) -> Option<TargetId> {
        let able = || {
            let accounts = (0_u32..).map(TargetId).zip(&self.accounts);
            accounts.filter(|(target, account)| able(account, *target))
        };
        let debtor = able().filter(|(_, account)| account.owes > 0).max_by_key(|(_, account)| account.owes);
        if let (Scope::Target, Some((target, _))) = (self.settings.scope, debtor) {
            return Some(target);
        }
        // By lot, in proportion to what each has: so does a sweep over all of them.
        let all: u64 = able().map(|(_, account)| account.mapped).sum();
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let mut lot = self.random.checked_rem(all)?;
        let drawn = able().find(|(_, account)| {
            let hit = lot < account.mapped;
            lot = lot.saturating_sub(account.mapped);
            hit
        });
        drawn.map(|(target, _)| target)
    }

    /// Whether both may pay for each other: one tree's pages are not another's.
    pub(crate) fn pay_together(&self, one: TargetId, other: TargetId) -> bool {
        !self.is_divided() || self.accounts[one.0 as usize].tree == self.accounts[other.0 as usize].tree
    }

    /// A page of `target` becomes local, or is local no more: in it, or on its way there.
    pub(crate) fn count(&mut self, target: TargetId, before: State, after: State) {
        self.trees.count(self.accounts[target.0 as usize].tree, before, after);
    }

    /// Pages that a fault of `target` may still make local, of `room` that all have: docs as of [`crate::shares::room`].
    pub(crate) fn room(&self, target: TargetId, room: u64, kept: u64, overdraft: u64) -> u64 {
        self.trees.room(self.accounts[target.0 as usize].tree, room, kept, overdraft)
    }

    /// Pages that trees have too close to their maxima, and whether faults of theirs will soon have to wait.
    pub(crate) fn own_excess(&self) -> (u64, bool) {
        self.trees.own_excess()
    }

    /// `target` pays so many pages. Whether they leave is not waited for: one whose pages are all stuck must not pay for ever.
    pub(crate) fn pay(&mut self, target: TargetId, pages: u64) {
        let account = &mut self.accounts[target.0 as usize];
        account.owes = account.owes.saturating_sub(pages);
        account.in_vain = true;
    }

    /// Targets after `target`, and then those before it.
    pub(crate) fn others(&self, target: TargetId) -> impl Iterator<Item = TargetId> + use<> {
        let all = u32::try_from(self.accounts.len()).expect("fewer processes than 2^32");
        (target.0 + 1..all).chain(0..target.0).map(TargetId)
    }

    /// A fault found no room.
    pub(crate) fn note_short(&mut self) {
        self.short = true;
    }

    /// One has found room.
    pub(crate) fn note_room(&mut self) {
        self.short = false;
    }

    /// Whether a fault found no room since the last batch.
    pub(crate) fn is_short(&self) -> bool {
        self.short
    }

    /// A batch begins. Under pre-eviction the reserve follows the faults: where one found no room since the last batch, more
    /// came than the reserve had, and it grows by half of its base; where none did, it shrinks by an eighth of what it has
    /// grown. It stays within four times its base, and a sixteenth of the budget.
    pub(crate) fn batch_begins(&mut self, base: u64, budget_pages: u64) {
        let most = (budget_pages / 16).saturating_sub(base).min(3 * base);
        self.more = if std::mem::take(&mut self.short) {
            (self.more + base / 2).min(most)
        } else {
            (self.more - self.more.div_ceil(8)).min(most)
        };
    }

    /// Pages of the reserve beyond its base.
    pub(crate) fn more_reserve(&self) -> u64 {
        if self.settings.evict == Scheme::PreEvict { self.more } else { 0 }
    }

    pub(crate) fn restock(&mut self) {
        let queues = self.accounts.iter_mut().filter_map(|account| account.policy.as_mut()?.queues_mut());
        queues.for_each(super::queues::Queues::restock);
    }

    /// Bytes that policies occupy beyond the table.
    pub(crate) fn bytes(&self) -> u64 {
        if !self.is_told() {
            return 0;
        }
        let queues = self.accounts.iter().filter_map(|account| account.policy.as_ref()?.queues());
        queues.map(|queues| queues.bytes()).sum()
    }
}

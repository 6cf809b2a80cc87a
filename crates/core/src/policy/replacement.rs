//! The policies at work: one for all targets, or one each; who pays for the room that is wanted; how early.

use super::{Arrival, Policy, Scheme, Scope, Settings};
use crate::units::{PageIndex, TargetId};

/// What is kept of a target.
#[derive(Default)]
struct Share {
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
}

impl Share {
    /// That of a target without pages.
    fn new(settings: Settings) -> Self {
        Self { lives: true, policy: (!is_shared(settings)).then(|| settings.policy.policy()), ..Self::default() }
    }
}

/// See the module's documentation.
pub(crate) struct Replacement {
    settings: Settings,
    /// One sweep over all targets; none where each has a policy of its own.
    everyone: Option<Box<dyn Policy>>,
    shares: Vec<Share>,
    /// Victims of one batch, to be put in order.
    pub(crate) drawn: Vec<PageIndex>,
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
            everyone: shared(settings),
            shares: Vec::new(),
            drawn: Vec::with_capacity(usize::try_from(batch_pages_max).expect("a batch is small")),
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
        self.everyone = shared(settings);
        for share in self.shares.iter_mut().filter(|share| share.lives) {
            *share = Share::new(settings);
        }
        self.is_told()
    }

    /// Whether policies have to be told of pages: a sweep of everyone finds them in the table.
    pub(crate) fn is_told(&self) -> bool {
        !is_shared(self.settings)
    }

    /// Whether victims come in the table's order.
    pub(crate) fn sweeps(&self) -> bool {
        self.settings.policy.is_sweep()
    }

    pub(crate) fn add_target(&mut self) {
        self.shares.push(Share::new(self.settings));
    }

    /// A target under the identity of one that has ended.
    pub(crate) fn renew_target(&mut self, target: TargetId) {
        self.shares[target.0 as usize] = Share::new(self.settings);
    }

    pub(crate) fn end_target(&mut self, target: TargetId) {
        self.shares[target.0 as usize] = Share::default();
    }

    /// The policy that chooses among the pages of `target`, or of all; give it back with [`Replacement::put_back`].
    pub(crate) fn take(&mut self, target: Option<TargetId>) -> Option<Box<dyn Policy>> {
        match target {
            None => self.everyone.take(),
            Some(target) => self.shares[target.0 as usize].policy.take(),
        }
    }

    pub(crate) fn put_back(&mut self, target: Option<TargetId>, policy: Box<dyn Policy>) {
        match target {
            None => self.everyone = Some(policy),
            Some(target) => self.shares[target.0 as usize].policy = Some(policy),
        }
    }

    /// The policy of `target`, if it has one of its own.
    pub(crate) fn of(&mut self, target: TargetId) -> Option<&mut dyn Policy> {
        match &mut self.shares[target.0 as usize].policy {
            Some(policy) => Some(policy.as_mut()),
            None => None,
        }
    }

    pub(crate) fn arrived(&mut self, target: TargetId, page: PageIndex, how: Arrival, room_is_short: bool) {
        let share = &mut self.shares[target.0 as usize];
        share.mapped += 1;
        share.owes += u64::from(room_is_short && how != Arrival::Found);
        if let Some(policy) = &mut share.policy {
            policy.arrived(page, how);
        }
    }

    /// `page` left `target`; `captured` when it waits in a buffer now.
    pub(crate) fn left(&mut self, target: TargetId, page: PageIndex, captured: bool) {
        let share = &mut self.shares[target.0 as usize];
        share.in_vain = false;
        share.mapped = share.mapped.saturating_sub(1);
        share.owes = share.owes.saturating_sub(u64::from(!captured));
        match &mut share.policy {
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

    /// Pages of `target` that are in it.
    pub(crate) fn mapped(&self, target: TargetId) -> u64 {
        self.shares[target.0 as usize].mapped
    }

    /// What policies were told against the table, whose every page `pages` names: whose it is, and whether it is there.
    pub(crate) fn audit(&self, pages: impl FnOnce(&mut dyn FnMut(TargetId, PageIndex, bool))) {
        if !self.is_told() {
            return;
        }
        let mut mapped = vec![0; self.shares.len()];
        pages(&mut |target, page, is_mapped| {
            mapped[target.0 as usize] += u64::from(is_mapped);
            let policy = self.shares[target.0 as usize].policy.as_deref().expect("whoever has pages is not gone");
            assert!(self.sweeps() || policy.knows(page) == is_mapped, "{page:?} of {target:?}, in it: {is_mapped}");
        });
        let told: Vec<u64> = self.shares.iter().map(|share| share.mapped).collect();
        assert_eq!(told, mapped, "pages in each target");
    }

    /// Whose pages should leave next, of those who may.
    pub(crate) fn payer(&mut self, may: impl Fn(TargetId) -> bool) -> Option<TargetId> {
        let able = |share: &Share, target| share.mapped > 0 && may(target);
        // Whoever has given nothing is asked again after everyone else was: its pages may all be stuck.
        if (0_u32..).zip(&self.shares).all(|(at, share)| share.in_vain || !able(share, TargetId(at))) {
            self.shares.iter_mut().for_each(|share| share.in_vain = false);
        }
        let able = || {
            let shares = (0_u32..).map(TargetId).zip(&self.shares);
            shares.filter(|(target, share)| !share.in_vain && able(share, *target))
        };
        let debtor = able().filter(|(_, share)| share.owes > 0).max_by_key(|(_, share)| share.owes);
        if let (Scope::Target, Some((target, _))) = (self.settings.scope, debtor) {
            return Some(target);
        }
        // By lot, in proportion to what each has: so does a sweep over all of them.
        let all: u64 = able().map(|(_, share)| share.mapped).sum();
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let mut lot = self.random.checked_rem(all)?;
        let drawn = able().find(|(_, share)| {
            let hit = lot < share.mapped;
            lot = lot.saturating_sub(share.mapped);
            hit
        });
        drawn.map(|(target, _)| target)
    }

    /// `target` pays so many pages. Whether they leave is not waited for: one whose pages are all stuck must not pay for ever.
    pub(crate) fn pay(&mut self, target: TargetId, pages: u64) {
        let share = &mut self.shares[target.0 as usize];
        share.owes = share.owes.saturating_sub(pages);
        share.in_vain = true;
    }

    /// Targets after `target`, and then those before it.
    pub(crate) fn others(&self, target: TargetId) -> impl Iterator<Item = TargetId> + use<> {
        let all = u32::try_from(self.shares.len()).expect("fewer processes than 2^32");
        (target.0 + 1..all).chain(0..target.0).map(TargetId)
    }

    /// A fault found no room.
    pub(crate) fn note_short(&mut self) {
        self.short = true;
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
        let queues = self.shares.iter_mut().filter_map(|share| share.policy.as_mut()?.queues_mut());
        queues.for_each(super::queues::Queues::restock);
    }

    /// Bytes that policies occupy beyond the table.
    pub(crate) fn bytes(&self) -> u64 {
        if !self.is_told() {
            return 0;
        }
        let queues = self.shares.iter().filter_map(|share| share.policy.as_ref()?.queues());
        queues.map(|queues| queues.bytes()).sum()
    }
}

/// Whether one sweep goes over the pages of all targets.
fn is_shared(settings: Settings) -> bool {
    settings.scope == Scope::Global && settings.policy.is_sweep()
}

fn shared(settings: Settings) -> Option<Box<dyn Policy>> {
    is_shared(settings).then(|| settings.policy.policy())
}

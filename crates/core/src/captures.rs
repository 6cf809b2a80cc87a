//! Choosing what to capture: victims, as policies give them, become runs of adjacent pages of one target.

use crate::evict::{BATCH_PAGES_MAX, Run};
use crate::page::Entry;
use crate::pager::Pager;
use crate::policy::{Pages, Policy, Refusal};
use crate::regions::Region;
use crate::streams::BLOCK_PAGES_MAX;
use crate::touches::{AccessBits, block_of};
use crate::units::{PageIndex, TargetId};

/// Blocks whose access bits are looked at for one batch: where all of them are in use, the next are not spared.
const LOOKS_MAX: u32 = 8;

impl Pager {
    /// Chooses up to `most` pages of one target to capture, as runs of adjacent pages appended to `runs`. Targets for
    /// which `may` is false are passed over. Returns whose pages they are.
    pub fn next_capture(
        &mut self,
        most: u64,
        may: impl Fn(TargetId) -> bool,
        access: &mut impl AccessBits,
        runs: &mut Vec<Run>,
    ) -> Option<TargetId> {
        // That nobody finds room is forgotten when a batch begins.
        let short = self.wanted_of_all() > 0;
        self.replacement.batch_begins(self.batch_pages(), self.budget_pages());
        self.most_in_all = u64::MAX;
        if !self.replacement.is_told() {
            return self.choose_from(None, most, may, access, runs);
        }
        let (first, most_of_it) = self.replacement.payer(short, &may)?;
        self.most_in_all = most_of_it;
        let most = most.min(most_of_it);
        let mut paid = None;
        for payer in std::iter::once(first).chain(self.replacement.others(first)) {
            if may(payer) && self.replacement.pay_together(first, payer) {
                paid = self.choose_from(Some(payer), most, |target| target == payer, access, runs);
            }
            if paid.is_some() {
                break;
            }
        }
        if let Some(payer) = paid {
            self.replacement.pay(payer, runs.iter().map(|run| run.pages).sum());
        }
        paid
    }

    fn choose_from(
        &mut self,
        payer: Option<TargetId>,
        most: u64,
        may: impl Fn(TargetId) -> bool,
        access: &mut impl AccessBits,
        runs: &mut Vec<Run>,
    ) -> Option<TargetId> {
        let mut policy = self.replacement.take(payer)?;
        let most = most.min(self.capturable_pages());
        let whose = match payer {
            Some(payer) if !self.replacement.sweeps() => self.draw(policy.as_mut(), most, runs).then_some(payer),
            _ => self.sweep(policy.as_mut(), most, may, access, runs),
        };
        self.replacement.put_back(payer, policy);
        whose
    }

    /// How many pages beyond `most` a batch may have, lest a block leave in two.
    fn batch_slack(&self, most: u64) -> u64 {
        if self.store_full {
            return 0;
        }
        let limit = self.capturable_pages().min(BATCH_PAGES_MAX);
        limit.min(self.most_in_all).saturating_sub(most).min(BLOCK_PAGES_MAX - 1)
    }

    /// Victims in the table's order.
    fn sweep(
        &mut self,
        policy: &mut dyn Policy,
        most: u64,
        may: impl Fn(TargetId) -> bool,
        access: &mut impl AccessBits,
        runs: &mut Vec<Run>,
    ) -> Option<TargetId> {
        let alone = self.replacement.is_told();
        let mut left = most;
        // Beyond that, only what is left of the last page's block.
        let mut more = self.batch_slack(most);
        let mut block_ends: Option<PageIndex> = None;
        let setting = self.replacement.settings().block;
        let mut whose: Option<TargetId> = None;
        let mut last: Option<Run> = None;
        let mut region: Option<Region> = None;
        let (regions, mut looks) = (&self.regions, LOOKS_MAX);
        let mut touched = |page: PageIndex| {
            let region = regions.of_page(page).filter(|region| looks > 0 && may(region.target))?;
            let (address, aligned) = (region.address_of(page)?, region.is_aligned());
            looks -= 1;
            let block = region.span.intersect(block_of(address)).filter(|_| aligned)?;
            access.take(region.target, block)
        };
        let mut pages = Pages::new(&mut self.table, &mut touched);
        while left + more > 0 {
            let Some(page) = policy.next(&mut pages) else { break };
            if left == 0 {
                let ends = *block_ends.get_or_insert_with(|| {
                    let before = last.map_or(page, |run| PageIndex(run.page.0 + run.pages - 1));
                    Self::block_end(setting, pages.area(before).as_ref(), before)
                });
                let goes_on = last.is_some_and(|run| run.page.plus(run.pages) == page && page < ends);
                if !goes_on {
                    policy.step_back();
                    break;
                }
                (left, more) = (1, more - 1);
            }
            // All the way round, pages would be chosen twice. The first may have got a second chance meanwhile: any of them tells.
            let is_chosen = |run: &Run| (run.page.0..run.page.0 + run.pages).contains(&page.0);
            if pages.is_round() && runs.iter().chain(&last).any(is_chosen) {
                break;
            }
            if is_kept(&self.kept, page) {
                continue;
            }
            // Regions are looked up by search, and pages come in order: most are in the region of the one before.
            if region.is_none_or(|region| region.address_of(page).is_none()) {
                region = self.regions.of_page(page);
                runs.extend(last.take());
            }
            let Some((there, address)) = region.and_then(|region| Some((region, region.address_of(page)?))) else {
                continue;
            };
            let target = there.target;
            if let Some(run) = &mut last
                && whose == Some(target)
                && page == run.page.plus(run.pages)
                && !page.0.is_multiple_of(BLOCK_PAGES_MAX)
            {
                run.pages += 1;
                left -= 1;
                continue;
            }
            match whose {
                None if may(target) => whose = Some(target),
                None => {
                    // All of this region's pages are passed over, not one after the other.
                    policy.pass_over(there.span.end.pages_since(address) - 1);
                    continue;
                }
                Some(whose) if whose == target => {}
                // One target's own sweep: the others' pages are not its business.
                Some(_) if alone => {
                    policy.pass_over(there.span.end.pages_since(address) - 1);
                    continue;
                }
                Some(_) => {
                    policy.step_back();
                    break;
                }
            }
            runs.extend(last.replace(Run { address, page, pages: 1 }));
            left -= 1;
        }
        runs.extend(last);
        whose
    }

    /// Victims in a policy's own order; false when it has none. They leave in the table's order, so that those which are
    /// neighbours leave in one move.
    fn draw(&mut self, policy: &mut dyn Policy, most: u64, runs: &mut Vec<Run>) -> bool {
        policy.recall();
        let mut drawn = std::mem::take(&mut self.replacement.drawn);
        drawn.clear();
        let mut passed = std::mem::take(&mut self.replacement.passed);
        // What may not leave, or would not the last time, goes behind all others: in a run with them it would keep its
        // neighbours again. It stays out until the batch is chosen, as a policy may put it into a queue that is next.
        while (drawn.len() as u64) < most {
            let Some(page) = policy.next(&mut Pages::new(&mut self.table, &mut |_| None)) else { break };
            let may_leave = |entry: &mut Entry| entry.is_candidate() && !entry.take_chance(false);
            let leaves = !is_kept(&self.kept, page) && self.table.update(page, may_leave);
            if leaves { drawn.push(page) } else { passed.push(page) }
        }
        passed.drain(..).for_each(|page| policy.refused(page, Refusal::Stuck));
        self.replacement.passed = passed;
        drawn.sort_unstable();
        let mut region: Option<Region> = None;
        let mut last: Option<Run> = None;
        for &page in &drawn {
            let there =
                region.filter(|region| region.address_of(page).is_some()).or_else(|| self.regions.of_page(page));
            let same = region == there;
            region = there;
            let Some(address) = there.and_then(|there| there.address_of(page)) else { continue };
            match &mut last {
                Some(run) if same && page == run.page.plus(run.pages) && !page.0.is_multiple_of(BLOCK_PAGES_MAX) => {
                    run.pages += 1;
                }
                _ => runs.extend(last.replace(Run { address, page, pages: 1 })),
            }
        }
        runs.extend(last);
        let any = !drawn.is_empty();
        self.replacement.drawn = drawn;
        any
    }
}

impl Pager {
    /// The pages of `runs`, chosen before and refused then, that may be captured now, each by itself: each once, as
    /// many as there are buffers for, and none that is elsewhere or anything else by now.
    pub fn capturable_again(&self, target: TargetId, runs: &[Run]) -> Vec<Run> {
        let singles = runs.iter().flat_map(|run| {
            (0..run.pages).map(|n| Run { address: run.address.plus_pages(n), page: run.page.plus(n), pages: 1 })
        });
        let may = |run: &Run| {
            let there = self.regions.of_page(run.page).filter(|region| region.target == target);
            there.and_then(|region| region.address_of(run.page)) == Some(run.address)
                && self.table.get(run.page).is_candidate()
                && !is_kept(&self.kept, run.page)
        };
        let mut runs: Vec<Run> = singles.filter(may).collect();
        // One that was refused more than once is named as often.
        runs.sort_unstable_by_key(|run| run.page);
        runs.dedup();
        runs.truncate(usize::try_from(self.capturable_pages().min(BATCH_PAGES_MAX)).expect("a batch"));
        runs
    }
}

pub(crate) fn is_kept(kept: &[(PageIndex, TargetId)], page: PageIndex) -> bool {
    kept.binary_search_by_key(&page, |(kept, _)| *kept).is_ok()
}

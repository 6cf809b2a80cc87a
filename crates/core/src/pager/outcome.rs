//! What became of plans: of a fault's page, and of those that came along.

use super::{Outcome, Pager, Plan, Served, Stop};
use crate::page::{Entry, HandleBits, State, Step};
use crate::policy::Arrival;
use crate::units::PageIndex;

impl Pager {
    /// The outcome of carrying out `plan`, the answer to a fault.
    pub fn installed(&mut self, plan: Plan, outcome: Outcome) -> Served {
        match plan {
            Plan::NoRoom => return Served::Later,
            Plan::Coming => {
                self.counters.faults += 1;
                return Served::Yes;
            }
            _ => {}
        }
        self.arrived(plan, outcome, true);
        if let Plan::Fetch { page, asked, pages, .. } = plan
            && outcome.done <= asked
            && (pages, asked) != (1, 0)
        {
            // Something beside it is in the way, or its mapping ends within the block. The next time it comes alone.
            if outcome.stop == Some(Stop::Gone) {
                self.part(page.plus(asked));
            }
            self.table.update(page.plus(asked), Entry::set_stuck);
            if asked > 0 {
                return Served::Later;
            }
        }
        match outcome {
            Outcome { done: 0, stop: Some(Stop::Changing | Stop::NoMemory) } => return Served::Later,
            Outcome { done: 0, stop: Some(Stop::Exists | Stop::Gone) } => {
                self.counters.faults += 1;
                return Served::Wake;
            }
            _ => {}
        }
        self.counters.faults += 1;
        Served::Yes
    }

    /// The outcome of carrying out `plan`, which [`Pager::ahead`] gave: no fault waits for it.
    pub fn installed_ahead(&mut self, plan: Plan, outcome: Outcome) {
        self.arrived(plan, outcome, false);
    }

    /// The outcome of `plan`; `asked` when a fault waits for its first page.
    fn arrived(&mut self, plan: Plan, outcome: Outcome, asked: bool) {
        let nth = if let Plan::Fetch { asked, .. } = plan { asked } else { 0 };
        let how = |i, first| if asked && i == nth { first } else { Arrival::Ahead };
        let exists = outcome.done == 0 && outcome.stop == Some(Stop::Exists);
        match plan {
            Plan::Zero { page: Some(page), .. } => {
                (0..outcome.done).for_each(|i| self.step_as(page.plus(i), Step::Fill, how(i, Arrival::Fault)));
                self.counters.zero_fills += outcome.done;
                if exists {
                    self.step(page, Step::Find);
                }
            }
            Plan::Buffer { page, .. } => {
                if outcome.done == 1 || exists {
                    self.step_as(page, Step::Refault, Arrival::Buffer);
                    self.table.update(page, Entry::set_referenced);
                    self.counters.refaults += 1;
                }
            }
            Plan::Fetch { page, pages, .. } => {
                let asked = u64::from(asked && nth < outcome.done);
                self.counters.prefetched_pages += outcome.done - asked;
                // A page that is there although the table says remote is the live one; the store's is then an old copy.
                let arrived = outcome.done.max(u64::from(exists));
                (0..arrived).for_each(|i| self.step_as(page.plus(i), Step::Install, how(i, Arrival::Store)));
                (arrived..pages).for_each(|i| self.step(page.plus(i), Step::PutBack));
                self.counters.fetched_pages += outcome.done;
            }
            Plan::Zero { page: None, .. } | Plan::Lost { .. } | Plan::Coming | Plan::NoRoom => {}
        }
        self.note_local();
    }

    /// Only the first `pages` of a fetch can be installed: the others stay in the store.
    pub fn shorten(&mut self, plan: Plan, pages: u64) -> Plan {
        let Plan::Fetch { address, page, pages: planned, asked } = plan else {
            unreachable!("only fetches are shortened")
        };
        (pages..planned).for_each(|i| self.step(page.plus(i), Step::PutBack));
        Plan::Fetch { address, page, pages: pages.min(planned), asked }
    }

    /// The store could not give the page that `plan`, a fetch, asked for first (`within` pages into it). The pages
    /// before it may be installed: the plan for those, which may be none. No plan if it is the page that a fault is about, and
    /// that has to be told.
    pub fn fetch_failed(&mut self, plan: Plan, within: u64) -> Option<Plan> {
        let Plan::Fetch { address, page, pages, asked } = plan else { unreachable!("only fetches fail in the store") };
        self.step(page.plus(within), Step::Lose);
        self.counters.lost_pages += 1;
        (within + 1..pages).for_each(|i| self.step(page.plus(i), Step::PutBack));
        (within > 0 || asked > 0).then_some(Plan::Fetch { address, page, pages: within, asked })
    }

    /// Whether `page` is still on its way under `handle`, and was not removed meanwhile.
    pub fn is_coming(&self, page: PageIndex, handle: HandleBits) -> bool {
        let entry = self.table.get(page);
        entry.state() == State::Fetching && entry.handle() == Some(handle)
    }

    /// A page that was on its way is lost.
    pub fn lost(&mut self, page: PageIndex) {
        self.step(page, Step::Lose);
        self.counters.lost_pages += 1;
    }

    /// A page that was on its way stays in the store for now.
    pub fn put_back(&mut self, page: PageIndex) {
        self.step(page, Step::PutBack);
    }
}

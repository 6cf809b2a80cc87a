//! Pages that the store has not brought yet, and pages that it has not said to keep yet.
//!
//! Meanwhile guests go on. So nothing is installed but what the table still says is coming, under the very handle that
//! was asked for, at the address where it is by then; and whoever waits there is woken when anything of it is amiss.

use std::collections::BTreeMap;

use spillway_core::page::{HandleBits, State};
use spillway_core::pager::{Outcome, Pager, Plan, Served, Stop};
use spillway_core::{Address, PageIndex, TargetId};

use crate::driver::Driver;
use crate::kernel::Kernel;
use crate::memory::slot;
use crate::mutation::Mutation;
use crate::store::{Completion, Got};
use crate::target::{Target, Waiting};

/// Fetches under way at once. More faults than that wait for the first to end: few, so that some do.
const JOURNEYS: usize = 6;

/// How far a page has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    Coming,
    Here(u64),
    Lost,
    /// Its handle was freed.
    CalledOff,
}

#[derive(Clone, Copy, Debug)]
struct Traveller {
    handle: HandleBits,
    progress: Progress,
}

/// A block on its way from the store.
#[derive(Clone, Debug)]
struct Journey {
    target: TargetId,
    /// The fault that asked for it; none when it was fetched ahead.
    fault: Option<Waiting>,
    address: Address,
    page: PageIndex,
    travellers: Vec<Traveller>,
}

impl Journey {
    fn is_complete(&self) -> bool {
        self.travellers.iter().all(|traveller| traveller.progress != Progress::Coming)
    }

    fn is_coming(&self, nth: usize, core: &Pager, mutation: Option<Mutation>) -> bool {
        let page = self.page.plus(nth as u64);
        let Traveller { handle, progress } = self.travellers[nth];
        match mutation {
            Some(Mutation::InstallUnasked) => true,
            Some(Mutation::IgnoreHandle) => core.state_of(page) == State::Fetching,
            _ => progress != Progress::CalledOff && core.is_coming(page, handle),
        }
    }
}

/// What a store that answers later led to, in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Travels {
    /// Fetches.
    pub journeys: u64,
    /// Those of which not all pages could be installed.
    pub incomplete: u64,
    /// Pages that were called off on their way.
    pub called_off: u64,
    /// Writes that failed in the end.
    pub refused: u64,
    /// Turns in which a fork waited for writes.
    pub waits: u64,
}

impl Travels {
    /// Adds those of another run.
    pub fn add(&mut self, other: &Self) {
        self.journeys += other.journeys;
        self.incomplete += other.incomplete;
        self.called_off += other.called_off;
        self.refused += other.refused;
        self.waits += other.waits;
    }
}

/// All that is under way between the pager and a store that answers later.
#[derive(Debug, Default)]
pub struct Journeys {
    /// Counts.
    pub travels: Travels,
    under_way: Vec<Journey>,
    writes: BTreeMap<HandleBits, PageIndex>,
}

impl Journeys {
    /// Whether another can begin.
    pub(crate) fn have_room(&self) -> bool {
        self.under_way.len() < JOURNEYS
    }

    /// Whether pages are on their way into targets.
    pub(crate) fn are_under_way(&self) -> bool {
        !self.under_way.is_empty()
    }

    /// Writes that the store has not said to keep.
    pub(crate) fn writes(&self) -> usize {
        self.writes.len()
    }

    /// The store took over what is in `page`'s buffer.
    pub(crate) fn write_begins(&mut self, page: PageIndex, handle: HandleBits) {
        self.writes.insert(handle, page);
    }

    /// The store has released the page's older copy, or says no more of it.
    pub(crate) fn write_ends(&mut self, handle: HandleBits) {
        self.writes.remove(&handle);
    }

    /// A reference is about to be freed. What is under way for it ends without a word if it is the last; what still comes
    /// under this handle has one of its own.
    pub(crate) fn forget(&mut self, handle: HandleBits, core: &Pager, mutation: Option<Mutation>) {
        self.writes.remove(&handle);
        for journey in &mut self.under_way {
            let page = journey.page;
            for (nth, traveller) in journey.travellers.iter_mut().enumerate() {
                let coming = core.is_coming(page.plus(nth as u64), handle);
                let keep = match mutation {
                    Some(Mutation::KeepFreed) => true,
                    Some(Mutation::ForgetShared) => false,
                    Some(Mutation::IgnoreHandle) => coming || traveller.progress != Progress::Coming,
                    _ => coming,
                };
                if traveller.handle == handle && !keep {
                    self.travels.called_off += u64::from(traveller.progress == Progress::Coming);
                    traveller.progress = Progress::CalledOff;
                }
            }
        }
    }

    fn arrived(&mut self, handle: HandleBits, value: Option<u64>) {
        let all = self.under_way.iter_mut().flat_map(|journey| &mut journey.travellers);
        for traveller in all.filter(|it| it.handle == handle && it.progress == Progress::Coming) {
            traveller.progress = value.map_or(Progress::Lost, Progress::Here);
        }
    }
}

impl Driver {
    /// Asks a store that answers later for what a fault needs, and then for what its stream will want.
    pub(crate) fn ask_for(&mut self, kernel: &mut Kernel, at: usize, plan: Plan, fault: Waiting) {
        if !self.journeys.have_room() {
            self.core.installed(plan, Outcome { done: 0, stop: Some(Stop::Changing) });
            if let Some(target) = &mut self.targets[at] {
                target.waiting.push(fault);
            }
            return;
        }
        self.fetch(kernel, at, plan, Some(fault));
        while self.journeys.have_room()
            && let Some(plan) = self.core.ahead()
        {
            self.fetch(kernel, at, plan, None);
        }
    }

    /// Begins what `plan`, a fetch, asks for.
    pub(crate) fn fetch(&mut self, kernel: &mut Kernel, at: usize, plan: Plan, fault: Option<Waiting>) {
        let Plan::Fetch { address, page, pages, .. } = plan else { unreachable!("only fetches are fetched") };
        let Some(target) = &self.targets[at] else { return };
        kernel.trace.note(kernel.now, || format!("pager asks for {} of {}: {plan:?}", slot(address), target.space));
        let mut journey = Journey { target: target.id, fault, address, page, travellers: Vec::new() };
        for page in (0..pages).map(|i| page.plus(i)) {
            let handle = self.core.handle_of(page).expect("it is in the store");
            let progress = match self.store.get(handle, kernel.now) {
                Got::Here(value) => Progress::Here(value),
                Got::Pending => Progress::Coming,
                Got::Lost => Progress::Lost,
            };
            journey.travellers.push(Traveller { handle, progress });
        }
        self.journeys.travels.journeys += 1;
        self.journeys.under_way.push(journey);
    }

    /// Hears what the store has to say.
    pub(crate) fn hear_store(&mut self, kernel: &mut Kernel) {
        while let Some(completion) = self.store.progress(kernel.now) {
            kernel.trace.note(kernel.now, || format!("the store says {completion:?}"));
            match completion {
                Completion::Got(handle, value) => self.journeys.arrived(handle, value),
                Completion::Put(handle, kept) => {
                    let Some(page) = self.journeys.writes.remove(&handle) else { continue };
                    if kept || self.is(Mutation::TrustPut) {
                        self.core.stored(page, handle);
                    } else {
                        self.journeys.travels.refused += 1;
                        self.core.refused(page, handle);
                        self.excused = true;
                    }
                }
            }
        }
    }

    /// Installs the blocks that are complete, in targets that may be served now.
    pub(crate) fn arrive(&mut self, kernel: &mut Kernel) {
        let mut at = 0;
        while at < self.journeys.under_way.len() {
            let journey = &self.journeys.under_way[at];
            let target = self.target_at(journey.target);
            let may = target.is_none_or(Target::may_serve);
            if journey.is_complete() && may {
                let journey = self.journeys.under_way.remove(at);
                self.end_journey(kernel, &journey);
            } else {
                at += 1;
            }
        }
    }

    fn end_journey(&mut self, kernel: &mut Kernel, journey: &Journey) {
        let Some(space) = self.target_at(journey.target).map(|target| target.space) else { return };
        let mut whole = true;
        let mut nth = 0;
        // Pages may have moved, to where others wait by then.
        let mut places: Vec<usize> = (0..journey.travellers.len()).map(|i| slot(journey.address) + i).collect();
        let now = (0..journey.travellers.len()).filter_map(|i| self.place_of(journey, i)).map(slot);
        if !self.is(Mutation::WakeWhereAsked) {
            places.extend(now);
        }
        while nth < journey.travellers.len() {
            match self.run_of(journey, nth) {
                Some((address, values)) => {
                    whole &= self.install(kernel, journey, nth, address, &values);
                    nth += values.len();
                }
                None => {
                    let lost = journey.travellers[nth].progress == Progress::Lost;
                    if lost && journey.is_coming(nth, &self.core, self.mutation) {
                        self.core.lost(journey.page.plus(nth as u64));
                    }
                    whole = false;
                    nth += 1;
                }
            }
        }
        self.journeys.travels.incomplete += u64::from(!whole);
        self.doubt_still(journey);
        if whole || self.is(Mutation::DropWake) {
            return;
        }
        if self.is(Mutation::WakeOnlyWhoAsked) {
            places.retain(|place| journey.fault.is_some_and(|fault| fault.at == *place));
        }
        // Whoever waits here tries again, and is told what has become of the page.
        places.into_iter().for_each(|place| kernel.spaces[space].uffd.wake(&(place..place + 1)));
    }

    /// Pages that are outside all the same may have been asked for because they were seen in the target.
    fn doubt_still(&mut self, journey: &Journey) {
        if journey.fault.is_some() || !self.succeeds {
            return;
        }
        let outside = |page: &PageIndex| self.core.state_of(*page) == State::Remote;
        let pages = (0..journey.travellers.len()).map(|nth| journey.page.plus(nth as u64)).filter(outside);
        let places: Vec<usize> =
            pages.filter_map(|page| self.core.regions().address_of(page)).map(|(_, at)| slot(at)).collect();
        let target = self.targets[journey.target.0 as usize].as_mut();
        target.into_iter().for_each(|target| target.doubts.extend(&places));
    }

    fn place_of(&self, journey: &Journey, nth: usize) -> Option<Address> {
        let (target, address) = self.core.regions().address_of(journey.page.plus(nth as u64))?;
        (target == journey.target).then_some(address)
    }

    /// From the `from`th page of a journey on, those that came, are still wanted, and lie one behind the other: where, and
    /// what they hold.
    fn run_of(&self, journey: &Journey, from: usize) -> Option<(Address, Vec<u64>)> {
        let one = |nth: usize| {
            let Progress::Here(value) = journey.travellers[nth].progress else { return None };
            let wanted = journey.is_coming(nth, &self.core, self.mutation);
            self.place_of(journey, nth).filter(|_| wanted).map(|address| (address, value))
        };
        let (address, _) = one(from)?;
        let next = |nth: usize| {
            one(nth).filter(|(at, _)| *at == address.plus_pages((nth - from) as u64)).map(|(_, value)| value)
        };
        Some((address, (from..journey.travellers.len()).map_while(next).collect()))
    }

    /// Installs a run of pages; true when all of it is in the target now.
    fn install(
        &mut self,
        kernel: &mut Kernel,
        journey: &Journey,
        from: usize,
        address: Address,
        values: &[u64],
    ) -> bool {
        let Some(space) = self.target_at(journey.target).map(|target| target.space) else { return false };
        let pages = values.len() as u64;
        let there = slot(address)..slot(address) + values.len();
        let fault = journey.fault.filter(|fault| there.contains(&fault.at));
        let asked = fault.map_or(0, |fault| (fault.at - there.start) as u64);
        let plan = Plan::Fetch { address, page: journey.page.plus(from as u64), pages, asked };
        let outcome = kernel.spaces[space].install(slot(address), values);
        kernel.trace.note(kernel.now, || format!("pages arrive at {} of {space}: {plan:?} {outcome:?}", slot(address)));
        if outcome.stop == Some(Stop::NoMemory) {
            self.stay();
        }
        if fault.is_some() {
            return self.core.installed(plan, outcome) == Served::Yes && outcome.stop.is_none();
        }
        self.core.installed_ahead(plan, outcome);
        outcome.stop.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spillway_core::Span;
    use spillway_core::evict::{Bytes, Captured};
    use spillway_core::pager::{Budget, Config};

    /// Takes the page away and has the store keep it under `handle`; then a fault asks for it.
    fn leave_and_ask(core: &mut Pager, target: TargetId, page: PageIndex, handle: HandleBits) {
        let buffer = core.take_buffer().expect("enough buffers");
        core.captured(page, Captured::Moved(buffer));
        core.read(page, buffer, Bytes::Here);
        let write = core.next_write(true).expect("it was just captured");
        core.written(write, handle, false);
        assert!(matches!(core.fault(target, Address(0)), Plan::Fetch { .. }));
    }

    /// Three slow answers must come together for a run to show it, once in more seeds than anyone waits for.
    #[test]
    fn a_page_that_is_on_its_way_again_is_not_the_one_that_was_asked_for_first() {
        let mut core = Pager::new(Config { budget: Budget::Pages(16), buffers: 8, write_batch: 1 });
        let (target, span) = (core.add_target(), Span::of_pages(Address(0), 1));
        core.add_region(target, span);
        core.found(target, span);
        let page = core.regions().at(target, Address(0)).expect("managed").page_at(Address(0));
        let [first, second] = [1, 2].map(|bits| HandleBits::new(bits).expect("not zero"));
        leave_and_ask(&mut core, target, page, first);
        let traveller = Traveller { handle: first, progress: Progress::Here(7) };
        let journey = Journey { target, fault: None, address: Address(0), page, travellers: vec![traveller] };
        assert!(journey.is_coming(0, &core, None));
        core.removed(target, span);
        let plan = core.fault(target, Address(0));
        core.installed(plan, Outcome { done: 1, stop: None });
        leave_and_ask(&mut core, target, page, second);
        assert!(!journey.is_coming(0, &core, None));
        assert!(
            journey.is_coming(0, &core, Some(Mutation::IgnoreHandle)),
            "the wrong driver is told from the right one"
        );
    }
}

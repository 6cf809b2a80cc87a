//! Pages that the store has not brought yet, and pages that it has not said to keep yet.
//!
//! Meanwhile targets go on: they remove pages, move them, fork, end. So nothing is installed but what the table still
//! says is coming, under the very handle that was asked for, at the address where it is by then.

use std::collections::HashMap;

use spillway_core::page::{BURDENS_MAX, HandleBits, State};
use spillway_core::pager::{Outcome, Pager, Plan, Served, Stop};
use spillway_core::streams::BLOCK_PAGES_MAX;
use spillway_core::{Address, PageIndex, Span, TargetId};
use spillway_store::{Completion, Got, Store, StoreError, Urgency};

use super::Driver;
use super::hands::{index, pages, to_bits, to_handle};
use super::stopwatch::Kind;
use crate::sys::clock::now_ns;
use crate::tally::Tally;
use crate::target::Waiting;

/// Fetches under way at once, each of a block at most. More faults than that wait for the first to end.
const JOURNEYS: usize = u64::BITS as usize;
/// Writes under way that the pager expects: as many as it has buffers, and as many again that came back meanwhile.
const WRITES: usize = 2048;
const BLOCK: usize = 16;
/// Pages whose copies the store is asked about for each page that comes home, where some of them are a burden to it. So each is asked about
/// several times before it leaves: the sooner a copy goes, the more it saves.
pub(super) const LOOKS_PER_PAGE: usize = 8;
/// Looks that are made at a time while an answer is waited for, some microseconds.
const LOOKS_AT_A_TIME: usize = BURDENS_MAX;
/// Looks that are put off until then.
const LOOKS_OWED_MAX: usize = 16 * BURDENS_MAX;
const _: () = assert!(BLOCK as u64 == BLOCK_PAGES_MAX);

/// A block on its way from the store.
#[derive(Clone, Copy)]
struct Journey {
    target: TargetId,
    /// The fault that asked for it; none when it was fetched ahead.
    fault: Option<Waiting>,
    address: Address,
    page: PageIndex,
    pages: usize,
    handles: [Option<HandleBits>; BLOCK],
    /// Bit by bit: still to come, and never to come.
    coming: u32,
    lost: u32,
    /// Not to be had now.
    later: u32,
}

impl Journey {
    fn span(&self) -> Span {
        Span::of_pages(self.address, self.pages as u64)
    }
}

/// All that is under way between the pager and a store that answers later.
pub(super) struct Journeys {
    under_way: [Option<Journey>; JOURNEYS],
    /// Which those are, bit by bit: mostly it is one or none, and each turn asks several times.
    which: u64,
    blocks: Box<[spillway_core::Page]>,
    writes: HashMap<HandleBits, PageIndex>,
    /// The store moves pages, to win back room: copies may be a burden to it.
    has_burdens: bool,
    /// Looks for such copies that are put off.
    looks_owed: usize,
}

impl Journeys {
    /// None yet; for a store that answers at once there never are any.
    pub(super) fn new(store: &dyn Store) -> Self {
        let (blocks, writes) = match store.descriptor() {
            Some(_) => (JOURNEYS * BLOCK, WRITES),
            None => (0, 0),
        };
        Self {
            under_way: [None; JOURNEYS],
            which: 0,
            blocks: pages(blocks),
            writes: HashMap::with_capacity(writes),
            has_burdens: store.protection().is_some(),
            looks_owed: 0,
        }
    }

    /// Whether the store answers later at all.
    pub(super) fn are_possible(&self) -> bool {
        !self.blocks.is_empty()
    }

    /// Whether another can begin.
    pub(super) fn have_room(&self) -> bool {
        self.which != u64::MAX
    }

    /// Whether pages are on their way into targets.
    pub(super) fn are_under_way(&self) -> bool {
        self.which != 0
    }

    /// How many are.
    pub(super) fn under_way(&self) -> usize {
        self.which.count_ones() as usize
    }

    /// The first one at this place or behind it.
    fn next_from(&self, at: usize) -> Option<usize> {
        let rest = self.which.checked_shr(u32::try_from(at).expect("few")).unwrap_or(0);
        (rest != 0).then(|| at + rest.trailing_zeros() as usize)
    }

    fn begin(&mut self, at: usize, journey: Journey) {
        self.which |= 1 << at;
        self.under_way[at] = Some(journey);
    }

    fn end(&mut self, at: usize) -> Option<Journey> {
        self.which &= !(1 << at);
        self.under_way[at].take()
    }

    /// Writes that the store has not said to keep.
    pub(super) fn writes(&self) -> usize {
        self.writes.len()
    }

    /// The store took over what is in `page`'s buffer.
    pub(super) fn write_begins(&mut self, page: PageIndex, handle: HandleBits) {
        self.writes.insert(handle, page);
    }

    /// The store has released a page's older copy, of which it will not speak again.
    pub(super) fn write_ends(&mut self, handle: HandleBits) {
        self.writes.remove(&handle);
    }

    /// A reference is about to be freed. If it is the last, what is under way for it ends without a word; a page that is
    /// still coming under this handle has one of its own.
    pub(super) fn forget(&mut self, handle: HandleBits, core: &Pager) {
        self.writes.remove(&handle);
        let mut next = self.next_from(0);
        while let Some(at) = next {
            next = self.next_from(at + 1);
            let Some(journey) = &mut self.under_way[at] else { continue };
            let page = journey.page;
            for (i, theirs) in journey.handles[..journey.pages].iter_mut().enumerate() {
                if *theirs == Some(handle) && !core.is_coming(page.plus(i as u64), handle) {
                    *theirs = None;
                    journey.coming &= !(1 << i);
                }
            }
        }
    }

    fn arrived(&mut self, handle: HandleBits, page: Result<&spillway_core::Page, StoreError>) {
        let mut next = self.next_from(0);
        while let Some(at) = next {
            next = self.next_from(at + 1);
            let Some(journey) = &mut self.under_way[at] else { continue };
            for i in 0..journey.pages {
                if journey.handles[i] != Some(handle) || journey.coming & 1 << i == 0 {
                    continue;
                }
                journey.coming &= !(1 << i);
                match page {
                    Ok(page) => self.blocks[at * BLOCK + i] = *page,
                    Err(_) => journey.lost |= 1 << i,
                }
            }
        }
    }
}

impl Driver {
    /// Begins what `plan`, a fetch, asks for. Returns the plan and its outcome if that is known at once.
    pub(super) fn fetch(
        &mut self,
        at: usize,
        plan: Plan,
        fault: Option<Waiting>,
        urgency: Urgency,
    ) -> Option<(Plan, Outcome)> {
        let Plan::Fetch { address, page, pages, .. } = plan else { unreachable!("only fetches are fetched") };
        let target = self.targets[at].as_ref()?;
        if !self.journeys.are_possible() {
            return Some(self.hands.perform(plan, true, target, &mut self.core));
        }
        let free = self.journeys.which.trailing_ones() as usize;
        if free == JOURNEYS {
            (0..pages).for_each(|i| self.core.put_back(page.plus(i)));
            return None;
        }
        let mut journey = Journey {
            target: target.id,
            fault,
            address,
            page,
            pages: index(pages),
            handles: [None; BLOCK],
            coming: 0,
            lost: 0,
            later: 0,
        };
        for i in 0..journey.pages {
            let handle = self.core.handle_of(page.plus(i as u64));
            journey.handles[i] = handle;
            let into = &mut self.journeys.blocks[free * BLOCK + i];
            match handle.map(|handle| self.hands.store.get(to_handle(handle), urgency, into)) {
                Some(Ok(Got::Here)) => {}
                Some(Ok(Got::Pending)) => journey.coming |= 1 << i,
                Some(Err(StoreError::Unavailable)) => journey.later |= 1 << i,
                Some(Err(_)) | None => journey.lost |= 1 << i,
            }
        }
        self.journeys.begin(free, journey);
        None
    }

    /// Hears what the store has to say, and installs what has come.
    pub(super) fn progress(&mut self) {
        self.hear_store();
        self.arrive();
    }

    /// Hears what the store has to say.
    pub(super) fn hear_store(&mut self) {
        if !self.journeys.are_possible() {
            return;
        }
        self.awaits_store = false;
        let (core, journeys) = (&mut self.core, &mut self.journeys);
        self.hands.store.progress(&mut |completion| match completion {
            Completion::Got { handle, page } => journeys.arrived(to_bits(handle), page),
            Completion::Put { handle, result } => {
                let Some(page) = journeys.writes.remove(&to_bits(handle)) else { return };
                match result {
                    Ok(()) => core.stored(page, to_bits(handle)),
                    Err(_) => core.refused(page, to_bits(handle)),
                }
            }
        });
    }

    /// Installs the blocks that are complete, in targets that may be served now.
    pub(super) fn arrive(&mut self) {
        if self.journeys.are_under_way() {
            self.end_journeys();
        }
    }

    #[inline(never)]
    fn end_journeys(&mut self) {
        let mut next = 0;
        while let Some(at) = self.journeys.next_from(next) {
            next = at + 1;
            let Some(journey) = self.journeys.under_way[at].as_ref().filter(|journey| journey.coming == 0) else {
                continue;
            };
            let target = self.targets.get(journey.target.0 as usize).and_then(Option::as_ref);
            let (gone, may) = (target.is_none(), target.is_some_and(|target| target.may_serve()));
            if (gone || may)
                && let Some(journey) = self.journeys.end(at)
                && may
            {
                self.end_journey(at, &journey);
            }
        }
    }

    #[inline(never)]
    fn end_journey(&mut self, at: usize, journey: &Journey) {
        let mut whole = true;
        let mut served = false;
        // Where others wait for a page that has moved meanwhile.
        let places = self.places_of(journey);
        let mut i = 0;
        while i < journey.pages {
            let run = self.run_of(journey, i);
            match run {
                Some((address, pages)) => {
                    let faults = journey.fault.is_some_and(|fault| {
                        fault.address.0 >= address.0 && fault.address.0 < address.plus_pages(pages as u64).0
                    });
                    let done = self.install(at, journey, i, address, pages, faults);
                    served |= faults && done;
                    whole &= done;
                    i += pages;
                }
                None => {
                    let page = journey.page.plus(i as u64);
                    let still = journey.handles[i].is_some_and(|handle| self.core.is_coming(page, handle));
                    match still {
                        true if journey.lost & 1 << i != 0 => self.core.lost(page),
                        // Not to be had now, or moved to where its neighbours are not.
                        true => self.core.put_back(page),
                        false => {}
                    }
                    whole = false;
                    i += 1;
                }
            }
        }
        if !whole {
            self.doubt_still(journey);
        }
        if !whole && let Some(target) = &self.targets[journey.target.0 as usize] {
            // Whoever waits for a page, where it was or where it is by now, tries again and is told what has become of it.
            target.wake(journey.span());
            for place in places.into_iter().flatten() {
                target.wake(Span::of_pages(place, 1));
            }
        }
        if served && let Some(fault) = journey.fault {
            let (address, page) = (fault.address, journey.page.plus(fault.address.pages_since(journey.address)));
            let plan = Plan::Fetch { address, page, pages: 1, asked: 0 };
            self.note_served(journey.target.0 as usize, plan, fault);
        }
    }

    /// Of a journey without a fault, pages that are outside all the same: where another pager was before this one, they may be
    /// in the target and have been asked for to find that out.
    fn doubt_still(&mut self, journey: &Journey) {
        if journey.fault.is_some() || !self.succeeds {
            return;
        }
        let pages = (0..journey.pages).map(|i| journey.page.plus(i as u64));
        let outside = pages.filter(|&page| self.core.state_of(page) == State::Remote);
        let places: Vec<_> = outside.filter_map(|page| self.core.regions().address_of(page)).collect();
        for (id, address) in places {
            self.target(id).into_iter().for_each(|target| target.doubts.push(address));
        }
    }

    /// The places of the pages that are not where they were asked for.
    fn places_of(&self, journey: &Journey) -> [Option<Address>; BLOCK] {
        std::array::from_fn(|i| {
            let place = self.core.regions().address_of(journey.page.plus(i as u64)).filter(|_| i < journey.pages);
            place.map(|(_, address)| address).filter(|address| *address != journey.address.plus_pages(i as u64))
        })
    }

    /// From the `from`th page of a journey on, those that came, are still wanted, and lie one behind the other: where, and
    /// how many.
    fn run_of(&self, journey: &Journey, from: usize) -> Option<(Address, usize)> {
        let place = |i: usize| {
            let page = journey.page.plus(i as u64);
            let wanted = (journey.lost | journey.later) & 1 << i == 0
                && journey.handles[i].is_some_and(|handle| self.core.is_coming(page, handle));
            let place = self.core.regions().address_of(page).filter(|_| wanted);
            place.filter(|(target, _)| *target == journey.target).map(|(_, address)| address)
        };
        let address = place(from)?;
        let next = |n: &usize| place(from + n) == Some(address.plus_pages(*n as u64));
        let pages = 1 + (1..journey.pages - from).take_while(next).count();
        Some((address, pages))
    }

    /// Installs a run of pages; true when all of it is in the target now.
    fn install(
        &mut self,
        at: usize,
        journey: &Journey,
        from: usize,
        address: Address,
        pages: usize,
        faults: bool,
    ) -> bool {
        let Some(target) = &self.targets[journey.target.0 as usize] else { return false };
        let asked = journey.fault.filter(|_| faults).map_or(0, |fault| fault.address.pages_since(address));
        let plan = Plan::Fetch { address, page: journey.page.plus(from as u64), pages: pages as u64, asked };
        let clear = index(target.clear_pages(address, pages as u64));
        let plan = self.core.shorten(plan, clear as u64);
        let first = at * BLOCK + from;
        self.hands.watch.installs(now_ns(), Kind::Copies);
        let outcome = target.copy(address, &self.journeys.blocks[first..first + clear]);
        self.hands.watch.did(outcome.done, clear);
        Tally::add(&target.tally.fetched_pages, outcome.done);
        if outcome.stop == Some(Stop::NoMemory) {
            let tree = target.tally.tree;
            self.stay();
            self.stay_on(tree);
        }
        let served = if faults { self.core.installed(plan, outcome) } else { Served::Yes };
        if !faults {
            self.core.installed_ahead(plan, outcome);
        }
        if self.journeys.has_burdens {
            for i in from..from + index(outcome.done) {
                self.lay_down(journey.page.plus(i as u64), journey.handles[i]);
            }
        }
        served == Served::Yes && outcome.stop.is_none() && clear == pages
    }

    /// A page has come home. Its copy may be a burden to the store, and with it those of others that have been there for longer.
    fn lay_down(&mut self, page: PageIndex, handle: Option<HandleBits>) {
        let is_burden = |handle: &HandleBits| self.hands.store.burdens(&[to_handle(*handle)]) != 0;
        if let Some(handle) = handle.filter(is_burden) {
            self.core.forgo(page, handle);
        }
        self.journeys.looks_owed += LOOKS_PER_PAGE;
        if self.journeys.looks_owed > LOOKS_OWED_MAX {
            self.journeys.looks_owed = LOOKS_OWED_MAX;
            self.lay_others_down(LOOKS_PER_PAGE);
        }
    }

    /// Makes up for looks that were put off: nobody waits for them while an answer is on its way.
    pub(super) fn look_while_waiting(&mut self) {
        let looks = self.journeys.looks_owed.min(LOOKS_AT_A_TIME);
        if looks > 0 {
            self.journeys.looks_owed -= looks;
            self.lay_others_down(looks);
        }
    }

    /// Looks at some pages that are at home, and gives up their copies where they are a burden to the store.
    pub(super) fn lay_others_down(&mut self, looks: usize) {
        let store = &mut self.hands.store;
        if store.has_burdens() {
            self.core.forgo_clean(looks, |bits| {
                let mut handles = [to_handle(HandleBits::MIN); BURDENS_MAX];
                handles.iter_mut().zip(bits).for_each(|(handle, &bits)| *handle = to_handle(bits));
                store.burdens(&handles[..bits.len()])
            });
        }
    }
}

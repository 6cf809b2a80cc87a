//! Every policy against a slow, obvious model of it, under random events: here those that keep an order.

mod sweeps;

use std::collections::BTreeMap;

use super::{Arrival, Kind, Pages, Policy, Refusal};
use crate::table::Table;
use crate::units::PageIndex;

/// Pages that events are about: in several chunks, with gaps.
const PAGES: u64 = 160;
const STEPS: usize = 10_000;

fn page(number: u64) -> PageIndex {
    PageIndex(number * 37)
}

struct Chance(u64);

impl Chance {
    fn below(&mut self, most: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).expect("31 bits") % most
    }

    fn pick(&mut self, from: &[PageIndex]) -> Option<PageIndex> {
        (!from.is_empty()).then(|| from[self.below(from.len())])
    }
}

/// What a policy should do, with vectors that are searched; the first in each is the next to leave.
trait Model {
    fn arrived(&mut self, page: PageIndex, how: Arrival);
    fn next(&mut self) -> Option<PageIndex>;
    fn captured(&mut self, page: PageIndex) {
        self.gone(page);
    }
    fn gone(&mut self, page: PageIndex);
    fn refused(&mut self, page: PageIndex, why: Refusal);
}

fn drop_from(queue: &mut Vec<PageIndex>, page: PageIndex) -> bool {
    let before = queue.len();
    queue.retain(|&other| other != page);
    queue.len() < before
}

fn take_first(queue: &mut Vec<PageIndex>) -> Option<PageIndex> {
    (!queue.is_empty()).then(|| queue.remove(0))
}

fn put_back(queue: &mut Vec<PageIndex>, page: PageIndex, why: Refusal) {
    match why {
        Refusal::Stuck => queue.push(page),
        Refusal::Untried => queue.insert(0, page),
    }
}

/// FIFO, and LRU if `believes` in re-references.
struct Arrivals {
    queue: Vec<PageIndex>,
    believes: bool,
}

impl Model for Arrivals {
    fn arrived(&mut self, page: PageIndex, how: Arrival) {
        if how == Arrival::Buffer && !self.believes {
            self.queue.insert(0, page);
        } else {
            self.queue.push(page);
        }
    }
    fn next(&mut self) -> Option<PageIndex> {
        take_first(&mut self.queue)
    }
    fn gone(&mut self, page: PageIndex) {
        drop_from(&mut self.queue, page);
    }
    fn refused(&mut self, page: PageIndex, why: Refusal) {
        put_back(&mut self.queue, page, why);
    }
}

/// dcm's queues; which it came from is remembered of each page that is out.
struct ThreeQueues {
    active: Vec<PageIndex>,
    proactive: Vec<PageIndex>,
    out: BTreeMap<PageIndex, bool>,
    random: u64,
}

impl Model for ThreeQueues {
    fn arrived(&mut self, page: PageIndex, how: Arrival) {
        let mut promoted = how == Arrival::Buffer;
        if matches!(how, Arrival::Fault | Arrival::Store) {
            self.random ^= self.random << 13;
            self.random ^= self.random >> 7;
            self.random ^= self.random << 17;
            promoted = self.random.is_multiple_of(32);
        }
        if promoted { &mut self.proactive } else { &mut self.active }.push(page);
    }
    fn next(&mut self) -> Option<PageIndex> {
        let all = self.active.len() + self.proactive.len() + self.out.len();
        while self.proactive.len() * 2 > all {
            let demoted = self.proactive.remove(0);
            self.active.push(demoted);
        }
        let from_active = !self.active.is_empty();
        let page = take_first(if from_active { &mut self.active } else { &mut self.proactive })?;
        self.out.insert(page, from_active);
        Some(page)
    }
    fn gone(&mut self, page: PageIndex) {
        drop_from(&mut self.active, page);
        drop_from(&mut self.proactive, page);
        self.out.remove(&page);
    }
    fn refused(&mut self, page: PageIndex, why: Refusal) {
        let from_active = self.out.remove(&page).expect("it was out");
        let to_active = from_active == (why == Refusal::Untried);
        put_back(if to_active { &mut self.active } else { &mut self.proactive }, page, why);
    }
}

/// S3-FIFO; of each page that is out: whether it was on trial.
#[derive(Default)]
struct Trial {
    small: Vec<PageIndex>,
    main: Vec<(PageIndex, bool)>,
    ghosts: Vec<PageIndex>,
    out: BTreeMap<PageIndex, bool>,
}

impl Model for Trial {
    fn arrived(&mut self, page: PageIndex, how: Arrival) {
        let was_ghost = drop_from(&mut self.ghosts, page);
        if how == Arrival::Buffer {
            self.main.push((page, true));
        } else if how == Arrival::Store && was_ghost {
            self.main.push((page, false));
        } else {
            self.small.push(page);
        }
    }
    fn next(&mut self) -> Option<PageIndex> {
        let all = self.small.len() + self.main.len() + self.out.len();
        let on_trial = self.small.len() * 10 > all || self.main.is_empty();
        let page = if on_trial {
            take_first(&mut self.small)?
        } else {
            while self.main[0].1 {
                let (again, _) = self.main.remove(0);
                self.main.push((again, false));
            }
            self.main.remove(0).0
        };
        self.out.insert(page, on_trial);
        Some(page)
    }
    fn captured(&mut self, page: PageIndex) {
        if self.out.get(&page) == Some(&true) {
            self.ghosts.push(page);
        }
        self.out.remove(&page);
        while self.ghosts.len() > self.small.len() + self.main.len() {
            self.ghosts.remove(0);
        }
    }
    fn gone(&mut self, page: PageIndex) {
        drop_from(&mut self.small, page);
        drop_from(&mut self.ghosts, page);
        self.main.retain(|(other, _)| *other != page);
        self.out.remove(&page);
    }
    fn refused(&mut self, page: PageIndex, why: Refusal) {
        let on_trial = self.out.remove(&page).expect("it was out");
        match (on_trial, why) {
            (true, Refusal::Stuck) => self.main.push((page, false)),
            (false, Refusal::Untried) => self.main.insert(0, (page, false)),
            _ => put_back(&mut self.small, page, why),
        }
    }
}

/// SIEVE: the hand is the number of pages behind it; none when it begins anew.
#[derive(Default)]
struct Hand {
    queue: Vec<(PageIndex, bool)>,
    hand: Option<usize>,
}

impl Hand {
    /// At the end the hand begins anew, whatever comes there later.
    fn move_to(&mut self, hand: usize) {
        self.hand = (hand < self.queue.len()).then_some(hand);
    }

    fn put_behind_hand(&mut self, page: PageIndex, mark: bool) {
        match self.hand {
            Some(hand) => {
                self.queue.insert(hand, (page, mark));
                self.move_to(hand + 1);
            }
            None => self.queue.push((page, mark)),
        }
    }
}

impl Model for Hand {
    fn arrived(&mut self, page: PageIndex, how: Arrival) {
        if how == Arrival::Buffer {
            self.put_behind_hand(page, true);
        } else {
            self.queue.push((page, false));
        }
    }
    fn next(&mut self) -> Option<PageIndex> {
        while !self.queue.is_empty() {
            let at = self.hand.unwrap_or(0);
            if !self.queue[at].1 {
                let (page, _) = self.queue.remove(at);
                self.move_to(at);
                return Some(page);
            }
            self.queue[at].1 = false;
            self.move_to(at + 1);
        }
        None
    }
    fn gone(&mut self, page: PageIndex) {
        if let Some(at) = self.queue.iter().position(|(other, _)| *other == page) {
            self.queue.remove(at);
            if let Some(hand) = self.hand {
                self.move_to(hand - usize::from(at < hand));
            }
        }
    }
    fn refused(&mut self, page: PageIndex, why: Refusal) {
        self.put_behind_hand(page, false);
        if why == Refusal::Untried {
            self.hand = Some(self.hand.unwrap_or(self.queue.len()) - 1);
        }
    }
}

fn model(kind: Kind) -> Box<dyn Model> {
    match kind {
        Kind::Fifo | Kind::Lru => Box::new(Arrivals { queue: Vec::new(), believes: kind == Kind::Lru }),
        Kind::Lru3 => Box::new(ThreeQueues {
            active: Vec::new(),
            proactive: Vec::new(),
            out: BTreeMap::new(),
            random: 0x9E37_79B9_7F4A_7C15,
        }),
        Kind::S3Fifo => Box::<Trial>::default(),
        Kind::Sieve => Box::<Hand>::default(),
        Kind::Rr | Kind::Clock | Kind::Nru => unreachable!("sweeps have a model of their own"),
    }
}

/// Where the events have taken each page.
#[derive(Default)]
struct Places {
    nowhere: Vec<PageIndex>,
    mapped: Vec<PageIndex>,
    out: Vec<PageIndex>,
    buffered: Vec<PageIndex>,
    stored: Vec<PageIndex>,
}

struct Pair {
    policy: Box<dyn Policy>,
    model: Box<dyn Model>,
    places: Places,
    table: Table,
    chance: Chance,
}

impl Pair {
    fn arrive(&mut self, page: Option<PageIndex>, how: Arrival) {
        let Some(page) = page else { return };
        let places = &mut self.places;
        for queue in [&mut places.nowhere, &mut places.buffered, &mut places.stored] {
            drop_from(queue, page);
        }
        places.mapped.push(page);
        self.policy.arrived(page, how);
        self.model.arrived(page, how);
    }

    fn choose(&mut self) {
        let none_left = self.places.mapped.is_empty();
        let chosen = self.policy.next(&mut Pages::new(&mut self.table, &mut |_| None));
        assert_eq!(chosen, self.model.next());
        if let Some(page) = chosen {
            assert!(drop_from(&mut self.places.mapped, page), "{page:?} is given twice, or is not there");
            self.places.out.push(page);
        }
        assert_eq!(chosen.is_none(), none_left, "every page that is there leaves in the end");
    }

    fn capture(&mut self, page: PageIndex) {
        drop_from(&mut self.places.out, page);
        self.places.buffered.push(page);
        self.policy.captured(page);
        self.model.captured(page);
    }

    fn refuse(&mut self, page: PageIndex, why: Refusal) {
        drop_from(&mut self.places.out, page);
        self.places.mapped.push(page);
        self.policy.refused(page, why);
        self.model.refused(page, why);
    }

    fn recall(&mut self) {
        self.policy.recall();
        while let Some(page) = self.places.out.pop() {
            self.places.mapped.push(page);
            self.model.refused(page, Refusal::Untried);
        }
    }

    fn end(&mut self, page: PageIndex) {
        let places = &mut self.places;
        for queue in [&mut places.mapped, &mut places.out, &mut places.buffered, &mut places.stored] {
            drop_from(queue, page);
        }
        places.nowhere.push(page);
        self.policy.gone(page);
        self.model.gone(page);
    }

    fn step(&mut self) {
        let chance = &mut self.chance;
        let places = &mut self.places;
        match chance.below(100) {
            0..20 => {
                let how = [Arrival::Fault, Arrival::Ahead, Arrival::Found][chance.below(3)];
                let page = chance.pick(&places.nowhere);
                self.arrive(page, how);
            }
            20..32 => {
                let page = chance.pick(&places.buffered);
                self.arrive(page, Arrival::Buffer);
            }
            32..46 => {
                let how = [Arrival::Store, Arrival::Store, Arrival::Ahead][chance.below(3)];
                let page = chance.pick(&places.stored);
                self.arrive(page, how);
            }
            46..56 => {
                if let Some(page) = chance.pick(&places.buffered) {
                    drop_from(&mut places.buffered, page);
                    places.stored.push(page);
                }
            }
            56..76 => self.choose(),
            76..93 => {
                if let Some(page) = chance.pick(&places.out) {
                    match chance.below(6) {
                        0 => self.refuse(page, Refusal::Stuck),
                        1 => self.refuse(page, Refusal::Untried),
                        _ => self.capture(page),
                    }
                }
            }
            93..94 => self.recall(),
            _ => {
                let all: Vec<_> = [&places.mapped, &places.out, &places.buffered, &places.stored]
                    .into_iter()
                    .flatten()
                    .copied()
                    .collect();
                if let Some(page) = chance.pick(&all) {
                    self.end(page);
                }
            }
        }
    }
}

fn behaves_as_its_model(kind: Kind) {
    for seed in 1..5 {
        let places = Places { nowhere: (0..PAGES).map(page).collect(), ..Places::default() };
        let (policy, model) = (kind.policy(), model(kind));
        let mut pair = Pair { policy, model, places, table: Table::default(), chance: Chance(seed) };
        for _ in 0..STEPS {
            pair.step();
        }
        // All that is there leaves, each page once.
        pair.recall();
        while !pair.places.mapped.is_empty() {
            pair.choose();
        }
        // And nothing is kept of what is gone.
        (0..PAGES).for_each(|number| pair.end(page(number)));
        let queues = pair.policy.queues_mut().expect("an order");
        assert_eq!((queues.out(), queues.pages()), (0, 0));
    }
}

#[test]
fn fifo_behaves_as_its_model() {
    behaves_as_its_model(Kind::Fifo);
}

#[test]
fn lru_behaves_as_its_model() {
    behaves_as_its_model(Kind::Lru);
}

#[test]
fn lru3_behaves_as_its_model() {
    behaves_as_its_model(Kind::Lru3);
}

#[test]
fn s3fifo_behaves_as_its_model() {
    behaves_as_its_model(Kind::S3Fifo);
}

#[test]
fn sieve_behaves_as_its_model() {
    behaves_as_its_model(Kind::Sieve);
}

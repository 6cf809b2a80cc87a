//! Sweeps, against a model that goes over every place of the table, one by one.

use super::{Chance, page};
use crate::page::{BufferIndex, State, Step};
use crate::policy::{Kind, Pages, Policy};
use crate::table::{CHUNK_PAGES, Table};
use crate::touches::Touches;
use crate::units::PageIndex;

/// Pages that there are: in three chunks, with gaps.
const PAGES: usize = 40;
const CHUNKS: usize = 3;
const STEPS: usize = 5_000;

/// A place of the table.
#[derive(Clone, Copy, Default)]
struct Place {
    is_there: bool,
    is_ahead: bool,
    came_back: bool,
    would_not_move: bool,
    touched: bool,
}

/// What a sweep should do.
struct Model {
    places: Vec<Place>,
    /// The chunk that the hand is in, and where.
    hand: (usize, usize),
    /// It gives a second chance to what came back.
    believes: bool,
    /// It sees what was touched, when it comes to a chunk.
    sees: bool,
}

impl Model {
    fn next(&mut self) -> Option<PageIndex> {
        let (chunk, within) = self.hand;
        // Two turns, from the hand to where a chunk ends.
        for at in chunk * CHUNK_PAGES + within..(chunk + 2 * CHUNKS) * CHUNK_PAGES {
            let chunk = at / CHUNK_PAGES % CHUNKS;
            if self.sees && at % CHUNK_PAGES == 0 {
                self.look(chunk);
            }
            let number = chunk * CHUNK_PAGES + at % CHUNK_PAGES;
            let place = &mut self.places[number];
            if place.is_there && !take_chance(place, self.believes) {
                self.hand = (chunk, at % CHUNK_PAGES + 1);
                return Some(PageIndex(number as u64));
            }
        }
        self.hand = (chunk, 0);
        None
    }

    fn look(&mut self, chunk: usize) {
        let places = &mut self.places[chunk * CHUNK_PAGES..][..CHUNK_PAGES];
        if places.iter().any(|place| place.is_there) {
            for place in places {
                let touched = std::mem::take(&mut place.touched);
                place.came_back |= touched && place.is_there && !place.is_ahead;
            }
        }
    }
}

fn take_chance(place: &mut Place, believes: bool) -> bool {
    let back = std::mem::take(&mut place.came_back);
    std::mem::take(&mut place.would_not_move) || (believes && back)
}

struct Pair {
    policy: Box<dyn Policy>,
    model: Model,
    table: Table,
    /// What page tables would say.
    touched: Vec<bool>,
    chance: Chance,
}

impl Pair {
    fn new(kind: Kind, sees: bool, seed: u64) -> Self {
        let none = vec![Place::default(); CHUNKS * CHUNK_PAGES];
        let model = Model { places: none, hand: (0, 0), believes: kind != Kind::Rr, sees };
        let touched = vec![false; CHUNKS * CHUNK_PAGES];
        let mut pair = Self { policy: kind.policy(), model, table: Table::default(), touched, chance: Chance(seed) };
        for nth in 0..PAGES {
            let is_ahead = pair.chance.below(3) == 0;
            pair.table.update(at(nth), |entry| {
                entry.step(Step::Fill).expect("it was untouched");
                if is_ahead { entry.set_ahead() } else { entry.set_asked() }
            });
            *pair.place(nth) = Place { is_there: true, is_ahead, ..Place::default() };
        }
        pair
    }

    fn place(&mut self, nth: usize) -> &mut Place {
        &mut self.model.places[number(at(nth))]
    }

    fn choose(&mut self) {
        let (touched, sees) = (&mut self.touched, self.model.sees);
        let mut look = |page: PageIndex| {
            let first = number(page) / CHUNK_PAGES * CHUNK_PAGES;
            let mut touches = Touches::default();
            for within in 0..CHUNK_PAGES {
                touches[within / 64] |= u64::from(std::mem::take(&mut touched[first + within])) << (within % 64);
            }
            sees.then_some(touches)
        };
        let chosen = self.policy.next(&mut Pages::new(&mut self.table, &mut look));
        assert_eq!(chosen, self.model.next());
        match (chosen, self.chance.below(8)) {
            (None, _) => {}
            (Some(_), 0) => {
                self.policy.step_back();
                self.model.hand.1 -= 1;
            }
            (Some(_), 1) => {
                let pages = self.chance.below(CHUNK_PAGES);
                self.policy.pass_over(pages as u64);
                self.model.hand.1 = (self.model.hand.1 + pages).min(CHUNK_PAGES);
            }
            (Some(_), 2) => {}
            (Some(page), _) => {
                self.table.update(page, |entry| entry.step(Step::Capture(BufferIndex(0)))).expect("it was there");
                let place = &mut self.model.places[number(page)];
                *place = Place { is_ahead: place.is_ahead, touched: place.touched, ..Place::default() };
            }
        }
    }

    fn step(&mut self) {
        let nth = self.chance.below(PAGES);
        let state = self.table.get(at(nth)).state();
        match (self.chance.below(8), state) {
            (0, State::Mapped) => {
                self.table.update(at(nth), crate::page::Entry::set_stuck);
                self.place(nth).would_not_move = true;
            }
            (1..4, State::Inactive) => {
                self.table.update(at(nth), |entry| {
                    entry.step(Step::Refault).expect("it is in a buffer");
                    entry.set_referenced();
                });
                let place = self.place(nth);
                (place.is_there, place.came_back) = (true, true);
            }
            (1..4, State::Mapped) => {
                self.touched[number(at(nth))] = true;
                self.place(nth).touched = true;
            }
            _ => self.choose(),
        }
    }
}

fn at(nth: usize) -> PageIndex {
    page(nth as u64)
}

fn number(page: PageIndex) -> usize {
    usize::try_from(page.0).expect("small")
}

fn behaves_as_its_model(kind: Kind, sees: bool) {
    for seed in 1..5 {
        let mut pair = Pair::new(kind, sees, seed);
        assert_eq!(pair.table.chunk_slots(), CHUNKS);
        (0..STEPS).for_each(|_| pair.step());
    }
}

#[test]
fn rr_behaves_as_its_model() {
    behaves_as_its_model(Kind::Rr, false);
}

#[test]
fn clock_behaves_as_its_model() {
    behaves_as_its_model(Kind::Clock, false);
}

#[test]
fn nru_behaves_as_its_model() {
    behaves_as_its_model(Kind::Nru, true);
}

#[test]
fn nru_that_sees_nothing_is_clock() {
    behaves_as_its_model(Kind::Nru, false);
}

//! The page table against a map.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use spillway_core::PageIndex;
use spillway_core::page::{BufferIndex, Entry, HandleBits, State, Step};
use spillway_core::table::{CHUNK_PAGES, Hand, Table};

/// What is done to a page; steps that have no meaning in its state change nothing.
#[derive(Clone, Copy, Debug)]
enum Change {
    Step(Step),
    Referenced,
    Stuck,
}

fn page() -> impl Strategy<Value = u64> {
    // Near the ends of chunks, in chunks side by side and far apart.
    let chunk = CHUNK_PAGES as u64;
    (
        prop_oneof![Just(0), Just(chunk), Just(2 * chunk), Just(9 * chunk), Just(1 << 24), Just(1 << 40)],
        0..6_u64,
        any::<bool>(),
    )
        .prop_map(move |(base, within, end)| base + if end { chunk - 1 - within } else { within })
}

fn change() -> impl Strategy<Value = Change> {
    let handle = HandleBits::new(7).expect("not zero");
    prop_oneof![
        8 => Just(Change::Step(Step::Fill)),
        2 => Just(Change::Step(Step::Find)),
        4 => (0..100_u32).prop_map(|at| Change::Step(Step::Capture(BufferIndex(at)))),
        2 => Just(Change::Step(Step::ReadZero)),
        2 => Just(Change::Step(Step::Write)),
        2 => Just(Change::Step(Step::Written(handle))),
        1 => Just(Change::Step(Step::Fetch)),
        1 => Just(Change::Step(Step::Lose)),
        2 => Just(Change::Step(Step::Remove)),
        2 => Just(Change::Step(Step::RemoveDone)),
        2 => Just(Change::Referenced),
        2 => Just(Change::Stuck),
    ]
}

/// What the table must say.
#[derive(Default)]
struct Model(BTreeMap<u64, Entry>);

impl Model {
    fn get(&self, page: u64) -> Entry {
        self.0.get(&page).copied().unwrap_or(Entry::UNTOUCHED)
    }

    fn used(&self) -> Vec<(u64, Entry)> {
        self.0
            .iter()
            .filter(|(_, entry)| entry.state() != State::Untouched)
            .map(|(&page, &entry)| (page, entry))
            .collect()
    }

    fn pages(&self, test: impl Fn(Entry) -> bool) -> BTreeSet<u64> {
        self.0.iter().filter(|(_, entry)| test(**entry)).map(|(&page, _)| page).collect()
    }
}

/// Whether it is passed over once more by a sweep.
fn has_chance(mut entry: Entry) -> bool {
    entry.take_chance(true)
}

fn apply(table: &mut Table, model: &mut Model, page: u64, change: Change) {
    let act = |entry: &mut Entry| match change {
        Change::Step(step) => entry.step(step).is_ok(),
        // Only pages that are there are marked.
        _ if entry.state() != State::Mapped => false,
        Change::Referenced => {
            entry.set_referenced();
            true
        }
        Change::Stuck => {
            entry.set_stuck();
            true
        }
    };
    let mut expected = model.get(page);
    let done = act(&mut expected);
    model.0.insert(page, expected);
    assert_eq!(table.update(PageIndex(page), act), done);
}

/// One turn of a sweep.
fn turn(table: &mut Table, hand: &mut Hand) -> Vec<u64> {
    let mut chunks = table.chunk_slots();
    std::iter::from_fn(|| table.sweep(hand, &mut chunks, true, None)).map(|page| page.0).collect()
}

proptest! {
    // The smallest input that fails is printed; nothing is written beside the sources.
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_table_says_what_a_map_says(changes in prop::collection::vec((page(), change()), 1..200), from in page(), pages in 0..3000_u64) {
        let (mut table, mut model) = (Table::default(), Model::default());
        for (page, change) in changes {
            apply(&mut table, &mut model, page, change);
            prop_assert_eq!(table.get(PageIndex(page)), model.get(page));
        }
        let used = model.used();
        prop_assert_eq!(table.used(), used.len() as u64);
        prop_assert_eq!(table.mapped(), used.iter().filter(|(_, entry)| entry.state() == State::Mapped).count() as u64);
        for (from, pages) in [(from, pages), (0, 1 << 41), (from, 1), (from, 0)] {
            let mut seen = Vec::new();
            table.used_in(PageIndex(from), pages, |page, entry| seen.push((page.0, entry)));
            let expected: Vec<_> = used.iter().copied().filter(|(page, _)| (from..from + pages).contains(page)).collect();
            prop_assert_eq!(seen, expected);
        }
    }

    #[test]
    fn a_sweep_meets_each_candidate_once_a_turn(changes in prop::collection::vec((page(), change()), 1..200)) {
        let (mut table, mut model) = (Table::default(), Model::default());
        changes.into_iter().for_each(|(page, change)| apply(&mut table, &mut model, page, change));
        let mut hand = Hand::default();
        let first = turn(&mut table, &mut hand);
        prop_assert_eq!(first.iter().copied().collect::<BTreeSet<_>>(), model.pages(|it| it.is_candidate() && !has_chance(it)));
        let second = turn(&mut table, &mut hand);
        prop_assert_eq!(second.iter().copied().collect::<BTreeSet<_>>(), model.pages(Entry::is_candidate));
        prop_assert_eq!(second.len(), model.pages(Entry::is_candidate).len(), "none twice");
    }

    #[test]
    fn a_sweep_that_stepped_back_meets_the_page_again(changes in prop::collection::vec((page(), change()), 1..100)) {
        let (mut table, mut model) = (Table::default(), Model::default());
        changes.into_iter().for_each(|(page, change)| apply(&mut table, &mut model, page, change));
        let (mut hand, mut chunks) = (Hand::default(), 2 * table.chunk_slots());
        while let Some(page) = table.sweep(&mut hand, &mut chunks, true, None) {
            hand.step_back();
            prop_assert_eq!(table.sweep(&mut hand, &mut chunks, true, None), Some(page));
        }
    }

    #[test]
    fn all_that_is_outside_is_met(changes in prop::collection::vec((page(), change()), 1..200)) {
        let (mut table, mut model) = (Table::default(), Model::default());
        changes.into_iter().for_each(|(page, change)| apply(&mut table, &mut model, page, change));
        let mut hand = Hand::default();
        let seen: Vec<_> = std::iter::from_fn(|| table.next_outside(&mut hand)).map(|page| page.0).collect();
        let home = |it: Entry| matches!(it.state(), State::Untouched | State::Mapped | State::Lost);
        prop_assert_eq!(seen.iter().copied().collect::<BTreeSet<_>>(), model.pages(|it| !home(it)));
        prop_assert_eq!(seen.len(), model.pages(|it| !home(it)).len(), "none twice");
        prop_assert!(hand.is_start());
    }

    #[test]
    fn pages_given_up_leave_nothing_behind(pages in prop::collection::vec(page(), 1..200)) {
        let mut table = Table::default();
        for &page in &pages {
            table.update(PageIndex(page), |entry| entry.step(Step::Fill)).expect("legal");
        }
        let most = table.chunk_slots();
        // What changes nothing makes nothing.
        for page in 0..100 {
            let _ = table.update(PageIndex(page << 30), |entry| entry.step(Step::Fetch).is_ok());
        }
        prop_assert!(table.chunk_slots() <= most + 1);
        for &page in &pages {
            let _ = table.update(PageIndex(page), |entry| entry.step(Step::Capture(BufferIndex(0))));
            let _ = table.update(PageIndex(page), |entry| entry.step(Step::ReadZero));
        }
        prop_assert_eq!((table.used(), table.mapped()), (0, 0));
        // Chunks are made again in the same places.
        for &page in &pages {
            table.update(PageIndex(page), |entry| entry.step(Step::Fill)).expect("legal");
        }
        prop_assert!(table.chunk_slots() <= most + 1);
    }
}

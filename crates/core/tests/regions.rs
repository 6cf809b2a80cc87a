//! Regions against a map from each page of address space to the page that it names.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use spillway_core::regions::Regions;
use spillway_core::table::CHUNK_PAGES;
use spillway_core::{Address, PageIndex, Span, TargetId};

#[derive(Clone, Copy, Debug)]
enum Change {
    Add(Span),
    Remove(Span),
    /// To there, unless that is where it is.
    Relocate(Span, u64),
}

const PAGES: u64 = 60;

fn span() -> impl Strategy<Value = Span> {
    (0..PAGES, 1..20_u64).prop_map(|(start, pages)| pages_from(start, pages))
}

fn change() -> impl Strategy<Value = (TargetId, Change)> {
    let change = prop_oneof![
        3 => span().prop_map(Change::Add),
        2 => span().prop_map(Change::Remove),
        3 => (span(), 0..PAGES).prop_map(|(from, to)| Change::Relocate(from, to)),
    ];
    (prop_oneof![Just(TargetId(0)), Just(TargetId(3))], change)
}

fn address(page: u64) -> Address {
    Address(0).plus_pages(page)
}

fn pages_from(start: u64, pages: u64) -> Span {
    Span::of_pages(address(start), pages)
}

fn numbers(span: Span) -> std::ops::Range<u64> {
    span.start.pages_since(Address(0))..span.end.pages_since(Address(0))
}

/// Which page each page of address space names.
#[derive(Default)]
struct Model {
    names: BTreeMap<(TargetId, u64), PageIndex>,
    given: BTreeSet<PageIndex>,
}

impl Model {
    fn apply(&mut self, regions: &mut Regions, target: TargetId, change: Change) -> Result<(), TestCaseError> {
        match change {
            Change::Add(span) => {
                let added = regions.add(target, span);
                let new: Vec<u64> = numbers(span).filter(|&at| !self.names.contains_key(&(target, at))).collect();
                prop_assert_eq!(added.iter().flat_map(|region| numbers(region.span)).collect::<Vec<_>>(), new);
                for region in added {
                    for (n, at) in numbers(region.span).enumerate() {
                        let page = region.first.plus(n as u64);
                        prop_assert!(self.given.insert(page), "{:?} was given before", page);
                        self.names.insert((target, at), page);
                    }
                }
            }
            Change::Remove(span) => {
                let parts = regions.remove(target, span);
                for region in &parts {
                    for (n, at) in numbers(region.span).enumerate() {
                        prop_assert_eq!(self.names.remove(&(target, at)), Some(region.first.plus(n as u64)));
                    }
                }
                prop_assert!(numbers(span).all(|at| !self.names.contains_key(&(target, at))));
            }
            Change::Relocate(span, to) => {
                let there = pages_from(to, span.pages());
                if there.intersect(span).is_some() {
                    return Ok(());
                }
                self.apply(regions, target, Change::Remove(there))?;
                regions.relocate(target, span, there.start);
                for (from, to) in numbers(span).zip(numbers(there)) {
                    if let Some(page) = self.names.remove(&(target, from)) {
                        self.names.insert((target, to), page);
                    }
                }
            }
        }
        Ok(())
    }

    fn check(&self, regions: &Regions) -> Result<(), TestCaseError> {
        for target in [TargetId(0), TargetId(3)] {
            for at in 0..PAGES + 40 {
                let region = regions.at(target, address(at));
                let expected = self.names.get(&(target, at)).copied();
                prop_assert_eq!(region.map(|region| region.page_at(address(at))), expected, "{:?} {}", target, at);
            }
        }
        let homes: BTreeMap<_, _> =
            self.names.iter().map(|(&(target, at), &page)| (page, (target, address(at)))).collect();
        for &page in &self.given {
            prop_assert_eq!(regions.address_of(page), homes.get(&page).copied());
        }
        Ok(())
    }
}

proptest! {
    // The smallest input that fails is printed; nothing is written beside the sources.
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn regions_say_what_a_map_says(changes in prop::collection::vec(change(), 1..40), asked in span()) {
        let (mut regions, mut model) = (Regions::default(), Model::default());
        for (target, change) in changes {
            model.apply(&mut regions, target, change)?;
            model.check(&regions)?;
        }
        for target in [TargetId(0), TargetId(3)] {
            let within: Vec<_> = regions.within(target, asked).iter().flat_map(|region| numbers(region.span)).collect();
            let expected: Vec<_> = numbers(asked).filter(|&at| model.names.contains_key(&(target, at))).collect();
            prop_assert_eq!(within, expected);
            let of: Vec<_> = regions.of(target).flat_map(|region| numbers(region.span)).collect();
            let expected: Vec<_> = model.names.keys().filter(|(whose, _)| *whose == target).map(|(_, at)| *at).collect();
            prop_assert_eq!(of, expected);
        }
    }

    #[test]
    fn large_regions_lie_in_chunks_as_they_lie_in_memory(small in 1..40_u64, start in 0..5000_u64, pages in 512..3000_u64) {
        let mut regions = Regions::default();
        regions.add(TargetId(0), pages_from(1 << 30, small));
        let region = regions.add(TargetId(0), pages_from(start, pages))[0];
        let chunk = CHUNK_PAGES as u64;
        prop_assert_eq!(region.first.0 % chunk, start % chunk);
    }
}

//! Stripes over servers that do everything that servers do, from one seed: the same seed repeats the run.
//! `SPILLWAY_STRIPES_SEEDS=0..1000` tries others.

mod model;
mod servers;

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

use model::{Model, Seen, Setting, Weather};

use super::{Mutation, Shape};

const SHAPES: [(usize, usize, usize); 6] = [(2, 1, 3), (4, 1, 5), (4, 1, 7), (1, 1, 2), (2, 2, 5), (4, 2, 6)];

fn setting(seed: u64, weather: Weather) -> Setting {
    let (data, parity, servers) = SHAPES[usize::try_from(seed).unwrap() % SHAPES.len()];
    Setting { shape: Shape { data, parity }, servers, entries: 48, steps: 1500, weather, mutation: None }
}

fn seeds(default: Range<u64>) -> Range<u64> {
    let Ok(text) = std::env::var("SPILLWAY_STRIPES_SEEDS") else { return default };
    let (from, to) = text.split_once("..").expect("seeds are given as FROM..TO");
    from.parse().expect("a number")..to.parse().expect("a number")
}

fn run(setting: Setting, seed: u64) -> Result<Seen, String> {
    let run = || {
        let mut model = Model::new(setting, seed);
        model.run();
        let counts = model.stripes.core.counts;
        Seen { moved: counts.moved_pages, rebuilt: counts.rebuilt_chunks, hedged: counts.hedged, ..model.seen }
    };
    catch_unwind(AssertUnwindSafe(run)).map_err(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        text.or(panic.downcast_ref::<&str>().map(ToString::to_string)).unwrap_or_default()
    })
}

fn try_all(weather: Weather, seeds: Range<u64>) -> Seen {
    let mut all = Seen::default();
    for seed in seeds {
        let setting = setting(seed, weather);
        let seen = run(setting, seed).unwrap_or_else(|text| panic!("seed {seed}, {setting:?}: {text}"));
        all.got += seen.got;
        all.lost += seen.lost;
        all.declined += seen.declined;
        all.faults += seen.faults;
        all.moved += seen.moved;
        all.rebuilt += seen.rebuilt;
        all.hedged += seen.hedged;
    }
    all
}

#[test]
fn no_page_is_lost_while_losses_are_survivable() {
    let seen = try_all(Weather::Survivable, seeds(0..60));
    assert!(seen.moved > 100 && seen.rebuilt > 100 && seen.hedged > 100, "{seen:?}");
    assert!(seen.got > 5000 && seen.faults > 100 && seen.lost == 0, "{seen:?}");
}

#[test]
fn no_byte_is_wrong_and_no_get_hangs_whatever_happens() {
    let seen = try_all(Weather::Wild, seeds(0..60));
    assert!(seen.got > 5000 && seen.faults > 500 && seen.lost > 0, "{seen:?}");
}

#[test]
fn mistakes_are_told_from_the_right_one() {
    let mutations = [
        Mutation::AckEarly,
        Mutation::ShareMember,
        Mutation::LeakChunks,
        Mutation::ForgetMove,
        Mutation::StaleParity,
        Mutation::IgnoreFailure,
        Mutation::NeverRebuild,
    ];
    for mutation in mutations {
        let is_caught = |seed| {
            let setting = Setting { mutation: Some(mutation), ..setting(seed, Weather::Survivable) };
            run(setting, seed).is_err()
        };
        let caught = (0..200).find(|seed| is_caught(*seed));
        println!("{mutation:?}: {caught:?}");
        assert!(caught.is_some(), "{mutation:?} is not noticed");
    }
}

#[test]
fn a_seed_repeats_its_run() {
    let once = |seed| {
        let mut model = Model::new(setting(seed, Weather::Wild), seed);
        model.run();
        (model.seen.got, model.seen.lost, model.seen.declined, model.stripes.core.counts)
    };
    assert_eq!(once(4), once(4));
    assert_ne!(once(4), once(10));
}

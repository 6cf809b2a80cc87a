//! The standard runs. `SPILLWAY_SIM_SEED=n cargo test -p spillway-sim --test seeds` runs that one seed.

use spillway_sim::{DEATHS, DEATHS_AFAR, run_many};

const SEEDS: u64 = 3400;
const STEPS: u64 = 4000;

#[test]
fn no_guest_sees_what_it_must_not() {
    let one: Option<u64> = std::env::var("SPILLWAY_SIM_SEED").ok().map(|seed| seed.parse().expect("a number"));
    let seeds = one.map_or(0..SEEDS, |seed| seed..seed + 1);
    let seen = run_many(seeds, STEPS, None).unwrap_or_else(|failure| panic!("{failure}"));
    if one.is_some() {
        return;
    }
    // Runs in which nothing happens prove nothing.
    let (events, counters, travels) = (seen.events, seen.counters, seen.travels);
    for (what, count, least) in [
        ("accesses", events.accesses, 200_000),
        ("faults", events.faults, 80_000),
        ("unmappings", events.unmaps, 5_000),
        ("moved mappings", events.moves, 3_000),
        ("removals", events.removals, 4_000),
        ("forks", events.forks, 250),
        ("pages lost", events.losses, 100),
        ("moves refused while mappings changed", events.moves_again, 1_000),
        ("moves refused for a pinned or shared page", events.moves_busy, 1_000),
        ("pages merged", events.merged, 10_000),
        ("moves refused for a mapping", events.moves_invalid, 500),
        ("pages from buffers", counters.refaults, 1_000),
        ("pages from the store", counters.fetched_pages, 10_000),
        ("pages that nobody had asked for", counters.prefetched_pages, 10_000),
        ("blocks stretched", counters.stretches, 3_000),
        ("blocks reduced", counters.reductions, 200),
        ("pages written", counters.written_pages, 10_000),
        ("pages that the store had still", counters.clean_drops, 1_000),
        ("pages of zeros", counters.zero_drops, 1_000),
        ("fetches from a store that answers later", travels.journeys, 10_000),
        ("fetches that came in part", travels.incomplete, 500),
        ("pages given up on their way", travels.called_off, 30),
        ("writes that failed in the end", travels.refused, 100),
        ("forks that waited for the store", travels.waits, 100),
        ("releases", seen.releases, 100),
    ] {
        assert!(count >= least, "{what}: only {count}");
    }
}

#[test]
fn a_seed_says_everything() {
    let plan = spillway_sim::Plan { seed: 7, steps: STEPS, mutation: None };
    assert_eq!(spillway_sim::run(plan).expect("a good run"), spillway_sim::run(plan).expect("the same run"));
}

#[test]
fn no_guest_sees_what_it_must_not_when_pagers_are_killed() {
    are_survived(DEATHS);
}

#[test]
fn no_guest_sees_what_it_must_not_when_pagers_are_killed_whose_stores_answer_later() {
    are_survived(DEATHS_AFAR);
}

/// What is pending when a pager is killed has not happened, as far as the next one can tell.
fn are_survived(first: u64) {
    let seen = run_many(first..first + SEEDS, STEPS, None).unwrap_or_else(|failure| panic!("{failure}"));
    let (events, counters) = (seen.events, seen.counters);
    for (what, count, least) in [
        ("pagers killed", seen.deaths, 2_000),
        ("captures that were under way then", seen.captures_taken_up, 200),
        ("accesses", events.accesses, 200_000),
        ("moved mappings", events.moves, 3_000),
        ("removals", events.removals, 4_000),
        ("pages from the store", counters.fetched_pages, 1_000),
    ] {
        assert!(count >= least, "{what}: only {count}");
    }
}

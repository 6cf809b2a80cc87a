//! Replays against what is known of the patterns, and against the optimum.

use proptest::prelude::*;
use spillway_study::optimal::optimum;
use spillway_study::record::Access;
use spillway_study::references::References;
use spillway_study::replay::{Block, Costs, Kind, Replayed, Scheme, Setting, replay};
use spillway_study::source::Step;

const COSTS: Costs = Costs { link_ns: 4_000, fault_ns: 5_000, capture_ns: 1_000 };

fn references(pages: impl IntoIterator<Item = u64>, write: bool, ran_ns: u64) -> References {
    let access = if write { Access::Write } else { Access::Read };
    let mut all = References::default();
    for page in pages {
        all.push(Step::Touch { page, access, served: None, ran_ns }).expect("room");
    }
    all
}

fn with(references: &References, local_pages: u64, scheme: Scheme, block: Block) -> Replayed {
    with_policy(references, local_pages, Kind::Clock, scheme, block)
}

fn with_policy(references: &References, local_pages: u64, policy: Kind, scheme: Scheme, block: Block) -> Replayed {
    replay(references, Setting { local_pages, policy, scheme, block, costs: COSTS })
}

fn random(seed: u64) -> impl Iterator<Item = u64> {
    let mut x = seed | 1;
    std::iter::repeat_with(move || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x >> 20
    })
}

#[test]
fn what_fits_is_touched_once_and_never_misses() {
    let all = references((1000..1500).cycle().take(5000), true, 100);
    for scheme in [Scheme::OnDemand, Scheme::PreEvict] {
        let done = with(&all, 700, scheme, Block::K4);
        assert_eq!((done.first.faults, done.missed.faults, done.evicted_pages), (500, 0, 0), "{scheme:?}");
        assert_eq!(done.first.total_ns(), 500 * COSTS.fault_ns);
        // Blocks double up to 16 pages.
        assert!((500 / 16..=4 + 500 / 16).contains(&with(&all, 700, scheme, Block::Elastic).first.faults));
    }
}

#[test]
fn a_miss_costs_the_fault_the_link_and_on_demand_its_eviction() {
    // Far apart, so that nothing waits for the fault before.
    let all = references(random(7).map(|x| x % 1000).take(20_000), false, 1_000_000);
    let demand = with(&all, 500, Scheme::OnDemand, Block::K4);
    let ahead = with(&all, 500, Scheme::PreEvict, Block::K4);
    let fetches = demand.missed.faults - demand.refaults;
    assert!(fetches > 5000, "{demand:?}");
    assert_eq!(demand.missed.rest_ns, demand.missed.faults * COSTS.fault_ns);
    assert!(demand.missed.eviction_ns > fetches * COSTS.capture_ns * 9 / 10, "{demand:?}");
    assert_eq!(ahead.missed.eviction_ns, 0, "{ahead:?}");
    assert_eq!(
        ahead.missed.link_ns,
        (ahead.missed.faults - ahead.refaults) * COSTS.link_ns,
        "clean pages leave for nothing"
    );
    assert!(demand.written_pages <= 1000, "what was not written to is written once: {demand:?}");
}

#[test]
fn without_time_between_faults_evictions_are_waited_for() {
    let all = references(random(9).map(|x| x % 2000).take(20_000), true, 0);
    let ahead = with(&all, 1000, Scheme::PreEvict, Block::K4);
    assert!(ahead.missed.eviction_ns > 0, "{ahead:?}");
    assert!(ahead.missed.link_ns > (ahead.missed.faults - ahead.refaults) * COSTS.link_ns, "writes are in the way");
}

/// Two hundred hot pages, and between any two of their touches one of a thousand others in turn.
fn hot_and_cold() -> impl Iterator<Item = u64> {
    (0..200_000).map(|i| if i % 2 == 0 { i / 2 % 200 } else { 1000 + i / 2 % 1000 })
}

#[test]
fn nru_spares_what_the_trace_says_is_touched() {
    let all = references(hot_and_cold(), false, 1000);
    let misses = |policy| with_policy(&all, 600, policy, Scheme::PreEvict, Block::K4).missed.faults;
    // The thousand in turn miss each time, but for their first touch. A clock takes the hot ones with the rest, as its hand
    // comes by; what is touched between two rounds is spared.
    let hot = |policy| misses(policy).checked_sub(99_000).expect("all that is cold");
    let (clock, nru) = (hot(Kind::Clock), hot(Kind::Nru));
    assert!(clock > 10_000 && nru < clock / 3, "{clock} against {nru}");
}

#[test]
fn a_batch_that_goes_all_the_way_round_takes_no_page_twice() {
    // What was touched in the chunk that the hand began in is seen when it comes there again.
    for seed in 1..40 {
        let all = references(random(seed).map(|x| x % 281).take(4000), true, 500);
        let done = with_policy(&all, 81, Kind::Nru, Scheme::PreEvict, Block::K4);
        assert!(done.evicted_pages > 0, "{done:?}");
    }
    let pick = |x: u64| (0..2).fold(281, |below: u64, i| (x >> (12 * i)) % below.max(1) + 1) - 1;
    let all = references(random(9_424_397_829_125_864_802).map(pick).take(4000), true, 500);
    assert!(with_policy(&all, 81, Kind::Nru, Scheme::PreEvict, Block::K4).evicted_pages > 0);
}

#[test]
fn what_was_given_back_was_not_used() {
    let mut all = references((0..400).collect::<Vec<_>>(), true, 1000);
    // Blocks come back for their first page, and the others are given back, and filled with zeros in line.
    for block in (0..64).step_by(16) {
        let touch = |page| Step::Touch { page, access: Access::Write, served: None, ran_ns: 1000 };
        all.push(touch(block)).expect("room");
        all.push(Step::Removed { page: block + 1, pages: 15 }).expect("room");
        (block + 1..block + 16).for_each(|page| all.push(touch(page)).expect("room"));
    }
    let done = with(&all, 128, Scheme::PreEvict, Block::K64);
    assert!(done.prefetched_pages >= 4 * 7, "{done:?}");
    assert_eq!(done.prefetched_used_pages, 0, "{done:?}");
}

/// The share of pages that were used, of those that came unasked: by the trace, and as the pager sees it.
fn accuracies(of: &Replayed) -> (f64, f64) {
    let share = |used: u64, all: u64| used as f64 / all.max(1) as f64;
    assert!(of.prefetched_pages > 500 && of.sampled_pages > 500, "{of:?}");
    (share(of.prefetched_used_pages, of.prefetched_pages), share(of.sampled_used_pages, of.sampled_pages))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn nothing_beats_the_optimum_and_budgets_hold(
        seed in 1_u64.., pages in 100_u64..400, local in 64_u64..300, skew in 1_u64..4, demand: bool, block in 0..Block::ALL.len(),
        policy in 0..Kind::ALL.len(),
    ) {
        let pick = |x: u64| (0..skew).fold(pages, |below, i| (x >> (12 * i)) % below.max(1) + 1) - 1;
        let all = references(random(seed).map(pick).take(4000), true, 500);
        let scheme = if demand { Scheme::OnDemand } else { Scheme::PreEvict };
        let done = with_policy(&all, local, Kind::ALL[policy], scheme, Block::ALL[block]);
        let best = optimum(&all, local);
        prop_assert!(done.fetched_pages + done.refaults >= best.misses, "{done:?} against {best:?}");
        prop_assert!(done.local_peak_pages <= local, "{done:?}");
        prop_assert!(done.first.faults <= best.first_touches);
        prop_assert!(done.prefetched_used_pages <= done.prefetched_pages, "{done:?}");
        prop_assert!(done.sampled_pages <= done.prefetched_pages, "{done:?}");
        if all.peak_pages() + 2 * local.max(64) <= local {
            prop_assert_eq!(done.missed.faults, 0);
        }
    }

    #[test]
    fn nothing_is_known_of_pages_that_did_not_come(
        runs in prop::collection::vec((0..2000_u64, 1..60_u64, prop_oneof![4 => Just(1), 1 => 0..50_u64]), 20..200),
        local in 64_u64..800, policy in 0..Kind::ALL.len(), block in 0..Block::ALL.len(),
    ) {
        let pages = runs.iter().flat_map(|&(start, pages, step)| (0..pages).map(move |i| (start + i * step) % 2000));
        let all = references((0..2000).chain(pages), false, 500);
        let done = with_policy(&all, local, Kind::ALL[policy], Scheme::PreEvict, Block::ALL[block]);
        prop_assert!(done.sampled_pages <= done.prefetched_pages, "{done:?}");
        prop_assert!(done.sampled_used_pages <= done.sampled_pages, "{done:?}");
    }

    #[test]
    fn the_accuracy_that_is_seen_of_walks_is_that_of_the_trace(
        step in prop::sample::select(vec![1_i64, -1, 16, -16, 25, 40, -40]), local in 400_u64..4000, policy in 0..Kind::ALL.len(),
    ) {
        let place = |i: i64| (i * step + i * step.abs() / 8000).rem_euclid(8000).cast_unsigned();
        let walk = (0..20_000).map(place);
        let all = references((0..8000).chain(walk), false, 500);
        let (exact, seen) = accuracies(&with_policy(&all, local, Kind::ALL[policy], Scheme::PreEvict, Block::Elastic));
        prop_assert!((exact - seen).abs() < 0.15, "{exact} is seen as {seen}");
    }

    #[test]
    fn the_accuracy_that_is_seen_of_blocks_is_that_of_the_trace(
        seed in 1_u64.., used in 1..=4_u64, local in 200_u64..1200,
    ) {
        let things = random(seed).take(8000).flat_map(|x| (0..used).map(move |nth| x % 1000 * 4 + (x >> 20) % 4 / used + nth));
        let all = references((0..4000).chain(things), false, 500);
        let (exact, seen) = accuracies(&with(&all, local, Scheme::PreEvict, Block::K16));
        prop_assert!((exact - seen).abs() < 0.2, "{exact} is seen as {seen}");
    }
}

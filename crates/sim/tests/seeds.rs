//! The shipped core against a shadow memory, under any interleaving that a seed draws.

use spillway_sim::{Plan, run};

/// Seeds of one run of the tests; `SPILLWAY_SIM_SEED` replays one.
const SEEDS: u64 = 300;

#[test]
fn no_seed_finds_a_wrong_byte_a_leak_or_a_hang() {
    let only: Option<u64> = std::env::var("SPILLWAY_SIM_SEED").ok().and_then(|seed| seed.parse().ok());
    let seeds = only.map_or(0..SEEDS, |seed| seed..seed + 1);
    for seed in seeds {
        if let Err(failure) = run(Plan { seed, steps: 4000, mutation: None }) {
            panic!("{failure}");
        }
    }
}

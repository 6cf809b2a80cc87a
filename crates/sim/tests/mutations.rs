//! The simulator catches drivers that are known to be wrong: what it lets pass would prove nothing otherwise.

use spillway_sim::{Mutation, Plan, run};

/// Seeds within which each must be caught.
const SEEDS: u64 = 300;

/// Those that runs of this length reach. The others need rarer meetings, and longer runs of the `sim` program.
const WITHIN_REACH: [Mutation; 12] = [
    Mutation::ReadDuringCapture,
    Mutation::ServeBeforeChanges,
    Mutation::CaptureRemoving,
    Mutation::KeepReleased,
    Mutation::ForgetCleanCopy,
    Mutation::DropRetries,
    Mutation::IgnoreRemap,
    Mutation::IgnoreUnmap,
    Mutation::IgnoreRemove,
    Mutation::ShareNothing,
    Mutation::CopyNothing,
    Mutation::NoOverdraft,
];

#[test]
fn wrong_drivers_are_caught() {
    for mutation in WITHIN_REACH {
        let caught = (0..SEEDS).find_map(|seed| run(Plan { seed, steps: 4000, mutation: Some(mutation) }).err());
        let caught = caught.unwrap_or_else(|| panic!("{mutation:?} passed {SEEDS} seeds"));
        println!("{mutation:?}: seed {} step {}", caught.seed, caught.step);
    }
}

//! A simulation is worth what it catches: each driver that is known to be wrong must be told from the right one.

use spillway_sim::{DEATHS, Mutation, run_many};

const STEPS: u64 = 4000;
/// As many as the standard runs.
const SEEDS: u64 = 1000;

/// Where to look first for what shows only when three things come together, once in thousands of seeds. Whoever changes the
/// guests may have to look elsewhere: `sim --seeds 0..100000 --mutation NAME` tells.
fn first_seed(mutation: Mutation) -> u64 {
    match mutation {
        Mutation::TrustScan => RARE[0],
        Mutation::ForkWithoutBuffers | Mutation::IgnoreForkMarks => RARE[1],
        Mutation::WakeWhereAsked => RARE[2],
        Mutation::InstallDuringFork => RARE[3],
        Mutation::AnnounceKnownOnly => RARE[5],
        Mutation::TrustRemovalOver => RARE[6],
        Mutation::ForgetStaging | Mutation::ForgetEvents | Mutation::ForgetWake | Mutation::ReadTooEarly => DEATHS,
        Mutation::ForgetChildren => DEATHS,
        Mutation::ApplyTwice => DEATHS + RARE[4],
        _ => 0,
    }
}

const RARE: [u64; 7] = [700, 1500, 9000, 1000, 5950, 1000, 3000];

fn is_caught(mutation: Mutation) {
    let first = first_seed(mutation);
    let failure = run_many(first..first + SEEDS, STEPS, Some(mutation)).expect_err("wrong, and not caught");
    println!("{mutation:?}: seed {}, step {}: {}", failure.seed, failure.step, failure.message);
}

macro_rules! caught {
    ($($name:ident $mutation:ident)*) => {
        $(
            #[test]
            fn $name() {
                is_caught(Mutation::$mutation);
            }
        )*
        #[test]
        fn every_mutation_is_tried() {
            // One shows too seldom to be met by chance: `journeys.rs` has a test for it alone.
            let all = Mutation::ALL.into_iter().filter(|mutation| *mutation != Mutation::IgnoreHandle);
            assert_eq!(all.collect::<Vec<_>>(), [$(Mutation::$mutation),*]);
        }
    };
}

caught! {
    read_during_capture ReadDuringCapture
    serve_before_changes ServeBeforeChanges
    capture_removing CaptureRemoving
    trust_removal_over TrustRemovalOver
    announce_known_only AnnounceKnownOnly
    trust_scan TrustScan
    keep_released KeepReleased
    forget_clean_copy ForgetCleanCopy
    drop_retries DropRetries
    ignore_remap IgnoreRemap
    ignore_unmap IgnoreUnmap
    ignore_remove IgnoreRemove
    share_nothing ShareNothing
    copy_nothing CopyNothing
    no_overdraft NoOverdraft
    wait_for_agents WaitForAgents
    zeros_for_lost ZerosForLost
    ignore_fork_marks IgnoreForkMarks
    inherit_blindly InheritBlindly
    fork_without_buffers ForkWithoutBuffers
    scan_only_new ScanOnlyNew
    let_go_of_lost LetGoOfLost
    install_unasked InstallUnasked
    keep_freed KeepFreed
    forget_shared ForgetShared
    trust_put TrustPut
    drop_wake DropWake
    wake_only_who_asked WakeOnlyWhoAsked
    wake_where_asked WakeWhereAsked
    install_during_fork InstallDuringFork
    capture_unread CaptureUnread
    steal_unread StealUnread
    fork_unread ForkUnread
    trust_old_comparison TrustOldComparison
    forget_staging ForgetStaging
    forget_events ForgetEvents
    apply_twice ApplyTwice
    forget_wake ForgetWake
    read_too_early ReadTooEarly
    forget_children ForgetChildren
}

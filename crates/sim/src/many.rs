//! Many runs, one a seed.

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::{Failure, Mutation, Plan, Seen, run};

/// Runs of `seeds`, of `steps` steps each, on as many threads as there are CPUs; what they saw, all together.
///
/// # Errors
/// The first failure, in the order of time; the runs that were not begun by then are left out.
///
/// # Panics
/// When a thread does that is not inside a run.
pub fn run_many(seeds: Range<u64>, steps: u64, mutation: Option<Mutation>) -> Result<Seen, Box<Failure>> {
    let next = AtomicU64::new(seeds.start);
    let failed: Mutex<Option<Failure>> = Mutex::new(None);
    let seen: Mutex<Seen> = Mutex::new(Seen::default());
    let work = || {
        while failed.lock().expect("nobody panics with it").is_none() {
            let seed = next.fetch_add(1, Relaxed);
            if seed >= seeds.end {
                break;
            }
            match run(Plan { seed, steps, mutation }) {
                Ok(one) => seen.lock().expect("nobody panics with it").add(&one),
                Err(failure) => drop(failed.lock().expect("nobody panics with it").get_or_insert(failure)),
            }
        }
    };
    std::thread::scope(|scope| {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        (0..threads).for_each(|_| drop(scope.spawn(work)));
    });
    match failed.into_inner().expect("nobody panics with it") {
        Some(failure) => Err(Box::new(failure)),
        None => Ok(seen.into_inner().expect("nobody panics with it")),
    }
}

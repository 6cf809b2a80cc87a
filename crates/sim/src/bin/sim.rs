//! `sim --seeds A..B --steps N`: many runs, on as many threads as there are CPUs. Ends at the first that fails.
//! `--mutation NAME` runs a driver that is known to be wrong (`Mutation`), to see how soon that shows.
#![forbid(unsafe_code)]

use std::ops::Range;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use spillway_sim::{Failure, Mutation, Plan, run};

const USAGE: &str = "usage: sim [--seeds A..B] [--steps N] [--threads N] [--mutation NAME]";

struct Wish {
    seeds: Range<u64>,
    steps: u64,
    threads: usize,
    mutation: Option<Mutation>,
}

fn wish() -> Option<Wish> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut wish = Wish { seeds: 0..1000, steps: 4000, threads, mutation: None };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let value = words.next()?;
        match word.as_str() {
            "--seeds" => {
                let (first, end) = value.split_once("..")?;
                wish.seeds = first.parse().ok()?..end.parse().ok()?;
            }
            "--steps" => wish.steps = value.parse().ok()?,
            "--threads" => wish.threads = value.parse().ok()?,
            "--mutation" => {
                wish.mutation = Some(Mutation::ALL.into_iter().find(|mutation| format!("{mutation:?}") == value)?);
            }
            _ => return None,
        }
    }
    Some(wish)
}

fn main() -> ExitCode {
    let Some(Wish { seeds, steps, threads, mutation }) = wish() else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    let next = AtomicU64::new(seeds.start);
    let failed: Mutex<Option<Failure>> = Mutex::new(None);
    let lock = || failed.lock().expect("nobody panics while holding it");
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while lock().is_none() {
                    let seed = next.fetch_add(1, Relaxed);
                    if seed >= seeds.end {
                        break;
                    }
                    if let Err(failure) = run(Plan { seed, steps, mutation }) {
                        lock().get_or_insert(failure);
                    }
                }
            });
        }
    });
    match lock().take() {
        Some(failure) => {
            eprintln!("{failure}");
            ExitCode::FAILURE
        }
        None => {
            println!("{} seeds of {steps} steps: no failure", seeds.end - seeds.start);
            ExitCode::SUCCESS
        }
    }
}

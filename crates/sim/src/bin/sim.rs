//! `sim --seeds A..B --steps N`: many runs, on as many threads as there are CPUs. Ends at the first that fails.
//! `--mutation NAME` runs a driver that is known to be wrong (`Mutation`), to see how soon that shows.
#![forbid(unsafe_code)]

use std::ops::Range;
use std::process::ExitCode;

use spillway_sim::{Mutation, run_many};

const USAGE: &str = "usage: sim [--seeds A..B] [--steps N] [--mutation NAME]";

struct Wish {
    seeds: Range<u64>,
    steps: u64,
    mutation: Option<Mutation>,
}

fn wish() -> Option<Wish> {
    let mut wish = Wish { seeds: 0..1000, steps: 4000, mutation: None };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let value = words.next()?;
        match word.as_str() {
            "--seeds" => {
                let (first, end) = value.split_once("..")?;
                wish.seeds = first.parse().ok()?..end.parse().ok()?;
            }
            "--steps" => wish.steps = value.parse().ok()?,
            "--mutation" => {
                let named = |mutation: &Mutation| format!("{mutation:?}") == value;
                wish.mutation = Some(Mutation::ALL.into_iter().find(named)?);
            }
            _ => return None,
        }
    }
    Some(wish)
}

fn main() -> ExitCode {
    let Some(Wish { seeds, steps, mutation }) = wish() else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    match run_many(seeds.clone(), steps, mutation) {
        Ok(seen) => {
            println!("no failure in {} seeds of {steps} steps\n{seen:#?}", seeds.end - seeds.start);
            ExitCode::SUCCESS
        }
        Err(failure) => {
            eprintln!("{failure}");
            ExitCode::FAILURE
        }
    }
}

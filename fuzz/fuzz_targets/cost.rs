#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../checks/cost.rs"]
mod cost;

fuzz_target!(|text: &str| cost::check(text));

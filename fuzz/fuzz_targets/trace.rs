#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../checks/trace.rs"]
mod trace;

fuzz_target!(|bytes: &[u8]| trace::check(bytes));

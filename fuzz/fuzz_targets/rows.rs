#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../checks/rows.rs"]
mod rows;

fuzz_target!(|bytes: &[u8]| rows::check(bytes));

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../checks/estate.rs"]
mod estate;

fuzz_target!(|bytes: &[u8]| estate::check(bytes));

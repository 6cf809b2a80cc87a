#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../checks/handed.rs"]
mod handed;

fuzz_target!(|bytes: &[u8]| handed::check(bytes));

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../checks/lz4.rs"]
mod lz4;

fuzz_target!(|bytes: &[u8]| lz4::check(bytes));

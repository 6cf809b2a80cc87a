#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../checks/btf.rs"]
mod btf;

fuzz_target!(|bytes: &[u8]| btf::check(bytes));

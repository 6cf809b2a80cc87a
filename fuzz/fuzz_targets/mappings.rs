#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../checks/mappings.rs"]
mod mappings;

fuzz_target!(|bytes: &[u8]| mappings::check(&String::from_utf8_lossy(bytes)));

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../checks/size.rs"]
mod size;

fuzz_target!(|text: &str| size::check(text));

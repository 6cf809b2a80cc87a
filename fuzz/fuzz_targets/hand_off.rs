#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../checks/hand_off.rs"]
mod hand_off;
#[path = "../checks/handed.rs"]
#[allow(dead_code)]
mod handed;

fuzz_target!(|bytes: &[u8]| hand_off::check(bytes));

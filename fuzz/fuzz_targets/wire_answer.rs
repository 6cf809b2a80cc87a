#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../checks/wire_answer.rs"]
mod wire_answer;

fuzz_target!(|bytes: &[u8]| wire_answer::check(bytes));

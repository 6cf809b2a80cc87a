#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../checks/redis_answers.rs"]
mod redis_answers;

fuzz_target!(|bytes: &[u8]| redis_answers::check(bytes));

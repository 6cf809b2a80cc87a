#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../checks/tcp_answers.rs"]
mod tcp_answers;

fuzz_target!(|bytes: &[u8]| tcp_answers::check(bytes));

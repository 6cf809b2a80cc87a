#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../checks/memcached_answers.rs"]
mod memcached_answers;

fuzz_target!(|bytes: &[u8]| memcached_answers::check(bytes));

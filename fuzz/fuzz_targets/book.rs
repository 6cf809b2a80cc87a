#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../checks/book.rs"]
mod book;

fuzz_target!(|bytes: &[u8]| book::check(bytes));

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../checks/wire_request.rs"]
mod wire_request;

fuzz_target!(|bytes: &[u8]| wire_request::check(bytes));

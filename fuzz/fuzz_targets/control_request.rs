#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../checks/control_request.rs"]
mod control_request;

fuzz_target!(|bytes: &[u8]| control_request::check(bytes));

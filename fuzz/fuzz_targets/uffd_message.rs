#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../checks/uffd_message.rs"]
mod uffd_message;

fuzz_target!(|bytes: &[u8]| uffd_message::check(bytes));

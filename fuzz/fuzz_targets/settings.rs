#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../checks/settings.rs"]
mod settings;

fuzz_target!(|text: &str| settings::check(text));

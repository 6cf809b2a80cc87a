#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../checks/daemon_config.rs"]
mod daemon_config;

fuzz_target!(|text: &str| daemon_config::check(text));

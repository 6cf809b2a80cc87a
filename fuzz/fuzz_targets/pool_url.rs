#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../checks/pool_url.rs"]
mod pool_url;

fuzz_target!(|text: &str| pool_url::check(text));

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../checks/cluster_entry.rs"]
mod cluster_entry;

fuzz_target!(|entry: &[u8]| cluster_entry::check(entry));

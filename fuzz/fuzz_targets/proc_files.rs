#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../checks/proc_files.rs"]
mod proc_files;

fuzz_target!(|bytes: &[u8]| proc_files::check(&String::from_utf8_lossy(bytes)));

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../checks/server_connection.rs"]
mod server_connection;

fuzz_target!(|bytes: &[u8]| server_connection::check(bytes));

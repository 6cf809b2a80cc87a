//! What each fuzz target holds its input to: one function a target, which panics where something is wrong.
//!
//! `crates/cli/tests/fuzz_seeds.rs` runs them over the committed seeds, in every `cargo test`.

pub mod book;
pub mod btf;
pub mod cluster_entry;
pub mod control_request;
pub mod cost;
pub mod daemon_config;
pub mod estate;
pub mod hand_off;
pub mod handed;
pub mod ledger;
pub mod lz4;
pub mod mappings;
pub mod memcached_answers;
pub mod pool_url;
pub mod proc_files;
pub mod redis_answers;
pub mod rows;
pub mod server_connection;
pub mod settings;
pub mod size;
pub mod tcp_answers;
pub mod trace;
pub mod uffd_message;
pub mod wire_answer;
pub mod wire_request;

//! What the fuzz targets hold their inputs to, over their committed seeds: `cargo test` needs no nightly compiler.

#[path = "../../../fuzz/checks/mod.rs"]
#[allow(unreachable_pub, reason = "public for the fuzz targets")]
mod checks;

use std::fs;
use std::path::Path;

const FUZZ: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz");

/// Runs a target's check over its seeds.
fn over_seeds(target: &str, check: impl Fn(&[u8])) {
    let seeds = entries(&format!("corpus/{target}"));
    assert!(seeds.len() >= 5, "{target} has {} seeds", seeds.len());
    for seed in &seeds {
        // Shown when one fails: the last line names the seed.
        println!("{target}/{seed}");
        over_seed(&fs::read(Path::new(FUZZ).join("corpus").join(target).join(seed)).expect("readable"), &check);
    }
}

/// The same for a target that reads text.
fn over_texts(target: &str, check: impl Fn(&str)) {
    over_seeds(target, |bytes| check(&String::from_utf8_lossy(bytes)));
}

#[test]
fn each_target_is_run_here() {
    let names = [
        "book",
        "btf",
        "cluster_entry",
        "control_request",
        "cost",
        "daemon_config",
        "estate",
        "hand_off",
        "handed",
        "ledger",
        "lz4",
        "mappings",
        "memcached_answers",
        "pool_url",
        "proc_files",
        "redis_answers",
        "rows",
        "server_connection",
        "settings",
        "size",
        "tcp_answers",
        "trace",
        "uffd_message",
        "wire_answer",
        "wire_request",
    ];
    assert_eq!(entries("fuzz_targets"), names.map(|name| format!("{name}.rs")));
}

#[test]
fn book() {
    over_seeds("book", checks::book::check);
}

#[test]
fn btf() {
    over_seeds("btf", checks::btf::check);
}

#[test]
fn cluster_entry() {
    over_seeds("cluster_entry", checks::cluster_entry::check);
}

#[test]
fn control_request() {
    over_seeds("control_request", checks::control_request::check);
}

#[test]
fn estate() {
    over_seeds("estate", checks::estate::check);
}

#[test]
fn daemon_config() {
    over_texts("daemon_config", checks::daemon_config::check);
}

#[test]
fn cost() {
    over_texts("cost", checks::cost::check);
}

#[test]
fn hand_off() {
    over_seeds("hand_off", checks::hand_off::check);
}

#[test]
fn handed() {
    over_seeds("handed", checks::handed::check);
}

#[test]
fn ledger() {
    over_seeds("ledger", checks::ledger::check);
}

#[test]
fn rows() {
    over_seeds("rows", checks::rows::check);
}

#[test]
fn lz4() {
    over_seeds("lz4", checks::lz4::check);
}

#[test]
fn trace() {
    over_seeds("trace", checks::trace::check);
}

#[test]
fn mappings() {
    over_texts("mappings", checks::mappings::check);
}

#[test]
fn pool_url() {
    over_texts("pool_url", checks::pool_url::check);
}

#[test]
fn proc_files() {
    over_texts("proc_files", checks::proc_files::check);
}

#[test]
fn settings() {
    over_texts("settings", checks::settings::check);
}

#[test]
fn size() {
    over_texts("size", checks::size::check);
}

#[test]
fn uffd_message() {
    over_seeds("uffd_message", checks::uffd_message::check);
}

#[test]
fn memcached_answers() {
    over_seeds("memcached_answers", checks::memcached_answers::check);
}

#[test]
fn redis_answers() {
    over_seeds("redis_answers", checks::redis_answers::check);
}

#[test]
fn server_connection() {
    over_seeds("server_connection", checks::server_connection::check);
}

#[test]
fn tcp_answers() {
    over_seeds("tcp_answers", checks::tcp_answers::check);
}

#[test]
fn wire_answer() {
    over_seeds("wire_answer", checks::wire_answer::check);
}

#[test]
fn wire_request() {
    over_seeds("wire_request", checks::wire_request::check);
}

/// The most places of a seed that are cut or changed: what carries pages is long, and alike for most of its length.
const PLACES: usize = 192;

/// Checks a seed, what it can be cut short to, and it with any one bit changed.
fn over_seed(bytes: &[u8], check: &impl Fn(&[u8])) {
    let places = || (0..bytes.len()).filter(|at| *at < PLACES || at % (bytes.len() / PLACES) == 0);
    for end in places().chain([bytes.len()]) {
        check(&bytes[..end]);
    }
    let mut changed = bytes.to_vec();
    for at in places() {
        for bit in 0..8 {
            changed[at] ^= 1 << bit;
            check(&changed);
            changed[at] ^= 1 << bit;
        }
    }
}

/// The names in a directory of `fuzz`, in order.
fn entries(directory: &str) -> Vec<String> {
    let found = fs::read_dir(Path::new(FUZZ).join(directory)).expect("a directory");
    let mut names: Vec<_> =
        found.map(|entry| entry.expect("listed").file_name().into_string().expect("text")).collect();
    names.sort();
    names
}

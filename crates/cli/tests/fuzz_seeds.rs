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
    let names = ["lz4", "mappings", "pool_url", "proc_files", "size", "uffd_message"];
    assert_eq!(entries("fuzz_targets"), names.map(|name| format!("{name}.rs")));
}

#[test]
fn lz4() {
    over_seeds("lz4", checks::lz4::check);
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
fn size() {
    over_texts("size", checks::size::check);
}

#[test]
fn uffd_message() {
    over_seeds("uffd_message", checks::uffd_message::check);
}

/// Checks a seed, all that it can be cut short to, and it with any one bit changed.
fn over_seed(bytes: &[u8], check: &impl Fn(&[u8])) {
    for end in 0..=bytes.len() {
        check(&bytes[..end]);
    }
    let mut changed = bytes.to_vec();
    for at in 0..bytes.len() {
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

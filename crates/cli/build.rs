//! Lays together what serves a fault (docs/decisions/0032-code-that-a-fault-touches.md).

use std::env::var;

/// Linkers that take no `SECTIONS` besides their own.
const CANNOT: [&str; 3] = ["gold", "mold", "wild"];

fn main() {
    println!("cargo::rerun-if-changed=fault-path.ld");
    println!("cargo::rerun-if-changed=build.rs");
    let linker = ["CARGO_ENCODED_RUSTFLAGS", "RUSTC_LINKER"].map(|name| var(name).unwrap_or_default()).concat();
    let can = !CANNOT.iter().any(|name| linker.contains(name));
    let is_release = var("PROFILE").is_ok_and(|profile| profile == "release");
    if let (true, Ok(here)) = (can && is_release, var("CARGO_MANIFEST_DIR")) {
        for argument in ["-T", &format!("{here}/fault-path.ld")] {
            println!("cargo::rustc-link-arg-bins={argument}");
        }
    }
}

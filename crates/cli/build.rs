//! Lays together what serves a fault (docs/decisions/0032-code-that-a-fault-touches.md).

use std::env::var;

/// Linkers that take no `SECTIONS`, or none that is inserted into their own (GNU ld's manual, `INSERT`).
const CANNOT: [&str; 3] = ["gold", "mold", "wild"];
/// Set to "off" where such a one is the system's `ld`, and nothing tells.
const SWITCH: &str = "SPILLWAY_FAULT_PATH";

fn main() {
    println!("cargo::rerun-if-changed=fault-path.ld");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed={SWITCH}");
    let linker = ["CARGO_ENCODED_RUSTFLAGS", "RUSTC_LINKER"].map(|name| var(name).unwrap_or_default()).concat();
    let can = !CANNOT.iter().any(|name| linker.contains(name)) && var(SWITCH).as_deref() != Ok("off");
    let is_release = var("PROFILE").is_ok_and(|profile| profile == "release");
    if let (true, Ok(here)) = (can && is_release, var("CARGO_MANIFEST_DIR")) {
        for argument in ["-T", &format!("{here}/fault-path.ld")] {
            println!("cargo::rustc-link-arg-bins={argument}");
        }
    }
}

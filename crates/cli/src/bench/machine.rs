//! On what a comparison ran.

use serde::Serialize;
use spillway_core::size::Bytes;
use spillway_store::vault::host_memory_bytes;
use std::fs;
use std::time::{SystemTime, UNIX_EPOCH};

/// What to say when others keep this machine busy: how much they run now, in CPUs.
pub(super) fn busy() -> Option<String> {
    let load: f64 = fs::read_to_string("/proc/loadavg").ok()?.split(' ').next()?.parse().ok()?;
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let free = cpus as f64 - load;
    (free < 1.0).then(|| {
        format!("others kept this machine busy when it began (load {load} on {cpus} CPUs): the figures say little")
    })
}

/// A machine, and what ran on it.
#[derive(Serialize)]
pub(super) struct Machine {
    cpu: String,
    cpus: usize,
    kernel: String,
    memory: String,
    spillway: &'static str,
    /// How much memory a workload touches.
    pub(super) size: String,
    /// Seconds since 1970.
    at_unix_s: u64,
}

impl Machine {
    /// This one.
    pub(super) fn examine(size: u64) -> Self {
        let cpus = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = cpus.lines().find(|line| line.starts_with("model name")).and_then(|line| line.split_once(':'));
        Self {
            cpu: model.map_or(String::new(), |(_, name)| name.trim().to_owned()),
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            kernel: fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned(),
            memory: Bytes(host_memory_bytes().unwrap_or(0)).to_string(),
            spillway: env!("CARGO_PKG_VERSION"),
            size: Bytes(size).to_string(),
            at_unix_s: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
        }
    }

    /// In one line.
    pub(super) fn line(&self) -> String {
        let Self { cpu, cpus, kernel, memory, spillway, .. } = self;
        format!("{cpu}, {cpus} CPUs, {memory}, Linux {kernel}, spillway {spillway}")
    }
}

//! What is told at the end: the summary line and the `--stats` file, which is whole or absent.

use crate::daemon::TargetListing;
use crate::failure::{FAILED, Failure};
use crate::replace::Place;
use crate::say;
use serde::Serialize;
use spillway_core::PAGE_BYTES_U64;
use spillway_core::size::Bytes;
use spillway_pager::Snapshot;
use std::io::Write;
use std::path::Path;

/// The line at the end of a run.
pub(crate) fn summary(of: &Snapshot) -> String {
    format!(
        "peak {} local, {} stored, {} with copies of local pages in {}, {} faults, p50 {:.1} us, p99 {:.1} us",
        Bytes(of.burst_peak_bytes),
        Bytes(of.stored_bytes),
        Bytes(of.kept_bytes),
        Bytes(of.stored_compressed_bytes),
        of.faults,
        of.fault_us.p50,
        of.fault_us.p99,
    )
}

/// The same of a target that a daemon has served.
pub(crate) fn summary_of_target(of: &TargetListing, daemon: i32) -> String {
    format!(
        "served by the daemon (process {daemon}): {} faults, p50 {:.1} us, p99 {:.1} us, {} evicted, {} fetched",
        of.faults,
        of.fault_us.p50,
        of.fault_us.p99,
        Bytes(of.evicted_pages * PAGE_BYTES_U64),
        Bytes(of.fetched_pages * PAGE_BYTES_U64),
    )
}

/// Where the final counters go.
pub(crate) struct StatsFile(Place);

impl StatsFile {
    /// Makes sure that the file can be written later.
    pub(crate) fn prepare(path: &Path) -> Result<Self, Failure> {
        Place::prepare(path).map(Self).map_err(|error| {
            let (path, why) = (say::clean(&path.to_string_lossy()), say::error(&error));
            Failure::refused(format!("cannot write statistics to {path}: {why}; give --stats another file"))
        })
    }

    /// Writes the counters.
    pub(crate) fn write(self, of: &impl Serialize) -> Result<(), Failure> {
        let text = serde_json::to_string_pretty(of).map_err(Into::into);
        let written = text.and_then(|text| self.0.replace(|mut file| writeln!(file, "{text}")));
        written.map_err(|error: std::io::Error| {
            Failure::new(FAILED, format!("the statistics could not be written: {}", say::error(&error)))
        })
    }
}

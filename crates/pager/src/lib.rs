//! Adopts processes and serves their faults.
//!
//! A [`Pager`] owns its threads; dropping it without [`Pager::detach`] leaves the targets to what
//! [`Options::on_pager_death`] says.

mod access;
mod adopt;
mod announced;
pub mod btf;
mod choice;
mod commons;
mod doctor;
mod driver;
mod error;
pub mod estate;
pub mod guardian;
pub mod handed;
mod handle;
mod kernel_file;
pub mod merging;
mod outlook;
mod outside;
mod pins;
mod placement;
pub mod procfs;
mod recording;
mod remains;
mod removals;
mod restart;
mod shared;
#[cfg(test)]
mod skipped;
mod stray;
mod stretch;
mod sys;
mod tally;
mod target;
mod watchdog;
mod watcher;

pub use choice::Choice;
pub use commons::usable as shared_memory_usable;
pub use doctor::{Check, doctor, usable};
pub use error::Error;
pub use handle::Pager;
pub use recording::{Recording, Windows};
pub use remains::{Lost, Remains, can_take_over, lost_by};
pub use sys::fd::{Peer, peer};
pub use tally::TreeSnapshot;

use spillway_core::policy::Settings;
pub use spillway_core::shares::Share;
use spillway_store::vault::Vault;
use spillway_store::{Protection, Store};

/// How much local memory the targets may use, all of them together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Local {
    /// A fixed number of bytes, at least [`Choice::floor_bytes`].
    Bytes(u64),
    /// A share (1 to 100) of what the targets have touched so far, never below [`LOCAL_FLOOR_BYTES`].
    Percent(u8),
    /// No limit: nothing leaves for want of room.
    All,
}

/// The smallest budget of whole processes: [`Choice::floor_bytes`].
pub const LOCAL_FLOOR_BYTES: u64 = 4 << 20;

/// What the agent in a target does when it sees that its pager is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnPagerDeath {
    /// Kill the target (`run`).
    KillTarget,
    /// Keep the target's faults waiting, so that it stops rather than reads zeros (`attach`).
    HoldTarget,
}

/// What a pager is started with.
pub struct Options {
    /// The budget.
    pub local: Local,
    /// Which mappings are managed.
    pub choice: Choice,
    /// Which pages leave, when and whose.
    pub replacement: Settings,
    /// Where evicted pages go.
    pub store: Box<dyn Store>,
    /// What becomes of targets without a pager.
    pub on_pager_death: OnPagerDeath,
    /// Where to record what happens, for study.
    pub recording: Option<Recording>,
    /// Whether equal pages in targets are kept once, by the kernel; of a pager of many trees, each says that for itself.
    pub share_pages: bool,
    /// Memory that outlives the pager, with the pool that is in it: another pager can then take over.
    pub lasting: Option<LastingPool>,
}

/// A pool that another pager can take over.
pub struct LastingPool {
    /// The memory that outlives the pager, which [`Options::store`] uses.
    pub vault: Vault,
    /// What the pool was opened with.
    pub url: String,
}

/// Counters at one moment. Sizes in bytes, times in microseconds. What a pager of an older version does not tell is nothing.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct Snapshot {
    /// The root process.
    pub pid: i32,
    /// All processes under management.
    pub pids: Vec<i32>,
    /// Why the last process that could not be adopted could not, if there was one: it runs on without a budget.
    pub refused: Option<String>,
    /// Processes under management now.
    pub processes: u64,
    /// Distinct memory the targets hold now, wherever it is.
    pub touched_bytes: u64,
    /// Resident managed memory plus the pager's page buffers, now.
    pub local_bytes: u64,
    /// The largest `local_bytes` seen, but for memory that a scan had just found beyond the budget and that was then
    /// evicted: a program that maps new memory can fill some of it before the pager sees it.
    pub local_peak_bytes: u64,
    /// The largest `local_bytes` seen at all.
    pub burst_peak_bytes: u64,
    /// The budget in force.
    pub budget_bytes: u64,
    /// Which pages leave first, by name.
    pub policy: String,
    /// When pages leave, by name.
    pub evict: String,
    /// Whose pages leave, by name.
    pub scope: String,
    /// How many adjacent pages move together, by name.
    pub block: String,
    /// Pages whose only copy is in the pool, times 4 KiB.
    pub stored_bytes: u64,
    /// Pages that the pool keeps, times 4 KiB: those, and copies of local pages that have not changed since.
    pub kept_bytes: u64,
    /// What all of these take in the pool, after compression and sharing.
    pub stored_compressed_bytes: u64,
    /// Faults served.
    pub faults: u64,
    /// From reading a fault to the return of the wake-up.
    pub fault_us: FaultTimes,
    /// Faults answered with zeros.
    pub zero_fills: u64,
    /// Pages that came back from the pager's buffers before they were written.
    pub refaults: u64,
    /// Pages fetched from the pool.
    pub fetched_pages: u64,
    /// Of those, pages that no fault had asked for.
    pub prefetched_pages: u64,
    /// The share of such pages that were used, estimated from a sample; none while too few have shown.
    pub prefetch_accuracy: Option<f64>,
    /// Blocks that became one with their neighbour.
    pub stretches: u64,
    /// Blocks that fell apart because half of them or less was used.
    pub reductions: u64,
    /// Pages captured from targets.
    pub evicted_pages: u64,
    /// Pages written to the pool.
    pub written_pages: u64,
    /// Evicted pages whose pool copy was still right, so that nothing was written.
    pub clean_drops: u64,
    /// Evicted pages that were all zeros, so that nothing is kept.
    pub zero_drops: u64,
    /// Times that the kernel would not give a page up: pinned, locked, merged, or shared with a forked child.
    pub stuck_pages: u64,
    /// Pages that the pool, or a capture, has lost: an access to one of them raises SIGBUS.
    pub lost_pages: u64,
    /// How a pool that survives the loss of servers is; none where the pool does not.
    pub protection: Option<Protection>,
    /// Whether the pool took no page when it was last asked: what cannot leave stays local, beyond the budget.
    pub pool_full: bool,
    /// Faults per second over the last second or so.
    pub faults_per_s: f64,
    /// Memory of the page table.
    pub table_bytes: u64,
    /// Whether the policy sees which pages were touched: `nru`, where access bits can be read.
    pub access_bits: bool,
    /// Whether the kernel is asked to keep equal pages in targets once.
    pub share_pages: bool,
    /// Memory in targets that it keeps once for all who have it, now.
    pub merged_bytes: u64,
    /// The largest `merged_bytes` seen.
    pub merged_peak_bytes: u64,
    /// What that saves now, less what the kernel needs to remember for it: below zero where it does not pay.
    pub merged_profit_bytes: i64,
    /// Why the kernel would not merge what it was asked to, if it ever would not.
    pub share_refused: Option<String>,
    /// Whether no other pager could take over now: there are so many processes or mappings that what it must know has no room.
    pub unheritable: bool,
    /// Files of memory that processes share which are managed,
    pub shared_files: u64,
    /// and those of them that everyone is known of who has them mapped: their pages may leave.
    pub shared_files_ready: u64,
    /// Longest time a target's thread was stopped for adoption.
    pub adopt_pause_us: f64,
}

/// Service times of faults, in microseconds: from when the pager was there to serve one until its page was in the target.
#[derive(Clone, Copy, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct FaultTimes {
    /// Mean. Pagers of older versions do not tell it.
    #[serde(default)]
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// 99th percentile.
    pub p99: f64,
    /// 99.9th percentile.
    pub p999: f64,
    /// Largest.
    pub max: f64,
}

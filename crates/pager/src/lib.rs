//! Adopts processes and serves their faults.
//!
//! A [`Pager`] owns its threads; dropping it without [`Pager::detach`] leaves the targets to what
//! [`Options::on_pager_death`] says.

use spillway_store::Store;

/// How much local memory the targets may use, all of them together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Local {
    /// A fixed number of bytes, at least [`LOCAL_FLOOR_BYTES`].
    Bytes(u64),
    /// A share (1 to 100) of what the targets have touched so far, never below [`LOCAL_FLOOR_BYTES`].
    Percent(u8),
}

/// The smallest budget: below it faults would wait for each other's evictions.
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
    /// Where evicted pages go.
    pub store: Box<dyn Store>,
    /// What becomes of targets without a pager.
    pub on_pager_death: OnPagerDeath,
}

/// The pager of one process tree.
pub struct Pager {}

/// Counters at one moment. Sizes in bytes, times in microseconds.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct Snapshot {
    /// The root process.
    pub pid: i32,
    /// Processes under management now.
    pub processes: u64,
    /// Distinct memory the targets hold now, wherever it is.
    pub touched_bytes: u64,
    /// Resident managed memory plus the pager's page buffers, now.
    pub local_bytes: u64,
    /// The largest `local_bytes` seen.
    pub local_peak_bytes: u64,
    /// The budget in force.
    pub budget_bytes: u64,
    /// Pages whose only copy is in the pool, times 4 KiB.
    pub stored_bytes: u64,
    /// What the pool keeps for all of its pages, after compression and sharing.
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
    /// Pages captured from targets.
    pub evicted_pages: u64,
    /// Pages written to the pool.
    pub written_pages: u64,
    /// Evicted pages whose pool copy was still right, so that nothing was written.
    pub clean_drops: u64,
    /// Evicted pages that were all zeros, so that nothing is kept.
    pub zero_drops: u64,
    /// Faults per second over the last second or so.
    pub faults_per_s: f64,
    /// Memory of the page table.
    pub table_bytes: u64,
    /// Longest time a target's thread was stopped for adoption.
    pub adopt_pause_us: f64,
}

/// Service times of faults, in microseconds.
#[derive(Clone, Copy, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct FaultTimes {
    /// Median.
    pub p50: f64,
    /// 99th percentile.
    pub p99: f64,
    /// 99.9th percentile.
    pub p999: f64,
    /// Largest.
    pub max: f64,
}

/// Why something could not be done; the text tells the user what to do about it.
#[derive(Debug)]
pub enum Error {
    /// There is no such process.
    NoSuchProcess(i32),
    /// Any other, to be refined.
    Other(String),
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NoSuchProcess(pid) => write!(f, "there is no process {pid}: see `ps -e` for those that run"),
            Self::Other(text) => f.write_str(text),
        }
    }
}

impl std::error::Error for Error {}

/// What holds targets back from being adopted here, for `doctor` and for start-up checks.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Check {
    /// Short name: `kernel`, `userfaultfd`, `privileges`, `ptrace`, `seccomp`, `memlock`.
    pub name: &'static str,
    /// Whether all is well.
    pub ok: bool,
    /// What was found.
    pub found: String,
    /// What its lack costs; empty when `ok`.
    pub cost: String,
    /// The command that mends it; empty when `ok` or when nothing mends it.
    pub remedy: String,
}

/// Examines this machine.
pub fn doctor() -> Vec<Check> {
    Vec::new()
}

impl Pager {
    /// Adopts `pid` and its present descendants at once, and follows future ones (`attach`).
    pub fn adopt(pid: i32, options: Options) -> Result<Self, Error> {
        let _ = (pid, options);
        Err(Error::Other("not yet".into()))
    }

    /// Watches the descendants of `parent`, which may have none yet, and adopts each that grows (`run`). Processes of
    /// the pager itself are never adopted.
    pub fn follow(parent: i32, options: Options) -> Result<Self, Error> {
        let _ = (parent, options);
        Err(Error::Other("not yet".into()))
    }

    /// The counters now.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot::default()
    }

    /// Changes the budget; eviction down to it happens in the background.
    pub fn set_local(&self, local: Local) {
        let _ = local;
    }

    /// Brings every page home and leaves nothing behind. `progress` is told pages done and pages in all.
    ///
    /// # Errors
    /// When the target's own memory limit leaves no room; everything stays managed then.
    pub fn detach(&self, progress: &mut dyn FnMut(u64, u64)) -> Result<(), Error> {
        let _ = progress;
        Ok(())
    }

    /// Whether any managed or watched process is left.
    pub fn has_targets(&self) -> bool {
        false
    }
}

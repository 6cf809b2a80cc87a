//! What a pager tells of each tree of processes that it serves.
//!
//! A tree is a process that was adopted on its own account, with its descendants. Each address space of it counts here; its
//! numbers are written by the fault thread alone, and read by anyone.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use spillway_core::shares::Share;
use spillway_core::{PAGE_BYTES_U64, TreeId};

use crate::FaultTimes;
use crate::merging::Merged;
use crate::shared::Histogram;

/// How long a tree whose processes have ended is remembered, so that whoever waited for its end can ask for its numbers.
const REMEMBERED_FOR: Duration = Duration::from_secs(60);
/// And how many such trees.
const REMEMBERED_MAX: usize = 64;

/// Numbers of one tree.
#[derive(Default)]
pub struct Tally {
    /// Whose.
    pub tree: TreeId,
    /// The process that it is known by, and when that was started.
    pub root: (i32, u64),
    /// Service times of its faults.
    pub histogram: Histogram,
    /// Pages fetched from the pool for its faults.
    pub fetched_pages: AtomicU64,
    /// Pages captured from it.
    pub evicted_pages: AtomicU64,
    /// Pages in it, when they were last counted.
    pub mapped_pages: AtomicU64,
    /// All pages that it holds, wherever they are.
    pub used_pages: AtomicU64,
    /// What it may have of local memory. The fault thread never takes this lock.
    pub share: Mutex<Share>,
    /// Whether the kernel is to merge its pages.
    pub merges: AtomicBool,
    /// The longest time that a thread of it was stopped for adoption.
    pub pause_ns: AtomicU64,
    /// Since when it does in any process of it that did not ask for it itself, in ticks since the machine started: what is
    /// forked from then on inherits it. Zero before.
    pub merging_since: AtomicU64,
}

impl Tally {
    /// That of a tree without processes.
    pub fn new(tree: TreeId, root: (i32, u64), share: Share, merges: bool) -> Arc<Self> {
        Arc::new(Self { tree, root, share: Mutex::new(share), merges: merges.into(), ..Self::default() })
    }

    /// Whether a process that was started then has inherited it, if it has it.
    pub fn hands_on_merging(&self, started: u64) -> bool {
        let since = self.merging_since.load(Relaxed);
        since > 0 && started >= since
    }

    /// What it may have of local memory.
    pub fn share(&self) -> Share {
        *self.share.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// More of something. Only the fault thread calls this.
    pub fn add(counter: &AtomicU64, pages: u64) {
        counter.store(counter.load(Relaxed) + pages, Relaxed);
    }
}

/// One tree, as users see it. Sizes in bytes.
#[derive(Clone, Debug, Default)]
pub struct TreeSnapshot {
    /// The process that it is known by.
    pub root: i32,
    /// Its processes under management.
    pub pids: Vec<i32>,
    /// Whether all of its processes have ended, or were let go.
    pub ended: bool,
    /// Whether it is being let go.
    pub leaving: bool,
    /// Memory that it holds now, wherever it is.
    pub touched_bytes: u64,
    /// Of that, what is resident in it.
    pub local_bytes: u64,
    /// And what is not.
    pub stored_bytes: u64,
    /// Faults served.
    pub faults: u64,
    /// From reading a fault to the return of the wake-up.
    pub fault_us: FaultTimes,
    /// Pages fetched from the pool for its faults.
    pub fetched_pages: u64,
    /// Pages captured from it.
    pub evicted_pages: u64,
    /// Faults per second over the last second or so.
    pub faults_per_s: f64,
    /// What it may have of local memory.
    pub share: Share,
    /// Whether the kernel is asked to keep equal pages of it once.
    pub share_pages: bool,
    /// Memory of it that the kernel keeps once for all who have it.
    pub merged_bytes: u64,
    /// What that saves, less what the kernel needs to remember for it.
    pub merged_profit_bytes: i64,
    /// Longest time a thread of it was stopped for adoption.
    pub adopt_pause_us: f64,
}

/// What is known of a tree.
pub struct Tree {
    /// Its numbers.
    pub tally: Arc<Tally>,
    /// Its processes under management.
    pub pids: Vec<i32>,
    /// Since when it has none, and is not watched any more.
    pub ended: Option<Instant>,
    /// It is being let go.
    pub leaving: bool,
    /// When its faults were last looked at, how many they were, and how many a second until then.
    rate: (Instant, u64, f64),
}

impl Tree {
    fn snapshot(&mut self) -> TreeSnapshot {
        let faults = self.tally.histogram.count();
        let passed = self.rate.0.elapsed().as_secs_f64();
        if passed >= 0.5 {
            self.rate = (Instant::now(), faults, (faults - self.rate.1) as f64 / passed);
        }
        let get = |number: &AtomicU64| number.load(Relaxed);
        let (mapped, used) = (get(&self.tally.mapped_pages), get(&self.tally.used_pages));
        let share_pages = self.tally.merges.load(Relaxed);
        let merged = if share_pages { Merged::of_all(&self.pids) } else { Merged::default() };
        TreeSnapshot {
            root: self.tally.root.0,
            pids: self.pids.clone(),
            ended: self.ended.is_some(),
            leaving: self.leaving,
            touched_bytes: used * PAGE_BYTES_U64,
            local_bytes: mapped * PAGE_BYTES_U64,
            stored_bytes: used.saturating_sub(mapped) * PAGE_BYTES_U64,
            faults,
            fault_us: self.tally.histogram.times(),
            fetched_pages: get(&self.tally.fetched_pages),
            evicted_pages: get(&self.tally.evicted_pages),
            faults_per_s: self.rate.2,
            share: self.tally.share(),
            share_pages,
            merged_bytes: merged.pages * PAGE_BYTES_U64,
            merged_profit_bytes: merged.profit_bytes,
            adopt_pause_us: get(&self.tally.pause_ns) as f64 / 1e3,
        }
    }
}

/// All trees of a pager, for its watcher and whoever asks. No fault waits for this lock.
#[derive(Clone, Default)]
pub struct Trees(Arc<Mutex<Vec<Tree>>>);

impl Trees {
    /// A tree is watched from now on.
    pub fn add(&self, tally: Arc<Tally>) {
        let mut trees = self.lock();
        // The oldest come first.
        let mut too_many = trees.iter().filter(|tree| tree.ended.is_some()).count().saturating_sub(REMEMBERED_MAX);
        trees.retain(|tree| {
            let Some(at) = tree.ended else { return true };
            let goes = too_many > 0 || at.elapsed() >= REMEMBERED_FOR;
            too_many = too_many.saturating_sub(1);
            !goes
        });
        trees.push(Tree { tally, pids: Vec::new(), ended: None, leaving: false, rate: (Instant::now(), 0, 0.0) });
    }

    /// Changes those that have not ended.
    pub fn each(&self, change: impl FnMut(&mut Tree)) {
        self.lock().iter_mut().filter(|tree| tree.ended.is_none()).for_each(change);
    }

    /// Changes one.
    pub fn change(&self, id: TreeId, change: impl FnOnce(&mut Tree)) {
        if let Some(tree) = self.lock().iter_mut().find(|tree| tree.tally.tree == id) {
            change(tree);
        }
    }

    /// What is told of one.
    pub fn tally(&self, id: TreeId) -> Option<Arc<Tally>> {
        self.lock().iter().find(|tree| tree.tally.tree == id).map(|tree| Arc::clone(&tree.tally))
    }

    /// The managed processes of one; none where there is no such tree.
    pub fn pids(&self, id: TreeId) -> Option<Vec<i32>> {
        self.lock().iter().find(|tree| tree.tally.tree == id).map(|tree| tree.pids.clone())
    }

    /// What is told of those that have not ended.
    pub fn tallies(&self) -> Vec<Arc<Tally>> {
        self.lock().iter().filter(|tree| tree.ended.is_none()).map(|tree| Arc::clone(&tree.tally)).collect()
    }

    /// The shares of those that have not ended.
    pub fn shares(&self) -> Vec<(TreeId, Share)> {
        self.lock().iter().filter(|it| it.ended.is_none()).map(|it| (it.tally.tree, it.tally.share())).collect()
    }

    /// Takes back what was added in vain.
    pub fn remove(&self, id: TreeId) {
        self.lock().retain(|tree| tree.tally.tree != id);
    }

    /// The live tree of this root, or of this member.
    pub fn of(&self, pid: i32) -> Option<TreeId> {
        let trees = self.lock();
        let live = || trees.iter().filter(|tree| tree.ended.is_none());
        let found = live().find(|tree| tree.tally.root.0 == pid).or_else(|| live().find(|it| it.pids.contains(&pid)));
        found.map(|tree| tree.tally.tree)
    }

    /// All of them now, also those that have ended of late.
    pub fn snapshots(&self) -> Vec<TreeSnapshot> {
        self.lock().iter_mut().map(Tree::snapshot).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Tree>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

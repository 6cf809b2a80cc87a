//! The pager as its users hold it: two threads, and what may be asked of them.

mod trees;

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use spillway_core::PAGE_BYTES_U64;
use spillway_core::pager::Budget;
use spillway_core::policy::Settings;
use spillway_core::shares::Share;
use spillway_store::Inheritance;

use crate::driver::{Command, Driver, Wires};
use crate::error::Error;
use crate::estate::Estate;
use crate::guardian;
use crate::handed::{Placed, Plugged};
use crate::merging::{self, Merged};
use crate::remains::Remains;
use crate::shared::Shared;
use crate::sys::epoll::Epoll;
use crate::sys::fd::Bell;
use crate::sys::rseq;
use crate::sys::sched::{Class, lock_memory, raise_descriptor_limit};
use crate::tally::{Tally, Trees};
use crate::watcher::{Departure, Request, Watcher};
use crate::{Choice, LOCAL_FLOOR_BYTES, LastingPool, Local, OnPagerDeath, Options, Snapshot, procfs};

/// How long an adoption may take to come to its end: most of that is for a thread that does not stop.
const STILL_WITHIN: Duration = Duration::from_secs(3);

/// The pager of one process tree, or of several.
pub struct Pager {
    root: i32,
    parent: Option<i32>,
    choice: Choice,
    commands: Sender<Command>,
    bell: Arc<Bell>,
    requests: Sender<Request>,
    shared: Arc<Shared>,
    managed: Arc<Mutex<Vec<i32>>>,
    released: AtomicBool,
    replacement: Mutex<Settings>,
    rate: Mutex<(Instant, u64, f64)>,
    estate: Option<Estate>,
    trees: Trees,
    /// What is told of the descendants of `parent`.
    first: Arc<Tally>,
    /// The most that was seen merged.
    merged_peak_pages: AtomicU64,
    /// The budget as it was set: what minima are promised of.
    local: Mutex<Local>,
    next_tree: AtomicU32,
    /// It serves on without processes.
    stays: bool,
    /// The fault thread, until [`Pager::end`].
    faults: Mutex<Option<JoinHandle<()>>>,
}

impl Pager {
    /// Adopts `pid` and its present descendants at once, and follows future ones (`attach`).
    ///
    /// # Errors
    /// As [`Error`] says; the target is unharmed then.
    pub fn adopt(pid: i32, options: Options) -> Result<Self, Error> {
        crate::adopt::examine(pid)?;
        crate::doctor::usable_for(pid)?;
        let shares = options.share_pages;
        let pager = Self::start(pid, None, options)?;
        pager.adopt_tree(pid, true, Share::default(), shares)?;
        Ok(pager)
    }

    /// Watches the descendants of `parent`, which may have none yet, and adopts each that grows (`run`). Processes of
    /// the pager itself are never adopted.
    ///
    /// # Errors
    /// When this machine cannot adopt anything.
    pub fn follow(parent: i32, options: Options) -> Result<Self, Error> {
        crate::doctor::usable()?;
        Self::start(parent, Some(parent), options)
    }

    /// Serves whoever hands over memory of its own ([`Pager::take_in`]), until it is told to let go.
    ///
    /// # Errors
    /// When this machine cannot adopt anything.
    pub fn host(options: Options) -> Result<Self, Error> {
        crate::doctor::usable()?;
        let own = std::process::id().cast_signed();
        Ok(Self { stays: true, ..Self::start(own, None, options)? })
    }

    /// Manages what a process has handed over. The file that its missing pages are in is one that [`Options::store`] has.
    ///
    /// # Errors
    /// As [`Error`] says; nothing is served then.
    pub fn take_in(&self, placed: Placed) -> Result<(), Error> {
        if placed.handed.is_shared {
            crate::commons::usable()?;
        }
        let (pid, (reply, answer)) = (placed.handed.pid(), channel());
        let _ = self.requests.send(Request::TakeIn(Box::new(placed), reply));
        answer.recv().map_err(|_| Error::Ended(pid))?
    }

    /// Manages what was plugged into a guest whose memory is.
    ///
    /// # Errors
    /// As [`Error`] says; whoever touches that memory waits then.
    pub fn plug_in(&self, plugged: Plugged) -> Result<(), Error> {
        let (reply, answer) = channel();
        let _ = self.requests.send(Request::PlugIn(plugged, reply));
        answer.recv().map_err(|_| Error::Ended(plugged.pid))?
    }

    fn start(root: i32, parent: Option<i32>, options: Options) -> Result<Self, Error> {
        let Options { local, choice, replacement, store, on_pager_death, recording, share_pages, lasting } = options;
        if share_pages {
            merging::usable()?;
        }
        let estate = lasting.map(|LastingPool { vault, url }| {
            let estate = Estate::new(vault);
            estate.set_choice(choice);
            estate.set_guardian(guardian::ours());
            estate.claim(local, replacement);
            (estate.set_pool(&url), estate)
        });
        // A pool that cannot be named cannot be taken over.
        let estate = estate.and_then(|(named, estate)| named.then_some(estate));
        let make = {
            let estate = estate.clone();
            move |budget, wires| {
                let driver = Driver::new(budget, replacement, store, estate, wires);
                Ok(driver.choose(choice).record(recording))
            }
        };
        let pager = Self::begin(root, parent, on_pager_death, local, choice, replacement, estate, make)?;
        pager.first.merges.store(share_pages, Relaxed);
        Ok(pager)
    }

    /// Takes over from a pager that died.
    ///
    /// # Errors
    /// As [`Error`] says; the targets wait on then.
    pub fn take_over(
        remains: Remains,
        local: Local,
        replacement: Settings,
        store: Box<dyn Inheritance>,
    ) -> Result<Self, Error> {
        crate::doctor::usable()?;
        let (root, estate, heirs, claim) = remains.into_parts();
        let (is_daemon, choice) = (estate.is_daemon(), estate.choice());
        let next_tree = heirs.trees().map(|tree| tree.0 + 1).max().unwrap_or(0);
        let make = {
            let estate = estate.clone();
            move |budget, wires| {
                let driver = Driver::take_over(budget, replacement, store, estate, heirs, wires)?;
                Ok(driver.choose(choice))
            }
        };
        estate.claim(local, replacement);
        drop(claim);
        let root = if is_daemon { 0 } else { root };
        let mut pager =
            Self::begin(root, None, OnPagerDeath::HoldTarget, local, choice, replacement, Some(estate), make)?;
        pager.next_tree = AtomicU32::new(next_tree);
        pager.stays = is_daemon;
        Ok(pager)
    }

    /// Starts the threads; `make` makes the driver on its own.
    #[expect(clippy::too_many_arguments, reason = "what a pager is made of")]
    fn begin(
        root: i32,
        parent: Option<i32>,
        on_pager_death: OnPagerDeath,
        local: Local,
        choice: Choice,
        replacement: Settings,
        estate: Option<Estate>,
        make: impl FnOnce(Budget, Wires) -> Result<Driver, Error> + Send + 'static,
    ) -> Result<Self, Error> {
        let system = |what| move |error| Error::System { what, error };
        // Without the right to lock memory the pager still works, and `doctor` says what that costs.
        let _ = lock_memory();
        let _ = raise_descriptor_limit();
        let bell = Arc::new(Bell::new().map_err(system("making an event descriptor"))?);
        let epoll = Epoll::new().map_err(system("making an event descriptor"))?;
        let shared = Arc::new(Shared::default());
        let managed = Arc::new(Mutex::new(Vec::new()));
        let (trees, first) = (Trees::default(), Arc::<Tally>::default());
        let (commands, orders) = channel();
        let (requests, inbox) = channel();
        let wires = Wires {
            commands: orders,
            epoll,
            bell: Arc::clone(&bell),
            reports: requests.clone(),
            shared: Arc::clone(&shared),
        };

        let (ready, begun) = channel();
        let budget = budget(local);
        let faults = thread::Builder::new()
            .name("faults".into())
            .spawn(move || match make(budget, wires) {
                Ok(driver) => {
                    rseq::leave();
                    let _ = ready.send(Ok(()));
                    driver.run();
                }
                Err(error) => drop(ready.send(Err(error))),
            })
            .map_err(system("starting the fault thread"))?;
        begun.recv().map_err(|_| Error::Ended(root))??;
        let watcher = Watcher::new(
            parent,
            on_pager_death,
            local,
            choice,
            commands.clone(),
            Arc::clone(&bell),
            inbox,
            estate.as_ref().map(|estate| estate.vault().clone()),
            Arc::clone(&shared),
            Arc::clone(&managed),
            trees.clone(),
            Arc::clone(&first),
        );
        thread::Builder::new()
            .name("watcher".into())
            .spawn(move || watcher.run())
            .map_err(system("starting the watcher thread"))?;
        let rate = Mutex::new((Instant::now(), 0, 0.0));
        let (released, replacement) = (AtomicBool::new(false), Mutex::new(replacement));
        let next_tree = AtomicU32::new(0);
        Ok(Self {
            root,
            parent,
            choice,
            commands,
            bell,
            requests,
            shared,
            managed,
            released,
            replacement,
            rate,
            estate,
            trees,
            first,
            merged_peak_pages: AtomicU64::new(0),
            local: Mutex::new(local),
            next_tree,
            stays: false,
            faults: Mutex::new(Some(faults)),
        })
    }

    /// Ends the pager once nobody has pages in its store any more. Stores of others that keep what they were given for ever are
    /// told to forget it, which is waited for: seconds at most, where they do not answer.
    pub fn end(&self) {
        let faults = self.faults.lock().unwrap_or_else(PoisonError::into_inner).take();
        let _ = self.commands.send(Command::End);
        // The watcher may look after nobody any more.
        guardian::hurry(std::process::id().cast_signed(), Class::Normal);
        self.bell.ring();
        faults.into_iter().for_each(|faults| drop(faults.join()));
        guardian::dismiss();
    }

    /// Whether another pager could take over, as far as was told of late: not while a child just forked has nobody else who holds its
    /// userfaultfd, nor where not all that it must know has room.
    pub fn can_be_outlived(&self) -> bool {
        let told = &self.shared;
        let all_are_kept = told.orphans.load(Relaxed) == 0 || guardian::ours().is_some();
        self.estate.is_some() && all_are_kept && !told.unheritable.load(Relaxed)
    }

    /// Has no process in the middle of anything from now on, in order that this one may end at once and another pager take over. False,
    /// and everything goes on, where that does not come soon, or another could not take over now.
    pub fn stand_still(&self) -> bool {
        let ((still, stands), (stay, until)) = (channel(), channel());
        let _ = self.requests.send(Request::StandStill(still, until));
        if stands.recv_timeout(STILL_WITHIN).is_err() {
            return false;
        }
        // Only the fault thread knows which forks it has read of: the watcher, which has stopped, would not hear of the last.
        let ((halted, halts), (halt, until)) = (channel(), channel());
        let _ = self.commands.send(Command::Halt { stands: halted, until });
        self.bell.ring();
        let stands = halts.recv_timeout(STILL_WITHIN) == Ok(true);
        if stands {
            std::mem::forget((stay, halt));
        }
        stands
    }

    /// The counters now.
    pub fn snapshot(&self) -> Snapshot {
        let mut snapshot = self.shared.snapshot();
        snapshot.pids = self.managed.lock().map(|pids| pids.clone()).unwrap_or_default();
        snapshot.pid = match self.parent {
            Some(_) => snapshot.pids.first().copied().unwrap_or(0),
            None => self.root,
        };
        let Settings { policy, evict, scope, block } = self.replacement();
        snapshot.policy = policy.name().into();
        snapshot.evict = evict.name().into();
        snapshot.scope = scope.name().into();
        snapshot.block = block.name().into();
        self.tell_merged(&mut snapshot);
        if let Ok(mut rate) = self.rate.lock() {
            let (since, faults, _) = *rate;
            let passed = since.elapsed().as_secs_f64();
            if passed >= 0.5 {
                *rate = (Instant::now(), snapshot.faults, (snapshot.faults - faults) as f64 / passed);
            }
            snapshot.faults_per_s = rate.2;
        }
        snapshot
    }

    /// Which mappings are managed.
    pub fn choice(&self) -> Choice {
        self.choice
    }

    fn tell_merged(&self, snapshot: &mut Snapshot) {
        let mut tallies = self.trees.tallies().into_iter().chain([Arc::clone(&self.first)]);
        snapshot.share_pages = tallies.any(|tally| tally.merges.load(Relaxed));
        if snapshot.share_pages {
            let merged = Merged::of_all(&snapshot.pids);
            self.merged_peak_pages.fetch_max(merged.pages, Relaxed);
            snapshot.merged_bytes = merged.pages * PAGE_BYTES_U64;
            snapshot.merged_profit_bytes = merged.profit_bytes;
        }
        snapshot.merged_peak_bytes = self.merged_peak_pages.load(Relaxed) * PAGE_BYTES_U64;
    }

    /// Changes the budget; eviction down to it happens in the background.
    pub fn set_local(&self, local: Local) {
        self.estate.iter().for_each(|estate| estate.set_local(local));
        let _ = self.commands.send(Command::Budget(budget(local)));
        self.bell.ring();
        let _ = self.requests.send(Request::Budget(local));
    }

    /// Which pages leave, when and whose.
    pub fn replacement(&self) -> Settings {
        *self.replacement.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes that, from what it is; policies take over what is in targets.
    pub fn change_replacement(&self, change: &mut dyn FnMut(&mut Settings)) {
        // Sent under the lock: what was sent last is what is remembered.
        let mut settings = self.replacement.lock().unwrap_or_else(PoisonError::into_inner);
        let before = *settings;
        change(&mut settings);
        if *settings != before {
            self.estate.iter().for_each(|estate| estate.set_settings(*settings));
            let _ = self.commands.send(Command::Replacement(*settings));
            self.bell.ring();
        }
    }

    /// Brings every page home and leaves nothing behind. `progress` is told pages done and pages in all.
    ///
    /// # Errors
    /// When the target's own memory limit leaves no room; everything stays managed then.
    pub fn detach(&self, progress: &mut dyn FnMut(u64, u64)) -> Result<(), Error> {
        let result = self.hear_departure(Request::Release, progress);
        if let Some(Ok(())) = result {
            self.released.store(true, Relaxed);
        }
        result.unwrap_or(Ok(()))
    }

    /// Asks for a departure, and tells of its progress; none where nobody is left to answer.
    fn hear_departure(
        &self,
        request: impl FnOnce(Sender<Departure>) -> Request,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Option<Result<(), Error>> {
        let (reply, answer) = channel();
        let _ = self.requests.send(request(reply));
        let mut all = 0;
        for step in answer {
            match step {
                Departure::Left(left) => {
                    all = all.max(left);
                    progress(all - left, all);
                }
                Departure::Done(result) => return Some(result.inspect(|()| progress(all, all))),
            }
        }
        None
    }

    /// Whether any managed process is left, or one that may be managed yet. If not, there will be none again.
    pub fn has_targets(&self) -> bool {
        if self.released.load(Relaxed) {
            return false;
        }
        if self.stays {
            return true;
        }
        let managed = self.managed.lock().is_ok_and(|pids| !pids.is_empty()) || self.shared.orphans.load(Relaxed) > 0;
        let alive = |pid| procfs::living_thread(pid).is_some();
        let own = std::process::id().cast_signed();
        managed
            || self.parent.map_or_else(
                || alive(self.root),
                |parent| procfs::children(parent).unwrap_or_default().into_iter().any(|pid| pid != own && alive(pid)),
            )
            || self.is_anyone_left()
    }

    /// What was published is late, and a child of which nobody has told yet would read zeros without this pager.
    fn is_anyone_left(&self) -> bool {
        let (reply, answer) = channel();
        let _ = self.requests.send(Request::IsAnyoneLeft(reply));
        answer.recv().unwrap_or(false)
    }
}

fn budget(local: Local) -> Budget {
    match local {
        Local::Bytes(bytes) => Budget::Pages((bytes / PAGE_BYTES_U64).max(1)),
        Local::Percent(percent) => {
            Budget::Percent { percent: percent.into(), floor_pages: LOCAL_FLOOR_BYTES / PAGE_BYTES_U64 }
        }
        Local::All => Budget::Pages(u64::MAX),
    }
}

//! A pager at work, as the control socket and the command line see it.
//!
//! Invariants: at most one detachment is under way; once it has succeeded the pages are home and nothing else is asked
//! of the pager but its counters; a failed one leaves everything managed.

use crate::daemon::{Host, TargetListing};
use crate::recorder::Totals;
use crate::stops;
use crate::trace::FileRecorder;
use serde::{Deserialize, Serialize};
use spillway_core::policy::{SettingError, Settings};
use spillway_pager::{Choice, Local, Pager, Share, Snapshot, TreeSnapshot};
use spillway_store::vault::VERSION;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long the end of the process waits for answers that are being sent.
const ANSWERS_LIMIT: Duration = Duration::from_secs(1);

/// How long, and how often, a pager is asked to stand still: what hinders it is soon over, as a rule.
const STILL_WITHIN: Duration = Duration::from_secs(1);
const STILL_AGAIN: Duration = Duration::from_millis(5);

/// What the command line asks of a pager: [`Pager`], or a stand-in under test.
pub(crate) trait Paging: Send + Sync {
    /// The counters now.
    fn snapshot(&self) -> Snapshot;
    /// Changes the budget.
    fn set_local(&self, local: Local);
    /// Changes the replacement settings, from what they are.
    fn change_replacement(&self, change: &mut dyn FnMut(&mut Settings));
    /// Brings all pages home.
    fn detach(&self, progress: &mut dyn FnMut(u64, u64)) -> Result<(), String>;
    /// Whether any process is managed, or may be yet. If not, there will be none again.
    fn has_targets(&self) -> bool;
    /// Whether another pager could take over now.
    fn can_be_outlived(&self) -> bool;
    /// Has no process in the middle of anything from now on; false, and everything goes on, where that cannot be.
    fn stand_still(&self) -> bool;
    /// Manages a process with its descendants, now or when they have grown.
    fn adopt_tree(&self, pid: i32, at_once: bool, share: Share, shares: bool) -> Result<(), String>;
    /// Whether equal pages of one target, or of all, and of others are kept once in memory.
    fn share_pages(&self, pid: Option<i32>, on: bool) -> Result<(), String>;
    /// Changes what one target may have.
    fn change_share(&self, pid: i32, change: &mut dyn FnMut(&mut Share)) -> Result<(), String>;
    /// Lets one target go.
    fn release_tree(&self, pid: i32, progress: &mut dyn FnMut(u64, u64)) -> Result<(), String>;
    /// All targets, and those that have ended of late.
    fn trees(&self) -> Vec<TreeSnapshot>;
    /// Changes the budget, if what is promised to targets fits into it.
    fn resize(&self, local: Local) -> Result<(), String>;
    /// Which mappings are managed.
    fn choice(&self) -> Choice;
    /// Ends what serves them, once there are none.
    fn end(&self);
}

impl Paging for Pager {
    fn end(&self) {
        Self::end(self);
    }

    fn can_be_outlived(&self) -> bool {
        Self::can_be_outlived(self)
    }

    fn stand_still(&self) -> bool {
        Self::stand_still(self)
    }

    fn snapshot(&self) -> Snapshot {
        Self::snapshot(self)
    }

    fn set_local(&self, local: Local) {
        Self::set_local(self, local);
    }

    fn change_replacement(&self, change: &mut dyn FnMut(&mut Settings)) {
        Self::change_replacement(self, change);
    }

    fn detach(&self, progress: &mut dyn FnMut(u64, u64)) -> Result<(), String> {
        Self::detach(self, progress).map_err(|error| error.to_string())
    }

    fn has_targets(&self) -> bool {
        Self::has_targets(self)
    }

    fn adopt_tree(&self, pid: i32, at_once: bool, share: Share, shares: bool) -> Result<(), String> {
        Self::adopt_tree(self, pid, at_once, share, shares).map_err(|error| error.to_string())
    }

    fn share_pages(&self, pid: Option<i32>, on: bool) -> Result<(), String> {
        Self::share_pages(self, pid, on).map_err(|error| error.to_string())
    }

    fn change_share(&self, pid: i32, change: &mut dyn FnMut(&mut Share)) -> Result<(), String> {
        Self::change_share(self, pid, change).map_err(|error| error.to_string())
    }

    fn release_tree(&self, pid: i32, progress: &mut dyn FnMut(u64, u64)) -> Result<(), String> {
        Self::release_tree(self, pid, progress).map_err(|error| error.to_string())
    }

    fn trees(&self) -> Vec<TreeSnapshot> {
        Self::trees(self)
    }

    fn resize(&self, local: Local) -> Result<(), String> {
        Self::resize(self, local).map_err(|error| error.to_string())
    }

    fn choice(&self) -> Choice {
        Self::choice(self)
    }
}

/// How far a detachment is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Detachment {
    /// None was asked for, or the last one failed.
    None,
    /// Pages done and pages in all, since when.
    Running(u64, u64, Instant),
    /// All pages are home.
    Done,
}

impl Detachment {
    /// Whether everything is managed as ever.
    #[cfg(test)]
    pub(crate) fn is_none(self) -> bool {
        matches!(self, Self::None)
    }
}

/// A pager and what its host knows beyond it.
pub(crate) struct Service<P = Pager> {
    pager: P,
    /// The process that stands for the tree; 0 as long as it is not started.
    target: AtomicI32,
    /// The `spillway run` process, or 0.
    front: i32,
    /// Whether the front stopped itself because the target had stopped.
    front_stopping: AtomicBool,
    detachment: Mutex<Detachment>,
    /// What writes down what the pager sees, if anything does.
    recorder: Mutex<Option<FileRecorder>>,
    /// Requests that were read and whose answers are not yet sent.
    answering: AtomicUsize,
    /// The most that was seen in the pool.
    stored_peak: Mutex<StoredPeak>,
    /// Where its pages are, as anyone may read it; empty where nobody is to know.
    pool: String,
    /// Where this is a daemon.
    host: Option<Host>,
}

/// In bytes. Least was local at one moment, and most was kept at another: what was kept came home, and left unchanged.
#[derive(Default)]
struct StoredPeak {
    stored: u64,
    kept: u64,
    /// What that which was kept took then.
    compressed: u64,
}

/// A request under way.
pub(crate) struct Answering<'a>(&'a AtomicUsize);

impl Drop for Answering<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// One pager in a listing: what it manages, and its counters.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Listing {
    /// The process that serves the faults.
    pub(crate) pager_pid: i32,
    /// The `spillway run` process, or 0.
    pub(crate) front_pid: i32,
    /// Whether all pages went home, so that nothing is managed any more.
    pub(crate) detached: bool,
    /// Whether this is a daemon.
    #[serde(default)]
    pub(crate) daemon: bool,
    /// Where its pages are: a URL, without a password unless this is a daemon.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) pool: String,
    /// What a daemon manages, also when that is nothing; no word of it where this is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) targets: Option<Vec<TargetListing>>,
    /// The counters, `pid` among them.
    #[serde(flatten)]
    pub(crate) snapshot: Snapshot,
}

impl<P: Paging> Service<P> {
    /// Serves `pager`, whose tree is known by `target`; `front` is the `spillway run` process, or 0.
    pub(crate) fn new(pager: P, target: i32, front: i32) -> Self {
        Self {
            pager,
            target: AtomicI32::new(target),
            front,
            front_stopping: AtomicBool::new(false),
            detachment: Mutex::new(Detachment::None),
            recorder: Mutex::new(None),
            answering: AtomicUsize::new(0),
            stored_peak: Mutex::default(),
            pool: String::new(),
            host: None,
        }
    }

    /// The same, of a pager whose pages are in the pool of this URL.
    pub(crate) fn in_pool(self, url: &str) -> Self {
        Self { pool: spillway_store::pool::without_password(url), ..self }
    }

    /// The same, of a daemon.
    pub(crate) fn of_daemon(self, host: Host) -> Self {
        Self { host: Some(host), ..self }
    }

    /// What it knows beyond its pager, where this is a daemon.
    pub(crate) fn host(&self) -> Option<&Host> {
        self.host.as_ref()
    }

    /// The pager, of one that serves.
    pub(crate) fn pager(&self) -> &P {
        &self.pager
    }

    /// The same, of a pager that records.
    pub(crate) fn recording(self, recorder: Option<FileRecorder>) -> Self {
        Self { recorder: Mutex::new(recorder), ..self }
    }

    /// Ends the recording, if there is one.
    pub(crate) fn end_recording(&self) -> Option<Result<Totals, String>> {
        let recorder = self.recorder.lock().unwrap_or_else(PoisonError::into_inner).take()?;
        Some(recorder.finish().map(|(_, totals)| totals))
    }

    /// The process that stands for the tree; 0 as long as it is not started.
    pub(crate) fn target(&self) -> i32 {
        self.target.load(Ordering::Relaxed)
    }

    /// Tells which process stands for the tree.
    pub(crate) fn set_target(&self, pid: i32) {
        self.target.store(pid, Ordering::Relaxed);
    }

    /// Tells whether the front is about to stop itself, or goes on.
    pub(crate) fn set_front_stopping(&self, now: bool) {
        self.front_stopping.store(now, Ordering::Relaxed);
    }

    /// Looks after a stopped front; see [`stops`].
    pub(crate) fn mend_stops(&self) {
        stops::mend(self.front, self.target(), self.front_stopping.load(Ordering::Relaxed));
    }

    /// The counters now. Once nothing is managed any more, what is stored is the most that was: now it is nothing.
    pub(crate) fn snapshot(&self) -> Snapshot {
        self.counted(false)
    }

    fn counted(&self, is_last: bool) -> Snapshot {
        let mut now = Snapshot { pid: self.target(), ..self.pager.snapshot() };
        let mut peak = self.stored_peak.lock().unwrap_or_else(PoisonError::into_inner);
        peak.stored = peak.stored.max(now.stored_bytes);
        if now.kept_bytes >= peak.kept {
            (peak.kept, peak.compressed) = (now.kept_bytes, now.stored_compressed_bytes);
        }
        if is_last || now.processes == 0 || self.is_detached() {
            (now.stored_bytes, now.kept_bytes, now.stored_compressed_bytes) = (peak.stored, peak.kept, peak.compressed);
        }
        now
    }

    /// The counters now, and who is who.
    pub(crate) fn listing(&self) -> Listing {
        let pager_pid = i32::try_from(std::process::id()).unwrap_or(0);
        // Counting them makes the pager publish what it knows now.
        let targets = self.host.as_ref().map(|host| {
            let targets = self.pager.trees().into_iter().map(|tree| host.listing(tree));
            targets.filter(|target| !target.ended).collect()
        });
        let snapshot = self.snapshot();
        Listing {
            pager_pid,
            front_pid: self.front,
            detached: self.is_detached(),
            daemon: self.host.is_some(),
            pool: self.host.as_ref().map_or_else(|| self.pool.clone(), |host| host.pool.clone()),
            targets,
            snapshot,
        }
    }

    /// The same of a program that has ended, of which the pager may not have heard yet.
    pub(crate) fn last_listing(&self) -> Listing {
        Listing { snapshot: self.counted(true), ..self.listing() }
    }

    /// Has everything stand still for a pager that knows this layout: this process is to end at once then. If that cannot be, why not.
    pub(crate) fn hand_over(&self, version: u64) -> Result<(), String> {
        if version != VERSION {
            return Err(format!(
                "this pager writes layout {VERSION}, and the other reads {version}: detach, then attach"
            ));
        }
        if !matches!(*self.detachment.lock().unwrap_or_else(PoisonError::into_inner), Detachment::None) {
            return Err("this pager is letting its processes go".into());
        }
        if self.pager.snapshot().unheritable {
            return Err("there are too many processes or mappings for another pager to take over: try again when there are fewer".into());
        }
        if !self.pager.can_be_outlived() {
            let why = "its pool is one that ends with it (a file, or one that is slow or faulty on purpose), or a child was just forked and there is no guardian";
            return Err(format!("no other pager can take over from this one: {why}"));
        }
        let begun = Instant::now();
        while !self.pager.stand_still() {
            if begun.elapsed() > STILL_WITHIN {
                return Err("a process is just being adopted, or a child was just forked: try again".into());
            }
            std::thread::sleep(STILL_AGAIN);
        }
        Ok(())
    }

    /// Changes the budget.
    pub(crate) fn set_local(&self, local: Local) {
        self.pager.set_local(local);
    }

    /// Changes replacement settings, given as `KEY=VALUE`: all of them, or none when one is wrong.
    pub(crate) fn set(&self, pairs: &[String]) -> Result<(), SettingError> {
        let mut done = Ok(());
        self.pager.change_replacement(&mut |settings| {
            let mut changed = *settings;
            done = pairs.iter().try_for_each(|pair| changed.set(pair));
            if done.is_ok() {
                *settings = changed;
            }
        });
        done
    }

    /// The replacement settings now.
    #[cfg(test)]
    pub(crate) fn replacement(&self) -> Settings {
        let mut now = Settings::default();
        self.pager.change_replacement(&mut |settings| now = *settings);
        now
    }

    /// Whether any process is left to serve.
    pub(crate) fn has_targets(&self) -> bool {
        self.pager.has_targets()
    }

    /// How far a detachment is.
    pub(crate) fn detachment(&self) -> Detachment {
        *self.state()
    }

    /// Whether all pages are home for good.
    pub(crate) fn is_detached(&self) -> bool {
        matches!(self.detachment(), Detachment::Done)
    }

    /// Counts a request as under way until the guard is dropped.
    pub(crate) fn answering(&self) -> Answering<'_> {
        self.answering.fetch_add(1, Ordering::Relaxed);
        Answering(&self.answering)
    }

    /// Ends the pager, after all targets have ended or were let go: gives whoever asked for that the time to hear of it, and the
    /// store the time to forget what it has.
    pub(crate) fn end(&self) {
        let deadline = Instant::now() + ANSWERS_LIMIT;
        while self.answering.load(Ordering::Relaxed) > 0 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.pager.end();
    }

    /// Brings all pages home; `progress` is told pages done and pages in all.
    pub(crate) fn detach(&self, progress: &mut dyn FnMut(u64, u64)) -> Result<(), String> {
        let since = Instant::now();
        match &mut *self.state() {
            Detachment::Done => return Ok(()),
            Detachment::Running(..) => return Err("the pages are on their way home already".into()),
            state @ Detachment::None => *state = Detachment::Running(0, 0, since),
        }
        let done = self.pager.detach(&mut |done, total| {
            *self.state() = Detachment::Running(done, total, since);
            progress(done, total);
        });
        *self.state() = if done.is_ok() { Detachment::Done } else { Detachment::None };
        done
    }

    /// A panic elsewhere cannot leave this value half-written.
    fn state(&self) -> MutexGuard<'_, Detachment> {
        self.detachment.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is stored, kept, and compressed, and in how many processes; a detachment that waits until it is told how to end.
    struct Fake {
        state: Mutex<(u64, u64, u64, u64)>,
        end: Mutex<std::sync::mpsc::Receiver<Result<(), String>>>,
        /// How often it was asked to stand still, which it does when asked so often; never if 0.
        asked: AtomicUsize,
        stands_when_asked: usize,
    }

    impl Fake {
        fn new(end: std::sync::mpsc::Receiver<Result<(), String>>) -> Self {
            let state = (0, 0, 0, 1);
            Self { state: Mutex::new(state), end: Mutex::new(end), asked: AtomicUsize::new(0), stands_when_asked: 0 }
        }
    }

    impl Paging for Fake {
        fn end(&self) {}

        fn can_be_outlived(&self) -> bool {
            true
        }

        fn stand_still(&self) -> bool {
            self.asked.fetch_add(1, Ordering::Relaxed) + 1 == self.stands_when_asked
        }

        fn snapshot(&self) -> Snapshot {
            let (stored, kept, compressed, processes) = *self.state.lock().expect("sound");
            Snapshot {
                stored_bytes: stored,
                kept_bytes: kept,
                stored_compressed_bytes: compressed,
                processes,
                ..Snapshot::default()
            }
        }
        fn set_local(&self, _: Local) {}
        fn change_replacement(&self, _: &mut dyn FnMut(&mut Settings)) {}
        fn detach(&self, progress: &mut dyn FnMut(u64, u64)) -> Result<(), String> {
            progress(1, 2);
            self.end.lock().expect("sound").recv().expect("told")
        }
        fn has_targets(&self) -> bool {
            self.snapshot().processes > 0
        }
        fn adopt_tree(&self, _: i32, _: bool, _: Share, _: bool) -> Result<(), String> {
            Ok(())
        }
        fn share_pages(&self, _: Option<i32>, _: bool) -> Result<(), String> {
            Ok(())
        }
        fn change_share(&self, _: i32, _: &mut dyn FnMut(&mut Share)) -> Result<(), String> {
            Ok(())
        }
        fn release_tree(&self, _: i32, _: &mut dyn FnMut(u64, u64)) -> Result<(), String> {
            Ok(())
        }
        fn trees(&self) -> Vec<TreeSnapshot> {
            Vec::new()
        }
        fn resize(&self, _: Local) -> Result<(), String> {
            Ok(())
        }
        fn choice(&self) -> Choice {
            Choice::default()
        }
    }

    #[test]
    fn the_last_word_on_what_was_stored_is_the_most() {
        let (_told, end) = std::sync::mpsc::channel();
        let service = Service::new(Fake::new(end), 1, 0);
        for (stored, kept, compressed, processes, expected) in [
            (10, 10, 5, 1, (10, 10, 5)),
            (30, 30, 15, 1, (30, 30, 15)),
            // Some has come home, and the pool keeps copies of it.
            (29, 40, 18, 1, (29, 40, 18)),
            (20, 35, 20, 2, (20, 35, 20)),
            (0, 0, 0, 0, (30, 40, 18)),
            (0, 0, 0, 0, (30, 40, 18)),
        ] {
            *service.pager.state.lock().expect("sound") = (stored, kept, compressed, processes);
            let now = service.snapshot();
            assert_eq!((now.stored_bytes, now.kept_bytes, now.stored_compressed_bytes), expected);
        }
        // Its end may not have been heard of.
        *service.pager.state.lock().expect("sound") = (1, 1, 1, 1);
        let last = service.last_listing().snapshot;
        assert_eq!((last.stored_bytes, last.kept_bytes, last.stored_compressed_bytes), (30, 40, 18));
    }

    /// On a busy machine an upgrade was refused because just then a call was held up.
    #[test]
    fn who_cannot_stand_still_at_once_is_asked_again() {
        for (stands_when_asked, done) in [(1, true), (4, true), (0, false)] {
            let (_told, end) = std::sync::mpsc::channel();
            let service = Service::new(Fake { stands_when_asked, ..Fake::new(end) }, 1, 0);
            assert_eq!(service.hand_over(VERSION).is_ok(), done);
            let asked = service.pager.asked.load(Ordering::Relaxed);
            assert!(if done { asked == stands_when_asked } else { asked > 4 }, "{asked}");
        }
    }

    #[test]
    fn one_detachment_at_a_time_and_a_failed_one_may_be_tried_again() {
        let (tell, end) = std::sync::mpsc::channel();
        let service = Service::new(Fake::new(end), 1, 0);
        std::thread::scope(|scope| {
            for (end, done) in [(Err("no room".to_owned()), false), (Ok(()), true)] {
                let (begun, begins) = std::sync::mpsc::channel();
                let service = &service;
                let first = scope.spawn(move || service.detach(&mut |_, _| begun.send(()).expect("heard")));
                begins.recv().expect("begun");
                assert!(matches!(service.detachment(), Detachment::Running(1, 2, _)));
                assert!(service.detach(&mut |_, _| {}).is_err_and(|text| text.contains("on their way")));
                tell.send(end.clone()).expect("told");
                assert_eq!(first.join().expect("joined"), end);
                assert_eq!(service.is_detached(), done);
            }
        });
        assert_eq!(service.detach(&mut |_, _| {}), Ok(()), "again is no error");
    }
}

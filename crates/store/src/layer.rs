//! A store made slower or worse, to see what that does: `delay=` and `fault=` of pools' URLs.
//!
//! Whatever the store below answers, at once or later, is held back until it is due, or turned into an error. Wrong bytes
//! are not let through: the stores below verify checksums, so damage shows as `Corrupt`. For tests and studies: this
//! layer allocates.

use std::collections::{HashMap, HashSet, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{Timespec, epoll};
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags};
use spillway_core::Page;

use crate::pool::OpenError;
use crate::{Completion, Got, Handle, Protection, Put, Status, Store, StoreError, Urgency};

/// What is done to a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Config {
    /// Added to each put and get.
    pub delay: Duration,
    /// One in so many puts is declined; none for zero.
    pub decline_one_in: u32,
    /// One in so many gets finds nothing.
    pub lose_one_in: u32,
    /// One in so many gets finds something else.
    pub corrupt_one_in: u32,
    /// One in so many puts and gets takes `stall` longer.
    pub stall_one_in: u32,
    /// How long.
    pub stall: Duration,
}

enum Outcome {
    Put(Result<(), StoreError>),
    Got(Result<Box<Page>, StoreError>),
}

struct Held {
    handle: Handle,
    outcome: Outcome,
    due: Instant,
}

/// A store made slower or worse.
pub struct Layer {
    inner: Box<dyn Store>,
    config: Config,
    /// References by handle: with the last one, what is held is called off.
    references: HashMap<Handle, u32>,
    held: VecDeque<Held>,
    /// Handles of puts that the store below has answered and this layer has not.
    putting: HashSet<Handle>,
    poller: OwnedFd,
    timer: OwnedFd,
    random: u64,
}

impl Layer {
    /// Does this to `inner`.
    ///
    /// # Errors
    /// When the kernel gives no timer.
    pub fn new(inner: Box<dyn Store>, config: Config) -> Result<Self, OpenError> {
        let poller = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(OpenError::system)?;
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let timer = rustix::time::timerfd_create(TimerfdClockId::Monotonic, flags).map_err(OpenError::system)?;
        let add = |descriptor: BorrowedFd<'_>| {
            let data = epoll::EventData::new_u64(0);
            epoll::add(&poller, descriptor, data, epoll::EventFlags::IN).map_err(OpenError::system)
        };
        add(timer.as_fd())?;
        inner.descriptor().map_or(Ok(()), add)?;
        Ok(Self {
            inner,
            config,
            references: HashMap::new(),
            held: VecDeque::new(),
            putting: HashSet::new(),
            poller,
            timer,
            random: 0x9e37_79b9_7f4a_7c15,
        })
    }

    fn happens(&mut self, one_in: u32) -> bool {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        one_in > 0 && (self.random >> 20).is_multiple_of(u64::from(one_in))
    }

    fn hold(&mut self, handle: Handle, outcome: Outcome) {
        let outcome = match outcome {
            Outcome::Got(Ok(_)) if self.happens(self.config.lose_one_in) => Outcome::Got(Err(StoreError::Lost)),
            Outcome::Got(Ok(_)) if self.happens(self.config.corrupt_one_in) => Outcome::Got(Err(StoreError::Corrupt)),
            outcome => outcome,
        };
        let stall = if self.happens(self.config.stall_one_in) { self.config.stall } else { Duration::ZERO };
        if matches!(outcome, Outcome::Put(_)) {
            self.putting.insert(handle);
        }
        self.held.push_back(Held { handle, outcome, due: Instant::now() + self.config.delay + stall });
    }

    fn forget(&mut self, handle: Handle) {
        self.references.remove(&handle);
        self.putting.remove(&handle);
        self.held.retain(|held| held.handle != handle);
    }

    fn arm(&self) {
        let Some(first) = self.held.iter().map(|held| held.due).min() else { return };
        let wait = first.saturating_duration_since(Instant::now()).max(Duration::from_nanos(1));
        let span = Timespec {
            tv_sec: i64::try_from(wait.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(wait.subsec_nanos()),
        };
        let once = Itimerspec { it_interval: Timespec::default(), it_value: span };
        let _ = rustix::time::timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once);
    }

    fn deliver(&mut self, held: Held, done: &mut dyn FnMut(Completion<'_>)) {
        let handle = held.handle;
        match held.outcome {
            Outcome::Got(page) => done(Completion::Got { handle, page: page.as_deref().map_err(|error| *error) }),
            Outcome::Put(result) => {
                self.putting.remove(&handle);
                if result.is_err() {
                    self.references.remove(&handle);
                }
                done(Completion::Put { handle, result });
            }
        }
    }
}

impl Store for Layer {
    fn put(&mut self, page: &Page, previous: Option<Handle>) -> Result<Put, StoreError> {
        if self.happens(self.config.decline_one_in) {
            return Err(StoreError::Unavailable);
        }
        let put = self.inner.put(page, previous)?;
        let (Put::Unchanged(handle) | Put::Stored(handle) | Put::Pending(handle)) = put;
        if put == Put::Unchanged(handle) {
            let under_way = self.putting.contains(&handle);
            return Ok(if under_way { Put::Pending(handle) } else { put });
        }
        if previous == Some(handle) && put == Put::Pending(handle) {
            return Ok(put);
        }
        if let Some(previous) = previous {
            let references = self.references.entry(previous).or_default();
            *references = references.saturating_sub(1);
            if *references == 0 {
                self.forget(previous);
            }
        }
        let references = self.references.entry(handle).or_default();
        *references += 1;
        if let Put::Stored(handle) = put {
            // A page that was there already is there at once, as it would be without this layer.
            if *references > 1 && !self.putting.contains(&handle) {
                return Ok(put);
            }
            if *references == 1 {
                self.hold(handle, Outcome::Put(Ok(())));
            }
        }
        Ok(Put::Pending(handle))
    }

    fn get(&mut self, handle: Handle, urgency: Urgency, into: &mut Page) -> Result<Got, StoreError> {
        if self.held.iter().any(|held| held.handle == handle && matches!(held.outcome, Outcome::Got(_))) {
            return Ok(Got::Pending);
        }
        let putting = self.putting.contains(&handle);
        match self.inner.get(handle, urgency, into)? {
            Got::Here if !putting => {
                self.hold(handle, Outcome::Got(Ok(Box::new(*into))));
                Ok(Got::Pending)
            }
            got => Ok(got),
        }
    }

    fn share(&mut self, handle: Handle) -> Handle {
        let handle = self.inner.share(handle);
        *self.references.entry(handle).or_default() += 1;
        handle
    }

    fn free(&mut self, handle: Handle) {
        self.inner.free(handle);
        let references = self.references.entry(handle).or_default();
        *references = references.saturating_sub(1);
        if *references == 0 {
            self.forget(handle);
        }
    }

    fn status(&self) -> Status {
        self.inner.status()
    }

    fn protection(&self) -> Option<Protection> {
        self.inner.protection()
    }

    fn burdens(&mut self, handles: &[Handle]) -> u64 {
        self.inner.burdens(handles)
    }

    fn has_burdens(&mut self) -> bool {
        self.inner.has_burdens()
    }

    fn tidy(&mut self) -> bool {
        self.inner.tidy()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.poller.as_fd())
    }

    fn flush(&mut self) {
        self.inner.flush();
        self.arm();
    }

    fn progress(&mut self, done: &mut dyn FnMut(Completion<'_>)) {
        let mut expirations = [0; 8];
        let _ = rustix::io::read(&self.timer, &mut expirations);
        let mut came = Vec::new();
        self.inner.progress(&mut |completion| {
            came.push(match completion {
                Completion::Got { handle, page } => (handle, Outcome::Got(page.map(|page| Box::new(*page)))),
                Completion::Put { handle, result } => (handle, Outcome::Put(result)),
            });
        });
        for (handle, outcome) in came {
            if let Outcome::Put(Err(_)) = outcome {
                // The store below may give the handle anew.
                self.deliver(Held { handle, outcome, due: Instant::now() }, done);
            } else {
                self.hold(handle, outcome);
            }
        }
        let now = Instant::now();
        while let Some(at) = self.held.iter().position(|held| held.due <= now) {
            let held = self.held.remove(at).expect("just found");
            self.deliver(held, done);
        }
        self.arm();
    }

    fn accepts(&self) -> bool {
        self.inner.accepts()
    }
}

//! `emulated:`, memory that takes its time: the memory blade of Lim et al. (papers/000, section 4: a delay for each page,
//! and one transfer at a time).
//!
//! Pages are in this process. Each transfer ends `delay` after it began; with `serialize` it begins when the one before has
//! ended. A delay is shorter than a wake-up, so the last of it is spent looking at the clock.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, Timespec, epoll};
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags};
use spillway_core::{PAGE_BYTES, Page};

use crate::local::{Compression, Config, Local};
use crate::pool::{self, OpenError};
use crate::{Completion, Got, Handle, Put, Refill, Status, Store, StoreError, Urgency};

/// How long before a transfer's end the timer wakes: a wake-up takes 50 us on a virtual machine, and seldom more than this.
const EARLY: Duration = Duration::from_micros(150);
/// Transfers under way; more are not taken.
const TRANSFERS_MAX: usize = 4096;

/// Where the time comes from.
pub trait Clock: Send {
    /// Time since some start.
    fn now(&self) -> Duration;
}

/// The system's clock.
pub struct Monotonic(Instant);

impl Default for Monotonic {
    fn default() -> Self {
        Self(Instant::now())
    }
}

impl Clock for Monotonic {
    fn now(&self) -> Duration {
        self.0.elapsed()
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Put,
    Get,
}

#[derive(Clone, Copy)]
struct Transfer {
    handle: Handle,
    kind: Kind,
    due: Duration,
}

/// Memory that takes its time.
pub struct Emulated<C = Monotonic> {
    config: pool::Emulated,
    memory: Local,
    clock: C,
    /// By the time at which they end.
    transfers: VecDeque<Transfer>,
    /// Both below.
    poller: OwnedFd,
    /// Wakes up for transfers that end later.
    timer: OwnedFd,
    /// Readable while one ends so soon that a timer would be late.
    soon: OwnedFd,
    is_soon: bool,
    page: Box<Page>,
}

impl Emulated {
    /// Empty memory, and what keeps it in segments.
    ///
    /// # Errors
    /// When the kernel gives no timer.
    pub fn new(config: pool::Emulated) -> Result<(Self, Refill), OpenError> {
        Self::with_clock(config, Monotonic::default())
    }
}

impl<C: Clock> Emulated<C> {
    /// The same with a clock of the caller's.
    ///
    /// # Errors
    /// As [`Emulated::new`].
    pub fn with_clock(config: pool::Emulated, clock: C) -> Result<(Self, Refill), OpenError> {
        let size_bytes = config.size_bytes;
        let (memory, refill) = Local::new(Config { compression: Compression::None, dedupe: false, size_bytes });
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let timer = rustix::time::timerfd_create(TimerfdClockId::Monotonic, flags).map_err(OpenError::system)?;
        let flags = EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC;
        let soon = rustix::event::eventfd(0, flags).map_err(OpenError::system)?;
        let poller = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(OpenError::system)?;
        for descriptor in [&timer, &soon] {
            let data = epoll::EventData::new_u64(0);
            epoll::add(&poller, descriptor, data, epoll::EventFlags::IN).map_err(OpenError::system)?;
        }
        let transfers = VecDeque::with_capacity(TRANSFERS_MAX);
        let page = Box::new([0; PAGE_BYTES]);
        Ok((Self { config, memory, clock, transfers, poller, timer, soon, is_soon: false, page }, refill))
    }

    fn start(&mut self, handle: Handle, kind: Kind) {
        let now = self.clock.now();
        let begin = match self.transfers.back() {
            Some(last) if self.config.serialize => now.max(last.due),
            _ => now,
        };
        self.transfers.push_back(Transfer { handle, kind, due: begin + self.config.delay });
    }

    fn is_under_way(&self, handle: Handle, kind: Kind) -> bool {
        self.transfers.iter().any(|transfer| transfer.handle == handle && transfer.kind == kind)
    }

    fn call_off(&mut self, handle: Handle) {
        self.transfers.retain(|transfer| transfer.handle != handle);
    }

    fn finish(&mut self, transfer: Transfer, done: &mut dyn FnMut(Completion<'_>)) {
        let Transfer { handle, kind, .. } = transfer;
        match kind {
            Kind::Put => done(Completion::Put { handle, result: Ok(()) }),
            Kind::Get => {
                let got = self.memory.get(handle, Urgency::Demand, &mut self.page);
                done(Completion::Got { handle, page: got.map(|_| &*self.page) });
            }
        }
    }
}

impl<C: Clock> Store for Emulated<C> {
    fn put(&mut self, page: &Page, previous: Option<Handle>) -> Result<Put, StoreError> {
        if !self.accepts() {
            return Err(StoreError::Unavailable);
        }
        let last = previous.filter(|previous| self.memory.is_sole(*previous));
        match self.memory.put(page, previous)? {
            Put::Unchanged(handle) if self.is_under_way(handle, Kind::Put) => Ok(Put::Pending(handle)),
            Put::Unchanged(handle) => Ok(Put::Unchanged(handle)),
            Put::Stored(handle) | Put::Pending(handle) => {
                // The memory may use the old handle for the new page.
                last.into_iter().for_each(|last| self.call_off(last));
                self.start(handle, Kind::Put);
                Ok(Put::Pending(handle))
            }
        }
    }

    fn get(&mut self, handle: Handle, urgency: Urgency, into: &mut Page) -> Result<Got, StoreError> {
        if self.is_under_way(handle, Kind::Put) {
            return self.memory.get(handle, urgency, into);
        }
        if !self.is_under_way(handle, Kind::Get) {
            self.start(handle, Kind::Get);
        }
        Ok(Got::Pending)
    }

    fn share(&mut self, handle: Handle) -> Handle {
        self.memory.share(handle)
    }

    fn free(&mut self, handle: Handle) {
        if self.memory.is_sole(handle) {
            self.call_off(handle);
        }
        self.memory.free(handle);
    }

    fn status(&self) -> Status {
        self.memory.status()
    }

    fn tidy(&mut self) -> bool {
        self.memory.tidy()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.poller.as_fd())
    }

    fn flush(&mut self) {
        let Some(first) = self.transfers.front() else { return };
        let wait = first.due.saturating_sub(self.clock.now()).saturating_sub(EARLY);
        if wait.is_zero() {
            if !self.is_soon {
                let _ = rustix::io::write(&self.soon, &1_u64.to_ne_bytes());
                self.is_soon = true;
            }
            return;
        }
        let span = Timespec {
            tv_sec: i64::try_from(wait.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(wait.subsec_nanos()),
        };
        let once = Itimerspec { it_interval: Timespec::default(), it_value: span };
        let _ = rustix::time::timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once);
    }

    fn progress(&mut self, done: &mut dyn FnMut(Completion<'_>)) {
        let mut expirations = [0; 8];
        if std::mem::take(&mut self.is_soon) {
            let _ = rustix::io::read(&self.soon, &mut expirations);
        } else {
            let _ = rustix::io::read(&self.timer, &mut expirations);
        }
        while let Some(&first) = self.transfers.front() {
            let now = self.clock.now();
            if first.due > now + EARLY {
                break;
            }
            if first.due > now {
                std::hint::spin_loop();
                continue;
            }
            self.transfers.pop_front();
            self.finish(first, done);
        }
        self.flush();
    }

    fn accepts(&self) -> bool {
        self.transfers.len() < TRANSFERS_MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// Goes on by ten nanoseconds whenever it is looked at.
    struct Ticking(Cell<Duration>);

    impl Clock for Ticking {
        fn now(&self) -> Duration {
            self.0.set(self.0.get() + Duration::from_nanos(10));
            self.0.get()
        }
    }

    /// When each of ten gets that begin together is due, in microseconds; each is told no sooner, and 1% later at most.
    fn ends(serialize: bool) -> Vec<u128> {
        let config = pool::Emulated { delay: Duration::from_micros(4), serialize, size_bytes: None };
        let (mut store, _refill) = Emulated::with_clock(config, Ticking(Cell::default())).unwrap();
        let mut page = [0; PAGE_BYTES];
        for byte in 0..10 {
            let Ok(Put::Pending(handle)) = store.put(&[byte; PAGE_BYTES], None) else { panic!("it takes time") };
            store.progress(&mut |_| {});
            assert_eq!(store.get(handle, Urgency::Demand, &mut page), Ok(Got::Pending));
            store.call_off(handle);
        }
        let handles: Vec<Handle> = (1..=10).map(|bits| Handle::from_bits(bits).unwrap()).collect();
        let began = store.clock.0.get();
        for handle in &handles {
            assert_eq!(store.get(*handle, Urgency::Demand, &mut page), Ok(Got::Pending));
        }
        let mut ends = Vec::new();
        while let Some(first) = store.transfers.front().copied() {
            // One at a time, so that the clock can be read between them.
            let later = store.transfers.split_off(1);
            let mut told = 0;
            store.progress(&mut |_| told += 1);
            store.transfers = later;
            let late = store.clock.0.get() - first.due;
            assert!(told == 1 && late <= Duration::from_nanos(40), "{late:?}");
            ends.push((first.due - began).as_micros());
        }
        ends
    }

    #[test]
    fn transfers_take_the_time_that_they_should() {
        assert_eq!(ends(true), [4, 8, 12, 16, 20, 24, 28, 32, 36, 40]);
        assert_eq!(ends(false), [4; 10]);
    }

    /// By the system's clock: never too soon, and within 1 % in the best of many tries, as others may take the CPU at any
    /// time. A try is shorter than a turn of the scheduler, so that one can pass beside any number of busy threads.
    #[test]
    fn transfers_take_their_time_by_the_systems_clock() {
        for (micros, serialize, count) in [(4, true, 250), (1000, false, 1)] {
            let delay = Duration::from_micros(micros);
            let (mut store, _refill) = Emulated::new(pool::Emulated { delay, serialize, size_bytes: None }).unwrap();
            let mut page = [0; PAGE_BYTES];
            let mut handles = Vec::new();
            for number in 0..count {
                page[..4].copy_from_slice(&u32::to_le_bytes(number));
                let Ok(Put::Pending(handle)) = store.put(&page, None) else { panic!("it takes time") };
                handles.push(handle);
            }
            let wait_for = |store: &mut Emulated, count| {
                let mut told = 0;
                while told < count {
                    store.progress(&mut |_| told += 1);
                }
            };
            wait_for(&mut store, count);
            let should = if serialize { delay * count } else { delay };
            let mut best = Duration::MAX;
            for _ in 0..2000 {
                let began = Instant::now();
                for handle in &handles {
                    assert_eq!(store.get(*handle, Urgency::Demand, &mut page), Ok(Got::Pending));
                }
                wait_for(&mut store, count);
                best = best.min(began.elapsed());
                assert!(best >= should, "{count} of {delay:?}, one at a time {serialize}: {best:?} is too soon");
                if best <= should + should / 100 {
                    break;
                }
            }
            assert!(best <= should + should / 100, "{count} of {delay:?}, one at a time {serialize}: {best:?}");
        }
    }
}

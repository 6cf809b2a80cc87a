//! Servers as members of stripes: each chunk at the server that was named, and nowhere else.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::Timespec;
use rustix::time::{Itimerspec, TimerfdTimerFlags};
use spillway_core::Page;

use super::handles::State;
use super::protocol::Protocol;
use super::{Placement, Remote};
use crate::hash::PageHash;
use crate::stripe::members::{Chunk, Health, Members, Presence};
use crate::{Completion, Got, Handle, Inheritance, Store, StoreError, Urgency};

impl<P: Protocol> Remote<P> {
    /// The same servers, for stripes to place chunks at.
    pub(crate) fn into_members(mut self) -> Self {
        self.placement = Placement::Given;
        self
    }
}

impl<P: Protocol> Members for Remote<P> {
    fn count(&self) -> u8 {
        u8::try_from(self.servers.len()).expect("at most 255 servers")
    }

    fn now(&self) -> Instant {
        Instant::now()
    }

    fn page_hash(&self) -> PageHash {
        self.hash.clone()
    }

    fn health(&self, member: u8, now: Instant) -> Health {
        let server = &self.servers[usize::from(member)];
        Health {
            ready: server.is_ready(),
            // Before it has let us in once, nothing is expected of it.
            gone: server.epoch == 0 || self.is_gone(server, now),
            full: server.is_full(now) || server.condition.free_pages == 0,
            leaving: server.is_leaving(),
            listed: server.has_joined(),
            domain: server.domain,
            room: server.puts < self.puts_max() && self.ops.has_page(),
            life: server.valid_since,
            load: server.condition.load,
            puts: server.puts,
        }
    }

    fn silence(&self, member: u8, now: Instant) -> Duration {
        self.servers[usize::from(member)].silence(now)
    }

    fn chunk(&self, chunk: Handle, now: Instant) -> Chunk {
        let slot = self.handles.slot(chunk);
        let server = &self.servers[usize::from(slot.server)];
        let presence = match slot.state {
            State::Lost => Presence::Dead,
            State::Kept | State::Getting if !server.has(slot.epoch) => Presence::Dead,
            _ if server.is_ready() => Presence::There,
            _ if self.is_gone(server, now) => Presence::Gone,
            _ => Presence::Away,
        };
        Chunk { member: slot.server, checksum: slot.checksum, presence }
    }

    fn put(&mut self, member: u8, page: &Page, checksum: u64, now: Instant) -> Result<Handle, StoreError> {
        self.begin_put(member, page, checksum, now)
    }

    fn get(&mut self, chunk: Handle, urgency: Urgency, into: &mut Page, now: Instant) -> Result<Got, StoreError> {
        self.get_at(chunk, urgency, into, now)
    }

    fn free(&mut self, chunk: Handle) {
        Store::free(self, chunk);
    }

    fn progress(&mut self, now: Instant, done: &mut dyn FnMut(Completion<'_>)) {
        if self.alarm_at.is_some_and(|at| at <= now) {
            let _ = rustix::io::read(&self.alarm, &mut [0; 8]);
            self.alarm_at = None;
        }
        self.progress_at(now, done);
    }

    fn flush(&mut self, now: Instant) {
        self.flush_at(now);
    }

    fn tidy(&mut self) -> bool {
        Store::tidy(self)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.poller.as_fd())
    }

    fn wake_at(&mut self, at: Instant, now: Instant) {
        if self.alarm_at.is_some_and(|set| set <= at) {
            return;
        }
        self.alarm_at = Some(at);
        let wait = at.saturating_duration_since(now).max(Duration::from_nanos(1));
        let span = Timespec {
            tv_sec: i64::try_from(wait.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(wait.subsec_nanos()),
        };
        let once = Itimerspec { it_interval: Timespec::default(), it_value: span };
        let _ = rustix::time::timerfd_settime(&self.alarm, TimerfdTimerFlags::empty(), &once);
    }

    fn inherit(&mut self, chunk: Handle) -> bool {
        let kept = chunk.bits() <= self.handles.len() && self.handles.slot(chunk).state == State::Kept;
        if kept {
            self.handles.count(chunk);
        }
        kept
    }

    fn inherit_no_more(&mut self) {
        self.all_counted();
    }

    fn usage(&self) -> (u64, u64) {
        (self.handles.references, self.handles.memory_bytes() + self.ops.memory_bytes())
    }
}

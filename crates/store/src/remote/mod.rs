//! Pools on other hosts: one store for all protocols.
//!
//! A page lives at one server, chosen when it is put. Invariants:
//! - A handle names one page for as long as anyone refers to it, and is given anew only after the server has forgotten
//!   that page (`handles.rs`), so neither a late answer nor a late request can mix pages up.
//! - Every page is verified against the checksum that was kept here, with a key that no server knows.
//! - A put is complete when the server has said so. What is under way when a connection ends is told at once
//!   ([`StoreError::Unavailable`]: the pager still has the page) or, for a get, asked again until its deadline.
//! - Nothing blocks, and gets allocate nothing; under TLS, rustls does for each record.

mod answers;
mod connection;
mod evacuate;
pub(crate) mod handles;
mod inherit;
pub(crate) mod ledger;
#[cfg(test)]
mod lent;
pub(crate) mod lookups;
mod members;
pub(crate) mod names;
pub(crate) mod news;
mod ops;
pub(crate) mod protocol;
pub(crate) mod refusals;
mod requests;
pub(crate) mod server;
mod trouble;

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::epoll;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags};
use spillway_codec::Compression;
use spillway_core::{PAGE_BYTES, Page};
use spillway_wire::tls;

use crate::hash::PageHash;
use crate::pool::{OpenError, OpenErrorKind};
use crate::vault::Vault;
use crate::{Completion, Got, Handle, Prepared, Preparer, Put, Status, Store, StoreError, Urgency};
use evacuate::Carriage;
use handles::{Handles, Slot, State};
use ledger::Ledger;
use lookups::Lookups;
use news::News;
use ops::{Kind, OpId, Ops, Stage};
use protocol::Protocol;
use server::Server;

/// How often deadlines are looked at while all servers are well, and while one is not.
const TICK_CALM: Duration = Duration::from_millis(200);
const TICK_TROUBLED: Duration = Duration::from_millis(20);
/// How long a server may be silent while something is asked of it, unless the deadline is shorter: with a tick, a second.
/// A server that is only slow is asked again over a new connection, which costs little.
const PATIENCE_MAX: Duration = Duration::from_millis(800);
/// The least patience with a server, however near the deadline: a busy host may not run it for a while.
const PATIENCE_MIN: Duration = Duration::from_millis(200);
/// With so few servers it costs less to receive from all than to ask first from whom there is anything.
const FEW: usize = 2;
/// Of how many the poller tells at once; of the others it tells the next time.
const TOLD_MAX: usize = 32;
/// What the poller calls what is no server.
const TIMER: u64 = 0;
/// How long making a connection may take. A server that others keep busy must not be taken for one that is away.
const GREETING_MAX: Duration = Duration::from_secs(3);

/// What all remote pools may be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// How long a page is asked for before it is given up.
    pub deadline: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self { deadline: Duration::from_secs(10) }
    }
}

/// A pool of servers that all speak `P`.
pub(crate) struct Remote<P: Protocol> {
    settings: Settings,
    hash: PageHash,
    handles: Handles,
    ops: Ops,
    servers: Vec<Server<P>>,
    poller: OwnedFd,
    timer: OwnedFd,
    tick: Duration,
    next_tick: Instant,
    /// Puts that a server declined, to be placed elsewhere.
    declined: Vec<OpId>,
    scratch: Box<Page>,
    random: u64,
    placement: Placement,
    /// Pages that move from servers that leave.
    carriage: Carriage,
    /// Wakes up for whoever places chunks, at a time that is set.
    alarm: OwnedFd,
    alarm_at: Option<Instant>,
    /// What was found, until its references are counted.
    left: Vec<Handle>,
    /// Who comes and goes, where servers do.
    news: Option<News<P>>,
    /// Who looks up where servers are that cannot be reached, where they have names.
    lookups: Option<Lookups>,
}

/// Who says where a page goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Placement {
    /// This store: to any server, and to another one if that declines.
    Any,
    /// The caller.
    Given,
}

/// A server to be used: its name for people, its addresses, how to speak to it.
pub(crate) struct Peer<P> {
    pub(crate) name: String,
    /// None of a server whose name is unknown: it is away, until it is known.
    pub(crate) addresses: Vec<SocketAddr>,
    pub(crate) protocol: P,
    /// How connections are encrypted, if they are.
    pub(crate) tls: Option<tls::Client>,
}

impl<P: Protocol> Remote<P> {
    /// Connects to all servers; waits until each has answered, or one has failed. Whatever must be known to take over is kept in
    /// the vault, if there is one.
    pub(crate) fn open(peers: Vec<Peer<P>>, settings: Settings, vault: Option<&Vault>) -> Result<Self, OpenError> {
        let now = Instant::now();
        let hash = PageHash::sole_evidence();
        let ledger = vault.and_then(|vault| {
            vault.set_secrets(hash.secrets());
            let ledger = Ledger::new(vault)?;
            ledger.set_servers(peers.len());
            Some(ledger)
        });
        let servers = peers.into_iter().map(|peer| Server::new(peer, now)).collect();
        let mut remote = Self::of(servers, ledger.map_or_else(Handles::new, Handles::lasting), hash, settings, now)?;
        remote.wait_until_ready(now + remote.at_most(GREETING_MAX))?;
        Ok(remote)
    }

    fn of(
        servers: Vec<Server<P>>,
        handles: Handles,
        hash: PageHash,
        settings: Settings,
        now: Instant,
    ) -> Result<Self, OpenError> {
        let poller = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(OpenError::system)?;
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let timer = rustix::time::timerfd_create(TimerfdClockId::Monotonic, flags).map_err(OpenError::system)?;
        let alarm = rustix::time::timerfd_create(TimerfdClockId::Monotonic, flags).map_err(OpenError::system)?;
        for timer in [&timer, &alarm] {
            epoll::add(&poller, timer, epoll::EventData::new_u64(TIMER), epoll::EventFlags::IN)
                .map_err(OpenError::system)?;
        }
        let mut remote = Self {
            settings,
            hash,
            handles,
            ops: Ops::new(),
            servers,
            poller,
            timer,
            tick: Duration::ZERO,
            next_tick: now,
            declined: Vec::with_capacity(ops::PUTS_MAX),
            scratch: Box::new([0; PAGE_BYTES]),
            random: u64::from(std::process::id()) | 1 << 40,
            placement: Placement::Any,
            carriage: Carriage::new(now),
            alarm,
            alarm_at: None,
            left: Vec::new(),
            news: None,
            lookups: None,
        };
        for (server, at) in remote.servers.iter_mut().zip(0..) {
            server.domain = at;
        }
        remote.set_tick(TICK_TROUBLED);
        Ok(remote)
    }

    fn wait_until_ready(&mut self, until: Instant) -> Result<(), OpenError> {
        while !self.servers.iter().all(Server::is_ready) {
            self.progress(&mut |_| {});
            if let Some(server) = self.servers.iter().find(|server| server.has_failed()) {
                let (kind, text) = server.failure.clone().expect("just found");
                return Err(OpenError { server: server.name.clone(), kind, text });
            }
            if let Some(server) = self.servers.iter().find(|server| !server.is_ready())
                && Instant::now() > until
            {
                let text = "it does not answer: see whether it is overloaded, stopped, or cut off".into();
                return Err(OpenError { server: server.name.clone(), kind: OpenErrorKind::Unreachable, text });
            }
            wait(self.poller.as_fd(), TICK_TROUBLED);
        }
        if self.servers.iter().all(|server| server.condition.free_pages == 0) {
            let name = self.servers.iter().map(|server| &server.name[..]).collect::<Vec<_>>().join(", ");
            let text = "it is full: give it more memory, or name another server".into();
            return Err(OpenError { server: name, kind: OpenErrorKind::Full, text });
        }
        Ok(())
    }

    /// A wait that leaves time for others before the deadline, if that is not very near.
    fn at_most(&self, longest: Duration) -> Duration {
        longest.min((self.settings.deadline / 3).max(PATIENCE_MIN))
    }

    /// Finds out from which servers there may be something to receive.
    fn listen(&mut self) {
        let nothing = epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(TIMER) };
        let (mut told, at_once) = ([nothing; TOLD_MAX], Timespec { tv_sec: 0, tv_nsec: 0 });
        let all = self.servers.len() <= FEW;
        let count = if all { Ok(0) } else { epoll::wait(&self.poller, &mut told, Some(&at_once)) };
        let all = all || count.is_err();
        self.servers.iter_mut().for_each(|server| server.stirs = all);
        for event in &told[..count.unwrap_or(0)] {
            let at = usize::try_from(event.data.u64()).ok().and_then(|name| name.checked_sub(1));
            if let Some(server) = at.and_then(|at| self.servers.get_mut(at)) {
                server.stirs = true;
            }
        }
    }

    /// The timer expires each `tick` from now on. It is for who sleeps, and must not before house is due, as it would keep the
    /// descriptor readable until then.
    fn set_tick(&mut self, tick: Duration) {
        self.tick = tick;
        let span = Timespec { tv_sec: 0, tv_nsec: i64::from(tick.subsec_nanos()) };
        let every = Itimerspec { it_interval: span, it_value: span };
        // What had expired is read with that, too.
        let _ = rustix::time::timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &every);
    }

    /// Where to put a page: of two servers at random the one with less to do, or with more room.
    fn choose(&mut self, now: Instant) -> Result<u8, StoreError> {
        let puts_max = self.puts_max();
        let usable = |server: &Server<P>| server.takes(now, puts_max);
        let count = self.servers.iter().filter(|server| usable(server)).count();
        if count == 0 {
            let mut ready = self.servers.iter().filter(|server| server.is_ready()).peekable();
            let full = ready.peek().is_some() && ready.all(|server| server.declines(now));
            return Err(if full { StoreError::Full } else { StoreError::Unavailable });
        }
        let picks = [self.random_below(count), self.random_below(count)];
        let nth = |pick| self.servers.iter().enumerate().filter(|(_, server)| usable(server)).nth(pick);
        let [a, b] = picks.map(|pick| nth(pick).expect("counted"));
        let cost = |server: &Server<P>| {
            let condition = server.condition;
            let busy = (condition.load / 64, server.puts / (protocol::BATCH_MAX * 2));
            (condition.free_pages == 0, busy, std::cmp::Reverse(condition.free_pages))
        };
        let better = if cost(b.1) < cost(a.1) { b.0 } else { a.0 };
        Ok(u8::try_from(better).expect("at most 255 servers"))
    }

    /// Puts that one server may have under way: one that does not answer must not take all there are.
    fn puts_max(&self) -> usize {
        (ops::PUTS_MAX / self.servers.len()).max(protocol::BATCH_MAX)
    }

    fn random_below(&mut self, limit: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        usize::try_from(((self.random >> 33) * limit as u64) >> 31).expect("below the limit")
    }

    /// Whether a copy with this checksum is, or will be, at the server, as far as can be told: one that is away may have forgotten it
    /// when it is back, and who asks has the page in hand.
    fn has(&mut self, handle: Handle, checksum: u64) -> Option<State> {
        let slot = *self.handles.get_mut(handle);
        let server = &self.servers[usize::from(slot.server)];
        let there = slot.state == State::Putting || server.is_ready() && server.has(slot.epoch);
        (slot.checksum == checksum && there && slot.state != State::Lost).then_some(slot.state)
    }

    fn begin_put(&mut self, server: u8, page: &Page, checksum: u64, now: Instant) -> Result<Handle, StoreError> {
        if !self.ops.has_page() {
            return Err(StoreError::Unavailable);
        }
        let handle = self.handles.insert(Slot::putting(checksum, server)).ok_or(StoreError::Full)?;
        let op = self.ops.put(handle, page, now);
        self.handles.slot_mut(handle).op = op.place();
        self.servers[usize::from(server)].puts += 1;
        self.servers[usize::from(server)].queues.puts.push_back(op);
        Ok(handle)
    }

    fn ask(&mut self, handle: Handle, urgency: Urgency, now: Instant) -> Result<Got, StoreError> {
        let server = usize::from(self.handles.slot(handle).server);
        if self.is_gone(&self.servers[server], now) {
            // Others have waited for it long enough. What is only fetched ahead is lost, too: who brings all pages home would
            // ask for ever.
            return Err(StoreError::Lost);
        }
        let deadline = now + self.settings.deadline;
        let Some(op) = self.ops.get(handle, urgency, deadline) else { return Err(StoreError::Unavailable) };
        let slot = self.handles.slot_mut(handle);
        (slot.state, slot.op) = (State::Getting, op.place());
        self.servers[server].queues.of(Kind::Get(urgency)).push_back(op);
        Ok(Got::Pending)
    }

    /// Whether a server has been away for so long that nobody waits for it any more. After a time in which we did not run,
    /// `progress` finds out first how much of it counts.
    fn is_gone(&self, server: &Server<P>, now: Instant) -> bool {
        let has_run = now.saturating_duration_since(self.next_tick) <= TICK_CALM * 2;
        has_run && server.is_gone(now, self.settings.deadline)
    }

    fn hurry(&mut self, handle: Handle) {
        let slot = *self.handles.slot(handle);
        let (id, op) = self.ops.at(slot.op);
        if op.stage == Stage::Queued && op.kind == Kind::Get(Urgency::Prefetch) {
            self.ops.get_mut(id).expect("just found").kind = Kind::Get(Urgency::Demand);
            self.servers[usize::from(slot.server)].queues.demand.push_back(id);
        }
    }

    /// The last reference to a page has gone.
    fn abandon(&mut self, handle: Handle) {
        let slot = *self.handles.slot(handle);
        match slot.state {
            State::Kept | State::Lost => self.let_go(handle),
            State::Putting | State::Getting => {
                let (id, op) = self.ops.at(slot.op);
                if op.stage == Stage::Queued {
                    self.servers[usize::from(slot.server)].puts -= usize::from(slot.state == State::Putting);
                    self.ops.end(id);
                    if slot.state == State::Putting { self.handles.recycle(handle) } else { self.let_go(handle) }
                }
            }
            State::Free | State::Leaving => panic!("{handle:?} was freed before"),
        }
    }

    fn leave(&mut self, handle: Handle) {
        let slot = *self.handles.slot(handle);
        let server = &mut self.servers[usize::from(slot.server)];
        if server.has(slot.epoch) {
            server.forget(&mut self.handles, handle);
        } else {
            self.handles.recycle(handle);
        }
    }

    /// Has the server forget a page, unless it never heard of it.
    fn leave_unless(&mut self, handle: Handle, unheard: bool) {
        if unheard { self.handles.recycle(handle) } else { self.leave(handle) }
    }

    /// [`Store::get`] at this time.
    fn get_at(&mut self, handle: Handle, urgency: Urgency, into: &mut Page, now: Instant) -> Result<Got, StoreError> {
        let slot = *self.handles.get_mut(handle);
        match slot.state {
            State::Putting => {
                let Kind::Put(buffer) = self.ops.at(slot.op).1.kind else { panic!("a put is under way") };
                *into = *self.ops.page(buffer);
                Ok(Got::Here)
            }
            State::Kept if self.servers[usize::from(slot.server)].has(slot.epoch) => self.ask(handle, urgency, now),
            State::Getting => {
                if urgency == Urgency::Demand {
                    self.hurry(handle);
                }
                Ok(Got::Pending)
            }
            _ => Err(StoreError::Lost),
        }
    }

    /// Hears servers, and does what is due; sends nothing.
    fn progress_at(&mut self, now: Instant, done: &mut dyn FnMut(Completion<'_>)) {
        self.listen();
        for at in 0..self.servers.len() {
            if let Err(why) = self.serve(at, now, done) {
                self.disconnect(at, why, now, done);
            }
        }
        self.carry_on(now);
        self.place_elsewhere(now, done);
        self.evacuate(now);
        if now >= self.next_tick {
            self.keep_house(now, done);
        }
    }

    fn flush_at(&mut self, now: Instant) {
        for server in &mut self.servers {
            server.flush(self.poller.as_fd(), &mut self.handles, &mut self.ops, now);
        }
    }

    /// [`Store::put`] of a page with this hash.
    fn put_hashed(&mut self, page: &Page, checksum: u64, previous: Option<Handle>) -> Result<Put, StoreError> {
        if let Some(previous) = previous {
            match self.has(previous, checksum) {
                Some(State::Putting) => return Ok(Put::Pending(previous)),
                Some(_) => return Ok(Put::Unchanged(previous)),
                None => {}
            }
        }
        let now = Instant::now();
        let server = self.choose(now)?;
        let handle = self.begin_put(server, page, checksum, now)?;
        if let Some(previous) = previous {
            self.free(previous);
        }
        Ok(Put::Pending(handle))
    }
}

/// What the poller calls the server of this number.
fn name_of(at: usize) -> u64 {
    at as u64 + 1
}

/// Waits until the descriptor is readable.
pub(crate) fn wait(descriptor: BorrowedFd<'_>, at_most: Duration) {
    let span = Timespec {
        tv_sec: i64::try_from(at_most.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(at_most.subsec_nanos()),
    };
    let _ = rustix::event::poll(&mut [PollFd::from_borrowed_fd(descriptor, PollFlags::IN)], Some(&span));
}

impl<P: Protocol> Store for Remote<P> {
    fn put(&mut self, page: &Page, previous: Option<Handle>) -> Result<Put, StoreError> {
        self.put_hashed(page, self.hash.of(page), previous)
    }

    fn preparer(&self) -> Option<Preparer> {
        Some(Preparer::new(self.hash.clone(), Compression::None, 0))
    }

    fn put_prepared(&mut self, page: &Page, known: &Prepared, previous: Option<Handle>) -> Result<Put, StoreError> {
        self.put_hashed(page, known.hash().unwrap_or_else(|| self.hash.of(page)), previous)
    }

    fn get(&mut self, handle: Handle, urgency: Urgency, into: &mut Page) -> Result<Got, StoreError> {
        self.get_at(handle, urgency, into, Instant::now())
    }

    fn share(&mut self, handle: Handle) -> Handle {
        self.handles.share(handle);
        handle
    }

    fn free(&mut self, handle: Handle) {
        if self.handles.release(handle) {
            self.abandon(handle);
        }
    }

    fn status(&self) -> Status {
        let bytes = self.handles.references * PAGE_BYTES as u64;
        Status {
            stored_bytes: bytes,
            stored_compressed_bytes: bytes,
            memory_bytes: self.handles.memory_bytes() + self.ops.memory_bytes(),
        }
    }

    fn tidy(&mut self) -> bool {
        self.handles.top_up()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.poller.as_fd())
    }

    fn flush(&mut self) {
        self.flush_at(Instant::now());
    }

    fn progress(&mut self, done: &mut dyn FnMut(Completion<'_>)) {
        let now = Instant::now();
        self.progress_at(now, done);
        self.flush_at(now);
    }

    fn accepts(&self) -> bool {
        let (now, puts_max) = (Instant::now(), self.puts_max());
        self.ops.has_page() && self.servers.iter().any(|server| server.takes(now, puts_max))
    }
}

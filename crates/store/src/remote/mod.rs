//! Pools on other hosts: one store for all protocols.
//!
//! A page lives at one server, chosen when it is put. Invariants:
//! - A handle names one page for as long as anyone refers to it, and is given anew only after the server has forgotten
//!   that page ([`handles`]), so neither a late answer nor a late request can mix pages up.
//! - Every page is verified against the checksum that was kept here, with a key that no server knows.
//! - A put is complete when the server has said so. What is under way when a connection ends is told at once
//!   ([`StoreError::Unavailable`]: the pager still has the page) or, for a get, asked again until its deadline.
//! - Nothing blocks, and gets allocate nothing.

mod connection;
pub(crate) mod handles;
pub(crate) mod names;
mod ops;
pub(crate) mod protocol;
mod requests;
pub(crate) mod server;

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::epoll;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags};
use spillway_core::{PAGE_BYTES, Page};

use crate::codec::unpack;
use crate::hash::PageHash;
use crate::pool::{OpenError, OpenErrorKind};
use crate::{Completion, Got, Handle, Put, Status, Store, StoreError, Urgency};
use handles::{Handles, Slot, State};
use ops::{Kind, OpId, Ops, Stage};
use protocol::{Body, Item, Protocol, Refusal};
use requests::Asked;
use server::{Link, Server};

/// How often deadlines are looked at while all servers are well, and while one is not.
const TICK_CALM: Duration = Duration::from_millis(250);
const TICK_TROUBLED: Duration = Duration::from_millis(20);
/// How long a server may be silent while something is asked of it, unless the deadline is shorter.
const PATIENCE_MAX: Duration = Duration::from_secs(3);

/// How long leaving takes at most: a million pages, at 500,000 a second.
const PARTING: Duration = Duration::from_secs(2);

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
}

/// A server to be used: its name for people, its addresses, how to speak to it.
pub(crate) struct Peer<P> {
    pub(crate) name: String,
    pub(crate) addresses: Vec<SocketAddr>,
    pub(crate) protocol: P,
}

impl<P: Protocol> Remote<P> {
    /// Connects to all servers; waits until each has answered, or one has failed.
    pub(crate) fn open(peers: Vec<Peer<P>>, settings: Settings) -> Result<Self, OpenError> {
        let now = Instant::now();
        let poller = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(OpenError::system)?;
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let timer = rustix::time::timerfd_create(TimerfdClockId::Monotonic, flags).map_err(OpenError::system)?;
        epoll::add(&poller, &timer, epoll::EventData::new_u64(0), epoll::EventFlags::IN).map_err(OpenError::system)?;
        let servers = peers.into_iter().map(|peer| Server::new(peer.name, peer.addresses, peer.protocol, now));
        let mut remote = Self {
            settings,
            hash: PageHash::new(),
            handles: Handles::new(),
            ops: Ops::new(),
            servers: servers.collect(),
            poller,
            timer,
            tick: Duration::ZERO,
            next_tick: now,
            declined: Vec::with_capacity(ops::PUTS_MAX),
            scratch: Box::new([0; PAGE_BYTES]),
            random: u64::from(std::process::id()) | 1 << 40,
        };
        remote.set_tick(TICK_TROUBLED);
        remote.wait_until_ready(now + remote.patience())?;
        Ok(remote)
    }

    fn wait_until_ready(&mut self, until: Instant) -> Result<(), OpenError> {
        while !self.servers.iter().all(Server::is_ready) {
            self.progress(&mut |_| {});
            if let Some(server) = self.servers.iter().find(|server| server.failure.is_some()) {
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

    fn patience(&self) -> Duration {
        PATIENCE_MAX.min(self.settings.deadline / 3)
    }

    fn set_tick(&mut self, tick: Duration) {
        if self.tick != tick {
            self.tick = tick;
            let span = Timespec { tv_sec: 0, tv_nsec: i64::from(tick.subsec_nanos()) };
            let every = Itimerspec { it_interval: span, it_value: span };
            let _ = rustix::time::timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &every);
        }
    }

    /// Where to put a page: of two servers at random the one with less to do, or with more room.
    fn choose(&mut self, now: Instant) -> Result<u8, StoreError> {
        let puts_max = self.puts_max();
        let usable = |server: &Server<P>| server.takes(now, puts_max);
        let count = self.servers.iter().filter(|server| usable(server)).count();
        if count == 0 {
            let mut ready = self.servers.iter().filter(|server| server.is_ready()).peekable();
            let full = ready.peek().is_some() && ready.all(|server| server.is_full(now));
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

    /// Whether a copy with this checksum is, or will be, at the server.
    fn has(&mut self, handle: Handle, checksum: u64) -> Option<State> {
        let slot = *self.handles.get_mut(handle);
        let there = slot.state == State::Putting || self.servers[usize::from(slot.server)].has(slot.epoch);
        (slot.checksum == checksum && there && slot.state != State::Lost).then_some(slot.state)
    }

    fn ask(&mut self, handle: Handle, urgency: Urgency) -> Result<Got, StoreError> {
        let server = usize::from(self.handles.slot(handle).server);
        let deadline = Instant::now() + self.settings.deadline;
        let Some(op) = self.ops.get(handle, urgency, deadline) else { return Err(StoreError::Unavailable) };
        let slot = self.handles.slot_mut(handle);
        (slot.state, slot.op) = (State::Getting, op.place());
        self.servers[server].queues.of(Kind::Get(urgency)).push_back(op);
        Ok(Got::Pending)
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
            State::Kept | State::Lost => self.leave(handle),
            State::Putting | State::Getting => {
                let (id, op) = self.ops.at(slot.op);
                if op.stage == Stage::Queued {
                    self.servers[usize::from(slot.server)].puts -= usize::from(slot.state == State::Putting);
                    self.ops.end(id);
                    self.leave_unless(handle, slot.state == State::Putting);
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

    /// Receives from one server and acts on it; an error ends the connection.
    fn serve(&mut self, at: usize, now: Instant, done: &mut dyn FnMut(Completion<'_>)) -> Result<(), Refusal> {
        if !self.servers[at].is_ready() && self.servers[at].advance(self.poller.as_fd(), now)? {
            self.give_up_forgotten(at, done);
        }
        let Self { servers, handles, ops, hash, scratch, declined, .. } = self;
        let server = &mut servers[at];
        let Link::Ready(connection) = &mut server.link else { return Ok(()) };
        // What came before an end counts.
        let received = connection.receive();
        let mut full = false;
        loop {
            let input = connection.input();
            let answer = server.protocol.answer(input).map_err(|malformed| other_protocol(malformed.0))?;
            let Some((answer, bytes)) = answer else {
                if input.len() >= P::ANSWER_BYTES_MAX {
                    return Err(other_protocol("answers are short"));
                }
                break;
            };
            server.heard = now;
            if let Some(condition) = answer.condition {
                server.condition = condition;
            }
            if let Body::Goodbye(why) = answer.body {
                return Err(why);
            }
            let nothing = || other_protocol("an answer to what was not asked");
            let items = server.requests.items(answer.id).ok_or_else(nothing)?;
            let pages = items.iter().filter(|item| !matches!(item, Asked::Free(_))).count();
            if pages != answer.body.len() {
                return Err(other_protocol("an answer for each page"));
            }
            let mut body = answer.body;
            for asked in items {
                match (*asked, if pages > 0 { body.next() } else { None }) {
                    (Asked::Put(op), Some(Item::Kept)) => {
                        server.puts -= 1;
                        put_done(op, handles, ops, &mut server.leaving, done);
                    }
                    (Asked::Put(op), Some(Item::Full)) => {
                        full = true;
                        declined.push(op);
                    }
                    (Asked::Get(op), Some(item @ (Item::Bytes(_) | Item::Zero | Item::Gone))) => {
                        let page = verify(item, handles, ops, op, hash, scratch);
                        got(op, page, handles, ops, &mut server.leaving, done);
                    }
                    (Asked::Free(bits), None) => {
                        handles.recycle(Handle::from_bits(bits).expect("it was one"));
                    }
                    _ => return Err(other_protocol("an answer to what was asked")),
                }
            }
            server.requests.end(answer.id);
            connection.consume(bytes);
        }
        if full {
            server.note_full(now);
        }
        received.map_err(|error| server::ended(&error))
    }

    /// Ends what was under way at a server that has forgotten everything.
    fn give_up_forgotten(&mut self, at: usize, done: &mut dyn FnMut(Completion<'_>)) {
        for id in self.ops.ids() {
            let Some(&mut op) = self.ops.get_mut(id) else { continue };
            let slot = *self.handles.slot(op.handle);
            let is_get = matches!(op.kind, Kind::Get(_)) && op.stage == Stage::Queued;
            if is_get && usize::from(slot.server) == at && !self.servers[at].has(slot.epoch) {
                self.lose(id, done);
            }
        }
    }

    /// Tells that a page will not come.
    fn lose(&mut self, id: OpId, done: &mut dyn FnMut(Completion<'_>)) {
        let op = self.ops.get_mut(id).expect("it is under way");
        let handle = op.handle;
        let sent = op.stage == Stage::Sent;
        op.stage = Stage::Given;
        if !sent {
            self.ops.end(id);
        }
        self.handles.slot_mut(handle).state = State::Lost;
        if self.handles.is_abandoned(handle) {
            self.leave(handle);
        } else {
            done(Completion::Got { handle, page: Err(StoreError::Lost) });
        }
    }

    /// A connection has ended: puts are told, gets and frees wait for the next one.
    fn disconnect(&mut self, at: usize, why: Refusal, now: Instant, done: &mut dyn FnMut(Completion<'_>)) {
        while let Some(items) = self.servers[at].requests.take_any() {
            for item in items {
                match item {
                    Asked::Put(id) => self.fail_put(id, StoreError::Unavailable, false, done),
                    Asked::Get(id) => self.ask_again(at, id),
                    Asked::Free(bits) => {
                        let handle = Handle::from_bits(bits).expect("it was one");
                        self.servers[at].forget(&mut self.handles, handle);
                    }
                }
            }
        }
        while let Some(id) = self.servers[at].queues.puts.pop_front() {
            if self.ops.get_mut(id).is_some() {
                self.fail_put(id, StoreError::Unavailable, true, done);
            }
        }
        self.servers[at].close(why, now);
        self.set_tick(TICK_TROUBLED);
    }

    fn ask_again(&mut self, at: usize, id: OpId) {
        let op = self.ops.get_mut(id).expect("it is under way");
        let handle = op.handle;
        if op.stage == Stage::Given {
            self.ops.end(id);
        } else if self.handles.is_abandoned(handle) {
            self.ops.end(id);
            self.leave(handle);
        } else {
            op.stage = Stage::Queued;
            let kind = op.kind;
            self.servers[at].queues.of(kind).push_back(id);
        }
    }

    /// The page was not kept. The server may have it all the same, unless it was never sent or was declined.
    fn fail_put(&mut self, id: OpId, error: StoreError, unheard: bool, done: &mut dyn FnMut(Completion<'_>)) {
        let handle = self.ops.get_mut(id).expect("it is under way").handle;
        self.ops.end(id);
        self.servers[usize::from(self.handles.slot(handle).server)].puts -= 1;
        let abandoned = self.handles.is_abandoned(handle);
        self.handles.release_all(handle);
        self.leave_unless(handle, unheard);
        if !abandoned {
            done(Completion::Put { handle, result: Err(error) });
        }
    }

    /// Finds other places for what was declined.
    fn place_elsewhere(&mut self, now: Instant, done: &mut dyn FnMut(Completion<'_>)) {
        while let Some(id) = self.declined.pop() {
            let handle = self.ops.get_mut(id).expect("it is under way").handle;
            match self.choose(now) {
                Ok(server) if !self.handles.is_abandoned(handle) => {
                    self.ops.get_mut(id).expect("as before").stage = Stage::Queued;
                    let before = std::mem::replace(&mut self.handles.slot_mut(handle).server, server);
                    self.servers[usize::from(before)].puts -= 1;
                    self.servers[usize::from(server)].puts += 1;
                    self.servers[usize::from(server)].queues.puts.push_back(id);
                }
                Ok(_) => self.fail_put(id, StoreError::Full, true, done),
                Err(error) => self.fail_put(id, error, true, done),
            }
        }
    }

    fn keep_house(&mut self, now: Instant, done: &mut dyn FnMut(Completion<'_>)) {
        let mut expirations = [0; 8];
        let _ = rustix::io::read(&self.timer, &mut expirations);
        let patience = self.patience();
        for at in 0..self.servers.len() {
            if let Err(why) = self.servers[at].keep_alive(now, patience) {
                self.disconnect(at, why, now, done);
            }
        }
        if self.ops.is_overdue(now) {
            for id in self.ops.ids() {
                if self.ops.get_mut(id).is_some_and(|op| op.is_overdue(now)) {
                    self.lose(id, done);
                }
            }
        }
        let calm = self.servers.iter().all(Server::is_ready);
        self.set_tick(if calm { TICK_CALM } else { TICK_TROUBLED });
        self.next_tick = now + self.tick / 2;
    }
}

impl<P: Protocol> Drop for Remote<P> {
    /// Caches keep what they were given for ever, so it is freed as far as a moment allows.
    fn drop(&mut self) {
        if P::FORGETS {
            return;
        }
        let until = Instant::now() + PARTING;
        let mut left: Vec<Handle> = self.handles.held().collect();
        while Instant::now() < until && self.servers.iter().any(Server::is_ready) {
            while let Some(handle) = left.pop() {
                self.handles.release_all(handle);
                self.abandon(handle);
            }
            if self.servers.iter().all(|server| server.leaving.is_empty() && server.requests.len() == 0) {
                break;
            }
            self.progress(&mut |_| {});
            wait(self.poller.as_fd(), TICK_TROUBLED);
        }
    }
}

/// The server has a page.
fn put_done(
    id: OpId,
    handles: &mut Handles,
    ops: &mut Ops,
    leaving: &mut handles::List,
    done: &mut dyn FnMut(Completion<'_>),
) {
    let handle = ops.get_mut(id).expect("it is under way").handle;
    ops.end(id);
    if handles.is_abandoned(handle) {
        handles.slot_mut(handle).state = State::Leaving;
        handles.push(leaving, handle);
    } else {
        handles.slot_mut(handle).state = State::Kept;
        done(Completion::Put { handle, result: Ok(()) });
    }
}

/// The page that a server gave, if it is the one that was put.
fn verify<'a>(
    item: Item<'a>,
    handles: &Handles,
    ops: &mut Ops,
    id: OpId,
    hash: &PageHash,
    scratch: &'a mut Page,
) -> Result<&'a Page, StoreError> {
    let op = ops.get_mut(id).expect("it is under way");
    let wanted = handles.slot(op.handle).checksum;
    if op.stage == Stage::Given || handles.is_abandoned(op.handle) {
        return Err(StoreError::Lost);
    }
    let page: &Page = match item {
        Item::Bytes(bytes) => match <&Page>::try_from(bytes) {
            Ok(page) => page,
            Err(_) => {
                unpack(bytes, scratch).map_err(|_| StoreError::Corrupt)?;
                scratch
            }
        },
        Item::Zero => {
            scratch.fill(0);
            scratch
        }
        _ => return Err(StoreError::Lost),
    };
    if hash.of(page) == wanted { Ok(page) } else { Err(StoreError::Corrupt) }
}

/// A get was answered.
fn got(
    id: OpId,
    page: Result<&Page, StoreError>,
    handles: &mut Handles,
    ops: &mut Ops,
    leaving: &mut handles::List,
    done: &mut dyn FnMut(Completion<'_>),
) {
    let op = *ops.get_mut(id).expect("it is under way");
    ops.end(id);
    if op.stage == Stage::Given {
        return;
    }
    if handles.is_abandoned(op.handle) {
        handles.slot_mut(op.handle).state = State::Leaving;
        handles.push(leaving, op.handle);
    } else {
        handles.slot_mut(op.handle).state = if page.is_ok() { State::Kept } else { State::Lost };
        done(Completion::Got { handle: op.handle, page });
    }
}

fn other_protocol(expected: &str) -> Refusal {
    let text = format!("it speaks another protocol (expected: {expected}): check the scheme and the port");
    (OpenErrorKind::Protocol, text)
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
        let checksum = self.hash.of(page);
        if let Some(previous) = previous {
            match self.has(previous, checksum) {
                Some(State::Putting) => return Ok(Put::Pending(previous)),
                Some(_) => return Ok(Put::Unchanged(previous)),
                None => {}
            }
        }
        let now = Instant::now();
        let server = self.choose(now)?;
        if !self.ops.has_page() {
            return Err(StoreError::Unavailable);
        }
        let slot = Slot::putting(checksum, server);
        let handle = self.handles.insert(slot).ok_or(StoreError::Full)?;
        let op = self.ops.put(handle, page, now);
        self.handles.slot_mut(handle).op = op.place();
        self.servers[usize::from(server)].puts += 1;
        self.servers[usize::from(server)].queues.puts.push_back(op);
        if let Some(previous) = previous {
            self.free(previous);
        }
        Ok(Put::Pending(handle))
    }

    fn get(&mut self, handle: Handle, urgency: Urgency, into: &mut Page) -> Result<Got, StoreError> {
        let slot = *self.handles.get_mut(handle);
        match slot.state {
            State::Putting => {
                let Kind::Put(buffer) = self.ops.at(slot.op).1.kind else { panic!("a put is under way") };
                *into = *self.ops.page(buffer);
                Ok(Got::Here)
            }
            State::Kept if self.servers[usize::from(slot.server)].has(slot.epoch) => self.ask(handle, urgency),
            State::Getting => {
                if urgency == Urgency::Demand {
                    self.hurry(handle);
                }
                Ok(Got::Pending)
            }
            _ => Err(StoreError::Lost),
        }
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
        let now = Instant::now();
        for server in &mut self.servers {
            server.flush(self.poller.as_fd(), &mut self.handles, &mut self.ops, now);
        }
    }

    fn progress(&mut self, done: &mut dyn FnMut(Completion<'_>)) {
        let now = Instant::now();
        for at in 0..self.servers.len() {
            if let Err(why) = self.serve(at, now, done) {
                self.disconnect(at, why, now, done);
            }
        }
        self.place_elsewhere(now, done);
        if now >= self.next_tick {
            self.keep_house(now, done);
        }
        self.flush();
    }

    fn accepts(&self) -> bool {
        let (now, puts_max) = (Instant::now(), self.puts_max());
        self.ops.has_page() && self.servers.iter().any(|server| server.takes(now, puts_max))
    }
}

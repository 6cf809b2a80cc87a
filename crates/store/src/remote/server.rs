//! One server: its connection through connecting, securing (TLS), greeting, ready and down, and what is sent when.
//!
//! A get on demand goes before everything that is not yet encoded, so little is encoded ahead ([`BULK_BYTES`]), and bulk
//! leaves a part of the server's window to it.

use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use spillway_core::PAGE_BYTES;
use spillway_wire::answer::Condition;
use spillway_wire::tls;

use super::Peer;
use super::connection::{Buffers, Connection};
use super::handles::{Handles, List};
use super::ledger::Note;
use super::lookups::AFTER;
use super::ops::{Kind, OpId, Ops, Queues, Stage};
use super::protocol::{BATCH_MAX, Grant, Greeting, Name, Parcel, Protocol, Refusal};
use super::refusals::{ended, silent, stuck, unnamed, unreachable};
use super::requests::{Asked, REQUESTS_MAX, Requests};
use crate::{Handle, Urgency};

/// Bulk is encoded as long as no more than this waits for the kernel.
const BULK_BYTES: usize = 64 << 10;
/// Beside the longest answer, what is received at once.
const INPUT_BYTES: usize = 64 << 10;
/// The first pause before connecting again; it doubles up to the longest.
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// How often patience with a server that fell silent may double, and after how long it is as before.
const DOUBLINGS_MAX: u32 = 2;
const DOUBLED_FOR: Duration = Duration::from_secs(10);
/// How long what an earlier connection has brought may still be carried out, by a server that reads connections in turn and does
/// not know which are of one pager: what is freed sooner would be there again.
const ECHO: Duration = Duration::from_secs(1);
/// How long a server that declined a page is not asked again.
const FULL_FOR: Duration = Duration::from_secs(1);

pub(crate) enum Link {
    /// To be connected at a time.
    Down(Buffers, Instant),
    /// Since when.
    Connecting(Connection, Instant),
    /// TLS makes its handshake, since when.
    Securing(Connection, Instant),
    /// Since when.
    Greeting(Connection, Instant),
    /// Requests are answered.
    Ready(Connection),
    /// Between two of these.
    Changing,
}

/// One server.
pub(crate) struct Server<P> {
    /// For people: host and port.
    pub(crate) name: String,
    pub(super) addresses: Vec<SocketAddr>,
    attempts: usize,
    /// When its name may be looked up again; none while it is.
    pub(super) look_up_at: Option<Instant>,
    pub(crate) protocol: P,
    tls: Option<tls::Client>,
    pub(crate) link: Link,
    /// There may be something to receive.
    pub(super) stirs: bool,
    pub(crate) queues: Queues,
    /// Pages that it is to forget.
    pub(crate) leaving: List,
    /// Copies that stayed behind when their pages were carried elsewhere.
    pub(crate) strays: Vec<Name>,
    /// They have waited long enough for company.
    pub(crate) leave_now: bool,
    pub(crate) requests: Requests<OpId>,
    /// Counts connections; stays at the last one, which takes half a day of nothing but failures to reach.
    pub(crate) epoch: u16,
    /// Pages of earlier epochs are gone.
    pub(crate) valid_since: u16,
    pub(crate) grant: Grant,
    pub(crate) condition: Condition,
    full_until: Option<Instant>,
    /// It is one of the pool's, and not one that has left the cluster.
    pub(crate) listed: bool,
    /// What fails together has the same.
    pub(crate) domain: u8,
    /// Puts that wait for it or that it has not answered.
    pub(crate) puts: usize,
    pub(crate) heard: Instant,
    spoke: Instant,
    /// When it was last asked whether it lives, while it should have answered something else.
    probed: Instant,
    /// What was asked before does not count as unanswered since then, but since here: it was us who did not run.
    excused: Instant,
    /// When the last connection was welcomed, and how often in a row one ended for its silence.
    welcomed: Instant,
    silences: u32,
    /// Since when no connection to it was welcomed, though there should be one.
    away_since: Option<Instant>,
    pause: Duration,
    /// Why it is down.
    pub(crate) failure: Option<Refusal>,
}

impl<P: Protocol> Server<P> {
    pub(crate) fn new(peer: Peer<P>, now: Instant) -> Self {
        let Peer { name, addresses, protocol, tls } = peer;
        let input = vec![0; P::ANSWER_BYTES_MAX + INPUT_BYTES].into();
        let grant =
            Grant { batch: 1, window_bytes: 0, heartbeat: Duration::from_secs(1), forgot: false, capacity_pages: None };
        Self {
            name,
            addresses,
            attempts: 0,
            look_up_at: Some(now),
            protocol,
            link: Link::Down(Buffers::new(input, 4 * BULK_BYTES, tls.is_some().then_some(INPUT_BYTES)), now),
            tls,
            stirs: false,
            queues: Queues::new(),
            leaving: List::default(),
            strays: Vec::new(),
            leave_now: false,
            requests: Requests::new(BATCH_MAX, now),
            epoch: 0,
            valid_since: 0,
            grant,
            condition: Condition::default(),
            full_until: None,
            listed: true,
            domain: 0,
            puts: 0,
            heard: now,
            spoke: now,
            probed: now,
            excused: now,
            welcomed: now,
            silences: 0,
            away_since: None,
            pause: PAUSE_MIN,
            failure: None,
        }
    }

    /// The same for a server that another process has left so.
    pub(crate) fn resume(peer: Peer<P>, note: &Note, now: Instant) -> Self {
        let mut server = Self::new(peer, now);
        (server.epoch, server.valid_since) = (note.epoch, note.valid_since);
        if !server.protocol.resume(&note.identity) {
            // Nothing there can be asked for.
            server.valid_since = server.epoch.saturating_add(1);
        }
        server
    }

    /// How it is now, for whoever takes over.
    pub(crate) fn note(&self) -> Note {
        let (name, identity) = (self.name.clone(), self.protocol.identity());
        Note { name, epoch: self.epoch, valid_since: self.valid_since, identity }
    }

    pub(crate) fn is_ready(&self) -> bool {
        matches!(self.link, Link::Ready(_))
    }

    /// Whether it was tried in vain at each of its addresses.
    pub(crate) fn has_failed(&self) -> bool {
        self.failure.is_some() && matches!(self.link, Link::Down(..)) && self.attempts >= self.addresses.len()
    }

    /// Whether it is known by a name, not by an address, which would always be the same.
    pub(crate) fn has_name(&self) -> bool {
        self.name.parse::<SocketAddr>().is_err()
    }

    /// Whether it may have come back at another address: it has been away for a while, and is expected.
    pub(crate) fn wants_lookup(&self, now: Instant) -> bool {
        let is_away = self.away_since.is_some_and(|since| now.saturating_duration_since(since) >= AFTER);
        is_away && self.listed && self.look_up_at.is_some_and(|at| at <= now) && self.has_name()
    }

    /// Its name was looked up, and may be again at a time. It is connected to at these addresses from now on, if any were found.
    pub(crate) fn found(&mut self, addresses: Vec<SocketAddr>, look_up_at: Instant) {
        self.look_up_at = Some(look_up_at);
        if !addresses.is_empty() {
            self.addresses = addresses;
        }
    }

    pub(crate) fn is_full(&self, now: Instant) -> bool {
        self.full_until.is_some_and(|until| now < until)
    }

    /// Whether it says that its pages are to go elsewhere.
    pub(crate) fn is_leaving(&self) -> bool {
        self.is_ready() && self.condition.leaving
    }

    /// Whether it is one of the pool's: it has not left the cluster, and has let us in once.
    pub(crate) fn has_joined(&self) -> bool {
        self.listed && self.epoch > 0
    }

    /// Whether it, if it is there, takes no pages all the same.
    pub(crate) fn declines(&self, now: Instant) -> bool {
        self.is_full(now) || self.condition.leaving || !self.listed
    }

    /// Whether a page may be put there, if a server may have so many under way.
    pub(crate) fn takes(&self, now: Instant, puts_max: usize) -> bool {
        self.is_ready() && !self.declines(now) && self.puts < puts_max
    }

    /// It declined a page.
    pub(crate) fn note_full(&mut self, now: Instant) {
        self.full_until = Some(now + FULL_FOR);
    }

    /// Whether a page that was put in `epoch` may still be there.
    pub(crate) fn has(&self, epoch: u16) -> bool {
        epoch >= self.valid_since
    }

    /// Connects if it is time to, and goes on with the handshake; the poller tells of it by this name. Returns whether the server just
    /// became ready.
    pub(crate) fn advance(&mut self, poller: BorrowedFd<'_>, name: u64, now: Instant) -> Result<bool, Refusal> {
        match std::mem::replace(&mut self.link, Link::Changing) {
            Link::Down(buffers, at) if at <= now => {
                let Some(&address) = self.addresses.get(self.attempts % self.addresses.len().max(1)) else {
                    self.link = Link::Down(buffers, now);
                    return Err(unnamed());
                };
                self.attempts += 1;
                match Connection::start(address, poller, name, buffers) {
                    Ok(connection) => self.link = Link::Connecting(connection, now),
                    Err((error, buffers)) => {
                        self.link = Link::Down(buffers, now);
                        return Err(unreachable(&error));
                    }
                }
            }
            Link::Connecting(mut connection, since) => match connection.is_open() {
                Ok(false) => self.link = Link::Connecting(connection, since),
                Ok(true) => match &self.tls {
                    Some(tls) => {
                        connection.secure(tls);
                        connection.send(poller);
                        self.link = Link::Securing(connection, now);
                    }
                    None => self.begin_greeting(connection, poller, now),
                },
                Err(error) => {
                    self.link = Link::Connecting(connection, since);
                    return Err(unreachable(&error));
                }
            },
            Link::Securing(mut connection, since) => {
                let received = connection.receive();
                connection.send(poller);
                let Some(channel) = connection.channel() else {
                    self.link = Link::Securing(connection, since);
                    return received.map(|()| false).map_err(ended);
                };
                self.protocol.bind(channel);
                self.begin_greeting(connection, poller, now);
                received.map_err(ended)?;
                // What came with the end of the handshake makes the poller say nothing.
                return self.greet(poller, now);
            }
            Link::Greeting(connection, since) => {
                self.link = Link::Greeting(connection, since);
                return self.greet(poller, now);
            }
            other => self.link = other,
        }
        Ok(false)
    }

    fn begin_greeting(&mut self, mut connection: Connection, poller: BorrowedFd<'_>, now: Instant) {
        self.protocol.greet(connection.out());
        connection.send(poller);
        self.link = Link::Greeting(connection, now);
    }

    fn greet(&mut self, poller: BorrowedFd<'_>, now: Instant) -> Result<bool, Refusal> {
        let Link::Greeting(connection, _) = &mut self.link else { return Ok(false) };
        let received = connection.receive();
        loop {
            let (input, out) = connection.input_and_out();
            let (used, greeting) = self.protocol.greeted(input, out)?;
            connection.consume(used);
            if let Greeting::Done(grant) = greeting {
                self.welcome(grant, now);
                return Ok(true);
            }
            if used == 0 {
                break;
            }
        }
        connection.send(poller);
        received.map(|()| false).map_err(ended)
    }

    fn welcome(&mut self, grant: Grant, now: Instant) {
        self.epoch = self.epoch.saturating_add(1);
        if grant.forgot {
            self.valid_since = self.epoch;
        }
        self.grant = Grant { batch: grant.batch.clamp(1, BATCH_MAX), ..grant };
        let free_pages = grant.capacity_pages.map_or(u64::MAX, |(_, free)| free);
        self.condition = Condition { load: 0, free_pages, leaving: false };
        (self.heard, self.spoke, self.pause, self.failure) = (now, now, PAUSE_MIN, None);
        (self.probed, self.welcomed, self.away_since) = (now, now, None);
        if let Link::Greeting(connection, _) = std::mem::replace(&mut self.link, Link::Changing) {
            self.link = Link::Ready(connection);
        }
    }

    /// Closes the connection and says when to try again. What was under way is the caller's to end first.
    pub(crate) fn close(&mut self, why: Refusal, now: Instant) {
        self.failure = Some(why);
        self.away_since.get_or_insert(now);
        self.link = match std::mem::replace(&mut self.link, Link::Changing) {
            Link::Connecting(connection, _)
            | Link::Securing(connection, _)
            | Link::Greeting(connection, _)
            | Link::Ready(connection) => Link::Down(connection.into_buffers(), now + self.pause),
            Link::Down(buffers, _) => Link::Down(buffers, now + self.pause),
            Link::Changing => Link::Changing,
        };
        self.pause = (self.pause * 2).min(PAUSE_MAX);
    }

    /// Whether it has been away for so long that nobody waits for it any more, until it is back.
    pub(crate) fn is_gone(&self, now: Instant, deadline: Duration) -> bool {
        self.away_since.is_some_and(|since| now.saturating_duration_since(since) >= deadline)
    }

    /// So much time does not count: it was us who did not run.
    pub(crate) fn pass_over(&mut self, lost: Duration, now: Instant) {
        (self.heard, self.excused) = (now, now);
        self.away_since = self.away_since.map(|since| (since + lost).min(now));
    }

    /// How long it has said nothing while something was asked of it.
    pub(crate) fn silence(&self, now: Instant) -> Duration {
        let oldest = self.requests.oldest();
        oldest.map_or(Duration::ZERO, |sent| now.saturating_duration_since(sent.max(self.heard)))
    }

    /// Says something if nothing was said for long, or if no answer comes; an error when nothing was heard for longer than
    /// `patience`, or a connection was not made within `greeting`, or something was asked longer than `deadline` ago.
    ///
    /// What was asked may take long, as pages in a spill file do. So one that is silent is asked something that does not. But what is
    /// never answered keeps its part of the window for as long as the connection lives.
    pub(crate) fn keep_alive(
        &mut self,
        now: Instant,
        patience: Duration,
        greeting: Duration,
        deadline: Duration,
    ) -> Result<(), Refusal> {
        let silence = self.silence(now);
        let owes = |sent: Instant| now.saturating_duration_since(sent.max(self.excused)) > deadline;
        let fails_us = self.requests.oldest().is_some_and(owes);
        match &mut self.link {
            Link::Connecting(_, since) | Link::Securing(_, since) | Link::Greeting(_, since)
                if now - *since > greeting =>
            {
                Err(silent())
            }
            Link::Ready(_) if fails_us => Err(stuck()),
            Link::Ready(connection) => {
                if silence > patience * (1 << self.silences) {
                    // It may be slow rather than away: to connect again and again would not make it faster.
                    self.silences = (self.silences + 1).min(DOUBLINGS_MAX);
                    return Err(silent());
                }
                if self.silences > 0 && now - self.welcomed > DOUBLED_FOR {
                    self.silences = 0;
                }
                let probe = silence > patience / 4 && now - self.probed > patience / 4;
                if (probe || now - self.spoke > self.grant.heartbeat)
                    && let Some(id) = self.requests.add(std::iter::empty(), 64, now)
                {
                    self.protocol.heartbeat(connection.out(), id);
                    (self.spoke, self.probed) = (now, now);
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Encodes and sends what waits, as far as the server's window and the kernel take it.
    pub(crate) fn flush(&mut self, poller: BorrowedFd<'_>, handles: &mut Handles, ops: &mut Ops, now: Instant) {
        while self.has_something_to_say() {
            self.fill(handles, ops, now);
            let Link::Ready(connection) = &mut self.link else { return };
            if connection.unsent() == 0 {
                return;
            }
            self.spoke = now;
            if !connection.send(poller) {
                return;
            }
        }
    }

    /// Of many servers few have, each time that all are looked at.
    fn has_something_to_say(&self) -> bool {
        let Link::Ready(connection) = &self.link else { return false };
        let frees = self.leave_now || self.leaving.len() >= BATCH_MAX;
        frees || !self.queues.are_empty() || !self.strays.is_empty() || connection.unsent() > 0
    }

    fn fill(&mut self, handles: &mut Handles, ops: &mut Ops, now: Instant) {
        while self.encode_gets(Urgency::Demand, handles, ops, now) {}
        while self.takes_bulk() {
            let gets = self.encode_gets(Urgency::Prefetch, handles, ops, now);
            // Before puts: one may have the name of a stray.
            let strays = self.encode_strays(now);
            let puts = self.strays.is_empty() && self.encode_puts(handles, ops, now);
            // Nobody waits for these, and alone each would wake the server.
            self.leave_now &= !self.leaving.is_empty();
            let frees = (puts || self.leave_now || self.leaving.len() >= BATCH_MAX) && self.encode_frees(handles, now);
            if !(gets || strays || puts || frees) {
                break;
            }
        }
    }

    fn takes_bulk(&self) -> bool {
        matches!(&self.link, Link::Ready(connection) if connection.unsent() < BULK_BYTES)
    }

    /// Pages that a request may have now, if each takes so many bytes of the window.
    fn room(&self, page_bytes: usize, urgent: bool) -> usize {
        let share = |limit: usize| if urgent { limit } else { limit / 4 * 3 };
        if self.requests.len() >= share(REQUESTS_MAX) {
            return 0;
        }
        let left = share(self.grant.window_bytes).saturating_sub(self.requests.bytes);
        // Windows smaller than a page still let one through.
        let pages = if self.requests.len() == 0 { (left / page_bytes).max(1) } else { left / page_bytes };
        pages.min(self.grant.batch)
    }

    fn encode_gets(&mut self, urgency: Urgency, handles: &Handles, ops: &mut Ops, now: Instant) -> bool {
        if self.queues.of(Kind::Get(urgency)).is_empty() {
            return false;
        }
        let page_bytes = P::OVERHEAD_BYTES + PAGE_BYTES;
        let room = self.room(page_bytes, urgency == Urgency::Demand);
        let Link::Ready(connection) = &mut self.link else { return false };
        let mut names = [Name { epoch: 0, handle: 0 }; BATCH_MAX];
        let mut items = [Asked::Free(0); BATCH_MAX];
        let mut count = 0;
        let queue = self.queues.of(Kind::Get(urgency));
        while count < room
            && let Some(id) = queue.pop_front()
        {
            // It may have become urgent, and have been sent as such.
            let waits = |op: &&mut super::ops::Op| op.stage == Stage::Queued && op.kind == Kind::Get(urgency);
            let Some(op) = ops.get_mut(id).filter(waits) else { continue };
            op.stage = Stage::Sent;
            names[count] = Name { epoch: handles.slot(op.handle).epoch, handle: op.handle.bits() };
            items[count] = Asked::Get(id);
            count += 1;
        }
        if count == 0 {
            return false;
        }
        let id = self.requests.add(items[..count].iter().copied(), count * page_bytes, now).expect("there is room");
        self.protocol.get(connection.out(), id, urgency, &names[..count]);
        true
    }

    fn encode_puts(&mut self, handles: &mut Handles, ops: &mut Ops, now: Instant) -> bool {
        if self.queues.puts.is_empty() {
            return false;
        }
        let page_bytes = P::OVERHEAD_BYTES + PAGE_BYTES;
        let room = self.room(page_bytes, false);
        let Link::Ready(connection) = &mut self.link else { return false };
        let mut chosen = [(0, Name { epoch: 0, handle: 0 }); BATCH_MAX];
        let mut items = [Asked::Free(0); BATCH_MAX];
        let mut count = 0;
        while count < room
            && let Some(id) = self.queues.puts.pop_front()
        {
            let Some(op) = ops.get_mut(id).filter(|op| op.stage == Stage::Queued) else { continue };
            let Kind::Put(buffer) = op.kind else { continue };
            op.stage = Stage::Sent;
            if op.carries {
                op.epoch = self.epoch;
            } else {
                handles.sent(op.handle, self.epoch);
            }
            chosen[count] = (buffer, Name { epoch: self.epoch, handle: op.handle.bits() });
            items[count] = Asked::Put(id);
            count += 1;
        }
        if count == 0 {
            return false;
        }
        let id = self.requests.add(items[..count].iter().copied(), count * page_bytes, now).expect("there is room");
        let parcels = chosen.map(|(buffer, name)| Parcel { name, page: ops.page(buffer) });
        self.protocol.put(connection.out(), id, &parcels[..count]);
        true
    }

    fn encode_strays(&mut self, now: Instant) -> bool {
        let valid_since = self.valid_since;
        self.strays.retain(|name| name.epoch >= valid_since);
        let count = self.strays.len().min(self.room(P::OVERHEAD_BYTES, false)).min(BATCH_MAX);
        let Link::Ready(connection) = &mut self.link else { return false };
        if count == 0 {
            return false;
        }
        let names = self.strays.split_off(self.strays.len() - count);
        let items = names.iter().map(|name| Asked::Stray(name.epoch, name.handle));
        let id = self.requests.add(items, count * P::OVERHEAD_BYTES, now).expect("there is room");
        self.protocol.free(connection.out(), id, &names);
        true
    }

    fn encode_frees(&mut self, handles: &mut Handles, now: Instant) -> bool {
        if !P::FORGETS && self.epoch > 1 && now < self.welcomed + ECHO {
            return false;
        }
        let room = self.room(P::OVERHEAD_BYTES, false);
        let Link::Ready(connection) = &mut self.link else { return false };
        let mut names = [Name { epoch: 0, handle: 0 }; BATCH_MAX];
        let mut items = [Asked::Free(0); BATCH_MAX];
        let mut count = 0;
        while count < room
            && let Some(handle) = handles.pop(&mut self.leaving)
        {
            let epoch = handles.slot(handle).epoch;
            if epoch < self.valid_since {
                handles.recycle(handle);
                continue;
            }
            names[count] = Name { epoch, handle: handle.bits() };
            items[count] = Asked::Free(handle.bits());
            count += 1;
        }
        if count == 0 {
            return false;
        }
        let bytes = count * P::OVERHEAD_BYTES;
        let id = self.requests.add(items[..count].iter().copied(), bytes, now).expect("there is room");
        self.protocol.free(connection.out(), id, &names[..count]);
        true
    }

    /// No one refers to the page any more: have the server forget it.
    pub(crate) fn forget(&mut self, handles: &mut Handles, handle: Handle) {
        handles.slot_mut(handle).state = super::handles::State::Leaving;
        handles.push(&mut self.leaving, handle);
    }
}

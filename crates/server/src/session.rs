//! One connection's conversation: bytes in, bytes out; no socket and no clock inside.
//!
//! Invariants: requests are carried out only on a connection whose hello proved its tenant's secret, on that tenant's pages,
//! and never after another connection took over. What waits to be sent is bounded by the window: beyond it no request is
//! begun. Puts and frees are carried out in order; only gets that nobody waits for are put off.

use std::collections::VecDeque;

use spillway_wire::answer::{self, Condition, Got, PageStatus, To};
use spillway_wire::auth::Channel;
use spillway_wire::hello::{self, Code, HELLO_BYTES, Nonce, Received, Transcript, Welcome};
use spillway_wire::request::{self, Class, Keys, Request, RequestBody};
use spillway_wire::{BATCH_MAX, FREE_PAGES_MAX, Key, Malformed, VERSION_MIN};

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Instant;

use crate::output::Output;
use crate::parked::Parked;
use crate::pool::Work;
use crate::refusals::Why;
use crate::shared::Shared;
use crate::tenants::{Claim, Seat};

/// The version that first knew servers that leave.
const LEAVING_SINCE: u16 = 2;
/// Gets put off on a connection at most.
const BULK_MAX: usize = 64;
/// Bytes waiting to be sent below which a get that was put off is begun: what a demand may have to wait behind.
const BULK_BELOW_BYTES: usize = 256 << 10;
/// Keys that a connection's requests may touch before its worker serves others: as many as one request may free. To look
/// so many up in vain takes 0.7 ms.
const TURN_KEYS: usize = FREE_PAGES_MAX as usize;
/// A status counts for so many keys: it adds up what all threads have measured.
const STATUS_KEYS: usize = BATCH_MAX;

/// What a session needs from the thread that serves it.
pub(crate) struct Context<'a> {
    pub(crate) shared: &'a Shared,
    pub(crate) work: &'a mut Work,
    pub(crate) now: Instant,
    /// Gets that must wait for the spill file, to be handed to the keeper.
    pub(crate) parked: Vec<Parked>,
    /// Requests carried out.
    pub(crate) requests: u64,
    /// Why the client was not let in.
    pub(crate) refused: Option<Why>,
    /// Keys that may still be touched in this turn.
    keys_left: usize,
}

impl<'a> Context<'a> {
    /// For one turn of one connection.
    pub(crate) fn new(shared: &'a Shared, work: &'a mut Work, now: Instant) -> Self {
        Self { shared, work, now, parked: Vec::new(), requests: 0, refused: None, keys_left: TURN_KEYS }
    }

    /// Begins another turn.
    pub(crate) fn next_turn(&mut self) {
        self.keys_left = TURN_KEYS;
    }

    fn touch(&mut self, keys: usize) {
        self.keys_left = self.keys_left.saturating_sub(keys);
    }
}

enum Phase {
    /// The challenge was sent.
    Hello,
    Open(Seat),
    /// Nothing is read any more; what waits is sent.
    Closing,
}

/// A get that was put off.
struct Bulk {
    id: u32,
    keys: [Key; BATCH_MAX],
    count: usize,
}

/// The server's side of a connection.
pub(crate) struct Session {
    phase: Phase,
    /// What the hello proves itself by.
    challenge: Nonce,
    /// What both speak, after the hello.
    version: u16,
    pub(crate) output: Output,
    bulk: VecDeque<Bulk>,
    /// Bytes of answers that wait for the spill file.
    parked_bytes: usize,
    /// Nobody waits for those answers any more.
    gone: Arc<AtomicBool>,
    /// It is one of the connections that are limited.
    admitted: bool,
    /// A turn was over before all requests that were there had been carried out.
    behind: bool,
}

impl Session {
    /// Begins with a challenge, which must be random.
    pub(crate) fn new(challenge: Nonce, shared: &Shared) -> Self {
        shared.connections.fetch_add(1, Relaxed);
        let mut output = Output::default();
        output.head(|out| out.extend_from_slice(&hello::challenge(&challenge)));
        Self {
            phase: Phase::Hello,
            challenge,
            version: VERSION_MIN,
            output,
            bulk: VecDeque::new(),
            parked_bytes: 0,
            gone: Arc::default(),
            admitted: false,
            behind: false,
        }
    }

    /// Has proofs count within one TLS session alone; to be called before any input.
    pub(crate) fn bind(&mut self, channel: &Channel) {
        self.challenge = hello::bind(&self.challenge, channel);
    }

    /// Whether no hello has come yet.
    pub(crate) fn is_new(&self) -> bool {
        matches!(self.phase, Phase::Hello)
    }

    /// Whether a hello was accepted.
    pub(crate) fn is_open(&self) -> bool {
        matches!(self.phase, Phase::Open(_))
    }

    /// Whether nothing more will come of it.
    pub(crate) fn is_closing(&self) -> bool {
        matches!(self.phase, Phase::Closing)
    }

    /// Whether another connection took its place.
    pub(crate) fn was_overtaken(&self) -> bool {
        matches!(&self.phase, Phase::Open(seat) if seat.sit().is_none())
    }

    /// Whether the client must take answers before its next requests are looked at.
    pub(crate) fn is_congested(&self, window_bytes: usize) -> bool {
        self.waiting_bytes() >= window_bytes || self.bulk.len() >= BULK_MAX
    }

    /// Whether requests are there that only wait for another turn.
    pub(crate) fn is_behind(&self) -> bool {
        self.behind && self.is_open()
    }

    /// Bytes of answers that wait: to be sent here, or for the spill file on any connection of the tenant. The latter count
    /// only while one of them is for here, as nothing else makes the worker look again.
    fn waiting_bytes(&self) -> usize {
        let parked = match &self.phase {
            Phase::Open(seat) if self.parked_bytes > 0 => seat.tenant.parked_bytes(),
            _ => self.parked_bytes,
        };
        self.output.queued() + parked
    }

    /// How many bytes are missing to the end of what `pending` begins with; at least one.
    pub(crate) fn missing(&self, pending: &[u8]) -> usize {
        let whole = match self.phase {
            Phase::Hello => HELLO_BYTES,
            Phase::Open(_) => request::frame_bytes(pending).unwrap_or(0),
            Phase::Closing => 0,
        };
        whole.saturating_sub(pending.len()).max(1)
    }

    /// Carries out what `bytes` ask for; how many of them are done with. The others begin something that is not there as
    /// a whole, or must wait until the client has taken answers.
    pub(crate) fn input(&mut self, bytes: &[u8], cx: &mut Context<'_>) -> usize {
        let mut at = 0;
        if matches!(self.phase, Phase::Hello) {
            let Some(hello) = bytes.first_chunk::<HELLO_BYTES>() else { return 0 };
            self.hello(hello, cx);
            at = HELLO_BYTES;
        }
        if let Phase::Open(seat) = &self.phase {
            let seat = seat.clone();
            match seat.sit() {
                Some(_sitting) => at += self.requests(&bytes[at..], &seat, cx),
                None => self.end(Code::TakenOver, cx.shared),
            }
        }
        if self.is_closing() { bytes.len() } else { at }
    }

    fn hello(&mut self, bytes: &[u8; HELLO_BYTES], cx: &mut Context<'_>) {
        match self.greet(bytes, cx) {
            Ok((seat, version)) => (self.phase, self.version) = (Phase::Open(seat), version),
            Err(code) => {
                cx.refused = Some(if code == Code::Malformed { Why::malformed(bytes) } else { Why::Told(code) });
                self.output.head(|out| hello::refusal(out, code, &code.to_string()));
                self.phase = Phase::Closing;
            }
        }
    }

    /// The seat, and the version that is spoken from here on.
    fn greet(&mut self, bytes: &[u8; HELLO_BYTES], cx: &Context<'_>) -> Result<(Seat, u16), Code> {
        let shared = cx.shared;
        let received = Received::decode(bytes).map_err(|_| Code::Malformed)?;
        let version = received.hello.versions.common().ok_or(Code::Version)?;
        if !received.knows_token(&shared.token, &self.challenge) {
            return Err(if shared.token.is_empty() { Code::NoToken } else { Code::Token });
        }
        self.admitted = shared.admit();
        if !self.admitted {
            return Err(Code::Busy);
        }
        let (seat, existed) = shared.tenants.enter(&received, &shared.token, &self.challenge, cx.now)?;
        let welcome = Welcome {
            version,
            batch_max: u16::try_from(BATCH_MAX).unwrap_or(u16::MAX),
            window_bytes: u32::try_from(shared.limits.window_bytes).unwrap_or(u32::MAX),
            lease_seconds: seconds(shared.limits.lease),
            heartbeat_seconds: seconds(shared.limits.heartbeat),
            existed,
            capacity_pages: shared.pool.capacity_pages(),
            free_pages: shared.condition().free_pages,
            incarnation: seat.tenant.incarnation,
        };
        let transcript = Transcript { token: &shared.token, challenge: &self.challenge, hello: bytes };
        self.output.head(|out| transcript.welcome(out, &welcome));
        Ok((seat, version))
    }

    /// What an answer says of the server, as far as the client's version has words for it.
    fn condition(&self, shared: &Shared) -> Condition {
        let condition = shared.condition();
        Condition { leaving: condition.leaving && self.version >= LEAVING_SINCE, ..condition }
    }

    fn requests(&mut self, bytes: &[u8], seat: &Seat, cx: &mut Context<'_>) -> usize {
        let mut at = 0;
        self.behind = false;
        while !self.is_congested(cx.shared.limits.window_bytes) {
            if cx.keys_left == 0 {
                self.behind = at < bytes.len();
                break;
            }
            match Request::decode(&bytes[at..]) {
                Ok(Some((request, len))) => {
                    self.request(request, seat, cx);
                    at += len;
                }
                Ok(None) => break,
                Err(malformed) => {
                    self.malformed(malformed, cx.shared);
                    break;
                }
            }
        }
        self.begin_bulk(seat, cx);
        at
    }

    fn request(&mut self, request: Request<'_>, seat: &Seat, cx: &mut Context<'_>) {
        let (shared, table, scope) = (cx.shared, &seat.tenant.table, seat.tenant.scope);
        cx.requests += 1;
        cx.touch(keys_of(&request.body));
        let to = To { id: request.id, condition: self.condition(shared) };
        match request.body {
            RequestBody::Put(puts) if shared.is_leaving() => {
                let declined = [PageStatus::Full; BATCH_MAX];
                self.output.head(|out| answer::put(out, to, &declined[..puts.len()]));
            }
            RequestBody::Put(puts) => {
                shared.pool.put(table, scope, puts, cx.work);
                let to = To { condition: self.condition(shared), ..to };
                self.output.head(|out| answer::put(out, to, &cx.work.statuses));
            }
            RequestBody::Get(Class::Demand, keys) => self.get(request.id, keys, seat, cx),
            RequestBody::Get(Class::Prefetch, keys) => self.put_off(request.id, keys),
            RequestBody::Free(ranges) => {
                let pages = shared.pool.free(table, scope, ranges, cx.work);
                let to = To { condition: self.condition(shared), ..to };
                self.output.head(|out| answer::free(out, to, pages));
            }
            RequestBody::Status => {
                self.output.head(|out| answer::status(out, to, &shared.status(seat)));
            }
            RequestBody::Heartbeat => self.output.head(|out| answer::heartbeat(out, to)),
            RequestBody::Leave(_) if self.version < LEAVING_SINCE => {
                self.malformed(Malformed("a request of version 1"), shared);
            }
            RequestBody::Leave(leaves) => {
                shared.leaving.store(leaves, Relaxed);
                let to = To { condition: self.condition(shared), ..to };
                self.output.head(|out| answer::leave(out, to));
            }
        }
    }

    fn put_off(&mut self, id: u32, keys: Keys<'_>) {
        let mut bulk = Bulk { id, keys: [Key::default(); BATCH_MAX], count: keys.len() };
        bulk.keys.iter_mut().zip(keys).for_each(|(slot, key)| *slot = key);
        self.bulk.push_back(bulk);
    }

    /// Begins gets that were put off, as far as what waits to be sent allows.
    fn begin_bulk(&mut self, seat: &Seat, cx: &mut Context<'_>) {
        while self.waiting_bytes() < BULK_BELOW_BYTES
            && let Some(bulk) = self.bulk.pop_front()
        {
            cx.touch(bulk.count);
            self.get(bulk.id, bulk.keys[..bulk.count].iter().copied(), seat, cx);
        }
    }

    /// To be called when the client has taken some of what waits.
    pub(crate) fn go_on(&mut self, cx: &mut Context<'_>) {
        if self.bulk.is_empty() {
            return;
        }
        if let Phase::Open(seat) = &self.phase {
            let seat = seat.clone();
            if let Some(_sitting) = seat.sit() {
                self.begin_bulk(&seat, cx);
            }
        }
    }

    fn get(&mut self, id: u32, keys: impl ExactSizeIterator<Item = Key>, seat: &Seat, cx: &mut Context<'_>) {
        let work = &mut *cx.work;
        cx.shared.pool.get(&seat.tenant.table, keys, work);
        if !work.away.is_empty() {
            let (heads, pins): (_, Vec<_>) = (work.heads.clone(), work.pins.drain(..).collect());
            let away: Vec<_> = work.away.drain(..).collect();
            let claim = Claim::new(&seat.tenant, Parked::bytes_of(&pins, &away));
            self.parked_bytes += claim.bytes();
            let gone = Arc::clone(&self.gone);
            cx.parked.push(Parked { id, heads, pins, away, read: Vec::new(), back: None, claim, gone });
            return;
        }
        let to = To { id, condition: self.condition(cx.shared) };
        self.output.head(|out| answer::got_head(out, to, work.heads.iter().copied()));
        work.pins.drain(..).for_each(|pin| self.output.page(pin, &cx.shared.pool));
    }

    /// Answers a get whose pages were read from the spill file.
    pub(crate) fn resume(&mut self, mut parked: Parked, shared: &Shared) {
        let was_away: Vec<usize> = parked
            .away
            .drain(..)
            .map(|(at, held)| {
                shared.pool.let_go(held);
                at
            })
            .collect();
        self.parked_bytes = self.parked_bytes.saturating_sub(parked.claim.bytes());
        if !self.is_open() {
            parked.discard(&shared.pool);
            return;
        }
        let to = To { id: parked.id, condition: self.condition(shared) };
        self.output.head(|out| answer::got_head(out, to, parked.heads.iter().copied()));
        let (mut pins, mut read) = (parked.pins.into_iter(), parked.read.into_iter());
        for (at, _) in parked.heads.iter().enumerate().filter(|(_, head)| head.what == Got::Bytes) {
            if was_away.contains(&at) {
                read.next().into_iter().for_each(|page| self.output.own(page));
            } else {
                pins.next().into_iter().for_each(|pin| self.output.page(pin, &shared.pool));
            }
        }
    }

    fn malformed(&mut self, malformed: Malformed, shared: &Shared) {
        let (text, condition) = (format!("{}: {}", Code::Malformed, malformed.0), self.condition(shared));
        self.output.head(|out| answer::goodbye(out, condition, Code::Malformed, &text));
        self.leave(shared);
    }

    /// Says goodbye, if there was a welcome, and reads no more.
    pub(crate) fn end(&mut self, code: Code, shared: &Shared) {
        match self.phase {
            Phase::Open(_) => {
                let condition = self.condition(shared);
                self.output.head(|out| answer::goodbye(out, condition, code, &code.to_string()));
            }
            Phase::Hello => self.output.head(|out| hello::refusal(out, code, &code.to_string())),
            Phase::Closing => {}
        }
        self.leave(shared);
    }

    fn leave(&mut self, shared: &Shared) {
        if let Phase::Open(seat) = std::mem::replace(&mut self.phase, Phase::Closing) {
            shared.tenants.leave(&seat, Instant::now());
        }
        self.gone.store(true, Relaxed);
        self.bulk.clear();
    }

    /// Lets go of everything; to be called once, when the connection is gone.
    pub(crate) fn close(mut self, shared: &Shared) {
        self.leave(shared);
        self.output.clear(&shared.pool);
        shared.connections.fetch_sub(1, Relaxed);
        if self.admitted {
            shared.admitted.fetch_sub(1, Relaxed);
        }
    }
}

/// What a request costs, in keys; a get that is put off costs them when it is begun.
fn keys_of(body: &RequestBody<'_>) -> usize {
    match body {
        RequestBody::Put(puts) => puts.len(),
        RequestBody::Get(Class::Demand, keys) => keys.len(),
        RequestBody::Free(ranges) => ranges.map(|range| range.pages as usize).sum(),
        RequestBody::Status => STATUS_KEYS,
        RequestBody::Get(Class::Prefetch, _) | RequestBody::Heartbeat | RequestBody::Leave(_) => 1,
    }
}

fn seconds(duration: std::time::Duration) -> u32 {
    u32::try_from(duration.as_secs()).unwrap_or(u32::MAX).max(1)
}

#[cfg(test)]
mod tests;

//! Simulated members under a virtual clock: they crash and forget, are cut off, stall, are full, give wrong bytes, and answer
//! in any order.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use spillway_core::Page;

use super::point;
use crate::hash::PageHash;
use crate::stripe::members::{Chunk, Health, Members, Presence};
use crate::{Completion, Got, Handle, StoreError, Urgency};

/// After which what is asked of a server that is away is lost.
pub(super) const DEADLINE: Duration = Duration::from_secs(2);
/// Puts that a server has under way at most.
const PUTS_MAX: usize = 51;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Putting,
    Kept,
    Getting,
    Lost,
}

struct Slot {
    member: u8,
    checksum: u64,
    life: u16,
    state: State,
    /// When a get was asked for.
    asked: Instant,
    abandoned: bool,
    /// A row has it, of those that another pager has left.
    inherited: bool,
}

#[derive(Default)]
pub(super) struct Server {
    /// What it really has.
    pub(super) kept: BTreeMap<u32, Box<Page>>,
    /// What it is to forget when it can be told.
    forget: BTreeSet<u32>,
    pub(super) away_since: Option<Instant>,
    pub(super) stalled_until: Option<Instant>,
    pub(super) full: bool,
    full_until: Option<Instant>,
    /// Takes no pages, and says that what it has is to go to others.
    pub(super) leaving: bool,
    /// It is not in the cluster any more, whether it is there or not.
    pub(super) unlisted: bool,
    pub(super) domain: u8,
    /// Gives every page with a bit wrong.
    pub(super) lies: bool,
    life: u16,
    puts: usize,
    heard: Option<Instant>,
}

impl Server {
    /// An empty one.
    pub(super) fn in_domain(domain: usize) -> Self {
        Self { domain: u8::try_from(domain).unwrap(), ..Self::default() }
    }
}

pub(super) struct World {
    pub(super) now: Instant,
    hash: PageHash,
    slots: BTreeMap<u32, Slot>,
    pub(super) servers: Vec<Server>,
    /// Answers under way: when, about which chunk.
    answers: Vec<(Instant, u32, Option<Box<Page>>)>,
    /// Puts whose connection ended.
    broken: Vec<u32>,
    wake_at: Option<Instant>,
    /// How often that was set anew.
    pub(super) alarms: u32,
    next: u32,
    random: u64,
}

impl World {
    pub(super) fn new(servers: usize, seed: u64) -> Self {
        Self {
            now: Instant::now(),
            hash: PageHash::new(),
            slots: BTreeMap::new(),
            servers: (0..servers).map(Server::in_domain).collect(),
            answers: Vec::new(),
            broken: Vec::new(),
            wake_at: None,
            alarms: 0,
            next: 0,
            random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
        }
    }

    pub(super) fn below(&mut self, limit: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 20) % limit
    }

    /// Time passes until something is due, or a little.
    pub(super) fn pass(&mut self) {
        let due = self.answers.iter().map(|(due, ..)| *due).chain(self.wake_at).filter(|due| *due > self.now).min();
        let later = self.now + Duration::from_millis(20);
        self.now = due.map_or(later, |due| due.min(later));
    }

    /// It is not reached any more; what it has, it keeps, unless it crashes.
    pub(super) fn cut(&mut self, member: usize, crashes: bool) {
        let now = self.now;
        let server = &mut self.servers[member];
        server.away_since.get_or_insert(now);
        if crashes {
            server.kept.clear();
            server.forget.clear();
            server.life += 1;
        }
        let at = |slot: &Slot| usize::from(slot.member) == member;
        let broken = self.slots.iter().filter(|(_, slot)| at(slot) && slot.state == State::Putting);
        self.broken.extend(broken.map(|(chunk, _)| *chunk));
        let slots = &self.slots;
        self.answers.retain(|(_, chunk, _)| slots.get(chunk).is_some_and(|slot| !at(slot)));
    }

    pub(super) fn mend(&mut self, member: usize) {
        let server = &mut self.servers[member];
        server.away_since = None;
        for chunk in std::mem::take(&mut server.forget) {
            server.kept.remove(&chunk);
        }
        let asked =
            self.slots.iter().filter(|(_, slot)| usize::from(slot.member) == member && slot.state == State::Getting);
        let asked: Vec<u32> = asked.map(|(chunk, _)| *chunk).collect();
        asked.into_iter().for_each(|chunk| self.answer_get(chunk));
    }

    /// The pager is gone, and another will ask: what was under way to servers has arrived, or not. What chunks there are is written
    /// down; those whose put was not answered may be there.
    pub(super) fn take_over(&mut self) {
        for (_, chunk, page) in std::mem::take(&mut self.answers) {
            let arrived = self.below(2) == 0;
            let Some(slot) = self.slots.get(&chunk) else { continue };
            let server = &mut self.servers[usize::from(slot.member)];
            let takes = server.away_since.is_none() && !server.full && !server.leaving && slot.life == server.life;
            if arrived && takes && slot.state == State::Putting {
                server.kept.insert(chunk, page.expect("a put has a page"));
            }
        }
        for slot in self.slots.values_mut() {
            (slot.abandoned, slot.inherited) = (false, false);
            slot.state = if slot.state == State::Putting { State::Putting } else { State::Kept };
        }
        for server in &mut self.servers {
            (server.puts, server.full_until, server.heard) = (0, None, None);
        }
        self.broken.clear();
        self.wake_at = None;
        let later = Duration::from_millis(self.below(100));
        self.now += later;
    }

    fn delay(&mut self) -> Duration {
        match self.below(50) {
            0 => Duration::from_micros(1000 + self.below(30_000)),
            _ => Duration::from_micros(50 + self.below(300)),
        }
    }

    fn answer_get(&mut self, chunk: u32) {
        let delay = self.delay();
        let slot = &self.slots[&chunk];
        let server = &self.servers[usize::from(slot.member)];
        let page = (slot.life == server.life).then(|| server.kept.get(&chunk).cloned()).flatten();
        self.answers.push((self.now + delay, chunk, page));
    }

    fn is_gone(&self, member: u8) -> bool {
        self.servers[usize::from(member)].away_since.is_some_and(|since| self.now >= since + DEADLINE)
    }

    /// Whether a server really has a chunk, and would give it.
    pub(super) fn has(&self, chunk: Handle) -> bool {
        let slot = &self.slots[&chunk.bits()];
        let server = &self.servers[usize::from(slot.member)];
        slot.state != State::Lost && slot.life == server.life && server.kept.contains_key(&chunk.bits())
    }

    /// For whoever looks into a failure.
    pub(super) fn about(&self, chunk: Handle) -> String {
        let slot = &self.slots[&chunk.bits()];
        let server = &self.servers[usize::from(slot.member)];
        format!("{:?} at {} of life {}, which is in {}", slot.state, slot.member, slot.life, server.life)
    }

    /// Chunks that anyone has, or speaks of.
    pub(super) fn chunks(&self) -> usize {
        self.servers.iter().map(|server| server.kept.len()).sum::<usize>().max(self.slots.len())
    }

    fn end_put(&mut self, chunk: u32, result: Result<(), StoreError>, done: &mut dyn FnMut(Completion<'_>)) {
        let Some(slot) = self.slots.get_mut(&chunk) else { return };
        if slot.state != State::Putting {
            return;
        }
        let member = usize::from(slot.member);
        slot.state = State::Kept;
        self.servers[member].puts -= 1;
        let abandoned = slot.abandoned;
        if abandoned || result.is_err() {
            self.slots.remove(&chunk);
            self.servers[member].forget.insert(chunk);
        }
        if !abandoned {
            let handle = Handle::from_bits(chunk).expect("it was given");
            done(Completion::Put { handle, result });
        }
    }

    fn end_get(&mut self, chunk: u32, page: Option<&Page>, done: &mut dyn FnMut(Completion<'_>)) {
        let hash = self.hash.clone();
        let Some(slot) = self.slots.get_mut(&chunk).filter(|slot| slot.state == State::Getting) else { return };
        let page = page.ok_or(StoreError::Lost);
        let page =
            page.and_then(|page| if hash.of(page) == slot.checksum { Ok(page) } else { Err(StoreError::Corrupt) });
        slot.state = if page.is_ok() { State::Kept } else { State::Lost };
        done(Completion::Got { handle: Handle::from_bits(chunk).expect("it was given"), page });
    }

    fn progress(&mut self, done: &mut dyn FnMut(Completion<'_>)) {
        let now = self.now;
        for chunk in std::mem::take(&mut self.broken) {
            self.end_put(chunk, Err(StoreError::Unavailable), done);
        }
        let mut due = Vec::new();
        let mut at = 0;
        while at < self.answers.len() {
            let (time, chunk, _) = &self.answers[at];
            let member = self.slots.get(chunk).map(|slot| usize::from(slot.member));
            let stalled =
                member.is_some_and(|member| self.servers[member].stalled_until.is_some_and(|until| now < until));
            if *time <= now && !stalled { due.push(self.answers.swap_remove(at)) } else { at += 1 }
        }
        for (_, chunk, page) in due {
            let Some(slot) = self.slots.get(&chunk) else { continue };
            self.servers[usize::from(slot.member)].heard = Some(now);
            match slot.state {
                State::Putting => {
                    let server = &mut self.servers[usize::from(slot.member)];
                    let full = server.full || server.leaving;
                    if full {
                        server.full_until = Some(now + Duration::from_secs(1));
                    } else {
                        server.kept.insert(chunk, page.expect("a put has a page"));
                    }
                    self.end_put(chunk, if full { Err(StoreError::Full) } else { Ok(()) }, done);
                }
                State::Getting => {
                    let lies = self.servers[usize::from(slot.member)].lies && self.below(4) > 0;
                    let mut page = page;
                    page.iter_mut().filter(|_| lies).for_each(|page| page[usize::from(page[5]) * 3] ^= 1);
                    self.end_get(chunk, page.as_deref(), done);
                }
                State::Kept | State::Lost => {}
            }
        }
        let overdue = |slot: &Slot| {
            let away = self.servers[usize::from(slot.member)].away_since.is_some();
            slot.state == State::Getting && (now >= slot.asked + DEADLINE || away && self.is_gone(slot.member))
        };
        let late: Vec<u32> = self.slots.iter().filter(|(_, slot)| overdue(slot)).map(|(chunk, _)| *chunk).collect();
        for chunk in late {
            // It is asked for again when it is wanted again.
            self.slots.get_mut(&chunk).expect("it is there").state = State::Kept;
            let handle = Handle::from_bits(chunk).expect("it was given");
            done(Completion::Got { handle, page: Err(StoreError::Lost) });
        }
        for server in self.servers.iter_mut().filter(|server| server.away_since.is_none()) {
            for chunk in std::mem::take(&mut server.forget) {
                server.kept.remove(&chunk);
            }
        }
        if self.wake_at.is_some_and(|at| at <= now) {
            self.wake_at = None;
        }
    }
}

/// What stripes are given.
pub(super) struct Simulated(pub(super) Arc<Mutex<World>>);

impl Simulated {
    fn world(&self) -> MutexGuard<'_, World> {
        self.0.lock().unwrap()
    }
}

impl Members for Simulated {
    fn count(&self) -> u8 {
        u8::try_from(self.world().servers.len()).unwrap()
    }

    fn now(&self) -> Instant {
        self.world().now
    }

    fn page_hash(&self) -> PageHash {
        self.world().hash.clone()
    }

    fn health(&self, member: u8, now: Instant) -> Health {
        let world = self.world();
        let server = &world.servers[usize::from(member)];
        Health {
            ready: server.away_since.is_none(),
            gone: world.is_gone(member),
            leaving: server.leaving && server.away_since.is_none(),
            full: server.full_until.is_some_and(|until| now < until),
            listed: !server.unlisted,
            domain: server.domain,
            room: server.puts < PUTS_MAX,
            life: server.life,
            load: 0,
            puts: server.puts,
        }
    }

    fn silence(&self, member: u8, now: Instant) -> Duration {
        let world = self.world();
        let of_it = |chunk: &u32| world.slots.get(chunk).is_some_and(|slot| slot.member == member);
        let owed = world.answers.iter().filter(|(_, chunk, _)| of_it(chunk)).map(|(due, ..)| *due).min();
        let since = owed.map(|due| world.servers[usize::from(member)].heard.map_or(due, |heard| heard.max(due)));
        since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
    }

    fn chunk(&self, chunk: Handle, _now: Instant) -> Chunk {
        let world = self.world();
        let slot = &world.slots[&chunk.bits()];
        let server = &world.servers[usize::from(slot.member)];
        let back = server.away_since.is_none();
        let presence = match slot.state {
            State::Lost => Presence::Dead,
            // That it has forgotten is known when it is back.
            State::Kept | State::Getting if back && slot.life != server.life => Presence::Dead,
            _ if back => Presence::There,
            _ if world.is_gone(slot.member) => Presence::Gone,
            _ => Presence::Away,
        };
        Chunk { member: slot.member, checksum: slot.checksum, presence }
    }

    fn put(&mut self, member: u8, page: &Page, checksum: u64, _now: Instant) -> Result<Handle, StoreError> {
        point();
        let mut world = self.world();
        world.next += 1;
        let (chunk, now, delay) = (world.next, world.now, world.delay());
        let server = &mut world.servers[usize::from(member)];
        assert!(server.away_since.is_none(), "what cannot be asked is asked nothing");
        assert!(!server.unlisted, "nothing new goes to what has left");
        server.puts += 1;
        let life = server.life;
        let slot =
            Slot { member, checksum, life, state: State::Putting, asked: now, abandoned: false, inherited: false };
        world.slots.insert(chunk, slot);
        world.answers.push((now + delay, chunk, Some(Box::new(*page))));
        Ok(Handle::from_bits(chunk).expect("few"))
    }

    fn get(&mut self, chunk: Handle, _urgency: Urgency, _into: &mut Page, _now: Instant) -> Result<Got, StoreError> {
        let mut world = self.world();
        let now = world.now;
        let presence = {
            drop(world);
            self.chunk(chunk, now).presence
        };
        world = self.world();
        let gone = matches!(presence, Presence::Gone | Presence::Dead);
        let slot = world.slots.get_mut(&chunk.bits()).expect("it is held");
        match slot.state {
            State::Getting => Ok(Got::Pending),
            _ if gone => Err(StoreError::Lost),
            State::Kept => {
                (slot.state, slot.asked) = (State::Getting, now);
                if presence == Presence::There {
                    world.answer_get(chunk.bits());
                }
                Ok(Got::Pending)
            }
            State::Putting | State::Lost => panic!("it was not kept"),
        }
    }

    fn free(&mut self, chunk: Handle) {
        point();
        let mut world = self.world();
        let slot = world.slots.get_mut(&chunk.bits()).expect("it is held");
        assert!(!slot.abandoned, "{chunk:?} is freed once");
        if slot.state == State::Putting {
            slot.abandoned = true;
            return;
        }
        let slot = world.slots.remove(&chunk.bits()).expect("just seen");
        let server = &mut world.servers[usize::from(slot.member)];
        server.forget.insert(chunk.bits());
    }

    fn progress(&mut self, _now: Instant, done: &mut dyn FnMut(Completion<'_>)) {
        point();
        self.world().progress(done);
    }

    fn flush(&mut self, _now: Instant) {}

    fn tidy(&mut self) -> bool {
        false
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn wake_at(&mut self, at: Instant, _now: Instant) {
        let mut world = self.world();
        if world.wake_at.is_none_or(|set| set > at) {
            (world.wake_at, world.alarms) = (Some(at), world.alarms + 1);
        }
    }

    fn inherit(&mut self, chunk: Handle) -> bool {
        point();
        let mut world = self.world();
        let slot = world.slots.get_mut(&chunk.bits()).filter(|slot| slot.state == State::Kept);
        slot.is_some_and(|slot| {
            assert!(!std::mem::replace(&mut slot.inherited, true), "two rows have one chunk");
            true
        })
    }

    fn inherit_no_more(&mut self) {
        point();
        let mut world = self.world();
        let left: Vec<u32> = world.slots.iter().filter(|(_, slot)| !slot.inherited).map(|(chunk, _)| *chunk).collect();
        for chunk in left {
            let slot = world.slots.remove(&chunk).expect("just seen");
            world.servers[usize::from(slot.member)].forget.insert(chunk);
        }
    }

    fn usage(&self) -> (u64, u64) {
        (self.world().slots.len() as u64, 0)
    }
}

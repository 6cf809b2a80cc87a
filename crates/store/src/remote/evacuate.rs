//! Pages of servers that leave are carried to others, a few at a time, within a budget.
//!
//! A page is read, put to another server under the same handle, and only when that one has it does the table say so; then
//! the copy that stayed behind, a *stray*, is freed by its name. Meanwhile the page can be read, shared and freed as ever:
//! - One that is being read just then, or is lost, stays where it is; the new copy is the stray.
//! - The handle of one that is freed is given anew only after its carriage has ended.
//! - Strays are freed before anything else is put on a connection, so what is put under the name again is not freed with them.

use std::time::Instant;

use super::handles::State;
use super::ops::{OpId, Ops};
use super::protocol::{Name, Protocol};
use super::server::Server;
use super::{Placement, Remote};
use crate::stripe::pace::Budget;
use crate::{Handle, Urgency};

/// Pages on their way at once.
const CARRIED_MAX: usize = 16;
/// Pages read and written in a second: 100 MB/s.
const PAGES_PER_SECOND: f64 = 25_600.0;
/// Slots looked at in one step.
const SLOTS_PER_STEP: u32 = 1024;
/// How long it rests when all slots were looked at and none was to be carried.
const REST: std::time::Duration = std::time::Duration::from_millis(100);

/// What has become of a page on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Carried {
    /// Its bytes are here.
    Read,
    /// The other server has it.
    Kept,
    /// It stays where it is.
    Stays,
}

/// All that is on its way.
pub(crate) struct Carriage {
    under_way: Vec<OpId>,
    /// What answers brought, until it is acted on.
    pub(crate) news: Vec<(OpId, Carried)>,
    next: u32,
    fruitless: u32,
    rest_until: Instant,
    budget: Budget,
}

impl Carriage {
    pub(crate) fn new(now: Instant) -> Self {
        let budget = Budget::new(PAGES_PER_SECOND, now);
        let (under_way, news) = (Vec::with_capacity(CARRIED_MAX), Vec::with_capacity(CARRIED_MAX));
        Self { under_way, news, next: 0, fruitless: 0, rest_until: now, budget }
    }

    /// Whether a page is on its way.
    pub(crate) fn has(&self, ops: &mut Ops, handle: Handle) -> bool {
        self.under_way.iter().any(|id| ops.get_mut(*id).is_some_and(|op| op.handle == handle))
    }
}

impl<P: Protocol> Remote<P> {
    /// Whether a page is on its way.
    pub(super) fn is_carried(&mut self, handle: Handle) -> bool {
        self.carriage.has(&mut self.ops, handle)
    }

    /// Begins to carry pages away from servers that leave.
    pub(super) fn evacuate(&mut self, now: Instant) {
        if self.placement == Placement::Given
            || now < self.carriage.rest_until
            || !self.servers.iter().any(Server::is_leaving)
        {
            return;
        }
        let slots = self.handles.len();
        for _ in 0..SLOTS_PER_STEP.min(slots) {
            if self.carriage.under_way.len() >= CARRIED_MAX || !self.carriage.budget.has(now) {
                return;
            }
            if self.carriage.fruitless >= slots {
                (self.carriage.fruitless, self.carriage.rest_until) = (0, now + REST);
                return;
            }
            self.carriage.fruitless += 1;
            self.carriage.next = self.carriage.next % slots + 1;
            let handle = Handle::from_bits(self.carriage.next).expect("slots have handles");
            let slot = *self.handles.slot(handle);
            let server = &self.servers[usize::from(slot.server)];
            let leaves = slot.state == State::Kept && server.is_leaving() && server.has(slot.epoch);
            if !leaves || self.handles.is_abandoned(handle) || self.is_carried(handle) {
                continue;
            }
            let Some(id) = self.ops.get(handle, Urgency::Prefetch, now + self.settings.deadline) else { return };
            self.ops.get_mut(id).expect("just begun").carries = true;
            self.carriage.under_way.push(id);
            self.carriage.fruitless = 0;
            self.carriage.budget.spend(2.0);
            self.servers[usize::from(slot.server)].queues.prefetch.push_back(id);
        }
    }

    /// Goes on with what answers brought.
    pub(super) fn carry_on(&mut self, now: Instant) {
        for at in 0..self.carriage.news.len() {
            let (id, what) = self.carriage.news[at];
            match what {
                Carried::Read => match self.choose(now) {
                    // Not to where it is: that server stays after all.
                    Ok(to) if to != self.carried_from(id) => {
                        self.ops.get_mut(id).expect("it is under way").to = to;
                        self.servers[usize::from(to)].puts += 1;
                        self.servers[usize::from(to)].queues.puts.push_back(id);
                    }
                    _ => self.end_carriage(id),
                },
                Carried::Kept => self.land(id),
                Carried::Stays => self.end_carriage(id),
            }
        }
        self.carriage.news.clear();
    }

    fn carried_from(&mut self, id: OpId) -> u8 {
        let handle = self.ops.get_mut(id).expect("it is under way").handle;
        self.handles.slot(handle).server
    }

    /// What was asked for a page that nobody refers to any more has ended: it leaves now, or when its carriage ends.
    pub(super) fn let_go(&mut self, handle: Handle) {
        if !self.is_carried(handle) {
            return self.leave(handle);
        }
        let slot = self.handles.slot_mut(handle);
        if slot.state == State::Getting {
            slot.state = State::Kept;
        }
    }

    /// The other server has the page.
    fn land(&mut self, id: OpId) {
        let op = *self.ops.get_mut(id).expect("it is under way");
        let slot = *self.handles.slot(op.handle);
        let mut stray = (op.to, op.epoch);
        if slot.state == State::Kept && !self.handles.is_abandoned(op.handle) {
            stray = (slot.server, slot.epoch);
            self.handles.carried(op.handle, op.to, op.epoch);
        }
        self.stray(stray, op.handle);
        self.end_carriage(id);
    }

    fn stray(&mut self, (server, epoch): (u8, u16), handle: Handle) {
        let server = &mut self.servers[usize::from(server)];
        if server.has(epoch) {
            server.strays.push(Name { epoch, handle: handle.bits() });
        }
    }

    /// The put of a page on its way has failed; the server may have it all the same, unless it never heard of it.
    pub(super) fn carriage_failed(&mut self, id: OpId, unheard: bool) {
        let op = *self.ops.get_mut(id).expect("it is under way");
        self.servers[usize::from(op.to)].puts -= 1;
        if !unheard {
            self.stray((op.to, op.epoch), op.handle);
        }
        self.end_carriage(id);
    }

    /// A page is no longer on its way.
    pub(super) fn end_carriage(&mut self, id: OpId) {
        let handle = self.ops.get_mut(id).expect("it is under way").handle;
        self.ops.end(id);
        self.carriage.under_way.retain(|other| *other != id);
        let state = self.handles.slot(handle).state;
        if self.handles.is_abandoned(handle) && matches!(state, State::Kept | State::Lost) {
            self.leave(handle);
        }
    }
}

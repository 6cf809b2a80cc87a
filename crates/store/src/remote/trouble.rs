//! Servers that decline, fall silent, go, or forget; and leaving them.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use super::handles::State;
use super::ops::{Kind, OpId, Stage};
use super::protocol::{Name, Protocol, Refusal};
use super::requests::Asked;
use super::server::Server;
use super::{GREETING_MAX, PATIENCE_MAX, Placement, Remote, TICK_CALM, TICK_TROUBLED, wait};
use crate::{Completion, Handle, Store, StoreError};

/// How long leaving takes at most: a million pages, at 500,000 a second.
const PARTING: Duration = Duration::from_secs(2);

impl<P: Protocol> Remote<P> {
    /// Ends what was under way at a server that has forgotten everything.
    pub(super) fn give_up_forgotten(&mut self, at: usize, done: &mut dyn FnMut(Completion<'_>)) {
        for id in self.ops.ids() {
            let Some(&mut op) = self.ops.get_mut(id) else { continue };
            let slot = *self.handles.slot(op.handle);
            let is_get = matches!(op.kind, Kind::Get(_)) && op.stage == Stage::Queued;
            if is_get && usize::from(slot.server) == at && !self.servers[at].has(slot.epoch) {
                self.lose(id, done);
            }
        }
    }

    /// Tells that a page will not come. Where it was not said to be gone, and its place was given, it is asked for again when it is wanted
    /// again: others of its row are asked for by nobody who needs them for themselves.
    pub(super) fn lose(&mut self, id: OpId, done: &mut dyn FnMut(Completion<'_>)) {
        let op = self.ops.get_mut(id).expect("it is under way");
        let handle = op.handle;
        let (sent, carries) = (op.stage == Stage::Sent, op.carries);
        op.stage = Stage::Given;
        if carries {
            // What was asked is answered still; what was not, never will be.
            if !sent {
                self.end_carriage(id);
            }
            return;
        }
        if !sent {
            self.ops.end(id);
        }
        let slot = *self.handles.slot(handle);
        let may_come = self.placement == Placement::Given && self.servers[usize::from(slot.server)].has(slot.epoch);
        self.handles.slot_mut(handle).state = if may_come { State::Kept } else { State::Lost };
        if self.handles.is_abandoned(handle) {
            self.let_go(handle);
        } else {
            done(Completion::Got { handle, page: Err(StoreError::Lost) });
        }
    }

    /// A connection has ended: puts are told, gets and frees wait for the next one.
    pub(super) fn disconnect(&mut self, at: usize, why: Refusal, now: Instant, done: &mut dyn FnMut(Completion<'_>)) {
        while let Some(items) = self.servers[at].requests.take_any() {
            for item in items {
                match item {
                    Asked::Put(id) => self.fail_put(id, StoreError::Unavailable, false, done),
                    Asked::Get(id) => self.ask_again(at, id),
                    Asked::Stray(epoch, handle) => self.servers[at].strays.push(Name { epoch, handle }),
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
        if self.tick != TICK_TROUBLED {
            self.set_tick(TICK_TROUBLED);
            // No later than it was: that it is overdue tells that we did not run.
            self.next_tick = self.next_tick.min(now + self.tick / 2);
        }
    }

    pub(super) fn ask_again(&mut self, at: usize, id: OpId) {
        let op = self.ops.get_mut(id).expect("it is under way");
        let handle = op.handle;
        if op.carries {
            self.end_carriage(id);
        } else if op.stage == Stage::Given {
            self.ops.end(id);
        } else if self.handles.is_abandoned(handle) {
            self.ops.end(id);
            self.let_go(handle);
        } else {
            op.stage = Stage::Queued;
            let kind = op.kind;
            self.servers[at].queues.of(kind).push_back(id);
        }
    }

    /// The page was not kept. The server may have it all the same, unless it was never sent or was declined.
    pub(super) fn fail_put(
        &mut self,
        id: OpId,
        error: StoreError,
        unheard: bool,
        done: &mut dyn FnMut(Completion<'_>),
    ) {
        let op = self.ops.get_mut(id).expect("it is under way");
        if op.carries {
            return self.carriage_failed(id, unheard);
        }
        let handle = op.handle;
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
    pub(super) fn place_elsewhere(&mut self, now: Instant, done: &mut dyn FnMut(Completion<'_>)) {
        while let Some(id) = self.declined.pop() {
            let handle = self.ops.get_mut(id).expect("it is under way").handle;
            if self.placement == Placement::Given {
                self.fail_put(id, StoreError::Full, true, done);
                continue;
            }
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

    pub(super) fn keep_house(&mut self, now: Instant, done: &mut dyn FnMut(Completion<'_>)) {
        let (patience, greeting) = (self.at_most(PATIENCE_MAX), self.at_most(GREETING_MAX));
        if now.saturating_duration_since(self.next_tick) > TICK_CALM * 2 {
            // It was us who did not run: no silence of others follows from that, and what they answered meanwhile may still be
            // in our sockets, of which a pass takes a part.
            let lost = now.saturating_duration_since(self.next_tick);
            self.servers.iter_mut().for_each(|server| server.pass_over(lost, now));
            self.ops.put_off(lost, now + self.settings.deadline);
        }
        for at in 0..self.servers.len() {
            self.servers[at].leave_now = true;
            if let Err(why) = self.servers[at].keep_alive(now, patience, greeting, self.settings.deadline) {
                self.disconnect(at, why, now, done);
            }
        }
        self.lose_overdue(now, done);
        self.heed_news();
        self.keep_addresses(now);
        let is_well = |server: &Server<P>| server.is_ready() && !server.is_leaving();
        let calm = self.servers.iter().all(|server| is_well(server) || self.is_retired(server, now));
        self.set_tick(if calm { TICK_CALM } else { TICK_TROUBLED });
        self.next_tick = now + self.tick / 2;
    }

    /// Gives up what was asked for too long ago, or waits for a server that has been away for as long as anyone waits: one
    /// that is dead must not cost each page a deadline of its own.
    fn lose_overdue(&mut self, now: Instant, done: &mut dyn FnMut(Completion<'_>)) {
        let deadline = self.settings.deadline;
        let is_gone = |server: &Server<P>| server.is_gone(now, deadline);
        if !self.ops.is_overdue(now) && !self.servers.iter().any(is_gone) {
            return;
        }
        for id in self.ops.ids() {
            let Some(&mut op) = self.ops.get_mut(id) else { continue };
            let server = &self.servers[usize::from(self.handles.slot(op.handle).server)];
            let waits = matches!(op.kind, Kind::Get(_)) && op.stage == Stage::Queued;
            if op.is_overdue(now) || waits && is_gone(server) {
                self.lose(id, done);
            }
        }
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
            self.servers.iter_mut().for_each(|server| server.leave_now = true);
            self.progress(&mut |_| {});
            wait(self.poller.as_fd(), TICK_TROUBLED);
        }
    }
}

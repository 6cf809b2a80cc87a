//! What becomes of rows that are being written.

use std::time::Instant;

#[cfg(test)]
use super::Mutation;
use super::fills::{Chunk, Origin};
use super::members::{Members, Presence};
use super::table::{Place, State};
use super::{Core, Putting, WIDTH_MAX};
use crate::{Completion, Handle, StoreError};

impl Core {
    /// A chunk's put has ended.
    pub(super) fn kept(&mut self, chunk: Handle, result: Result<(), StoreError>, now: Instant) {
        match self.puts.remove(&chunk) {
            Some(Putting::Fill(fill, position)) => {
                let (fill, at) = (usize::from(fill), usize::from(position));
                let of = &mut self.fills[fill];
                if result.is_ok() {
                    of.chunks[at] = Chunk::Acked(chunk);
                    self.news |= 1 << fill;
                    self.counts.chunks_put += 1;
                    self.watch.answered(of.members[at]);
                } else {
                    of.chunks[at] = Chunk::Unsent;
                    self.look_by(now);
                }
            }
            Some(Putting::Rebuild(job)) => self.jobs.rebuilt(job, chunk, result),
            // What it was for has gone.
            None => {}
        }
    }

    /// Whether each chunk of a fill has a fate.
    fn is_settled(&self, fill: usize) -> bool {
        let from = &self.fills[fill];
        let has_fate = |at: u8| {
            #[cfg(test)]
            if self.mutation == Some(Mutation::AckEarly) && usize::from(at) >= self.shape.data {
                return matches!(from.chunks[usize::from(at)], Chunk::Acked(_) | Chunk::Missing | Chunk::Sent(..));
            }
            matches!(from.chunks[usize::from(at)], Chunk::Acked(_) | Chunk::Missing)
        };
        from.closed && self.shape.used(from.length).all(has_fate)
    }

    /// What a member has forgotten since it took it is sent again. How many chunks no one has, or a member that cannot be asked.
    fn doubt(&mut self, members: &mut dyn Members, fill: usize, now: Instant) -> usize {
        let mut missing = 0;
        for position in self.shape.positions() {
            let at = usize::from(position);
            if let Chunk::Acked(chunk) = self.fills[fill].chunks[at] {
                match members.chunk(chunk, now).presence {
                    Presence::There => {}
                    Presence::Away | Presence::Gone => missing += 1,
                    Presence::Dead => {
                        members.free(chunk);
                        self.fills[fill].chunks[at] = Chunk::Unsent;
                        self.send(members, fill, position, now);
                    }
                }
            }
            missing += usize::from(self.fills[fill].chunks[at] == Chunk::Missing);
        }
        missing
    }

    /// Ends a fill whose chunks all have a fate.
    pub(super) fn settle(
        &mut self,
        members: &mut dyn Members,
        fill: usize,
        now: Instant,
        done: &mut dyn FnMut(Completion<'_>),
    ) {
        self.news &= !(1 << fill);
        let from = &self.fills[fill];
        if from.row.is_none() {
            return;
        }
        if let Some(error) = from.failed {
            return self.fail(members, fill, error, done);
        }
        // Answers come one by one, and members are looked at with the last of them only.
        if !self.is_settled(fill) {
            return;
        }
        let missing = self.doubt(members, fill, now);
        if !self.is_settled(fill) {
            return;
        }
        // What has gone since it was kept may leave too little; whoever put the pages still has them.
        if missing > self.shape.parity {
            return self.fail(members, fill, StoreError::Unavailable, done);
        }
        if missing > 0 {
            // A sweep may have passed the row by then.
            self.upkeep.awake(now);
            self.look_by(now);
        }
        self.commit(members, fill, done);
    }

    /// The row is kept: its pages are there now.
    fn commit(&mut self, members: &mut dyn Members, fill: usize, done: &mut dyn FnMut(Completion<'_>)) {
        let row = self.take_row(fill);
        let length = self.fills[fill].length;
        for position in self.shape.used(length) {
            let chunk = match self.fills[fill].chunks[usize::from(position)] {
                Chunk::Acked(chunk) | Chunk::Sent(chunk, _) => Some(chunk),
                _ => None,
            };
            self.rows.set_chunk(row, position, chunk);
        }
        let mut live = 0;
        for position in 0..length {
            live |= u16::from(self.fills[fill].entries[usize::from(position)].is_some()) << position;
        }
        self.rows.written(row, length, live);
        #[cfg(test)]
        if self.is_wrong(Mutation::PlaceFirst) {
            self.rows.unwrite(row);
        }
        self.counts.groups += 1;
        self.upkeep.count_new(self.rows.lives(row));
        for position in 0..length {
            let Some((handle, origin)) = self.fills[fill].entries[usize::from(position)].take() else { continue };
            let place = Place { row, position };
            match origin {
                Origin::New => {
                    self.pages.set(handle, State::Kept(place, None));
                    done(Completion::Put { handle, result: Ok(()) });
                }
                Origin::Moved(before) => {
                    self.pages.set_moving(handle, false);
                    let State::Kept(at, job) = self.pages.held(handle) else { unreachable!("moved pages are kept") };
                    assert_eq!(at, before, "a page moves once at a time");
                    if let Some(job) = job {
                        self.end(job);
                        done(Completion::Got { handle, page: Ok(&self.fills[fill].pages[usize::from(position)]) });
                    }
                    #[cfg(test)]
                    if self.mutation == Some(Mutation::ForgetMove) {
                        self.leave(members, before, self.pages.is_home(handle));
                        continue;
                    }
                    self.pages.set(handle, State::Kept(place, None));
                    self.counts.moved_pages += 1;
                    let home = self.pages.is_home(handle);
                    if home {
                        self.recount(row, |rows| rows.set_home(row, true));
                    }
                    self.leave(members, before, home);
                }
            }
        }
        #[cfg(test)]
        if self.is_wrong(Mutation::PlaceFirst) {
            self.rows.written(row, length, live);
        }
        if live == 0 {
            self.upkeep.count_gone();
            self.remove_row(members, row);
        }
    }

    /// The row cannot be kept.
    fn fail(
        &mut self,
        members: &mut dyn Members,
        fill: usize,
        error: StoreError,
        done: &mut dyn FnMut(Completion<'_>),
    ) {
        let moves = self.fills[fill].moves;
        if !self.fills[fill].closed {
            self.open[usize::from(moves)] = None;
        }
        for chunk in std::mem::replace(&mut self.fills[fill].chunks, [Chunk::Absent; WIDTH_MAX]) {
            if let Chunk::Sent(chunk, _) | Chunk::Acked(chunk) = chunk {
                self.puts.remove(&chunk);
                members.free(chunk);
            }
        }
        let row = self.take_row(fill);
        self.rows.remove(row);
        for (handle, origin) in std::mem::take(&mut self.fills[fill].entries).into_iter().flatten() {
            match origin {
                Origin::New => {
                    self.pages.release_all(handle);
                    self.pages.remove(handle);
                    done(Completion::Put { handle, result: Err(error) });
                }
                Origin::Moved(_) => self.pages.set_moving(handle, false),
            }
        }
    }

    /// A page that is being moved is freed.
    pub(super) fn forget_moved(&mut self, handle: Handle) {
        let moved =
            |entry: &&mut Option<(Handle, Origin)>| matches!(entry, Some((of, Origin::Moved(_))) if *of == handle);
        if let Some(entry) = self.fills.iter_mut().flat_map(|fill| &mut fill.entries).find(moved) {
            *entry = None;
        }
    }
}

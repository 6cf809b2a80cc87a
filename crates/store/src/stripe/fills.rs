//! Rows that are being written.
//!
//! ```text
//! chunk: Absent --page or parity--> Unsent --asked--> Sent --kept--> Acked
//!                                   Unsent <--declined, or its member went, or is silent-- Sent
//!                                   Unsent --no other member, and one is away--> Missing
//! fill:  free --put--> open --as long as planned, or waited for long--> closed --all Acked or Missing--> free: a row
//!                                                                      closed --a chunk finds no place--> free: told
//! ```
//! The pages stay here until the row is kept, so a chunk can be sent again, and reads find them.

use std::time::{Duration, Instant};

use spillway_core::{PAGE_BYTES, Page};

#[cfg(test)]
use super::Mutation;
use super::members::{Members, Presence};
use super::table::Place;
use super::watch::SUSPECT_AFTER;
use super::{Core, DATA_MAX, Putting, Shape, WIDTH_MAX};
use crate::{Handle, StoreError};

/// Chunks in rows that are being written: 1 MiB, as much as connections have on their way.
pub(super) const CHUNKS_MAX: usize = 256;
const _: () = assert!(CHUNKS_MAX / 2 <= u128::BITS as usize, "a row has two chunks at the least");
/// How long a row waits for more pages. Longer than evicting a batch takes; a fork waits for it.
const LINGER: Duration = Duration::from_millis(5);
/// The same for pages that are moved, for which nobody waits.
const LINGER_MOVED: Duration = Duration::from_millis(500);

/// Why a page is in a fill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// It was put.
    New,
    /// It is at another place, too, until the row is kept.
    Moved(Place),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Chunk {
    Absent,
    Unsent,
    Sent(Handle, Instant),
    Acked(Handle),
    Missing,
}

/// A row that is being written, or room for one.
pub(super) struct Fill {
    /// None while it is free.
    pub(super) row: Option<u32>,
    /// Data chunks that it has, and is to have.
    pub(super) length: u8,
    pub(super) planned: u8,
    /// Parity chunks that find a member.
    pub(super) parity: u8,
    pub(super) closed: bool,
    pub(super) failed: Option<StoreError>,
    pub(super) opened: Instant,
    pub(super) moves: bool,
    pub(super) entries: [Option<(Handle, Origin)>; DATA_MAX],
    pub(super) checksums: [u64; WIDTH_MAX],
    pub(super) chunks: [Chunk; WIDTH_MAX],
    pub(super) members: [u8; WIDTH_MAX],
    pub(super) pages: Box<[Page]>,
}

impl Fill {
    pub(super) fn new(shape: Shape, now: Instant) -> Self {
        Self {
            row: None,
            length: 0,
            planned: 0,
            parity: 0,
            closed: false,
            failed: None,
            opened: now,
            moves: false,
            entries: [None; DATA_MAX],
            checksums: [0; WIDTH_MAX],
            chunks: [Chunk::Absent; WIDTH_MAX],
            members: [0; WIDTH_MAX],
            pages: vec![[0; PAGE_BYTES]; shape.width()].into(),
        }
    }

    fn linger(&self) -> Duration {
        if self.moves { LINGER_MOVED } else { LINGER }
    }

    /// Chunks that no one has, or that a member has which cannot be asked.
    pub(super) fn missing(&self, members: &dyn Members, now: Instant) -> usize {
        let missing = |chunk: &&Chunk| match chunk {
            Chunk::Missing => true,
            Chunk::Acked(chunk) => members.chunk(*chunk, now).presence != Presence::There,
            Chunk::Absent | Chunk::Unsent | Chunk::Sent(..) => false,
        };
        self.chunks.iter().filter(missing).count()
    }

    /// Whether a member has, or is to have, one of its chunks.
    fn uses(&self, shape: Shape, member: u8) -> bool {
        self.to_have(shape).any(|at| self.members[usize::from(at)] == member)
    }

    /// Positions of the chunks that members have, or are to have.
    pub(super) fn to_have(&self, shape: Shape) -> impl Iterator<Item = u8> + use<> {
        let end = shape.data + usize::from(self.parity);
        shape.used(self.planned).filter(move |at| usize::from(*at) < end)
    }
}

impl Core {
    /// Whether a page would be taken.
    pub(super) fn accepts(&self, members: &dyn Members) -> bool {
        if self.open[0].is_some() {
            return true;
        }
        let now = members.now();
        self.free_fills() > 0 && self.lay_out(members, now, 0).is_ok()
    }

    fn free_fills(&self) -> usize {
        self.fills.len() - self.in_use.count_ones() as usize
    }

    /// Has a fill do without a row; the row that it had.
    pub(super) fn take_row(&mut self, fill: usize) -> u32 {
        self.in_use &= !(1 << fill);
        self.fills[fill].row.take().expect("it is being written")
    }

    /// The fill that pages of an origin go to now.
    pub(super) fn open_fill(
        &mut self,
        members: &mut dyn Members,
        origin: Origin,
        now: Instant,
    ) -> Result<usize, StoreError> {
        let moves = origin != Origin::New;
        if let Some(fill) = self.open[usize::from(moves)] {
            return Ok(fill.into());
        }
        // Moved pages leave room for what targets wait to get rid of.
        if self.free_fills() <= if moves { self.fills.len() / 2 } else { 0 } {
            return Err(StoreError::Unavailable);
        }
        let fill = self.in_use.trailing_ones() as usize;
        let salt = self.random_below(u64::MAX);
        let layout = self.lay_out(members, now, salt)?;
        let row = self.rows.insert().ok_or(StoreError::Full)?;
        let to = &mut self.fills[fill];
        (to.row, to.length, to.planned, to.parity) = (Some(row), 0, layout.data, layout.parity);
        (to.closed, to.failed, to.opened, to.moves) = (false, None, now, moves);
        self.in_use |= 1 << fill;
        to.members = layout.members;
        to.chunks = [Chunk::Absent; WIDTH_MAX];
        to.entries = [None; DATA_MAX];
        self.open[usize::from(moves)] = u8::try_from(fill).ok();
        let by = now + self.fills[fill].linger();
        self.look_by(by);
        Ok(fill)
    }

    /// Adds a page to an open fill; its position.
    pub(super) fn append(
        &mut self,
        members: &mut dyn Members,
        fill: usize,
        entry: (Handle, Origin),
        page: &Page,
        checksum: u64,
        now: Instant,
    ) -> (u8, u8) {
        let to = &mut self.fills[fill];
        let position = to.length;
        let at = usize::from(position);
        to.pages[at] = *page;
        to.checksums[at] = checksum;
        to.entries[at] = Some(entry);
        to.chunks[at] = Chunk::Unsent;
        to.length += 1;
        let whole = to.length == to.planned;
        self.send(members, fill, position, now);
        if whole {
            self.close(members, fill, now);
        }
        (u8::try_from(fill).expect("few"), position)
    }

    /// No more pages: makes the parity.
    fn close(&mut self, members: &mut dyn Members, fill: usize, now: Instant) {
        let to = &mut self.fills[fill];
        self.open[usize::from(to.moves)] = None;
        to.closed = true;
        self.news |= 1 << fill;
        let data = usize::from(to.length);
        #[cfg(test)]
        let data = if self.mutation == Some(Mutation::StaleParity) && data > 1 { data - 1 } else { data };
        self.code.encode(self.shape, &mut to.pages, data);
        for at in self.shape.data..self.shape.width() {
            let to = &mut self.fills[fill];
            let sent = at - self.shape.data < usize::from(to.parity);
            to.checksums[at] = self.hash.of(&to.pages[at]);
            to.chunks[at] = if sent { Chunk::Unsent } else { Chunk::Missing };
            if sent {
                self.send(members, fill, u8::try_from(at).expect("few"), now);
            }
        }
    }

    /// Sends a chunk to its member, or to another if that one takes none. What finds no room now is tried again.
    pub(super) fn send(&mut self, members: &mut dyn Members, fill: usize, position: u8, now: Instant) {
        let at = usize::from(position);
        let takes = |member: u8| members.health(member, now).takes();
        let from = &self.fills[fill];
        if !takes(from.members[at]) {
            let free = |member: &u8| takes(*member) && !from.uses(self.shape, *member);
            let sound = |member: &u8| free(member) && !self.watch.is_suspect(*member, now);
            let stand_in = self.stand_in(members, from, position, sound, now);
            let spare = stand_in.or_else(|| self.stand_in(members, from, position, free, now));
            #[cfg(test)]
            let spare = match self.mutation {
                Some(Mutation::ShareMember) => (0..members.count()).find(|member| takes(*member)),
                _ => spare,
            };
            let missing = from.missing(members, now);
            let is_away = |member: &u8| {
                let health = members.health(*member, now);
                !health.ready && !health.is_retired()
            };
            let away = (0..members.count()).filter(is_away).count();
            let to = &mut self.fills[fill];
            match spare {
                Some(member) => to.members[at] = member,
                None if missing < self.shape.parity.min(away) => {
                    to.chunks[at] = Chunk::Missing;
                    self.news |= 1 << fill;
                    return;
                }
                None => {
                    to.failed = Some(if away > 0 { StoreError::Unavailable } else { StoreError::Full });
                    self.news |= 1 << fill;
                    self.look_by(now);
                    return;
                }
            }
        }
        let from = &self.fills[fill];
        match members.put(from.members[at], &from.pages[at], from.checksums[at], now) {
            Ok(chunk) => {
                self.fills[fill].chunks[at] = Chunk::Sent(chunk, now);
                self.puts.insert(chunk, Putting::Fill(u8::try_from(fill).expect("few"), position));
                self.look_by(now + SUSPECT_AFTER);
            }
            Err(_) => self.look_by(now + super::LOOK),
        }
    }

    /// Its member is silent. Another takes the chunk; where there is none, whoever put the pages puts them again, into a row
    /// that does without that member. Where too few are left for that, it is waited for.
    fn divert(&mut self, members: &mut dyn Members, fill: usize, position: u8, now: Instant) {
        let at = usize::from(position);
        let sound = |member: &u8| members.health(*member, now).takes() && !self.watch.is_suspect(*member, now);
        let from = &self.fills[fill];
        let free = |member: &u8| sound(member) && !from.uses(self.shape, *member);
        let spare = self.stand_in(members, from, position, free, now);
        let are_enough = (0..members.count()).filter(sound).count() > self.shape.parity;
        let of = &mut self.fills[fill];
        match spare {
            Some(spare) => {
                of.members[at] = spare;
                if let Chunk::Sent(chunk, _) = std::mem::replace(&mut of.chunks[at], Chunk::Unsent) {
                    self.puts.remove(&chunk);
                    members.free(chunk);
                }
            }
            None if are_enough => {
                of.failed = Some(StoreError::Unavailable);
                self.news |= 1 << fill;
            }
            None => {}
        }
    }

    /// Closes what has waited long enough, and sends again what found no room.
    pub(super) fn look_at_fills(&mut self, members: &mut dyn Members, now: Instant) {
        let mut in_use = self.in_use;
        while in_use != 0 {
            let fill = in_use.trailing_zeros() as usize;
            in_use &= in_use - 1;
            let of = &self.fills[fill];
            if !of.closed {
                let by = of.opened + of.linger();
                if now >= by { self.close(members, fill, now) } else { self.look_by(by) }
            }
            for position in self.shape.positions() {
                let of = &self.fills[fill];
                let waits = matches!(of.chunks[usize::from(position)], Chunk::Unsent | Chunk::Sent(..));
                if waits && self.watch.is_silent(of.members[usize::from(position)]) {
                    self.divert(members, fill, position, now);
                }
                match self.fills[fill].chunks[usize::from(position)] {
                    Chunk::Unsent => self.send(members, fill, position, now),
                    Chunk::Sent(_, since) if now >= since + SUSPECT_AFTER => {
                        self.watch.suspect(self.fills[fill].members[usize::from(position)], now);
                        self.look_by(now + super::LOOK);
                    }
                    Chunk::Sent(_, since) => self.look_by(since + SUSPECT_AFTER),
                    Chunk::Absent | Chunk::Acked(_) | Chunk::Missing => {}
                }
            }
        }
    }

    /// Whether every chunk that was taken is there, and none is missing.
    #[cfg(test)]
    pub(super) fn are_fills_whole(&self, there: impl Fn(Handle) -> bool) -> bool {
        let written = self.fills.iter().filter(|fill| fill.row.is_some());
        written.flat_map(|fill| fill.chunks).all(|chunk| match chunk {
            Chunk::Acked(chunk) => there(chunk),
            Chunk::Missing => false,
            Chunk::Absent | Chunk::Unsent | Chunk::Sent(..) => true,
        })
    }

    /// Whether nothing is being written.
    #[cfg(test)]
    pub(super) fn is_written_out(&self) -> bool {
        let has_row = |(at, fill): (usize, &Fill)| {
            assert_eq!(fill.row.is_some(), self.in_use >> at & 1 == 1, "{at}");
            fill.row.is_some()
        };
        !self.fills.iter().enumerate().any(has_row) && self.puts.is_empty()
    }
}

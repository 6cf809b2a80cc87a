//! A pool that survives the loss of servers: pages in rows of data chunks and parity, each chunk at another member.
//!
//! Invariants:
//! - No two chunks of a row are at the same member, nor in the same domain where there are enough (`spread.rs`).
//! - A put is complete when its whole row is kept: as many chunks as the pool is meant to lose may go from then on. While
//!   members are away, a row that has no other member to go to counts them as lost already, and is made whole later.
//! - A row never changes once it is written. A page that is rewritten leaves a hole; a row without pages goes; rows of few
//!   pages are emptied into new ones (`upkeep.rs`).
//! - What comes from a member was verified there; what is made out of other chunks is verified here.
//! - No operation waits for upkeep: rebuilding and compacting have a budget, and read and write as everyone does.
//!
//! Nothing here knows sockets or clocks: `members::Members` has both, so the tests run this code under simulated ones.

mod code;
mod commit;
mod fetch;
mod fills;
pub(crate) mod inherit;
mod jobs;
pub(crate) mod members;
pub(crate) mod pace;
pub(crate) mod spread;
mod table;
#[cfg(test)]
mod tests;
mod upkeep;
mod watch;
mod words;

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use spillway_codec::Compression;
use spillway_core::{PAGE_BYTES, Page};

use crate::hash::PageHash;
use crate::vault::Vault;
use crate::{Completion, Got, Handle, Prepared, Preparer, Protection, Put, Status, Store, StoreError, Urgency};
use code::Code;
use fills::{Fill, Origin};
use jobs::{Jobs, Purpose, Step};
use members::{Members, Presence};
use pace::Latency;
use table::{Pages, Place, Rows, State};
use upkeep::Upkeep;
use watch::Watch;

/// Chunks of a row: how many are pages, and how many may be lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// 1 to [`DATA_MAX`].
    pub data: usize,
    /// 1 or 2.
    pub parity: usize,
}

/// Data chunks that a row may have.
pub const DATA_MAX: usize = table::DATA_MAX;
/// Parity chunks that a row may have.
pub const PARITY_MAX: usize = 2;
const WIDTH_MAX: usize = DATA_MAX + PARITY_MAX;

impl Shape {
    /// Members that a row needs.
    #[must_use]
    pub fn width(self) -> usize {
        self.data + self.parity
    }

    /// Pages that are written for each page, with its share of parity.
    fn written(self) -> f64 {
        self.width() as f64 / self.data as f64
    }
}

/// How often upkeep is looked after while there is any, and what waits for room is tried again.
const LOOK: Duration = Duration::from_millis(20);

/// When what nobody waits for goes on, if nothing else happens before: an alarm of its own would disturb those who wait.
const SOON: Duration = Duration::from_millis(1);

/// What a put of a chunk was for.
#[derive(Clone, Copy)]
enum Putting {
    Fill(u8, u8),
    Rebuild(u16),
}

/// Deliberate mistakes, which the tests must notice.
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mutation {
    AckEarly,
    ShareMember,
    ShareDomain,
    RebuildAnywhere,
    LeakChunks,
    ForgetMove,
    StaleParity,
    IgnoreFailure,
    NeverRebuild,
    // Those that only another pager sees.
    PlaceFirst,
    FreeFirst,
    KeepUnnamed,
    KeepStrays,
}

/// The state, without the members.
struct Core {
    shape: Shape,
    code: Code,
    hash: PageHash,
    pages: Pages,
    rows: Rows,
    fills: Vec<Fill>,
    /// Fills that have a row, bit by bit: most have none, and each takes many cache lines.
    in_use: u128,
    /// Fills of whose chunks something has become, bit by bit.
    news: u128,
    /// The rows that new pages and moved pages go to.
    open: [Option<u8>; 2],
    jobs: Jobs,
    puts: HashMap<Handle, Putting>,
    watch: Watch,
    latency: Latency,
    upkeep: Upkeep,
    counts: Protection,
    scratch: Box<Page>,
    next_look: Instant,
    random: u64,
    #[cfg(test)]
    mutation: Option<Mutation>,
}

/// Stripes over members.
pub(crate) struct Stripes {
    members: Box<dyn Members>,
    core: Core,
}

impl Stripes {
    /// None yet. There are at least as many members as a row has chunks. Whatever must be known to take over is kept in the
    /// vault, if there is one.
    pub(crate) fn new(members: Box<dyn Members>, shape: Shape, vault: Option<&Vault>) -> Self {
        Self::with(members, shape, Pages::new(vault), Rows::new(shape.width(), vault))
    }

    fn with(members: Box<dyn Members>, shape: Shape, pages: Pages, rows: Rows) -> Self {
        let now = members.now();
        let fills = (fills::CHUNKS_MAX / shape.width()).max(2);
        let core = Core {
            shape,
            code: Code::new(shape),
            hash: members.page_hash(),
            pages,
            rows,
            fills: (0..fills).map(|_| Fill::new(shape, now)).collect(),
            in_use: 0,
            news: 0,
            open: [None; 2],
            jobs: Jobs::new(shape),
            puts: HashMap::with_capacity(2 * fills::CHUNKS_MAX),
            watch: Watch::new(usize::from(members.count())),
            latency: Latency::default(),
            upkeep: Upkeep::new(shape, now),
            counts: Protection::default(),
            scratch: Box::new([0; PAGE_BYTES]),
            next_look: now,
            random: u64::from(std::process::id()) | 1 << 40,
            #[cfg(test)]
            mutation: None,
        };
        Self { members, core }
    }
}

impl Core {
    #[cfg(test)]
    fn is_wrong(&self, mutation: Mutation) -> bool {
        self.mutation == Some(mutation)
    }

    fn random_below(&mut self, limit: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 20) % limit
    }

    /// Looks at things by then at the latest.
    fn look_by(&mut self, at: Instant) {
        self.next_look = self.next_look.min(at);
    }

    /// Whether the older copy holds the same, where it can be had without making it out of others.
    fn unchanged(&self, members: &dyn Members, previous: Handle, checksum: u64, now: Instant) -> Option<Put> {
        match self.pages.held(previous) {
            State::Filling(fill, position) => {
                let same = self.fills[usize::from(fill)].checksums[usize::from(position)] == checksum;
                same.then_some(Put::Pending(previous))
            }
            State::Kept(place, _) => {
                let chunk = members.chunk(self.rows.chunk(place.row, place.position)?, now);
                let there = match chunk.presence {
                    Presence::There => true,
                    // The page is in hand: it is let go only if it can be made out of others, should its member have forgotten it.
                    Presence::Away => self.is_enough_there(members, place.row, now),
                    Presence::Gone | Presence::Dead => false,
                };
                (chunk.checksum == checksum && there).then_some(Put::Unchanged(previous))
            }
            State::Free => None,
        }
    }

    /// Whether any page of a row can be had of members that can be asked now.
    fn is_enough_there(&self, members: &dyn Members, row: u32, now: Instant) -> bool {
        let length = self.rows.length(row);
        let chunks = self.shape.used(length).filter_map(|position| self.rows.chunk(row, position));
        chunks.filter(|chunk| members.chunk(*chunk, now).presence == Presence::There).count() >= usize::from(length)
    }

    fn put(
        &mut self,
        members: &mut dyn Members,
        page: &Page,
        checksum: u64,
        previous: Option<Handle>,
    ) -> Result<Put, StoreError> {
        let now = members.now();
        let unchanged = previous.and_then(|previous| self.unchanged(members, previous, checksum, now));
        if previous.is_some() {
            self.upkeep.note_return(unchanged.is_some());
        }
        if let Some(put) = unchanged {
            if let Put::Unchanged(handle) = put {
                self.set_home(handle, false);
                self.move_along(members, handle, (page, checksum), now);
            }
            return Ok(put);
        }
        let fill = self.open_fill(members, Origin::New, now)?;
        let handle = self.pages.insert().ok_or(StoreError::Full)?;
        let (fill, position) = self.append(members, fill, (handle, Origin::New), page, checksum, now);
        self.pages.set(handle, State::Filling(fill, position));
        self.upkeep.earn();
        if let Some(previous) = previous {
            self.free(members, previous);
        }
        Ok(Put::Pending(handle))
    }

    fn get(
        &mut self,
        members: &mut dyn Members,
        handle: Handle,
        urgency: Urgency,
        into: &mut Page,
    ) -> Result<Got, StoreError> {
        let now = members.now();
        let (place, job) = match self.pages.held(handle) {
            State::Filling(fill, position) => {
                *into = self.fills[usize::from(fill)].pages[usize::from(position)];
                return Ok(Got::Here);
            }
            State::Kept(place, job) => (place, job),
            State::Free => unreachable!("it is held"),
        };
        if let Some(job) = job {
            if urgency == Urgency::Demand {
                self.jobs.hurry(members, job, into, now);
            }
            return Ok(Got::Pending);
        }
        let job = self.begin(place, Purpose::Read(handle), urgency, now).ok_or(StoreError::Unavailable)?;
        self.pages.set_job(handle, Some(job));
        match self.advance(members, job, now) {
            Step::Pending => Ok(Got::Pending),
            Step::Here => {
                *into = *self.scratch;
                self.end(job);
                Ok(Got::Here)
            }
            Step::Failed(error) => {
                self.counts.lost_pages += 1;
                self.end(job);
                Err(error)
            }
        }
    }

    fn free(&mut self, members: &mut dyn Members, handle: Handle) {
        if !self.pages.release(handle) {
            return;
        }
        if self.pages.is_moving(handle) {
            self.call_off_move(handle);
        }
        match self.pages.held(handle) {
            State::Filling(fill, position) => self.fills[usize::from(fill)].entries[usize::from(position)] = None,
            State::Kept(place, job) => {
                if let Some(job) = job {
                    self.end(job);
                }
                self.leave(members, place, self.pages.is_home(handle));
            }
            State::Free => unreachable!("it is held"),
        }
        self.pages.remove(handle);
    }

    /// A page, which is local as well if it is `home`, is no longer at a place.
    fn leave(&mut self, members: &mut dyn Members, place: Place, home: bool) {
        self.recount(place.row, |rows| {
            if home {
                rows.set_home(place.row, false);
            }
            rows.hole(place);
        });
        if self.rows.live(place.row) == 0 {
            self.upkeep.count_gone();
            self.remove_row(members, place.row);
        }
    }

    /// The pages of a row are others than before `change`.
    fn recount(&mut self, row: u32, change: impl FnOnce(&mut Rows)) {
        let before = self.rows.lives(row);
        change(&mut self.rows);
        self.upkeep.recount(before, self.rows.lives(row));
    }

    /// Whether a page is local as well.
    fn set_home(&mut self, handle: Handle, home: bool) {
        if let State::Kept(place, _) = self.pages.state(handle)
            && self.pages.is_home(handle) != home
        {
            self.pages.set_home(handle, home);
            self.recount(place.row, |rows| rows.set_home(place.row, home));
        }
    }

    fn remove_row(&mut self, members: &mut dyn Members, row: u32) {
        if self.rows.is_busy(row) {
            self.call_off_row(members, row);
        }
        #[cfg(test)]
        if self.is_wrong(Mutation::FreeFirst) {
            self.shape.positions().filter_map(|at| self.rows.chunk(row, at)).for_each(|chunk| members.free(chunk));
            return self.rows.remove(row);
        }
        self.rows.unwrite(row);
        for position in self.shape.positions() {
            let Some(chunk) = self.rows.chunk(row, position) else { continue };
            #[cfg(test)]
            if self.is_wrong(Mutation::LeakChunks) {
                continue;
            }
            members.free(chunk);
        }
        self.rows.remove(row);
        self.counts.groups -= 1;
    }

    fn progress(&mut self, members: &mut dyn Members, done: &mut dyn FnMut(Completion<'_>)) {
        let now = members.now();
        members.progress(now, &mut |completion| match completion {
            Completion::Got { handle, page } => self.heard(handle, page, now, done),
            Completion::Put { handle, result } => self.kept(handle, result, now),
        });
        if self.watch.look(members, now) {
            self.upkeep.awake(now);
            self.look_by(now);
        }
        if now >= self.next_look {
            self.next_look = now + LOOK * 100;
            self.look(members, now);
        }
        self.follow_up(members, now, done);
        members.wake_at(self.next_look, now);
        members.flush(now);
    }

    /// Keeps deadlines.
    fn look(&mut self, members: &mut dyn Members, now: Instant) {
        if self.watch.listen(members, now) {
            self.look_by(now + LOOK);
        }
        self.look_at_fills(members, now);
        self.look_at_jobs(now);
        self.watch_jobs(now);
        self.upkeep_step(members, now);
    }

    /// Goes on with what has news.
    fn follow_up(&mut self, members: &mut dyn Members, now: Instant, done: &mut dyn FnMut(Completion<'_>)) {
        loop {
            if let Some(job) = self.jobs.next_todo() {
                match self.advance(members, job, now) {
                    Step::Pending => {}
                    Step::Here => self.finish(members, job, Ok(()), now, done),
                    Step::Failed(error) => self.finish(members, job, Err(error), now, done),
                }
            } else if self.news != 0 {
                self.settle(members, self.news.trailing_zeros() as usize, now, done);
            } else {
                return;
            }
        }
    }
}

impl Shape {
    fn positions(self) -> impl Iterator<Item = u8> + use<> {
        0..u8::try_from(self.width()).expect("few")
    }

    /// Those that a row with so many data chunks has.
    fn used(self, length: u8) -> impl Iterator<Item = u8> + use<> {
        self.positions().filter(move |position| *position < length || usize::from(*position) >= self.data)
    }
}

impl Store for Stripes {
    fn put(&mut self, page: &Page, previous: Option<Handle>) -> Result<Put, StoreError> {
        self.core.put(&mut *self.members, page, self.core.hash.of(page), previous)
    }

    fn preparer(&self) -> Option<Preparer> {
        Some(Preparer::new(self.core.hash.clone(), Compression::None, 0))
    }

    fn put_prepared(&mut self, page: &Page, known: &Prepared, previous: Option<Handle>) -> Result<Put, StoreError> {
        let checksum = known.hash().unwrap_or_else(|| self.core.hash.of(page));
        self.core.put(&mut *self.members, page, checksum, previous)
    }

    fn get(&mut self, handle: Handle, urgency: Urgency, into: &mut Page) -> Result<Got, StoreError> {
        self.core.get(&mut *self.members, handle, urgency, into)
    }

    fn share(&mut self, handle: Handle) -> Handle {
        self.core.set_home(handle, false);
        self.core.pages.share(handle);
        handle
    }

    fn free(&mut self, handle: Handle) {
        self.core.free(&mut *self.members, handle);
    }

    fn burdens(&mut self, handles: &[Handle]) -> u64 {
        self.core.burdens(handles, || self.members.now())
    }

    fn has_burdens(&mut self) -> bool {
        self.core.has_burdens(|| self.members.now())
    }

    fn status(&self) -> Status {
        let (chunks, bytes) = self.members.usage();
        let core = &self.core;
        let own = core.pages.memory_bytes() + core.rows.memory_bytes() + core.jobs.memory_bytes();
        let fills = (core.fills.len() * core.shape.width() * PAGE_BYTES) as u64;
        Status {
            stored_bytes: core.pages.references * PAGE_BYTES as u64,
            stored_compressed_bytes: chunks * PAGE_BYTES as u64,
            memory_bytes: bytes + own + fills,
        }
    }

    fn protection(&self) -> Option<Protection> {
        Some(self.core.counts)
    }

    fn tidy(&mut self) -> bool {
        let mut more = self.members.tidy();
        more |= self.core.pages.top_up() || self.core.rows.top_up();
        let now = self.members.now();
        more |= self.core.upkeep_step(&mut *self.members, now);
        self.members.wake_at(self.core.next_look, now);
        more
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.members.descriptor()
    }

    fn flush(&mut self) {
        let now = self.members.now();
        self.members.wake_at(self.core.next_look, now);
        self.members.flush(now);
    }

    fn progress(&mut self, done: &mut dyn FnMut(Completion<'_>)) {
        self.core.progress(&mut *self.members, done);
    }

    fn accepts(&self) -> bool {
        self.core.accepts(&*self.members)
    }
}

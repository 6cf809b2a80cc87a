//! Rebuilding what is missing, and emptying rows that are mostly holes. Both sweep, a little at a time, and begin no more
//! than their budgets allow.

use std::time::{Duration, Instant};

#[cfg(test)]
use super::Mutation;
use super::fills::Origin;
use super::jobs::Purpose;
use super::members::{Members, Presence};
use super::pace::Budget;
use super::table::{Lives, Place, State};
use super::{Core, DATA_MAX, LOOK, SOON, Shape};
use crate::{Handle, Urgency};
use spillway_core::Page;
use spillway_core::page::BURDENS_MAX;

/// Rows looked at in one step, for a few microseconds.
const ROWS_PER_STEP: usize = 64;
/// Pages looked at in one step.
const PAGES_PER_STEP: usize = 1024;
/// Jobs of upkeep at once.
const JOBS_MAX: usize = 16;
/// The same of rebuilding while someone waits for pages: whoever does waits for what was begun before, on the same thread
/// (docs/decisions/0020).
const JOBS_MEANWHILE: usize = 2;
/// Nobody waits for pages if nobody has for so long.
const UNHURRIED_AFTER: Duration = Duration::from_millis(100);
/// Chunks that rebuilding may read and write in a second: 100 MB/s.
const REBUILT_PER_SECOND: f64 = 25_600.0;
/// Pages that compacting may read and write in a second when nothing else goes on: 1 MB/s.
const COMPACTED_PER_SECOND: f64 = 256.0;
/// The same for each page that is put or got: so much that parity for four costs less than 1.3 times the bytes on the network where
/// half of all accesses write (docs/bench/0012).
const COMPACTED_PER_PAGE: f64 = 0.165;
/// Pages put again, over which it is told how many are as they were.
const RETURNS: f64 = 256.0;
/// How much more than rows without holes would need is left as it is: a thirteenth.
const SLACK: usize = 13;
/// One row in so many is found by a sweep over pages in reasonable time.
const FINDABLE: usize = 64;
/// Pages are not looked through for the copies that keep a row from going while fewer than one row in so many has such pages alone:
/// each fault would pay for a dozen looks, of which one in hundreds finds any.
const WORTH_LOOKING: usize = 128;
/// Rows of holes that are not worth a sweep.
const ROWS_MIN: usize = 16;
/// How long after a sweep that mended all it could the next one begins, at least and at most; in between, so many times what a sweep
/// took that found nothing to begin: it waits for a server, which may never come, and whoever comes cuts the rest short.
const REST: Duration = Duration::from_millis(100);
const REST_MAX: Duration = Duration::from_secs(10);
const REST_BY_SWEEP: u32 = 20;

/// What is to be done, and how far it is.
pub(super) struct Upkeep {
    shape: Shape,
    /// Fewer rows are not worth a sweep.
    pub(super) rows_min: usize,
    /// Written rows, by pages that live there and are not local as well.
    by_outside: [usize; DATA_MAX + 1],
    /// All of them.
    rows: usize,
    /// Pages that live in them.
    lives: usize,
    /// When the next sweep over rows begins, if one is wanted.
    sweep_at: Option<Instant>,
    next_row: usize,
    /// When this sweep began, and whether it has had anything rebuilt.
    began: Instant,
    mends: bool,
    /// Of this sweep: rows that miss something, and whether more is to be done about that.
    degraded: u64,
    again: bool,
    /// Of this sweep and of the one before: rows with a chunk at a member that leaves, and no other member to take it.
    stranded: u64,
    strands: bool,
    next_page: usize,
    /// Pages looked at since one was found that is to move, and when to go on after all were.
    fruitless: usize,
    rest_until: Instant,
    /// When the rebuilding under way began, and at which row.
    rebuilding_since: Option<(Instant, usize)>,
    rebuild: Budget,
    /// When someone began to wait for a page last.
    demanded: Option<Instant>,
    pub(super) compact: Budget,
    /// Of pages that are put again, how many are as they were, of late.
    unchanged: f64,
}

impl Upkeep {
    pub(super) fn new(shape: Shape, now: Instant) -> Self {
        Self {
            shape,
            rows_min: ROWS_MIN,
            by_outside: [0; DATA_MAX + 1],
            rows: 0,
            lives: 0,
            sweep_at: None,
            next_row: 0,
            began: now,
            mends: false,
            degraded: 0,
            again: false,
            stranded: 0,
            strands: false,
            next_page: 0,
            fruitless: 0,
            rest_until: now,
            rebuilding_since: None,
            rebuild: Budget::new(REBUILT_PER_SECOND, now),
            demanded: None,
            compact: Budget::new(COMPACTED_PER_SECOND, now),
            unchanged: 1.0,
        }
    }

    /// A row is written.
    pub(super) fn count_new(&mut self, lives: Lives) {
        self.rows += 1;
        self.by_outside[lives.outside] += 1;
        self.lives += lives.all;
    }

    /// A row has other pages now.
    pub(super) fn recount(&mut self, before: Lives, after: Lives) {
        self.by_outside[before.outside] -= 1;
        self.by_outside[after.outside] += 1;
        self.lives = self.lives - before.all + after.all;
    }

    /// A row without pages is gone.
    pub(super) fn count_gone(&mut self) {
        self.rows -= 1;
        self.by_outside[0] -= 1;
    }

    /// A page was put or got.
    pub(super) fn earn(&mut self) {
        self.compact.earn(COMPACTED_PER_PAGE);
    }

    /// Someone begins to wait for a page.
    pub(super) fn note_demand(&mut self, now: Instant) {
        self.demanded = Some(now);
    }

    /// Chunks that may be rebuilt at once.
    fn rebuilt_at_once(&self, now: Instant) -> usize {
        let is_waited_for = |since| now.saturating_duration_since(since) < UNHURRIED_AFTER;
        if self.demanded.is_some_and(is_waited_for) { JOBS_MEANWHILE } else { JOBS_MAX }
    }

    /// A page was put again.
    pub(super) fn note_return(&mut self, is_unchanged: bool) {
        self.unchanged += (f64::from(u8::from(is_unchanged)) - self.unchanged) / RETURNS;
    }

    /// Something may be missing.
    pub(super) fn awake(&mut self, now: Instant) {
        self.again = true;
        self.sweep_at = Some(self.sweep_at.map_or(now, |at| at.min(now)));
    }

    /// Rows with no more pages than this that are nowhere else are to be emptied; `None` while there is little to win.
    pub(super) fn emptied(&self) -> Option<usize> {
        let data = self.shape.data;
        let holes = (self.rows * data).saturating_sub(self.lives);
        holes.checked_sub(self.lives / SLACK).filter(|spare| *spare > self.rows_min * data)?;
        // The emptier a row is, the less it costs: a row of one page gives three chunks' room for one move.
        let worth = |outside: &usize| self.by_outside[*outside] * FINDABLE >= self.rows;
        Some((1..data).find(worth).unwrap_or(data - 1))
    }

    /// What pages move at the cost of: a member's leaving is rebuilding elsewhere.
    fn budget_of_moves(&mut self, strands: bool) -> &mut Budget {
        if strands { &mut self.rebuild } else { &mut self.compact }
    }

    /// Rows, and those of them of which no page is outside.
    #[cfg(test)]
    pub(super) fn counted(&self) -> (usize, usize) {
        (self.rows, self.by_outside[0])
    }

    /// Whether a sweep over rows is under way or to come.
    #[cfg(test)]
    pub(super) fn is_awake(&self) -> bool {
        self.sweep_at.is_some()
    }

    /// When the next one begins, or this one could.
    #[cfg(test)]
    pub(super) fn sweep_at(&self) -> Option<Instant> {
        self.sweep_at
    }
}

impl Core {
    /// Estimates how long rebuilding takes still, by how far the sweep has come since it began.
    fn estimate(&mut self, now: Instant) {
        if self.counts.rebuilding == 0 {
            (self.upkeep.rebuilding_since, self.counts.left_seconds) = (None, 0);
            return;
        }
        let at = self.upkeep.next_row;
        let (since, from) = *self.upkeep.rebuilding_since.get_or_insert((now, at));
        let (done, to_do) = (at.saturating_sub(from) as u128, self.rows.len().saturating_sub(at) as u128);
        let left_ms = (now.saturating_duration_since(since).as_millis() * to_do).checked_div(done);
        self.counts.left_seconds = left_ms.map_or(0, |ms| u64::try_from(ms.div_ceil(1000)).unwrap_or(u64::MAX));
    }

    /// A sweep may have passed a row by the time that it gets this chunk.
    pub(super) fn wake_unless_there(&mut self, members: &dyn Members, chunk: Handle, now: Instant) {
        if members.chunk(chunk, now).presence != Presence::There {
            self.upkeep.awake(now);
            self.look_by(now);
        }
    }

    /// A step of upkeep. Returns whether more can be done at once.
    pub(super) fn upkeep_step(&mut self, members: &mut dyn Members, now: Instant) -> bool {
        let more = self.sweep_rows(members, now);
        self.estimate(now);
        let more = self.sweep_pages(members, now) || more;
        if more {
            self.look_by(now + LOOK);
        }
        more
    }

    /// Looks for chunks that are missing, and has them rebuilt where there is a member for them.
    fn sweep_rows(&mut self, members: &mut dyn Members, now: Instant) -> bool {
        let Some(at) = self.upkeep.sweep_at else { return false };
        if now < at {
            self.look_by(at);
            return false;
        }
        let rows = self.rows.len();
        if self.upkeep.next_row == 0 {
            (self.upkeep.began, self.upkeep.mends) = (now, false);
        }
        for _ in 0..ROWS_PER_STEP {
            if self.upkeep.next_row >= rows {
                return self.end_sweep(now);
            }
            let row = u32::try_from(self.upkeep.next_row).expect("rows are counted in 32 bits");
            if self.rows.is_written(row) && !self.tend(members, row, now) {
                // As much is under way as may be.
                self.upkeep.again = true;
                self.look_by(now + LOOK);
                return false;
            }
            self.upkeep.next_row += 1;
        }
        self.look_by(now);
        true
    }

    fn end_sweep(&mut self, now: Instant) -> bool {
        let upkeep = &mut self.upkeep;
        self.counts.degraded = std::mem::take(&mut upkeep.degraded);
        upkeep.next_row = 0;
        upkeep.strands = std::mem::take(&mut upkeep.stranded) > 0;
        let again = std::mem::take(&mut upkeep.again)
            || self.counts.degraded > 0
            || self.watch.away() > 0
            || self.watch.is_one_leaving();
        let took = now.saturating_duration_since(upkeep.began);
        let rest = if upkeep.mends { REST } else { (took * REST_BY_SWEEP).clamp(REST, REST_MAX) };
        upkeep.sweep_at = again.then_some(now + rest);
        if again {
            self.look_by(now + rest);
        }
        false
    }

    /// Looks after one row; false when it must wait for others.
    fn tend(&mut self, members: &mut dyn Members, row: u32, now: Instant) -> bool {
        let (mut missing, mut wanted, mut leaving, mut alive) = (false, None, None, 0);
        for position in self.shape.used(self.rows.length(row)) {
            let chunk = self.rows.chunk(row, position).map(|chunk| members.chunk(chunk, now));
            let presence = chunk.map_or(Presence::Dead, |chunk| chunk.presence);
            if chunk.is_some_and(|chunk| members.health(chunk.member, now).leaving) {
                leaving = leaving.or(Some(position));
            }
            missing |= presence != Presence::There;
            alive += u8::from(matches!(presence, Presence::There | Presence::Away));
            if matches!(presence, Presence::Dead | Presence::Gone) {
                wanted = wanted.or(Some(position));
            }
        }
        let enough = alive >= self.rows.length(row);
        // What is missing comes before what only moves.
        let wanted = wanted.or(leaving);
        if let Some(position) = wanted.filter(|_| wanted == leaving)
            && !self.has_place(members, row, position, now)
        {
            self.upkeep.stranded += 1;
        }
        if let Some(position) = wanted.filter(|_| enough && !self.rows.is_busy(row)) {
            #[cfg(test)]
            let wanted = self.mutation != Some(Mutation::NeverRebuild);
            #[cfg(not(test))]
            let wanted = true;
            if wanted && self.spare(members, row, position, now).is_some() {
                let as_many =
                    self.jobs.background >= JOBS_MAX || self.jobs.rebuilding >= self.upkeep.rebuilt_at_once(now);
                if as_many || !self.upkeep.rebuild.has(now) {
                    return false;
                }
                self.upkeep.rebuild.spend(f64::from(self.rows.length(row)) + 1.0);
                self.upkeep.mends = true;
                self.start(Place { row, position }, Purpose::Rebuild, now);
            }
        }
        self.upkeep.degraded += u64::from(missing);
        true
    }

    fn start(&mut self, place: Place, purpose: Purpose, now: Instant) -> bool {
        match self.begin(place, purpose, Urgency::Prefetch, now) {
            Some(job) => {
                self.jobs.queue(job);
                self.look_by(if purpose == Purpose::Rebuild { now } else { now + SOON });
                true
            }
            None => false,
        }
    }

    /// A page that is in hand, and kept as it is, moves out of a row that is to be emptied: it need not be read for that.
    pub(super) fn move_along(
        &mut self,
        members: &mut dyn Members,
        handle: Handle,
        (page, checksum): (&Page, u64),
        now: Instant,
    ) {
        let wanted = self.is_to_move(members, handle, self.upkeep.emptied(), false, now);
        if !wanted || self.watch.away() > 0 || !self.upkeep.compact.has(now) {
            return;
        }
        let State::Kept(place, _) = self.pages.held(handle) else { return };
        let origin = Origin::Moved(place);
        let Ok(fill) = self.open_fill(members, origin, now) else { return };
        self.pages.set_moving(handle, true);
        self.append(members, fill, (handle, origin), page, checksum, now);
        self.upkeep.compact.spend(self.shape.written());
    }

    /// A page is local as well: whether it had better have no copy here, because nothing else keeps its row from going, and there are too
    /// many holes. That costs what putting the page again would, as far as pages leave as they came.
    fn is_burden(&mut self, handle: Handle, now: impl FnOnce() -> Instant) -> bool {
        let Some((place, home)) = self.pages.alone(handle) else { return false };
        if !home {
            self.set_home(handle, true);
        }
        let is_burden = self.rows.is_alone(place.row) && self.may_give_up(now);
        if is_burden {
            self.upkeep.compact.spend(self.upkeep.unchanged * self.shape.written());
            self.counts.dropped_copies += 1;
        }
        is_burden
    }

    /// Which of these pages, all of them local as well, had better have no copy here, bit by bit.
    pub(super) fn burdens(&mut self, handles: &[Handle], now: impl Fn() -> Instant) -> u64 {
        // A page's place and its row are far from each other and from those of others: all are asked for before one is looked at, as
        // one after the other each would be waited for. Few are worth more than that.
        let mut places = [None; BURDENS_MAX];
        places.iter_mut().zip(handles).for_each(|(place, &handle)| *place = self.pages.alone(handle));
        let is_doubtful = |(place, home): (Place, bool)| !home || self.rows.is_alone(place.row);
        let doubtful = places.iter().map(|place| place.is_some_and(is_doubtful));
        let doubtful = doubtful.enumerate().fold(0_u64, |bits, (at, is)| bits | u64::from(is) << at);
        let doubtful = (0..handles.len()).filter(|at| doubtful >> at & 1 == 1);
        doubtful.fold(0, |found, at| found | u64::from(self.is_burden(handles[at], &now)) << at)
    }

    /// Whether so many rows are kept by pages alone that are local as well that looking for these is worth it.
    pub(super) fn has_burdens(&mut self, now: impl FnOnce() -> Instant) -> bool {
        let alone = self.upkeep.by_outside[0];
        alone > 0 && alone * WORTH_LOOKING >= self.upkeep.rows && self.may_give_up(now)
    }

    /// Whether rows are to be emptied, and there are means to do without copies for that.
    fn may_give_up(&mut self, now: impl FnOnce() -> Instant) -> bool {
        self.watch.away() == 0
            && self.upkeep.emptied().is_some()
            && (self.upkeep.compact.has_some() || self.upkeep.compact.has(now()))
    }

    /// Moves pages out of rows that are mostly holes, and out of rows that a member's leaving would cost a chunk.
    fn sweep_pages(&mut self, members: &dyn Members, now: Instant) -> bool {
        let strands = self.upkeep.strands && self.watch.is_one_leaving();
        let emptied = self.upkeep.emptied();
        if emptied.is_none() && !strands {
            return false;
        }
        // A row that misses something is rebuilt first.
        let rests = now < self.upkeep.rest_until;
        let budget = self.upkeep.budget_of_moves(strands);
        // Half of what is saved up for compacting is for pages that need not be read for it.
        let may = if strands { budget.has(now) } else { budget.has_much(now) };
        if rests || self.watch.away() > 0 || !may || self.jobs.background >= JOBS_MAX {
            self.look_by(now + LOOK);
            return false;
        }
        let pages = self.pages.len();
        if self.upkeep.fruitless >= pages {
            self.upkeep.fruitless = 0;
            self.upkeep.rest_until = now + REST;
        }
        for _ in 0..PAGES_PER_STEP.min(pages) {
            self.upkeep.fruitless += 1;
            self.upkeep.next_page = (self.upkeep.next_page + 1) % pages;
            let handle = self.pages.nth(self.upkeep.next_page);
            if self.is_to_move(members, handle, emptied, strands, now) {
                let State::Kept(place, _) = self.pages.state(handle) else { continue };
                if !self.start(place, Purpose::Move(handle), now) {
                    return false;
                }
                self.upkeep.fruitless = 0;
                self.pages.set_moving(handle, true);
                // Read once, and written with its share of parity.
                let budget = self.upkeep.budget_of_moves(strands);
                budget.spend(1.0 + self.shape.written());
                if self.jobs.background >= JOBS_MAX || !budget.has(now) {
                    break;
                }
            }
        }
        true
    }

    fn is_to_move(
        &self,
        members: &dyn Members,
        handle: Handle,
        emptied: Option<usize>,
        strands: bool,
        now: Instant,
    ) -> bool {
        let State::Kept(place, _) = self.pages.state(handle) else { return false };
        if self.pages.is_moving(handle) {
            return false;
        }
        let leaves = |position: u8| {
            let chunk = self.rows.chunk(place.row, position).map(|chunk| members.chunk(chunk, now));
            chunk.is_some_and(|chunk| members.health(chunk.member, now).leaving)
        };
        // What is local as well need not be moved: the pager may do without.
        emptied.is_some_and(|most| !self.pages.is_home(handle) && self.rows.lives(place.row).outside <= most)
            || strands && !self.rows.is_busy(place.row) && self.shape.used(self.rows.length(place.row)).any(leaves)
    }
}

//! Getting a chunk.
//!
//! [`Core::advance`] asks for what a job still needs and can be called at any time: the chunk itself, or as many others of
//! its row as it can be made out of. Which of the two comes first serves.

use std::time::Instant;

use spillway_core::Page;

#[cfg(test)]
use super::Mutation;
use super::jobs::{Direct, HEDGED_ONE_IN, JOBS_MAX, Job, Purpose, Step, Want};
use super::members::{Members, Presence};
use super::table::Place;
use super::watch::SUSPECT_AFTER;
use super::{Core, LOOK, Origin, Putting, SOON, WIDTH_MAX};
use crate::{Completion, Got, Handle, StoreError, Urgency};

impl Core {
    /// A job about the chunk at a place; it is to be advanced.
    pub(super) fn begin(&mut self, place: Place, purpose: Purpose, urgency: Urgency, now: Instant) -> Option<u16> {
        let job = self.jobs.free.pop()?;
        self.jobs.jobs[usize::from(job)] = Some(Job {
            place,
            purpose,
            urgency,
            direct: Direct::NotAsked,
            hedged: false,
            extra: 0,
            buffer: None,
            asked: 0,
            failed: 0,
            later: false,
            queued: false,
            putting: None,
            rebuilt: None,
        });
        match purpose {
            Purpose::Read(_) => {
                self.jobs.hedges = (self.jobs.hedges + 1.0 / HEDGED_ONE_IN).min(16.0);
                self.upkeep.earn();
                if urgency == Urgency::Demand {
                    self.upkeep.note_demand(now);
                }
            }
            Purpose::Move(_) => self.jobs.background += 1,
            Purpose::Rebuild => {
                self.rows.set_busy(place.row, true);
                self.jobs.background += 1;
                self.jobs.rebuilding += 1;
                self.counts.rebuilding = self.jobs.rebuilding as u64;
            }
        }
        self.jobs.begun = true;
        self.look_by(now + self.latency.p99());
        Some(job)
    }

    /// Ends a job; what is under way for it comes for nothing.
    pub(super) fn end(&mut self, job: u16) {
        self.jobs.release_buffer(job);
        self.jobs.wants.retain(|want| want.job != job);
        let ended = self.jobs.jobs[usize::from(job)].take().expect("it ends once");
        self.jobs.free.push(job);
        match ended.purpose {
            Purpose::Read(handle) => self.pages.set_job(handle, None),
            Purpose::Move(_) => self.jobs.background -= 1,
            Purpose::Rebuild => {
                self.rows.set_busy(ended.place.row, false);
                self.jobs.background -= 1;
                self.jobs.rebuilding -= 1;
                self.counts.rebuilding = self.jobs.rebuilding as u64;
            }
        }
    }

    /// A row goes while one of its chunks is being rebuilt.
    pub(super) fn call_off_row(&mut self, members: &mut dyn Members, row: u32) {
        for job in 0..u16::try_from(JOBS_MAX).expect("few") {
            let Some(of) = self.jobs.jobs[usize::from(job)].filter(|of| of.place.row == row) else { continue };
            assert!(of.purpose == Purpose::Rebuild, "no one reads what no one refers to");
            if let Some(chunk) = of.putting {
                self.puts.remove(&chunk);
                members.free(chunk);
            }
            self.end(job);
        }
    }

    /// A page is freed while it is being moved.
    pub(super) fn call_off_move(&mut self, handle: Handle) {
        let moves = |job: &Option<Job>| job.is_some_and(|job| job.purpose == Purpose::Move(handle));
        match self.jobs.jobs.iter().position(moves) {
            Some(job) => self.end(u16::try_from(job).expect("few")),
            None => self.forget_moved(handle),
        }
        self.pages.set_moving(handle, false);
    }

    /// A chunk has come, or will not.
    pub(super) fn heard(
        &mut self,
        chunk: Handle,
        page: Result<&Page, StoreError>,
        now: Instant,
        done: &mut dyn FnMut(Completion<'_>),
    ) {
        if page.is_err() {
            // Also when whoever asked has it from elsewhere by now.
            self.upkeep.awake(now);
            self.look_by(now);
        }
        while let Some(at) = self.jobs.wants.iter().position(|want| want.chunk == chunk) {
            let want = self.jobs.wants.swap_remove(at);
            self.watch.answered(want.member);
            let job = self.jobs.at(want.job);
            let direct = want.position == job.place.position;
            job.asked &= !(1 << want.position);
            match page {
                Ok(page) => {
                    self.latency.record(now.saturating_duration_since(want.since));
                    self.counts.chunks_got += 1;
                    if let (true, Purpose::Read(handle)) = (direct, job.purpose) {
                        self.end(want.job);
                        done(Completion::Got { handle, page: Ok(page) });
                        continue;
                    }
                    let buffer = usize::from(job.buffer.expect("what is gathered has a buffer"));
                    self.jobs.gather(buffer, want.position, page);
                }
                Err(_) => {
                    #[cfg(test)]
                    if self.mutation == Some(Mutation::IgnoreFailure) {
                        continue;
                    }
                    let job = self.jobs.at(want.job);
                    job.failed |= 1 << want.position;
                    if direct {
                        job.direct = Direct::Failed;
                    }
                }
            }
            self.jobs.queue(want.job);
        }
    }

    fn want(&mut self, chunk: Handle, job: u16, position: u8, member: u8, now: Instant) {
        self.jobs.wants.push(Want { chunk, job, position, member, since: now });
        self.jobs.at(job).asked |= 1 << position;
    }

    /// Asks for a chunk: whether it is here, in the scratch page.
    fn ask(&mut self, members: &mut dyn Members, job: u16, position: u8, now: Instant) -> Result<Got, StoreError> {
        let of = *self.jobs.at(job);
        let chunk = self.rows.chunk(of.place.row, position).ok_or(StoreError::Lost)?;
        let got = members.get(chunk, of.urgency, &mut self.scratch, now);
        match got {
            Ok(Got::Pending) => {
                let member = members.chunk(chunk, now).member;
                self.want(chunk, job, position, member, now);
            }
            Ok(Got::Here) => self.counts.chunks_got += 1,
            Err(StoreError::Unavailable) => {
                self.jobs.postpone(job);
                self.look_by(now + LOOK);
            }
            Err(_) => {
                self.jobs.at(job).failed |= 1 << position;
                self.upkeep.awake(now);
            }
        }
        got
    }

    /// What can be had of a row's chunk, best first.
    fn rank(&self, members: &dyn Members, row: u32, position: u8, now: Instant) -> Option<u8> {
        let chunk = members.chunk(self.rows.chunk(row, position)?, now);
        match chunk.presence {
            Presence::There if !self.watch.is_suspect(chunk.member, now) => Some(0),
            Presence::There => Some(1),
            Presence::Away => Some(2),
            Presence::Gone | Presence::Dead => None,
        }
    }

    /// Goes on with a job.
    pub(super) fn advance(&mut self, members: &mut dyn Members, job: u16, now: Instant) -> Step {
        let of = *self.jobs.at(job);
        if let Some(kept) = of.rebuilt {
            if kept {
                self.replace(members, of.place, of.putting.expect("it was put"), now);
            }
            self.end(job);
            return Step::Pending;
        }
        if of.putting.is_some() {
            return Step::Pending;
        }
        self.jobs.at(job).later = false;
        let own = self.rank(members, of.place.row, of.place.position, now);
        let reads = matches!(of.purpose, Purpose::Read(_));
        if !reads && self.jobs.buffer(job).is_none() {
            self.starve(job, now);
            return Step::Pending;
        }
        if let Some(buffer) = self.jobs.at(job).buffer.map(usize::from) {
            let gathered = &self.jobs.gathered[buffer];
            let direct = gathered.positions[..gathered.count].iter().position(|at| *at == of.place.position);
            if let Some(at) = direct {
                *self.scratch = gathered.pages[at];
                return Step::Here;
            }
        }
        if of.direct == Direct::NotAsked && matches!(own, Some(0 | 1)) {
            match self.ask(members, job, of.place.position, now) {
                Ok(Got::Here) => return Step::Here,
                Ok(Got::Pending) => self.jobs.at(job).direct = Direct::Waiting,
                Err(StoreError::Unavailable) => return Step::Pending,
                Err(_) => self.jobs.at(job).direct = Direct::Failed,
            }
        }
        if self.jobs.at(job).direct == Direct::Waiting && own == Some(0) && !of.hedged {
            return Step::Pending;
        }
        self.reconstruct(members, job, now)
    }

    /// There is no buffer for it now.
    fn starve(&mut self, job: u16, now: Instant) {
        self.jobs.postpone(job);
        self.look_by(now + self.latency.p99());
    }

    fn reconstruct(&mut self, members: &mut dyn Members, job: u16, now: Instant) -> Step {
        let Some(buffer) = self.jobs.buffer(job) else {
            self.starve(job, now);
            return Step::Pending;
        };
        let of = *self.jobs.at(job);
        let Place { row, position } = of.place;
        let length = self.rows.length(row);
        let needed = usize::from(length);
        loop {
            if self.jobs.gathered[buffer].count >= needed {
                return self.decode(members, job, buffer, now);
            }
            let of = *self.jobs.at(job);
            let under_way = (of.asked & !(1 << position)).count_ones() as usize;
            let gathered = &self.jobs.gathered[buffer];
            if gathered.count + under_way >= needed + of.extra || of.later {
                return Step::Pending;
            }
            let have = gathered.positions[..gathered.count].iter().fold(0, |have, at| have | 1 << at);
            let known: u32 = have | of.asked | of.failed | 1 << position;
            let others = self.shape.used(length).filter(|at| known & 1 << at == 0);
            let ranked = others.filter_map(|at| Some((self.rank(members, row, at, now)?, at)));
            let Some((_, next)) = ranked.min() else { break };
            match self.ask(members, job, next, now) {
                Ok(Got::Here) => {
                    let page = *self.scratch;
                    self.jobs.gather(buffer, next, &page);
                }
                Ok(Got::Pending) | Err(_) => {}
            }
        }
        let of = *self.jobs.at(job);
        let gathered = self.jobs.gathered[buffer].count;
        let under_way = (of.asked & !(1 << position)).count_ones() as usize;
        if of.direct == Direct::Waiting || gathered + under_way >= needed {
            return Step::Pending;
        }
        // Its own member may come back in time.
        let own = self.rank(members, row, position, now);
        if of.direct == Direct::NotAsked && own.is_some() {
            match self.ask(members, job, position, now) {
                Ok(Got::Here) => return Step::Here,
                Ok(Got::Pending) => {
                    self.jobs.at(job).direct = Direct::Waiting;
                    return Step::Pending;
                }
                Err(StoreError::Unavailable) => return Step::Pending,
                Err(_) => {}
            }
        }
        Step::Failed(StoreError::Lost)
    }

    /// Makes the chunk out of what was gathered.
    fn decode(&mut self, members: &dyn Members, job: u16, buffer: usize, now: Instant) -> Step {
        let Place { row, position } = self.jobs.at(job).place;
        let length = usize::from(self.rows.length(row));
        let gathered = &self.jobs.gathered[buffer];
        let mut others = [(0, &gathered.pages[0]); WIDTH_MAX];
        for (at, other) in others[..gathered.count].iter_mut().enumerate() {
            *other = (gathered.positions[at], &gathered.pages[at]);
        }
        self.code.decode(self.shape, length, &others[..gathered.count], position, &mut self.scratch);
        self.counts.reconstructed += 1;
        let known = self.rows.chunk(row, position).map(|chunk| members.chunk(chunk, now).checksum);
        if known.is_some_and(|checksum| checksum != self.hash.of(&self.scratch)) {
            return Step::Failed(StoreError::Corrupt);
        }
        Step::Here
    }

    /// A job's chunk is in the scratch page, or will not be had.
    pub(super) fn finish(
        &mut self,
        members: &mut dyn Members,
        job: u16,
        result: Result<(), StoreError>,
        now: Instant,
        done: &mut dyn FnMut(Completion<'_>),
    ) {
        let of = *self.jobs.at(job);
        match of.purpose {
            Purpose::Read(handle) => {
                self.counts.lost_pages += u64::from(result.is_err());
                self.end(job);
                done(Completion::Got { handle, page: result.map(|()| &*self.scratch) });
            }
            Purpose::Move(handle) => {
                self.end(job);
                // The next one may begin.
                self.look_by(now + SOON);
                let origin = Origin::Moved(of.place);
                match result.and_then(|()| self.open_fill(members, origin, now)) {
                    Ok(fill) => {
                        let page = *self.scratch;
                        self.append(members, fill, (handle, origin), &page, self.hash.of(&page), now);
                    }
                    Err(_) => self.pages.set_moving(handle, false),
                }
            }
            Purpose::Rebuild => {
                let to = result.ok().and_then(|()| self.spare(members, of.place.row, of.place.position, now));
                let put = to.and_then(|to| members.put(to, &self.scratch, self.hash.of(&self.scratch), now).ok());
                let Some(chunk) = put else { return self.end(job) };
                self.jobs.release_buffer(job);
                self.jobs.wants.retain(|want| want.job != job);
                self.jobs.at(job).putting = Some(chunk);
                self.puts.insert(chunk, Putting::Rebuild(job));
            }
        }
    }

    /// A chunk is at another member now.
    fn replace(&mut self, members: &mut dyn Members, place: Place, chunk: Handle, now: Instant) {
        let before = self.rows.chunk(place.row, place.position);
        self.rows.set_chunk(place.row, place.position, Some(chunk));
        self.wake_unless_there(members, chunk, now);
        self.counts.rebuilt_chunks += 1;
        self.counts.chunks_put += 1;
        let Some(before) = before else { return };
        while let Some(at) = self.jobs.wants.iter().position(|want| want.chunk == before) {
            let want = self.jobs.wants.swap_remove(at);
            let job = self.jobs.at(want.job);
            job.asked &= !(1 << want.position);
            if job.place.position == want.position {
                job.direct = Direct::NotAsked;
            }
            self.jobs.queue(want.job);
        }
        members.free(before);
    }

    /// What could not be asked for is tried again.
    pub(super) fn look_at_jobs(&mut self, now: Instant) {
        if !std::mem::take(&mut self.jobs.later) {
            return;
        }
        for job in 0..u16::try_from(JOBS_MAX).expect("few") {
            if self.jobs.jobs[usize::from(job)].is_some_and(|of| of.later) {
                self.jobs.queue(job);
                self.look_by(now + LOOK);
            }
        }
    }

    /// What is overdue is made out of others; who leaves something unanswered for long is suspected.
    pub(super) fn watch_jobs(&mut self, now: Instant) {
        let p99 = self.latency.p99();
        if std::mem::take(&mut self.jobs.begun) {
            // The next one probably begins before that. An alarm that is set already need not be set anew for it.
            self.look_by(now + p99);
        }
        for at in 0..self.jobs.wants.len() {
            let want = self.jobs.wants[at];
            let waited = now.saturating_duration_since(want.since);
            if waited >= SUSPECT_AFTER {
                self.watch.suspect(want.member, now);
            }
            // Who has gone in the middle of a fetch may be back with the chunk, and may not.
            let away = !self.watch.is_ready(want.member);
            if waited < p99 && !away {
                self.look_by(want.since + p99);
                continue;
            }
            let suspect = away || self.watch.is_suspect(want.member, now);
            self.look_by(if suspect { now + LOOK } else { (want.since + SUSPECT_AFTER).max(now + p99) });
            let direct = want.position == self.jobs.at(want.job).place.position;
            let reads = matches!(self.jobs.at(want.job).purpose, Purpose::Read(_));
            let hedge = match direct {
                true => !self.jobs.at(want.job).hedged,
                false => self.jobs.at(want.job).extra + 1 < self.shape.parity && suspect,
            };
            if !hedge || !reads && !suspect || !suspect && self.jobs.hedges < 1.0 {
                continue;
            }
            if !suspect {
                self.jobs.hedges -= 1.0;
            }
            self.counts.hedged += 1;
            let job = self.jobs.at(want.job);
            if direct {
                job.hedged = true
            } else {
                job.extra += 1
            }
            self.jobs.queue(want.job);
        }
    }
}

//! Chunks that are wanted: by a reader, to be moved, or to be rebuilt; what is remembered of each. `fetch.rs` gets them.

use std::time::Instant;

use spillway_core::{PAGE_BYTES, Page};

use super::members::Members;
use super::table::Place;
use super::{Shape, WIDTH_MAX};
use crate::{Handle, StoreError, Urgency};

/// Jobs at once: as many blocks as the pager has on their way, and upkeep.
pub(super) const JOBS_MAX: usize = 1280;
/// Chunks gathered for jobs that make their own out of others, all together: 1 MiB.
const GATHERED_MAX: usize = 256;
/// Hedged reads of members that are not suspected: one in so many.
pub(super) const HEDGED_ONE_IN: f64 = 20.0;

/// What a chunk is wanted for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Someone reads this page.
    Read(Handle),
    /// This page is to move to another row.
    Move(Handle),
    /// The chunk is to be at another member.
    Rebuild,
}

/// How far a job is.
pub(super) enum Step {
    Pending,
    /// The chunk is in the scratch page.
    Here,
    Failed(StoreError),
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Direct {
    NotAsked,
    Waiting,
    Failed,
}

#[derive(Clone, Copy)]
pub(super) struct Job {
    pub(super) place: Place,
    pub(super) purpose: Purpose,
    pub(super) urgency: Urgency,
    pub(super) direct: Direct,
    /// It is made out of others even if it may still come.
    pub(super) hedged: bool,
    /// Others asked for beyond what is needed, because some are overdue.
    pub(super) extra: usize,
    pub(super) buffer: Option<u8>,
    /// By position: asked for, and not to be had.
    pub(super) asked: u32,
    pub(super) failed: u32,
    /// Something it needs is not to be had now.
    pub(super) later: bool,
    pub(super) queued: bool,
    /// Where the rebuilt chunk goes, and what became of that.
    pub(super) putting: Option<Handle>,
    pub(super) rebuilt: Option<bool>,
}

/// A chunk that a job waits for.
#[derive(Clone, Copy)]
pub(super) struct Want {
    pub(super) chunk: Handle,
    pub(super) job: u16,
    pub(super) position: u8,
    pub(super) member: u8,
    pub(super) since: Instant,
}

/// What has come for a job, by position.
pub(super) struct Gathered {
    pub(super) taken: bool,
    pub(super) count: usize,
    pub(super) positions: [u8; WIDTH_MAX],
    pub(super) pages: Box<[Page]>,
}

/// All of them.
pub(super) struct Jobs {
    pub(super) jobs: Vec<Option<Job>>,
    pub(super) free: Vec<u16>,
    pub(super) wants: Vec<Want>,
    pub(super) gathered: Vec<Gathered>,
    pub(super) todo: Vec<u16>,
    /// Some need what is not to be had now.
    pub(super) later: bool,
    pub(super) hedges: f64,
    /// One has begun since they were looked at.
    pub(super) begun: bool,
    /// Jobs of upkeep.
    pub(super) background: usize,
    pub(super) rebuilding: usize,
}

impl Jobs {
    pub(super) fn new(shape: Shape) -> Self {
        let gathered = || Gathered {
            taken: false,
            count: 0,
            positions: [0; WIDTH_MAX],
            pages: vec![[0; PAGE_BYTES]; shape.width()].into(),
        };
        Self {
            jobs: vec![None; JOBS_MAX],
            free: (0..u16::try_from(JOBS_MAX).expect("few")).rev().collect(),
            wants: Vec::with_capacity(JOBS_MAX + 2 * GATHERED_MAX),
            gathered: (0..(GATHERED_MAX / shape.width()).max(4)).map(|_| gathered()).collect(),
            todo: Vec::with_capacity(JOBS_MAX),
            later: false,
            hedges: 0.0,
            begun: false,
            background: 0,
            rebuilding: 0,
        }
    }

    pub(super) fn memory_bytes(&self) -> u64 {
        let width = self.gathered.first().map_or(0, |of| of.pages.len());
        let gathered = self.gathered.len() * width * PAGE_BYTES;
        (gathered + self.jobs.len() * size_of::<Option<Job>>()) as u64
    }

    pub(super) fn at(&mut self, job: u16) -> &mut Job {
        self.jobs[usize::from(job)].as_mut().expect("it is under way")
    }

    pub(super) fn queue(&mut self, job: u16) {
        let job_ref = self.at(job);
        if !std::mem::replace(&mut job_ref.queued, true) {
            self.todo.push(job);
        }
    }

    pub(super) fn postpone(&mut self, job: u16) {
        self.at(job).later = true;
        self.later = true;
    }

    /// One that has news.
    pub(super) fn next_todo(&mut self) -> Option<u16> {
        while let Some(job) = self.todo.pop() {
            if let Some(found) = self.jobs[usize::from(job)].as_mut().filter(|found| found.queued) {
                found.queued = false;
                return Some(job);
            }
        }
        None
    }

    /// Someone waits for it now.
    pub(super) fn hurry(&mut self, members: &mut dyn Members, job: u16, scratch: &mut Page, now: Instant) {
        self.at(job).urgency = Urgency::Demand;
        for want in self.wants.iter().filter(|want| want.job == job) {
            // It is under way, so it does not come from this call.
            let _ = members.get(want.chunk, Urgency::Demand, scratch, now);
        }
    }

    /// The put of a rebuilt chunk has ended.
    pub(super) fn rebuilt(&mut self, job: u16, chunk: Handle, result: Result<(), StoreError>) {
        let of = self.at(job);
        of.rebuilt = Some(result.is_ok());
        of.putting = result.is_ok().then_some(chunk);
        self.queue(job);
    }

    /// Has a buffer for what comes for a job.
    pub(super) fn buffer(&mut self, job: u16) -> Option<usize> {
        if let Some(buffer) = self.at(job).buffer {
            return Some(buffer.into());
        }
        let buffer = self.gathered.iter().position(|gathered| !gathered.taken)?;
        (self.gathered[buffer].taken, self.gathered[buffer].count) = (true, 0);
        self.at(job).buffer = u8::try_from(buffer).ok();
        Some(buffer)
    }

    pub(super) fn release_buffer(&mut self, job: u16) {
        if let Some(buffer) = self.at(job).buffer.take() {
            self.gathered[usize::from(buffer)].taken = false;
        }
    }

    pub(super) fn gather(&mut self, buffer: usize, position: u8, page: &Page) {
        let to = &mut self.gathered[buffer];
        if !to.positions[..to.count].contains(&position) {
            to.positions[to.count] = position;
            to.pages[to.count] = *page;
            to.count += 1;
        }
    }

    #[cfg(test)]
    pub(super) fn are_done(&self) -> bool {
        self.jobs.iter().all(Option::is_none) && self.wants.is_empty() && self.gathered.iter().all(|of| !of.taken)
    }
}

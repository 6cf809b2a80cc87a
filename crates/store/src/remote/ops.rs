//! What is under way: puts with their pages, and gets. Everything is sized at start; nothing is allocated for a page.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use spillway_core::{PAGE_BYTES, Page};

use crate::{Handle, Urgency};

/// Pages on their way out: 1 MiB. A put holds its page until the server has it, so this is what the link's bandwidth
/// times its delay, and the server's batch, may need: 1 MiB is 8 Gbit/s at 1 ms.
pub(crate) const PUTS_MAX: usize = 256;
/// Gets under way for which nothing is allocated.
const GETS_READY: usize = 1024;

/// Names an operation; a later one in the same place has another number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OpId {
    at: u16,
    number: u32,
}

/// What is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The page is in this buffer.
    Put(u16),
    Get(Urgency),
}

/// How far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// In a server's queue.
    Queued,
    /// In a request that is not answered.
    Sent,
    /// Its outcome was told before the answer came.
    Given,
}

/// One page under way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Op {
    pub(crate) handle: Handle,
    pub(crate) kind: Kind,
    pub(crate) stage: Stage,
    pub(crate) deadline: Instant,
    /// It carries its page to another server: where to, and when it was put there, as that one counts.
    pub(crate) carries: bool,
    pub(crate) to: u8,
    pub(crate) epoch: u16,
    number: u32,
}

/// All that is under way.
pub(crate) struct Ops {
    ops: Vec<Option<Op>>,
    free: Vec<u16>,
    pages: Vec<Page>,
    free_pages: Vec<u16>,
    number: u32,
}

impl Ops {
    pub(crate) fn new() -> Self {
        let count = PUTS_MAX + GETS_READY;
        let reversed = |count: usize| (0..count).rev().map(|at| u16::try_from(at).expect("few")).collect();
        Self {
            ops: vec![None; count],
            free: reversed(count),
            pages: vec![[0; PAGE_BYTES]; PUTS_MAX],
            free_pages: reversed(PUTS_MAX),
            number: 0,
        }
    }

    /// Bytes taken.
    pub(crate) fn memory_bytes(&self) -> u64 {
        (self.pages.len() * PAGE_BYTES + self.ops.len() * size_of::<Option<Op>>()) as u64
    }

    /// Whether one more put is taken.
    pub(crate) fn has_page(&self) -> bool {
        !self.free_pages.is_empty()
    }

    /// Begins a put, once the handle is known.
    ///
    /// # Panics
    /// Without [`Ops::has_page`].
    pub(crate) fn put(&mut self, handle: Handle, page: &Page, now: Instant) -> OpId {
        let buffer = self.free_pages.pop().expect("it was asked");
        self.pages[usize::from(buffer)] = *page;
        self.add(handle, Kind::Put(buffer), now).expect("there are more than puts and gets together")
    }

    /// Begins a get; `None` when far too many are under way.
    pub(crate) fn get(&mut self, handle: Handle, urgency: Urgency, deadline: Instant) -> Option<OpId> {
        if self.free.len() <= self.free_pages.len() {
            let at = u16::try_from(self.ops.len()).ok().filter(|at| *at < u16::MAX)?;
            self.ops.push(None);
            self.free.push(at);
        }
        self.add(handle, Kind::Get(urgency), deadline)
    }

    /// Makes a put out of a get that has brought its page; false when puts have no buffer to spare.
    pub(crate) fn turn(&mut self, id: OpId, page: &Page) -> bool {
        if self.free_pages.len() <= PUTS_MAX / 2 {
            return false;
        }
        let buffer = self.free_pages.pop().expect("there are more");
        self.pages[usize::from(buffer)] = *page;
        let op = self.get_mut(id).expect("it is under way");
        (op.kind, op.stage) = (Kind::Put(buffer), Stage::Queued);
        true
    }

    fn add(&mut self, handle: Handle, kind: Kind, deadline: Instant) -> Option<OpId> {
        let at = self.free.pop()?;
        self.number = self.number.wrapping_add(1);
        self.ops[usize::from(at)] = Some(Op {
            handle,
            kind,
            stage: Stage::Queued,
            deadline,
            carries: false,
            to: 0,
            epoch: 0,
            number: self.number,
        });
        Some(OpId { at, number: self.number })
    }

    /// The operation, if it has not ended.
    pub(crate) fn get_mut(&mut self, id: OpId) -> Option<&mut Op> {
        self.ops.get_mut(usize::from(id.at))?.as_mut().filter(|op| op.number == id.number)
    }

    /// The operation in a place, as slots remember it.
    pub(crate) fn at(&self, at: u16) -> (OpId, &Op) {
        let op = self.ops[usize::from(at)].as_ref().expect("slots name what is under way");
        (OpId { at, number: op.number }, op)
    }

    /// The page in a buffer.
    pub(crate) fn page(&self, buffer: u16) -> &Page {
        &self.pages[usize::from(buffer)]
    }

    /// Ends an operation.
    pub(crate) fn end(&mut self, id: OpId) {
        let op = self.ops[usize::from(id.at)].take().expect("it ends once");
        if let Kind::Put(buffer) = op.kind {
            self.free_pages.push(buffer);
        }
        self.free.push(id.at);
    }

    /// Those that are there, by place.
    pub(crate) fn ids(&self) -> impl Iterator<Item = OpId> + use<> {
        let ids: Vec<OpId> = (0..self.ops.len())
            .filter_map(|at| {
                let number = self.ops[at].as_ref()?.number;
                Some(OpId { at: u16::try_from(at).expect("few"), number })
            })
            .collect();
        ids.into_iter()
    }

    /// Moves deadlines on, though not beyond the latest that there may be.
    pub(crate) fn put_off(&mut self, by: Duration, latest: Instant) {
        for op in self.ops.iter_mut().flatten() {
            op.deadline = (op.deadline + by).min(latest);
        }
    }

    /// Whether any get is past its deadline.
    pub(crate) fn is_overdue(&self, now: Instant) -> bool {
        self.ops.iter().flatten().any(|op| op.is_overdue(now))
    }
}

impl Op {
    /// Whether it is a get whose outcome is due.
    pub(crate) fn is_overdue(&self, now: Instant) -> bool {
        matches!(self.kind, Kind::Get(_)) && self.stage != Stage::Given && self.deadline <= now
    }
}

impl OpId {
    /// For slots.
    pub(crate) fn place(self) -> u16 {
        self.at
    }
}

/// What waits to be sent to one server. Entries whose operation has ended are passed over.
pub(crate) struct Queues {
    pub(crate) demand: VecDeque<OpId>,
    pub(crate) prefetch: VecDeque<OpId>,
    pub(crate) puts: VecDeque<OpId>,
}

impl Queues {
    pub(crate) fn new() -> Self {
        let queue = || VecDeque::with_capacity(PUTS_MAX + GETS_READY);
        Self { demand: queue(), prefetch: queue(), puts: queue() }
    }

    /// Whether nothing waits.
    pub(crate) fn are_empty(&self) -> bool {
        self.demand.is_empty() && self.prefetch.is_empty() && self.puts.is_empty()
    }

    /// Where operations of this kind wait.
    pub(crate) fn of(&mut self, kind: Kind) -> &mut VecDeque<OpId> {
        match kind {
            Kind::Put(_) => &mut self.puts,
            Kind::Get(Urgency::Demand) => &mut self.demand,
            Kind::Get(Urgency::Prefetch) => &mut self.prefetch,
        }
    }
}

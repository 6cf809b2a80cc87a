//! One address space under management.

use spillway_core::TargetId;
use spillway_core::evict::Run;
use spillway_core::page::BufferIndex;

use crate::capture::Flight;

/// A fault that could not be served at once.
#[derive(Clone, Copy, Debug)]
pub struct Waiting {
    /// At which slot.
    pub at: usize,
    /// Whether it writes.
    pub write: bool,
    /// Which thread waits.
    pub thread: usize,
}

/// The record of a target without an agent, whose userfaultfd outlives the pager.
#[derive(Clone, Copy, Debug)]
pub struct Young {
    /// Which address space.
    pub space: usize,
    /// Whose forked child it is.
    pub parent: Option<TargetId>,
    /// By which event.
    pub event: u64,
    /// What it has inherited is in the table.
    pub inherits: bool,
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Target {
    /// Its identity in the core.
    pub id: TargetId,
    /// Which address space.
    pub space: usize,
    /// Its agent's thread; without one it is served and not evicted.
    pub agent: Option<usize>,
    /// What the agent does.
    pub flight: Flight,
    /// The runs of the capture under way.
    pub runs: Vec<Run>,
    /// Buffers set aside for their pages, in order.
    pub buffers: Vec<BufferIndex>,
    /// Whether its events were looked at since the last capture. Without a look between two captures, events would never
    /// be read, and the kernel moves nothing while one is unread.
    pub looked: bool,
    /// Captures that are still to be made page by page, after the kernel refused a run.
    pub single: u32,
    /// Pages that the kernel would not move because others share them, and those that were to leave with them.
    pub shared: Vec<Run>,
    /// Pages that were among those, and are the target's own now: they are to leave before they are merged again.
    pub unshared: Vec<Run>,
    /// Whose forked child it is, until it has an agent of its own.
    pub parent: Option<TargetId>,
    /// Whether it was asked which process it is.
    pub is_known: bool,
    /// How often its mappings have changed.
    pub changes: u64,
    /// For a forked child: whether it is known yet what it has inherited. Its faults wait until then.
    pub inherits: bool,
    /// It was forked, or may have been: the kernel copies pages there at a write, and the table learns of them later.
    pub forked: bool,
    /// A scan is under way, which may have seen what is removed.
    pub scanned: bool,
    /// Faults that wait.
    pub waiting: Vec<Waiting>,
    /// The next scan is to tell which pages are there although they count as outside.
    pub doubtful: bool,
    /// Slots that it told of.
    pub doubts: Vec<usize>,
}

impl Target {
    /// A target that nothing is under way in.
    pub fn new(id: TargetId, space: usize, agent: Option<usize>) -> Self {
        Self {
            id,
            space,
            agent,
            flight: Flight::Idle,
            runs: Vec::new(),
            buffers: Vec::new(),
            looked: false,
            single: 0,
            shared: Vec::new(),
            unshared: Vec::new(),
            parent: None,
            is_known: true,
            changes: 0,
            inherits: true,
            forked: false,
            scanned: false,
            waiting: Vec::new(),
            doubtful: false,
            doubts: Vec::new(),
        }
    }

    /// Whether pages of it may be captured now.
    pub fn may_capture(&self) -> bool {
        self.agent.is_some() && self.flight == Flight::Idle && self.looked && self.inherits && !self.doubtful
    }

    /// Whether its faults may be served now.
    pub fn may_serve(&self) -> bool {
        self.inherits && self.may_read()
    }

    /// Whether its events may be read now.
    pub fn may_read(&self) -> bool {
        !matches!(self.flight, Flight::Capture { .. })
    }
}

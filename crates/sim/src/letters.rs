//! What the watcher and the driver tell each other. Both may be old by the time they are read.

use spillway_core::pager::Budget;
use spillway_core::policy::Settings;
use spillway_core::{Span, TargetId};

/// What the watcher asks of the driver.
#[derive(Clone, Debug)]
pub enum Command {
    /// Manage an address space through this agent.
    Add {
        /// Which.
        space: usize,
        /// Its agent.
        agent: usize,
    },
    /// An agent for a target that was forked from another.
    Equip {
        /// Which.
        target: TargetId,
        /// Its agent.
        agent: usize,
    },
    /// What a forked child has of its parent's memory is known.
    Inherit {
        /// Which child.
        target: TargetId,
        /// It reads zeros here.
        wiped: Vec<Span>,
        /// It has what is registered here and, of its parent's mappings, nothing else.
        has: Vec<Span>,
        /// How often its mappings had changed when this was asked.
        changes: u64,
    },
    /// Register these spans.
    Register {
        /// Whose.
        target: TargetId,
        /// Which.
        spans: Vec<Span>,
    },
    /// These pages were seen to be resident.
    Found {
        /// Whose.
        target: TargetId,
        /// Which.
        spans: Vec<Span>,
    },
    /// None of these pages is resident any more.
    RemovalSeen {
        /// Whose.
        target: TargetId,
        /// Of which removal.
        removal: u64,
        /// Which pages.
        gone: Vec<Span>,
        /// Whether that is all of the removal.
        all: bool,
    },
    /// No thread is inside the removal any more.
    RemovalOver {
        /// Whose.
        target: TargetId,
        /// Which removal.
        removal: u64,
    },
    /// The address space is gone.
    Ended {
        /// Which.
        target: TargetId,
    },
    /// A new budget.
    Budget(Budget),
    /// Which pages leave, when and whose.
    Replacement(Settings),
    /// Bring everything home and let go.
    Release,
}

/// What the driver tells the watcher.
#[derive(Clone, Debug)]
pub enum Report {
    /// An address space is managed now.
    Added(TargetId, usize),
    /// What was asked to be registered; what of it was new.
    Registered(TargetId, Vec<Span>),
    /// There are mappings that the table does not know.
    Rescan(TargetId),
    /// A removal was announced.
    Removal(TargetId, Span, u64),
    /// A target forked.
    Forked(TargetId, usize),
    /// A thread of a forked child raised a fault: so this is whose address space it is. Its mappings had changed so often.
    Thread(TargetId, u64),
    /// A target's agent is gone.
    AgentGone(TargetId),
    /// Everything is home and let go.
    Released,
}

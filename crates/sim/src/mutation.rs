//! Drivers that are known to be wrong, each in one way. The simulator is worth something only if it catches them.

/// What is wrong with a driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutation {
    /// Reads a target's messages while a capture of it is under way.
    ReadDuringCapture,
    /// Serves the faults of one read in the order in which they came, before the events that were read with them.
    ServeBeforeChanges,
    /// Captures pages whose removal was announced and has not happened.
    CaptureRemoving,
    /// Believes that a removal is over although a later one of the same pages was announced since.
    TrustRemovalOver,
    /// Takes a removal that concerns no page known to be there for one that needs no evidence.
    AnnounceKnownOnly,
    /// Takes pages that a scan saw as found, although their removal was announced since.
    TrustScan,
    /// Never frees what the core released.
    KeepReleased,
    /// Does not tell the store of a page's older copy, so that it is never released.
    ForgetCleanCopy,
    /// Drops faults whose pages could not be installed because mappings were changing.
    DropRetries,
    /// Ignores moved mappings.
    IgnoreRemap,
    /// Ignores unmapped mappings.
    IgnoreUnmap,
    /// Ignores removals.
    IgnoreRemove,
    /// Gives a forked child the parent's handles without references of its own.
    ShareNothing,
    /// Does not copy the buffers that parent and child of a fork both need.
    CopyNothing,
    /// Lets faults wait when nothing can be evicted, instead of going past the budget.
    NoOverdraft,
    /// Lets faults wait for agents although none has one, or the agents wait for pages themselves.
    WaitForAgents,
    /// Hands out what the store could not read as zeros.
    ZerosForLost,
    /// Lets a forked child inherit what its parent had marked as not to be inherited, or to be wiped.
    IgnoreForkMarks,
    /// Believes what was seen of a forked child's mappings although they have changed since.
    InheritBlindly,
    /// Forks while buffers are short, without writing some first.
    ForkWithoutBuffers,
    /// Looks only at pages of new mappings: never at what a forked child had in memory, nor at what moved before it was
    /// looked at.
    ScanOnlyNew,
    /// Lets go of pages that are lost and not poisoned.
    LetGoOfLost,
    /// Installs what arrives without asking whether it is still on its way.
    InstallUnasked,
    /// Asks only whether a page is on its way, and not under which handle.
    IgnoreHandle,
    /// Does not forget what is under way for handles that it frees.
    KeepFreed,
    /// Forgets what is under way for a handle of which only one of several references is freed.
    ForgetShared,
    /// Takes a put that failed in the end for one that succeeded.
    TrustPut,
    /// Wakes nobody when not all of a block could be installed.
    DropWake,
    /// Wakes then only who asked for the block, and not who came later to a page that was on its way.
    WakeOnlyWhoAsked,
    /// Wakes then where the pages were when they were asked for, and not where they are.
    WakeWhereAsked,
    /// Installs what arrives while a fork that was heard of waits for the store.
    InstallDuringFork,
    /// Captures more while what was captured is being read, in its place.
    CaptureUnread,
    /// Serves a fault from a buffer that is still to be read into.
    StealUnread,
    /// Copies such a buffer for a forked child.
    ForkUnread,
    /// Believes of a buffer that is filled anew what was found of what it held before.
    TrustOldComparison,
    /// Takes over without asking what was moved out and had not reached its buffers.
    ForgetStaging,
    /// Takes over without the events that were read and not applied.
    ForgetEvents,
    /// Applies an event again that the book says was applied.
    ApplyTwice,
    /// Takes over and wakes nobody whose fault the other pager had read.
    ForgetWake,
    /// Drops the record of a capture before its pages are in their buffers.
    ReadTooEarly,
    /// Takes over without those who have no agent.
    ForgetChildren,
}

impl Mutation {
    /// All of them.
    pub const ALL: [Self; 41] = [
        Self::ReadDuringCapture,
        Self::ServeBeforeChanges,
        Self::CaptureRemoving,
        Self::TrustRemovalOver,
        Self::AnnounceKnownOnly,
        Self::TrustScan,
        Self::KeepReleased,
        Self::ForgetCleanCopy,
        Self::DropRetries,
        Self::IgnoreRemap,
        Self::IgnoreUnmap,
        Self::IgnoreRemove,
        Self::ShareNothing,
        Self::CopyNothing,
        Self::NoOverdraft,
        Self::WaitForAgents,
        Self::ZerosForLost,
        Self::IgnoreForkMarks,
        Self::InheritBlindly,
        Self::ForkWithoutBuffers,
        Self::ScanOnlyNew,
        Self::LetGoOfLost,
        Self::InstallUnasked,
        Self::IgnoreHandle,
        Self::KeepFreed,
        Self::ForgetShared,
        Self::TrustPut,
        Self::DropWake,
        Self::WakeOnlyWhoAsked,
        Self::WakeWhereAsked,
        Self::InstallDuringFork,
        Self::CaptureUnread,
        Self::StealUnread,
        Self::ForkUnread,
        Self::TrustOldComparison,
        Self::ForgetStaging,
        Self::ForgetEvents,
        Self::ApplyTwice,
        Self::ForgetWake,
        Self::ReadTooEarly,
        Self::ForgetChildren,
    ];
}

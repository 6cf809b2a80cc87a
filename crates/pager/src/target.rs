//! One address space under management: its userfaultfd, its agent, and what is under way in it.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use spillway_core::evict::Run;
use spillway_core::page::BufferIndex;
use spillway_core::pager::Outcome;
use spillway_core::{Address, PAGE_BYTES_U64, Page, Span, TargetId};

use crate::adopt::Agent;
use crate::announced::Announced;
use crate::choice::Choice;
use crate::commons::Commons;
use crate::merging::Merging;
use crate::outlook::Outlook;
use crate::procfs::Mapping;
use crate::stretch::Stretch;
use crate::sys::agent::BATCH_PAGES;
use crate::sys::epoll::Ear;
use crate::sys::fd::send_byte;
use crate::sys::pagemap::Pagemap;
use crate::sys::procmap::ProcMap;
use crate::sys::uffd::Uffd;
use crate::tally::Tally;

/// `MADV_POPULATE_WRITE` (5.14).
pub const POPULATE_WRITE: u64 = 23;

/// `mseal` (6.10).
const SYS_MSEAL: libc::c_long = 462;
/// Calls that keep memory in its place.
pub const HOLD_CALLS: usize = 2;

/// The calls that keep memory which no event may tell of from forked children, and in its place.
pub fn hold_calls(span: Span) -> [(libc::c_long, [u64; 6]); HOLD_CALLS] {
    let (start, bytes) = (span.start.0, span.pages() * PAGE_BYTES_U64);
    [
        (libc::SYS_madvise, [start, bytes, u64::from(libc::MADV_DONTFORK.unsigned_abs()), 0, 0, 0]),
        (SYS_MSEAL, [start, bytes, 0, 0, 0, 0]),
    ]
}

/// The arguments of `madvise` that mark a mapping for merging, which the end of merging as a whole has undone.
pub fn mark_again(span: Span) -> [u64; 6] {
    [span.start.0, span.end.0 - span.start.0, u64::from(libc::MADV_MERGEABLE.unsigned_abs()), 0, 0, 0]
}

/// A fault that could not be served at once.
#[derive(Clone, Copy, Debug)]
pub struct Waiting {
    /// Where.
    pub address: Address,
    /// Whether it writes.
    pub write: bool,
    /// Which thread waits, by its number in the target's own namespace.
    pub thread: i32,
    /// Since when, in monotonic nanoseconds, as far as can be told.
    pub since_ns: u64,
}

/// What the agent is doing.
#[derive(Debug, PartialEq, Eq)]
pub enum Flight {
    /// Nothing.
    Idle,
    /// Moving the runs in [`Target::runs`] into staging. No event may be read meanwhile: the runs were chosen from a
    /// table that knows no later event, and a page moved from a mapping that is not the table's any more would be lost.
    Capture {
        /// Index of the first move's call.
        first_call: usize,
        /// Of pages that were refused just now, and made the target's own since.
        again: bool,
    },
    /// Asking the kernel to merge pages, or not to. That may take a while, and the address space is locked meanwhile: whoever
    /// installed a page would wait.
    Merging(Errand),
    /// Something that does not mind events.
    Other,
}

/// Faults of a target that may wait before its list of them grows.
pub const WAITING_ROOM: usize = 64;

/// What the kernel is told of merging.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Errand {
    /// Nothing; whether it merges is asked.
    Ask,
    /// To merge.
    Begin,
    /// To merge no more, and to undo what it has merged.
    End,
}

/// See the module's documentation.
pub struct Target {
    /// Its identity in the core.
    pub id: TargetId,
    /// Its process, once known: a forked child's is not, until it is adopted.
    pub pid: i32,
    /// What is told of the tree that it belongs to.
    pub tally: Arc<Tally>,
    /// Its tree is being let go: nothing of it is captured any more.
    pub leaving: bool,
    /// Listens to that while it lives.
    pub ear: Option<Ear>,
    /// Its userfaultfd.
    pub uffd: Uffd,
    /// Which of its messages come next, where it shares memory.
    pub outlook: Option<Outlook>,
    /// Its page tables, once its process is known.
    pub pagemap: Option<Pagemap>,
    /// Its mappings, likewise.
    pub procmap: Option<ProcMap>,
    /// What it sees of shared memory is known: not of a child that another pager was told of, nor of its children.
    pub has_known_views: bool,
    /// Its agent; without one it is served and not evicted.
    pub agent: Option<Agent>,
    /// What the agent does.
    pub flight: Flight,
    /// When it was told to.
    pub ordered_ns: u64,
    /// It has left an order unread, as its process is stopped or frozen: for a while it is told nothing, and nobody waits for it. Or it has
    /// begun, and was stopped since: the same, until it answers.
    pub deaf: bool,
    /// When to try again to read its events, which cannot be read for want of descriptors or memory: each fork takes a descriptor.
    /// 0 where they can. As long as they cannot, whoever forks waits, and the kernel moves no page of it.
    pub unread_until_ns: u64,
    /// Which of the fault thread's places the agent has, as the driver numbers them; 0 for one of its own.
    pub placed: u64,
    /// Who asked for what [`Target::hold`] does, until it is done.
    pub holds: Option<Sender<Option<bool>>>,
    /// The runs of the capture under way.
    pub runs: Vec<Run>,
    /// Buffers set aside for the pages of the capture under way, in order.
    pub buffers: Vec<BufferIndex>,
    /// Whether its events were looked at since the last capture: without a look between two captures, events would
    /// never be read, and the kernel moves nothing while one is unread.
    pub looked: bool,
    /// Whether staging holds pages that were read already.
    pub staged: bool,
    /// Whether the process has locked all of its memory, staging too, which cannot be emptied then.
    pub staging_locked: bool,
    /// Captures that are still to be made page by page, after the kernel refused a run.
    pub single: u32,
    /// Pages that the kernel would not move because others share them: a forked child does, or did, or they are merged. And
    /// those that were to leave with them.
    pub shared_runs: Vec<Run>,
    /// Pages that were among those, and are the target's own now: they are to leave before they are merged again.
    pub unshared: Vec<Run>,
    /// Whether the kernel merges its pages.
    pub merging: Merging,
    /// If it does when it is asked first, then because whoever it was forked from was made to.
    pub inherits_merging: bool,
    /// What of it was merged before we asked, at its own wish: it is to be so again afterwards.
    pub marked: Vec<Span>,
    /// The kernel would not do what it was told of merging: it is not told again.
    pub unmergeable: bool,
    /// Whose forked child it is, until it has an agent of its own.
    pub parent: Option<TargetId>,
    /// It was forked, or may have been: the kernel copies pages there at a write, and the table learns of them later.
    pub forked: bool,
    /// For a forked child: whether it is known yet what it has inherited. Its faults wait until then.
    pub inherits: bool,
    /// How often that was asked again.
    pub asked: u32,
    /// Changes of its mappings that were heard of.
    pub changes: u64,
    /// It has made its userfaultfd itself, which tells of faults and removals alone; outside of its regions nobody knows what is
    /// missing.
    pub handed: bool,
    /// It is no process, but memory that several have mapped.
    pub commons: Option<Box<Commons>>,
    /// What it has announced of late.
    pub announced: Announced,
    /// Said to be unmapped, and to be believed or not once mappings are at rest. Nothing is served or captured until then.
    pub unmapped: Vec<Span>,
    /// Faults that wait for room or for the end of a change of mappings.
    pub waiting: Vec<Waiting>,
    /// Taken over from another pager, and the scan that follows is still to tell which pages are there although they count as
    /// outside. Nothing is captured until then.
    pub doubtful: bool,
    /// Where it saw such pages.
    pub doubts: Vec<Address>,
}

impl Target {
    /// A target that nothing is known of but its userfaultfd and whose it is.
    pub fn new(id: TargetId, pid: i32, uffd: Uffd, agent: Option<Agent>, tally: Arc<Tally>) -> Self {
        let looks_into = agent.as_ref().map(|agent| agent.pid);
        let mut target = Self {
            id,
            pid,
            tally,
            leaving: false,
            ear: None,
            uffd,
            outlook: None,
            pagemap: None,
            procmap: None,
            has_known_views: true,
            agent,
            flight: Flight::Idle,
            ordered_ns: 0,
            deaf: false,
            unread_until_ns: 0,
            placed: 0,
            holds: None,
            runs: Vec::with_capacity(BATCH_PAGES),
            buffers: Vec::with_capacity(BATCH_PAGES),
            looked: false,
            staged: false,
            staging_locked: false,
            single: 0,
            shared_runs: Vec::with_capacity(BATCH_PAGES),
            unshared: Vec::new(),
            merging: Merging::Untold,
            inherits_merging: false,
            marked: Vec::new(),
            unmergeable: false,
            parent: None,
            forked: false,
            inherits: true,
            asked: 0,
            changes: 0,
            handed: false,
            commons: None,
            announced: Announced::default(),
            unmapped: Vec::new(),
            waiting: Vec::with_capacity(WAITING_ROOM),
            doubtful: false,
            doubts: Vec::new(),
        };
        looks_into.into_iter().for_each(|pid| target.look_into(pid));
        target
    }

    /// Its process is `pid`: opens what tells of its memory.
    pub fn look_into(&mut self, pid: i32) {
        self.pagemap = Pagemap::open(pid).ok();
        self.procmap = ProcMap::open(pid).ok();
    }

    /// What of `stretch` is mapped now, in stretches, with what has come to touch it; none where the kernel cannot be asked.
    pub fn as_it_is(&self, stretch: &Stretch, choice: Choice) -> Option<Vec<Stretch>> {
        let (procmap, own) = (self.procmap.as_ref()?, self.agent.as_ref()?.staging_and_scratch());
        let is_managed = |mapping: &Mapping| choice.takes(mapping) && own.intersect(mapping.span).is_none();
        stretch.as_it_is(|address| procmap.at_or_behind(address), is_managed).ok()
    }

    /// How many of `pages` pages from `address` on may be installed besides the first, for which a thread waits: those before
    /// the first that is there, or is a guard. UFFDIO_COPY would overwrite a guard page (`MADV_GUARD_INSTALL`, seen with
    /// 6.18), of which no event tells.
    pub fn clear_pages(&self, address: Address, pages: u64) -> u64 {
        if pages <= 1 {
            return pages;
        }
        let Some(pagemap) = &self.pagemap else { return 1 };
        let span = Span { start: address.plus_pages(1), end: address.plus_pages(pages) };
        let mut end = span.end;
        match pagemap.populated(span, |there| end = end.min(there.start)) {
            Ok(()) => end.pages_since(address),
            Err(_) => 1,
        }
    }

    /// Installs `pages` at `address` and wakes who waits for them.
    pub fn copy(&self, address: Address, pages: &[Page]) -> Outcome {
        self.woken(address, self.uffd.copy(address, pages))
    }

    /// Installs `pages` pages of zeros at `address`, which cost no memory where that can be, and wakes who waits for them.
    pub fn zero(&self, address: Address, pages: u64) -> Outcome {
        self.woken(address, self.uffd.zero(address, pages))
    }

    /// From now on an access to the page at `address` raises SIGBUS.
    pub fn poison(&self, address: Address) -> Outcome {
        match &self.commons {
            Some(commons) => commons.poison(address),
            None => self.uffd.poison(address),
        }
    }

    /// Waiting faults in `span` are tried again.
    pub fn wake(&self, span: Span) {
        match &self.commons {
            Some(commons) => commons.wake(span),
            // None is expected to fail.
            None => drop(self.uffd.wake(span)),
        }
    }

    /// The kernel has woken who waited in the target itself.
    fn woken(&self, address: Address, outcome: Outcome) -> Outcome {
        self.commons.iter().for_each(|commons| commons.wake(Span::of_pages(address, outcome.done)));
        outcome
    }

    /// Of `regions`, said to have been unmapped together, what is there all the same; none while it cannot be told, as mappings are
    /// changing and something was moved there meanwhile.
    ///
    /// That a mapping is there and registered is not enough: one in front of it may have grown meanwhile, and that would
    /// have no pages yet. But what is unmapped together is unmapped or not as a whole.
    pub fn still_has(&self, regions: &[Span]) -> Option<Vec<Span>> {
        let mut kept = Vec::new();
        for part in self.arrived_in(regions) {
            if self.is_there(part)? {
                kept.push(part);
            }
        }
        let rest = regions.iter().flat_map(|&region| region.without(self.announced.arrived_in(region).into_iter()));
        let is_there = |&part: &Span| !self.announced.is_fresh(part) && self.is_there(part) == Some(true);
        let rest: Vec<Span> = rest.filter(is_there).collect();
        if rest.iter().any(|&part| self.is_populated(part)) {
            kept.extend(rest);
        }
        Some(kept)
    }

    /// Of `regions`, what was moved there since mappings were last at rest.
    pub fn arrived_in(&self, regions: &[Span]) -> Vec<Span> {
        regions.iter().flat_map(|&region| self.announced.arrived_in(region)).collect()
    }

    /// Whether the first and the last page of `span` are in registered mappings; none while mappings are changing.
    fn is_there(&self, span: Span) -> Option<bool> {
        Some(self.uffd.is_registered(span.start)? && self.uffd.is_registered(Address(span.end.0 - 1).page())?)
    }

    /// Whether any page of `span` is in the target, as far as can be told.
    fn is_populated(&self, span: Span) -> bool {
        let mut populated = false;
        if let Some(pagemap) = &self.pagemap {
            let _ = pagemap.populated(span, |_| populated = true);
        }
        populated
    }

    /// Whether pages of it may be captured now.
    pub fn may_capture(&self) -> bool {
        self.may_look() && self.looked && self.unmapped.is_empty() && !self.doubtful
    }

    /// Whether pages of it may be captured after another look at its events.
    pub fn may_look(&self) -> bool {
        let is_ready = self.commons.as_ref().is_none_or(|commons| commons.is_ready());
        self.takes_orders() && self.flight == Flight::Idle && is_ready
    }

    /// Whether it has an agent that captures what it is told to, now or once it has done something else; or needs none. What a capture has
    /// brought is looked up in its page tables where the kernel does not tell all of it.
    pub fn takes_orders(&self) -> bool {
        let can = self.agent.is_some() && self.pagemap.is_some()
            || self.commons.as_ref().is_some_and(|commons| commons.takes_orders());
        can && !self.leaving && !self.deaf && self.unread_until_ns == 0
    }

    /// Whether what is at `address` is being taken out just now.
    pub fn is_on_its_way_out(&self, address: Address) -> bool {
        self.commons.as_ref().is_some_and(|commons| commons.is_leaving(address))
    }

    /// Whether its faults may be served now.
    pub fn may_serve(&self) -> bool {
        self.inherits && self.may_read() && self.unmapped.is_empty()
    }

    /// Whether its events may be read now.
    pub fn may_read(&self) -> bool {
        !matches!(self.flight, Flight::Capture { .. } | Flight::Merging(_)) && (self.inherits || !self.handed)
    }

    /// Whether `thread`, which faults, is the agent itself, at work on what captures would have to wait for.
    pub fn is_agent_at_work(&self, thread: i32) -> bool {
        // Where threads are not told, it may be.
        let is_it = |agent: &Agent| agent.known_as == thread || thread == 0;
        self.flight == Flight::Other && self.agent.as_ref().is_some_and(is_it)
    }

    /// Starts the capture of [`Target::runs`], of pages refused just now if `again`; `about_to` is called before the agent hears
    /// of it. False when the agent is gone.
    pub fn start_capture(&mut self, again: bool, about_to: impl FnOnce(TargetId, &[Run])) -> bool {
        self.staged = true;
        let Some(agent) = &mut self.agent else { return false };
        let (layout, uffd, staging) = (agent.layout, agent.uffd, agent.staging());
        let mut list = agent.memory.list();
        // Whether or not something of ours is there: the result says whether anything else may be.
        let bytes = staging.end.0 - staging.start.0;
        list.call(libc::SYS_madvise, [staging.start.0, bytes, libc::MADV_DONTNEED as u64, 0, 0, 0]);
        let first_call = list.register(&layout, uffd, staging) + 1;
        let mut to = staging.start;
        for run in &self.runs {
            list.move_pages(&layout, uffd, run.address, to, run.pages);
            to = to.plus_pages(run.pages);
        }
        // Unregistered before it is read and dropped: reading can then never raise a fault, nor dropping an event.
        list.unregister(&layout, uffd, staging);
        list.finish();
        self.flight = Flight::Capture { first_call, again };
        self.looked = false;
        about_to(self.id, &self.runs);
        send_byte(agent.socket.as_fd())
    }

    /// Lets the agent drop what is staged, without anyone waiting for it. False when the agent is gone.
    pub fn drop_staged(&mut self) -> bool {
        let Some(agent) = &mut self.agent else { return false };
        let staging = agent.staging();
        let bytes = staging.end.0 - staging.start.0;
        let mut list = agent.memory.list();
        if std::mem::take(&mut self.staging_locked) {
            list.call(libc::SYS_munlock, [staging.start.0, bytes, 0, 0, 0, 0]);
        }
        list.call(libc::SYS_madvise, [staging.start.0, bytes, libc::MADV_DONTNEED as u64, 0, 0, 0]);
        list.finish();
        self.staged = false;
        self.flight = Flight::Other;
        send_byte(agent.socket.as_fd())
    }

    /// Lets the agent write to these pages without changing them, so that the kernel gives the target copies of its own of what
    /// it shares. False when the agent is gone.
    pub fn unshare(&mut self, runs: Vec<Run>) -> bool {
        let Some(agent) = &mut self.agent else { return false };
        let mut list = agent.memory.list();
        for run in &runs {
            list.call(libc::SYS_madvise, [run.address.0, run.pages * PAGE_BYTES_U64, POPULATE_WRITE, 0, 0, 0]);
        }
        list.finish();
        self.unshared = runs;
        self.flight = Flight::Other;
        send_byte(agent.socket.as_fd())
    }

    /// Lets the agent keep this memory from forked children, and in its place. False when the agent is gone.
    pub fn hold(&mut self, span: Span) -> bool {
        let Some(agent) = &mut self.agent else { return false };
        let mut list = agent.memory.list();
        for (number, arguments) in hold_calls(span) {
            list.call(number, arguments);
        }
        list.finish();
        self.flight = Flight::Other;
        send_byte(agent.socket.as_fd())
    }

    /// Lets the agent tell the kernel this. False when the agent is gone.
    pub fn tell_of_merging(&mut self, errand: Errand) -> bool {
        let Some(agent) = &mut self.agent else { return false };
        let (what, value) = match errand {
            Errand::Ask => (libc::PR_GET_MEMORY_MERGE, 0),
            Errand::Begin => (libc::PR_SET_MEMORY_MERGE, 1),
            Errand::End => (libc::PR_SET_MEMORY_MERGE, 0),
        };
        let mut list = agent.memory.list();
        list.call(libc::SYS_prctl, [u64::from(what.unsigned_abs()), value, 0, 0, 0, 0]);
        if errand == Errand::End {
            for span in self.marked.iter().take(BATCH_PAGES) {
                list.call(libc::SYS_madvise, mark_again(*span));
            }
        }
        list.finish();
        self.flight = Flight::Merging(errand);
        send_byte(agent.socket.as_fd())
    }
}

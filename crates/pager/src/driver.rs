//! The fault thread: wait, ask the core, perform, report. The only loop that touches the table, the store and the
//! targets' memory.
//!
//! On a fault it makes the system calls that the kernel requires (one wait, one read, one installation) and nothing
//! else: no lock, no log, no allocation. Captures and writes come after the faults that wait, except when the budget
//! is used up, and then only as many as make room.

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, Sender, TryRecvError};

use spillway_core::evict::{Captured, Run};
use spillway_core::mappings::BufferCopy;
use spillway_core::page::{HandleBits, State};
use spillway_core::pager::{Budget, Config, Outcome, Pager, Plan, Served, Stop};
use spillway_core::streams::BLOCK_PAGES_MAX;
use spillway_core::{Address, PAGE_BYTES, Page, Span, TargetId};
use spillway_store::{Got, Handle, Put, Store, Urgency, is_zero};

use crate::adopt::Agent;
use crate::placement::Placement;
use crate::shared::Shared;
use crate::sys::agent::BATCH_PAGES;
use crate::sys::clock::now_ns;
use crate::sys::fd::{Bell, Heard, poll, readable, receive_byte};
use crate::sys::pagemap::Pagemap;
use crate::sys::process::read_pages;
use crate::sys::sched::{Class, Cpus, set_class, thread_id};
use crate::sys::uffd::{Event, Message, Uffd};
use crate::target::{Flight, Target, Waiting};
use crate::watcher::Request;

/// Page buffers: what is captured and not yet stored. 4 MiB, of which a small budget uses a part.
const BUFFERS: u32 = 1024;

/// Messages read at once. One read costs about as much as ten messages in it.
const MESSAGES: usize = 16;

/// Pages written to the store between two looks for faults: about 6 us.
const WRITES_PER_TURN: usize = 4;

/// Handles freed between two looks for faults.
const FREES_PER_TURN: usize = 256;

/// How far faults may go past the budget at a time, while nothing can be captured.
const OVERDRAFT_PAGES: u64 = 64;

/// A wait longer than this was one: a poll that finds something ready takes a fraction of it.
const SLEPT_NS: u64 = 3_000;

/// How soon to look again at faults that wait for the end of a change of mappings. The kernel wakes nobody then.
const RETRY_NS: u64 = 100_000;

/// What other threads ask of this one.
pub enum Command {
    /// Manage an address space; its identity is sent back.
    Add {
        /// The process.
        pid: i32,
        /// Its userfaultfd.
        uffd: Uffd,
        /// Its agent.
        agent: Agent,
        /// For the answer.
        reply: Sender<TargetId>,
    },
    /// An agent for a target that was forked from another.
    Equip {
        /// Which.
        target: TargetId,
        /// Its agent.
        agent: Agent,
    },
    /// What a forked child has of its parent's memory is known.
    Inherit {
        /// Which child.
        target: TargetId,
        /// It reads zeros here (`MADV_WIPEONFORK`).
        wiped: Vec<Span>,
        /// It has what is registered here and, of its parent's mappings, nothing else (`MADV_DONTFORK`).
        has: Vec<Span>,
    },
    /// Register these spans; what was not registered before is reported back.
    Register {
        /// Whose.
        target: TargetId,
        /// Which, in order.
        spans: Vec<Span>,
        /// For the answer.
        reply: Sender<Vec<Span>>,
    },
    /// The pages at these addresses must not leave.
    Keep {
        /// Whose.
        target: TargetId,
        /// Where.
        addresses: Vec<Address>,
    },
    /// These pages are resident.
    Found {
        /// Whose.
        target: TargetId,
        /// Which.
        spans: Vec<Span>,
    },
    /// None of these pages is resident any more, after the removal of a span that holds them.
    RemovalSeen {
        /// Whose.
        target: TargetId,
        /// Which.
        gone: Vec<Span>,
    },
    /// No removal can be under way here any more.
    RemovalOver {
        /// Whose.
        target: TargetId,
        /// Where.
        span: Span,
    },
    /// The address space is gone.
    Ended {
        /// Whose.
        target: TargetId,
    },
    /// A new budget.
    Budget(Budget),
    /// Bring everything home and unregister it; the agents are sent back, to be taken out.
    Release {
        /// For progress (pages still outside) and at last the agents.
        reply: Sender<Homeward>,
    },
}

/// How far a release has come.
pub enum Homeward {
    /// Pages still outside.
    Left(u64),
    /// The target's own limit leaves no room; everything stays managed.
    NoRoom(u64),
    /// All home; these agents can leave.
    Done(Vec<Agent>),
}

/// What this thread tells the scanner.
pub enum Report {
    /// A target has mappings that the table does not know.
    Rescan(TargetId),
    /// A removal was announced for resident pages.
    Removal(TargetId, Span),
    /// A target forked; the userfaultfd is a copy of the child's.
    Forked {
        /// The parent.
        parent: TargetId,
        /// The child.
        child: TargetId,
        /// The child's userfaultfd.
        uffd: Uffd,
    },
    /// A thread of a forked child raised a fault: so this is whose address space it is.
    Thread(TargetId, i32),
    /// The agent of a target is gone: it ended, or called exec.
    AgentGone(TargetId),
}

/// How well captures do. Where most of what is left is pinned, locked, or shared with a forked child, sweeping on and on
/// would take a CPU and bring nothing.
#[derive(Default)]
struct Yield {
    /// Pages tried, and captured, since the sweep was last round.
    tried: u64,
    captured: u64,
    /// When to try again; zero while captures do well.
    until_ns: u64,
    /// How long the next rest is.
    rest_ns: u64,
}

impl Yield {
    /// The first rest, and the longest.
    const RESTS_NS: (u64, u64) = (200_000, 50_000_000);
    /// Fewer captures than one in so many tried are not worth it.
    const WORTH: u64 = 8;

    /// A batch brought so much, of `mapped` pages in all. True when the sweep has been round in vain: then it rests.
    fn note(&mut self, captured: u64, stuck: u64, mapped: u64, now_ns: u64) -> bool {
        self.captured += captured;
        self.tried += captured + stuck;
        if self.tried < mapped {
            return false;
        }
        let in_vain = self.captured * Self::WORTH < self.tried;
        (self.tried, self.captured) = (0, 0);
        if in_vain {
            self.rest_ns = (self.rest_ns * 2).clamp(Self::RESTS_NS.0, Self::RESTS_NS.1);
            self.until_ns = now_ns + self.rest_ns;
        } else {
            self.rest_ns = 0;
        }
        in_vain
    }

    /// Waits a moment.
    fn pause(&mut self, now_ns: u64) {
        self.until_ns = self.until_ns.max(now_ns + RETRY_NS);
    }

    fn is_resting(&self, now_ns: u64) -> bool {
        now_ns < self.until_ns
    }
}

/// A release under way.
struct Release {
    reply: Sender<Homeward>,
    /// The budget to return to when it fails.
    budget: Budget,
}

/// What performs plans: the store and the pager's page memory.
struct Hands {
    store: Box<dyn Store>,
    buffers: Box<[Page]>,
    block: Box<[Page]>,
    zeros: Box<[Page]>,
}

/// See the module's documentation.
pub struct Driver {
    core: Pager,
    hands: Hands,
    targets: Vec<Option<Target>>,
    commands: Receiver<Command>,
    bell: Arc<Bell>,
    reports: Sender<Request>,
    shared: Arc<Shared>,
    placement: Placement,
    polled: Vec<libc::pollfd>,
    release: Option<Release>,
    /// The last wait was one.
    slept: bool,
    /// The store may have more to tidy up.
    untidy: bool,
    yields: Yield,
    /// The last sweep found nothing to capture but in targets whose agent is busy: the next waits for one.
    awaits_agent: bool,
}

fn pages(count: usize) -> Box<[Page]> {
    vec![[0; PAGE_BYTES]; count].into_boxed_slice()
}

impl Driver {
    /// A driver without targets, to be run on the thread that makes it.
    pub fn new(
        budget: Budget,
        store: Box<dyn Store>,
        commands: Receiver<Command>,
        bell: Arc<Bell>,
        reports: Sender<Request>,
        shared: Arc<Shared>,
    ) -> Self {
        shared.thread.store(thread_id(), Relaxed);
        let follow = std::env::var_os("SPILLWAY_PLACEMENT").is_none_or(|value| value != "off");
        let mut core = Pager::new(Config { budget, buffers: BUFFERS });
        core.restock();
        let block = usize::try_from(BLOCK_PAGES_MAX).expect("16");
        Self {
            core,
            hands: Hands { store, buffers: pages(BUFFERS as usize), block: pages(block), zeros: pages(block) },
            targets: Vec::new(),
            commands,
            bell,
            reports,
            shared,
            placement: Placement::new(follow),
            polled: Vec::new(),
            release: None,
            slept: false,
            untidy: false,
            yields: Yield::default(),
            awaits_agent: false,
        }
    }

    /// Serves until every sender of commands is gone.
    pub fn run(mut self) {
        loop {
            let timeout = self.timeout();
            self.wait(timeout);
            if self.polled[0].revents != 0 {
                self.bell.silence();
                if !self.obey() {
                    return;
                }
            }
            let mut busy = false;
            let local_before = self.core.local_pages();
            for i in 0..self.targets.len() {
                if self.polled.get(2 * i + 2).is_some_and(|polled| polled.revents != 0) {
                    self.hear_agent(i);
                }
                if self.polled.get(2 * i + 1).is_some_and(|polled| polled.revents != 0) {
                    self.read_events(i);
                    busy = true;
                }
            }
            // As many pages leave the buffers as became local: the reserve stays what it is.
            let came = self.core.local_pages().saturating_sub(local_before);
            self.work(busy, index(came.min(BLOCK_PAGES_MAX)));
            self.shared.progress.fetch_add(1, Relaxed);
        }
    }

    /// How long to wait: not at all while there is work, for ever when there is none.
    fn timeout(&self) -> Option<u64> {
        let live = || self.targets.iter().flatten();
        if self.release.is_some() && live().all(|target| target.flight == Flight::Idle) {
            return Some(0);
        }
        let evicting = self.core.wanted_captures() > 0
            && live().any(Target::may_look)
            && !self.awaits_agent
            && self.release.is_none();
        let rest_ns = self.yields.until_ns.saturating_sub(if self.yields.until_ns > 0 { now_ns() } else { 0 });
        if self.core.has_due_writes() || (evicting && rest_ns == 0) {
            return Some(0);
        }
        let waits = live().any(|target| !target.waiting.is_empty() && target.may_serve());
        match (waits, evicting) {
            _ if self.untidy => Some(0),
            (true, _) => Some(RETRY_NS),
            (false, true) => Some(rest_ns),
            (false, false) => None,
        }
    }

    fn wait(&mut self, timeout: Option<u64>) {
        self.polled.clear();
        self.polled.push(readable(self.bell.as_raw_fd()));
        for slot in &self.targets {
            let (event, agent) = slot.as_ref().map_or((-1, -1), |target| (target.event_fd(), target.agent_fd()));
            self.polled.extend([readable(event), readable(agent)]);
        }
        self.targets.iter_mut().flatten().for_each(|target| target.looked |= target.may_read());
        if timeout != Some(0) {
            self.publish();
        }
        let since = now_ns();
        let ready = poll(&mut self.polled, timeout);
        self.slept = now_ns() - since > SLEPT_NS;
        if !ready {
            self.polled.iter_mut().for_each(|polled| polled.revents = 0);
        }
    }

    fn publish(&self) {
        let processes = self.targets.iter().flatten().filter(|target| target.agent.is_some()).count();
        self.shared.publish(&self.core, self.hands.store.status(), processes as u64);
    }

    fn read_events(&mut self, at: usize) {
        let mut messages = [Message::default(); MESSAGES];
        let Some(target) = &self.targets[at] else { return };
        let read_ns = now_ns();
        let count = match target.uffd.read(&mut messages) {
            Ok(read) => read.len(),
            Err(_) => 0,
        };
        // The kernel hands out faults first. But a change that was read has happened by the time a fault is served, and
        // whoever made it goes on: what it made void must not be installed any more.
        for message in messages[..count].iter().filter(|message| !message.is_fault()) {
            self.change(at, message.decode());
        }
        for message in messages[..count].iter().filter(|message| message.is_fault()) {
            if let Event::Fault { address, thread, write } = message.decode() {
                self.serve(at, Waiting { address: address.page(), write, since_ns: read_ns });
                self.note_thread(at, thread);
            }
        }
    }

    fn note_thread(&mut self, at: usize, thread: i32) {
        let Some(target) = &mut self.targets[at] else { return };
        if target.pid == 0 {
            // Reported once; the scanner answers by equipping the target or not.
            target.pid = -1;
            let _ = self.reports.send(Request::Report(Report::Thread(target.id, thread)));
        }
        let slept = std::mem::take(&mut self.slept);
        if target.pid > 0 && self.placement.note(target.pid, thread, slept, &self.shared) {
            self.place_agents();
        }
    }

    /// Agents run where and as the fault thread runs.
    fn place_agents(&self) {
        let cpus = match self.placement.followed() {
            Some(cpu) => Ok(Cpus::one(cpu)),
            None => Cpus::of(0),
        };
        let Ok(cpus) = cpus else { return };
        let class = if self.shared.idle.load(Relaxed) { Class::Idle } else { Class::Normal };
        for agent in self.targets.iter().flatten().filter_map(|target| target.agent.as_ref()) {
            // A failure leaves it where it is, which is slower and not wrong.
            let _ = cpus.confine(agent.thread);
            let _ = set_class(agent.thread, class);
        }
    }

    /// Serves a fault, or lets it wait.
    fn serve(&mut self, at: usize, fault: Waiting) {
        let Some(target) = &mut self.targets[at] else { return };
        if !target.may_serve() {
            target.waiting.push(fault);
            return;
        }
        if target.flight == Flight::Other {
            // It may be the agent's own fault, and nothing can be captured before the agent is done.
            self.core.set_overdraft(OVERDRAFT_PAGES);
        }
        let plan = self.core.fault(target.id, fault.address);
        // What the stream will want next comes first: once the faulting thread runs, it would fault on it.
        while let Some(plan) = self.core.ahead() {
            let (plan, outcome) = self.hands.perform(plan, fault.write, target, &mut self.core);
            self.core.installed_ahead(plan, outcome);
        }
        let (plan, outcome) = self.hands.perform(plan, fault.write, target, &mut self.core);
        match self.core.installed(plan, outcome) {
            Served::Yes => {}
            Served::Wake => {
                let _ = target.uffd.wake(Span::of_pages(fault.address, 1));
            }
            Served::Later => {
                target.waiting.push(fault);
                return;
            }
        }
        self.shared.histogram.record(now_ns() - fault.since_ns);
        if matches!(plan, Plan::Zero { page: None, .. }) {
            let _ = self.reports.send(Request::Report(Report::Rescan(target.id)));
        }
    }

    /// Something changed in a target's address space.
    fn change(&mut self, at: usize, event: Event) {
        let Some(target) = &self.targets[at] else { return };
        let id = target.id;
        match event {
            Event::Remove(span) => {
                if self.core.removed(id, span) {
                    let _ = self.reports.send(Request::Report(Report::Removal(id, span)));
                }
            }
            Event::Unmap(span) => {
                self.core.unmapped(id, span);
                // Faults that were read and not served may wait for a page that is no more: they are tried again.
                let _ = target.uffd.wake(span);
            }
            Event::Remap { from, to, bytes } => {
                let span = Span { start: from, end: Address(from.0 + bytes) };
                self.core.remapped(id, span, to);
                let _ = target.uffd.wake(span);
            }
            Event::Fork(uffd) => self.fork(at, uffd),
            Event::Fault { .. } | Event::Unknown => {}
        }
    }

    fn fork(&mut self, at: usize, uffd: Uffd) {
        let Some(target) = &self.targets[at] else { return };
        let parent = target.id;
        // Parent and child can share what is in the store, and not what is in a buffer: those are copied, if need be.
        while self.write_one(true) {}
        let mut copies: Vec<BufferCopy> = Vec::new();
        let store = &mut self.hands.store;
        let share = |bits| to_bits(store.share(to_handle(bits)));
        let child = self.core.forked(parent, share, &mut copies);
        for BufferCopy { from, to } in copies {
            self.hands.buffers.copy_within(from.0 as usize..=from.0 as usize, to.0 as usize);
        }
        if let Ok(copy) = uffd.borrow().try_clone_to_owned() {
            let _ = self.reports.send(Request::Report(Report::Forked { parent, child, uffd: copy.into() }));
        }
        self.add(Target { parent: Some(parent), inherits: false, ..Target::new(child, 0, uffd, None) });
    }

    fn add(&mut self, target: Target) {
        let at = target.id.0 as usize;
        if self.targets.len() <= at {
            self.targets.resize_with(at + 1, || None);
        }
        self.targets[at] = Some(target);
    }

    fn hear_agent(&mut self, at: usize) {
        let Some(target) = &mut self.targets[at] else { return };
        let Some(agent) = &target.agent else { return };
        self.awaits_agent = false;
        match receive_byte(std::os::fd::AsFd::as_fd(&agent.socket)) {
            Heard::Nothing => {}
            Heard::End => {
                target.agent = None;
                target.flight = Flight::Idle;
                target.buffers.drain(..).for_each(|buffer| self.core.return_buffer(buffer));
                let _ = self.reports.send(Request::Report(Report::AgentGone(target.id)));
            }
            Heard::Byte => match std::mem::replace(&mut target.flight, Flight::Idle) {
                Flight::Capture { first_call } => self.collect(at, first_call),
                Flight::Other | Flight::Idle => {}
            },
        }
    }

    /// Takes over what a capture brought.
    fn collect(&mut self, at: usize, first_call: usize) {
        let Some(target) = &mut self.targets[at] else { return };
        let Some(agent) = &target.agent else { return };
        let mut order = [0_usize; BATCH_PAGES];
        let order = &mut order[..target.buffers.len()];
        order.iter_mut().zip(&target.buffers).for_each(|(at, buffer)| *at = buffer.0 as usize);
        // What was not moved reads as zeros there, and is told apart by the counts below.
        let read = read_pages(agent.pid, agent.layout.staging, &mut self.hands.buffers, order);
        let mut buffers = target.buffers.drain(..);
        let (mut captured, mut stuck) = (0, 0);
        for (i, run) in target.runs.iter().enumerate() {
            let moved = u64::try_from(agent.memory.moved(i)).unwrap_or(0) / PAGE_BYTES as u64;
            let moved = if read.is_ok() { moved.min(run.pages) } else { 0 };
            let refused = i32::try_from(-agent.memory.result(first_call + i)).unwrap_or(0);
            if refused == libc::EINVAL && run.pages > 1 {
                target.single = 64;
            }
            for (n, buffer) in (0..run.pages).zip(&mut buffers) {
                let page = run.page.plus(n);
                let outcome = if n < moved {
                    if is_zero(&self.hands.buffers[buffer.0 as usize]) {
                        Captured::Zero
                    } else {
                        Captured::Buffer(buffer)
                    }
                } else if n == moved && !matches!(refused, 0 | libc::EAGAIN | libc::EINTR) {
                    Captured::Stuck
                } else {
                    Captured::Untried
                };
                if outcome == Captured::Stuck && refused == libc::EBUSY && target.shared_runs.len() < BATCH_PAGES {
                    target.shared_runs.push(Run { address: run.address.plus_pages(n), page, pages: 1 });
                }
                captured += u64::from(matches!(outcome, Captured::Buffer(_) | Captured::Zero));
                stuck += u64::from(outcome == Captured::Stuck);
                if !matches!(outcome, Captured::Buffer(_)) {
                    self.core.return_buffer(buffer);
                }
                self.core.captured(page, outcome);
            }
        }
        drop(buffers);
        target.runs.clear();
        if captured + stuck == 0 {
            // Mappings are changing: whoever changes them needs the CPU to say so.
            self.yields.pause(now_ns());
        } else {
            self.note_yield(captured, stuck);
        }
    }

    /// What is due besides faults, a little at a time.
    fn work(&mut self, busy: bool, came: usize) {
        for bits in self.core.take_released(FREES_PER_TURN) {
            self.hands.store.free(to_handle(bits));
        }
        for _ in 0..if busy { came.max(1) } else { WRITES_PER_TURN } {
            if !self.write_one(false) {
                break;
            }
        }
        self.retry_waiting();
        if self.release.is_some() {
            self.bring_home();
        } else if self.core.wanted_captures() > 0 {
            // While faults keep coming they are served from the reserve, and pages leave when it runs low.
            if !busy || self.core.free_pages() < self.core.batch_pages() / 4 {
                self.evict();
            }
        } else if !busy {
            self.drop_staged();
            self.untidy = self.hands.store.tidy();
        }
    }

    fn write_one(&mut self, all: bool) -> bool {
        let Some(write) = self.core.next_write(all) else { return false };
        let page = &self.hands.buffers[write.buffer.0 as usize];
        match self.hands.store.put(page, write.previous.map(to_handle)) {
            Ok(Put::Unchanged(handle)) => self.core.written(write, to_bits(handle), true),
            Ok(Put::Stored(handle) | Put::Pending(handle)) => self.core.written(write, to_bits(handle), false),
            Err(_) => {
                self.core.write_declined(write);
                return false;
            }
        }
        true
    }

    fn retry_waiting(&mut self) {
        for at in 0..self.targets.len() {
            let Some(target) = &mut self.targets[at] else { continue };
            if target.waiting.is_empty() || !target.may_serve() {
                continue;
            }
            // Taken out and put back, so that its capacity is kept.
            let mut waiting = std::mem::take(&mut target.waiting);
            for &fault in &waiting {
                self.serve(at, fault);
            }
            waiting.clear();
            if let Some(target) = &mut self.targets[at] {
                waiting.append(&mut target.waiting);
                target.waiting = waiting;
            }
        }
    }

    /// Starts a capture, if one is wanted and possible.
    fn evict(&mut self) {
        if self.yields.is_resting(now_ns()) || !self.targets.iter().flatten().any(Target::may_capture) {
            return;
        }
        if self.unshare() {
            return;
        }
        let most = self.core.wanted_captures().min(self.core.batch_pages()).min(BATCH_PAGES as u64);
        let mut runs: Vec<Run> = Vec::new();
        if let Some(spare) = self.targets.iter_mut().flatten().find(|target| target.may_capture()) {
            std::mem::swap(&mut runs, &mut spare.runs);
        }
        runs.clear();
        let targets = &self.targets;
        let may = |id: TargetId| targets[id.0 as usize].as_ref().is_some_and(Target::may_capture);
        let whose = self.core.next_capture(most, may, &mut runs);
        let Some(target) = whose.and_then(|id| self.targets[id.0 as usize].as_mut()) else {
            // Nothing can leave targets now: what is in buffers still can, and that may be enough.
            let written = (0..WRITES_PER_TURN).filter(|_| self.write_one(true)).count();
            let unswept = |target: &Target| target.agent.is_some() && !target.may_capture();
            if self.targets.iter().flatten().any(unswept) {
                self.awaits_agent = self.targets.iter().flatten().any(|target| target.flight != Flight::Idle);
            } else if written == 0 {
                self.note_yield(0, self.core.mapped_pages().max(1));
            }
            return;
        };
        if target.single > 0 {
            target.single -= 1;
            let singles = runs
                .iter()
                .flat_map(|run| {
                    (0..run.pages).map(|i| Run { address: run.address.plus_pages(i), page: run.page.plus(i), pages: 1 })
                })
                .collect();
            runs = singles;
        }
        for _ in 0..runs.iter().map(|run| run.pages).sum() {
            // `next_capture` chose no more pages than buffers are free.
            target.buffers.push(self.core.take_buffer().expect("a buffer for each page chosen"));
        }
        target.runs = runs;
        target.start_capture();
    }

    /// A batch brought `captured` pages, and `stuck` would not leave. Faults must not wait for those, and may go past the
    /// budget: a little while the sweep goes on, and freely once it has been round in vain.
    fn note_yield(&mut self, captured: u64, stuck: u64) {
        let in_vain = self.yields.note(captured, stuck, self.core.mapped_pages(), now_ns());
        self.core.set_overdraft(match (in_vain, captured) {
            (true, _) => u64::MAX / 2,
            (false, 0) => OVERDRAFT_PAGES,
            (false, _) => 0,
        });
    }

    /// Starts to take pages back from forked children that have ended; false when there are none to take.
    fn unshare(&mut self) -> bool {
        let parents: Vec<TargetId> = self.targets.iter().flatten().filter_map(|target| target.parent).collect();
        let ready = |target: &&mut Target| {
            target.may_capture() && !target.shared_runs.is_empty() && !parents.contains(&target.id)
        };
        self.targets.iter_mut().flatten().find(ready).is_some_and(Target::unshare)
    }

    fn drop_staged(&mut self) {
        for target in self.targets.iter_mut().flatten() {
            if target.staged && target.may_capture() {
                target.drop_staged();
            }
        }
    }

    /// Carries out commands; false when no more can come.
    fn obey(&mut self) -> bool {
        loop {
            match self.commands.try_recv() {
                Ok(command) => self.carry_out(command),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
    }

    fn carry_out(&mut self, command: Command) {
        match command {
            Command::Add { pid, uffd, agent, reply } => {
                let id = self.core.add_target();
                self.add(Target::new(id, pid, uffd, Some(agent)));
                self.place_agents();
                let _ = reply.send(id);
            }
            Command::Equip { target, agent } => {
                if let Some(target) = self.target(target) {
                    target.pid = agent.pid;
                    target.pagemap = Pagemap::open(agent.pid).ok();
                    target.parent = None;
                    target.agent = Some(agent);
                }
            }
            Command::Inherit { target, wiped, has } => self.inherit(target, &wiped, &has),
            Command::Register { target, spans, reply } => {
                let _ = reply.send(self.register(target, &spans));
            }
            Command::Keep { target, addresses } => self.core.keep(target, &addresses),
            Command::Found { target, spans } => spans.iter().for_each(|&span| self.core.found(target, span)),
            Command::RemovalSeen { target, gone } => {
                gone.iter().for_each(|&span| self.core.removal_seen(target, span));
            }
            Command::RemovalOver { target, span } => self.core.removal_over(target, span),
            Command::Ended { target } => {
                self.awaits_agent = false;
                self.core.ended(target);
                let slot = self.targets.get_mut(target.0 as usize).and_then(Option::take);
                slot.into_iter().flat_map(|target| target.buffers).for_each(|b| self.core.return_buffer(b));
            }
            Command::Budget(budget) => self.core.set_budget(budget),
            Command::Release { reply } => {
                self.release = Some(Release { reply, budget: self.core.budget() });
                self.core.set_budget(Budget::Pages(u64::MAX));
            }
        }
        self.core.restock();
        self.publish();
    }

    fn target(&mut self, id: TargetId) -> Option<&mut Target> {
        self.targets.get_mut(id.0 as usize)?.as_mut()
    }

    fn inherit(&mut self, id: TargetId, wiped: &[Span], has: &[Span]) {
        let Some(target) = self.target(id) else { return };
        if std::mem::replace(&mut target.inherits, true) {
            return;
        }
        let regions: Vec<Span> = self.core.regions().of(id).map(|region| region.span).collect();
        for region in regions {
            let mut cursor = region.start;
            for part in has.iter().filter_map(|span| span.intersect(region)) {
                if cursor < part.start {
                    self.core.unmapped(id, Span { start: cursor, end: part.start });
                }
                cursor = part.end;
            }
            if cursor < region.end {
                self.core.unmapped(id, Span { start: cursor, end: region.end });
            }
        }
        for &span in wiped {
            self.core.removed(id, span);
        }
    }

    fn register(&mut self, id: TargetId, spans: &[Span]) -> Vec<Span> {
        let mut new = Vec::new();
        for &span in spans {
            let Some(target) = self.target(id) else { break };
            // Mappings may have changed since the scanner saw them: what is refused now is seen again later.
            if target.uffd.register(span).is_ok() {
                new.extend(self.core.add_region(id, span));
            }
        }
        new
    }

    /// Brings a few pages home; when none is left outside, lets go of every target.
    fn bring_home(&mut self) {
        const PAGES_PER_TURN: usize = 256;
        if self.targets.iter().flatten().any(|target| target.flight != Flight::Idle) {
            return;
        }
        let Some(reply) = self.release.as_ref().map(|release| release.reply.clone()) else { return };
        let mut outside = Vec::with_capacity(PAGES_PER_TURN);
        self.core.outside(PAGES_PER_TURN, &mut outside);
        if outside.is_empty() {
            let agents = self.let_go();
            let _ = reply.send(Homeward::Done(agents));
            self.release = None;
            return;
        }
        let _ = reply.send(Homeward::Left(self.core.touched_pages() - self.core.mapped_pages()));
        for (id, address, page) in outside {
            // A block may have brought it home meanwhile.
            if matches!(self.core.state_of(page), State::Mapped | State::Untouched | State::Lost) {
                continue;
            }
            let Some(target) = &self.targets[id.0 as usize] else { continue };
            let plan = self.core.fault(id, address);
            let (plan, outcome) = self.hands.perform(plan, true, target, &mut self.core);
            let served = self.core.installed(plan, outcome);
            if served == Served::Later && outcome.stop == Some(Stop::NoMemory) {
                return self.stay();
            }
            if outcome.stop == Some(Stop::Exists) {
                let _ = target.uffd.wake(Span::of_pages(address, 1));
            }
        }
    }

    /// A release failed: everything stays managed, under the budget that it had.
    fn stay(&mut self) {
        if let Some(Release { reply, budget }) = self.release.take() {
            self.core.set_budget(budget);
            let _ = reply.send(Homeward::NoRoom(self.core.touched_pages() - self.core.mapped_pages()));
        }
    }

    fn let_go(&mut self) -> Vec<Agent> {
        let mut agents = Vec::new();
        for target in self.targets.iter_mut().filter_map(Option::take) {
            for region in self.core.regions().of(target.id) {
                // A mapping that went away meanwhile needs no unregistering.
                let _ = target.uffd.unregister(region.span);
            }
            self.core.ended(target.id);
            agents.extend(target.agent);
        }
        self.placement.settle(&self.shared);
        agents
    }
}

impl Hands {
    /// Carries out a plan; returns what was carried out, which is less where the store failed, and how far it got.
    fn perform(&mut self, plan: Plan, write: bool, target: &Target, core: &mut Pager) -> (Plan, Outcome) {
        let outcome = match plan {
            // The kernel's zero page costs no memory; but the first write to it costs a second fault.
            Plan::Zero { address, pages, .. } if write => {
                let pages = target.clear_pages(address, pages);
                target.uffd.copy(address, &self.zeros[..index(pages)])
            }
            Plan::Zero { address, pages, .. } => target.uffd.zero(address, pages),
            Plan::Buffer { address, buffer, .. } => {
                target.uffd.copy(address, std::slice::from_ref(&self.buffers[buffer.0 as usize]))
            }
            Plan::Fetch { address, page, pages } => {
                let clear = target.clear_pages(address, pages);
                let (plan, pages) = (core.shorten(plan, clear), clear);
                let failed = (0..pages).find(|&i| {
                    let handle = core.handle_of(page.plus(i)).map(to_handle);
                    let into = &mut self.block[index(i)];
                    handle.map(|handle| self.store.get(handle, Urgency::Demand, into)) != Some(Ok(Got::Here))
                });
                match failed.map(|at| core.fetch_failed(plan, at)) {
                    None => return (plan, target.uffd.copy(address, &self.block[..index(pages)])),
                    Some(Some(shorter @ Plan::Fetch { address, pages, .. })) => {
                        return (shorter, target.uffd.copy(address, &self.block[..index(pages)]));
                    }
                    Some(_) => return (Plan::Lost { address }, target.uffd.poison(address)),
                }
            }
            Plan::Lost { address } => target.uffd.poison(address),
            Plan::NoRoom => Outcome { done: 0, stop: None },
        };
        (plan, outcome)
    }
}

fn index(pages: u64) -> usize {
    usize::try_from(pages).expect("counts within a block or batch")
}

fn to_handle(bits: HandleBits) -> Handle {
    Handle::from_bits(bits.get()).expect("the table holds only what the store gave")
}

fn to_bits(handle: Handle) -> HandleBits {
    HandleBits::new(handle.bits()).expect("handles are not zero")
}

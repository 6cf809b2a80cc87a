//! The pager's driver, rule by rule that of `crates/pager/src/driver.rs`, over the virtual kernel and store.
//!
//! The real one runs while its targets run. So this one is cut into steps between which anything may happen: one command,
//! one read, one message of what was read, or one turn of the work that is due.

use std::collections::{BTreeMap, VecDeque};

use spillway_core::page::State;
use spillway_core::pager::{Budget, Config, Outcome, Pager, Plan, Served, Stop};
use spillway_core::streams::BLOCK_PAGES_MAX;
use spillway_core::{Address, Span, TargetId};

use crate::capture::{Flight, OVERDRAFT_PAGES, Yield};
use crate::death::{Batch, Inbox};
use crate::estate::Estate;
use crate::fork::Forking;
use crate::journeys::Journeys;
use crate::kernel::Kernel;
use crate::letters::{Command, Report};
use crate::memory::{address, range, slot, span};
use crate::mutation::Mutation;
use crate::reader::{Buffered, Reader};
use crate::release::Release;
use crate::removals::Outstanding;
use crate::store::{Got, Put, Store};
use crate::target::{Target, Waiting, Young};
use crate::uffd::{Event, Message};

/// Messages read at once.
const MESSAGES: usize = 16;
/// Pages written between two looks for faults.
const WRITES_PER_TURN: u64 = 4;
/// Pages that a store which answers later is given at once, one seed or another: few, as simulated targets are small.
const WRITE_BATCHES: [u64; 4] = [1, 1, 2, 4];
/// Handles freed between two looks for faults.
const FREES_PER_TURN: usize = 256;
/// And pages of those that have ended: few, as memories here are small.
const BURIED_PER_TURN: u64 = 2;

/// See the module's documentation.
pub struct Driver {
    /// The shipped core.
    pub core: Pager,
    /// Where pages go.
    pub store: Store,
    /// By identity.
    pub targets: Vec<Option<Target>>,
    /// To be obeyed, the first first.
    pub commands: VecDeque<Command>,
    /// To be heard by the watcher.
    pub reports: VecDeque<Report>,
    /// Removals announced and not settled.
    pub outstanding: Outstanding,
    /// What is wrong with this driver.
    pub mutation: Option<Mutation>,
    /// More may be local than the budget says, until it is below once.
    pub excused: bool,
    /// Faults may go past the budget, because nothing could leave of late.
    pub overdraws: bool,
    pub(crate) buffers: Vec<Buffered>,
    pub(crate) yields: Yield,
    /// Pages that have left their targets and are not in their buffers yet.
    pub(crate) reader: Reader,
    pub(crate) release: Option<Release>,
    /// What is under way to and from a store that answers later.
    pub(crate) journeys: Journeys,
    /// A fork that was heard of, and waits for the store.
    pub(crate) forking: Option<Forking>,
    pub(crate) inbox: Inbox,
    /// The message that was applied in the last step, if it was an event.
    last: Option<(usize, Message, u64)>,
    /// Messages read so far.
    pub(crate) numbers: u64,
    /// Captures under way, for whoever takes over.
    pub(crate) batches: BTreeMap<TargetId, Batch>,
    /// Targets without an agent, for whoever takes over.
    pub(crate) young: BTreeMap<TargetId, Young>,
    /// What outlives this driver, if it may be killed.
    pub(crate) estate: Option<Estate>,
    /// It has taken over from one that was killed.
    pub(crate) succeeds: bool,
    /// It is killed at that many points from here.
    pub(crate) lives: Option<u32>,
    /// Targets that have ended, of which not all is forgotten yet.
    pub(crate) graves: Vec<TargetId>,
    /// Whose turn it is: 0 for commands, a target's place plus one, and then the work that is due.
    place: usize,
    busy: bool,
    /// What was local when the turn began.
    local_before: u64,
}

impl Driver {
    /// A driver without targets.
    pub fn new(budget: Budget, buffers: u32, store: Store, mutation: Option<Mutation>) -> Self {
        let core = Pager::new(Self::config(budget, buffers, &store));
        let mut driver = Self::with(core, store, mutation, None);
        driver.buffers = vec![Buffered::default(); usize::try_from(buffers).expect("u32 fits")];
        driver
    }

    /// The same, in memory that outlives it.
    pub fn lasting(budget: Budget, buffers: u32, store: Store, mutation: Option<Mutation>) -> Self {
        let estate = Estate::new();
        let core = Pager::lasting(Self::config(budget, buffers, &store), estate.lasting());
        let mut driver = Self::with(core, store, mutation, Some(estate));
        driver.buffers = vec![Buffered::default(); usize::try_from(buffers).expect("u32 fits")];
        driver
    }

    /// What a core is made with that has this store.
    pub(crate) fn config(budget: Budget, buffers: u32, store: &Store) -> Config {
        let write_batch = if store.answers_later() { WRITE_BATCHES[buffers as usize % 4] } else { 1 };
        Config { budget, buffers, write_batch }
    }

    /// A driver around this core and store.
    pub(crate) fn with(core: Pager, store: Store, mutation: Option<Mutation>, estate: Option<Estate>) -> Self {
        Self {
            core,
            store,
            targets: Vec::new(),
            commands: VecDeque::new(),
            reports: VecDeque::new(),
            outstanding: Outstanding::default(),
            mutation,
            excused: false,
            overdraws: false,
            buffers: Vec::new(),
            yields: Yield::default(),
            reader: Reader::default(),
            release: None,
            journeys: Journeys::default(),
            forking: None,
            inbox: VecDeque::new(),
            last: None,
            numbers: 0,
            batches: BTreeMap::new(),
            young: BTreeMap::new(),
            graves: Vec::new(),
            estate,
            succeeds: false,
            lives: None,
            place: 0,
            busy: false,
            local_before: 0,
        }
    }

    /// Whether the driver is wrong in this way.
    pub(crate) fn is(&self, mutation: Mutation) -> bool {
        self.mutation == Some(mutation)
    }

    /// Whether nothing is left to be done for anyone, other than to make room.
    pub fn is_at_rest(&self, kernel: &Kernel) -> bool {
        let idle = |target: &Target| {
            target.waiting.is_empty() && target.doubts.is_empty() && !kernel.spaces[target.space].uffd.is_readable()
        };
        self.inbox.is_empty()
            && self.forking.is_none()
            && !self.journeys.are_under_way()
            && !self.reader.is_at_work()
            && self.journeys.writes() == 0
            && self.commands.is_empty()
            && self.reports.is_empty()
            && self.release.is_none()
            && self.targets.iter().flatten().all(idle)
    }

    /// One step of the loop.
    pub fn step(&mut self, kernel: &mut Kernel) {
        if let Some(forking) = self.forking.take() {
            return self.go_on_forking(kernel, forking);
        }
        self.last = None;
        if let Some((at, message, number)) = self.inbox.pop_front() {
            if matches!(message, Message::Event(_)) {
                self.last = Some((at, message.clone(), number));
                self.core.begin_event(number);
            }
            return match message {
                Message::Fault(fault) => {
                    self.serve(kernel, at, Waiting { at: fault.at, write: fault.write, thread: fault.thread });
                    self.note_thread(at);
                }
                Message::Event(event) => self.change(kernel, at, event),
            };
        }
        if self.place == 0 {
            if let Some(command) = self.commands.pop_front() {
                return self.carry_out(kernel, command);
            }
            self.hear_store(kernel);
            self.arrive(kernel);
            return self.pass();
        }
        let at = self.place - 1;
        self.place += 1;
        if at < self.targets.len() {
            self.hear_agent(kernel, at);
            self.read_events(kernel, at);
        } else {
            self.place = 0;
            self.work(kernel);
        }
    }

    fn read_events(&mut self, kernel: &mut Kernel, at: usize) {
        let early = self.is(Mutation::ReadDuringCapture);
        let Some(target) = self.targets[at].as_mut().filter(|target| early || target.may_read()) else { return };
        target.looked = true;
        let mut messages = kernel.spaces[target.space].uffd.take(MESSAGES);
        self.busy |= !messages.is_empty();
        if !messages.is_empty() {
            kernel.trace.note(kernel.now, || format!("pager reads {messages:?} of {}", target.space));
        }
        // Changes first: whoever made them runs on since they were read, and pages may be installed again, into
        // mappings that are not those of the table before it knows.
        if !self.is(Mutation::ServeBeforeChanges) {
            messages.sort_by_key(|message| matches!(message, Message::Fault(_)));
        }
        for message in messages {
            self.numbers += 1;
            self.inbox.push_back((at, message, self.numbers));
        }
    }

    /// Serves a fault, or lets it wait.
    pub(crate) fn serve(&mut self, kernel: &mut Kernel, at: usize, fault: Waiting) {
        let Some(target) = &mut self.targets[at] else { return };
        if !target.may_serve() && self.mutation != Some(Mutation::ReadDuringCapture) {
            target.waiting.push(fault);
            return;
        }
        let (id, space) = (target.id, target.space);
        let is_agent = target.flight == Flight::Other && target.agent == Some(fault.thread);
        if is_agent && !self.is(Mutation::WaitForAgents) {
            // Nothing can be captured before the agent is done: it must not wait for room.
            self.overdraw(OVERDRAFT_PAGES);
        }
        let plan = self.core.fault(id, address(fault.at));
        let unknown =
            matches!(plan, Plan::Zero { page: Some(page), .. } if self.core.state_of(page) == State::Untouched);
        if self.store.answers_later() && matches!(plan, Plan::Fetch { .. }) {
            return self.ask_for(kernel, at, plan, fault);
        }
        while let Some(plan) = self.core.ahead() {
            let (plan, outcome) = self.perform(kernel, plan, space);
            kernel.trace.note(kernel.now, || format!("pager goes ahead in {space}: {plan:?} {outcome:?}"));
            self.point();
            self.core.installed_ahead(plan, outcome);
        }
        let (plan, outcome) = self.perform(kernel, plan, space);
        kernel.trace.note(kernel.now, || format!("pager serves {} of {space}: {plan:?} {outcome:?}", fault.at));
        self.point();
        let served = self.core.installed(plan, outcome);
        if unknown && outcome.done == 0 && outcome.stop == Some(Stop::Exists) {
            self.found_by_fault(id, fault.at);
        }
        match served {
            Served::Yes => {}
            Served::Wake => kernel.spaces[space].uffd.wake(&(fault.at..fault.at + 1)),
            Served::Later => {
                let dropped = self.is(Mutation::DropRetries) && outcome.stop == Some(Stop::Changing);
                if let (Some(target), false) = (&mut self.targets[at], dropped) {
                    target.waiting.push(fault);
                }
                return;
            }
        }
        if matches!(plan, Plan::Zero { page: None, .. }) {
            self.reports.push_back(Report::Rescan(id));
        }
    }

    /// Carries out a plan, a fetch only from a store that answers at once; returns what was carried out, and how far it got.
    pub(crate) fn perform(&mut self, kernel: &mut Kernel, plan: Plan, space: usize) -> (Plan, Outcome) {
        let now = kernel.now;
        let space = &mut kernel.spaces[space];
        let zeros = |pages| vec![0; usize::try_from(pages).expect("a block")];
        let outcome = match plan {
            Plan::Zero { address, pages, .. } => space.install(slot(address), &zeros(pages)),
            Plan::Buffer { address, buffer, .. } => space.install(slot(address), &[self.buffered_value(buffer)]),
            Plan::Fetch { address, page, pages, .. } => {
                let handles = (0..pages).map(|i| self.core.handle_of(page.plus(i)));
                let mut get = |handle| match self.store.get(handle, now) {
                    Got::Here(value) => Some(value),
                    Got::Pending | Got::Lost => None,
                };
                let mut block: Vec<_> = handles.map(|handle| handle.and_then(&mut get)).collect();
                if self.mutation == Some(Mutation::ZerosForLost) {
                    block.iter_mut().for_each(|value| *value = Some(value.unwrap_or(0)));
                }
                let failed = block.iter().position(Option::is_none);
                let block: Vec<u64> = block.into_iter().map_while(|value| value).collect();
                match failed.map(|within| self.core.fetch_failed(plan, within as u64)) {
                    None => space.install(slot(address), &block),
                    // The page that is asked for is behind the lost one.
                    Some(Some(none @ Plan::Fetch { pages: 0, .. })) => return (none, Outcome { done: 0, stop: None }),
                    Some(Some(shorter)) => return (shorter, space.install(slot(address), &block)),
                    Some(None) => return (Plan::Lost { address }, space.poison(slot(address))),
                }
            }
            Plan::Lost { address } => space.poison(slot(address)),
            Plan::Coming | Plan::NoRoom => Outcome { done: 0, stop: None },
        };
        (plan, outcome)
    }

    /// Something changed in a target's address space.
    fn change(&mut self, kernel: &mut Kernel, at: usize, event: Event) {
        let Some(target) = &mut self.targets[at] else { return };
        target.changes += u64::from(!matches!(event, Event::Remove(_)));
        let (id, index, knows_all) = (target.id, target.space, !target.forked && !target.scanned);
        let uffd = &mut kernel.spaces[index].uffd;
        match event {
            Event::Remove(_) if self.is(Mutation::IgnoreRemove) => {}
            Event::Unmap(_) if self.is(Mutation::IgnoreUnmap) => {}
            Event::Remap { .. } if self.is(Mutation::IgnoreRemap) => {}
            Event::Remove(pages) => {
                let known = self.core.removed(id, span(&pages));
                self.point();
                if known || (!knows_all && !self.is(Mutation::AnnounceKnownOnly)) {
                    self.announce(id, pages);
                }
            }
            Event::Unmap(pages) => {
                self.core.unmapped(id, span(&pages), &[]);
                self.point();
                uffd.wake(&pages);
            }
            Event::Remap { from, to } => {
                self.core.remapped(id, span(&from), address(to));
                self.point();
                uffd.wake(&from);
            }
            Event::Fork(child) => self.fork(kernel, id, child),
        }
    }

    pub(crate) fn add(&mut self, target: Target) {
        assert_eq!(target.id.0 as usize, self.targets.len(), "identities count up");
        self.targets.push(Some(target));
    }

    /// What is due besides faults, a little at a time.
    fn work(&mut self, kernel: &mut Kernel) {
        let read = self.finish_reading(kernel.now, false) || self.is(Mutation::CaptureUnread);
        self.arrive(kernel);
        self.free_released();
        // Once more: what is freed will not come.
        self.arrive(kernel);
        if self.graves.last().is_some_and(|&ended| self.core.bury(ended, BURIED_PER_TURN)) {
            self.graves.pop();
        }
        // As many pages leave the buffers as became local: the reserve stays what it is.
        let came = self.core.local_pages().saturating_sub(self.local_before).clamp(1, BLOCK_PAGES_MAX);
        let most = match (self.store.answers_later(), self.busy) {
            (true, _) if self.core.has_due_writes() || self.core.is_store_full() => BLOCK_PAGES_MAX,
            (true, _) => 0,
            (false, true) => came,
            (false, false) => WRITES_PER_TURN,
        };
        for _ in 0..most {
            if !self.write_one(kernel.now, false) {
                break;
            }
        }
        self.retry_waiting(kernel);
        if self.release.is_some() {
            self.bring_home(kernel);
        } else if read && self.core.wanted_captures() > 0 && (!self.busy || self.core.is_low()) {
            // While faults keep coming they are served from the reserve, and pages leave when it runs low.
            self.evict(kernel);
        }
    }

    fn free_released(&mut self) {
        for _ in 0..FREES_PER_TURN {
            let Some(bits) = self.core.next_released() else { break };
            self.journeys.forget(bits, &self.core, self.mutation);
            if !self.is(Mutation::KeepReleased) {
                self.store.release(bits);
            }
            self.point();
        }
    }

    pub(crate) fn write_one(&mut self, now: u64, all: bool) -> bool {
        if !self.store.accepts() {
            return false;
        }
        let Some(write) = self.core.next_write(all) else { return false };
        let Buffered { value, same_as } = self.buffers[write.buffer.0 as usize];
        let previous = write.previous.filter(|_| !self.is(Mutation::ForgetCleanCopy));
        let unchanged = previous.filter(|_| same_as == previous).map(|clean| Ok(Put::Unchanged(clean)));
        let put = unchanged.unwrap_or_else(|| self.store.put(value, previous, now));
        if let (Ok(_), Some(previous)) = (put, previous) {
            self.journeys.write_ends(previous);
        }
        self.point();
        match put {
            Ok(Put::Unchanged(handle)) => self.core.written(write, handle, true),
            Ok(Put::Stored(handle)) => self.core.written(write, handle, false),
            Ok(Put::Pending(handle)) => {
                self.journeys.write_begins(write.page, handle);
                self.core.handed(write, handle);
            }
            Err(_) => {
                self.core.write_declined(write);
                self.excused = true;
                return false;
            }
        }
        true
    }

    fn retry_waiting(&mut self, kernel: &mut Kernel) {
        for at in 0..self.targets.len() {
            self.settle_doubts(kernel, at);
            if let Some(target) = self.targets[at].as_mut().filter(|target| target.may_serve()) {
                for fault in std::mem::take(&mut target.waiting) {
                    self.serve(kernel, at, fault);
                }
            }
        }
    }

    /// Whether a command must wait for a lock that some thread holds.
    pub(crate) fn is_locked(&self, kernel: &Kernel, target: TargetId) -> bool {
        self.targets[target.0 as usize].as_ref().is_some_and(|target| !kernel.spaces[target.space].may_change())
    }

    pub(crate) fn register(&mut self, kernel: &mut Kernel, id: TargetId, spans: &[Span]) -> Vec<Span> {
        let mut new = Vec::new();
        if let Some(target) = self.targets[id.0 as usize].as_mut() {
            if !target.inherits {
                // What it has mapped since would be taken for what it has inherited.
                return new;
            }
            target.scanned = true;
        }
        for &seen in spans {
            let Some(space) = self.targets[id.0 as usize].as_ref().map(|target| target.space) else { break };
            if kernel.spaces[space].register(&range(seen)) {
                kernel.trace.note(kernel.now, || format!("pager registers {:?} of {space}", range(seen)));
                self.point();
                // As `PROCMAP_QUERY` tells: what went away since it was seen is no region.
                for there in kernel.spaces[space].mapped(&range(seen)) {
                    new.extend(self.core.add_region(id, span(&there)));
                }
            }
        }
        new
    }

    /// What is left of it when it is killed.
    pub(crate) fn into_parts(self) -> Parts {
        let Self { store, estate, buffers, batches, young, inbox, last, numbers, targets, .. } = self;
        let equipped = |target: Target| Some((target.id, target.space, target.agent?));
        let targets = targets.into_iter().flatten().filter_map(equipped).collect();
        Parts { store, estate, buffers, batches, young, inbox, last, numbers, targets }
    }

    /// Goes on with the loop although a command waits.
    pub(crate) fn pass(&mut self) {
        (self.place, self.busy, self.local_before) = (1, false, self.core.local_pages());
    }

    pub(crate) fn target_at(&self, id: TargetId) -> Option<&Target> {
        self.targets.get(id.0 as usize)?.as_ref()
    }

    /// The page of the table at a slot, if any.
    pub fn page_at(&self, id: TargetId, at: usize) -> Option<spillway_core::PageIndex> {
        let address: Address = address(at);
        self.core.regions().at(id, address).map(|region| region.page_at(address))
    }
}

/// What is left of a driver that was killed.
pub(crate) struct Parts {
    pub(crate) store: Store,
    pub(crate) estate: Option<Estate>,
    pub(crate) buffers: Vec<Buffered>,
    pub(crate) batches: BTreeMap<TargetId, Batch>,
    pub(crate) inbox: Inbox,
    pub(crate) last: Option<(usize, Message, u64)>,
    pub(crate) numbers: u64,
    pub(crate) young: BTreeMap<TargetId, Young>,
    /// Those with an agent, and which.
    pub(crate) targets: Vec<(TargetId, usize, usize)>,
}

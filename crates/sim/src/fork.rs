//! What the driver does about a fork.

use spillway_core::mappings::BufferCopy;
use spillway_core::page::{HandleBits, State};
use spillway_core::pager::Plan;
use spillway_core::{Address, Span, TargetId};

use crate::driver::Driver;
use crate::kernel::Kernel;
use crate::letters::Report;
use crate::memory::{range, slot, span};
use crate::mutation::Mutation;
use crate::target::{Target, Young};
use crate::uffd::{Event, Message};

/// How long a fork may wait for the store where there are too few buffers for copies, and where there are enough, in steps of
/// anyone.
const WRITE_ALL: u64 = 600;
const COPY_AFTER: u64 = 100;

/// A fork that was heard of.
#[derive(Clone, Copy, Debug)]
pub struct Forking {
    pub(crate) parent: TargetId,
    pub(crate) child: usize,
    pub(crate) begun: u64,
}

impl Driver {
    /// Whether the next step is, or may be, that of a fork.
    pub(crate) fn is_forking(&self) -> bool {
        let is_fork = |message: &Message| matches!(message, Message::Event(Event::Fork(_)));
        self.forking.is_some() || self.inbox.front().is_some_and(|(_, message, _)| is_fork(message))
    }

    /// `parent` forked into the address space `child`.
    pub(crate) fn fork(&mut self, kernel: &mut Kernel, parent: TargetId, child: usize) {
        self.excused = true;
        if !self.is(Mutation::ForkUnread) {
            self.finish_reading(kernel.now, true);
        }
        self.go_on_forking(kernel, Forking { parent, child, begun: kernel.now });
    }

    /// Writes what is in buffers, and waits a while for a store that answers later, longer where there are too few buffers: the
    /// child needs a copy of each page in one; those that the store takes need none. Whoever forked goes on meanwhile. What
    /// arrives must not be installed before the child has its own reference: it would have the page no more than the
    /// kernel gave it, which was not there.
    pub(crate) fn go_on_forking(&mut self, kernel: &mut Kernel, forking: Forking) {
        let waited = kernel.now - forking.begun;
        let late = waited >= WRITE_ALL;
        if !self.is(Mutation::ForkWithoutBuffers) {
            self.hear_store(kernel);
            while self.write_one(kernel.now, true) {}
            if self.is(Mutation::InstallDuringFork) {
                self.arrive(kernel);
            }
            let busy = self.core.buffered_pages() > 0 && !self.store.accepts();
            let enough = late || waited >= COPY_AFTER && self.core.copies_fit();
            if (busy || self.journeys.writes() > 0) && !enough {
                self.journeys.travels.waits += 1;
                self.forking = Some(forking);
                return;
            }
        }
        self.end_fork(kernel, forking, late);
    }

    pub(crate) fn end_fork(&mut self, kernel: &mut Kernel, Forking { parent, child, .. }: Forking, late: bool) {
        self.excused = true;
        let buffered = self.buffered(parent);
        let event = self.core.last_event();
        self.young
            .insert(self.core.next_target(), Young { space: child, parent: Some(parent), event, inherits: false });
        self.point();
        let (store, buffers, mutation) = (&mut self.store, &mut self.buffers, self.mutation);
        let share = |bits: HandleBits| if mutation == Some(Mutation::ShareNothing) { bits } else { store.share(bits) };
        let copy = |BufferCopy { from, to }| {
            if mutation != Some(Mutation::CopyNothing) {
                buffers[to.0 as usize] = buffers[from.0 as usize];
            }
        };
        let id = self.core.forked(parent, share, copy);
        self.point();
        for (at, value) in buffered {
            let lost = self.page_at(id, at).is_some_and(|page| self.core.state_of(page) == State::Lost);
            // The core has no place for them while the store declines, or takes too long: the child loses them, loudly.
            if lost && (self.store.full || late) {
                kernel.lost.insert(value);
            }
        }
        kernel.trace.note(kernel.now, || format!("pager: {parent:?} forked {id:?} as {child}"));
        let inherits = self.is(Mutation::IgnoreForkMarks);
        self.add(Target {
            parent: Some(parent),
            is_known: false,
            forked: true,
            inherits,
            ..Target::new(id, child, None)
        });
        self.reports.push_back(Report::Forked(id, child));
    }

    /// A fault is the first that is heard of who a forked child is.
    pub(crate) fn note_thread(&mut self, at: usize) {
        let Some(target) = self.targets[at].as_mut().filter(|target| !target.is_known) else { return };
        target.is_known = true;
        self.reports.push_back(Report::Thread(target.id, target.changes));
    }

    /// What a forked child has of its parent's mappings was seen in its own: zeros in `wiped`, and nothing but `has`. That is
    /// asked again if they have changed since it was asked, or change now: a mapping that has moved in the kernel and not
    /// in the table would be forgotten.
    pub(crate) fn inherit(&mut self, kernel: &Kernel, id: TargetId, (wiped, has): (&[Span], &[Span]), changes: u64) {
        let blindly = self.is(Mutation::InheritBlindly);
        let Some(target) = &mut self.targets[id.0 as usize] else { return };
        if target.inherits {
            return;
        }
        // Any installation would tell, such as one of zeros where nothing is registered.
        if (kernel.spaces[target.space].uffd.changing > 0 || target.changes != changes) && !blindly {
            self.reports.push_back(Report::Thread(id, target.changes));
            return;
        }
        target.inherits = true;
        let regions: Vec<Span> = self.core.regions().of(id).map(|region| region.span).collect();
        for region in regions {
            for gap in region.without(has.iter().copied()) {
                self.core.unmapped(id, gap, &[]);
            }
        }
        for at in wiped.iter().flat_map(|&span| range(span)) {
            // What is mapped already is its own.
            if self.page_at(id, at).is_some_and(|page| self.core.state_of(page) != State::Mapped) {
                self.core.removed(id, span(&(at..at + 1)));
            }
        }
        self.young.entry(id).and_modify(|young| young.inherits = true);
        if self.targets[id.0 as usize].as_ref().is_some_and(|target| target.agent.is_some()) {
            self.young.remove(&id);
        }
        self.reports.push_back(Report::Rescan(id));
    }

    /// The slots of `target` whose pages are in buffers, and what they hold.
    fn buffered(&mut self, target: TargetId) -> Vec<(usize, u64)> {
        let mut inactive: Vec<Address> = Vec::new();
        for region in self.core.regions().of(target) {
            let there = |i: &u64| matches!(self.core.state_of(region.first.plus(*i)), State::Inactive | State::Writing);
            inactive.extend((0..region.span.pages()).filter(there).map(|i| region.span.start.plus_pages(i)));
        }
        let value = |address| match self.core.fault(target, address) {
            Plan::Buffer { buffer, .. } => Some((slot(address), self.buffered_value(buffer))),
            _ => None,
        };
        inactive.into_iter().filter_map(value).collect()
    }
}

//! What the driver does about a fork.

use spillway_core::mappings::BufferCopy;
use spillway_core::page::{HandleBits, State};
use spillway_core::pager::Plan;
use spillway_core::{Address, TargetId};

use crate::driver::Driver;
use crate::kernel::Kernel;
use crate::letters::Report;
use crate::memory::slot;
use crate::mutation::Mutation;
use crate::target::Target;

impl Driver {
    /// `parent` forked into the address space `child`.
    pub(crate) fn fork(&mut self, kernel: &mut Kernel, parent: TargetId, child: usize) {
        self.excused = true;
        if !self.is(Mutation::ForkWithoutBuffers) {
            // The child needs a copy of each page in a buffer; those that the store takes need none.
            while self.used_buffers() > self.free_buffers() && self.write_one(true) {}
        }
        let buffered = self.buffered(parent);
        let mut copies: Vec<BufferCopy> = Vec::new();
        let (store, mutation) = (&mut self.store, self.mutation);
        let share = |bits: HandleBits| if mutation == Some(Mutation::ShareNothing) { bits } else { store.share(bits) };
        let id = self.core.forked(parent, share, &mut copies);
        for BufferCopy { from, to } in copies {
            if !self.is(Mutation::CopyNothing) {
                self.buffers[to.0 as usize] = self.buffers[from.0 as usize];
            }
        }
        for (at, value) in buffered {
            let lost = self.page_at(id, at).is_some_and(|page| self.core.state_of(page) == State::Lost);
            // The core has no place for them while the store declines: the child loses them, loudly.
            if lost && self.store.full {
                kernel.lost.insert(value);
            }
        }
        kernel.trace.note(kernel.now, || format!("pager: {parent:?} forked {id:?} as {child}"));
        self.add(Target { parent: Some(parent), ..Target::new(id, child, None) });
        self.reports.push_back(Report::Forked(id, child));
    }

    fn used_buffers(&self) -> u64 {
        self.core.local_pages() - self.core.mapped_pages()
    }

    fn free_buffers(&self) -> u64 {
        let set_aside: usize = self.targets.iter().flatten().map(|target| target.buffers.len()).sum();
        (self.buffers.len() - set_aside) as u64 - self.used_buffers()
    }

    /// The slots of `target` whose pages are in buffers, and what they hold.
    fn buffered(&mut self, target: TargetId) -> Vec<(usize, u64)> {
        let mut inactive: Vec<Address> = Vec::new();
        for region in self.core.regions().of(target) {
            let there = |i: &u64| self.core.state_of(region.first.plus(*i)) == State::Inactive;
            inactive.extend((0..region.span.pages()).filter(there).map(|i| region.span.start.plus_pages(i)));
        }
        let value = |address| match self.core.0.fault(target, address) {
            Plan::Buffer { buffer, .. } => Some((slot(address), self.buffers[buffer.0 as usize])),
            _ => None,
        };
        inactive.into_iter().filter_map(value).collect()
    }
}

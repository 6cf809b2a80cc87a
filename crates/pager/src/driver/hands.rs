//! What performs plans: the store and the pager's page memory.

use std::sync::Arc;

use spillway_core::evict::Bytes;
use spillway_core::page::{BufferIndex, HandleBits};
use spillway_core::pager::{Outcome, Pager, Plan};
use spillway_core::streams::BLOCK_PAGES_MAX;
use spillway_core::{Address, PAGE_BYTES, Page, TargetId};
use spillway_store::{Got, Handle, Preparer, Store, Urgency};

use super::buffers::Buffers;
use super::reader::Reader;
use super::stopwatch::{Kind, Stopwatch};
use crate::adopt::Agent;
use crate::estate::{Estate, Stage};
use crate::sys::clock::now_ns;
use crate::sys::fd::Bell;
use crate::target::Target;

/// See the module's documentation.
pub(super) struct Hands {
    pub(super) store: Box<dyn Store>,
    pub(super) buffers: Buffers,
    pub(super) reader: Reader,
    /// Where it is written down what another pager must know, and whose pages are being read.
    pub(super) estate: Option<Estate>,
    reading: Option<TargetId>,
    /// When faults began to wait, and when they were served.
    pub(super) watch: Stopwatch,
    block: Box<[Page]>,
    zeros: Box<[Page]>,
}

impl Hands {
    /// Hands with so many buffers; `bell` rings when pages have been read.
    pub(super) fn new(store: Box<dyn Store>, buffers: u32, estate: Option<Estate>, bell: Arc<Bell>) -> Self {
        let block = index(BLOCK_PAGES_MAX);
        let reader = Reader::new(store.preparer(), bell);
        let buffers = match &estate {
            Some(estate) => Buffers::lasting(estate.vault().buffers()),
            None => Buffers::new(buffers),
        };
        Self {
            store,
            buffers,
            reader,
            estate,
            reading: None,
            watch: Stopwatch::new(),
            block: pages(block),
            zeros: pages(block),
        }
    }

    /// Begins to read captured pages.
    pub(super) fn begin_reading(&mut self, of: TargetId, agent: &Agent, elsewhere: bool, core: &Pager) {
        if let Some(estate) = &self.estate {
            estate.set_batch(of, Some(Stage::Collected));
        }
        self.reading = Some(of);
        let store = self.store.as_mut();
        let clean = |page, to: &mut Preparer| store.lend(to_handle(core.handle_of(page)?), to);
        self.reader.begin([agent.pid, agent.thread], agent.layout.staging, elsewhere, &mut self.buffers, clean);
    }

    /// Takes over what was read of captured pages; waits for it if told to. True when nothing is being read any more.
    pub(super) fn finish_reading(&mut self, wait: bool, core: &mut Pager) -> bool {
        let done = self.reader.finish(wait, &mut self.buffers, core);
        if done && let (Some(of), Some(estate)) = (self.reading.take(), &self.estate) {
            estate.set_batch(of, None);
        }
        done
    }

    /// Carries out a plan, a fetch only from a store that answers at once; returns what was carried out, which is less where the
    /// store failed, and how far it got.
    pub(super) fn perform(&mut self, plan: Plan, write: bool, target: &Target, core: &mut Pager) -> (Plan, Outcome) {
        let (plan, ready) = self.prepare(plan, write, target, core);
        let Some((address, what)) = ready else { return (plan, Outcome { done: 0, stop: None }) };
        let (kind, pages) = match what {
            What::Zeros(pages) | What::Block(pages) => (Kind::Copies, index(pages)),
            What::ZeroPages(pages) => (Kind::Marks, index(pages)),
            What::Buffer(_) => (Kind::Copies, 1),
            What::Poison => (Kind::Marks, 1),
        };
        self.watch.installs(now_ns(), kind);
        let outcome = match what {
            What::Zeros(_) => target.copy(address, &self.zeros[..pages]),
            What::ZeroPages(pages) => target.zero(address, pages),
            What::Block(_) => target.copy(address, &self.block[..pages]),
            What::Buffer(buffer) => {
                let page = self.buffers.page(buffer).map_or(&self.block[0], |(page, _)| page);
                target.copy(address, std::slice::from_ref(page))
            }
            What::Poison => target.poison(address),
        };
        self.watch.did(outcome.done, pages);
        (plan, outcome)
    }

    /// The plan, less what cannot be had, and what is to be installed where, made ready.
    fn prepare(
        &mut self,
        plan: Plan,
        write: bool,
        target: &Target,
        core: &mut Pager,
    ) -> (Plan, Option<(Address, What)>) {
        match plan {
            // The kernel's zero page costs no memory; but the first write to it costs a second fault.
            Plan::Zero { address, pages, .. } if write => {
                (plan, Some((address, What::Zeros(target.clear_pages(address, pages)))))
            }
            Plan::Zero { address, pages, .. } => (plan, Some((address, What::ZeroPages(pages)))),
            Plan::Buffer { address, page, buffer } => {
                let is_read = self.buffers.page(buffer).is_some();
                if is_read || self.reader.copy(buffer, &mut self.block[0]).is_ok() {
                    return (plan, Some((address, What::Buffer(buffer))));
                }
                core.read(page, buffer, Bytes::Lost);
                (Plan::Lost { address }, Some((address, What::Poison)))
            }
            Plan::Fetch { address, page, pages, .. } => {
                let pages = target.clear_pages(address, pages);
                let plan = core.shorten(plan, pages);
                let failed = (0..pages).find(|&i| {
                    let handle = core.handle_of(page.plus(i)).map(to_handle);
                    let into = &mut self.block[index(i)];
                    handle.map(|handle| self.store.get(handle, Urgency::Demand, into)) != Some(Ok(Got::Here))
                });
                match failed.map(|at| core.fetch_failed(plan, at)) {
                    None => (plan, Some((address, What::Block(pages)))),
                    // The page that is asked for is behind one that is lost.
                    Some(Some(none @ Plan::Fetch { pages: 0, .. })) => (none, None),
                    Some(Some(shorter @ Plan::Fetch { address, pages, .. })) => {
                        (shorter, Some((address, What::Block(pages))))
                    }
                    Some(_) => (Plan::Lost { address }, Some((address, What::Poison))),
                }
            }
            Plan::Lost { address } => (plan, Some((address, What::Poison))),
            Plan::Coming | Plan::NoRoom => (plan, None),
        }
    }
}

/// What is installed.
enum What {
    /// So many pages of zeros of the target's own.
    Zeros(u64),
    /// The kernel's page of zeros, so many times.
    ZeroPages(u64),
    /// The first so many of the block.
    Block(u64),
    /// What is in this buffer; if that is being read still, the block's first page.
    Buffer(BufferIndex),
    /// What raises SIGBUS.
    Poison,
}

pub(super) fn pages(count: usize) -> Box<[Page]> {
    vec![[0; PAGE_BYTES]; count].into_boxed_slice()
}

pub(super) fn index(pages: u64) -> usize {
    usize::try_from(pages).expect("counts within a block or batch")
}

pub(super) fn to_handle(bits: HandleBits) -> Handle {
    Handle::from_bits(bits.get()).expect("the table holds only what the store gave")
}

pub(super) fn to_bits(handle: Handle) -> HandleBits {
    HandleBits::new(handle.bits()).expect("handles are not zero")
}

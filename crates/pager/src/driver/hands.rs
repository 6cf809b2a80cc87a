//! What performs plans: the store and the pager's page memory.

use std::sync::Arc;

use spillway_core::evict::Bytes;
use spillway_core::page::HandleBits;
use spillway_core::pager::{Outcome, Pager, Plan};
use spillway_core::streams::BLOCK_PAGES_MAX;
use spillway_core::{PAGE_BYTES, Page, TargetId};
use spillway_store::{Got, Handle, Preparer, Store, Urgency};

use super::buffers::Buffers;
use super::reader::Reader;
use crate::adopt::Agent;
use crate::estate::{Estate, Stage};
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
        Self { store, buffers, reader, estate, reading: None, block: pages(block), zeros: pages(block) }
    }

    /// Begins to read captured pages.
    pub(super) fn begin_reading(&mut self, of: TargetId, agent: &Agent, elsewhere: bool, core: &Pager) {
        if let Some(estate) = &self.estate {
            estate.set_batch(of, Some(Stage::Collected));
        }
        self.reading = Some(of);
        let store = self.store.as_mut();
        let clean = |page, to: &mut Preparer| store.lend(to_handle(core.handle_of(page)?), to);
        self.reader.begin(agent, elsewhere, &mut self.buffers, clean);
    }

    /// Takes over what was read of captured pages; waits for it if told to. True when nothing is being read any more.
    pub(super) fn finish_reading(&mut self, wait: bool, core: &mut Pager) -> bool {
        let done = self.reader.finish(wait, &mut self.buffers, core);
        if done && let (Some(of), Some(estate)) = (self.reading.take(), &self.estate) {
            estate.set_batch(of, None);
        }
        done
    }

    /// Carries out a plan, a fetch only from a store that answers at once; returns what was carried out, which is less where the store failed, and how far it got.
    pub(super) fn perform(&mut self, plan: Plan, write: bool, target: &Target, core: &mut Pager) -> (Plan, Outcome) {
        let outcome = match plan {
            // The kernel's zero page costs no memory; but the first write to it costs a second fault.
            Plan::Zero { address, pages, .. } if write => {
                let pages = target.clear_pages(address, pages);
                target.uffd.copy(address, &self.zeros[..index(pages)])
            }
            Plan::Zero { address, pages, .. } => target.uffd.zero(address, pages),
            Plan::Buffer { address, page, buffer } => {
                let page_of_buffer = match self.buffers.page(buffer) {
                    Some((page, _)) => page,
                    None if self.reader.copy(buffer, &mut self.block[0]).is_ok() => &self.block[0],
                    None => {
                        core.read(page, buffer, Bytes::Lost);
                        return (Plan::Lost { address }, target.uffd.poison(address));
                    }
                };
                target.uffd.copy(address, std::slice::from_ref(page_of_buffer))
            }
            Plan::Fetch { address, page, pages, .. } => {
                let clear = target.clear_pages(address, pages);
                let (plan, pages) = (core.shorten(plan, clear), clear);
                let failed = (0..pages).find(|&i| {
                    let handle = core.handle_of(page.plus(i)).map(to_handle);
                    let into = &mut self.block[index(i)];
                    handle.map(|handle| self.store.get(handle, Urgency::Demand, into)) != Some(Ok(Got::Here))
                });
                match failed.map(|at| core.fetch_failed(plan, at)) {
                    None => return (plan, target.uffd.copy(address, &self.block[..index(pages)])),
                    // The page that is asked for is behind the lost one.
                    Some(Some(none @ Plan::Fetch { pages: 0, .. })) => return (none, Outcome { done: 0, stop: None }),
                    Some(Some(shorter @ Plan::Fetch { address, pages, .. })) => {
                        return (shorter, target.uffd.copy(address, &self.block[..index(pages)]));
                    }
                    Some(_) => return (Plan::Lost { address }, target.uffd.poison(address)),
                }
            }
            Plan::Lost { address } => target.uffd.poison(address),
            Plan::Coming | Plan::NoRoom => Outcome { done: 0, stop: None },
        };
        (plan, outcome)
    }
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

//! A get that waits for pages of the spill file.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use spillway_core::{PAGE_BYTES, Page};
use spillway_wire::answer::{Got, GotHead, PageStatus};

use crate::pool::Pool;
use crate::sys::pages::{Held, Pin};
use crate::tenants::Claim;
use crate::worker::Inbox;

/// All that its answer needs. It travels to the keeper's thread and back.
pub(crate) struct Parked {
    pub(crate) id: u32,
    pub(crate) heads: Vec<GotHead>,
    /// Those that are in the arena, in order.
    pub(crate) pins: Vec<Pin>,
    /// Those that are not: where in `heads`, and the reference that keeps them.
    pub(crate) away: Vec<(usize, Held)>,
    /// Those of them that were read, in order.
    pub(crate) read: Vec<Box<Page>>,
    /// Where it goes when it is done.
    pub(crate) back: Option<(Arc<Inbox>, u64)>,
    /// The bytes that its answer will have, about.
    pub(crate) claim: Claim,
    /// Set when its connection has ended.
    pub(crate) gone: Arc<AtomicBool>,
}

impl Parked {
    /// Bytes that an answer with these pages will have, about.
    pub(crate) fn bytes_of(pins: &[Pin], away: &[(usize, Held)]) -> usize {
        (pins.len() + away.len()) * PAGE_BYTES
    }

    /// Whether anyone waits for it.
    pub(crate) fn is_wanted(&self) -> bool {
        !self.gone.load(Relaxed)
    }

    /// Reads what is away. A page that cannot be read is lost, and the head says so.
    pub(crate) fn read(&mut self, pool: &Pool) {
        for (at, held) in &self.away {
            let mut page = Box::new([0; PAGE_BYTES]);
            if read(pool, held, &mut page).is_some() {
                self.read.push(page);
            } else {
                self.heads[*at].what = Got::Not(PageStatus::Corrupt);
            }
        }
    }

    /// Lets all pages go.
    pub(crate) fn discard(self, pool: &Pool) {
        self.pins.into_iter().for_each(|pin| pool.unpin(pin));
        self.away.into_iter().for_each(|(_, held)| pool.let_go(held));
    }
}

/// Reads a page that is away; `None` when it cannot be had intact.
fn read(pool: &Pool, held: &Held, into: &mut Page) -> Option<()> {
    let (spill, place) = (pool.spill.as_ref()?, pool.pages.elsewhere(held)?);
    let mut stored = [0; PAGE_BYTES];
    let stored = stored.get_mut(..pool.pages.stored_bytes(held))?;
    spill.read(place, stored).ok()?;
    spillway_codec::unpack(stored, into).ok()
}

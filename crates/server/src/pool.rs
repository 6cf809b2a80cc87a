//! Every tenant's pages in one arena: kept once where they are identical, refused when there is no room.
//!
//! Invariants: a key's entry owns a reference to its page, or says that it is zeros. A page is shared only after all of
//! its bytes, its checksum and its scope were compared. What a tenant stored is wiped before its place goes to another.
//! With a table's shard locked, one of the twins' or the free list may be; no other two locks are held at a time, and none
//! during input or output.

mod free;

use std::io;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use spillway_codec::{Codec, Compression, is_zero, same, unpack};
use spillway_core::{PAGE_BYTES, Page};
use spillway_wire::answer::{Got, GotHead, PageStatus};
use spillway_wire::request::{PutPage, Puts, Range};
use spillway_wire::{Content, Key, checksum};

use crate::budget::{Budget, KEY_COST_BYTES};
use crate::spill::Spill;
use crate::sys::grains::{GRAIN_BYTES, WHOLE, grains_of};
use crate::sys::pages::{Blank, Dead, Held, Identity, Pages, Pin};
use crate::table::{Stored, Table, Taken};
use crate::twins::Twins;
use free::FreeList;

/// Which pages may be shared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Dedupe {
    /// None.
    Off,
    /// Those of one tenant.
    #[default]
    Tenant,
    /// Those of all tenants. A tenant can then find out, by the time that a put takes, whether another has a page.
    Everyone,
}

/// Dead pages that a thread keeps for the next puts of the same tenant, unwiped: a few batches.
const STASH_MAX: usize = 256;

/// What a thread needs to put and get; reused, so that nothing is allocated for a batch.
#[derive(Default)]
pub(crate) struct Work {
    /// What became of the pages of the last put.
    pub(crate) statuses: Vec<PageStatus>,
    /// The heads of the pages of the last get.
    pub(crate) heads: Vec<GotHead>,
    /// The pages behind those heads that have bytes, in order.
    pub(crate) pins: Vec<Pin>,
    /// References to the pages of the last get that are away, and where in `heads` they are.
    pub(crate) away: Vec<(usize, Held)>,
    /// What compresses, once a page had to be.
    codec: Option<Codec>,
    /// Blank pages of all grains that a page may have, with what the tenant of this scope had in them.
    stash: Vec<Blank>,
    stash_scope: u32,
}

/// Counters for the status; they guard nothing.
#[derive(Default)]
struct Counts {
    keys: AtomicU64,
    zeros: AtomicU64,
    distinct: AtomicU64,
    grains: AtomicU64,
    served: AtomicU64,
}

/// What the pool holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Holdings {
    pub(crate) keys: u64,
    pub(crate) zeros: u64,
    pub(crate) distinct: u64,
    /// Bytes of DRAM that the distinct pages take.
    pub(crate) stored_bytes: u64,
    pub(crate) served: u64,
}

/// All pages of all tenants.
pub(crate) struct Pool {
    pub(crate) pages: Pages,
    pub(crate) free: FreeList,
    pub(crate) budget: Budget,
    pub(crate) spill: Option<Spill>,
    twins: Option<Twins>,
    shared_scope: bool,
    compress: bool,
    zero_checksum: u64,
    counts: Counts,
}

impl Pool {
    /// Keeps pages as they are, or compressed where that saves grains.
    pub(crate) fn new(memory_bytes: u64, dedupe: Dedupe, compress: bool, spill: Option<Spill>) -> io::Result<Self> {
        // As many as there could be if each page took one grain; what of it is never used costs nothing.
        let numbers = memory_bytes / if compress { GRAIN_BYTES.into() } else { spillway_core::PAGE_BYTES_U64 };
        let away = spill.as_ref().map_or(0, Spill::capacity_pages);
        let (pages, grains) = Pages::new(memory_bytes, numbers, away)?;
        Ok(Self {
            pages,
            free: FreeList::new(grains),
            budget: Budget::new(memory_bytes),
            spill,
            twins: (dedupe != Dedupe::Off).then(Twins::new),
            shared_scope: dedupe == Dedupe::Everyone,
            compress,
            zero_checksum: checksum(&[0; spillway_core::PAGE_BYTES]),
            counts: Counts::default(),
        })
    }

    /// Pages that would be taken now.
    pub(crate) fn free_pages(&self) -> u64 {
        let spill = self.spill.as_ref().map_or(0, Spill::free_pages);
        self.free.len() + self.budget.free_pages() + spill
    }

    /// Pages that may be kept at all.
    pub(crate) fn capacity_pages(&self) -> u64 {
        let spill = self.spill.as_ref().map_or(0, |spill| u64::from(spill.capacity_pages()));
        Budget::new(self.budget.capacity()).free_pages() + spill
    }

    pub(crate) fn holdings(&self) -> Holdings {
        let Counts { keys, zeros, distinct, grains, served } = &self.counts;
        Holdings {
            keys: keys.load(Relaxed),
            zeros: zeros.load(Relaxed),
            distinct: distinct.load(Relaxed),
            stored_bytes: grains.load(Relaxed) * u64::from(GRAIN_BYTES),
            served: served.load(Relaxed),
        }
    }

    /// Keeps pages; `work.statuses` says which.
    pub(crate) fn put(&self, table: &Table, scope: u32, puts: Puts<'_>, work: &mut Work) {
        self.begin(scope, work);
        work.statuses.clear();
        let fresh = puts.len() as u64;
        for put in puts {
            let status = self.put_one(table, scope, &put, work);
            work.statuses.push(status);
        }
        self.counts.served.fetch_add(fresh, Relaxed);
    }

    fn put_one(&self, table: &Table, scope: u32, put: &PutPage<'_>, work: &mut Work) -> PageStatus {
        let stored = match put.content {
            Content::Zero => Some(Stored::Zero),
            // Only with the checksum of zeros: any other tells the client that these are not the bytes it sent.
            Content::Bytes(page) if put.checksum == self.zero_checksum && is_zero(page) => Some(Stored::Zero),
            Content::Bytes(page) => self.keep(self.identity(put.checksum, scope, page), page, work).map(Stored::Page),
        };
        let Some(stored) = stored else { return self.overwrite(table, scope, put, work) };
        let is_zeros = stored == Stored::Zero;
        let room = || self.free.take_bytes(&self.pages, &self.budget, KEY_COST_BYTES);
        match table.insert(put.key, stored, room) {
            Ok(before) => {
                if before.is_none() {
                    self.counts.keys.fetch_add(1, Relaxed);
                }
                if is_zeros {
                    self.counts.zeros.fetch_add(1, Relaxed);
                }
                self.drop_stored(before, work);
                PageStatus::Ok
            }
            Err(refused) => {
                if let Stored::Page(held) = refused {
                    self.release(held, work);
                }
                PageStatus::Full
            }
        }
    }

    /// A reference to a page of these bytes: an identical one's, or a new one's. `None` when there is no room.
    fn keep(&self, identity: Identity, page: &Page, work: &mut Work) -> Option<Held> {
        if let Some(twins) = &self.twins
            && let Some(number) = twins.find(&identity)
            && let Some(twin) = self.pages.try_hold(number)
        {
            if self.is_same(&twin, &identity, page) {
                return Some(twin);
            }
            self.release(twin, work);
        }
        let Work { codec, stash, .. } = work;
        let bytes = self.pack(page, codec);
        let grains = grains_of(bytes.len());
        let stashed = if grains == WHOLE { stash.pop() } else { None };
        let mut blank = match stashed {
            Some(blank) => blank,
            None => self.free.take(&self.pages, &self.budget, grains)?,
        };
        self.pages.fill(&mut blank, bytes);
        Some(self.publish(blank, identity))
    }

    /// What is stored for a page. Twins were looked for before: they are told by the page itself, so it does not matter
    /// whether compression gives the same bytes each time, and a page that is there already is not compressed.
    fn pack<'a>(&self, page: &'a Page, codec: &'a mut Option<Codec>) -> &'a [u8] {
        if !self.compress {
            return page;
        }
        let packed = codec.get_or_insert_with(|| Codec::new(Compression::Lz4)).pack(page);
        if grains_of(packed.len()) < WHOLE { packed } else { page }
    }

    /// The page behind a pin whose bytes are compressed; `Err` where they lie there as they are. Bytes that do not
    /// decode any more are sent as far as they do: the client finds that they do not have the page's checksum.
    pub(crate) fn unpacked(&self, pin: Pin) -> Result<Box<Page>, Pin> {
        if self.pages.bytes(&pin).len() == PAGE_BYTES {
            return Err(pin);
        }
        let mut page = Box::new([0; PAGE_BYTES]);
        let _ = unpack(self.pages.bytes(&pin), &mut page);
        self.unpin(pin);
        Ok(page)
    }

    fn identity(&self, checksum: u64, scope: u32, page: &Page) -> Identity {
        let hash = self.twins.as_ref().filter(|_| self.shared_scope).map_or(0, |twins| twins.hash_of(page));
        Identity { hash, checksum, scope: if self.shared_scope { 0 } else { scope } }
    }

    fn publish(&self, blank: Blank, identity: Identity) -> Held {
        let held = self.pages.publish(blank, identity);
        if let Some(twins) = &self.twins {
            twins.insert(&identity, held.number());
        }
        self.counts.distinct.fetch_add(1, Relaxed);
        self.counts.grains.fetch_add(self.pages.grains(held.number()).into(), Relaxed);
        held
    }

    /// Whether these are the same bytes for those who may know. Pages that are away are not: nobody waits for a disk to
    /// find out.
    fn is_same(&self, twin: &Held, identity: &Identity, page: &Page) -> bool {
        if self.pages.identity(twin.number()) != *identity {
            return false;
        }
        let Some(pin) = self.pages.pin(twin) else { return false };
        let same = same(self.pages.bytes(&pin), page);
        let dead = self.pages.unpin(pin);
        debug_assert!(dead.is_none(), "the reference outlives the pin");
        same
    }

    /// With no room left, puts new bytes where the old ones are, if they fit and nobody else needs those.
    fn overwrite(&self, table: &Table, scope: u32, put: &PutPage<'_>, work: &mut Work) -> PageStatus {
        let Content::Bytes(page) = put.content else { return PageStatus::Full };
        let identity = self.identity(put.checksum, scope, page);
        let bytes = self.pack(page, &mut work.codec);
        let grains = grains_of(bytes.len());
        table.with(put.key, |stored| {
            let Some(Stored::Page(held)) = stored else { return PageStatus::Full };
            if self.pages.grains(held.number()) < grains {
                return PageStatus::Full;
            }
            let Some(mut blank) = self.pages.try_own(held) else { return PageStatus::Full };
            self.forget(held.number(), true);
            if let Some(mut rest) = self.pages.cut(&mut blank, grains) {
                self.pages.wipe_place(&mut rest);
                self.free.give_back_place(rest);
            }
            self.pages.fill(&mut blank, bytes);
            *held = self.publish(blank, identity);
            PageStatus::Ok
        })
    }

    /// Takes a page that died out of the books.
    fn forget_dead(&self, dead: &Dead) {
        self.forget(dead.number(), matches!(dead, Dead::Here(_)));
    }

    fn forget(&self, number: NonZeroU32, is_here: bool) {
        self.counts.distinct.fetch_sub(1, Relaxed);
        if is_here {
            self.note_away(number);
        }
        if let Some(twins) = &self.twins {
            twins.remove(&self.pages.identity(number), number);
        }
    }

    /// Looks pages up: heads, pins and what is away go to `work`. The caller lets the pins and references go.
    pub(crate) fn get(&self, table: &Table, keys: impl ExactSizeIterator<Item = Key>, work: &mut Work) {
        work.heads.clear();
        work.pins.clear();
        work.away.clear();
        self.counts.served.fetch_add(keys.len() as u64, Relaxed);
        let Work { heads, pins, away, .. } = work;
        table.with_each(keys, |stored| {
            let head = match stored {
                None => GotHead { checksum: 0, what: Got::Not(PageStatus::Missing) },
                Some(Stored::Zero) => GotHead { checksum: self.zero_checksum, what: Got::Zero },
                Some(Stored::Page(held)) => {
                    let what = match self.pages.pin(held) {
                        Some(pin) => {
                            pins.push(pin);
                            self.pages.touch(held);
                            Got::Bytes
                        }
                        None => self.ask_away(held, heads.len(), away),
                    };
                    GotHead { checksum: self.pages.checksum(held.number()), what }
                }
            };
            heads.push(head);
        });
    }

    fn ask_away(&self, held: &Held, at: usize, away: &mut Vec<(usize, Held)>) -> Got {
        match self.pages.try_hold(held.number()) {
            Some(held) => {
                away.push((at, held));
                Got::Bytes
            }
            // Two thousand million others hold it at this moment.
            None => Got::Not(PageStatus::Missing),
        }
    }

    /// Forgets pages; how many there were.
    pub(crate) fn free(&self, table: &Table, scope: u32, ranges: impl Iterator<Item = Range>, work: &mut Work) -> u32 {
        self.begin(scope, work);
        let mut freed = 0;
        for Range { first, pages } in ranges {
            for step in 0..pages {
                let key = Key { region: first.region, index: first.index + step };
                if let Some(stored) = table.remove(key) {
                    freed += 1;
                    self.drop_entry(stored, work);
                }
            }
        }
        freed
    }

    /// Forgets the next of the pages that were taken out of a table and wipes them, so many at most; how many there were.
    pub(crate) fn purge(&self, taken: &mut Taken, most: usize, work: &mut Work) -> usize {
        let mut purged = 0;
        for (_, stored) in taken.take(most) {
            self.drop_entry(stored, work);
            purged += 1;
        }
        self.settle(work);
        purged
    }

    fn drop_entry(&self, stored: Stored, work: &mut Work) {
        self.counts.keys.fetch_sub(1, Relaxed);
        self.budget.give_back(KEY_COST_BYTES);
        self.drop_stored(Some(stored), work);
    }

    fn drop_stored(&self, stored: Option<Stored>, work: &mut Work) {
        match stored {
            None => {}
            Some(Stored::Zero) => {
                self.counts.zeros.fetch_sub(1, Relaxed);
            }
            Some(Stored::Page(held)) => self.release(held, work),
        }
    }

    /// Lets a reference go whose page, if it dies, stays with this thread for the next puts of the same tenant.
    fn release(&self, held: Held, work: &mut Work) {
        let Some(dead) = self.pages.release(held) else { return };
        self.forget_dead(&dead);
        match dead {
            Dead::Here(blank) if work.stash.len() < STASH_MAX && self.pages.grains(blank.number()) == WHOLE => {
                work.stash.push(blank);
            }
            dead => self.bury(dead),
        }
    }

    /// Lets a reference go, on a thread that puts nothing.
    pub(crate) fn let_go(&self, held: Held) {
        if let Some(dead) = self.pages.release(held) {
            self.forget_dead(&dead);
            self.bury(dead);
        }
    }

    /// Lets a pin go.
    pub(crate) fn unpin(&self, pin: Pin) {
        if let Some(dead) = self.pages.unpin(pin) {
            self.forget_dead(&dead);
            self.bury(dead);
        }
    }

    /// A page's bytes take no DRAM any more.
    pub(crate) fn note_away(&self, number: NonZeroU32) {
        self.counts.grains.fetch_sub(self.pages.grains(number).into(), Relaxed);
    }

    /// Lets a pin go whose page's bytes went away meanwhile.
    pub(crate) fn unpin_away(&self, number: NonZeroU32) {
        if let Some(dead) = self.pages.unpin_away(number) {
            self.forget_dead(&dead);
            self.bury(dead);
        }
    }

    fn bury(&self, dead: Dead) {
        match dead {
            Dead::Here(mut blank) => {
                self.pages.wipe(&mut blank);
                self.free.give_back(&self.pages, blank);
            }
            Dead::Away(bare, place) => {
                if let Some(spill) = &self.spill {
                    spill.free(place);
                }
                self.free.give_back_number(bare);
            }
        }
    }

    /// Makes sure that what is stashed belongs to this tenant.
    fn begin(&self, scope: u32, work: &mut Work) {
        if work.stash_scope != scope {
            self.settle(work);
            work.stash_scope = scope;
        }
    }

    /// Wipes what a thread has stashed and gives it back.
    pub(crate) fn settle(&self, work: &mut Work) {
        for mut blank in work.stash.drain(..) {
            self.pages.wipe(&mut blank);
            self.free.give_back(&self.pages, blank);
        }
    }
}

#[cfg(test)]
mod tests;

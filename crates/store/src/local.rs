//! `local:`, the embedded pool: compressed, deduplicated pages in this process's own memory.
//!
//! One thread owns it, so there are no locks, and no step takes long: nothing large is moved or page-faulted there.
//! Every page is hashed once; the hash finds identical pages and is the checksum. It only ever proposes: pages are
//! shared after a comparison of all bytes.

use spillway_core::Page;

use crate::arena::{Arena, Place};
use crate::hash::PageHash;
use crate::index::Index;
use crate::segment::{Refill, SEGMENT_BYTES, Supply};
use crate::slots::{Slot, Slots};
use crate::sys::memory::Lending;
use crate::vault::Vault;
use crate::{Got, Handle, Inheritance, Lent, Prepared, Preparer, Put, Status, Store, StoreError, Urgency};
pub use spillway_codec::Compression;
use spillway_codec::{Codec, same, unpack};

/// Pages moved at a time by [`Store::tidy`]: a few microseconds.
const TIDY_PAGES: usize = 8;
/// Room kept under the limit for tables that a segment needs once it fills: 4 bytes for each of its objects.
const SEGMENT_TABLES_BYTES: u64 = 64 << 10;
/// Copies lent at a time without growing a list: a batch of captured pages.
const LENT_MAX: usize = 256;
/// Objects freed while copies are lent without growing a list.
const LIMBO_MAX: usize = 4096;

/// What a [`Local`] is made with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// How pages are kept.
    pub compression: Compression,
    /// Whether identical pages are kept once.
    pub dedupe: bool,
    /// Bytes of DRAM it may take in all; at least [`SIZE_MIN_BYTES`].
    pub size_bytes: Option<u64>,
}

/// The smallest limit that leaves a pool of use: the index and a few segments.
pub const SIZE_MIN_BYTES: u64 = 8 << 20;

impl Default for Config {
    fn default() -> Self {
        Self { compression: Compression::Lz4, dedupe: true, size_bytes: None }
    }
}

/// [`Status`] and what only this pool has to tell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LocalStatus {
    /// What every store tells.
    pub status: Status,
    /// Segments of 2 MiB in use or kept as a reserve.
    pub segments: u64,
    /// Segments that had to be made on the fault path, because none was ready.
    pub inline_segments: u64,
}

/// The embedded pool.
pub struct Local {
    config: Config,
    hash: PageHash,
    codec: Codec,
    slots: Slots,
    index: Option<Index>,
    arena: Arena,
    references: u64,
    /// What is lent, or was last.
    lending: Option<Lending>,
    /// Objects that were freed while something was lent: they may be what is read.
    limbo: Vec<Place>,
}

impl Local {
    /// An empty pool, and what a background thread must call now and then to keep it in memory.
    #[must_use]
    pub fn new(config: Config) -> (Self, Refill) {
        Self::with_hash(config, PageHash::new())
    }

    fn with_hash(config: Config, hash: PageHash) -> (Self, Refill) {
        Self::in_memory(config, hash, None)
    }

    /// An empty pool in memory that outlives this process.
    #[must_use]
    pub fn lasting(config: Config, vault: &Vault) -> (Self, Refill) {
        let hash = PageHash::new();
        vault.set_secrets(hash.secrets());
        Self::in_memory(config, hash, Some(vault))
    }

    /// The pool that was left in this memory, without references: [`Inheritance::count`] and [`Inheritance::all_counted`] follow.
    #[must_use]
    pub fn take_over(config: Config, vault: &Vault) -> (Self, Refill) {
        let hash = PageHash::with_secrets(vault.secret(0), None);
        let (mut local, refill) = Self::in_memory(config, hash, Some(vault));
        let Self { arena, index, slots, .. } = &mut local;
        arena.take_over(vault.segments());
        *slots = Slots::take_over(vault, |handle, slot| {
            let good = arena.take_this(slot.place, slot.len, handle);
            if let Some(index) = index.as_mut().filter(|_| good) {
                index.insert(slot.hash, handle);
            }
            good
        });
        arena.all_taken();
        (local, refill)
    }

    fn in_memory(config: Config, hash: PageHash, vault: Option<&Vault>) -> (Self, Refill) {
        let (supply, refill) = Supply::new(vault.cloned());
        let local = Self {
            config,
            hash,
            codec: Codec::new(config.compression),
            slots: vault.map_or_else(Slots::default, Slots::lasting),
            index: config.dedupe.then(Index::new),
            arena: Arena::new(supply),
            references: 0,
            lending: None,
            limbo: Vec::with_capacity(LIMBO_MAX),
        };
        local.arena.supply().allow(local.segments_max());
        (local, refill)
    }

    /// [`Status`] and more.
    #[must_use]
    pub fn local_status(&self) -> LocalStatus {
        LocalStatus {
            status: self.status(),
            segments: self.arena.held(),
            inline_segments: self.arena.supply().inline_segments,
        }
    }

    /// Whether there is one reference to this page only.
    pub(crate) fn is_sole(&self, handle: Handle) -> bool {
        self.slots.get(handle).is_sole()
    }

    fn index_bytes(&self) -> u64 {
        self.slots.memory_bytes() + self.index.as_ref().map_or(0, Index::memory_bytes)
    }

    /// Segments that the limit leaves room for, beside the tables as they are now.
    fn segments_max(&self) -> u64 {
        let tables_bytes = self.index_bytes() + self.arena.table_bytes() + SEGMENT_TABLES_BYTES;
        let size_bytes = self.config.size_bytes.unwrap_or(u64::MAX);
        size_bytes.saturating_sub(tables_bytes) / u64::from(SEGMENT_BYTES)
    }

    /// Whether the limit leaves room for one more page in the tables.
    fn tables_have_room(&self, hash: u64) -> bool {
        let Some(size_bytes) = self.config.size_bytes else { return true };
        let index_growth_bytes = self.index.as_ref().map_or(0, |index| index.growth_bytes(hash));
        let growth_bytes = self.slots.growth_bytes() + index_growth_bytes;
        self.arena.held_bytes() + self.index_bytes() + growth_bytes <= size_bytes
    }

    /// Whether the page behind `handle` is this one.
    fn is_same(&self, handle: Handle, hash: u64, page: &Page) -> bool {
        let slot = self.slots.get(handle);
        slot.hash == hash && same(self.arena.bytes(slot.place, slot.len), page)
    }

    /// Whether a thread reads copies: none of them may be written or moved.
    fn is_lent(&mut self) -> bool {
        if self.lending.as_ref().is_some_and(|lending| !lending.is_over()) {
            return true;
        }
        self.lending = None;
        self.limbo.drain(..).for_each(|place| self.arena.free(place));
        false
    }

    /// Frees an object, as soon as that may be.
    fn release(&mut self, place: Place) {
        if self.is_lent() { self.limbo.push(place) } else { self.arena.free(place) }
    }

    /// Nobody refers to this page any more.
    fn forget(&mut self, handle: Handle, slot: Slot) {
        self.release(slot.place);
        if let Some(index) = &mut self.index {
            index.remove(slot.hash, handle);
        }
    }

    fn find_twin(&self, hash: u64, page: &Page) -> Option<Handle> {
        let has_room = |handle| self.slots.get(handle).has_room();
        self.index.as_ref()?.find(hash, |handle| has_room(handle) && self.is_same(handle, hash, page))
    }

    /// Stores a page of which there is no copy to share.
    fn store(
        &mut self,
        page: &Page,
        hash: u64,
        packed: Option<&[u8]>,
        previous: Option<Handle>,
    ) -> Result<Handle, StoreError> {
        // If no one else refers to the previous copy, its slot is used again, and its bytes may make room.
        // While copies are lent they stay as they are.
        let is_lent = self.is_lent();
        let sole = previous.filter(|previous| !is_lent && self.slots.get(*previous).is_sole());
        if sole.is_none() && !self.tables_have_room(hash) {
            return Err(StoreError::Full);
        }
        let segments_max = self.segments_max();
        let packed = packed.unwrap_or_else(|| self.codec.pack(page));
        let len = u16::try_from(packed.len()).expect("at most a page");
        let mut old_place = sole.map(|sole| self.slots.get(sole).place);
        let place = match (self.arena.alloc(packed.len(), segments_max), old_place) {
            (Ok(place), _) => place,
            (Err(_), Some(old)) if self.arena.fits_instead(old, packed.len()) => {
                self.arena.free(old);
                old_place = None;
                self.arena.alloc(packed.len(), segments_max).expect("room was made")
            }
            (Err(full), _) => return Err(full),
        };
        self.arena.bytes_mut(place, len).copy_from_slice(packed);
        let slot = Slot::new(hash, place, len);
        let handle = match sole {
            Some(sole) => {
                let old = self.slots.replace(sole, slot);
                if let Some(index) = &mut self.index {
                    index.remove(old.hash, sole);
                }
                sole
            }
            None => match self.slots.insert(slot) {
                Some(handle) => handle,
                None => {
                    self.arena.free(place);
                    return Err(StoreError::Full);
                }
            },
        };
        self.arena.set_owner(place, handle);
        if let Some(index) = &mut self.index {
            index.insert(hash, handle);
        }
        match (sole, previous) {
            (Some(_), _) => old_place.into_iter().for_each(|old| self.arena.free(old)),
            (None, previous) => {
                self.references += 1;
                previous.into_iter().for_each(|previous| self.free(previous));
            }
        }
        Ok(handle)
    }

    /// [`Store::put`] of a page with this hash, and perhaps with these bytes to store.
    fn put_with(
        &mut self,
        page: &Page,
        hash: u64,
        packed: Option<&[u8]>,
        previous: Option<Handle>,
    ) -> Result<Put, StoreError> {
        if let Some(previous) = previous
            && self.is_same(previous, hash, page)
        {
            return Ok(Put::Unchanged(previous));
        }
        if let Some(twin) = self.find_twin(hash, page) {
            let twin = self.share(twin);
            if let Some(previous) = previous {
                self.free(previous);
            }
            return Ok(Put::Stored(twin));
        }
        let stored = self.store(page, hash, packed, previous);
        if stored.is_err() {
            // Whoever comes back finds room sooner.
            self.tidy();
        } else if self.arena.is_loose() {
            self.tidy_page();
        }
        stored.map(Put::Stored)
    }

    /// Moves one page to where it leaves less room unused. Returns whether there may be more to do.
    fn tidy_page(&mut self) -> bool {
        if self.is_lent() {
            return false;
        }
        let Some((place, owner)) = self.arena.next_to_move() else { return self.arena.is_loose() };
        let slot = self.slots.get(owner);
        assert_eq!(slot.place, place, "objects know their owners");
        if let Some(to) = self.arena.move_out(place, slot.len, owner) {
            self.slots.set_place(owner, to);
            self.arena.free(place);
        }
        true
    }
}

impl Store for Local {
    fn put(&mut self, page: &Page, previous: Option<Handle>) -> Result<Put, StoreError> {
        self.put_with(page, self.hash.of(page), None, previous)
    }

    fn preparer(&self) -> Option<Preparer> {
        Some(Preparer::new(self.hash.clone(), self.config.compression, LENT_MAX))
    }

    fn lend(&mut self, handle: Handle, to: &mut Preparer) -> Option<Lent> {
        // Copies that are lent make no room: a pool of a limited size would decline what it has room for.
        if self.config.size_bytes.is_some() {
            return None;
        }
        self.is_lent();
        let Slot { hash, place, len, .. } = self.slots.get(handle);
        let part = to.parts.len();
        self.lending = Some(self.arena.lend(place, len, &mut to.parts));
        Some(Lent { handle, hash, part })
    }

    fn put_prepared(&mut self, page: &Page, known: &Prepared, previous: Option<Handle>) -> Result<Put, StoreError> {
        let Some(hash) = known.hash() else { return self.put(page, previous) };
        match previous {
            Some(same) if known.same_as() == previous && self.slots.get(same).hash == hash => Ok(Put::Unchanged(same)),
            _ => self.put_with(page, hash, known.packed(page), previous),
        }
    }

    fn get(&mut self, handle: Handle, _urgency: Urgency, into: &mut Page) -> Result<Got, StoreError> {
        let slot = self.slots.get(handle);
        unpack(self.arena.bytes(slot.place, slot.len), into).map_err(|_| StoreError::Corrupt)?;
        if self.hash.of(into) == slot.hash { Ok(Got::Here) } else { Err(StoreError::Corrupt) }
    }

    fn share(&mut self, handle: Handle) -> Handle {
        self.slots.share(handle);
        self.references += 1;
        handle
    }

    fn free(&mut self, handle: Handle) {
        self.references -= 1;
        if let Some(slot) = self.slots.release(handle) {
            self.forget(handle, slot);
        }
    }

    fn status(&self) -> Status {
        Status {
            stored_bytes: self.references * size_of::<Page>() as u64,
            stored_compressed_bytes: self.arena.live_bytes(),
            memory_bytes: self.arena.memory_bytes() + self.index_bytes(),
        }
    }

    fn tidy(&mut self) -> bool {
        let more = (0..TIDY_PAGES).all(|_| self.tidy_page());
        self.arena.give_back_empty();
        more
    }
}

impl Inheritance for Local {
    fn has(&self, handle: Handle) -> bool {
        self.slots.is_there(handle)
    }

    fn count(&mut self, handle: Handle) {
        self.slots.count(handle);
        self.references += 1;
    }

    fn all_counted(&mut self) {
        self.slots.drop_unnamed().into_iter().for_each(|(handle, slot)| self.forget(handle, slot));
    }
}

#[cfg(test)]
mod tests;

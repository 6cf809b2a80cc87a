//! `local:`, the embedded pool: compressed, deduplicated pages in this process's own memory.
//!
//! One thread owns it, so there are no locks, and no step takes long: nothing large is moved or page-faulted there.
//! Every page is hashed once; the hash finds identical pages and is the checksum. It only ever proposes: pages are
//! shared after a comparison of all bytes.

use spillway_core::Page;

use crate::arena::Arena;
pub use crate::codec::Compression;
use crate::codec::{Codec, same, unpack};
use crate::hash::PageHash;
use crate::index::Index;
use crate::segment::{Refill, SEGMENT_BYTES, Supply};
use crate::slots::{Slot, Slots};
use crate::{Handle, Put, Status, Store, StoreError};

/// References at which a page is not shared with further identical ones but stored again.
const REFS_MAX: u32 = u32::MAX / 2;
/// References at which the count is stuck: the page is kept for good, as it is unknown how many there are.
const REFS_STUCK: u32 = u32::MAX;

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
    refs_max: u32,
}

impl Local {
    /// An empty pool, and what a background thread must call now and then to keep it in memory.
    #[must_use]
    pub fn new(config: Config) -> (Self, Refill) {
        Self::with_hash(config, PageHash::new())
    }

    fn with_hash(config: Config, hash: PageHash) -> (Self, Refill) {
        let (supply, refill) = Supply::new(u64::MAX);
        let local = Self {
            config,
            hash,
            codec: Codec::new(config.compression),
            slots: Slots::default(),
            index: config.dedupe.then(Index::new),
            arena: Arena::new(supply),
            references: 0,
            refs_max: REFS_MAX,
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

    fn index_bytes(&self) -> u64 {
        self.slots.memory_bytes() + self.index.as_ref().map_or(0, Index::memory_bytes)
    }

    /// Segments that the limit leaves room for, beside the indices as they are now.
    fn segments_max(&self) -> u64 {
        match self.config.size_bytes {
            Some(size) => size.saturating_sub(self.index_bytes() + self.slots.growth_bytes()) / SEGMENT_BYTES as u64,
            None => u64::MAX,
        }
    }

    fn is_same(&self, handle: Handle, hash: u64, page: &Page) -> bool {
        let slot = self.slots.get(handle);
        slot.hash == hash && same(self.arena.bytes(slot.place, slot.len), page)
    }

    fn find_same(&self, hash: u64, page: &Page) -> Option<Handle> {
        let Self { index, slots, arena, .. } = self;
        index.as_ref()?.find(hash, |handle| {
            let slot = slots.get(handle);
            slot.hash == hash && slot.refs < self.refs_max && same(arena.bytes(slot.place, slot.len), page)
        })
    }

    /// Stores a page that is not there yet.
    fn store(&mut self, page: &Page, hash: u64, previous: Option<Handle>) -> Result<Handle, StoreError> {
        let segments_max = self.segments_max();
        let packed = self.codec.pack(page);
        let len = packed.len() as u16;
        // Only this page refers to its previous copy, so the slot may stay and the bytes may go first.
        let sole = previous.filter(|previous| self.slots.get(*previous).refs == 1);
        let mut dropped = false;
        let place = match self.arena.alloc(packed.len(), segments_max) {
            Ok(place) => place,
            Err(full) => {
                let old = self.slots.get(sole.ok_or(full)?).place;
                if !self.arena.fits_instead(old, packed.len()) {
                    return Err(full);
                }
                self.arena.free(old);
                dropped = true;
                self.arena.alloc(packed.len(), segments_max).expect("room was made")
            }
        };
        self.arena.bytes_mut(place, len).copy_from_slice(packed);
        let slot = Slot { hash, place, refs: 1, len };
        let handle = match sole {
            Some(handle) => {
                let old = std::mem::replace(self.slots.get_mut(handle), slot);
                if !dropped {
                    self.arena.free(old.place);
                }
                if let Some(index) = &mut self.index {
                    index.remove(old.hash, handle);
                }
                handle
            }
            None => {
                let Some(handle) = self.slots.insert(slot) else {
                    self.arena.free(place);
                    return Err(StoreError::Full);
                };
                self.references += 1;
                if let Some(previous) = previous {
                    self.free(previous);
                }
                handle
            }
        };
        if let Some(index) = &mut self.index {
            index.insert(hash, handle);
        }
        Ok(handle)
    }
}

impl Store for Local {
    fn put(&mut self, page: &Page, previous: Option<Handle>) -> Result<Put, StoreError> {
        let hash = self.hash.of(page);
        if let Some(previous) = previous
            && self.is_same(previous, hash, page)
        {
            return Ok(Put::Unchanged(previous));
        }
        if let Some(twin) = self.find_same(hash, page) {
            let twin = self.share(twin);
            if let Some(previous) = previous {
                self.free(previous);
            }
            return Ok(Put::Stored(twin));
        }
        self.store(page, hash, previous).map(Put::Stored)
    }

    fn get(&mut self, handle: Handle, into: &mut Page) -> Result<(), StoreError> {
        let slot = self.slots.get(handle);
        unpack(self.arena.bytes(slot.place, slot.len), into).map_err(|_| StoreError::Corrupt)?;
        if self.hash.of(into) == slot.hash { Ok(()) } else { Err(StoreError::Corrupt) }
    }

    fn share(&mut self, handle: Handle) -> Handle {
        let slot = self.slots.get_mut(handle);
        slot.refs = slot.refs.saturating_add(1);
        self.references += 1;
        handle
    }

    fn free(&mut self, handle: Handle) {
        self.references -= 1;
        let slot = self.slots.get_mut(handle);
        if slot.refs == REFS_STUCK {
            return;
        }
        slot.refs -= 1;
        if slot.refs > 0 {
            return;
        }
        slot.refs = 1;
        let Slot { hash, place, .. } = *slot;
        self.slots.remove(handle);
        self.arena.free(place);
        if let Some(index) = &mut self.index {
            index.remove(hash, handle);
        }
    }

    fn status(&self) -> Status {
        Status {
            stored_bytes: self.references * size_of::<Page>() as u64,
            stored_compressed_bytes: self.arena.live_bytes(),
            memory_bytes: self.arena.memory_bytes() + self.index_bytes(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spillway_core::PAGE_BYTES;

    #[test]
    fn pages_come_back_and_leave_nothing_behind() {
        let (mut pool, mut refill) = Local::new(Config::default());
        refill.top_up();
        let mut handles = Vec::new();
        for n in 0..2000_u32 {
            let mut page = [0; PAGE_BYTES];
            for (at, word) in page.chunks_exact_mut(4).enumerate().take(n as usize % 1024 + 1) {
                word.copy_from_slice(&(at as u32).wrapping_mul(n).wrapping_mul(2_654_435_761).to_le_bytes());
            }
            let Ok(Put::Stored(handle)) = pool.put(&page, None) else { panic!("not stored") };
            assert_eq!(pool.put(&page, Some(handle)), Ok(Put::Unchanged(handle)));
            handles.push((page, handle));
        }
        for (page, handle) in handles {
            let mut got = [1; PAGE_BYTES];
            pool.get(handle, &mut got).unwrap();
            assert_eq!(got, page);
            pool.free(handle);
        }
        let status = pool.local_status();
        assert_eq!((status.status.stored_bytes, status.status.stored_compressed_bytes), (0, 0));
        assert_eq!(status.segments, 1);
    }
}

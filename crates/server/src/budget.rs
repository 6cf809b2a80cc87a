//! The DRAM that the server may use, and what is counted against it.
//!
//! Counted is what was ever touched of the arena (freed pages are kept for the next put, not given back to the kernel),
//! what is known of each page, and the tables' entries at the size that they have at worst. Not counted are buffers of
//! connections, which have limits of their own.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use spillway_core::PAGE_BYTES_U64;

use crate::sys::pages::META_BYTES;
use crate::{table, twins};

/// Bytes that a page takes beside its content, wherever that is.
pub(crate) const NUMBER_COST_BYTES: u64 = META_BYTES + twins::ENTRY_BYTES;
/// Bytes that a key takes.
pub(crate) const KEY_COST_BYTES: u64 = table::ENTRY_BYTES;

/// Bytes allowed and used.
pub(crate) struct Budget {
    capacity: u64,
    used: AtomicU64,
}

impl Budget {
    pub(crate) fn new(capacity: u64) -> Self {
        Self { capacity, used: AtomicU64::new(0) }
    }

    /// Takes bytes, unless too few are left.
    pub(crate) fn take(&self, bytes: u64) -> bool {
        let grow = |used: u64| used.checked_add(bytes).filter(|used| *used <= self.capacity);
        self.used.fetch_update(Relaxed, Relaxed, grow).is_ok()
    }

    /// Gives bytes back.
    pub(crate) fn give_back(&self, bytes: u64) {
        self.used.fetch_sub(bytes, Relaxed);
    }

    pub(crate) fn capacity(&self) -> u64 {
        self.capacity
    }

    pub(crate) fn used(&self) -> u64 {
        self.used.load(Relaxed)
    }

    /// Pages that would still fit, each under a key of its own.
    pub(crate) fn free_pages(&self) -> u64 {
        self.capacity.saturating_sub(self.used()) / (PAGE_BYTES_U64 + NUMBER_COST_BYTES + KEY_COST_BYTES)
    }
}

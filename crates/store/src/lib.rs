//! Where evicted pages live.
//!
//! A [`Store`] keeps pages under handles of its own choosing; the page table remembers the handle. [`Local`] is the
//! embedded pool, [`remote`] the pools on other hosts, [`mod@file`] a disk; [`pool::Url`] says how users name one.
#![deny(unsafe_code)]

mod arena;
pub mod blocking;
mod classes;
pub mod emulated;
pub mod file;
mod hash;
mod index;
pub mod layer;
pub mod local;
mod memcached;
pub mod pool;
mod prepare;
mod redis;
pub mod rehearsal;
pub mod remote;
mod segment;
mod slots;
pub mod snapshot;
pub mod stripe;
mod sys;
mod tcp;
pub mod vault;

use std::fmt;
use std::num::NonZeroU32;
use std::os::fd::BorrowedFd;

use spillway_core::Page;

pub use local::Local;
pub use prepare::{Lent, Prepared, Preparer};
pub use segment::Refill;
pub use spillway_codec::is_zero;

/// Bits that a [`Handle`] may take, so that a page table can keep it beside two bits of its own in 32.
pub const HANDLE_BITS: u32 = 30;

/// Names one reference to a stored page. Never zero; at most [`HANDLE_BITS`] bits.
///
/// Two references may have the same value: the store counts them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Handle(NonZeroU32);

impl Handle {
    /// The handle that [`Handle::bits`] gave; `None` for what cannot be one.
    #[must_use]
    pub const fn from_bits(bits: u32) -> Option<Self> {
        if bits >> HANDLE_BITS != 0 {
            return None;
        }
        match NonZeroU32::new(bits) {
            Some(bits) => Some(Self(bits)),
            None => None,
        }
    }

    /// The handle as a number, for page tables.
    #[must_use]
    pub const fn bits(self) -> u32 {
        self.0.get()
    }
}

/// What became of a page that was put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Put {
    /// The previous copy already held these very bytes; its handle stays valid and nothing was written.
    Unchanged(Handle),
    /// Stored anew, or shared with an identical page. The previous reference, if any, was released.
    Stored(Handle),
    /// Taken over; a [`Completion::Put`] follows, and until then only the caller's own copy is sure to last. The
    /// previous reference was released, unless this is the same one, still on its way with these very bytes.
    Pending(Handle),
}

/// How a page is got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Got {
    /// It was copied.
    Here,
    /// A [`Completion::Got`] brings it.
    Pending,
}

/// Who waits for a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Urgency {
    /// A faulting thread: goes before everything else.
    Demand,
    /// No one yet.
    Prefetch,
}

/// What was pending and has come to an end.
#[derive(Clone, Copy, Debug)]
pub enum Completion<'a> {
    /// All gets of this handle that were pending.
    Got {
        /// As in the call.
        handle: Handle,
        /// The page, verified, or why there will be none.
        page: Result<&'a Page, StoreError>,
    },
    /// A put that was pending. After an error the page was not kept, and all references to the handle are released.
    Put {
        /// As in the answer to the call.
        handle: Handle,
        /// Whether the page is kept.
        result: Result<(), StoreError>,
    },
}

/// Keeps pages outside their targets.
///
/// No call ever blocks. A store that answers at once never says *pending*; the others are waited for with
/// [`Store::descriptor`]. Handing in a handle that the store did not give, or that was freed, is a bug of the caller:
/// implementations panic where they notice.
pub trait Store: Send {
    /// Keeps `page`. `previous` is the handle of this page's older copy, if the table still has one: it is compared,
    /// and released when it differs. After an error it is still valid.
    fn put(&mut self, page: &Page, previous: Option<Handle>) -> Result<Put, StoreError>;
    /// What another thread may prepare pages with, ahead of [`Store::put_prepared`]; `None` where that saves nothing.
    fn preparer(&self) -> Option<Preparer> {
        None
    }
    /// Lends the copy behind `handle` until [`Preparer::give_back`]; `None` where that cannot be. To one preparer at a time.
    fn lend(&mut self, _handle: Handle, _to: &mut Preparer) -> Option<Lent> {
        None
    }
    /// [`Store::put`] of a page that was prepared since its present bytes are there, and `previous` is its clean copy.
    fn put_prepared(&mut self, page: &Page, _known: &Prepared, previous: Option<Handle>) -> Result<Put, StoreError> {
        self.put(page, previous)
    }
    /// Copies the page behind `handle` to `into`, verified against its checksum, or asks for it. What fails for now is
    /// asked for again by the store itself, up to a deadline. A pending get that becomes urgent may be asked again.
    /// [`StoreError::Unavailable`] means that far too many are pending: ask later.
    fn get(&mut self, handle: Handle, urgency: Urgency, into: &mut Page) -> Result<Got, StoreError>;
    /// One more reference to the same page (a fork: parent and child each own one). Same or another handle value.
    fn share(&mut self, handle: Handle) -> Handle;
    /// Releases one reference. With the last one, what is pending for the handle is called off: no completion comes.
    fn free(&mut self, handle: Handle);
    /// Tells that the pages behind these handles, at most [`BURDENS_MAX`](spillway_core::page::BURDENS_MAX), are local as well, and asks whose
    /// copies cost more to keep than to write again: the store would have to move them to win back room. A bit for each; the caller then frees those.
    fn burdens(&mut self, _handles: &[Handle]) -> u64 {
        0
    }
    /// Whether there are so many such copies of pages that it was told of that they are worth looking for.
    fn has_burdens(&mut self) -> bool {
        false
    }
    /// What is kept now.
    fn status(&self) -> Status;
    /// How well what is kept would survive the loss of servers; `None` where nothing is done about that.
    fn protection(&self) -> Option<Protection> {
        None
    }
    /// Housekeeping for idle moments, a few microseconds of it. Returns whether there may be more to do.
    fn tidy(&mut self) -> bool {
        false
    }
    /// Readable when [`Store::progress`] has something to do; `None` when nothing is ever pending.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    /// Hands what was asked for to the other side; to be called before waiting.
    fn flush(&mut self) {}
    /// Receives what came, keeps deadlines, connects again. Allocates nothing on the way of a get.
    fn progress(&mut self, _done: &mut dyn FnMut(Completion<'_>)) {}
    /// Whether a put would be taken now. Under back pressure it would not: keep the page, and ask again after
    /// [`Store::progress`].
    fn accepts(&self) -> bool {
        true
    }
}

/// A store that another process has left, to which nobody has a reference yet: each is counted, and then all are known.
pub trait Inheritance: Store {
    /// Whether the page behind `handle`, which may be anything, was found.
    fn has(&self, handle: Handle) -> bool;
    /// One more reference to a page that was found.
    fn count(&mut self, handle: Handle);
    /// Every reference was counted: what has none is given up. Only then are pages put and got.
    fn all_counted(&mut self);
}

/// What a store keeps, in bytes and pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// References held: pages that targets believe are stored, times 4 KiB.
    pub stored_bytes: u64,
    /// Distinct compressed bytes kept for them, with the store's own slack (arena) and without its indices.
    pub stored_compressed_bytes: u64,
    /// Bytes of DRAM the store occupies in all, indices included.
    pub memory_bytes: u64,
}

/// How a pool that keeps parity is: now, or counted since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Protection {
    /// Groups of pages with their parity.
    pub groups: u64,
    /// Of these, groups that a server's loss has cost a part, as far as the last look at all of them found.
    pub degraded: u64,
    /// Parts that are being rebuilt.
    pub rebuilding: u64,
    /// Parts that were rebuilt.
    pub rebuilt_chunks: u64,
    /// Pages that were moved out of groups that were mostly holes.
    pub moved_pages: u64,
    /// Pages and parity that were made out of others.
    pub reconstructed: u64,
    /// Reads that were overdue, so that their page was to be made out of others as well.
    pub hedged: u64,
    /// Pages that could not be made out of others.
    pub lost_pages: u64,
    /// Pages and parity that servers have taken.
    pub chunks_put: u64,
    /// Pages and parity that servers have given.
    pub chunks_got: u64,
    /// Seconds until what can be rebuilt has been, as it went so far; 0 when nothing is, or before there is a speed.
    #[serde(default)]
    pub left_seconds: u64,
    /// Copies of pages that were local as well, given up where they would have had to be moved.
    #[serde(default)]
    pub dropped_copies: u64,
}

impl Protection {
    /// Its numbers in their order, for whoever must hand them over one by one.
    #[must_use]
    pub fn words(&self) -> [u64; 12] {
        [
            self.groups,
            self.degraded,
            self.rebuilding,
            self.rebuilt_chunks,
            self.moved_pages,
            self.reconstructed,
            self.hedged,
            self.lost_pages,
            self.chunks_put,
            self.chunks_got,
            self.left_seconds,
            self.dropped_copies,
        ]
    }

    /// What [`Protection::words`] gave.
    #[must_use]
    pub fn from_words(words: [u64; 12]) -> Self {
        Self {
            groups: words[0],
            degraded: words[1],
            rebuilding: words[2],
            rebuilt_chunks: words[3],
            moved_pages: words[4],
            reconstructed: words[5],
            hedged: words[6],
            lost_pages: words[7],
            chunks_put: words[8],
            chunks_got: words[9],
            left_seconds: words[10],
            dropped_copies: words[11],
        }
    }
}

/// Why a store could not do as asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreError {
    /// No room is left: the page was not taken, and `previous` is still valid.
    Full,
    /// The stored bytes do not match their checksum: the page is lost.
    Corrupt,
    /// The only copy of the page is gone.
    Lost,
    /// The page was not taken for now; `previous` is still valid.
    Unavailable,
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Full => "the pool is full: give it a larger size=, or the targets more local memory",
            Self::Corrupt => "a stored page does not match its checksum and is lost: check this host's memory",
            Self::Lost => "a stored page is gone with the server that kept it: see `spillway pool status`",
            Self::Unavailable => "the pool takes no pages for now: they stay local until it does",
        })
    }
}

impl std::error::Error for StoreError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_survive_as_bits() {
        assert_eq!(Handle::from_bits(0), None);
        assert_eq!(Handle::from_bits(1 << HANDLE_BITS), None);
        for bits in [1, 12345, (1 << HANDLE_BITS) - 1] {
            assert_eq!(Handle::from_bits(bits).map(Handle::bits), Some(bits));
        }
        assert_eq!(size_of::<Option<Handle>>(), 4);
    }
}

//! Where evicted pages live.
//!
//! A [`Store`] keeps pages under handles of its own choosing; the page table remembers the handle.
#![forbid(unsafe_code)]

use spillway_core::Page;

/// Names one reference to a stored page. Never zero; at most [`HANDLE_BITS`] bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Handle(std::num::NonZeroU32);

/// What became of a page that was put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Put {
    /// The previous copy already held these very bytes; its handle stays valid and nothing was written.
    Unchanged(Handle),
    /// Stored anew, or shared with an identical page. The previous reference, if any, was released.
    Stored(Handle),
}

/// Keeps pages outside their targets.
pub trait Store: Send {
    /// Keeps `page`. `previous` is the handle of this page's older copy, if the table still has one: it is compared
    /// byte for byte, and released when it differs.
    fn put(&mut self, page: &Page, previous: Option<Handle>) -> Result<Put, StoreError>;
    /// Copies the page behind `handle` to `into`, verified against its checksum.
    fn get(&mut self, handle: Handle, into: &mut Page) -> Result<(), StoreError>;
    /// One more reference to the same page (a fork: parent and child each own one). Same or another handle value.
    fn share(&mut self, handle: Handle) -> Handle;
    /// Releases one reference.
    fn free(&mut self, handle: Handle);
    /// What is kept now.
    fn status(&self) -> Status;
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

/// Why a store could not do as asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreError {
    /// No room is left: the page was not taken, and `previous` is still valid.
    Full,
    /// The stored bytes do not match their checksum: the page is lost.
    Corrupt,
}

//! What stripes need of the servers below them, which may as well be simulated.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use spillway_core::Page;

use crate::hash::PageHash;
use crate::{Completion, Got, Handle, StoreError, Urgency};

/// How a member is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Health {
    /// It can be asked.
    pub(crate) ready: bool,
    /// It cannot, and has not for so long that nobody waits for it.
    pub(crate) gone: bool,
    /// It declines pages for now.
    pub(crate) full: bool,
    /// It takes no pages, and what it has is to go to others, as long as it says so.
    pub(crate) leaving: bool,
    /// It is one of the pool's, and not one that has left it.
    pub(crate) listed: bool,
    /// What fails together has the same; each by itself where nothing is known.
    pub(crate) domain: u8,
    /// It has room for one more put under way.
    pub(crate) room: bool,
    /// Another number after it has forgotten what it had.
    pub(crate) life: u16,
    /// The share of its time that it is busy, of 255.
    pub(crate) load: u8,
    /// Puts under way.
    pub(crate) puts: usize,
}

impl Health {
    /// Whether it would be given pages, if not now then soon.
    pub(crate) fn takes(self) -> bool {
        self.ready && self.listed && !self.full && !self.leaving
    }

    /// Whether it is none of the pool's any more, nor can what it has be had.
    pub(crate) fn is_retired(self) -> bool {
        self.gone && !self.listed
    }
}

/// What can be had of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Presence {
    /// Its member can be asked.
    There,
    /// Its member cannot be asked now.
    Away,
    /// Nor could it for very long.
    Gone,
    /// It is lost, or was wrong.
    Dead,
}

/// A chunk that was put.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chunk {
    pub(crate) member: u8,
    pub(crate) checksum: u64,
    pub(crate) presence: Presence,
}

/// Servers that keep chunks, each under a handle of its own. As for a [`crate::Store`], no call blocks; a chunk that comes
/// is verified against its checksum. What time it is, callers ask once and pass on: a fault has a dozen such calls.
pub(crate) trait Members: Send {
    /// How many there are; they are named by number. There may be more after [`Members::progress`].
    fn count(&self) -> u8;
    /// What time it is.
    fn now(&self) -> Instant;
    /// How checksums are made.
    fn page_hash(&self) -> PageHash;
    /// How one is.
    fn health(&self, member: u8, now: Instant) -> Health;
    /// How long one has said nothing while something was asked of it.
    fn silence(&self, member: u8, now: Instant) -> Duration;
    /// What is known of a chunk, also while it is put.
    fn chunk(&self, chunk: Handle, now: Instant) -> Chunk;
    /// Begins to put a chunk there and nowhere else. [`Completion::Put`] tells; after an error the handle is void.
    fn put(&mut self, member: u8, page: &Page, checksum: u64, now: Instant) -> Result<Handle, StoreError>;
    /// As [`crate::Store::get`]. What was wrong or is lost stays [`Presence::Dead`].
    fn get(&mut self, chunk: Handle, urgency: Urgency, into: &mut Page, now: Instant) -> Result<Got, StoreError>;
    /// Has the member forget a chunk, now or when it can be asked again.
    fn free(&mut self, chunk: Handle);
    /// As [`crate::Store::progress`], but nothing is sent before [`Members::flush`].
    fn progress(&mut self, now: Instant, done: &mut dyn FnMut(Completion<'_>));
    /// As [`crate::Store::flush`].
    fn flush(&mut self, now: Instant);
    /// As [`crate::Store::tidy`].
    fn tidy(&mut self) -> bool;
    /// As [`crate::Store::descriptor`].
    fn descriptor(&self) -> Option<BorrowedFd<'_>>;
    /// Makes the descriptor readable at a time, if nothing does so sooner.
    fn wake_at(&mut self, at: Instant, now: Instant);
    /// A chunk that another process has left with its members, under what may be any handle: it is kept, or there is none. To be
    /// called before anything is put.
    fn inherit(&mut self, chunk: Handle) -> bool;
    /// Has members forget what that process has left beside.
    fn inherit_no_more(&mut self);
    /// Chunks kept, and bytes of this host's memory taken for them.
    fn usage(&self) -> (u64, u64);
}

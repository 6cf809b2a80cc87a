//! Memory that outlives the pager: one file, which the agents in its targets keep open.
//!
//! Whoever finds it has the page table's sheets and the book ([`spillway_core::lasting`]), the embedded pool or what is known of
//! pages at servers, page buffers, and what the pager wrote of its targets. The file is divided into extents of 2 MiB, and a directory at its head
//! says what each is for: that is the first thing written when one is taken, and the last when it is given back.
//!
//! ```text
//! head (2 MiB)    mark, sizes; the secret; what only the pager writes ([`Vault::private`])
//! directory       64 bytes an extent
//! extents         buffers (2), book (4), then sheets, slots, segments, notes on servers, or rows with parity, as they are needed
//! ```
//!
//! Agents have no more of the file than its name: only the pager's own user can open it. A target of the same user could write to it if it
//! went to great lengths, as it could to the pager. All that is read is checked, and where it makes no sense a page counts as lost.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use spillway_core::lasting::{Lasting, Sheet};
use spillway_core::table::CHUNK_PAGES;
use spillway_core::{PAGE_BYTES, Page};

use crate::hash::SECRET_BYTES;
use crate::segment::SEGMENT_BYTES;
use crate::sys::shared::{Area, Shared};

mod slabs;
pub(crate) use slabs::{Slabs, Use};

/// The name of the file: how it is recognised.
pub const NAME: &str = "spillway-vault";
/// Changes when anything in the file is laid out differently.
pub const VERSION: u64 = 4;
/// Page buffers that there is room for.
pub const BUFFERS: usize = BUFFER_EXTENTS * EXTENT / PAGE_BYTES;
/// Words for the pager's own use.
pub const PRIVATE_WORDS: usize = (HEAD_BYTES - PRIVATE_AT) / 8;

const MARK: u64 = u64::from_le_bytes(*b"spillway");
const EXTENT: usize = SEGMENT_BYTES as usize;
const HEAD_BYTES: usize = EXTENT;
const SECRET_AT: usize = 4096;
const PRIVATE_AT: usize = 16384;
const RECORD_WORDS: usize = 8;
const BUFFER_EXTENTS: usize = 2;
const BOOK_EXTENTS: usize = 4;
const FIXED: usize = BUFFER_EXTENTS + BOOK_EXTENTS;
/// Extents beside those that all of the machine's memory would fill: for what there is of everything else.
const SPARE_EXTENTS: usize = 4096;
/// 64 TiB: beyond that a file is not one of ours.
const EXTENTS_MAX: usize = 1 << 25;

/// A sheet's entries take a page; the first page of an extent has the numbers.
const SHEETS: usize = EXTENT / PAGE_BYTES - 1;
const _: () = assert!(CHUNK_PAGES * 8 == PAGE_BYTES);

/// What an extent is for, in its first word; the number of a run of slabs is above it.
const FREE: u64 = 0;
const SHEET_EXTENT: u64 = 1;
const SLAB_EXTENT: u64 = 2;
const SEGMENT_EXTENT: u64 = 3;
const NOTES_EXTENT: u64 = 4;
const STRIPED_PAGES_EXTENT: u64 = 5;
const ROWS_EXTENT: u64 = 6;
const KIND: u64 = 0xff;

/// Why a file cannot be taken over.
#[derive(Debug)]
pub enum Foreign {
    /// It is none of ours, or damaged.
    Unknown,
    /// Another user made it.
    Others,
    /// Another version of Spillway made it.
    Version(u64),
    /// It cannot be reached.
    System(io::Error),
}

impl fmt::Display for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => f.write_str("it is damaged"),
            Self::Others => f.write_str("it is another user's"),
            Self::Version(version) => {
                write!(f, "it has layout {version}, and this version of Spillway knows {VERSION}")
            }
            Self::System(error) => write!(f, "it cannot be read: {error}"),
        }
    }
}

impl std::error::Error for Foreign {}

/// This host's memory (`MemTotal` of `/proc/meminfo`).
///
/// # Errors
/// When the kernel does not tell.
pub fn host_memory_bytes() -> io::Result<u64> {
    let info = std::fs::read_to_string("/proc/meminfo")?;
    let total = info.lines().find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB"));
    let kib: u64 = total.and_then(|kib| kib.parse().ok()).ok_or(io::ErrorKind::InvalidData)?;
    Ok(kib << 10)
}

struct Inner {
    shared: Shared,
    extents: usize,
    data: usize,
    /// Where to look for a free extent.
    hint: AtomicUsize,
}

/// See [`Vault::claim`].
pub struct Claim {
    locked: OwnedFd,
}

impl AsFd for Claim {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.locked.as_fd()
    }
}

/// See the module's documentation. Clones are the same memory.
#[derive(Clone)]
pub struct Vault(Arc<Inner>);

impl Vault {
    /// New memory.
    ///
    /// # Errors
    /// When the kernel gives none.
    pub fn create() -> io::Result<Self> {
        let bytes = usize::try_from(host_memory_bytes()?).map_err(|_| io::ErrorKind::InvalidData)?;
        Self::create_for(bytes / EXTENT + SPARE_EXTENTS)
    }

    pub(crate) fn create_for(extents: usize) -> io::Result<Self> {
        let extents = extents.min(EXTENTS_MAX);
        let shared = Shared::create(NAME, data_at(extents) + extents * EXTENT)?;
        let vault = Self::of(shared, extents);
        let head = vault.0.shared.words(0, 3);
        head[1].store(VERSION, Release);
        head[2].store(extents as u64, Release);
        head[0].store(MARK, Release);
        Ok(vault)
    }

    /// Memory that was found.
    ///
    /// # Errors
    /// As [`Foreign`] says.
    pub fn open(fd: &OwnedFd) -> Result<Self, Foreign> {
        let shared = Shared::open(fd).map_err(|error| match error.kind() {
            io::ErrorKind::InvalidData => Foreign::Unknown,
            io::ErrorKind::PermissionDenied => Foreign::Others,
            _ => Foreign::System(error),
        })?;
        if shared.len() < HEAD_BYTES {
            return Err(Foreign::Unknown);
        }
        let head = shared.words(0, 3);
        let [mark, version, extents] = [0, 1, 2].map(|at: usize| head[at].load(Acquire));
        if mark != MARK {
            return Err(Foreign::Unknown);
        }
        if version != VERSION {
            return Err(Foreign::Version(version));
        }
        let extents = usize::try_from(extents).unwrap_or(0);
        if !(FIXED..=EXTENTS_MAX).contains(&extents) || shared.len() != data_at(extents) + extents * EXTENT {
            return Err(Foreign::Unknown);
        }
        Ok(Self::of(shared, extents))
    }

    fn of(shared: Shared, extents: usize) -> Self {
        Self(Arc::new(Inner { shared, extents, data: data_at(extents), hint: AtomicUsize::new(FIXED) }))
    }

    /// What agents keep: the file's name, by which its owner, and nobody else, can open it ([`Vault::open`]).
    #[must_use]
    pub fn name_only(&self) -> BorrowedFd<'_> {
        self.0.shared.name_only()
    }

    /// The user whose pager made it.
    ///
    /// # Errors
    /// When the kernel does not say.
    pub fn owner(&self) -> io::Result<u32> {
        self.0.shared.owner()
    }

    /// The right to take it over, which one at a time has: until it is dropped, or the process ends. None if another has it.
    ///
    /// # Errors
    /// When the kernel gives no descriptor.
    pub fn claim(&self) -> io::Result<Option<Claim>> {
        let file = self.0.shared.opened_anew()?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Claim { locked: file })),
            Err(Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// What only the pager writes, and knows the meaning of: [`PRIVATE_WORDS`].
    #[must_use]
    pub fn private(&self) -> &'static [AtomicU64] {
        self.0.shared.words(PRIVATE_AT, PRIVATE_WORDS)
    }

    /// The pages of the buffers, for one owner.
    #[must_use]
    pub fn buffers(&self) -> Vec<Buffer> {
        (0..BUFFERS).map(|at| Buffer(self.0.shared.area(self.0.data + at * PAGE_BYTES, PAGE_BYTES))).collect()
    }

    /// What the core is given of it.
    #[must_use]
    pub fn lasting(&self) -> Lasting {
        let book = self.0.shared.words(self.0.data + BUFFER_EXTENTS * EXTENT, BOOK_EXTENTS * EXTENT / 8);
        let kept = (FIXED..self.0.extents).filter(|&extent| self.kind(extent) == SHEET_EXTENT);
        let sheets = kept.flat_map(|extent| (0..SHEETS).map(move |nth| (extent, nth)));
        let sheets = sheets.map(|(extent, nth)| self.sheet(extent, nth)).collect();
        let (vault, mut extent, mut nth) = (self.clone(), 0, SHEETS);
        let more = move || {
            if nth == SHEETS {
                (extent, nth) = (vault.take(SHEET_EXTENT)?, 0);
            }
            nth += 1;
            Some(vault.sheet(extent, nth - 1))
        };
        Lasting { book, sheets, more: Box::new(more) }
    }

    fn sheet(&self, extent: usize, nth: usize) -> Sheet {
        let start = self.start(extent);
        let number = &self.0.shared.words(start, SHEETS)[nth];
        let entries = self.0.shared.words(start + (nth + 1) * PAGE_BYTES, CHUNK_PAGES);
        Sheet { number, entries: entries.try_into().expect("a page of words") }
    }

    pub(crate) fn set_secrets(&self, secrets: impl Iterator<Item = [u8; SECRET_BYTES]>) {
        for (nth, secret) in secrets.enumerate() {
            let (bytes, _) = secret.as_chunks::<8>();
            let words = self.0.shared.words(SECRET_AT + nth * SECRET_BYTES, bytes.len());
            words.iter().zip(bytes).for_each(|(word, bytes)| word.store(u64::from_le_bytes(*bytes), Release));
        }
    }

    pub(crate) fn secret(&self, nth: usize) -> [u8; SECRET_BYTES] {
        let words = self.0.shared.words(SECRET_AT + nth * SECRET_BYTES, SECRET_BYTES / 8);
        let mut secret = [0; SECRET_BYTES];
        for (bytes, word) in secret.as_chunks_mut::<8>().0.iter_mut().zip(words) {
            *bytes = word.load(Acquire).to_le_bytes();
        }
        secret
    }

    /// Where a pool on other hosts writes down its servers: what was found, or zeros. None when there is no room.
    pub(crate) fn notes(&self) -> Option<&'static [AtomicU64]> {
        let mut kept = FIXED..self.0.extents;
        let extent = kept.find(|&extent| self.kind(extent) == NOTES_EXTENT).or_else(|| self.take(NOTES_EXTENT))?;
        Some(self.0.shared.words(self.start(extent), EXTENT / 8))
    }

    /// One more segment, of zeros and without a number.
    pub(crate) fn take_segment(&self) -> Option<Extent> {
        self.take(SEGMENT_EXTENT).map(|extent| self.extent(extent))
    }

    /// Segments that were found. Those without numbers are given back.
    pub(crate) fn segments(&self) -> Vec<Extent> {
        let kept = (FIXED..self.0.extents).filter(|&extent| self.kind(extent) == SEGMENT_EXTENT);
        kept.map(|extent| self.extent(extent)).filter(|extent| extent.number().is_some()).collect()
    }

    fn extent(&self, at: usize) -> Extent {
        Extent { vault: self.clone(), at, area: self.0.shared.area(self.start(at), EXTENT) }
    }

    fn start(&self, extent: usize) -> usize {
        self.0.data + extent * EXTENT
    }

    fn record(&self, extent: usize) -> &'static [AtomicU64] {
        self.0.shared.words(HEAD_BYTES + extent * RECORD_WORDS * 8, RECORD_WORDS)
    }

    fn kind(&self, extent: usize) -> u64 {
        self.record(extent)[0].load(Acquire) & KIND
    }

    /// Takes a free extent, which is all zeros.
    fn take(&self, what: u64) -> Option<usize> {
        let from = self.0.hint.load(Relaxed);
        let found = (from..self.0.extents)
            .chain(FIXED..from)
            .find(|&extent| self.record(extent)[0].compare_exchange(FREE, what, AcqRel, Relaxed).is_ok())?;
        self.0.hint.store(found + 1, Relaxed);
        Some(found)
    }

    fn give_back(&self, extent: usize) {
        // What cannot be cleared stays taken.
        if self.0.shared.clear(self.start(extent), EXTENT).is_ok() {
            self.record(extent)[1..].iter().for_each(|word| word.store(0, Release));
            self.record(extent)[0].store(FREE, Release);
            self.0.hint.fetch_min(extent, Relaxed);
        }
    }
}

fn data_at(extents: usize) -> usize {
    (HEAD_BYTES + extents * RECORD_WORDS * 8).next_multiple_of(EXTENT)
}

/// A segment of the pool.
pub(crate) struct Extent {
    vault: Vault,
    at: usize,
    area: Area,
}

impl Extent {
    pub(crate) fn area(&self) -> &Area {
        &self.area
    }

    /// Which segment it is; none if it is in no use.
    pub(crate) fn number(&self) -> Option<u32> {
        let number = self.vault.record(self.at)[1].load(Acquire).checked_sub(1)?;
        u32::try_from(number).ok()
    }

    pub(crate) fn set_number(&self, number: Option<u32>) {
        self.vault.record(self.at)[1].store(number.map_or(0, |number| u64::from(number) + 1), Release);
    }

    /// The class of a span, as it was last noted.
    pub(crate) fn class(&self, span: usize) -> u8 {
        self.vault.record(self.at)[2 + span / 8].load(Acquire).to_le_bytes()[span % 8]
    }

    pub(crate) fn note_class(&self, span: usize, class: u8) {
        let word = &self.vault.record(self.at)[2 + span / 8];
        let mut classes = word.load(Relaxed).to_le_bytes();
        classes[span % 8] = class;
        word.store(u64::from_le_bytes(classes), Release);
    }
}

impl Drop for Extent {
    fn drop(&mut self) {
        self.vault.give_back(self.at);
    }
}

/// The page of one buffer.
pub struct Buffer(Area);

impl Buffer {
    /// The page.
    ///
    /// # Panics
    /// Never: a buffer is a page.
    #[must_use]
    pub fn page(&self) -> &Page {
        self.0.bytes().try_into().expect("a page")
    }

    /// The page, to be written.
    ///
    /// # Panics
    /// Never: a buffer is a page.
    pub fn page_mut(&mut self) -> &mut Page {
        self.0.bytes_mut().try_into().expect("a page")
    }
}

#[cfg(test)]
mod tests;

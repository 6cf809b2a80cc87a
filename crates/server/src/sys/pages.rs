//! Pages in one arena, counted.
//!
//! A page is *blank* (owned by the one who has the [`Blank`]; only then may its bytes change) or *published*, with a
//! count of references ([`Held`]) and of pins ([`Pin`]). The bytes of a published page never change. So they are read
//! without a lock, and sent to sockets from where they lie. The count that falls to nothing turns the page blank again,
//! in the hands of the one who let go last.
//!
//! [`Blank`], [`Held`] and [`Pin`] are neither copied nor dropped silently in earnest: one that is forgotten leaks its page,
//! nothing worse. They belong to the [`Pages`] that they came from.

#![expect(clippy::needless_pass_by_value, reason = "handing a page over is what ends the right to it")]

use std::io;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use spillway_core::{PAGE_BYTES, PAGE_BYTES_U64};

use super::grains::{GRAIN_BYTES, Grains, Loose, WHOLE, grains_of};
use super::mapping::Mapping;
use super::stream;

/// One reference in [`Meta::counts`].
const REF: u64 = 1;
const REF_MASK: u64 = 0xffff_ffff;
/// One pin.
const PIN: u64 = 1 << 32;
const PIN_MASK: u64 = 0x7fff_ffff << 32;
/// The bytes are not in the arena.
const AWAY: u64 = 1 << 63;
/// References at which identical pages are stored again rather than shared.
const REFS_MAX: u64 = 1 << 31;

/// What tells pages apart before their bytes do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    /// The server's own hash of the page, under a key that nobody else has; zero where only one tenant may share it.
    pub(crate) hash: u64,
    /// What the client says is the checksum. Believed by nobody but that client.
    pub(crate) checksum: u64,
    /// Who may share it.
    pub(crate) scope: u32,
}

/// What is known of a page. All zeros is a page that was never used.
#[repr(C)]
struct Meta {
    /// References, pins, and [`AWAY`].
    counts: AtomicU64,
    checksum: AtomicU64,
    hash: AtomicU64,
    /// Who may share it.
    scope: AtomicU32,
    /// Its first grain in the arena, or its place outside while it is away.
    place: AtomicU32,
    /// Bytes that are stored for it; while it is blank, a number of bytes that takes as many grains.
    stored_bytes: AtomicU32,
    /// Whether it was got since the clock came by.
    used: AtomicU32,
}

/// Bytes that a page takes beside its content.
pub(crate) const META_BYTES: u64 = size_of::<Meta>() as u64;
const _: () = assert!(META_BYTES == 40);

/// A page that nobody else knows: its bytes may be written.
#[derive(Debug)]
pub(crate) struct Blank(NonZeroU32);

/// A page's number without a place in the arena.
#[derive(Debug)]
pub(crate) struct Bare(NonZeroU32);

/// One reference to a published page.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Held(NonZeroU32);

/// Keeps a published page's bytes in the arena.
#[derive(Debug)]
pub(crate) struct Pin(NonZeroU32);

/// A page whose last reference and pin are gone.
#[derive(Debug)]
pub(crate) enum Dead {
    /// With its place in the arena.
    Here(Blank),
    /// Its bytes were elsewhere, at this place.
    Away(Bare, u32),
}

impl Blank {
    /// The page's number.
    pub(crate) fn number(&self) -> NonZeroU32 {
        self.0
    }
}

impl Held {
    /// The page's number: a hint that may outlive the reference.
    pub(crate) fn number(&self) -> NonZeroU32 {
        self.0
    }
}

impl Dead {
    /// The page's number.
    pub(crate) fn number(&self) -> NonZeroU32 {
        match self {
            Self::Here(Blank(number)) | Self::Away(Bare(number), _) => *number,
        }
    }
}

/// All pages.
pub(crate) struct Pages {
    arena: Mapping,
    metas: Mapping,
    /// Numbers are 1 to this.
    numbers: u32,
    numbers_used: AtomicU32,
}

impl Pages {
    /// An arena of so many bytes, its grains, and numbers for as many pages as it may hold beside those that are `away`.
    pub(crate) fn new(arena_bytes: u64, numbers: u64, away: u32) -> io::Result<(Self, Grains)> {
        let too_much = || io::Error::from(io::ErrorKind::OutOfMemory);
        let pages = u32::try_from(arena_bytes / PAGE_BYTES_U64).ok().filter(|pages| *pages < u32::MAX / WHOLE);
        let pages = pages.ok_or_else(too_much)?;
        let numbers = u32::try_from(numbers + u64::from(away)).ok().filter(|sum| *sum < u32::MAX);
        let numbers = numbers.ok_or_else(too_much)?;
        let arena = Mapping::new(pages as usize * PAGE_BYTES)?;
        let metas = Mapping::new((numbers as usize + 1) * size_of::<Meta>())?;
        Ok((Self { arena, metas, numbers, numbers_used: AtomicU32::new(0) }, Grains::new(pages)))
    }

    /// A number that was never used.
    pub(crate) fn fresh_number(&self) -> Option<Bare> {
        let used = count_up(&self.numbers_used, self.numbers)?;
        NonZeroU32::new(used + 1).map(Bare)
    }

    /// Gives a number a place.
    pub(crate) fn join(&self, bare: Bare, loose: Loose) -> Blank {
        let meta = self.meta(bare.0);
        meta.place.store(loose.first, Ordering::Relaxed);
        meta.stored_bytes.store(bytes_of(loose.grains), Ordering::Relaxed);
        meta.counts.store(0, Ordering::Relaxed);
        Blank(bare.0)
    }

    /// Takes a number and its place apart.
    pub(crate) fn part(&self, blank: Blank) -> (Bare, Loose) {
        (Bare(blank.0), self.run(blank.0))
    }

    /// Takes from the end of a blank page what is more than so many grains.
    pub(crate) fn cut(&self, blank: &mut Blank, grains: u32) -> Option<Loose> {
        let Loose { first, grains: had } = self.run(blank.0);
        self.meta(blank.0).stored_bytes.store(bytes_of(grains.min(had)), Ordering::Relaxed);
        (grains < had).then(|| Loose { first: first + grains, grains: had - grains })
    }

    /// Gives the memory of a page that was closed back to the kernel. It reads as zeros then.
    pub(crate) fn give_up(&self, loose: &mut Loose) {
        let (start, bytes) = (self.grains_at(loose.first, loose.grains), bytes_of(loose.grains) as usize);
        // SAFETY: a loose run belongs to no page, and to its holder alone: nobody misses its bytes.
        let given = unsafe { libc::madvise(start.as_ptr().cast(), bytes, libc::MADV_DONTNEED) };
        if given != 0 {
            self.wipe_place(loose);
        }
    }

    /// The highest number that was ever used.
    pub(crate) fn numbers_used(&self) -> u32 {
        self.numbers_used.load(Ordering::Relaxed)
    }

    /// Writes the bytes to be stored, which must take the grains that the page has.
    pub(crate) fn fill(&self, blank: &mut Blank, bytes: &[u8]) {
        let run = self.run(blank.0);
        assert_eq!(grains_of(bytes.len()), run.grains, "as many grains as were asked for");
        assert!(bytes.len() <= PAGE_BYTES, "a page at most");
        let start = self.grains_at(run.first, run.grains);
        // SAFETY: a blank page has one owner, who lends it exclusively here; published pages have other grains. There is
        // room for the bytes, as was just checked, and what is borrowed from others is no part of the arena that is written.
        // Grains are aligned to their size.
        unsafe {
            match bytes.try_into() {
                Ok(page) => stream::copy(page, start),
                Err(_) => start.copy_from_nonoverlapping(std::ptr::NonNull::from(bytes).cast(), bytes.len()),
            }
        }
        let stored_bytes = u32::try_from(bytes.len()).unwrap_or(bytes_of(WHOLE));
        self.meta(blank.0).stored_bytes.store(stored_bytes, Ordering::Relaxed);
    }

    /// Makes a blank page all zeros.
    pub(crate) fn wipe(&self, blank: &mut Blank) {
        self.wipe_place(&mut self.run(blank.0));
    }

    /// The bytes of a run that belongs to no page.
    #[cfg(test)]
    pub(crate) fn loose_bytes<'a>(&'a self, loose: &'a mut Loose) -> &'a [u8] {
        let start = self.grains_at(loose.first, loose.grains);
        // SAFETY: a loose run belongs to its holder alone, who lends it here.
        unsafe { std::slice::from_raw_parts(start.as_ptr(), bytes_of(loose.grains) as usize) }
    }

    /// Publishes a page, with one reference.
    pub(crate) fn publish(&self, blank: Blank, identity: Identity) -> Held {
        let meta = self.meta(blank.0);
        meta.hash.store(identity.hash, Ordering::Relaxed);
        meta.checksum.store(identity.checksum, Ordering::Relaxed);
        meta.scope.store(identity.scope, Ordering::Relaxed);
        meta.used.store(1, Ordering::Relaxed);
        meta.counts.store(REF, Ordering::Release);
        Held(blank.0)
    }

    /// One more reference to the page of this number, if it is published. It may be another page than the one that was
    /// meant: compare.
    pub(crate) fn try_hold(&self, number: NonZeroU32) -> Option<Held> {
        let one_more = |counts: u64| {
            let refs = counts & REF_MASK;
            (refs > 0 && refs < REFS_MAX).then_some(counts + REF)
        };
        let counts = &self.meta(number).counts;
        counts.fetch_update(Ordering::Acquire, Ordering::Relaxed, one_more).ok().map(|_| Held(number))
    }

    /// Lets a reference go. What died with it, if it was the last.
    pub(crate) fn release(&self, held: Held) -> Option<Dead> {
        self.let_go(held.0, REF)
    }

    /// Pins the page; `None` when its bytes are away.
    pub(crate) fn pin(&self, held: &Held) -> Option<Pin> {
        let meta = self.meta(held.0);
        let before = meta.counts.fetch_add(PIN, Ordering::Acquire);
        assert!(before & PIN_MASK != PIN_MASK, "pins are limited by the windows of all connections");
        if before & AWAY != 0 {
            // The reference that we borrow keeps this from being the last.
            meta.counts.fetch_sub(PIN, Ordering::Release);
            return None;
        }
        Some(Pin(held.0))
    }

    /// Lets a pin go. What died with it, if all references had gone before.
    pub(crate) fn unpin(&self, pin: Pin) -> Option<Dead> {
        self.let_go(pin.0, PIN)
    }

    fn let_go(&self, number: NonZeroU32, what: u64) -> Option<Dead> {
        let meta = self.meta(number);
        let left = meta.counts.fetch_sub(what, Ordering::AcqRel) - what;
        if left & !AWAY != 0 {
            return None;
        }
        Some(match left & AWAY {
            0 => Dead::Here(Blank(number)),
            _ => {
                meta.counts.store(0, Ordering::Relaxed);
                Dead::Away(Bare(number), meta.place.load(Ordering::Relaxed))
            }
        })
    }

    /// Takes the page of the only reference back, if nobody else uses it: the reference is then void until the page is
    /// published again.
    pub(crate) fn try_own(&self, held: &Held) -> Option<Blank> {
        let counts = &self.meta(held.0).counts;
        counts.compare_exchange(REF, 0, Ordering::Acquire, Ordering::Relaxed).ok().map(|_| Blank(held.0))
    }

    /// What is stored of a pinned page.
    pub(crate) fn bytes<'a>(&'a self, pin: &'a Pin) -> &'a [u8] {
        let (run, len) = (self.run(pin.0), self.meta(pin.0).stored_bytes.load(Ordering::Relaxed) as usize);
        // SAFETY: a pinned page is published and in the arena. Its bytes were written before it was published, and are
        // not written again before its counts have fallen to nothing, which this pin prevents. They are no more than its
        // grains hold, which `grains_of` is made of.
        unsafe { std::slice::from_raw_parts(self.grains_at(run.first, run.grains).as_ptr(), len) }
    }

    /// How many bytes are stored of a page, wherever it is.
    pub(crate) fn stored_bytes(&self, held: &Held) -> usize {
        self.meta(held.0).stored_bytes.load(Ordering::Relaxed) as usize
    }

    /// How many grains a page has, or had before it went away.
    pub(crate) fn grains(&self, number: NonZeroU32) -> u32 {
        grains_of(self.meta(number).stored_bytes.load(Ordering::Relaxed) as usize)
    }

    /// The checksum that the page was published with.
    pub(crate) fn checksum(&self, number: NonZeroU32) -> u64 {
        self.meta(number).checksum.load(Ordering::Relaxed)
    }

    /// What the page was published with.
    pub(crate) fn identity(&self, number: NonZeroU32) -> Identity {
        let meta = self.meta(number);
        Identity {
            hash: meta.hash.load(Ordering::Relaxed),
            checksum: meta.checksum.load(Ordering::Relaxed),
            scope: meta.scope.load(Ordering::Relaxed),
        }
    }

    /// Notes that the page was got.
    pub(crate) fn touch(&self, held: &Held) {
        let used = &self.meta(held.0).used;
        // Most are marked already, and a line that is only read stays in every CPU's cache.
        if used.load(Ordering::Relaxed) == 0 {
            used.store(1, Ordering::Relaxed);
        }
    }

    /// Whether the page was got since the last time that this was asked.
    pub(crate) fn was_touched(&self, number: NonZeroU32) -> bool {
        self.meta(number).used.swap(0, Ordering::Relaxed) != 0
    }

    /// Marks a page whose bytes were copied to `elsewhere` as away, unless someone else has it pinned: then the pin is
    /// given back.
    pub(crate) fn send_away(&self, pin: Pin, elsewhere: u32) -> Result<Loose, Pin> {
        let meta = self.meta(pin.0);
        let alone = |counts: u64| (counts & PIN_MASK == PIN && counts & REF_MASK != 0).then_some(counts | AWAY);
        if meta.counts.fetch_update(Ordering::AcqRel, Ordering::Relaxed, alone).is_err() {
            return Err(pin);
        }
        // Nobody looks at the place of a page that is away but the thread that does this, and whoever lets it go: our
        // pin makes sure that this happens after the store.
        let first = meta.place.swap(elsewhere, Ordering::AcqRel);
        Ok(Loose { first, grains: self.grains(pin.0) })
    }

    /// Where the bytes of a page that is away are.
    pub(crate) fn elsewhere(&self, held: &Held) -> Option<u32> {
        let meta = self.meta(held.0);
        (meta.counts.load(Ordering::Acquire) & AWAY != 0).then(|| meta.place.load(Ordering::Acquire))
    }

    /// Lets the pin of a page go that was just sent away.
    pub(crate) fn unpin_away(&self, number: NonZeroU32) -> Option<Dead> {
        self.let_go(number, PIN)
    }

    /// Makes a run all zeros that has no page.
    pub(crate) fn wipe_place(&self, loose: &mut Loose) {
        // SAFETY: a loose run belongs to no page, and to its holder alone.
        unsafe { self.grains_at(loose.first, loose.grains).write_bytes(0, bytes_of(loose.grains) as usize) };
    }

    /// The grains of a page that is in the arena.
    fn run(&self, number: NonZeroU32) -> Loose {
        Loose { first: self.meta(number).place.load(Ordering::Relaxed), grains: self.grains(number) }
    }

    fn grains_at(&self, first: u32, grains: u32) -> std::ptr::NonNull<u8> {
        let offset = first as usize * GRAIN_BYTES as usize;
        assert!(offset + bytes_of(grains) as usize <= self.arena.bytes(), "grains of another arena");
        // SAFETY: within the mapping, as was just checked.
        unsafe { self.arena.start().add(offset) }
    }

    fn meta(&self, number: NonZeroU32) -> &Meta {
        assert!(number.get() <= self.numbers, "a page of another arena");
        // SAFETY: within the mapping, which has room for all numbers and is aligned to a page; zeros are a valid Meta,
        // and its fields are atomics.
        unsafe { self.metas.start().cast::<Meta>().add(number.get() as usize).as_ref() }
    }
}

/// Bytes in so many grains.
fn bytes_of(grains: u32) -> u32 {
    grains * GRAIN_BYTES
}

/// The next number below `max`.
fn count_up(counter: &AtomicU32, max: u32) -> Option<u32> {
    counter.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| (used < max).then_some(used + 1)).ok()
}

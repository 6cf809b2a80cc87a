//! The book: which regions there are, written so that it outlives the pager ([`crate::lasting`]).
//!
//! It is a list of records. What belongs together is appended behind the end and becomes valid with one store of the new
//! length. When the list is several times as long as it need be, all that counts is written into the other half, and the same
//! store changes halves. So a reader finds a change whole, or not at all, and memory that nobody needs stays untouched.
//!
//! An event of a target is applied once: its number is in the same entry as what it changed.

use std::error::Error;
use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Release};

use crate::lasting::Lasting;
use crate::mappings::Vacated;
use crate::regions::{Change, Region, Regions};
use crate::units::{Address, PAGE_BYTES_U64, PageIndex, Span, TargetId};

/// Words that a book needs at least.
pub const WORDS_MIN: usize = HEAD_WORDS + 2 * 64 * RECORD_WORDS;

/// Words before the two halves: the end, whether the book is void, and room.
const HEAD_WORDS: usize = 8;
const RECORD_WORDS: usize = 4;
/// The list may have so many records for each that it had when it was last written as a whole,
const RECORDS_FOR_EACH: usize = 4;
/// and so many besides: 128 KiB.
const RECORDS_BESIDES: usize = 4096;
/// In the word that tells the end, in records: it is that of the second half.
const SECOND: u64 = 1 << 63;
/// Targets that there ever were, at most.
const TARGETS_MAX: u64 = 1 << 20;
/// Beyond every address that a process can have.
const ADDRESSES_END: u64 = 1 << 57;
/// Beyond every page index that a pager gets to, and so small that bytes can be counted.
pub(crate) const INDICES_END: u64 = 1 << 50;

type Record = [u64; RECORD_WORDS];

/// What a record says. The target, where it concerns one, is in the upper half of the same word.
const TARGETS: u64 = 1;
const APPLIED: u64 = 2;
const PUT: u64 = 3;
const TAKE: u64 = 4;
const VACATED_NONE: u64 = 5;
const VACATED: u64 = 6;
const RETAKEN: u64 = 7;
const PENDING_NONE: u64 = 8;
const PENDING: u64 = 9;

/// Why a book is void, as bits of its second word.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Void {
    /// There is no room for all regions.
    Regions = 1,
    /// There is no room for all entries.
    Entries = 2,
    /// The driver has no room for what it must tell of a target.
    Targets = 4,
}

/// What is beside the regions, and changes with them.
#[derive(Debug, Default)]
pub(crate) struct Margin {
    pub(crate) vacated: Vec<Vacated>,
    /// Said to be unmapped, and not believed yet.
    pub(crate) pending: Vec<(TargetId, Span)>,
    /// The event that is being applied, or was last.
    pub(crate) applied: u64,
    pub(crate) targets: u32,
}

/// See the module's documentation.
pub(crate) struct Book {
    words: &'static [AtomicU64],
    second: bool,
    /// Records in this half.
    len: usize,
    /// And how many there were when all that counted was written.
    rewritten: usize,
    /// What is to become valid together.
    new: Vec<Record>,
    /// There was something in the margin that the next entry must take back.
    had_vacated: bool,
    had_pending: bool,
}

/// Why a book cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unreadable {
    /// It was given up by its pager: there was no room in it.
    Void,
    /// This record, or the end, makes no sense.
    Damaged(usize),
}

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Void => f.write_str("it had no room for all regions"),
            Self::Damaged(at) => write!(f, "record {at} makes no sense"),
        }
    }
}

impl Error for Unreadable {}

/// Whether the driver has had room for what it must tell of each target, so that one of which nothing is told is none.
pub fn tells_of_all_targets(lasting: &Lasting) -> bool {
    lasting.book[1].load(Acquire) & Void::Targets as u64 == 0
}

impl Book {
    /// An empty one.
    pub(crate) fn new(words: &'static [AtomicU64]) -> Self {
        assert!(words.len() >= WORDS_MIN, "the driver gives enough");
        words[1].store(0, Release);
        words[0].store(0, Release);
        Self { words, second: false, len: 0, rewritten: 0, new: Vec::new(), had_vacated: false, had_pending: false }
    }

    fn half_records(&self) -> usize {
        (self.words.len() - HEAD_WORDS) / 2 / RECORD_WORDS
    }

    /// Whether nobody could read it.
    pub(crate) fn is_void(&self) -> bool {
        self.words[1].load(Acquire) != 0
    }

    /// Makes it void for a reason, or takes that reason back.
    pub(crate) fn void(&self, why: Void, holds: bool) {
        let before = self.words[1].load(Acquire);
        self.words[1].store(if holds { before | why as u64 } else { before & !(why as u64) }, Release);
    }

    /// Everything that has changed becomes valid.
    pub(crate) fn write(&mut self, regions: &mut Regions, margin: &Margin) {
        let mut new = std::mem::take(&mut self.new);
        new.extend(regions.changes().map(|change| match change {
            Change::Put(region) => put(&region),
            Change::Take(first) => [TAKE, first.0, 0, 0],
        }));
        self.write_margin(margin, &mut new);
        let most = RECORDS_FOR_EACH * self.rewritten + RECORDS_BESIDES;
        if self.len + new.len() > most.min(self.half_records()) {
            // All that counts, into the other half.
            new.clear();
            new.extend(regions.all().map(|region| put(&region)));
            self.write_margin(margin, &mut new);
            (self.second, self.len, self.rewritten) = (!self.second, 0, new.len());
            let fits = 2 * new.len() <= self.half_records();
            self.void(Void::Regions, !fits);
            if !fits {
                // Nothing is written down from now on but what changes, until all of it is tried again, soon.
                new.clear();
                self.rewritten = 0;
            }
        }
        let from = self.half_start(self.second) + self.len * RECORD_WORDS;
        for (word, value) in self.words[from..].iter().zip(new.as_flattened()) {
            word.store(*value, Release);
        }
        self.len += new.len();
        self.words[0].store(self.len as u64 | if self.second { SECOND } else { 0 }, Release);
        new.clear();
        self.new = new;
    }

    fn write_margin(&mut self, margin: &Margin, new: &mut Vec<Record>) {
        new.push([TARGETS, margin.targets.into(), 0, 0]);
        new.push([APPLIED, margin.applied, 0, 0]);
        if std::mem::replace(&mut self.had_vacated, !margin.vacated.is_empty()) {
            new.push([VACATED_NONE, 0, 0, 0]);
        }
        for Vacated { target, span, retaken } in &margin.vacated {
            new.push(about(if *retaken { RETAKEN } else { VACATED }, *target, *span, 0));
        }
        if std::mem::replace(&mut self.had_pending, !margin.pending.is_empty()) {
            new.push([PENDING_NONE, 0, 0, 0]);
        }
        new.extend(margin.pending.iter().map(|(target, span)| about(PENDING, *target, *span, 0)));
    }

    fn half_start(&self, second: bool) -> usize {
        HEAD_WORDS + if second { self.half_records() * RECORD_WORDS } else { 0 }
    }

    /// Reads a book that someone else has left behind, and believes nothing in it.
    pub(crate) fn read(words: &'static [AtomicU64]) -> Result<(Self, Regions, Margin), Unreadable> {
        if words.len() < WORDS_MIN {
            return Err(Unreadable::Damaged(0));
        }
        let mut book =
            Self { words, second: false, len: 0, rewritten: 0, new: Vec::new(), had_vacated: true, had_pending: true };
        let end = words[0].load(Acquire);
        let len = usize::try_from(end & !SECOND).unwrap_or(usize::MAX);
        if words[1].load(Acquire) != 0 {
            return Err(Unreadable::Void);
        }
        if len > book.half_records() {
            return Err(Unreadable::Damaged(len));
        }
        (book.second, book.len) = (end & SECOND != 0, len);
        let (mut regions, mut margin) = (Regions::default(), Margin::default());
        let start = book.half_start(book.second);
        let (records, _) = words[start..start + len * RECORD_WORDS].as_chunks::<RECORD_WORDS>();
        for (at, record) in records.iter().enumerate() {
            let record = [0, 1, 2, 3].map(|word: usize| record[word].load(Acquire));
            understand(record, &mut regions, &mut margin).ok_or(Unreadable::Damaged(at))?;
        }
        if regions.all().any(|region| region.target.0 >= margin.targets) {
            return Err(Unreadable::Damaged(len));
        }
        regions.record();
        Ok((book, regions, margin))
    }
}

fn put(region: &Region) -> Record {
    about(PUT, region.target, region.span, region.first.0)
}

fn about(what: u64, target: TargetId, span: Span, last: u64) -> Record {
    [what | u64::from(target.0) << 32, span.start.0, span.end.0, last]
}

/// Carries out what a record says; none if it makes no sense.
fn understand([what, a, b, c]: Record, regions: &mut Regions, margin: &mut Margin) -> Option<()> {
    let target = TargetId(u32::try_from(what >> 32).ok()?);
    let span = || {
        let is_span = a < b && b <= ADDRESSES_END && (a | b).is_multiple_of(PAGE_BYTES_U64);
        is_span.then_some(Span { start: Address(a), end: Address(b) })
    };
    let is_known = target.0 < margin.targets;
    match what & u64::from(u32::MAX) {
        TARGETS if a <= TARGETS_MAX => margin.targets = u32::try_from(a).ok()?,
        APPLIED => margin.applied = a,
        // The last entry of a half tells how many targets there are, and comes behind the regions.
        PUT => {
            if c >= INDICES_END || u64::from(target.0) >= TARGETS_MAX {
                return None;
            }
            return regions.put_back(Region { target, span: span()?, first: PageIndex(c) });
        }
        TAKE => return regions.take_back(PageIndex(a)),
        VACATED_NONE => margin.vacated.clear(),
        kind @ (VACATED | RETAKEN) if is_known => {
            margin.vacated.push(Vacated { target, span: span()?, retaken: kind == RETAKEN });
        }
        PENDING_NONE => margin.pending.clear(),
        PENDING if is_known => margin.pending.push((target, span()?)),
        _ => return None,
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A fork doubles what there is, for a moment.
    #[test]
    fn what_had_no_room_for_a_while_is_readable_again() {
        let words: &[AtomicU64] = Vec::leak((0..WORDS_MIN).map(|_| AtomicU64::new(0)).collect());
        let (mut book, mut regions) = (Book::new(words), Regions::default());
        let margin = Margin { targets: 1, ..Margin::default() };
        regions.record();
        let span = |nth: u64| Span::of_pages(Address((nth + 1) << 20), 16);
        for nth in 0..200 {
            regions.add(TargetId(0), span(nth));
            book.write(&mut regions, &margin);
        }
        assert!(book.is_void() && Book::read(words).is_err_and(|why| why == Unreadable::Void));
        for nth in 4..200 {
            regions.remove(TargetId(0), span(nth));
            book.write(&mut regions, &margin);
        }
        assert!(!book.is_void());
        let (_, read, _) = Book::read(words).expect("a good book");
        assert_eq!(read.all().collect::<Vec<_>>(), regions.all().collect::<Vec<_>>());
        book.void(Void::Targets, true);
        book.void(Void::Entries, true);
        book.void(Void::Targets, false);
        assert!(book.is_void(), "each for itself");
    }

    #[test]
    fn what_came_and_went_takes_no_memory() {
        let words: &[AtomicU64] = Vec::leak((0..1 << 20).map(|_| AtomicU64::new(0)).collect());
        let (mut book, mut regions) = (Book::new(words), Regions::default());
        let margin = Margin { targets: 1, ..Margin::default() };
        regions.record();
        let target = TargetId(0);
        let span = |nth: u64| Span::of_pages(Address((nth + 1) << 20), 16);
        regions.add(target, span(0));
        book.write(&mut regions, &margin);
        for nth in 1..50_000 {
            regions.add(target, span(nth));
            book.write(&mut regions, &margin);
            regions.remove(target, span(nth));
            book.write(&mut regions, &margin);
        }
        let touched = words.iter().filter(|word| word.load(Acquire) != 0).count();
        assert!(touched <= 3 * RECORDS_BESIDES * RECORD_WORDS, "{touched} words for one region");
        let (_, read, _) = Book::read(words).expect("a good book");
        assert_eq!(read.all().collect::<Vec<_>>(), regions.all().collect::<Vec<_>>());
    }
}

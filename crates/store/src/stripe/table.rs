//! Pages and rows: what is kept of them for as long as they are stored.
//!
//! A page has a word, half of which is its place; a row has half a word for each chunk, and one for itself. With four data chunks
//! and one of parity that is 14 bytes a page, of which the place and its share of a row's chunks are 9; checksums are the members'
//! (16 bytes a chunk).
//!
//! Both may outlive this process (`words.rs`). What another believes of them, as each is one store, and in which order (`inherit.rs`):
//! - A page's place: set when the row there is written, cleared when nobody refers to the page.
//! - That a row is written, and how long it is: set when all its chunks are kept and named, cleared before any is freed. One of its
//!   chunks may be replaced by another that is kept, and is freed after that.

use super::words::{SEGMENT_ENTRIES, Table, halves, of_halves, segment_words};
use crate::vault::{Use, Vault};
use crate::{HANDLE_BITS, Handle};

/// Bits of a place that name the position in a row.
const POSITION_BITS: u32 = 4;
/// Data chunks that a row may have.
pub(super) const DATA_MAX: usize = 1 << POSITION_BITS;

/// Where a page is: a row, and which of its data chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) row: u32,
    pub(super) position: u8,
}

/// What a page is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Free,
    /// In a row that is being written: which fill, and which of its chunks.
    Filling(u8, u8),
    /// In a row, with the job that reads it, if any.
    Kept(Place, Option<u16>),
}

/// In the half that is the place. Without it, the page is in no row yet.
const KEPT: u32 = 1 << 31;
const REFERENCES: u32 = 0x3fff;
/// It is local as well.
const HOME: u32 = 0x4000;
const MOVING: u32 = 0x8000;
const JOB_SHIFT: u32 = 16;
const PAGE_HALVES: usize = 2;
const PAGES_MAX: usize = (1 << HANDLE_BITS) - 1;

/// All pages, by the handles that were given for them.
pub(super) struct Pages {
    table: Table,
    /// References held.
    pub(super) references: u64,
}

fn handle_of(at: u32) -> Handle {
    Handle::from_bits(at + 1).expect("as many as there are handles")
}

fn at(handle: Handle) -> u32 {
    handle.bits() - 1
}

/// What pages are kept in, where that outlives this process.
pub(super) fn use_of_pages() -> Use {
    Use::striped_pages(segment_words(PAGE_HALVES))
}

/// The same for rows of so many chunks.
pub(super) fn use_of_rows(width: usize) -> Use {
    Use::rows(segment_words(width + 1))
}

impl Pages {
    /// None; what comes is in the vault, if there is one.
    pub(super) fn new(vault: Option<&Vault>) -> Self {
        let of = vault.map(|vault| (vault, use_of_pages()));
        Self { table: Table::new(PAGE_HALVES, PAGES_MAX, of), references: 0 }
    }

    /// What another process has left, to be gone through ([`Pages::take`]).
    pub(super) fn found(vault: &Vault) -> Self {
        Self { table: Table::found(PAGE_HALVES, PAGES_MAX, (vault, use_of_pages())), references: 0 }
    }

    /// The place that was found for a page, if it had one. No one refers to it as yet; nor does anything else become of it.
    pub(super) fn take(&mut self, handle: Handle) -> Option<Place> {
        let [place, _] = self.halves(handle);
        let kept = place & KEPT != 0;
        if kept {
            self.set_halves(handle, [place, 0]);
        }
        kept.then(|| to_place(place))
    }

    /// One more reference, of those that were found.
    pub(super) fn count(&mut self, handle: Handle) {
        let [place, mut rest] = self.halves(handle);
        rest += u32::from(rest & REFERENCES != REFERENCES);
        self.set_halves(handle, [place, rest]);
        self.references += 1;
    }

    /// The place of a page that was found and that no one refers to.
    pub(super) fn unnamed(&self, handle: Handle) -> Option<Place> {
        let [place, rest] = self.halves(handle);
        (place & KEPT != 0 && rest & REFERENCES == 0).then(|| to_place(place))
    }

    /// Whether there is a page in a row behind what may be any handle.
    pub(super) fn has(&self, handle: Handle) -> bool {
        (at(handle) as usize) < self.len() && self.halves(handle)[0] & KEPT != 0
    }

    fn halves(&self, handle: Handle) -> [u32; 2] {
        halves(self.table.word(at(handle)))
    }

    fn set_halves(&mut self, handle: Handle, halves: [u32; 2]) {
        self.table.set_word(at(handle), of_halves(halves));
    }

    /// A page with one reference; its state is to be set.
    pub(super) fn insert(&mut self) -> Option<Handle> {
        let handle = handle_of(self.table.insert()?);
        self.set_halves(handle, [0, 1]);
        self.references += 1;
        Some(handle)
    }

    pub(super) fn state(&self, handle: Handle) -> State {
        let [place, rest] = self.halves(handle);
        let job = rest >> JOB_SHIFT;
        if rest & REFERENCES == 0 {
            State::Free
        } else if place & KEPT == 0 {
            let byte = |bits: u32| u8::try_from(bits & 0xff).expect("a byte");
            State::Filling(byte(job >> 8), byte(job))
        } else {
            State::Kept(to_place(place), u16::try_from(job).expect("sixteen bits").checked_sub(1))
        }
    }

    /// The state of a page that someone refers to.
    pub(super) fn held(&self, handle: Handle) -> State {
        let state = self.state(handle);
        assert!(state != State::Free, "{handle:?} was freed before");
        state
    }

    pub(super) fn set(&mut self, handle: Handle, state: State) {
        let (place, job) = match state {
            State::Filling(fill, position) => (0, u32::from(fill) << 8 | u32::from(position)),
            State::Kept(place, job) => {
                let place = place.row << POSITION_BITS | u32::from(place.position);
                (KEPT | place, job.map_or(0, |job| u32::from(job) + 1))
            }
            State::Free => unreachable!("pages are freed by their last reference"),
        };
        let [_, rest] = self.halves(handle);
        self.set_halves(handle, [place, rest & (REFERENCES | HOME | MOVING) | job << JOB_SHIFT]);
    }

    pub(super) fn set_job(&mut self, handle: Handle, job: Option<u16>) {
        if let State::Kept(place, _) = self.state(handle) {
            self.set(handle, State::Kept(place, job));
        }
    }

    pub(super) fn is_moving(&self, handle: Handle) -> bool {
        self.halves(handle)[1] & MOVING != 0
    }

    pub(super) fn set_moving(&mut self, handle: Handle, moving: bool) {
        let [place, rest] = self.halves(handle);
        self.set_halves(handle, [place, if moving { rest | MOVING } else { rest & !MOVING }]);
    }

    /// Whether it is local as well, as far as is known.
    pub(super) fn is_home(&self, handle: Handle) -> bool {
        self.halves(handle)[1] & HOME != 0
    }

    pub(super) fn set_home(&mut self, handle: Handle, home: bool) {
        let [place, rest] = self.halves(handle);
        self.set_halves(handle, [place, if home { rest | HOME } else { rest & !HOME }]);
    }

    /// The place of a page that has one reference and with which nothing is done, and whether it is local as well.
    pub(super) fn alone(&self, handle: Handle) -> Option<(Place, bool)> {
        let [place, rest] = self.halves(handle);
        let is_alone = place & KEPT != 0 && rest & (REFERENCES | MOVING) == 1 && rest >> JOB_SHIFT == 0;
        is_alone.then(|| (to_place(place), rest & HOME != 0))
    }

    /// One more reference. A count that reaches its limit keeps the page for good.
    pub(super) fn share(&mut self, handle: Handle) {
        let _ = self.held(handle);
        self.count(handle);
    }

    /// One reference less; whether it was the last. The page is then to be removed.
    pub(super) fn release(&mut self, handle: Handle) -> bool {
        let _ = self.held(handle);
        self.references -= 1;
        let [place, rest] = self.halves(handle);
        match rest & REFERENCES {
            REFERENCES => false,
            1 => true,
            _ => {
                self.set_halves(handle, [place, rest - 1]);
                false
            }
        }
    }

    /// All references less.
    pub(super) fn release_all(&mut self, handle: Handle) {
        self.references -= u64::from(self.halves(handle)[1] & REFERENCES);
    }

    pub(super) fn remove(&mut self, handle: Handle) {
        if self.halves(handle) != [0; 2] {
            self.set_halves(handle, [0; 2]);
        }
        self.table.offer(at(handle));
    }

    /// How far a sweep goes.
    pub(super) fn len(&self) -> usize {
        self.table.len()
    }

    pub(super) fn nth(&self, at: usize) -> Handle {
        handle_of(u32::try_from(at).expect("below the length"))
    }

    pub(super) fn memory_bytes(&self) -> u64 {
        self.table.memory_bytes()
    }

    pub(super) fn top_up(&mut self) -> bool {
        self.table.top_up()
    }
}

fn to_place(half: u32) -> Place {
    let bits = half & !KEPT;
    let position = u8::try_from(bits & ((1 << POSITION_BITS) - 1)).expect("few bits");
    Place { row: bits >> POSITION_BITS, position }
}

const WRITTEN: u32 = 1 << 31;
/// By position, the data chunks whose pages someone refers to.
const LIVE: u32 = 0xffff;
const BUSY: u32 = 1 << 30;
const LENGTH_SHIFT: u32 = 16;
const HOME_SHIFT: u32 = 21;
const ONE_HOME: u32 = 1 << HOME_SHIFT;
const ROWS_MAX: usize = 1 << (32 - POSITION_BITS - 1);

/// Pages of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lives {
    /// All that someone refers to.
    pub(super) all: usize,
    /// Those that are nowhere else.
    pub(super) outside: usize,
}

/// All rows.
pub(super) struct Rows {
    table: Table,
    width: usize,
    /// Written rows of which no page is outside, bit by bit: looks for them touch no more than this.
    alone: Vec<u64>,
}

const WORD_BITS: usize = u64::BITS as usize;

impl Rows {
    /// For rows of so many chunks; in the vault, if there is one.
    pub(super) fn new(width: usize, vault: Option<&Vault>) -> Self {
        let of = vault.map(|vault| (vault, use_of_rows(width)));
        Self::of(Table::new(width + 1, ROWS_MAX, of), width)
    }

    fn of(table: Table, width: usize) -> Self {
        let mut rows = Self { table, width, alone: Vec::new() };
        rows.reserve_bits();
        rows
    }

    /// Has room for the bits of what the table may come to have until the next idle moment.
    fn reserve_bits(&mut self) {
        let wanted = (self.len() + 2 * SEGMENT_ENTRIES) / WORD_BITS;
        self.alone.reserve(wanted.saturating_sub(self.alone.len()));
    }

    /// What another process has left, to be gone through ([`Rows::take`]).
    pub(super) fn found(width: usize, vault: &Vault) -> Self {
        Self::of(Table::found(width + 1, ROWS_MAX, (vault, use_of_rows(width))), width)
    }

    /// Whether a row that was found was written: it has no pages as yet. Otherwise it is free.
    pub(super) fn take(&mut self, row: u32, data: usize) -> bool {
        let length = self.length(row);
        let sound = self.is_written(row) && (1..=data).contains(&usize::from(length));
        if sound {
            self.written(row, length, 0)
        } else {
            self.remove(row)
        }
        sound
    }

    /// A page was found at a place: false if there is no such place, or another page there.
    pub(super) fn settle(&mut self, place: Place) -> bool {
        let Place { row, position } = place;
        let fits = (row as usize) < self.len() && self.is_written(row) && position < self.length(row);
        let settles = fits && self.live(row) & 1 << position == 0;
        if settles {
            self.set_word(row, self.word(row) | 1 << position);
        }
        settles
    }

    /// A row that is being written.
    pub(super) fn insert(&mut self) -> Option<u32> {
        self.table.insert()
    }

    /// A row is written: how many data chunks it has, and at which of these positions pages live.
    pub(super) fn written(&mut self, row: u32, length: u8, live: u16) {
        self.set_word(row, WRITTEN | u32::from(length) << LENGTH_SHIFT | u32::from(live));
    }

    /// Nobody finds a row any more; its chunks are to be freed.
    pub(super) fn unwrite(&mut self, row: u32) {
        self.set_word(row, 0);
    }

    pub(super) fn remove(&mut self, row: u32) {
        self.note(row, 0);
        self.table.clear(row);
        self.table.offer(row);
    }

    fn word(&self, row: u32) -> u32 {
        self.table.half(row, self.width)
    }

    fn set_word(&mut self, row: u32, word: u32) {
        self.table.set_half(row, self.width, word);
        self.note(row, word);
    }

    /// A row's own word is another now.
    fn note(&mut self, row: u32, word: u32) {
        let (at, bit) = (row as usize / WORD_BITS, 1 << (row as usize % WORD_BITS));
        if at >= self.alone.len() {
            self.alone.resize(self.len() / WORD_BITS, 0);
        }
        let alone = word & WRITTEN != 0 && lives(word).outside == 0;
        let bits = &mut self.alone[at];
        *bits = if alone { *bits | bit } else { *bits & !bit };
    }

    /// Whether it is written, and no page of it is outside.
    pub(super) fn is_alone(&self, row: u32) -> bool {
        self.alone.get(row as usize / WORD_BITS).is_some_and(|bits| bits >> (row as usize % WORD_BITS) & 1 == 1)
    }

    /// Whether it is written, and not gone.
    pub(super) fn is_written(&self, row: u32) -> bool {
        self.word(row) & WRITTEN != 0
    }

    /// Data chunks that it has; the others are zeros that no one keeps.
    pub(super) fn length(&self, row: u32) -> u8 {
        u8::try_from(self.word(row) >> LENGTH_SHIFT & 0x1f).expect("five bits")
    }

    /// Data chunks whose pages someone refers to.
    pub(super) fn live(&self, row: u32) -> u16 {
        u16::try_from(self.word(row) & LIVE).expect("sixteen bits")
    }

    /// A page has left a hole; what still lives.
    pub(super) fn hole(&mut self, place: Place) -> u16 {
        let word = self.word(place.row);
        assert!(word & 1 << place.position != 0, "{place:?} is a hole already");
        self.set_word(place.row, word & !(1 << place.position));
        self.live(place.row)
    }

    /// One more page is local as well, or one less.
    pub(super) fn set_home(&mut self, row: u32, home: bool) {
        let word = self.word(row);
        self.set_word(row, if home { word + ONE_HOME } else { word - ONE_HOME });
    }

    /// How many pages live there, and how many of them are not local as well.
    pub(super) fn lives(&self, row: u32) -> Lives {
        lives(self.word(row))
    }

    /// Whether one of its chunks is being rebuilt.
    pub(super) fn is_busy(&self, row: u32) -> bool {
        self.word(row) & BUSY != 0
    }

    pub(super) fn set_busy(&mut self, row: u32, busy: bool) {
        let word = self.word(row);
        self.set_word(row, if busy { word | BUSY } else { word & !BUSY });
    }

    /// The chunk at a position, if there is one.
    pub(super) fn chunk(&self, row: u32, position: u8) -> Option<Handle> {
        Handle::from_bits(self.table.half(row, usize::from(position)))
    }

    pub(super) fn set_chunk(&mut self, row: u32, position: u8, chunk: Option<Handle>) {
        self.table.set_half(row, usize::from(position), chunk.map_or(0, Handle::bits));
    }

    /// All that there may be.
    pub(super) fn all(&self) -> std::ops::Range<u32> {
        0..u32::try_from(self.len()).expect("rows are counted in 32 bits")
    }

    /// How far a sweep goes.
    pub(super) fn len(&self) -> usize {
        self.table.len()
    }

    pub(super) fn memory_bytes(&self) -> u64 {
        self.table.memory_bytes() + (self.alone.capacity() * size_of::<u64>()) as u64
    }

    pub(super) fn top_up(&mut self) -> bool {
        self.reserve_bits();
        self.table.top_up()
    }
}

/// The pages that a row's own word tells of.
fn lives(word: u32) -> Lives {
    let (all, home) = ((word & LIVE).count_ones() as usize, word >> HOME_SHIFT & 0x1f);
    Lives { all, outside: all - home as usize }
}

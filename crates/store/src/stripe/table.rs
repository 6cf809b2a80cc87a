//! Pages and rows: what is kept of them for as long as they are stored.
//!
//! Both are rows of words in segments that never move. A page has two words, of which one is its place; a row has a word
//! for each chunk and one for itself. With four data chunks and one of parity that is 14 bytes a page, of which the place
//! and its share of a row's chunks are 9; checksums are the members' (16 bytes a chunk).

use crate::{HANDLE_BITS, Handle};

/// Entries in a segment.
const SEGMENT_ENTRIES: usize = 4096;
/// Segments in reserve, so that the fault path allocates none.
const RESERVE: usize = 2;
/// Bits of a place that name the position in a row.
const POSITION_BITS: u32 = 4;
/// Data chunks that a row may have.
pub(super) const DATA_MAX: usize = 1 << POSITION_BITS;

/// Entries of so many words each; free ones are linked through their first word.
struct Table {
    stride: usize,
    segments: Vec<Box<[u32]>>,
    reserve: Vec<Box<[u32]>>,
    free: Vec<u32>,
    entries_max: usize,
}

impl Table {
    fn new(stride: usize, entries_max: usize) -> Self {
        let mut table = Self {
            stride,
            segments: Vec::with_capacity(entries_max.div_ceil(SEGMENT_ENTRIES)),
            reserve: Vec::with_capacity(RESERVE),
            free: Vec::with_capacity(SEGMENT_ENTRIES),
            entries_max,
        };
        while table.top_up() {}
        table
    }

    fn top_up(&mut self) -> bool {
        if self.reserve.len() < RESERVE {
            self.reserve.push(vec![0; self.stride * SEGMENT_ENTRIES].into());
        }
        self.reserve.len() < RESERVE
    }

    fn memory_bytes(&self) -> u64 {
        let words = (self.segments.len() + self.reserve.len()) * self.stride * SEGMENT_ENTRIES + self.free.capacity();
        (words * size_of::<u32>()) as u64
    }

    fn len(&self) -> usize {
        self.segments.len() * SEGMENT_ENTRIES
    }

    fn insert(&mut self) -> Option<u32> {
        if self.free.is_empty() {
            if self.len() + SEGMENT_ENTRIES > self.entries_max {
                return None;
            }
            let first = u32::try_from(self.len()).ok()?;
            let fresh = vec![0; self.stride * SEGMENT_ENTRIES].into();
            self.segments.push(self.reserve.pop().unwrap_or(fresh));
            let entries = u32::try_from(SEGMENT_ENTRIES).expect("few");
            self.free.extend((first..first + entries).rev());
        }
        self.free.pop()
    }

    fn remove(&mut self, at: u32) {
        self.get_mut(at).fill(0);
        self.free.push(at);
    }

    fn get(&self, at: u32) -> &[u32] {
        let (segment, first) = (at as usize / SEGMENT_ENTRIES, at as usize % SEGMENT_ENTRIES * self.stride);
        &self.segments[segment][first..first + self.stride]
    }

    fn get_mut(&mut self, at: u32) -> &mut [u32] {
        let (segment, first) = (at as usize / SEGMENT_ENTRIES, at as usize % SEGMENT_ENTRIES * self.stride);
        &mut self.segments[segment][first..first + self.stride]
    }
}

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

const FILLING: u32 = u32::MAX;
const REFERENCES: u32 = 0x7fff;
const MOVING: u32 = 0x8000;
const JOB_SHIFT: u32 = 16;

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

impl Pages {
    pub(super) fn new() -> Self {
        Self { table: Table::new(2, (1 << HANDLE_BITS) - 1), references: 0 }
    }

    /// A page with one reference; its state is to be set.
    pub(super) fn insert(&mut self) -> Option<Handle> {
        let at = self.table.insert()?;
        self.table.get_mut(at).copy_from_slice(&[FILLING, 1]);
        self.references += 1;
        Some(handle_of(at))
    }

    pub(super) fn state(&self, handle: Handle) -> State {
        let words = self.table.get(at(handle));
        let job = words[1] >> JOB_SHIFT;
        match words[0] {
            _ if words[1] & REFERENCES == 0 => State::Free,
            FILLING => {
                let byte = |bits: u32| u8::try_from(bits & 0xff).expect("a byte");
                State::Filling(byte(job >> 8), byte(job))
            }
            place => State::Kept(to_place(place), u16::try_from(job).expect("sixteen bits").checked_sub(1)),
        }
    }

    /// The state of a page that someone refers to.
    pub(super) fn held(&self, handle: Handle) -> State {
        let state = self.state(handle);
        assert!(state != State::Free, "{handle:?} was freed before");
        state
    }

    pub(super) fn set(&mut self, handle: Handle, state: State) {
        let words = self.table.get_mut(at(handle));
        let (place, job) = match state {
            State::Filling(fill, position) => (FILLING, u32::from(fill) << 8 | u32::from(position)),
            State::Kept(place, job) => {
                (place.row << POSITION_BITS | u32::from(place.position), job.map_or(0, |job| u32::from(job) + 1))
            }
            State::Free => unreachable!("pages are freed by their last reference"),
        };
        words[0] = place;
        words[1] = words[1] & (REFERENCES | MOVING) | job << JOB_SHIFT;
    }

    pub(super) fn set_job(&mut self, handle: Handle, job: Option<u16>) {
        if let State::Kept(place, _) = self.state(handle) {
            self.set(handle, State::Kept(place, job));
        }
    }

    pub(super) fn is_moving(&self, handle: Handle) -> bool {
        self.table.get(at(handle))[1] & MOVING != 0
    }

    pub(super) fn set_moving(&mut self, handle: Handle, moving: bool) {
        let word = &mut self.table.get_mut(at(handle))[1];
        *word = if moving { *word | MOVING } else { *word & !MOVING };
    }

    /// One more reference. A count that reaches its limit keeps the page for good.
    pub(super) fn share(&mut self, handle: Handle) {
        let _ = self.held(handle);
        let word = &mut self.table.get_mut(at(handle))[1];
        *word += u32::from(*word & REFERENCES != REFERENCES);
        self.references += 1;
    }

    /// One reference less; whether it was the last. The page is then to be removed.
    pub(super) fn release(&mut self, handle: Handle) -> bool {
        let _ = self.held(handle);
        self.references -= 1;
        let word = &mut self.table.get_mut(at(handle))[1];
        match *word & REFERENCES {
            REFERENCES => false,
            1 => true,
            _ => {
                *word -= 1;
                false
            }
        }
    }

    /// All references less.
    pub(super) fn release_all(&mut self, handle: Handle) {
        self.references -= u64::from(self.table.get(at(handle))[1] & REFERENCES);
    }

    pub(super) fn remove(&mut self, handle: Handle) {
        self.table.remove(at(handle));
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

fn to_place(bits: u32) -> Place {
    let position = u8::try_from(bits & ((1 << POSITION_BITS) - 1)).expect("few bits");
    Place { row: bits >> POSITION_BITS, position }
}

const WRITTEN: u32 = 1 << 31;
const BUSY: u32 = 1 << 30;
const LENGTH_SHIFT: u32 = 16;

/// All rows.
pub(super) struct Rows {
    table: Table,
    width: usize,
}

impl Rows {
    /// For rows of so many chunks.
    pub(super) fn new(width: usize) -> Self {
        Self { table: Table::new(width + 1, 1 << (32 - POSITION_BITS - 1)), width }
    }

    /// A row that is being written.
    pub(super) fn insert(&mut self) -> Option<u32> {
        self.table.insert()
    }

    /// A row is written: how many data chunks it has, and at which of these positions pages live.
    pub(super) fn written(&mut self, row: u32, length: u8, live: u16) {
        let width = self.width;
        self.table.get_mut(row)[width] = WRITTEN | u32::from(length) << LENGTH_SHIFT | u32::from(live);
    }

    pub(super) fn remove(&mut self, row: u32) {
        self.table.remove(row);
    }

    fn word(&self, row: u32) -> u32 {
        self.table.get(row)[self.width]
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
        u16::try_from(self.word(row) & 0xffff).expect("sixteen bits")
    }

    /// A page has left a hole; what still lives.
    pub(super) fn hole(&mut self, place: Place) -> u16 {
        let width = self.width;
        let word = &mut self.table.get_mut(place.row)[width];
        assert!(*word & 1 << place.position != 0, "{place:?} is a hole already");
        *word &= !(1 << place.position);
        self.live(place.row)
    }

    /// Whether one of its chunks is being rebuilt.
    pub(super) fn is_busy(&self, row: u32) -> bool {
        self.word(row) & BUSY != 0
    }

    pub(super) fn set_busy(&mut self, row: u32, busy: bool) {
        let width = self.width;
        let word = &mut self.table.get_mut(row)[width];
        *word = if busy { *word | BUSY } else { *word & !BUSY };
    }

    /// The chunk at a position, if there is one.
    pub(super) fn chunk(&self, row: u32, position: u8) -> Option<Handle> {
        Handle::from_bits(self.table.get(row)[usize::from(position)])
    }

    pub(super) fn set_chunk(&mut self, row: u32, position: u8, chunk: Option<Handle>) {
        self.table.get_mut(row)[usize::from(position)] = chunk.map_or(0, Handle::bits);
    }

    /// How far a sweep goes.
    pub(super) fn len(&self) -> usize {
        self.table.len()
    }

    pub(super) fn memory_bytes(&self) -> u64 {
        self.table.memory_bytes()
    }

    pub(super) fn top_up(&mut self) -> bool {
        self.table.top_up()
    }
}

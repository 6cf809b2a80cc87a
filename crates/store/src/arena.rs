//! Where compressed bytes lie: segments of 2 MiB, divided into spans of 64 KiB, divided into objects of one size.
//!
//! Invariants: a span is either free, or belongs to a class and has a live object; spans with a live object and room
//! for another are in their class's list; empty segments beyond a small reserve are given back. Objects never move.

use crate::StoreError;
use crate::classes::{Classes, OBJECTS_MAX, SPAN_BYTES};
use crate::segment::{SEGMENT_BYTES, Segment, Supply};

const SPANS: usize = SEGMENT_BYTES / SPAN_BYTES;
const ALL_FREE: u32 = u32::MAX;
const _: () = assert!(SPANS == u32::BITS as usize);
/// Empty segments kept, so that a pool whose size swings by a page does not map and unmap with it.
const EMPTY_MAX: usize = 1;
/// No span.
const NONE: u32 = u32::MAX;

/// Where an object is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) segment: u32,
    /// Bytes into the segment.
    pub(crate) offset: u32,
}

/// 64 KiB of objects of one size. Free when nothing lives in it.
#[derive(Clone, Copy)]
struct Span {
    /// Objects that live, a bit each.
    used: [u64; OBJECTS_MAX / 64],
    live: u16,
    class: u8,
    /// Neighbours in the class's list of spans with room.
    before: u32,
    after: u32,
}

const FREE_SPAN: Span = Span { used: [0; _], live: 0, class: 0, before: NONE, after: NONE };

struct Mapped {
    bytes: Segment,
    spans: Box<[Span; SPANS]>,
    /// Spans that no class has, a bit each.
    free: u32,
}

/// The allocator.
pub(crate) struct Arena {
    classes: Classes,
    /// By segment number. Numbers are reused, lowest first, so high segments drain.
    segments: Vec<Option<Mapped>>,
    /// Segments with a free span, a bit each.
    with_free: Vec<u64>,
    /// Segments with nothing but free spans.
    empty: Vec<u32>,
    /// By class: first of the spans with room.
    room: Box<[u32]>,
    supply: Supply,
    held: u64,
    live_bytes: u64,
}

impl Arena {
    pub(crate) fn new(supply: Supply) -> Self {
        let classes = Classes::new();
        let room = vec![NONE; classes.len()].into_boxed_slice();
        Self {
            classes,
            segments: Vec::new(),
            with_free: Vec::new(),
            empty: Vec::new(),
            room,
            supply,
            held: 0,
            live_bytes: 0,
        }
    }

    /// Bytes of live objects, rounded up to their classes.
    pub(crate) fn live_bytes(&self) -> u64 {
        self.live_bytes
    }

    /// Segments in use or kept as a reserve.
    pub(crate) fn held(&self) -> u64 {
        self.held
    }

    /// DRAM taken, with segments that are being made ready or given back.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.supply.mapped_bytes() + self.held * size_of::<[Span; SPANS]>() as u64
    }

    pub(crate) fn supply(&self) -> &Supply {
        &self.supply
    }

    /// Finds room for `len` bytes, with at most `segments_max` segments.
    pub(crate) fn alloc(&mut self, len: usize, segments_max: u64) -> Result<Place, StoreError> {
        let class = self.classes.of(len);
        let id = match self.room[usize::from(class)] {
            NONE => self.open_span(class, segments_max)?,
            id => id,
        };
        let shape = self.classes.get(class);
        let span = self.span_mut(id);
        let object = span.take();
        if span.live == shape.objects {
            self.unlink(id);
        }
        self.live_bytes += u64::from(shape.bytes);
        let start = (id as usize % SPANS * SPAN_BYTES) as u32;
        Ok(Place { segment: id / SPANS as u32, offset: start + object * u32::from(shape.bytes) })
    }

    /// Whether `len` bytes would fit were the object at `place` freed first.
    pub(crate) fn fits_instead(&self, place: Place, len: usize) -> bool {
        let span = &self.mapped(place.segment).spans[place.offset as usize / SPAN_BYTES];
        span.live == 1 || span.class == self.classes.of(len)
    }

    /// Frees an object.
    pub(crate) fn free(&mut self, place: Place) {
        let id = place.segment * SPANS as u32 + place.offset / SPAN_BYTES as u32;
        let class = self.span_mut(id).class;
        let shape = self.classes.get(class);
        let object = place.offset % SPAN_BYTES as u32 / u32::from(shape.bytes);
        self.live_bytes -= u64::from(shape.bytes);
        let span = self.span_mut(id);
        let was_full = span.live == shape.objects;
        span.put_back(object);
        match (span.live, was_full) {
            (0, true) => self.close_span(id),
            (0, false) => {
                self.unlink(id);
                self.close_span(id);
            }
            (_, true) => self.link(id, class),
            (_, false) => {}
        }
    }

    /// The first `len` bytes of an object.
    pub(crate) fn bytes(&self, place: Place, len: u16) -> &[u8] {
        &self.mapped(place.segment).bytes[place.offset as usize..][..usize::from(len)]
    }

    pub(crate) fn bytes_mut(&mut self, place: Place, len: u16) -> &mut [u8] {
        &mut self.mapped_mut(place.segment).bytes[place.offset as usize..][..usize::from(len)]
    }

    fn mapped(&self, segment: u32) -> &Mapped {
        self.segments[segment as usize].as_ref().expect("live objects are in mapped segments")
    }

    fn mapped_mut(&mut self, segment: u32) -> &mut Mapped {
        self.segments[segment as usize].as_mut().expect("live objects are in mapped segments")
    }

    fn span_mut(&mut self, id: u32) -> &mut Span {
        &mut self.mapped_mut(id / SPANS as u32).spans[id as usize % SPANS]
    }

    fn link(&mut self, id: u32, class: u8) {
        let head = self.room[usize::from(class)];
        self.span_mut(id).before = NONE;
        self.span_mut(id).after = head;
        if head != NONE {
            self.span_mut(head).before = id;
        }
        self.room[usize::from(class)] = id;
    }

    fn unlink(&mut self, id: u32) {
        let Span { class, before, after, .. } = *self.span_mut(id);
        match before {
            NONE => self.room[usize::from(class)] = after,
            before => self.span_mut(before).after = after,
        }
        if after != NONE {
            self.span_mut(after).before = before;
        }
    }

    /// Gives a free span to `class`.
    fn open_span(&mut self, class: u8, segments_max: u64) -> Result<u32, StoreError> {
        let word = self.with_free.iter().position(|word| *word != 0);
        let segment = match word {
            Some(word) => (word * 64) as u32 + self.with_free[word].trailing_zeros(),
            None => self.add_segment(segments_max)?,
        };
        let mapped = self.mapped_mut(segment);
        if mapped.free == ALL_FREE {
            self.empty.retain(|empty| *empty != segment);
        }
        let mapped = self.mapped_mut(segment);
        let at = mapped.free.trailing_zeros();
        mapped.free &= !(1 << at);
        mapped.spans[at as usize] = Span { class, ..FREE_SPAN };
        if mapped.free == 0 {
            self.with_free[segment as usize / 64] &= !(1 << (segment % 64));
        }
        let id = segment * SPANS as u32 + at;
        self.link(id, class);
        Ok(id)
    }

    /// Takes a span without live objects from its class.
    fn close_span(&mut self, id: u32) {
        let segment = id / SPANS as u32;
        let mapped = self.mapped_mut(segment);
        mapped.free |= 1 << (id as usize % SPANS);
        let empty = mapped.free == ALL_FREE;
        self.with_free[segment as usize / 64] |= 1 << (segment % 64);
        if empty {
            self.empty.push(segment);
            self.give_back_empty();
        }
    }

    fn add_segment(&mut self, segments_max: u64) -> Result<u32, StoreError> {
        if self.held >= segments_max {
            return Err(StoreError::Full);
        }
        let bytes = self.supply.take().ok_or(StoreError::Full)?;
        let mapped = Mapped { bytes, spans: Box::new([FREE_SPAN; SPANS]), free: ALL_FREE };
        let segment = match self.segments.iter().position(Option::is_none) {
            Some(vacant) => {
                self.segments[vacant] = Some(mapped);
                vacant
            }
            None => {
                self.segments.push(Some(mapped));
                self.segments.len() - 1
            }
        };
        if self.with_free.len() <= segment / 64 {
            self.with_free.push(0);
        }
        self.with_free[segment / 64] |= 1 << (segment % 64);
        self.held += 1;
        Ok(segment as u32)
    }

    fn give_back_empty(&mut self) {
        while self.empty.len() > EMPTY_MAX {
            let segment = self.empty[self.empty.len() - 1];
            let Some(mapped) = self.segments[segment as usize].take() else { return };
            if let Err(bytes) = self.supply.give_back(mapped.bytes) {
                self.segments[segment as usize] = Some(Mapped { bytes, ..mapped });
                return;
            }
            self.empty.pop();
            self.held -= 1;
            self.with_free[segment as usize / 64] &= !(1 << (segment % 64));
        }
    }
}

impl Span {
    /// Takes the first vacant object of a span with room.
    fn take(&mut self) -> u32 {
        let word = self.used.iter().position(|word| *word != u64::MAX).expect("a span with room has a vacant object");
        let bit = self.used[word].trailing_ones();
        self.used[word] |= 1 << bit;
        self.live += 1;
        word as u32 * 64 + bit
    }

    fn put_back(&mut self, object: u32) {
        let bit = 1 << (object % 64);
        let word = &mut self.used[object as usize / 64];
        assert!(*word & bit != 0, "objects are freed once");
        *word &= !bit;
        self.live -= 1;
    }
}

//! Where stored bytes lie: segments of 2 MiB, divided into spans of 64 KiB, divided into objects of one size.
//!
//! Invariants: a span is free, or belongs to a class and has a live object; spans with room are in the list of their
//! class and fill, unless their segment is being evacuated; empty segments beyond a small reserve are given back.
//! Allocation takes the fullest spans and the lowest segments, so that others drain; [`evacuate`] helps where that is
//! not enough, which is why objects know their owners.

mod evacuate;
mod span;

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

use crate::classes::{Classes, SPAN_BYTES};
use crate::segment::{SEGMENT_BYTES, Segment, Supply};
use crate::sys::memory::{Lending, Parts};
use crate::vault::Extent;
use crate::{Handle, StoreError};
use evacuate::Evacuation;
use span::{FILLS, NONE, Span};

/// Spans in a segment.
const SPANS: u32 = SEGMENT_BYTES / SPAN_BYTES;
const ALL_FREE: u32 = u32::MAX;
const _: () = assert!(SPANS == u32::BITS);
/// Empty segments kept, so that a pool whose size swings by a page does not map and unmap with it.
const EMPTY_MAX: usize = 1;
/// Numbers that segments which were found may have: 64 TiB.
const SEGMENTS_FOUND_MAX: u32 = 1 << 25;

/// Where an object is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) segment: u32,
    /// Bytes into the segment.
    pub(crate) offset: u32,
}

impl Place {
    /// The span, counted over all segments.
    fn span(self) -> u32 {
        self.segment * SPANS + self.offset / SPAN_BYTES
    }

    /// Its first `len` bytes, in the segment.
    fn range(self, len: u16) -> Range<usize> {
        let start = self.offset as usize;
        start..start + usize::from(len)
    }
}

/// A segment in use.
struct Mapped {
    bytes: Segment,
    spans: Box<[Span]>,
    /// Spans that no class has, a bit each.
    free: u32,
    /// Bytes of live objects, rounded up to their classes.
    live_bytes: u32,
    /// Its objects are being moved out: nothing new may come in.
    closing: bool,
}

/// The allocator.
pub(crate) struct Arena {
    classes: Classes,
    /// By number.
    segments: Vec<Option<Mapped>>,
    /// Numbers below `segments.len()` that are not in use.
    vacant: BinaryHeap<Reverse<u32>>,
    /// Segments in use that have a free span for anyone, a bit each.
    with_free: Vec<u64>,
    /// Segments with nothing but free spans.
    empty: Vec<u32>,
    /// First spans of the lists of spans with room: [`FILLS`] for each class.
    lists: Box<[u32]>,
    supply: Supply,
    evacuation: Evacuation,
    held: u64,
    live_bytes: u64,
    table_bytes: u64,
}

impl Arena {
    pub(crate) fn new(supply: Supply) -> Self {
        let classes = Classes::new();
        Self {
            lists: vec![NONE; classes.len() * FILLS].into_boxed_slice(),
            classes,
            segments: Vec::new(),
            vacant: BinaryHeap::new(),
            with_free: Vec::new(),
            empty: Vec::new(),
            supply,
            evacuation: Evacuation::default(),
            held: 0,
            live_bytes: 0,
            table_bytes: 0,
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

    /// DRAM taken by held segments and their tables.
    pub(crate) fn held_bytes(&self) -> u64 {
        self.held * u64::from(SEGMENT_BYTES) + self.table_bytes
    }

    /// Bytes of tables, which are beside the segments.
    pub(crate) fn table_bytes(&self) -> u64 {
        self.table_bytes
    }

    /// DRAM taken, with segments that are being made ready or given back.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.supply.mapped_bytes() + self.table_bytes
    }

    pub(crate) fn supply(&self) -> &Supply {
        &self.supply
    }

    /// Finds room for `len` bytes, with at most `segments_max` segments. The owner must be set before anything else is
    /// done with the arena.
    pub(crate) fn alloc(&mut self, len: usize, segments_max: u64) -> Result<Place, StoreError> {
        let class = self.classes.of(len);
        self.alloc_of(class, Some(segments_max)).or_else(|full| self.alloc_above(class, usize::MAX).ok_or(full))
    }

    /// Better a hole that is too large than none: the smallest one, of `bytes_max` at most.
    fn alloc_above(&mut self, class: u8, bytes_max: usize) -> Option<Place> {
        let larger = self.lists[..usize::from(class) * FILLS].iter().rposition(|head| *head != NONE)?;
        let id = self.lists[larger];
        let class = self.span_mut(id).class();
        let bytes = self.classes.get(class).bytes as usize;
        (bytes <= bytes_max).then(|| self.take(id))
    }

    /// As [`Arena::alloc`], in a span of this class; `None` for none of a segment that is empty yet.
    fn alloc_of(&mut self, class: u8, segments_max: Option<u64>) -> Result<Place, StoreError> {
        let fills = &self.lists[usize::from(class) * FILLS..][..FILLS];
        let id = match fills.iter().rev().find(|head| **head != NONE) {
            Some(id) => *id,
            None => self.open_span(class, segments_max)?,
        };
        Ok(self.take(id))
    }

    /// Takes an object of a span with room.
    fn take(&mut self, id: u32) -> Place {
        let (class, object) = self.change(id, |span| (span.class(), span.take()));
        let bytes = self.classes.get(class).bytes;
        self.live_bytes += u64::from(bytes);
        self.mapped_mut(id / SPANS).live_bytes += bytes;
        Place { segment: id / SPANS, offset: id % SPANS * SPAN_BYTES + object * bytes }
    }

    /// Says whose object this is.
    pub(crate) fn set_owner(&mut self, place: Place, owner: Handle) {
        let (_, object) = self.object(place);
        self.span_mut(place.span()).set_owner(object, owner);
    }

    /// Whether `len` bytes would surely fit were the object at `place` freed first.
    pub(crate) fn fits_instead(&self, place: Place, len: usize) -> bool {
        let mapped = self.mapped(place.segment);
        let span = &mapped.spans[(place.offset / SPAN_BYTES) as usize];
        !mapped.closing && (span.live() == 1 || self.classes.get(span.class()).bytes as usize >= len)
    }

    /// Frees an object.
    pub(crate) fn free(&mut self, place: Place) {
        let (bytes, object) = self.object(place);
        self.live_bytes -= u64::from(bytes);
        self.mapped_mut(place.segment).live_bytes -= bytes;
        self.evacuation.object_freed();
        let live = self.change(place.span(), |span| {
            span.put_back(object);
            span.live()
        });
        if live == 0 {
            self.close_span(place.span());
        }
    }

    /// The first `len` bytes of an object.
    pub(crate) fn bytes(&self, place: Place, len: u16) -> &[u8] {
        self.mapped(place.segment).bytes.bytes(place.range(len))
    }

    /// As [`Arena::bytes`], to be written.
    pub(crate) fn bytes_mut(&mut self, place: Place, len: u16) -> &mut [u8] {
        self.mapped_mut(place.segment).bytes.bytes_mut(place.range(len))
    }

    /// Lends them: until the loan is over the object must not be freed.
    pub(crate) fn lend(&mut self, place: Place, len: u16, parts: &mut Parts) -> Lending {
        self.mapped_mut(place.segment).bytes.lend(place.range(len), parts)
    }

    /// The bytes an object takes, and its number in its span.
    fn object(&self, place: Place) -> (u32, u32) {
        let span = &self.mapped(place.segment).spans[(place.offset / SPAN_BYTES) as usize];
        let bytes = self.classes.get(span.class()).bytes;
        (bytes, place.offset % SPAN_BYTES / bytes)
    }

    fn mapped(&self, segment: u32) -> &Mapped {
        self.segments[segment as usize].as_ref().expect("live objects are in mapped segments")
    }

    fn mapped_mut(&mut self, segment: u32) -> &mut Mapped {
        self.segments[segment as usize].as_mut().expect("live objects are in mapped segments")
    }

    fn span_mut(&mut self, id: u32) -> &mut Span {
        &mut self.mapped_mut(id / SPANS).spans[(id % SPANS) as usize]
    }

    /// Changes a span and keeps it in the list where it then belongs.
    fn change<T>(&mut self, id: u32, change: impl FnOnce(&mut Span) -> T) -> T {
        let listed = !self.mapped(id / SPANS).closing;
        let span = self.span_mut(id);
        let before = span.list();
        let result = change(span);
        let after = span.list();
        if listed && before != after {
            self.unlink(id, before);
            self.link(id, after);
        }
        result
    }

    fn link(&mut self, id: u32, list: Option<usize>) {
        let Some(list) = list else { return };
        let head = std::mem::replace(&mut self.lists[list], id);
        let span = self.span_mut(id);
        (span.before, span.after) = (NONE, head);
        if head != NONE {
            self.span_mut(head).before = id;
        }
    }

    fn unlink(&mut self, id: u32, list: Option<usize>) {
        let Some(list) = list else { return };
        let Span { before, after, .. } = *self.span_mut(id);
        match before {
            NONE => self.lists[list] = after,
            before => self.span_mut(before).after = after,
        }
        if after != NONE {
            self.span_mut(after).before = before;
        }
    }

    /// Gives a free span to `class`: its caller takes an object at once.
    fn open_span(&mut self, class: u8, segments_max: Option<u64>) -> Result<u32, StoreError> {
        let segment = match ((0_u32..).zip(&self.with_free).find(|(_, word)| **word != 0), segments_max) {
            (Some((at, word)), _) => at * u64::BITS + word.trailing_zeros(),
            (None, Some(segments_max)) => self.empty.pop().map_or_else(|| self.add_segment(segments_max), Ok)?,
            (None, None) => return Err(StoreError::Full),
        };
        let shape = self.classes.get(class);
        let mapped = self.mapped_mut(segment);
        let at = mapped.free.trailing_zeros();
        mapped.free &= !(1 << at);
        let span = &mut mapped.spans[at as usize];
        span.open(class, shape);
        if let Some(extent) = mapped.bytes.extent() {
            // Before anything in it is named.
            extent.note_class(at as usize, class);
        }
        let span = &mapped.spans[at as usize];
        let (table_bytes, with_free) = (span.table_bytes(), mapped.free != 0);
        self.set_with_free(segment, with_free);
        self.table_bytes += table_bytes;
        Ok(segment * SPANS + at)
    }

    /// Takes a span without live objects from its class.
    fn close_span(&mut self, id: u32) {
        let segment = id / SPANS;
        self.table_bytes -= self.span_mut(id).close();
        let mapped = self.mapped_mut(segment);
        mapped.free |= 1 << (id % SPANS);
        let empty = mapped.free == ALL_FREE;
        if mapped.closing && empty {
            mapped.closing = false;
            self.evacuation.done();
        }
        let mapped = self.mapped_mut(segment);
        let with_free = !mapped.closing && !empty;
        self.set_with_free(segment, with_free);
        if empty {
            self.empty.push(segment);
            self.give_back_empty();
        }
    }

    /// Takes over segments that were found, by number. Their objects follow ([`Arena::take_this`]), and then
    /// [`Arena::all_taken`].
    pub(crate) fn take_over(&mut self, found: Vec<Extent>) {
        for extent in found {
            let Some(number) = extent.number().filter(|&number| number < SEGMENTS_FOUND_MAX) else { continue };
            let at = number as usize;
            if self.segments.len() <= at {
                self.segments.resize_with(at + 1, || None);
            }
            if self.segments[at].is_none() {
                let spans: Box<[Span]> = (0..SPANS).map(|_| Span::free()).collect();
                self.held += 1;
                self.table_bytes += size_of_val(&*spans) as u64;
                let bytes = self.supply.found(extent);
                self.segments[at] = Some(Mapped { bytes, spans, free: ALL_FREE, live_bytes: 0, closing: false });
            }
        }
        self.with_free.resize(self.segments.len().div_ceil(u64::BITS as usize), 0);
        let vacant = (0..).zip(&self.segments).filter(|(_, mapped)| mapped.is_none());
        self.vacant = vacant.map(|(number, _)| Reverse(number)).collect();
    }

    /// Takes the object at `place` for `owner`, if there is room for one of `len` bytes.
    pub(crate) fn take_this(&mut self, place: Place, len: u16, owner: Handle) -> bool {
        let at = (place.offset / SPAN_BYTES) as usize;
        let Some(Some(mapped)) = self.segments.get_mut(place.segment as usize) else { return false };
        let Some(class) = mapped.bytes.extent().filter(|_| at < SPANS as usize).map(|extent| extent.class(at)) else {
            return false;
        };
        if usize::from(class) >= self.classes.len() {
            return false;
        }
        let shape = self.classes.get(class);
        let (object, rest) = (place.offset % SPAN_BYTES / shape.bytes, place.offset % SPAN_BYTES % shape.bytes);
        if rest != 0 || object >= shape.objects || u32::from(len) > shape.bytes {
            return false;
        }
        if mapped.free >> at & 1 == 1 {
            mapped.free &= !(1 << at);
            mapped.spans[at].open(class, shape);
            self.table_bytes += mapped.spans[at].table_bytes();
        }
        if !self.change(place.span(), |span| span.take_this(object)) {
            return false;
        }
        self.live_bytes += u64::from(shape.bytes);
        self.mapped_mut(place.segment).live_bytes += shape.bytes;
        self.set_owner(place, owner);
        true
    }

    /// What is empty now can be used, or given back.
    pub(crate) fn all_taken(&mut self) {
        for number in 0..u32::try_from(self.segments.len()).expect("segments have u32 numbers") {
            let Some(mapped) = &self.segments[number as usize] else { continue };
            let (free, empty) = (mapped.free != 0, mapped.free == ALL_FREE);
            self.set_with_free(number, free && !empty);
            if empty {
                self.empty.push(number);
            }
        }
        self.give_back_empty();
    }

    fn set_with_free(&mut self, segment: u32, with_free: bool) {
        let word = &mut self.with_free[(segment / u64::BITS) as usize];
        let bit = 1 << (segment % u64::BITS);
        *word = if with_free { *word | bit } else { *word & !bit };
    }

    fn add_segment(&mut self, segments_max: u64) -> Result<u32, StoreError> {
        self.supply.allow(segments_max);
        if self.held >= segments_max {
            return Err(StoreError::Full);
        }
        // Numbers first: they run out at 2^27 segments, 256 TiB.
        let next = u32::try_from(self.segments.len()).ok().filter(|next| *next < u32::MAX / SPANS);
        let segment = self.vacant.peek().map(|lowest| lowest.0).or(next).ok_or(StoreError::Full)?;
        let bytes = self.supply.take().ok_or(StoreError::Full)?;
        if let Some(extent) = bytes.extent() {
            extent.set_number(Some(segment));
        }
        let spans: Box<[Span]> = (0..SPANS).map(|_| Span::free()).collect();
        self.held += 1;
        self.table_bytes += size_of_val(&*spans) as u64;
        let mapped = Some(Mapped { bytes, spans, free: ALL_FREE, live_bytes: 0, closing: false });
        if self.vacant.pop().is_some() {
            self.segments[segment as usize] = mapped;
        } else {
            self.segments.push(mapped);
        }
        if self.with_free.len() <= (segment / u64::BITS) as usize {
            self.with_free.push(0);
        }
        Ok(segment)
    }

    /// Gives empty segments back, as far as the way back has room.
    pub(crate) fn give_back_empty(&mut self) {
        while self.empty.len() > EMPTY_MAX
            && let Some(segment) = self.empty.pop()
            && let Some(mapped) = self.segments[segment as usize].take()
        {
            let table_bytes = size_of_val(&*mapped.spans) as u64;
            if let Some(extent) = mapped.bytes.extent() {
                extent.set_number(None);
            }
            if let Err(bytes) = self.supply.give_back(mapped.bytes) {
                if let Some(extent) = bytes.extent() {
                    extent.set_number(Some(segment));
                }
                self.segments[segment as usize] = Some(Mapped { bytes, ..mapped });
                self.empty.push(segment);
                return;
            }
            self.vacant.push(Reverse(segment));
            self.held -= 1;
            self.table_bytes -= table_bytes;
        }
    }
}

#[cfg(test)]
mod tests;

//! Moving objects together, so that memory which frees have left full of holes can be given back.
//!
//! One segment at a time is emptied into the others, an object at a time, so that no one waits for it. Zsmalloc
//! compacts each class by itself; here whole segments go, as only those can be unmapped.

use super::{Arena, Place, SPANS};
use crate::Handle;
use crate::classes::SPAN_BYTES;
use crate::segment::SEGMENT_BYTES;

/// Bytes that may be lost to holes and slack beside a quarter of the pool: about one partly filled span a class, which
/// no move can help.
const LOOSE_MIN_BYTES: u64 = 8 << 20;
/// Segments looked at for the emptiest. All in a pool of 128 MiB; a sample in a larger one, as looking costs time.
const LOOKED_AT_MAX: usize = 64;
/// Objects that must be freed before the next try, when objects found no other place.
const REST_OBJECTS: u32 = 4096;

/// Emptied segments that pay for using one more where objects find no other room. At two for one, it comes to an end.
const SPILL_COST: u32 = 2;
/// How many emptied segments count at most.
const CREDIT_MAX: u32 = 8;

/// Which segment is being emptied.
pub(super) struct Evacuation {
    segment: Option<u32>,
    /// Where to look for the next one.
    next: usize,
    /// Segments looked at since one was chosen.
    looked_at: usize,
    /// Segments emptied and not yet spent.
    credit: u32,
    /// The last segment used beside those in use: to be filled, not emptied.
    spill: Option<u32>,
    /// Objects to be freed until it makes sense to try again.
    rest: u32,
}

impl Default for Evacuation {
    fn default() -> Self {
        Self { segment: None, next: 0, looked_at: 0, credit: SPILL_COST, spill: None, rest: 0 }
    }
}

impl Evacuation {
    pub(super) fn object_freed(&mut self) {
        self.rest = self.rest.saturating_sub(1);
    }

    pub(super) fn done(&mut self) {
        self.segment = None;
        self.credit = CREDIT_MAX.min(self.credit + 1);
    }
}

impl Arena {
    /// Whether so much of the held memory is holes that moving objects together pays.
    pub(crate) fn is_loose(&self) -> bool {
        let held_bytes = (self.held - self.empty.len() as u64) * u64::from(SEGMENT_BYTES);
        let loose_bytes = held_bytes - self.live_bytes;
        self.evacuation.segment.is_some()
            || (self.evacuation.rest == 0 && loose_bytes > held_bytes / 4 + LOOSE_MIN_BYTES)
    }

    /// An object to be moved, and its owner; `None` when there is nothing to gain.
    pub(crate) fn next_to_move(&mut self) -> Option<(Place, Handle)> {
        if !self.is_loose() {
            return None;
        }
        let segment = self.evacuation.segment.or_else(|| self.start_evacuation())?;
        let mapped = self.mapped(segment);
        let at = (!mapped.free).trailing_zeros();
        let span = &mapped.spans[at as usize];
        let (object, owner) = span.first().expect("spans in use have live objects");
        let bytes = self.classes.get(span.class()).bytes;
        Some((Place { segment, offset: at * SPAN_BYTES + object * bytes }, owner))
    }

    /// Copies an object out of the segment that is being emptied. Returns where it is now, for its owner to know before the
    /// old one is freed, or `None` when there is no room elsewhere: the segment then stays.
    pub(crate) fn move_out(&mut self, place: Place, len: u16, owner: Handle) -> Option<Place> {
        // Into segments in use: one for one gains nothing, and could go on for ever.
        let class = self.classes.of(usize::from(len));
        let to = self.alloc_of(class, None).ok().or_else(|| self.alloc_above(class, usize::from(len) * 2));
        let to = to.or_else(|| {
            self.evacuation.credit = self.evacuation.credit.checked_sub(SPILL_COST)?;
            let to = self.alloc_of(class, Some(self.supply.allowed())).ok()?;
            self.evacuation.spill = Some(to.segment);
            Some(to)
        });
        let Some(to) = to else {
            self.stop_evacuation();
            return None;
        };
        self.set_owner(to, owner);
        let pair = [place.segment as usize, to.segment as usize];
        let Ok([Some(source), Some(target)]) = self.segments.get_disjoint_mut(pair) else {
            unreachable!("nothing is allocated in a segment that is being emptied")
        };
        target.bytes.bytes_mut(to.range(len)).copy_from_slice(source.bytes.bytes(place.range(len)));
        Some(to)
    }

    /// Picks the emptiest segment of those looked at and takes its spans out of circulation.
    fn start_evacuation(&mut self) -> Option<u32> {
        let (count, looked_at) = (self.segments.len(), self.segments.len().min(LOOKED_AT_MAX));
        let spill = self.evacuation.spill.map(|spill| spill as usize);
        let live_bytes = |at: &usize| match &self.segments[*at] {
            Some(mapped) if mapped.live_bytes > 0 && spill != Some(*at) => mapped.live_bytes,
            _ => u32::MAX,
        };
        let emptiest = (0..looked_at).map(|n| (self.evacuation.next + n) % count).min_by_key(live_bytes)?;
        let worthwhile = live_bytes(&emptiest) <= SEGMENT_BYTES / 8 * 7;
        self.evacuation.next = (self.evacuation.next + looked_at) % count;
        self.evacuation.looked_at += looked_at;
        if !worthwhile && self.evacuation.looked_at < count {
            return None;
        }
        self.evacuation.looked_at = 0;
        if !worthwhile {
            self.evacuation.rest = REST_OBJECTS;
            return None;
        }
        let segment = u32::try_from(emptiest).expect("segments have u32 numbers");
        for id in segment * SPANS..(segment + 1) * SPANS {
            let list = self.span_mut(id).list();
            self.unlink(id, list);
        }
        self.set_with_free(segment, false);
        self.mapped_mut(segment).closing = true;
        self.evacuation.segment = Some(segment);
        Some(segment)
    }

    fn stop_evacuation(&mut self) {
        let Some(segment) = self.evacuation.segment.take() else { return };
        self.evacuation = Evacuation { next: self.evacuation.next, rest: REST_OBJECTS, ..Evacuation::default() };
        let mapped = self.mapped_mut(segment);
        mapped.closing = false;
        let with_free = mapped.free != 0;
        self.set_with_free(segment, with_free);
        for id in segment * SPANS..(segment + 1) * SPANS {
            let list = self.span_mut(id).list();
            self.link(id, list);
        }
    }
}

/// Panics unless lists, bits and counters say the same as the spans.
#[cfg(test)]
impl Arena {
    pub(crate) fn check(&self) {
        let mut listed = std::collections::HashSet::new();
        for (list, head) in self.lists.iter().enumerate() {
            let (mut id, mut before) = (*head, super::NONE);
            while id != super::NONE {
                let span = &self.mapped(id / SPANS).spans[(id % SPANS) as usize];
                assert_eq!((span.list(), span.before), (Some(list), before));
                assert!(listed.insert(id) && !self.mapped(id / SPANS).closing);
                (before, id) = (id, span.after);
            }
        }
        let (mut live_bytes, mut held, mut empty) = (0, 0, 0);
        for (number, mapped) in (0..).zip(&self.segments) {
            let with_free = self.with_free[number as usize / 64] >> (number % 64) & 1 == 1;
            let Some(mapped) = mapped else {
                assert!(!with_free);
                continue;
            };
            held += 1;
            empty += usize::from(mapped.free == u32::MAX);
            assert_eq!(with_free, mapped.free != 0 && mapped.free != u32::MAX && !mapped.closing);
            assert_eq!(mapped.closing, self.evacuation.segment == Some(number));
            let mut segment_bytes = 0;
            for (at, span) in (0..).zip(&mapped.spans) {
                assert_eq!(mapped.free >> at & 1 == 1, span.live() == 0);
                assert_eq!(listed.contains(&(number * SPANS + at)), span.list().is_some() && !mapped.closing);
                segment_bytes += u32::from(span.live()) * self.classes.get(span.class()).bytes;
            }
            assert_eq!(segment_bytes, mapped.live_bytes);
            live_bytes += u64::from(segment_bytes);
        }
        assert_eq!((live_bytes, held, empty), (self.live_bytes, self.held, self.empty.len()));
    }
}

//! The sizes that a span may be divided into.
//!
//! Each class is the largest multiple of [`GRAIN_BYTES`] that fits a span a whole number of times, so a span has next
//! to no tail. Neighbours differ by a 64th at least, and by a grain: near 2 KiB the mean slack of an object is 2 %.
//! Finer classes would slack less and leave more spans partly filled, one a class.

use spillway_core::PAGE_BYTES;

/// A span: the unit that belongs to one class. 32 objects of 2 KiB.
pub(crate) const SPAN_BYTES: usize = 64 << 10;
/// Objects start and end at multiples of this.
pub(crate) const GRAIN_BYTES: usize = 16;
/// The smallest object. A page that shrinks further costs no less: its slot and index entry take 36 bytes anyway.
pub(crate) const OBJECT_MIN_BYTES: usize = 128;
/// Objects in a span at most.
pub(crate) const OBJECTS_MAX: usize = SPAN_BYTES / OBJECT_MIN_BYTES;

/// One size class.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Class {
    /// Bytes an object takes.
    pub(crate) bytes: u16,
    /// Objects in a span.
    pub(crate) objects: u16,
}

/// All classes, and which one serves a length.
pub(crate) struct Classes {
    classes: Vec<Class>,
    /// By length in grains, rounded up.
    of_grains: [u8; PAGE_BYTES / GRAIN_BYTES + 1],
}

impl Classes {
    pub(crate) fn new() -> Self {
        let mut classes: Vec<Class> = Vec::new();
        let mut limit = PAGE_BYTES;
        for objects in SPAN_BYTES / PAGE_BYTES..=OBJECTS_MAX {
            let bytes = SPAN_BYTES / objects / GRAIN_BYTES * GRAIN_BYTES;
            if bytes <= limit || objects == OBJECTS_MAX {
                classes.push(Class { bytes: small(bytes), objects: small(objects) });
                limit = bytes - (bytes / 64).max(GRAIN_BYTES);
            }
        }
        let of_grains = std::array::from_fn(|grains| {
            let fitting = classes.iter().rposition(|class| usize::from(class.bytes) >= grains * GRAIN_BYTES);
            u8::try_from(fitting.expect("the first class holds a whole page")).expect("fewer than 256 classes")
        });
        Self { classes, of_grains }
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.classes.len()
    }

    /// The smallest class for objects of `len` bytes, at most a page.
    pub(crate) fn of(&self, len: usize) -> u8 {
        self.of_grains[len.div_ceil(GRAIN_BYTES)]
    }

    pub(crate) fn get(&self, class: u8) -> Class {
        self.classes[usize::from(class)]
    }
}

fn small(value: usize) -> u16 {
    u16::try_from(value).expect("at most a page")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_fits_its_class_and_spans_hold_their_objects() {
        let classes = Classes::new();
        for len in 1..=PAGE_BYTES {
            let class = classes.get(classes.of(len));
            assert!(usize::from(class.bytes) >= len);
            assert!(usize::from(class.bytes) * usize::from(class.objects) <= SPAN_BYTES);
        }
        assert_eq!(usize::from(classes.get(classes.of(PAGE_BYTES)).bytes), PAGE_BYTES);
        assert_eq!(usize::from(classes.get(classes.of(1)).bytes), OBJECT_MIN_BYTES);
    }

    #[test]
    fn slack_near_two_kib_stays_under_four_percent() {
        let classes = Classes::new();
        for len in 1800..=2300 {
            let class = classes.get(classes.of(len));
            let taken = SPAN_BYTES as f64 / f64::from(class.objects);
            assert!(taken / (len as f64) < 1.04, "{len} takes {taken}");
        }
    }
}

//! The sizes that a span may be divided into.
//!
//! Each class is the largest multiple of [`GRAIN_BYTES`] that fits a span a whole number of times, so a span has next
//! to no tail. Neighbours differ by a 64th at least, and by a grain: near 2 KiB the mean slack of an object is 2 %.
//! Finer classes would slack less and leave more spans partly filled, one a class.

use spillway_core::PAGE_BYTES;

/// A span: the unit that belongs to one class. 32 objects of 2 KiB.
pub(crate) const SPAN_BYTES: u32 = 64 << 10;
/// The largest object: a page as it is.
const WHOLE_BYTES: u32 = 4096;
const _: () = assert!(WHOLE_BYTES as usize == PAGE_BYTES);
/// Objects start and end at multiples of this.
const GRAIN_BYTES: u32 = 16;
/// The smallest object. A page that shrinks further costs no less: its slot and index entry take 40 bytes anyway.
const OBJECT_MIN_BYTES: u32 = 128;
/// Objects in a span at most.
pub(crate) const OBJECTS_MAX: usize = (SPAN_BYTES / OBJECT_MIN_BYTES) as usize;

/// One size class.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Class {
    /// Bytes an object takes.
    pub(crate) bytes: u32,
    /// Objects in a span.
    pub(crate) objects: u32,
}

/// All classes, largest first, and which one serves a length.
pub(crate) struct Classes {
    classes: Vec<Class>,
    /// By length in grains, rounded up.
    of_grains: [u8; (WHOLE_BYTES / GRAIN_BYTES) as usize + 1],
}

impl Classes {
    pub(crate) fn new() -> Self {
        let mut classes: Vec<Class> = Vec::new();
        let mut limit = WHOLE_BYTES;
        for objects in SPAN_BYTES / WHOLE_BYTES..=SPAN_BYTES / OBJECT_MIN_BYTES {
            let bytes = SPAN_BYTES / objects / GRAIN_BYTES * GRAIN_BYTES;
            if bytes <= limit {
                classes.push(Class { bytes, objects });
                limit = bytes - (bytes / 64).max(GRAIN_BYTES);
            }
        }
        let of_grains = std::array::from_fn(|grains| {
            let fits = |class: &Class| class.bytes as usize >= grains * GRAIN_BYTES as usize;
            let fitting = classes.iter().rposition(fits).expect("the first class holds a whole page");
            u8::try_from(fitting).expect("fewer than 256 classes")
        });
        Self { classes, of_grains }
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.classes.len()
    }

    /// The smallest class for objects of `len` bytes, at most a page.
    pub(crate) fn of(&self, len: usize) -> u8 {
        self.of_grains[len.div_ceil(GRAIN_BYTES as usize)]
    }

    pub(crate) fn get(&self, class: u8) -> Class {
        self.classes[usize::from(class)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_fits_its_class_and_spans_hold_their_objects() {
        let classes = Classes::new();
        for len in 1..=PAGE_BYTES {
            let class = classes.get(classes.of(len));
            assert!(class.bytes as usize >= len);
            assert!(class.bytes * class.objects <= SPAN_BYTES);
        }
        assert_eq!(classes.get(classes.of(PAGE_BYTES)).bytes, WHOLE_BYTES);
        assert_eq!(classes.get(classes.of(1)).bytes, OBJECT_MIN_BYTES);
        assert!((1..classes.classes.len()).all(|at| classes.classes[at].bytes < classes.classes[at - 1].bytes));
    }

    #[test]
    fn slack_near_two_kib_stays_under_four_percent() {
        let classes = Classes::new();
        for len in 1800..=2300 {
            let class = classes.get(classes.of(len));
            let taken = f64::from(SPAN_BYTES) / f64::from(class.objects);
            assert!(taken / (len as f64) < 1.04, "{len} takes {taken}");
        }
    }
}

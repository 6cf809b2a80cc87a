//! One span: which of its objects live, and whose they are.

use crate::Handle;
use crate::classes::{Class, OBJECTS_MAX};

/// Lists of spans with room that each class has, by how many quarters are full.
pub(super) const FILLS: usize = 4;
/// Words of a bit for each object.
const WORDS: usize = OBJECTS_MAX / 64;
/// No span.
pub(super) const NONE: u32 = u32::MAX;

/// 64 KiB of objects of one class. Free when nothing lives in it.
pub(super) struct Span {
    /// Objects that live, a bit each.
    used: [u64; WORDS],
    /// By object: the handle of the page, so that an object can be moved.
    owners: Box<[u32]>,
    live: u16,
    class: u8,
    /// Neighbours in the list that it is in.
    pub(super) before: u32,
    pub(super) after: u32,
}

impl Span {
    /// A span that no class has.
    pub(super) fn free() -> Self {
        Self { used: [0; WORDS], owners: Box::default(), live: 0, class: 0, before: NONE, after: NONE }
    }

    /// Gives a free span to a class.
    pub(super) fn open(&mut self, class: u8, shape: Class) {
        debug_assert_eq!(self.live, 0);
        *self = Self { class, owners: vec![0; shape.objects as usize].into_boxed_slice(), ..Self::free() };
    }

    /// Takes an empty span from its class. Returns the bytes of tables that this freed.
    pub(super) fn close(&mut self) -> u64 {
        debug_assert_eq!(self.live, 0);
        let bytes = self.table_bytes();
        self.owners = Box::default();
        bytes
    }

    /// Bytes beside the span itself.
    pub(super) fn table_bytes(&self) -> u64 {
        size_of_val(&*self.owners) as u64
    }

    pub(super) fn class(&self) -> u8 {
        self.class
    }

    pub(super) fn live(&self) -> u16 {
        self.live
    }

    /// The list it belongs in: none when it is full, or empty and so about to be closed.
    pub(super) fn list(&self) -> Option<usize> {
        let (live, objects) = (usize::from(self.live), self.owners.len());
        (live > 0 && live < objects).then(|| usize::from(self.class) * FILLS + live * FILLS / objects)
    }

    /// Takes the first vacant object.
    ///
    /// # Panics
    /// When the span is full.
    pub(super) fn take(&mut self) -> u32 {
        let (word, bits) = (0..).zip(&mut self.used).find(|(_, bits)| **bits != u64::MAX).expect("a span with room");
        let bit = bits.trailing_ones();
        *bits |= 1 << bit;
        self.live += 1;
        word * u64::BITS + bit
    }

    /// Takes this very object; false if there is none such, or it lives.
    pub(super) fn take_this(&mut self, object: u32) -> bool {
        let bits = &mut self.used[(object / u64::BITS) as usize];
        let bit = 1 << (object % u64::BITS);
        let free = (object as usize) < self.owners.len() && *bits & bit == 0;
        if free {
            *bits |= bit;
            self.live += 1;
        }
        free
    }

    /// Returns an object.
    ///
    /// # Panics
    /// When it does not live.
    pub(super) fn put_back(&mut self, object: u32) {
        let bits = &mut self.used[(object / u64::BITS) as usize];
        let bit = 1 << (object % u64::BITS);
        assert!(*bits & bit != 0, "objects are freed once");
        *bits &= !bit;
        self.live -= 1;
    }

    pub(super) fn set_owner(&mut self, object: u32, owner: Handle) {
        self.owners[object as usize] = owner.bits();
    }

    /// The first object that lives, and its owner.
    pub(super) fn first(&self) -> Option<(u32, Handle)> {
        let (word, bits) = (0..).zip(&self.used).find(|(_, bits)| **bits != 0)?;
        let object = word * u64::BITS + bits.trailing_zeros();
        Some((object, Handle::from_bits(self.owners[object as usize]).expect("live objects have owners")))
    }
}

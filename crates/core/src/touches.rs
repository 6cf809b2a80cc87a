//! Access bits, where there are any: which pages were touched without raising a fault.

use crate::units::{Address, Span, TargetId};

/// A bit for each page of 2 MiB of address space, from the lowest on.
pub type Touches = [u64; 8];

/// Whoever can see access bits. Sweeps ask before they go over 2 MiB.
pub trait AccessBits {
    /// Which pages of the aligned 2 MiB that `span` lies in were touched since this was last asked; forgets those of `span`. None
    /// where that is not known.
    fn take(&mut self, target: TargetId, span: Span) -> Option<Touches>;
}

/// Nothing is known unless there is something that knows.
impl<T: AccessBits> AccessBits for Option<T> {
    fn take(&mut self, target: TargetId, span: Span) -> Option<Touches> {
        self.as_mut()?.take(target, span)
    }
}

/// Nothing is known.
impl AccessBits for () {
    fn take(&mut self, _: TargetId, _: Span) -> Option<Touches> {
        None
    }
}

/// The aligned 2 MiB that `address` lies in.
pub fn block_of(address: Address) -> Span {
    let start = Address(address.0 & !(BLOCK_BYTES - 1));
    Span { start, end: start.plus_bytes(BLOCK_BYTES) }
}

/// What one table of pages maps.
const BLOCK_BYTES: u64 = 2 << 20;

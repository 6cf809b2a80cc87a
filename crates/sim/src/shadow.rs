//! What each page of a guest must hold, worked out from its own calls alone.
//!
//! Two calls leave the answer open, and the shadow then allows both: a page under `MADV_FREE` may turn to zeros at any
//! time until it is written, and a page touched while a thread is inside `madvise` holds what was there or zeros.

use std::ops::Range;

/// What one page must hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Truth {
    /// This,
    pub value: u64,
    /// or zeros: the next read tells which.
    pub unknown: bool,
    /// or zeros at any time until it is written.
    pub lazy: bool,
    /// When it was last written or mapped.
    pub written: u64,
}

/// What each page of an address space must hold.
#[derive(Clone, Debug)]
pub struct Shadow(Vec<Truth>);

impl Shadow {
    /// Zeros everywhere.
    pub fn new(pages: usize) -> Self {
        Self(vec![Truth::default(); pages])
    }

    /// What the page at `at` must hold.
    pub fn at(&self, at: usize) -> Truth {
        self.0[at]
    }

    /// A read gave `got`; `removing` while a thread is inside `madvise` on this page. False when that cannot be.
    pub fn read(&mut self, at: usize, got: u64, removing: bool) -> bool {
        let truth = &mut self.0[at];
        if got == truth.value {
            truth.unknown &= removing;
            return true;
        }
        let legal = got == 0 && (truth.unknown || truth.lazy || removing);
        if legal {
            *truth = Truth { value: 0, unknown: false, lazy: false, written: truth.written };
        }
        legal
    }

    /// A write of `value`. What is written into a removal under way may be removed.
    pub fn write(&mut self, at: usize, value: u64, removing: bool, now: u64) {
        self.0[at] = Truth { value, unknown: removing, lazy: false, written: now };
    }

    /// `range` was mapped or unmapped: zeros.
    pub fn reset(&mut self, range: Range<usize>, now: u64) {
        self.0[range].fill(Truth { written: now, ..Truth::default() });
    }

    /// The page at `from` is at `to` now, and zeros are left behind. What moves out of a removal under way may or may
    /// not have been removed.
    pub fn relocate(&mut self, from: usize, to: usize, removing: bool, now: u64) {
        let mut truth = std::mem::replace(&mut self.0[from], Truth { written: now, ..Truth::default() });
        truth.unknown |= removing;
        truth.written = now;
        self.0[to] = truth;
    }

    /// A removal that was called at `since` has returned.
    pub fn removed(&mut self, range: Range<usize>, free: bool, since: u64) {
        for truth in &mut self.0[range] {
            if free {
                truth.lazy = true;
            } else if truth.written >= since {
                truth.unknown = true;
            } else {
                *truth = Truth { written: truth.written, ..Truth::default() };
            }
        }
    }

    /// The page at `at` may have been removed or not.
    pub fn doubt(&mut self, at: usize, free: bool) {
        self.0[at].unknown = true;
        self.0[at].lazy |= free;
    }
}

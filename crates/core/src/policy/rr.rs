//! Round-robin: a hand goes round the table, and takes every page that it meets (Lim et al., section 4).
//!
//! The fastest to choose, and blind: a page's turn comes round whether it is in use or not. It needs no signal. Only what
//! the kernel would not move is passed over once: its neighbours could not leave otherwise.

use super::{Pages, Policy};
use crate::table::Hand;
use crate::units::PageIndex;

/// See the module's documentation.
#[derive(Debug, Default)]
pub struct RoundRobin(Hand);

impl Policy for RoundRobin {
    fn next(&mut self, pages: &mut Pages<'_>) -> Option<PageIndex> {
        pages.sweep(&mut self.0, false)
    }

    fn pass_over(&mut self, pages: u64) {
        self.0.skip(pages);
    }

    fn step_back(&mut self) {
        self.0.step_back();
    }
}

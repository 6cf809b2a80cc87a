//! Clock: round-robin, with a second chance (Lim et al., section 4).
//!
//! The paper's clock passes over pages whose access bit is set. There are none here. Instead, a page is passed over once
//! if it came back from a buffer since it left (it was touched within moments of its capture), or if the kernel would not
//! move it. Both marks are in the page's entry, so that this policy costs no memory and hears of nothing.

use super::{Pages, Policy};
use crate::table::Hand;
use crate::units::PageIndex;

/// See the module's documentation.
#[derive(Debug, Default)]
pub struct Clock(Hand);

impl Policy for Clock {
    fn next(&mut self, pages: &mut Pages<'_>) -> Option<PageIndex> {
        pages.sweep(&mut self.0, true)
    }

    fn pass_over(&mut self, pages: u64) {
        self.0.skip(pages);
    }

    fn step_back(&mut self) {
        self.0.step_back();
    }
}

//! Not recently used: a clock that passes over what was touched since the hand last came by (Lim et al., section 4: their clock).
//!
//! It needs access bits ([`crate::touches`]). Where there are none it is [`super::clock`].

use super::{Pages, Policy};
use crate::table::Hand;
use crate::units::PageIndex;

/// See the module's documentation.
#[derive(Debug, Default)]
pub struct NotRecentlyUsed(Hand);

impl Policy for NotRecentlyUsed {
    fn next(&mut self, pages: &mut Pages<'_>) -> Option<PageIndex> {
        pages.sweep_untouched(&mut self.0)
    }

    fn pass_over(&mut self, pages: u64) {
        self.0.skip(pages);
    }

    fn step_back(&mut self) {
        self.0.step_back();
    }
}

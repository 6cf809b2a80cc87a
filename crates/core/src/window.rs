//! Windows, for study: at the start of each, every page in the target leaves once, or every page of a sample, so that the
//! next touch of it raises a fault.
//!
//! The sweep takes its time while the target runs. What is captured once a window and faulted back is not captured again
//! before the next, so each fault is the first touch of its page since the sweep passed it.

use crate::captures::is_kept;
use crate::evict::Run;
use crate::pager::Pager;
use crate::sample::hash;
use crate::streams::BLOCK_PAGES_MAX;
use crate::table::Hand;
use crate::units::TargetId;

impl Pager {
    /// A window begins: the sweep starts over.
    pub fn begin_window(&mut self) {
        self.window = Some(Hand::default());
    }

    /// Whether the sweep is under way.
    pub fn is_sweeping(&self) -> bool {
        self.window.is_some()
    }

    /// Up to `most` pages of one target that the sweep has come to, whose [`hash`] is below `hash_below`, as runs appended to
    /// `runs`. Pages of targets for which `may` is false are left out of this window. Returns whose pages they are; none
    /// when the sweep is over.
    pub fn next_window_capture(
        &mut self,
        most: u64,
        hash_below: u64,
        may: impl Fn(TargetId) -> bool,
        runs: &mut Vec<Run>,
    ) -> Option<TargetId> {
        let mut left = most.min(self.free_buffers.len() as u64);
        let mut hand = self.window?;
        let mut whose = None;
        while left > 0 {
            let Some(page) = self.table.next_candidate(&mut hand) else {
                self.window = None;
                return whose;
            };
            if hash(page.0) >= hash_below || is_kept(&self.kept, page) {
                continue;
            }
            let Some((target, address)) = self.regions.address_of(page).filter(|(target, _)| may(*target)) else {
                continue;
            };
            if *whose.get_or_insert(target) != target {
                hand.step_back();
                break;
            }
            match runs.last_mut() {
                Some(run)
                    if run.page.plus(run.pages) == page
                        && run.address.plus_pages(run.pages) == address
                        && run.pages < BLOCK_PAGES_MAX =>
                {
                    run.pages += 1;
                }
                _ => runs.push(Run { address, page, pages: 1 }),
            }
            left -= 1;
        }
        self.window = Some(hand);
        whose
    }
}

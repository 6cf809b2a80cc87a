//! The counts against the table.

use super::Pager;
use crate::page::State;
use crate::units::PageIndex;

impl Pager {
    /// Every count against the table: for tests and for the simulator.
    ///
    /// # Panics
    /// When an invariant of the module is broken.
    pub fn audit(&self) {
        let (mut mapped, mut fetching, mut writing, mut used) = (0, 0, 0, 0);
        let mut buffers: Vec<_> = self.free_buffers.clone();
        self.table.used_in(PageIndex(0), u64::MAX, |_, entry| {
            mapped += u64::from(entry.state() == State::Mapped);
            fetching += u64::from(entry.state() == State::Fetching);
            writing += u64::from(entry.state() == State::Writing);
            used += 1;
            buffers.extend(entry.buffer());
        });
        let counted = (self.table.mapped(), self.table.fetching(), self.table.writing(), self.table.used());
        assert_eq!((mapped, fetching, writing, used), counted);
        buffers.sort_unstable_by_key(|buffer| buffer.0);
        let owned = buffers.len() as u64 + self.set_aside;
        buffers.dedup();
        assert_eq!((owned, buffers.len() as u64 + self.set_aside), (self.buffers.into(), self.buffers.into()));
        self.audit_blocks();
        self.replacement.audit(|each| {
            self.table.used_in(PageIndex(0), u64::MAX, |page, entry| {
                let target = self.regions.of_page(page).expect("used pages are in regions").target;
                each(target, page, entry.state());
            });
        });
    }
}

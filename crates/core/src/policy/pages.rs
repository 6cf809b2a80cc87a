//! What a policy sees of the table, in a module of its own: what is private here no policy can reach.

use crate::blocks::Area;
use crate::table::{Hand, Table};
use crate::touches::Touches;
use crate::units::PageIndex;

/// What a policy sees of the table.
pub struct Pages<'a> {
    table: &'a mut Table,
    /// Chunks that may still be passed over.
    chunks: usize,
    /// Tells what was touched in a chunk, by a page of it.
    touched: &'a mut dyn FnMut(PageIndex) -> Option<Touches>,
}

impl<'a> Pages<'a> {
    /// A view for one batch: two turns, as the first may only take second chances.
    pub fn new(table: &'a mut Table, touched: &'a mut dyn FnMut(PageIndex) -> Option<Touches>) -> Self {
        let chunks = 2 * table.chunk_slots();
        Self { table, chunks, touched }
    }

    /// Whether the hand has been all the way round.
    pub(crate) fn is_round(&self) -> bool {
        self.chunks <= self.table.chunk_slots()
    }

    /// The area that `page` is in.
    pub(crate) fn area(&self, page: PageIndex) -> Option<Area> {
        self.table.area(page).map(|(area, _)| area)
    }

    /// The next page at or after `hand`, in the table's order, that may leave; see [`Table::sweep`].
    pub fn sweep(&mut self, hand: &mut Hand, believing: bool) -> Option<PageIndex> {
        self.table.sweep(hand, &mut self.chunks, believing, None)
    }

    /// The same; what was touched is passed over, where that can be seen.
    pub fn sweep_untouched(&mut self, hand: &mut Hand) -> Option<PageIndex> {
        self.table.sweep(hand, &mut self.chunks, true, Some(self.touched))
    }
}

//! A pager that takes over from one that was killed.
//!
//! The entries are believed for what they say of pages that are outside: where the bytes are. What was under way counts as
//! not having happened, which is right for each step:
//!
//! - *Installed, and the entry does not say so yet*: the page is in the target, nobody faults on it, and whatever is
//!   installed over it is refused (`Stop::Exists`). Until then it only counts wrong.
//! - *Moved out, and the entry does not say so yet*: the driver has a record of the capture, and collects it once more.
//! - *Being written*: its bytes are in its buffer; what the store made of it is given up.
//! - *An event that was read*: it is applied again, unless the book says that it was.
//! - *A page of no region*: its region was given up, and the page with it.

use crate::book::{Book, Margin, Unreadable, Void};
use crate::lasting::Lasting;
use crate::page::{BufferIndex, Entry, HandleBits, State};
use crate::pager::{Config, Pager, Plan};
use crate::table::Table;
use crate::units::{Address, PageIndex, Span, TargetId};

impl Pager {
    /// A pager without targets, of which another can take over when it is killed.
    pub fn lasting(config: Config, lasting: Lasting) -> Self {
        let Lasting { book, sheets: _, more } = lasting;
        let mut pager = Self::new(config);
        pager.table = Table::lasting(more);
        pager.regions.record();
        pager.book = Some(Book::new(book));
        pager.write_down();
        pager
    }

    /// Takes over what a pager has left behind. `is_kept` says whether the store has a page under a handle, `is_unread` whether the bytes
    /// of a page are still to come to a buffer (then [`Pager::read`] follows for it).
    ///
    /// A page that cannot be told is lost: an access fails loudly.
    ///
    /// # Errors
    /// When the book cannot be read. Nothing was changed then.
    pub fn take_over(
        config: Config,
        lasting: Lasting,
        is_kept: impl Fn(HandleBits) -> bool,
        is_unread: impl Fn(PageIndex, BufferIndex) -> bool,
    ) -> Result<Self, Unreadable> {
        let Lasting { book, sheets, more } = lasting;
        let (book, regions, margin) = Book::read(book)?;
        let mut pager = Self::new(config);
        (pager.table, pager.regions) = (Table::lasting(more), regions);
        let Margin { vacated, pending, applied, targets } = margin;
        (pager.vacated, pager.pending, pager.applied) = (vacated, pending, applied);
        for _ in 0..targets {
            pager.add_target();
        }
        let mut owned = vec![false; pager.buffers() as usize];
        let (regions, unread, inactive) = (&pager.regions, &mut pager.unread, &mut pager.inactive);
        let mut survives = |page: PageIndex, entry: Entry| {
            if regions.of_page(page).is_none_or(|region| region.target.0 >= targets) {
                return Entry::UNTOUCHED;
            }
            let entry = entry.survive();
            let kept = entry.handle().is_some_and(&is_kept);
            let entry = if kept { entry } else { entry.with_handle(None) };
            match (entry.state(), entry.buffer()) {
                (State::Inactive, Some(buffer)) => {
                    let taken = owned.get_mut(buffer.0 as usize).is_none_or(|owned| std::mem::replace(owned, true));
                    match (taken, is_unread(page, buffer)) {
                        (true, _) => return Entry::LOST,
                        (false, true) => unread[buffer.0 as usize] = true,
                        (false, false) => inactive.push_back(page),
                    }
                    entry
                }
                (State::Remote, _) if !kept => Entry::LOST,
                _ => entry,
            }
        };
        let mut has_lost = false;
        let mut survivor = |page, entry| {
            let entry = survives(page, entry);
            has_lost |= entry.state() == State::Lost;
            entry
        };
        sheets.into_iter().for_each(|sheet| pager.table.take_over(sheet, &mut survivor));
        pager.has_lost = has_lost;
        pager.free_buffers.retain(|buffer| !owned[buffer.0 as usize]);
        pager.book = Some(book);
        pager.restock();
        pager.in_burst = true;
        pager.note_local();
        pager.write_down();
        Ok(pager)
    }

    /// What has changed becomes what another pager will find.
    pub(crate) fn write_down(&mut self) {
        let targets = self.targets();
        let Some(book) = &mut self.book else { return };
        // Lent for the time of the writing.
        let (vacated, pending) = (std::mem::take(&mut self.vacated), std::mem::take(&mut self.pending));
        let margin = Margin { vacated, pending, applied: self.applied, targets };
        book.write(&mut self.regions, &margin);
        (self.vacated, self.pending) = (margin.vacated, margin.pending);
    }

    /// The changes that follow are those of an event, by its number, which only grows.
    pub fn begin_event(&mut self, number: u64) {
        self.applied = number;
    }

    /// The last event whose changes are all there.
    pub fn last_event(&self) -> u64 {
        self.applied
    }

    /// Everything that was announced to be unmapped and that [`Pager::unmapped`] was not called for.
    pub fn pending_unmapped(&self) -> &[(TargetId, Span)] {
        &self.pending
    }

    /// Address spaces there ever were.
    pub fn targets(&self) -> u32 {
        u32::try_from(self.streams.len()).expect("fewer processes than 2^32")
    }

    /// Every reference to the store.
    pub fn each_handle(&self, mut each: impl FnMut(HandleBits)) {
        self.table.used_in(PageIndex(0), u64::MAX, |_, entry| entry.handle().into_iter().for_each(&mut each));
    }

    /// Where pages are that were announced to be removed, and may be there still.
    pub fn removing(&self, target: TargetId) -> Vec<Span> {
        let mut spans: Vec<Span> = Vec::new();
        for region in self.regions.of(target) {
            self.table.used_in(region.first, region.span.pages(), |page, entry| {
                let Some(address) = region.address_of(page).filter(|_| entry.is_removing()) else { return };
                match spans.last_mut().filter(|last| last.end == address) {
                    Some(last) => last.end = address.plus_pages(1),
                    None => spans.push(Span::of_pages(address, 1)),
                }
            });
        }
        spans
    }

    /// What began at `from` of `target` begins at `to`: it is memory of the pager's own, and another pager has it elsewhere.
    pub fn rebase(&mut self, target: TargetId, from: Address, to: Address) {
        let Some(end) = self.regions.of(target).map(|region| region.span.end).last() else { return };
        self.regions.relocate(target, Span { start: from, end }, to);
        self.write_down();
    }

    /// Sets a buffer aside, as [`Pager::take_buffer`] does, by its number; false where it is in use.
    pub fn claim_buffer(&mut self, buffer: BufferIndex) -> bool {
        let Some(at) = self.free_buffers.iter().position(|free| *free == buffer) else { return false };
        self.free_buffers.swap_remove(at);
        self.set_aside += 1;
        true
    }

    /// What tells whether the page at `address`, which was seen in the target and counts as outside, is outside: installing it
    /// is refused if not. None where it does not count as outside. [`Pager::installed_ahead`] is next.
    pub fn doubt(&mut self, target: TargetId, address: Address) -> Option<Plan> {
        let address = address.page();
        let region = self.regions.at(target, address)?;
        let page = region.page_at(address);
        let entry = self.table.get(page);
        match entry.state() {
            State::Inactive | State::Writing => entry.buffer().map(|buffer| Plan::Buffer { address, page, buffer }),
            State::Remote => Some(self.fetch(&region, page.0..page.0 + 1, 0)),
            State::Untouched | State::Mapped | State::Fetching | State::Lost => None,
        }
    }

    /// Whether `page` may be captured.
    pub fn may_capture(&self, page: PageIndex) -> bool {
        self.table.get(page).is_candidate()
    }

    /// Whether the driver has no room for something that whoever takes over must know of a target: nobody can, for as long.
    pub fn forsake(&self, forsaken: bool) {
        self.book.iter().for_each(|book| book.void(Void::Targets, forsaken));
    }

    /// Whether another pager could take over now.
    pub fn can_be_taken_over(&self) -> bool {
        self.book.is_some() && !self.lacks_room()
    }

    /// Whether something that another pager must know has no room.
    pub fn lacks_room(&self) -> bool {
        self.book.as_ref().is_some_and(Book::is_void)
    }

    /// The buffer of a page that was moved out and whose bytes are still to come ([`Pager::read`]).
    pub fn unread_buffer(&self, page: PageIndex) -> Option<BufferIndex> {
        self.table.get(page).buffer().filter(|buffer| self.unread[buffer.0 as usize])
    }
}

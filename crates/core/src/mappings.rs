//! What targets do to their own memory: map, unmap, move, give back, fork.
//!
//! The driver reports these in the order in which the kernel announced them, and never while a capture of that target
//! is under way: then the table is right about every page that a capture may touch.

use crate::page::{BufferIndex, Entry, HandleBits, State, Step};
use crate::pager::Pager;
use crate::units::{Address, PageIndex, Span, TargetId};

/// A page that parent and child of a fork both need and that had not reached the store: copy the one buffer to the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferCopy {
    /// The parent's.
    pub from: BufferIndex,
    /// The child's.
    pub to: BufferIndex,
}

/// Where a mapping was before it moved. The kernel says that it is unmapped there too, unless the mapping was to stay
/// (`MREMAP_DONTUNMAP`), but only when the word of the move was read. Meanwhile another thread may move a mapping there.
#[derive(Debug)]
pub(crate) struct Vacated {
    pub(crate) target: TargetId,
    pub(crate) span: Span,
    /// It did: the word to come is not about what is there now.
    pub(crate) retaken: bool,
}

impl Pager {
    /// `span` is registered from now on; returns the parts that were not before, whose resident pages are unknown.
    pub fn add_region(&mut self, target: TargetId, span: Span) -> Vec<Span> {
        let added = self.regions.add(target, span).iter().map(|region| region.span).collect();
        self.write_down();
        added
    }

    /// A scan saw the pages of `span` resident at a time after they were registered. Pages that have been captured
    /// since stay what they are.
    pub fn found(&mut self, target: TargetId, span: Span) {
        for region in self.regions.within(target, span) {
            for i in 0..region.span.pages() {
                let page = region.first.plus(i);
                if self.table.get(page).state() == State::Untouched {
                    self.step(page, Step::Find);
                }
            }
        }
        self.in_burst |= self.local_pages() > self.budget_pages();
        self.note_local();
    }

    /// What was not touched in `span` is in the store, and nowhere else: page after page under the handle that `of` gives for
    /// its address. How the memory of a virtual machine starts out when it goes on from a file.
    pub fn laid_out(&mut self, target: TargetId, span: Span, mut of: impl FnMut(Address) -> HandleBits) {
        for region in self.regions.within(target, span) {
            for i in 0..region.span.pages() {
                let page = region.first.plus(i);
                if self.table.get(page).state() == State::Untouched {
                    let handle = of(region.span.start.plus_pages(i));
                    self.table.update(page, |entry| *entry = Entry::remote(handle));
                }
            }
        }
    }

    /// A scan saw the pages of `span` resident, and their removal was announced since it began. Returns whether any was
    /// not known to be: those wait as removed ones do.
    pub fn found_removing(&mut self, target: TargetId, span: Span) -> bool {
        let mut any = false;
        for region in self.regions.within(target, span) {
            for page in (0..region.span.pages()).map(|i| region.first.plus(i)) {
                if self.table.get(page).state() == State::Untouched {
                    self.step(page, Step::Find);
                    self.step(page, Step::Remove);
                    any = true;
                }
            }
        }
        self.in_burst |= self.local_pages() > self.budget_pages();
        self.note_local();
        any
    }

    /// `MADV_DONTNEED` or `MADV_FREE` is about to happen (`UFFD_EVENT_REMOVE`). Returns whether pages of `span` are
    /// still in the target: those wait for [`Pager::removal_seen`] or the next fault.
    pub fn removed(&mut self, target: TargetId, span: Span) -> bool {
        let mut mapped = false;
        self.for_each_used(target, span, |pager, page, entry| {
            mapped |= entry.state() == State::Mapped;
            pager.part(page);
            pager.step(page, Step::Remove);
        });
        mapped
    }

    /// Whether the removal of `page` was announced, and it is not known yet what became of it.
    pub fn is_being_removed(&self, page: PageIndex) -> bool {
        self.table.get(page).is_removing()
    }

    /// A scan after the removal of `span` saw no resident page in `gone`.
    pub fn removal_seen(&mut self, target: TargetId, gone: Span) {
        self.for_each_removing(target, gone, Step::RemoveDone);
    }

    /// No removal of `span` can be under way any more: what is still resident was spared (`MADV_FREE`).
    pub fn removal_over(&mut self, target: TargetId, span: Span) {
        self.for_each_removing(target, span, Step::RemoveSpared);
    }

    /// `span` is unmapped (`UFFD_EVENT_UNMAP`), but for what of it is in `kept`.
    pub fn unmapped(&mut self, target: TargetId, span: Span, kept: &[Span]) {
        if let Some(late) = self.pending.iter().position(|pending| *pending == (target, span)) {
            self.pending.swap_remove(late);
        }
        self.unmap(target, span, kept);
        self.write_down();
    }

    /// `span` is said to be unmapped, and [`Pager::unmapped`] is to follow.
    pub fn announced_unmapped(&mut self, target: TargetId, span: Span) {
        self.pending.push((target, span));
        self.write_down();
    }

    fn unmap(&mut self, target: TargetId, span: Span, kept: &[Span]) {
        match self.vacated.iter().position(|vacated| vacated.target == target && vacated.span == span) {
            Some(late) if self.vacated.swap_remove(late).retaken => return,
            Some(_) => {}
            None => self.vacated.retain(|it| it.target != target || it.retaken || it.span.intersect(span).is_none()),
        }
        span.without(kept.iter().copied()).into_iter().for_each(|span| self.forget_all(target, span));
    }

    fn forget_all(&mut self, target: TargetId, span: Span) {
        self.cut_out(target, span);
        self.for_each_used(target, span, |pager, page, entry| pager.forget(page, entry));
        self.regions.remove(target, span);
    }

    /// The mapping at `span` is at `to` now (`UFFD_EVENT_REMAP`).
    pub fn remapped(&mut self, target: TargetId, span: Span, to: Address) {
        let there = Span::of_pages(to, span.pages());
        self.forget_all(target, there);
        self.cut_out(target, span);
        self.regions.relocate(target, span, to);
        // A removal under way goes by address: it has happened, or will happen elsewhere.
        self.for_each_removing(target, there, Step::RemoveSpared);
        let mine = |vacated: &&mut Vacated| vacated.target == target;
        let overlaps = |vacated: &Vacated, span| vacated.span.intersect(span).is_some();
        self.vacated.iter_mut().filter(mine).for_each(|vacated| vacated.retaken |= overlaps(vacated, there));
        self.vacated.retain(|it| it.target != target || it.retaken || !overlaps(it, span));
        self.vacated.push(Vacated { target, span, retaken: false });
        self.write_down();
    }

    /// The target is gone, with all of its memory.
    pub fn ended(&mut self, target: TargetId) {
        self.vacated.retain(|vacated| vacated.target != target);
        self.kept.retain(|(_, whose)| *whose != target);
        self.pending.retain(|(whose, _)| *whose != target);
        self.forget_all(target, Span { start: Address(0), end: Address(!0xfff) });
        self.replacement.end_target(target);
        self.write_down();
    }

    /// As [`Pager::ended`], of a few pages at a time: of no more than `most`. True when nothing is left of `target`.
    pub fn bury(&mut self, target: TargetId, most: u64) -> bool {
        let mut left = most;
        while let Some(region) = self.regions.next_at(target, Address(0)) {
            if left == 0 {
                self.write_down();
                return false;
            }
            let pages = region.span.pages().min(left);
            self.forget_all(target, Span::of_pages(region.span.start, pages));
            left -= pages;
        }
        self.ended(target);
        true
    }

    /// `parent` forked: the child's address space starts with what the parent had evicted. What is resident is shared
    /// with the child by the kernel; it is counted for the child only once the child is scanned. `share` makes one more
    /// reference to a stored page, `copy` a copy of what is in a buffer. Another pager finds all of the child, or nothing.
    pub fn forked(
        &mut self,
        parent: TargetId,
        mut share: impl FnMut(HandleBits) -> HandleBits,
        mut copy: impl FnMut(BufferCopy),
    ) -> TargetId {
        let child = self.new_target();
        self.replacement.join(child, parent);
        let regions: Vec<_> = self.regions.of(parent).collect();
        for region in regions {
            let twin = self.regions.add(child, region.span)[0];
            let mut evicted = Vec::new();
            self.table.used_in(region.first, region.span.pages(), |page, entry| {
                if entry.state() != State::Mapped {
                    evicted.push((twin.first.plus(page.0 - region.first.0), entry));
                }
            });
            for (page, entry) in evicted {
                self.inherit(page, entry, &mut share, &mut copy);
            }
        }
        self.write_down();
        child
    }

    fn inherit(
        &mut self,
        page: PageIndex,
        entry: Entry,
        share: &mut impl FnMut(HandleBits) -> HandleBits,
        copy: &mut impl FnMut(BufferCopy),
    ) {
        match (entry.state(), entry.buffer(), entry.handle()) {
            (State::Remote | State::Fetching, _, Some(handle)) => {
                let shared = share(handle);
                self.table.update(page, |entry| *entry = Entry::remote(shared));
            }
            (State::Inactive | State::Writing, Some(from), _) => {
                if let Some(to) = self.take_buffer() {
                    copy(BufferCopy { from, to });
                    self.step(page, Step::Find);
                    self.step(page, Step::Capture(to));
                    self.set_aside -= 1;
                    self.inactive.push_back(page);
                } else {
                    self.table.update(page, |entry| *entry = Entry::LOST);
                    self.counters.lost_pages += 1;
                    self.has_lost = true;
                }
            }
            _ => self.table.update(page, |entry| *entry = Entry::LOST),
        }
    }

    /// No block has pages in `span` and beside it.
    fn cut_out(&mut self, target: TargetId, span: Span) {
        for part in self.regions.within(target, span) {
            self.part_before(part.first);
            self.part_before(part.first.plus(part.span.pages()));
        }
    }

    fn forget(&mut self, page: PageIndex, entry: Entry) {
        self.part(page);
        self.step(page, Step::Remove);
        if entry.state() == State::Mapped {
            self.step(page, Step::RemoveDone);
        }
    }

    fn for_each_removing(&mut self, target: TargetId, span: Span, step: Step) {
        self.for_each_used(target, span, |pager, page, entry| {
            if entry.is_removing() {
                pager.step(page, step);
            }
        });
    }

    fn for_each_used(&mut self, target: TargetId, span: Span, mut each: impl FnMut(&mut Self, PageIndex, Entry)) {
        for region in self.regions.within(target, span) {
            let mut used = Vec::new();
            self.table.used_in(region.first, region.span.pages(), |page, entry| used.push((page, entry)));
            used.into_iter().for_each(|(page, entry)| each(self, page, entry));
        }
    }
}

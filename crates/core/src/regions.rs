//! Which addresses of which target are managed, and which pages they name.
//!
//! A page keeps its [`PageIndex`] when its mapping moves; indices are handed out once and never again, so a stale
//! index names nothing rather than something else.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ops::Bound::{Excluded, Included, Unbounded};

use crate::table::CHUNK_PAGES;
use crate::units::{Address, PAGE_BYTES_U64, PageIndex, Span, TargetId};

/// A managed range of one target, or the part of it that a question was about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Whose it is.
    pub target: TargetId,
    /// Where it is mapped.
    pub span: Span,
    /// The page at its start; the others follow.
    pub first: PageIndex,
}

impl Region {
    /// The page at `address`, which must lie inside.
    pub fn page_at(&self, address: Address) -> PageIndex {
        self.first.plus(address.pages_since(self.span.start))
    }

    /// Where `page` is, if it is in this region.
    pub fn address_of(&self, page: PageIndex) -> Option<Address> {
        let nth = page.0.checked_sub(self.first.0)?;
        (nth < self.span.pages()).then(|| self.span.start.plus_pages(nth))
    }

    /// Whether its pages lie in the table's chunks as they do in 2 MiB of address space: not any more after a move.
    pub fn is_aligned(&self) -> bool {
        let chunk = CHUNK_PAGES as u64;
        self.first.0 % chunk == self.span.start.0 / PAGE_BYTES_U64 % chunk
    }

    fn part(&self, span: Span) -> Self {
        Self { target: self.target, span, first: self.page_at(span.start) }
    }
}

/// All regions, by address and by page.
#[derive(Debug, Default)]
pub struct Regions {
    by_address: BTreeMap<(TargetId, Address), Region>,
    by_page: BTreeMap<PageIndex, Region>,
    /// The one that was found last, as long as nothing changed since: mostly it is asked for again.
    found: Cell<Option<Region>>,
    next: u64,
    /// What has changed, for the book; none where nobody keeps one.
    changes: Option<Vec<Change>>,
}

/// A change that all others are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// This region is there.
    Put(Region),
    /// The region that begins with this page is not there any more.
    Take(PageIndex),
}

impl Regions {
    /// The region that holds `address`.
    pub fn at(&self, target: TargetId, address: Address) -> Option<Region> {
        let holds =
            |region: &Region| region.target == target && (region.span.start..region.span.end).contains(&address);
        self.found(holds, || {
            let range = (Included((target, Address(0))), Included((target, address)));
            self.by_address.range(range).next_back().map(|(_, region)| *region)
        })
    }

    /// The region that holds `address`, or the next one of `target` behind it.
    pub fn next_at(&self, target: TargetId, address: Address) -> Option<Region> {
        let behind = || {
            let range = (Excluded((target, address)), Included((target, Address(u64::MAX))));
            self.by_address.range(range).next().map(|(_, region)| *region)
        };
        self.at(target, address).or_else(behind)
    }

    /// The region that `page` is in; none when its mapping is gone.
    pub fn of_page(&self, page: PageIndex) -> Option<Region> {
        let holds = |region: &Region| region.address_of(page).is_some();
        self.found(holds, || self.by_page.range((Unbounded, Included(page))).next_back().map(|(_, region)| *region))
    }

    /// The region that was found last, if it is that again, and else the one that is searched for, if it is that.
    fn found(&self, holds: impl Fn(&Region) -> bool, search: impl FnOnce() -> Option<Region>) -> Option<Region> {
        let again = self.found.get().filter(&holds);
        if again.is_some() {
            return again;
        }
        let region = search().filter(holds)?;
        self.found.set(Some(region));
        Some(region)
    }

    /// The address at which `page` is mapped, and in which target; none when its mapping is gone.
    pub fn address_of(&self, page: PageIndex) -> Option<(TargetId, Address)> {
        self.of_page(page).and_then(|region| Some((region.target, region.address_of(page)?)))
    }

    /// The managed parts of `span`, in order of address.
    pub fn within(&self, target: TargetId, span: Span) -> Vec<Region> {
        let before = self.at(target, span.start).map(|region| region.part(region.span.intersect(span).unwrap_or(span)));
        let range = (Excluded((target, span.start)), Excluded((target, span.end)));
        let after = self.by_address.range(range);
        before
            .into_iter()
            .chain(after.filter_map(|(_, region)| Some(region.part(region.span.intersect(span)?))))
            .collect()
    }

    /// Whether all of `span` is managed.
    pub fn covers(&self, target: TargetId, span: Span) -> bool {
        self.within(target, span).iter().map(|region| region.span.pages()).sum::<u64>() == span.pages()
    }

    /// All regions of `target`, in order of address.
    pub fn of(&self, target: TargetId) -> impl Iterator<Item = Region> + '_ {
        let range = (Included((target, Address(0))), Included((target, Address(u64::MAX))));
        self.by_address.range(range).map(|(_, region)| *region)
    }

    /// Adds what of `span` is not managed yet; returns the new parts.
    pub fn add(&mut self, target: TargetId, span: Span) -> Vec<Region> {
        let mut cursor = span.start;
        let mut added = Vec::new();
        let known = self.within(target, span);
        for gap_end in known.iter().map(|region| region.span).chain([Span { start: span.end, end: span.end }]) {
            if cursor < gap_end.start {
                added.push(self.insert_new(target, Span { start: cursor, end: gap_end.start }));
            }
            cursor = gap_end.end;
        }
        added
    }

    /// Forgets `span`, splitting what reaches over its ends; returns the parts that were managed.
    pub fn remove(&mut self, target: TargetId, span: Span) -> Vec<Region> {
        let parts = self.within(target, span);
        for part in &parts {
            let whole = self.at(target, part.span.start).expect("the part came from it");
            self.take(whole);
            if whole.span.start < part.span.start {
                self.put(whole.part(Span { start: whole.span.start, end: part.span.start }));
            }
            if part.span.end < whole.span.end {
                self.put(whole.part(Span { start: part.span.end, end: whole.span.end }));
            }
        }
        parts
    }

    /// The pages of `span` are mapped at `to` from now on. `to` must be free (a moved mapping replaces what was there).
    pub fn relocate(&mut self, target: TargetId, span: Span, to: Address) {
        for part in self.remove(target, span) {
            let start = to.plus_pages(part.span.start.pages_since(span.start));
            self.put(Region { target, span: Span::of_pages(start, part.span.pages()), first: part.first });
        }
    }

    fn insert_new(&mut self, target: TargetId, span: Span) -> Region {
        // A large region starts congruent with its address modulo a chunk, so that a chunk covers an aligned 2 MiB of
        // address space. Small ones share chunks: a thousand regions of a page each must not cost a thousand chunks.
        let chunk = CHUNK_PAGES as u64;
        let first = if span.pages() < chunk {
            self.next
        } else {
            self.next.next_multiple_of(chunk) + span.start.pages_since(Address(0)) % chunk
        };
        let region = Region { target, span, first: PageIndex(first) };
        self.next = first + span.pages();
        self.put(region);
        region
    }

    /// From now on, changes are kept until they are asked for.
    pub(crate) fn record(&mut self) {
        self.changes.get_or_insert_default();
    }

    /// What has changed since this was last asked.
    pub(crate) fn changes(&mut self) -> impl Iterator<Item = Change> {
        self.changes.as_mut().into_iter().flat_map(|changes| changes.drain(..))
    }

    /// All regions of all targets.
    pub(crate) fn all(&self) -> impl Iterator<Item = Region> + '_ {
        self.by_address.values().copied()
    }

    /// Puts a region where it was, unless something is there.
    pub(crate) fn put_back(&mut self, region: Region) -> Option<()> {
        let end = region.first.0.checked_add(region.span.pages())?;
        let before = self.by_page.range(..PageIndex(end)).next_back();
        let overlaps = before.is_some_and(|(first, its)| first.0 + its.span.pages() > region.first.0);
        if overlaps || !self.within(region.target, region.span).is_empty() {
            return None;
        }
        self.next = self.next.max(end);
        self.put(region);
        Some(())
    }

    /// Takes the region that begins with this page; none if none does.
    pub(crate) fn take_back(&mut self, first: PageIndex) -> Option<()> {
        self.take(*self.by_page.get(&first)?);
        Some(())
    }

    fn put(&mut self, region: Region) {
        self.changes.iter_mut().for_each(|changes| changes.push(Change::Put(region)));
        self.found.set(None);
        self.by_address.insert((region.target, region.span.start), region);
        self.by_page.insert(region.first, region);
    }

    fn take(&mut self, region: Region) {
        self.changes.iter_mut().for_each(|changes| changes.push(Change::Take(region.first)));
        self.found.set(None);
        self.by_address.remove(&(region.target, region.span.start));
        self.by_page.remove(&region.first);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TARGET: TargetId = TargetId(1);

    fn span(start: u64, end: u64) -> Span {
        Span { start: Address(start * 4096), end: Address(end * 4096) }
    }

    fn spans(regions: &[Region]) -> Vec<Span> {
        regions.iter().map(|region| region.span).collect()
    }

    #[test]
    fn adding_fills_only_the_gaps() {
        let mut regions = Regions::default();
        assert_eq!(spans(&regions.add(TARGET, span(10, 20))), [span(10, 20)]);
        assert_eq!(spans(&regions.add(TARGET, span(30, 40))), [span(30, 40)]);
        assert_eq!(spans(&regions.add(TARGET, span(5, 50))), [span(5, 10), span(20, 30), span(40, 50)]);
        assert_eq!(spans(&regions.add(TARGET, span(5, 50))), []);
        assert_eq!(regions.add(TargetId(2), span(5, 50)).len(), 1);
    }

    #[test]
    fn a_hole_splits_a_region_and_pages_keep_their_identity() {
        let mut regions = Regions::default();
        let whole = regions.add(TARGET, span(0, 100))[0];
        assert_eq!(spans(&regions.remove(TARGET, span(40, 60))), [span(40, 60)]);
        assert_eq!(regions.at(TARGET, Address(50 * 4096)), None);
        for page in [0_u64, 39, 60, 99] {
            let address = Address(page * 4096);
            let region = regions.at(TARGET, address).expect("outside the hole");
            assert_eq!(region.page_at(address), whole.first.plus(page));
            assert_eq!(regions.address_of(whole.first.plus(page)), Some((TARGET, address)));
        }
        assert_eq!(regions.address_of(whole.first.plus(50)), None);
    }

    #[test]
    fn a_moved_mapping_keeps_its_pages() {
        let mut regions = Regions::default();
        let whole = regions.add(TARGET, span(0, 10))[0];
        regions.relocate(TARGET, span(2, 6), Address(100 * 4096));
        assert_eq!(regions.address_of(whole.first.plus(3)), Some((TARGET, Address(101 * 4096))));
        assert_eq!(spans(&regions.of(TARGET).collect::<Vec<_>>()), [span(0, 2), span(6, 10), span(100, 104)]);
        regions.add(TARGET, span(2, 6));
        let again = regions.at(TARGET, Address(3 * 4096)).expect("added");
        assert_ne!(again.page_at(Address(3 * 4096)), whole.first.plus(3), "an index is never used twice");
    }

    #[test]
    fn what_was_found_last_is_not_found_where_it_is_no_more() {
        let mut regions = Regions::default();
        let whole = regions.add(TARGET, span(0, 100))[0];
        let (address, page) = (Address(50 * 4096), whole.first.plus(50));
        assert_eq!(regions.at(TARGET, address), Some(whole));
        assert_eq!((regions.at(TargetId(2), address), regions.at(TARGET, Address(100 * 4096))), (None, None));
        regions.relocate(TARGET, span(40, 60), Address(200 * 4096));
        assert_eq!(regions.at(TARGET, address), None);
        assert_eq!(regions.address_of(page), Some((TARGET, Address(210 * 4096))));
        regions.remove(TARGET, span(210, 211));
        assert_eq!(regions.address_of(page), None);
        assert_eq!(regions.at(TARGET, Address(210 * 4096)), None);
        assert_eq!(regions.address_of(page.plus(1)), Some((TARGET, Address(211 * 4096))));
    }

    #[test]
    fn within_clips_at_both_ends() {
        let mut regions = Regions::default();
        regions.add(TARGET, span(0, 10));
        regions.add(TARGET, span(20, 30));
        assert_eq!(spans(&regions.within(TARGET, span(5, 25))), [span(5, 10), span(20, 25)]);
        assert_eq!(spans(&regions.within(TARGET, span(10, 20))), []);
        assert_eq!(spans(&regions.within(TARGET, span(0, 1))), [span(0, 1)]);
    }
}

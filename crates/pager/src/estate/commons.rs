//! What is written down of files of memory that several targets have mapped ([`crate::commons`]).
//!
//! Which mappings show one is not: that is asked of the kernel again. What nobody could ask is what was just being taken out:
//! between the call that takes a page out of the file and the entry that says so its bytes are in a buffer, and nowhere else.

use std::sync::atomic::Ordering::{Relaxed, Release};

use spillway_core::page::BufferIndex;
use spillway_core::shares::Share;
use spillway_core::{Address, PAGE_BYTES_U64, PageIndex, Span, TargetId, TreeId};

use super::{COMMONS, Estate, PAGER, RECORD_WORDS, REMOVALS, REMOVALS_MAX, RUNS, STARTED, WHO, halves, pair};
use crate::procfs::FileId;
use crate::sys::agent::BATCH_PAGES;
use crate::tally::Tally;

// Words of a file.
const DEVICE: usize = COMMONS + 1;
const INODE: usize = COMMONS + 2;
/// Which pager takes pages out, and when that was started.
const TAKER: usize = COMMONS + 3;
const TAKER_STARTED: usize = COMMONS + 4;
/// A word for each page that is being taken out.
const LEAVING: usize = RUNS;
const _: () = assert!(TAKER_STARTED < LEAVING && LEAVING + BATCH_PAGES <= RECORD_WORDS);
/// Such a word has the number of a buffer in its low bits.
const BUFFER_BITS: u32 = 12;

/// What is known of a file.
#[derive(Clone, Debug)]
pub struct FoundCommons {
    /// Its identity in the core.
    pub id: TargetId,
    /// The tree that it belongs to,
    pub tree: TreeId,
    /// by which process that is known, and when it was started.
    pub root: (i32, u64),
    /// and what it may have of local memory.
    pub share: Share,
    /// Which file it is.
    pub file: FileId,
    /// Somebody may have a descriptor of it.
    pub may_be_open: bool,
    /// What was being taken out of it: by which number that is written down, which page, and where its bytes are.
    pub leaving: Vec<(usize, PageIndex, BufferIndex)>,
    /// Who did that, and when that process was started. A call that somebody holds up outlives the process that has made it.
    pub taker: (i32, u64),
}

impl Estate {
    /// This target is a file of memory. False when there is no room for it.
    pub fn add_commons(&self, id: TargetId, file: FileId, may_be_open: bool, tally: &Tally) -> bool {
        let Some(slot) = self.slot_for(id, tally) else { return false };
        self.set(slot + COMMONS, 1 + u64::from(may_be_open));
        self.set(slot + DEVICE, pair(file.device.0.cast_signed(), file.device.1.cast_signed()));
        self.set(slot + INODE, file.inode);
        (0..BATCH_PAGES).for_each(|nth| self.set(slot + LEAVING + nth, 0));
        self.set(slot + WHO, u64::from(id.0) + 1);
        true
    }

    /// The bytes of these pages are in these buffers, and the pages are about to be taken out of the file. They are known by the
    /// numbers from `first` on.
    pub fn begin_leaving(&self, id: TargetId, first: usize, pages: impl IntoIterator<Item = (PageIndex, BufferIndex)>) {
        let Some(slot) = self.slot_of(id) else { return };
        self.set(slot + TAKER_STARTED, self.get(STARTED));
        self.set(slot + TAKER, self.get(PAGER));
        for (at, (page, buffer)) in (slot + LEAVING + first..).zip(pages) {
            self.set(at, (page.0 << BUFFER_BITS | u64::from(buffer.0)) + 1);
        }
    }

    /// It is known what has become of those.
    pub fn end_leaving(&self, id: TargetId, first: usize, pages: usize) {
        let Some(slot) = self.slot_of(id) else { return };
        (first..first + pages).for_each(|nth| self.set(slot + LEAVING + nth, 0));
    }

    /// All such files.
    pub fn commons(&self) -> Vec<FoundCommons> {
        self.slots().filter_map(|slot| self.found_commons(slot)).collect()
    }

    fn found_commons(&self, slot: usize) -> Option<FoundCommons> {
        let (id, kind) = (self.who(slot)?, self.get(slot + COMMONS));
        let may_be_open = (1..=2).contains(&kind).then_some(kind == 2)?;
        let (major, minor) = halves(self.get(slot + DEVICE));
        let device = (major.cast_unsigned(), minor.cast_unsigned());
        let file = FileId { device, inode: self.get(slot + INODE) };
        let leaving = (0..BATCH_PAGES).filter_map(|nth| {
            let word = self.get(slot + LEAVING + nth).checked_sub(1)?;
            let buffer = u32::try_from(word & ((1 << BUFFER_BITS) - 1)).ok()?;
            Some((nth, PageIndex(word >> BUFFER_BITS), BufferIndex(buffer)))
        });
        let taker = (halves(self.get(slot + TAKER)).0, self.get(slot + TAKER_STARTED));
        let (tree, root) = self.tree(slot);
        let share = self.share(slot);
        Some(FoundCommons { id, tree, root, share, file, may_be_open, leaving: leaving.collect(), taker })
    }

    /// What threads are about to remove of what they share, of whom a message is about to be read: it does not say so itself. Of more
    /// than there is room for, which takes as many threads, the rest is not written down.
    pub fn set_removals(&self, spans: &[Span]) {
        if spans.is_empty() && self.words[REMOVALS].load(Relaxed) == 0 {
            return;
        }
        let spans = &spans[..spans.len().min(REMOVALS_MAX)];
        self.set(REMOVALS, 0);
        for (at, span) in (REMOVALS + 1..).step_by(2).zip(spans) {
            self.words[at].store(span.start.0, Release);
            self.words[at + 1].store(span.end.0, Release);
        }
        self.set(REMOVALS, spans.len() as u64);
    }

    /// The same.
    pub fn removals(&self) -> Vec<Span> {
        let count = usize::try_from(self.get(REMOVALS)).unwrap_or(usize::MAX).min(REMOVALS_MAX);
        let spans = (REMOVALS + 1..).step_by(2).take(count);
        let spans = spans.map(|at| Span { start: Address(self.get(at)), end: Address(self.get(at + 1)) });
        let is_span = |span: &Span| span.start < span.end && (span.start.0 | span.end.0).is_multiple_of(PAGE_BYTES_U64);
        spans.filter(is_span).collect()
    }
}

#[cfg(test)]
mod tests {
    use spillway_store::vault::Vault;

    use super::*;

    const FILE: FileId = FileId { device: (0, 1), inode: 1 << 40 };

    fn pages(numbers: std::ops::Range<u64>) -> impl Iterator<Item = (PageIndex, BufferIndex)> {
        numbers.map(|nth| (PageIndex(nth << 40), BufferIndex(u32::try_from(nth).expect("a few"))))
    }

    #[test]
    fn what_is_on_its_way_out_is_found_until_that_is_known() {
        let estate = Estate::new(Vault::create().expect("memory"));
        let tally = Tally::new(TreeId(3), (4711, 99), Share::default(), false);
        let id = TargetId(5);
        assert!(estate.add_commons(id, FILE, true, &tally));
        assert!(estate.targets().is_empty(), "it is no process");
        estate.set_share(id, Share { min_pages: 7, max_pages: 70, weight: 9 });
        estate.begin_leaving(id, 0, pages(1..4));
        estate.begin_leaving(id, 3, pages(1000..1001));
        estate.end_leaving(id, 1, 2);
        let [found] = &estate.commons()[..] else { panic!("one file") };
        assert_eq!((found.id, found.tree, found.root, found.file), (id, TreeId(3), (4711, 99), FILE));
        assert_eq!((found.share.min_pages, found.share.weight, found.may_be_open), (7, 9, true));
        let left = [(0, 1), (3, 1000)]
            .map(|(noted, nth)| (noted, PageIndex(nth << 40), BufferIndex(nth.try_into().expect("small"))));
        assert_eq!(found.leaving, left);
        // What came after it knows nothing of that.
        estate.remove(id);
        assert!(estate.commons().is_empty());
        assert!(estate.add_commons(TargetId(6), FILE, false, &tally));
        let [found] = &estate.commons()[..] else { panic!("one file") };
        assert!(found.leaving.is_empty() && !found.may_be_open);
    }

    #[test]
    fn removals_are_those_of_the_last_look() {
        let estate = Estate::new(Vault::create().expect("memory"));
        let spans: Vec<Span> = (1..2000).map(|nth| Span::of_pages(Address(nth << 20), nth)).collect();
        assert!(estate.removals().is_empty());
        estate.set_removals(&spans[..3]);
        assert_eq!(estate.removals(), spans[..3]);
        estate.set_removals(&spans);
        assert_eq!(estate.removals(), spans[..REMOVALS_MAX]);
        assert!(estate.targets().is_empty() && estate.commons().is_empty(), "they stay within their words");
        estate.set_removals(&[]);
        assert!(estate.removals().is_empty());
    }
}

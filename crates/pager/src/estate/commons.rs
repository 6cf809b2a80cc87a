//! What is written down of files of memory that several targets have mapped ([`crate::commons`]).
//!
//! Which mappings show one is not: that is asked of the kernel again. What nobody could ask is what was just being taken out:
//! between the call that takes a page out of the file and the entry that says so its bytes are in a buffer, and nowhere else.

use std::ops::Range;
use std::sync::atomic::Ordering::{Relaxed, Release};

use spillway_core::page::BufferIndex;
use spillway_core::shares::Share;
use spillway_core::{Address, PAGE_BYTES_U64, PageIndex, Span, TargetId, TreeId};

use super::{
    COMMONS, Estate, PAGER, RECORD_WORDS, REMOVAL_WORDS, REMOVALS, REMOVALS_MAX, RUNS, STARTED, WHO, halves, pair,
};
use crate::procfs::FileId;
use crate::sys::agent::BATCH_PAGES;
use crate::sys::sched::thread_id;
use crate::tally::Tally;

// Words of a file.
const DEVICE: usize = COMMONS + 1;
const INODE: usize = COMMONS + 2;
/// Which pager takes pages out, and when that was started;
const TAKER: usize = COMMONS + 3;
const TAKER_STARTED: usize = COMMONS + 4;
/// which thread of it is at which of them, if any is.
const PUNCHING: usize = COMMONS + 5;
/// A word for each page that is being taken out.
const LEAVING: usize = RUNS;
const _: () = assert!(PUNCHING < LEAVING && LEAVING + BATCH_PAGES <= RECORD_WORDS);
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
    /// Who was at some of that.
    pub punching: Option<Punching>,
}

/// A thread that takes pages out of a file. A call that somebody holds up outlives the process that has made it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Punching {
    /// The process, and when that was started.
    pub process: (i32, u64),
    /// The thread.
    pub thread: i32,
    /// What it takes out, by the numbers by which that is written down.
    pub what: Range<usize>,
}

/// What a thread is about to remove of a file that it shares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotedRemoval {
    /// All that its call is about.
    pub whole: Span,
    /// What of that shows the file,
    pub shown: Span,
    /// and of which pages.
    pub first: PageIndex,
}

impl Estate {
    /// This target is a file of memory. False when there is no room for it.
    pub fn add_commons(&self, id: TargetId, file: FileId, may_be_open: bool, tally: &Tally) -> bool {
        let Some(slot) = self.slot_for(id, tally) else { return false };
        self.set(slot + COMMONS, 1 + u64::from(may_be_open));
        self.set(slot + DEVICE, pair(file.device.0.cast_signed(), file.device.1.cast_signed()));
        self.set(slot + INODE, file.inode);
        self.set(slot + PUNCHING, 0);
        (0..BATCH_PAGES).for_each(|nth| self.set(slot + LEAVING + nth, 0));
        self.set(slot + WHO, u64::from(id.0) + 1);
        true
    }

    /// The bytes of these pages are in these buffers, and the pages are about to be taken out of the file. They are known by their
    /// numbers from here on. Nothing else is on its way.
    pub fn begin_leaving(&self, id: TargetId, pages: impl IntoIterator<Item = (PageIndex, BufferIndex)>) {
        let Some(slot) = self.slot_of(id) else { return };
        self.set(slot + PUNCHING, 0);
        self.set(slot + TAKER_STARTED, self.get(STARTED));
        self.set(slot + TAKER, self.get(PAGER));
        for (at, (page, buffer)) in (slot + LEAVING..).zip(pages) {
            self.set(at, (page.0 << BUFFER_BITS | u64::from(buffer.0)) + 1);
        }
    }

    /// This thread takes out what is written down by these numbers, or has done so.
    pub fn set_punching(&self, id: TargetId, what: Option<Range<usize>>) {
        let Some(slot) = self.slot_of(id) else { return };
        let number = |at: usize| u16::try_from(at).expect("they are few");
        let word = |what: Range<usize>| {
            let which = u32::from(number(what.start)) << 16 | u32::from(number(what.end));
            pair(which.cast_signed(), thread_id())
        };
        self.set(slot + PUNCHING, what.map_or(0, word));
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
        let (which, thread) = halves(self.get(slot + PUNCHING));
        let [start, end] = [which.cast_unsigned() >> 16, which.cast_unsigned() & 0xffff].map(|number| number as usize);
        let process = (halves(self.get(slot + TAKER)).0, self.get(slot + TAKER_STARTED));
        let punching = (thread > 0).then_some(Punching { process, thread, what: start..end });
        let (tree, root) = self.tree(slot);
        let share = self.share(slot);
        Some(FoundCommons { id, tree, root, share, file, may_be_open, leaving: leaving.collect(), punching })
    }

    /// What threads are about to remove of what they share, of whom a message is about to be read: it does not say so itself. Of more
    /// than there is room for, which takes as many threads, the rest is not written down.
    pub fn set_removals(&self, removals: &[NotedRemoval]) {
        if removals.is_empty() && self.words[REMOVALS].load(Relaxed) == 0 {
            return;
        }
        let removals = &removals[..removals.len().min(REMOVALS_MAX)];
        self.set(REMOVALS, 0);
        for (at, NotedRemoval { whole, shown, first }) in (REMOVALS + 1..).step_by(REMOVAL_WORDS).zip(removals) {
            let words = [whole.start.0, whole.end.0, shown.start.0, shown.end.0, first.0];
            (at..).zip(words).for_each(|(at, word)| self.words[at].store(word, Release));
        }
        self.set(REMOVALS, removals.len() as u64);
    }

    /// The same.
    pub fn removals(&self) -> Vec<NotedRemoval> {
        let count = usize::try_from(self.get(REMOVALS)).unwrap_or(usize::MAX).min(REMOVALS_MAX);
        let removals = (REMOVALS + 1..).step_by(REMOVAL_WORDS).take(count).filter_map(|at| {
            let span = |at: usize| {
                let span = Span { start: Address(self.get(at)), end: Address(self.get(at + 1)) };
                let is_span = span.start < span.end && (span.start.0 | span.end.0).is_multiple_of(PAGE_BYTES_U64);
                is_span.then_some(span)
            };
            let (whole, shown, first) = (span(at)?, span(at + 2)?, PageIndex(self.get(at + 4)));
            (whole.intersect(shown) == Some(shown) && first.0 < 1 << 50).then_some(NotedRemoval { whole, shown, first })
        });
        removals.collect()
    }
}

#[cfg(test)]
mod tests {
    use spillway_store::vault::Vault;

    use super::*;

    const FILE: FileId = FileId { device: (0, 1), inode: 1 << 40 };

    fn pages(numbers: Range<u64>) -> impl Iterator<Item = (PageIndex, BufferIndex)> {
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
        estate.begin_leaving(id, pages(1..4).chain(pages(1000..1001)));
        estate.set_punching(id, Some(1..4));
        estate.end_leaving(id, 1, 2);
        let [found] = &estate.commons()[..] else { panic!("one file") };
        assert_eq!((found.id, found.tree, found.root, found.file), (id, TreeId(3), (4711, 99), FILE));
        assert_eq!((found.share.min_pages, found.share.weight, found.may_be_open), (7, 9, true));
        let left = [(0, 1), (3, 1000)]
            .map(|(noted, nth)| (noted, PageIndex(nth << 40), BufferIndex(nth.try_into().expect("small"))));
        assert_eq!(found.leaving, left);
        let by_us = Punching { process: estate.pager(), thread: thread_id(), what: 1..4 };
        assert_eq!(found.punching, Some(by_us));
        estate.set_punching(id, None);
        assert_eq!(estate.commons()[0].punching, None);
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
        let removal = |nth: u64| {
            let whole = Span::of_pages(Address(nth << 24), nth + 1);
            NotedRemoval { whole, shown: Span { start: whole.start.plus_pages(1), ..whole }, first: PageIndex(nth) }
        };
        let spans: Vec<NotedRemoval> = (1..2000).map(removal).collect();
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

//! Sequential streams of faults, and how many pages to move for the next one.
//!
//! A fault that continues a stream doubles its stride, up to a block of [`BLOCK_PAGES_MAX`]; any other fault moves one
//! page and may start a stream. Random access therefore hardly ever moves more than it asked for. A stream may skip pages
//! that are in the target already: those raise no faults.

use crate::blocks::Accuracy;
use crate::units::PageIndex;

/// The largest block: 64 KiB, as dcm found no gain beyond (section 3.4).
pub const BLOCK_PAGES_MAX: u64 = 16;

/// Streams followed at once in a target: a merge of a few inputs into an output, and some noise between.
const STREAMS: usize = 8;

#[derive(Clone, Copy, Debug)]
struct Stream {
    /// The page whose fault would continue it.
    next: PageIndex,
    pages: u64,
    /// Pages that came ahead for it, and that nobody has been seen to use.
    owed: u64,
    /// Faults in a row.
    faults: u32,
}

/// The streams of one target, most recently continued first.
#[derive(Debug)]
pub struct Streams {
    all: [Stream; STREAMS],
    /// Of what came ahead, how much a stream then went past.
    accuracy: Accuracy,
    /// What was learnt of that since it was last asked for: pages, and used ones.
    learnt: (u64, u64),
    /// The last fault was where a stream went on, to the page.
    exact: bool,
}

impl Default for Streams {
    fn default() -> Self {
        let none = Stream { next: PageIndex(u64::MAX), pages: 1, owed: 0, faults: 0 };
        Self { all: [none; STREAMS], accuracy: Accuracy::default(), learnt: (0, 0), exact: false }
    }
}

impl Streams {
    /// How many pages from `page` on the stream of this fault suggests, at most `longest`: 1 when it belongs to none.
    ///
    /// A stream that goes on has used what came ahead for it; one that is forgotten, because others were followed since, has
    /// not. Where that happens too often, a stream is believed only from its third fault on.
    pub fn suggest(&mut self, page: PageIndex, longest: u64) -> u64 {
        let continues = |stream: &Stream| page.0.wrapping_sub(stream.next.0) < BLOCK_PAGES_MAX;
        let found = self.all.iter().position(continues);
        let position = found.unwrap_or(STREAMS - 1);
        let before = self.all[position];
        let used = if found.is_some() { before.owed } else { 0 };
        self.accuracy.learn(before.owed, used);
        self.learnt = (self.learnt.0 + before.owed, self.learnt.1 + used);
        self.exact = before.next == page;
        let faults = found.map_or(1, |_| before.faults.saturating_add(1));
        let believed = faults > 1 && (faults > 2 || !self.accuracy.is_poor());
        let pages = if believed { (before.pages * 2).min(longest) } else { 1 };
        self.all[..=position].rotate_right(1);
        self.all[0] = Stream { next: page.plus(pages), pages, owed: 0, faults };
        pages
    }

    /// Whether the fault that [`Streams::suggest`] was last asked about is where a stream goes on, to the page.
    pub fn is_exact(&self) -> bool {
        self.exact
    }

    /// `pages` are on their way for that fault's stream, beside the one that was asked for: fewer than were suggested where some are
    /// there already.
    pub fn owes(&mut self, pages: u64) {
        self.all[0].owed += pages;
    }

    /// What was learnt of pages that had come ahead, since this was last asked: how many, and how many of them were used.
    pub fn learnt(&mut self) -> (u64, u64) {
        std::mem::take(&mut self.learnt)
    }

    /// The fault at `page` moved `pages`, not what was suggested, and nothing is owed for them: the stream goes on behind.
    pub fn moved(&mut self, page: PageIndex, pages: u64) {
        (self.all[0].next, self.all[0].owed) = (page.plus(pages.max(1)), 0);
    }

    /// More came for that fault than was suggested: the stream goes on at `next`.
    pub fn reaches(&mut self, next: u64) {
        self.all[0].next = PageIndex(next);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sequential_scan_reaches_full_blocks_at_once() {
        let mut streams = Streams::default();
        let mut page = PageIndex(1000);
        let mut strides = Vec::new();
        for _ in 0..6 {
            let pages = streams.suggest(page, BLOCK_PAGES_MAX);
            strides.push(pages);
            page = page.plus(pages);
        }
        assert_eq!(strides, [1, 2, 4, 8, 16, 16]);
    }

    #[test]
    fn a_stream_of_shorter_blocks_stays_one() {
        let mut streams = Streams::default();
        let mut page = PageIndex(1000);
        let strides: Vec<u64> = (0..6)
            .map(|_| {
                let pages = streams.suggest(page, 4);
                page = page.plus(pages);
                pages
            })
            .collect();
        assert_eq!(strides, [1, 2, 4, 4, 4, 4]);
    }

    #[test]
    fn interleaved_streams_do_not_disturb_each_other() {
        let mut streams = Streams::default();
        let mut heads = [PageIndex(0), PageIndex(10_000), PageIndex(20_000)];
        for _ in 0..6 {
            for head in &mut heads {
                *head = head.plus(streams.suggest(*head, BLOCK_PAGES_MAX));
            }
        }
        assert!(heads.iter().all(|&head| streams.suggest(head, BLOCK_PAGES_MAX) == BLOCK_PAGES_MAX));
    }

    #[test]
    fn random_faults_move_one_page() {
        let mut streams = Streams::default();
        let mut x = 1_u64;
        for _ in 0..1000 {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            assert_eq!(
                streams.suggest(PageIndex(x >> 20), BLOCK_PAGES_MAX),
                1,
                "2^44 pages: no two fall into one block"
            );
        }
    }

    #[test]
    fn pages_that_are_there_already_do_not_break_a_stream() {
        let mut streams = Streams::default();
        streams.suggest(PageIndex(100), BLOCK_PAGES_MAX);
        assert_eq!(streams.suggest(PageIndex(105), BLOCK_PAGES_MAX), 2);
        assert_eq!(streams.suggest(PageIndex(107 + BLOCK_PAGES_MAX), BLOCK_PAGES_MAX), 1, "too far");
    }

    #[test]
    fn a_stream_cut_short_goes_on_where_it_was_cut() {
        let mut streams = Streams::default();
        let first = PageIndex(5);
        streams.suggest(first, BLOCK_PAGES_MAX);
        assert_eq!(streams.suggest(PageIndex(6), BLOCK_PAGES_MAX), 2);
        streams.moved(PageIndex(6), 1);
        assert_eq!(streams.suggest(PageIndex(7), BLOCK_PAGES_MAX), 4);
    }

    #[test]
    fn what_came_counts_and_is_told_once_whoever_asks_when() {
        let mut streams = Streams::default();
        assert_eq!((streams.suggest(PageIndex(0), 16), streams.suggest(PageIndex(1), 16)), (1, 2));
        assert_eq!((streams.suggest(PageIndex(3), 16), streams.learnt()), (4, (0, 0)), "nothing had come for it");
        streams.owes(2);
        // First touches go by streams as well, and nobody asks then.
        assert_eq!(streams.suggest(PageIndex(7), 16), 8);
        streams.moved(PageIndex(7), 1);
        streams.suggest(PageIndex(8), 16);
        assert_eq!((streams.learnt(), streams.learnt()), ((2, 2), (0, 0)));
    }

    #[test]
    fn what_comes_ahead_in_vain_makes_streams_doubtful() {
        let mut streams = Streams::default();
        let (mut others, mut used, mut ahead) = (0, 0, Vec::new());
        for pair in 0..200 {
            for page in [PageIndex(pair * 1000), PageIndex(pair * 1000 + 1)] {
                let pages = streams.suggest(page, BLOCK_PAGES_MAX);
                streams.owes(pages - 1);
                let (more, of_them) = streams.learnt();
                (others, used) = (others + more, used + of_them);
                ahead.push(pages - 1);
            }
        }
        assert!(ahead[..20].contains(&1), "pairs look like streams at first");
        assert_eq!(ahead[100..].iter().sum::<u64>(), 0, "none of the third pages was wanted");
        assert_eq!((others, used), (ahead.iter().sum(), 0));
        let strides: Vec<u64> = (0..2).map(|i| streams.suggest(PageIndex(1 << 30 | i), BLOCK_PAGES_MAX)).collect();
        assert_eq!(strides, [1, 1]);
        assert_eq!(streams.suggest(PageIndex(1 << 30 | 2), BLOCK_PAGES_MAX), 2, "a real one is believed in the end");
    }
}

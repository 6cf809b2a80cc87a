//! Sequential streams of faults, and how many pages to move for the next one.
//!
//! A fault that continues a stream doubles its stride, up to a block of [`BLOCK_PAGES_MAX`]; any other fault moves one
//! page and may start a stream. Random access therefore hardly ever moves more than it asked for. A stream may skip pages
//! that are in the target already: those raise no faults.

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
}

/// The streams of one target, most recently continued first.
#[derive(Debug)]
pub struct Streams([Stream; STREAMS]);

impl Default for Streams {
    fn default() -> Self {
        Self([Stream { next: PageIndex(u64::MAX), pages: 1 }; STREAMS])
    }
}

impl Streams {
    /// How many pages from `page` on the stream of this fault suggests, at most `longest`: 1 when it belongs to none.
    pub fn suggest(&mut self, page: PageIndex, longest: u64) -> u64 {
        let continues = |stream: &Stream| page.0.wrapping_sub(stream.next.0) < BLOCK_PAGES_MAX;
        let found = self.0.iter().position(continues);
        let position = found.unwrap_or(STREAMS - 1);
        let pages = found.map_or(1, |at| (self.0[at].pages * 2).min(longest));
        self.0[..=position].rotate_right(1);
        self.0[0] = Stream { next: page.plus(pages), pages };
        pages
    }

    /// The fault at `page` moved `pages`, fewer or more than suggested: the stream goes on behind them.
    pub fn moved(&mut self, page: PageIndex, pages: u64) {
        self.0[0].next = page.plus(pages.max(1));
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
}

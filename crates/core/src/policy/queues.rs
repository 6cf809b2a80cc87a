//! Queues of pages, for policies that keep an order: doubly linked lists through arrays beside the page table.
//!
//! A page is in at most one queue; every change takes constant time and, as long as the stock lasts, no allocation.
//! Nine bytes a page (two links; queue and mark), in chunks like the table's, only where a page is in a queue.
//!
//! Victims that were given out, and whose fate is not yet known, wait in a queue of their own.

use super::Refusal;
use crate::chunks::{CHUNK_PAGES, Chunk, Chunks, Holds, split};
use crate::units::PageIndex;

/// Queues that a policy may have.
const QUEUES: usize = 3;
/// Where victims wait.
const OUT: usize = QUEUES;
/// No page.
const NONE: u32 = u32::MAX;

/// Chunks kept in stock: an eighth of those in use, within these bounds.
const STOCK: (usize, usize) = (4, 32);

struct Links {
    /// Pages that are in a queue: a chunk without any is given back.
    linked: u32,
    newer: [u32; CHUNK_PAGES],
    older: [u32; CHUNK_PAGES],
    /// Queue plus one in the low three bits (0: in none), the queue that a victim came from in the next two, then the mark.
    place: [u8; CHUNK_PAGES],
}

const PLACE_BITS: u32 = 3;
const ORIGIN_BITS: u32 = 2;
const MARK_SHIFT: u32 = PLACE_BITS + ORIGIN_BITS;

impl Holds for Links {
    fn nothing() -> Self {
        Self { linked: 0, newer: [NONE; CHUNK_PAGES], older: [NONE; CHUNK_PAGES], place: [0; CHUNK_PAGES] }
    }
}

#[derive(Clone, Copy)]
struct Ends {
    oldest: u32,
    newest: u32,
    pages: u64,
}

/// Where in a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The next to leave.
    Oldest,
    /// The last to leave.
    Newest,
}

/// See the module's documentation.
pub struct Queues {
    chunks: Chunks<Links>,
    ends: [Ends; QUEUES + 1],
}

impl Default for Queues {
    fn default() -> Self {
        Self { chunks: Chunks::default(), ends: [Ends { oldest: NONE, newest: NONE, pages: 0 }; QUEUES + 1] }
    }
}

impl Queues {
    /// The largest mark.
    pub const MARK_MAX: u8 = u8::MAX >> MARK_SHIFT;

    /// Pages in `queue`.
    pub fn len(&self, queue: usize) -> u64 {
        self.ends[queue].pages
    }

    /// Pages in all queues, and given out.
    pub fn pages(&self) -> u64 {
        self.ends.iter().map(|ends| ends.pages).sum()
    }

    /// Pages given out.
    pub fn out(&self) -> u64 {
        self.ends[OUT].pages
    }

    /// Which queue `page` is in, and its mark. Of a page that is out: the queue that it came from.
    pub fn find(&self, page: PageIndex) -> Option<(usize, u8)> {
        let (number, within) = split(page);
        let place = self.chunks.find(number)?.place[within];
        (place != 0).then(|| (origin(place), place >> MARK_SHIFT))
    }

    /// Puts `page`, which must be in no queue, at an end of `queue`.
    pub fn push(&mut self, queue: usize, end: End, page: PageIndex, mark: u8) {
        let beside = match end {
            End::Oldest => self.ends[queue].oldest,
            End::Newest => NONE,
        };
        self.link(queue, page, beside, place(queue, queue, mark));
    }

    /// Puts `page`, which must be in no queue, directly before `next`, whose turn comes then.
    pub fn push_before(&mut self, next: PageIndex, page: PageIndex, mark: u8) {
        let Some((queue, _)) = self.find(next) else { unreachable!("the hand stands on a page in its queue") };
        let next = self.node(next).expect("it was found");
        self.link(queue, page, next, place(queue, queue, mark));
    }

    /// Takes `page` out of its queue, if it is in one, and says which and with what mark.
    pub fn remove(&mut self, page: PageIndex) -> Option<(usize, u8)> {
        let found = self.find(page)?;
        self.unlink(page);
        Some(found)
    }

    /// Changes the mark of `page`, which must be in a queue.
    pub fn set_mark(&mut self, page: PageIndex, mark: u8) {
        let node = self.node(page).expect("it is in a queue");
        let place = self.place_mut(node);
        *place = *place & ((1 << MARK_SHIFT) - 1) | mark << MARK_SHIFT;
    }

    /// The page of `queue` whose turn is next.
    pub fn oldest(&self, queue: usize) -> Option<PageIndex> {
        self.page(self.ends[queue].oldest)
    }

    /// The page whose turn comes after that of `page`, in its queue.
    pub fn after(&self, page: PageIndex) -> Option<PageIndex> {
        let node = self.node(page)?;
        self.page(self.newer(node))
    }

    /// Takes the oldest page of `from` to the new end of `to`.
    pub fn turn_over(&mut self, from: usize, to: usize, mark: u8) {
        if let Some(page) = self.oldest(from) {
            self.unlink(page);
            self.push(to, End::Newest, page, mark);
        }
    }

    /// Takes `page` to the new end of `queue`, if it is in that.
    pub fn renew(&mut self, page: PageIndex, queue: usize) {
        if self.is_out(page) || self.find(page).is_none_or(|(its, _)| its != queue) {
            return;
        }
        if let Some((_, mark)) = self.remove(page) {
            self.push(queue, End::Newest, page, mark);
        }
    }

    /// Gives out `page`, which is in a queue.
    pub fn give_out(&mut self, page: PageIndex) -> PageIndex {
        let (queue, mark) = self.remove(page).expect("it is in a queue");
        self.link(OUT, page, NONE, place(OUT, queue, mark));
        page
    }

    /// Gives out the oldest page of `queue`.
    pub fn give_out_oldest(&mut self, queue: usize) -> Option<PageIndex> {
        self.oldest(queue).map(|page| self.give_out(page))
    }

    /// The page that was given out last.
    pub fn newest_out(&self) -> Option<PageIndex> {
        self.page(self.ends[OUT].newest)
    }

    /// Whether `page` is given out.
    pub fn is_out(&self, page: PageIndex) -> bool {
        self.node(page).is_some_and(|node| queue_of(self.chunk(slot_of(node)).place[within(node)]) == Some(OUT))
    }

    /// `page` was given out and stays. It is back where it was in its queue; or, when it cannot leave for now, behind all in
    /// the queue that `other` gives for it. With two queues that is the other: one that is full of pages that cannot leave
    /// would else keep those of the other from their turn.
    pub fn refused(&mut self, page: PageIndex, why: Refusal, other: impl Fn(usize) -> usize) {
        if !self.is_out(page) {
            return;
        }
        let Some((queue, mark)) = self.remove(page) else { return };
        match why {
            Refusal::Stuck => self.push(other(queue), End::Newest, page, mark),
            Refusal::Untried => self.push(queue, End::Oldest, page, mark),
        }
    }

    /// Bytes occupied.
    pub fn bytes(&self) -> u64 {
        self.chunks.bytes()
    }

    /// Refills the stock. Allocates: call it when no fault waits.
    pub fn restock(&mut self) {
        self.chunks.restock((self.chunks.len() / 8).clamp(STOCK.0, STOCK.1));
    }

    /// Links `page` into `queue`, directly before the node `next`, or at the new end.
    fn link(&mut self, queue: usize, page: PageIndex, next: u32, place: u8) {
        let (number, within_chunk) = split(page);
        let slot = self.chunks.slot_or_new(number);
        let node = u32::try_from(slot * CHUNK_PAGES + within_chunk).expect("fewer pages in queues than 2^32");
        let before = if next == NONE { self.ends[queue].newest } else { self.older(next) };
        let chunk = self.chunk_mut(slot);
        debug_assert_eq!(chunk.place[within_chunk], 0, "a page is in one queue at a time");
        chunk.linked += 1;
        (chunk.newer[within_chunk], chunk.older[within_chunk], chunk.place[within_chunk]) = (next, before, place);
        match before {
            NONE => self.ends[queue].oldest = node,
            _ => self.chunk_mut(slot_of(before)).newer[within(before)] = node,
        }
        match next {
            NONE => self.ends[queue].newest = node,
            _ => self.chunk_mut(slot_of(next)).older[within(next)] = node,
        }
        self.ends[queue].pages += 1;
    }

    fn unlink(&mut self, page: PageIndex) {
        let Some(node) = self.node(page) else { return };
        let place = std::mem::take(self.place_mut(node));
        let queue = queue_of(place).expect("it is in a queue");
        let (newer, older) = (self.newer(node), self.older(node));
        match older {
            NONE => self.ends[queue].oldest = newer,
            _ => self.chunk_mut(slot_of(older)).newer[within(older)] = newer,
        }
        match newer {
            NONE => self.ends[queue].newest = older,
            _ => self.chunk_mut(slot_of(newer)).older[within(newer)] = older,
        }
        self.ends[queue].pages -= 1;
        let slot = slot_of(node);
        let chunk = self.chunk_mut(slot);
        chunk.linked -= 1;
        if chunk.linked == 0 {
            self.chunks.remove(slot, STOCK.1);
        }
    }

    /// The node of `page`, if it is in a queue.
    fn node(&self, page: PageIndex) -> Option<u32> {
        let (number, within) = split(page);
        let slot = self.chunks.slot(number)?;
        let node = u32::try_from(slot * CHUNK_PAGES + within).expect("it was linked");
        (self.chunk(slot).place[within] != 0).then_some(node)
    }

    fn page(&self, node: u32) -> Option<PageIndex> {
        (node != NONE).then(|| PageIndex(self.chunk(slot_of(node)).number * CHUNK_PAGES as u64 + within(node) as u64))
    }

    fn newer(&self, node: u32) -> u32 {
        self.chunk(slot_of(node)).newer[within(node)]
    }

    fn older(&self, node: u32) -> u32 {
        self.chunk(slot_of(node)).older[within(node)]
    }

    fn place_mut(&mut self, node: u32) -> &mut u8 {
        &mut self.chunk_mut(slot_of(node)).place[within(node)]
    }

    fn chunk(&self, slot: usize) -> &Chunk<Links> {
        self.chunks.get(slot).expect("slots name chunks that exist")
    }

    fn chunk_mut(&mut self, slot: usize) -> &mut Chunk<Links> {
        self.chunks.get_mut(slot).expect("slots name chunks that exist")
    }
}

fn place(queue: usize, origin: usize, mark: u8) -> u8 {
    debug_assert!(mark <= Queues::MARK_MAX, "marks have three bits");
    let bits = |number: usize| u8::try_from(number).expect("few queues");
    (bits(queue) + 1) | bits(origin) << PLACE_BITS | mark << MARK_SHIFT
}

fn queue_of(place: u8) -> Option<usize> {
    usize::from(place & ((1 << PLACE_BITS) - 1)).checked_sub(1)
}

fn origin(place: u8) -> usize {
    usize::from(place >> PLACE_BITS & ((1 << ORIGIN_BITS) - 1))
}

fn slot_of(node: u32) -> usize {
    node as usize / CHUNK_PAGES
}

fn within(node: u32) -> usize {
    node as usize % CHUNK_PAGES
}

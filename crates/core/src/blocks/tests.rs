use super::*;
use crate::page::{BufferIndex, HandleBits, Step};

/// A page descriptor of dcm, and its algorithms as the paper has them: slow, and with access bits.
#[derive(Clone, Copy, Debug)]
struct Descriptor {
    block_pages: usize,
    direct: bool,
    referenced: bool,
}

struct Dcm([Descriptor; AREA_PAGES]);

impl Dcm {
    fn new() -> Self {
        Self([Descriptor { block_pages: 1, direct: false, referenced: false }; AREA_PAGES])
    }

    fn block(&self, page: usize) -> Range<usize> {
        let pages = self.0[page].block_pages;
        let head = page / pages * pages;
        head..head + pages
    }

    /// Algorithm 1, at a fault on `page`, whose block has just been fetched.
    fn stretch(&mut self, page: usize, within: &Range<usize>) {
        let block = self.block(page);
        let buddy = block.start ^ block.len();
        if block.len() == AREA_PAGES || !within.contains(&buddy) || !within.contains(&(buddy + block.len() - 1)) {
            return;
        }
        if self.0[block.start].block_pages == self.0[buddy].block_pages && self.0[buddy].direct {
            let head = block.start.min(buddy);
            for member in head..head + 2 * block.len() {
                self.0[member].block_pages = 2 * block.len();
            }
        }
    }

    fn access(&mut self, page: usize, within: &Range<usize>) {
        if !self.0[page].direct {
            for member in self.block(page) {
                self.0[member].direct = true;
            }
            self.stretch(page, within);
        }
        self.0[page].referenced = true;
    }

    /// Algorithm 2, and what was referenced is forgotten.
    fn evict(&mut self, page: usize) {
        let block = self.block(page);
        let referenced = self.0[block.clone()].iter().filter(|page| page.referenced).count();
        for member in block.clone() {
            if 2 * referenced <= block.len() {
                self.0[member].block_pages = 1;
            }
            self.0[member].direct = false;
            self.0[member].referenced = false;
        }
    }
}

/// An area as the pager keeps it, where every page comes alone, and so shows its use.
struct Ours(Area);

impl Ours {
    fn new() -> Self {
        Self([Entry::remote(HandleBits::MIN); AREA_PAGES])
    }

    fn access(&mut self, page: usize, within: &Range<usize>) {
        if self.0[page].state() == State::Remote {
            let block = block_of(&self.0, page);
            if !is_local(&self.0, &block) {
                stretch(&mut self.0, &block, within);
            }
            self.0[page].step(Step::Fetch).expect("it is remote");
            self.0[page].step(Step::Install).expect("it was fetched");
        }
        self.0[page].set_asked();
    }

    fn evict(&mut self, page: usize) {
        let block = block_of(&self.0, page);
        for entry in self.0[block.clone()].iter_mut().filter(|entry| entry.state() == State::Mapped) {
            for step in [Step::Capture(BufferIndex(0)), Step::Write, Step::Written(HandleBits::MIN)] {
                entry.step(step).expect("it was mapped");
            }
        }
        if Use::of(&self.0, &block).is_half_or_less() {
            reduce(&mut self.0, &block);
        }
        self.0[block].iter_mut().for_each(Entry::forget_use);
    }
}

fn random(seed: u64) -> impl FnMut(usize) -> usize {
    let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    move |below| {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        usize::try_from(x >> 33).expect("31 bits") % below
    }
}

#[test]
fn blocks_stretch_and_reduce_as_in_the_paper() {
    let (mut stretched, mut reduced) = (0, 0);
    for seed in 1..2000 {
        let mut below = random(seed);
        let within = match below(3) {
            0 => 3..AREA_PAGES,
            1 => 0..11,
            _ => 0..AREA_PAGES,
        };
        let (mut dcm, mut ours) = (Dcm::new(), Ours::new());
        // From programs that use a few pages at a time to those that use nearly all.
        let (evicts, near) = (1 + below(30), below(2) == 0);
        let mut page = within.start;
        for step in 0..400 {
            page = if near { page + 1 } else { below(AREA_PAGES) };
            page = if within.contains(&page) { page } else { within.start };
            let before = dcm.0.map(|page| page.block_pages).iter().max().copied();
            if below(100) < evicts {
                dcm.evict(page);
                ours.evict(page);
            } else {
                dcm.access(page, &within);
                ours.access(page, &within);
            }
            let after = dcm.0.map(|page| page.block_pages).iter().max().copied();
            stretched += u64::from(after > before);
            reduced += u64::from(after < before);
            for page in 0..AREA_PAGES {
                assert_eq!(block_of(&ours.0, page), dcm.block(page), "seed {seed}, step {step}, page {page}");
            }
        }
    }
    assert!(stretched > 5_000 && reduced > 500, "{stretched} stretched, {reduced} reduced");
}

#[test]
fn pages_of_which_nobody_knows_may_have_been_used() {
    let mut ours = Ours::new();
    let block = 0..4;
    for page in block.clone() {
        ours.0[page].set_ahead();
    }
    ours.0[1].set_asked();
    let all = Use::of(&ours.0, &block);
    assert_eq!(all, Use { pages: 4, used: 1, unknown: 3, shown: 1, asked: 1 });
    assert!(!all.is_half_or_less());
    assert_eq!(all.sample(), None);
    // One was left behind, and not asked for.
    ours.0[3].forget_use();
    let all = Use::of(&ours.0, &block);
    assert_eq!((all.unknown, all.sample()), (2, Some((3, 0))));
    assert!(!all.is_half_or_less());
    ours.0[3].set_asked();
    assert_eq!(Use::of(&ours.0, &block).sample(), Some((3, 3)));
    // A block of which only streams brought pages says nothing: none of it was the first.
    let mut passed = Ours::new();
    (0..2).for_each(|page| passed.0[page].set_ahead());
    assert_eq!(Use::of(&passed.0, &block).sample(), None);
    // One that came back from a buffer was used; that says nothing of those that nobody saw.
    ours.0[0].set_used();
    let all = Use::of(&ours.0, &block);
    assert_eq!((all.used, all.unknown, all.sample()), (3, 1, Some((3, 3))));
}

#[test]
fn accuracy_is_learnt_slowly_and_forgotten_fast() {
    let faults = |mut accuracy: Accuracy, used| {
        let mut count = 0;
        while (accuracy >= Accuracy::ENOUGH) != (used == 1) && count < 1000 {
            accuracy.learn(1, used);
            count += 1;
        }
        count
    };
    assert_eq!(faults(Accuracy::default(), 1), 14);
    let mut best = Accuracy::default();
    (0..1000).for_each(|_| best.learn(15, 15));
    assert_eq!(faults(best, 0), 2);
    // Pages that are used by chance as often as any other stay below what is enough.
    let (mut chance, mut below, mut enough) = (Accuracy::default(), random(7), 0);
    for _ in 0..10_000 {
        chance.learn(1, u64::from(below(100) < 60));
        enough += u64::from(chance >= Accuracy::ENOUGH);
    }
    assert!(enough < 200, "{enough}");
}

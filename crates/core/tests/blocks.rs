//! Blocks as faults and evictions see them.

use spillway_core::blocks::Accuracy;
use spillway_core::evict::{Bytes, Captured, Run};
use spillway_core::page::{HandleBits, State};
use spillway_core::pager::{Blocks, Budget, Config, Outcome, Pager, Plan, Served, Stop};
use spillway_core::policy::{Block, Kind, Settings};
use spillway_core::{Address, PageIndex, Span, TargetId};

/// Where the pages of the tests begin: at an area's start.
const BASE: u64 = 512;

struct World {
    pager: Pager,
    target: TargetId,
    handles: u32,
}

fn at(page: u64) -> Address {
    Address(0).plus_pages(BASE + page)
}

fn span(first: u64, pages: u64) -> Span {
    Span::of_pages(at(first), pages)
}

fn outcome(done: u64) -> Outcome {
    Outcome { done, stop: None }
}

impl World {
    /// A region of 1024 pages, all of them in the target.
    fn new(block: Block, enough: Accuracy) -> Self {
        Self::with(Settings { block, ..Settings::default() }, enough)
    }

    /// The same, under any policy.
    fn with(settings: Settings, enough: Accuracy) -> Self {
        let mut pager = Pager::new(Config { budget: Budget::Pages(4096), buffers: 64, write_batch: 1 });
        pager.set_replacement(settings);
        pager.set_blocks(Blocks { enough, ..Blocks::LARGEST });
        let target = pager.add_target();
        pager.add_region(target, span(0, 1024));
        pager.found(target, span(0, 1024));
        let world = Self { pager, target, handles: 0 };
        assert!(world.page(0).0.is_multiple_of(16));
        world
    }

    fn page(&self, page: u64) -> PageIndex {
        self.pager.regions().at(self.target, at(page)).expect("managed").page_at(at(page))
    }

    fn is_local(&self, page: u64) -> bool {
        self.pager.state_of(self.page(page)) == State::Mapped
    }

    /// Those of `pages` that are local leave for the store.
    fn leave(&mut self, pages: impl Iterator<Item = u64>) {
        for page in pages.map(|page| self.page(page)).collect::<Vec<_>>() {
            if self.pager.state_of(page) == State::Mapped {
                let buffer = self.pager.take_buffer().expect("enough buffers");
                self.pager.captured(page, Captured::Moved(buffer));
                self.pager.read(page, buffer, Bytes::Here);
                let write = self.pager.next_write(true).expect("it was just captured");
                self.handles += 1;
                self.pager.written(write, HandleBits::new(self.handles).expect("not zero"), false);
            }
        }
        self.pager.audit();
    }

    /// A fault at `page` is asked about.
    fn fault(&mut self, page: u64) -> Plan {
        self.pager.fault(self.target, at(page))
    }

    /// The same, and served; returns the first page that came, and how many did at once.
    fn touch(&mut self, page: u64) -> (u64, u64) {
        let plan = self.fault(page);
        while let Some(ahead) = self.pager.ahead() {
            let Plan::Fetch { pages, .. } = ahead else { unreachable!("only fetches go ahead") };
            self.pager.installed_ahead(ahead, outcome(pages));
        }
        let Plan::Fetch { address, pages, asked, .. } = plan else { unreachable!("{page} is in the store: {plan:?}") };
        assert_eq!(address.plus_pages(asked), at(page));
        assert_eq!(self.pager.installed(plan, outcome(pages)), Served::Yes);
        self.pager.audit();
        (address.pages_since(at(0)), pages)
    }

    /// Each of `pages` is touched alone, from the last to the first: no stream; and those of before are forgotten.
    fn touch_each(&mut self, pages: std::ops::Range<u64>) {
        for page in pages.rev() {
            assert_eq!(self.touch(page), (page, 1));
        }
        for page in [900, 841, 777, 701, 660, 590, 533, 470, 420] {
            self.leave(page / 16 * 16..page / 16 * 16 + 16);
            self.touch(page);
        }
    }
}

#[test]
fn neighbours_that_were_used_together_come_back_together() {
    let mut world = World::new(Block::Elastic, Accuracy::ANY);
    world.leave(0..4);
    world.touch_each(0..4);
    // Once a fault: pairs have met, and pairs of pairs have not.
    assert_eq!(world.pager.counters().stretches, 2);
    world.leave(0..4);
    let came = [world.touch(1), world.touch(2)];
    assert!(came.iter().all(|came| [(0, 2), (2, 2)].contains(came)) || world.is_local(3), "{came:?}");
    assert_eq!(world.pager.counters().stretches, 3);
    world.leave(0..4);
    let (first, pages) = world.touch(2);
    assert!(pages >= 3 && first < 2, "one goes missing now and then, to see whether it is asked for: {first}, {pages}");
}

/// A page that a block is stretched over leaves as late as the one that it was stretched for, where the order is one of use.
#[test]
fn neighbours_that_meet_leave_together() {
    for (policy, first) in [(Kind::Lru, 300), (Kind::Lru3, 300), (Kind::Fifo, 1)] {
        let mut world = World::with(Settings { policy, block: Block::Elastic, ..Settings::default() }, Accuracy::ANY);
        world.leave(0..1024);
        for page in [1, 300, 701] {
            assert_eq!(world.touch(page), (page, 1));
        }
        assert_eq!(world.touch(0), (0, 1));
        assert_eq!(world.pager.counters().stretches, 1);
        let mut runs = Vec::new();
        world.pager.next_capture(1, |_| true, &mut (), &mut runs);
        assert_eq!(runs.first().map(|run| run.address), Some(at(first)), "{policy:?}: {runs:?}");
    }
}

#[test]
fn a_block_of_which_half_was_used_falls_apart() {
    let mut world = World::new(Block::Elastic, Accuracy::ENOUGH);
    world.leave(0..2);
    world.touch_each(0..2);
    world.leave(0..2);
    assert_eq!(world.pager.counters().reductions, 0);
    // Nothing is known of blocks here: the page comes alone, and the other one is not asked for.
    assert_eq!(world.touch(1), (1, 1));
    world.leave(0..2);
    let counters = world.pager.counters();
    assert_eq!((counters.stretches, counters.reductions), (1, 1));
}

#[test]
fn blocks_come_whole_once_they_were_worth_it() {
    let mut world = World::new(Block::Elastic, Accuracy::ENOUGH);
    let mut whole = 0;
    // Far apart, at no stride, and more of them than streams are followed.
    let pairs = || (0..10).map(|i| 40 * i + 2 * (i * i % 7));
    for _ in 0..40 {
        for pair in pairs() {
            world.leave(pair..pair + 2);
        }
        for pair in pairs() {
            whole += u64::from(world.touch(pair + 1) == (pair, 2));
            if !world.is_local(pair) {
                world.touch(pair);
            }
        }
    }
    assert!(whole > 250, "{whole} of 400");
    let counters = world.pager.counters();
    assert_eq!(counters.reductions, 0);
    assert!(counters.sampled_pages > 0 && counters.sampled_used_pages == counters.sampled_pages, "{counters:?}");
}

#[test]
fn what_is_given_back_or_unmapped_is_in_no_block() {
    for take in [0, 1] {
        let mut world = World::new(Block::Elastic, Accuracy::ANY);
        world.leave(0..2);
        world.touch_each(0..2);
        world.leave(0..2);
        match take {
            0 => drop(world.pager.removed(world.target, span(1, 1))),
            _ => world.pager.unmapped(world.target, span(1, 1), &[]),
        }
        world.pager.audit();
        assert_eq!(world.touch(0), (0, 1));
    }
}

#[test]
fn a_block_ends_where_its_mapping_moved_away() {
    let mut world = World::new(Block::Elastic, Accuracy::ANY);
    world.leave(0..2);
    world.touch_each(0..2);
    world.leave(0..2);
    world.pager.remapped(world.target, span(1, 1), at(5000));
    world.pager.audit();
    assert_eq!(world.touch(0), (0, 1));
}

#[test]
fn a_static_block_comes_and_leaves_as_one() {
    let mut world = World::new(Block::K64, Accuracy::ENOUGH);
    // One of 16 leaves a page out: more than one such in a row is chance.
    let whole = (0..40).filter(|_| {
        world.leave(16..32);
        world.touch(21) == (16, 16)
    });
    assert!(whole.count() > 25);
    let mut runs: Vec<Run> = Vec::new();
    world.pager.set_replacement(Settings { block: Block::K64, ..Settings::default() });
    world.pager.next_capture(5, |_| true, &mut (), &mut runs);
    assert_eq!(runs.iter().map(|run| (run.address, run.pages)).collect::<Vec<_>>(), [(at(0), 16)]);
}

#[test]
fn what_cannot_come_with_its_block_comes_alone_the_next_time() {
    for stop in [Stop::Gone, Stop::Exists, Stop::Changing] {
        for page in [5, 0] {
            let mut world = World::new(Block::K16, Accuracy::ENOUGH);
            let plan = loop {
                world.leave(0..8);
                match world.fault(page) {
                    plan @ Plan::Fetch { pages: 4, .. } => break plan,
                    // A page was left out.
                    plan => drop(world.pager.installed(plan, outcome(1))),
                }
            };
            let served = world.pager.installed(plan, Outcome { done: 0, stop: Some(stop) });
            assert!(
                page == 0 || served == Served::Later,
                "{stop:?}: who asked for the second page must not wait for ever"
            );
            if !world.is_local(page) {
                assert_eq!(world.touch(page), (page, 1), "{stop:?}");
            }
        }
    }
}

#[test]
fn a_lost_page_in_front_is_not_taken_for_the_one_that_was_asked_for() {
    let mut world = World::new(Block::K16, Accuracy::ENOUGH);
    let plan = loop {
        world.leave(0..4);
        match world.fault(3) {
            plan @ Plan::Fetch { pages: 4, .. } => break plan,
            plan @ Plan::Fetch { pages, .. } => drop(world.pager.installed(plan, outcome(pages))),
            plan => unreachable!("{plan:?}"),
        }
    };
    let rest = world.pager.fetch_failed(plan, 0).expect("the page that was asked for is not lost");
    assert!(matches!(rest, Plan::Fetch { pages: 0, .. }));
    assert_eq!(world.pager.installed(rest, outcome(0)), Served::Later);
    assert_eq!(world.pager.state_of(world.page(0)), State::Lost);
    assert_eq!(world.touch(3), (3, 1));
}

#[test]
fn a_stride_is_fetched_ahead_page_by_page() {
    let mut world = World::new(Block::Elastic, Accuracy::ENOUGH);
    world.leave(0..1024);
    let faults = (0..24).filter(|i| {
        let page = i * 40;
        !world.is_local(page) && world.touch(page) == (page, 1)
    });
    let faults = faults.count();
    assert!(faults < 14, "{faults}");
    let counters = world.pager.counters();
    assert!(counters.sampled_used_pages > 0 && counters.sampled_used_pages == counters.sampled_pages, "{counters:?}");
}

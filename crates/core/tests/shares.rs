//! Shares of local memory as the pager keeps them: minima, maxima, weights.

use spillway_core::evict::{Bytes, Captured, Run};
use spillway_core::page::{HandleBits, State};
use spillway_core::pager::{Budget, Config, Outcome, Pager, Plan};
use spillway_core::policy::{Kind, Scheme, Scope, Settings};
use spillway_core::shares::Share;
use spillway_core::{Address, Span, TargetId, TreeId};

const BUDGET_PAGES: u64 = 4096;
const REGION_PAGES: u64 = 1 << 20;

struct World {
    pager: Pager,
    next: u32,
    random: u64,
}

impl World {
    fn new(settings: Settings) -> Self {
        let mut pager = Pager::new(Config { budget: Budget::Pages(BUDGET_PAGES), buffers: 1024, write_batch: 1 });
        pager.set_replacement(settings);
        Self { pager, next: 1, random: 0x9E37_79B9_7F4A_7C15 }
    }

    fn below(&mut self, end: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % end
    }

    fn target(&mut self, tree: u32, share: Share) -> TargetId {
        let target = self.pager.add_target();
        self.pager.assign(target, TreeId(tree), share);
        self.pager.add_region(target, Span::of_pages(Address(0), REGION_PAGES));
        target
    }

    fn mapped(&self, target: TargetId) -> u64 {
        self.pager.held_by(target).0
    }

    /// Touches a page, far from others. It may have to wait for room, which others make; that must come.
    fn touch(&mut self, target: TargetId, nth: u64) {
        for _ in 0..32 {
            let plan = self.pager.fault(target, Address(0).plus_pages(nth * 20));
            let done = match plan {
                Plan::Zero { pages, .. } | Plan::Fetch { pages, .. } => pages,
                Plan::Buffer { .. } => 1,
                Plan::NoRoom => {
                    self.make_room(&|_, _| true);
                    continue;
                }
                other => unreachable!("{other:?}"),
            };
            self.pager.installed(plan, Outcome { done, stop: None });
            while let Some(plan) = self.pager.ahead() {
                let Plan::Fetch { pages, .. } = plan else { unreachable!("only fetches go ahead") };
                self.pager.installed_ahead(plan, Outcome { done: pages, stop: None });
            }
            self.make_room(&|_, _| true);
            return;
        }
        panic!("no room came for {target:?}");
    }

    /// Captures what is wanted; `may` says of a target and its pages before the batch whether it may pay.
    fn make_room(&mut self, may: &dyn Fn(TargetId, u64) -> bool) {
        for _ in 0..64 {
            let wanted = self.pager.wanted_captures().min(self.pager.batch_pages());
            let mut runs: Vec<Run> = Vec::new();
            let Some(whose) =
                (wanted > 0).then(|| self.pager.next_capture(wanted, |_| true, &mut (), &mut runs)).flatten()
            else {
                break;
            };
            assert!(may(whose, self.mapped(whose)), "{whose:?} must not pay");
            for page in runs.iter().flat_map(|run| (0..run.pages).map(|i| run.page.plus(i))) {
                assert_eq!(self.pager.state_of(page), State::Mapped);
                let buffer = self.pager.take_buffer().expect("a buffer for each page chosen");
                self.pager.captured(page, Captured::Moved(buffer));
                self.pager.read(page, buffer, Bytes::Here);
            }
            while let Some(write) = self.pager.next_write(false) {
                let handle = HandleBits::new(self.next).expect("not zero");
                self.next += 1;
                self.pager.written(write, handle, false);
            }
            while self.pager.next_released().is_some() {}
        }
    }
}

/// A sweep and two orders, whoever's pages leave, early or late.
fn all_settings() -> impl Iterator<Item = Settings> {
    let kinds = [Kind::Clock, Kind::Lru3, Kind::S3Fifo]
        .iter()
        .flat_map(|&policy| Scope::ALL.iter().map(move |&scope| (policy, scope)));
    let schemes = kinds.flat_map(|(policy, scope)| Scheme::ALL.iter().map(move |&evict| (policy, scope, evict)));
    schemes.map(|(policy, scope, evict)| Settings { policy, scope, evict, ..Settings::default() })
}

#[test]
fn a_minimum_is_kept_from_one_who_thrashes() {
    for settings in all_settings() {
        let mut world = World::new(settings);
        let quiet = world.target(1, Share { min_pages: 1500, ..Share::default() });
        let wild = world.target(2, Share { min_pages: 1000, ..Share::default() });
        (0..1500).for_each(|nth| world.touch(quiet, nth));
        for touch in 0..5000 {
            let nth = world.below(6000);
            world.touch(wild, nth);
            assert!(touch % 16 > 0 || world.mapped(quiet) >= 1500, "{settings:?}");
        }
        assert!(world.pager.local_pages() <= BUDGET_PAGES && world.mapped(wild) > 2000, "{settings:?}");
        world.pager.audit();
        // Who comes late gets its minimum back from whoever is above his.
        let late = world.target(3, Share { min_pages: 1200, ..Share::default() });
        (0..1200).for_each(|nth| world.touch(late, nth));
        assert!(
            world.mapped(late) >= 1190 && world.mapped(quiet) >= 1500 && world.mapped(wild) >= 1000,
            "{settings:?}"
        );
        world.pager.audit();
    }
}

#[test]
fn a_maximum_is_kept_whatever_is_free() {
    for settings in all_settings() {
        let mut world = World::new(settings);
        let bound = world.target(1, Share { max_pages: 1024, ..Share::default() });
        let free = world.target(2, Share::default());
        (0..200).for_each(|nth| world.touch(free, nth));
        for touch in 0..3000 {
            let nth = world.below(3000);
            world.touch(bound, nth);
            assert!(touch % 16 > 0 || world.mapped(bound) <= 1024, "{settings:?}");
        }
        assert!(world.mapped(bound) > 900 && world.mapped(free) == 200, "{settings:?}");
        world.pager.audit();
        // A smaller one is kept soon, one that is gone at once.
        world.pager.set_share(TreeId(1), Share { max_pages: 512, ..Share::default() });
        world.make_room(&|target, _| target == bound);
        assert!(world.mapped(bound) <= 512, "{settings:?}");
        world.pager.set_share(TreeId(1), Share::default());
        (0..1500).for_each(|nth| world.touch(bound, nth));
        assert!(world.mapped(bound) >= 1500, "{settings:?}");
        world.pager.audit();
    }
}

#[test]
fn one_whose_minimum_is_its_maximum_pages_against_itself() {
    let mut world = World::new(Settings::default());
    let bound = world.target(1, Share { min_pages: 1024, max_pages: 1024, ..Share::default() });
    for _ in 0..4000 {
        let nth = world.below(2000);
        world.touch(bound, nth);
    }
    assert!((900..=1024).contains(&world.mapped(bound)));
}

#[test]
fn weights_divide_what_is_above_the_minima() {
    let mut world = World::new(Settings::default());
    let share = |weight| Share { min_pages: 500, weight, ..Share::default() };
    let targets = [world.target(1, share(300)), world.target(2, share(100))];
    for _ in 0..20_000 {
        let (at, nth) = (usize::try_from(world.below(2)).expect("small"), world.below(8000));
        world.touch(targets[at], nth);
    }
    let above = targets.map(|target| (world.mapped(target) - 500) as f64);
    assert!((above[0] / above[1] - 3.0).abs() < 0.3, "{above:?}");
    world.pager.audit();
}

#[test]
fn a_forked_child_counts_with_its_parent() {
    let mut world = World::new(Settings::default());
    let parent = world.target(1, Share { max_pages: 1024, ..Share::default() });
    (0..2000).for_each(|nth| world.touch(parent, nth));
    let child = world.pager.forked(parent, |handle| handle, |_| {});
    world.pager.audit();
    for nth in 0..2000 {
        world.touch(child, nth);
        assert!(world.mapped(child) + world.mapped(parent) <= 1024);
    }
    world.pager.ended(parent);
    world.pager.reuse(parent);
    world.pager.audit();
    // Its identity, and not its tree, is the next one's.
    let next = world.target(2, Share::default());
    assert_eq!(next, parent);
    (0..1500).for_each(|nth| world.touch(next, nth));
    assert_eq!(world.mapped(next), 1500);
    world.pager.audit();
    // With the last of those that have a share, everyone's pages leave for anyone's again.
    world.pager.ended(child);
    (0..6000).for_each(|nth| world.touch(next, nth));
    assert!((3000..=BUDGET_PAGES).contains(&world.mapped(next)));
    world.pager.audit();
}

/// All at once, the faults of others waited meanwhile: 0.15 us for each page of a guest.
#[test]
fn what_has_ended_is_forgotten_a_little_at_a_time() {
    const MOST: u64 = 4000;
    let mut world = World::new(Settings::default());
    let (ended, other) = (world.target(1, Share::default()), world.target(2, Share::default()));
    world.pager.add_region(ended, Span::of_pages(Address(1 << 40), 3));
    (0..6000).for_each(|nth| world.touch(ended, nth));
    let (mut touched, mut turns) = (world.pager.touched_pages(), 0);
    while !world.pager.bury(ended, MOST) {
        let forgotten = touched - world.pager.touched_pages();
        assert!(forgotten <= MOST / 20, "{forgotten} pages of {MOST} addresses, of which one in 20 is used");
        world.touch(other, turns);
        world.pager.audit();
        (touched, turns) = (world.pager.touched_pages(), turns + 1);
    }
    assert_eq!(turns, REGION_PAGES / MOST);
    assert_eq!((world.mapped(ended), world.pager.touched_pages()), (0, turns));
    world.pager.reuse(ended);
    world.pager.audit();
}

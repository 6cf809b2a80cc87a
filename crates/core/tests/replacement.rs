//! Policies, schemes and scopes as the pager carries them out.

use spillway_core::evict::{Bytes, Captured, Run};
use spillway_core::page::HandleBits;
use spillway_core::pager::{Budget, Config, Outcome, Pager, Plan};
use spillway_core::policy::{Kind, Scheme, Scope, Settings};
use spillway_core::{Address, PageIndex, Span, TargetId};

const BUDGET_PAGES: u64 = 4096;

fn pager(settings: Settings) -> Pager {
    let mut pager = Pager::new(Config { budget: Budget::Pages(BUDGET_PAGES), buffers: 2048, write_batch: 1 });
    pager.set_replacement(settings);
    pager
}

fn with_policy(policy: Kind) -> Settings {
    Settings { policy, ..Settings::default() }
}

/// A target with a region of so many pages, none of them touched.
fn target(pager: &mut Pager, pages: u64) -> TargetId {
    let target = pager.add_target();
    pager.add_region(target, Span::of_pages(Address(0), pages));
    target
}

/// Where the pages are that [`touch`] touches: so far apart that none is another's neighbour, or begins a stream.
fn place(nth: u64) -> u64 {
    (nth + 1) * 40
}

/// Touches the nth page; false when there is no room.
fn touch(pager: &mut Pager, target: TargetId, nth: u64) -> bool {
    let plan = pager.fault(target, Address(0).plus_pages(place(nth)));
    let done = match plan {
        Plan::Zero { pages, .. } | Plan::Fetch { pages, .. } => pages,
        Plan::Buffer { .. } => 1,
        _ => return false,
    };
    pager.installed(plan, Outcome { done, stop: None });
    while let Some(plan) = pager.ahead() {
        let Plan::Fetch { pages, .. } = plan else { unreachable!("only fetches go ahead") };
        pager.installed_ahead(plan, Outcome { done: pages, stop: None });
    }
    true
}

fn page_at(pager: &Pager, target: TargetId, nth: u64) -> PageIndex {
    let address = Address(0).plus_pages(place(nth));
    pager.regions().at(target, address).expect("managed").page_at(address)
}

fn choose(pager: &mut Pager, most: u64) -> (Option<TargetId>, Vec<PageIndex>) {
    let mut runs: Vec<Run> = Vec::new();
    let whose = pager.next_capture(most, |_| true, &mut (), &mut runs);
    (whose, runs.iter().flat_map(|run| (0..run.pages).map(|i| run.page.plus(i))).collect())
}

/// Captures what is wanted and hands it to the store; how many pages of each target left.
fn make_room(pager: &mut Pager, targets: usize) -> Vec<u64> {
    let mut left = vec![0; targets];
    let mut next = 1;
    while pager.wanted_captures() > 0 {
        let most = pager.wanted_captures().min(pager.batch_pages());
        let (whose, pages) = choose(pager, most);
        let Some(whose) = whose else { break };
        left[whose.0 as usize] += pages.len() as u64;
        for page in pages {
            let buffer = pager.take_buffer().expect("a buffer for each page chosen");
            pager.captured(page, Captured::Moved(buffer));
            pager.read(page, buffer, Bytes::Here);
        }
        while let Some(write) = pager.next_write(false) {
            let handle = HandleBits::new(next).expect("not zero");
            next += 1;
            pager.written(write, handle, false);
        }
    }
    pager.audit();
    left
}

/// Touches `count` pages of `target`, one a fault; how many pages of each target had to leave.
fn touch_apart(pager: &mut Pager, target: TargetId, from: u64, count: u64, targets: usize) -> Vec<u64> {
    let mut left = vec![0; targets];
    for at in from..from + count {
        while !touch(pager, target, at) {
            let more = make_room(pager, targets);
            left.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
        }
        if pager.wanted_captures() > 0 {
            let more = make_room(pager, targets);
            left.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
        }
    }
    left
}

#[test]
fn orders_take_what_came_first_and_sweeps_what_lies_first() {
    for (policy, first) in
        [(Kind::Clock, [0, 1, 2]), (Kind::Rr, [0, 1, 2]), (Kind::Fifo, [7, 3, 9]), (Kind::Lru, [7, 3, 9])]
    {
        let mut pager = pager(with_policy(policy));
        let target = target(&mut pager, 1 << 20);
        for at in [7, 3, 9, 0, 1, 2] {
            assert!(touch(&mut pager, target, at));
        }
        let (_, mut pages) = choose(&mut pager, 3);
        let mut expected = first.map(|at| page_at(&pager, target, at));
        expected.sort_unstable();
        pages.sort_unstable();
        assert_eq!(pages, expected, "{policy:?}");
    }
}

#[test]
fn neighbours_leave_in_one_run_whatever_order_they_came_in() {
    let mut pager = pager(with_policy(Kind::Fifo));
    let target = target(&mut pager, 100);
    for at in [20, 50, 21, 52, 22, 51] {
        pager.found(target, Span::of_pages(Address(0).plus_pages(at), 1));
    }
    let mut runs = Vec::new();
    pager.next_capture(6, |_| true, &mut (), &mut runs);
    assert_eq!(runs.iter().map(|run| run.pages).collect::<Vec<_>>(), [3, 3]);
}

#[test]
fn what_came_back_stays_longer_where_a_policy_believes_in_it() {
    for (policy, spared) in [
        (Kind::Rr, false),
        (Kind::Clock, true),
        (Kind::Fifo, false),
        (Kind::Lru, true),
        (Kind::Lru3, true),
        (Kind::Sieve, true),
    ] {
        let mut pager = pager(with_policy(policy));
        let target = target(&mut pager, 1 << 20);
        (0..4).for_each(|at| assert!(touch(&mut pager, target, at)));
        let (_, pages) = choose(&mut pager, 1);
        let buffer = pager.take_buffer().expect("free");
        pager.captured(pages[0], Captured::Moved(buffer));
        pager.read(pages[0], buffer, Bytes::Here);
        let at = (0..4).find(|&at| page_at(&pager, target, at) == pages[0]).expect("one of them");
        assert!(touch(&mut pager, target, at));
        // Sweeps are before it in their round: the rest of it comes first.
        let (_, rest) = choose(&mut pager, 3);
        let (_, next) = choose(&mut pager, 1);
        let again =
            if matches!(policy, Kind::Rr | Kind::Clock) { next[0] == pages[0] } else { rest.contains(&pages[0]) };
        assert_eq!(again, !spared, "{policy:?}");
    }
}

#[test]
fn a_policy_that_takes_over_knows_every_page_and_gives_back_its_memory() {
    let mut pager = pager(Settings::default());
    let one = target(&mut pager, 3000);
    let other = target(&mut pager, 1000);
    pager.found(one, Span::of_pages(Address(0), 700));
    pager.found(other, Span::of_pages(Address(0), 300));
    pager.restock();
    let plain = pager.table_bytes();
    for &policy in Kind::ALL {
        for &scope in Scope::ALL {
            pager.set_replacement(Settings { policy, scope, ..Settings::default() });
            pager.audit();
            assert_eq!(pager.table_bytes() > plain, !policy.is_sweep(), "{policy:?}");
            let mut seen = Vec::new();
            for may in [one, other] {
                let mut runs = Vec::new();
                assert_eq!(
                    pager.next_capture(1000, |target| target == may, &mut (), &mut runs),
                    Some(may),
                    "{policy:?} {scope:?}"
                );
                seen.extend(runs.iter().flat_map(|run| (0..run.pages).map(|i| run.page.plus(i))));
            }
            seen.sort_unstable();
            seen.dedup();
            assert_eq!(seen.len(), 1000, "{policy:?} {scope:?}: each page once");
        }
    }
    pager.set_replacement(Settings::default());
    assert_eq!(pager.table_bytes(), plain);
}

#[test]
fn on_demand_captures_nothing_before_a_fault_finds_no_room_and_then_a_block() {
    let mut pager = pager(Settings { evict: Scheme::OnDemand, ..Settings::default() });
    let target = target(&mut pager, 1 << 20);
    for at in 0..BUDGET_PAGES {
        assert!(touch(&mut pager, target, at));
        assert_eq!(pager.wanted_captures(), 0);
    }
    assert!(!touch(&mut pager, target, BUDGET_PAGES));
    assert_eq!(pager.wanted_captures(), 16);
    // The first pages to be captured are kept in buffers, for the chance that they come back.
    for _ in 0..5 {
        assert_eq!(make_room(&mut pager, 1), [16]);
        if touch(&mut pager, target, BUDGET_PAGES) {
            break;
        }
    }
    assert_eq!((pager.wanted_captures(), pager.free_pages()), (0, 15));
}

/// A batch is on its way for longer than the last quarter of the reserve lasts.
#[test]
fn captures_come_before_faults_once_half_of_the_reserve_is_used() {
    let mut pager = pager(Settings::default());
    let target = target(&mut pager, 1 << 24);
    let last =
        (0..BUDGET_PAGES).find(|at| !touch(&mut pager, target, *at) || pager.is_low()).expect("it fills the budget");
    assert_eq!((last + 1, pager.free_pages() + 1), (BUDGET_PAGES - pager.free_pages(), pager.batch_pages() / 2));
}

#[test]
fn the_reserve_grows_while_faults_find_no_room_and_shrinks_when_they_do() {
    let mut pager = pager(Settings::default());
    let target = target(&mut pager, 1 << 24);
    let base = pager.low_pages();
    // Faults that come faster than room is made.
    let mut at = 0;
    for _ in 0..40 {
        while touch(&mut pager, target, at) {
            at += 1;
        }
        make_room(&mut pager, 1);
    }
    let grown = pager.low_pages();
    assert!(grown > base && grown <= 4 * base, "{base} to {grown}");
    // And slower ones.
    for _ in 0..60 {
        while pager.wanted_captures() == 0 {
            assert!(touch(&mut pager, target, at));
            at += 1;
        }
        make_room(&mut pager, 1);
    }
    assert_eq!(pager.low_pages(), base);
}

#[test]
fn who_faults_pays_within_one_target_and_everyone_pays_globally() {
    for policy in [Kind::Clock, Kind::Lru] {
        let left = |scope| {
            let mut pager = pager(Settings { policy, scope, ..Settings::default() });
            let (idle, busy) = (target(&mut pager, 1 << 24), target(&mut pager, 1 << 24));
            touch_apart(&mut pager, idle, 0, BUDGET_PAGES / 2, 2);
            // Nobody owes for the first that leave: they fill the buffers and the reserve.
            touch_apart(&mut pager, busy, 0, BUDGET_PAGES / 2 + 300, 2);
            touch_apart(&mut pager, busy, BUDGET_PAGES, 1000, 2)
        };
        let [idle, busy] = left(Scope::Target)[..] else { unreachable!("two targets") };
        assert!(busy >= 950 && idle <= 50, "{policy:?}: {idle} of the idle one, {busy} of the busy one");
        let [idle, busy] = left(Scope::Global)[..] else { unreachable!("two targets") };
        assert!(idle > 200, "{policy:?}: {idle} of the idle one, {busy} of the busy one");
    }
}

#[test]
fn one_target_whose_pages_are_all_stuck_does_not_pay_for_ever() {
    let mut pager = pager(Settings { policy: Kind::Lru, scope: Scope::Target, ..Settings::default() });
    let (free, stuck) = (target(&mut pager, 1 << 24), target(&mut pager, 1 << 24));
    touch_apart(&mut pager, free, 0, BUDGET_PAGES - 40, 2);
    for at in 0..40 {
        assert!(touch(&mut pager, stuck, at));
    }
    let mut whose = Vec::new();
    for _ in 0..40 {
        let (target, pages) = choose(&mut pager, 8);
        pages.into_iter().for_each(|page| pager.captured(page, Captured::Stuck));
        whose.extend(target);
    }
    assert!(whose.contains(&free), "{whose:?}");
}

#[test]
fn who_gives_nothing_is_asked_again_only_after_the_others() {
    let mut pager = pager(Settings { scope: Scope::Target, policy: Kind::S3Fifo, ..Settings::default() });
    let (much, little) = (target(&mut pager, 1 << 20), target(&mut pager, 1 << 20));
    // The little one has pages for both times that it is asked: what is stuck is passed over once.
    (0..BUDGET_PAGES - 16).for_each(|nth| assert!(touch(&mut pager, much, nth)));
    (0..16).for_each(|nth| assert!(touch(&mut pager, little, nth)));
    let asked: Vec<_> = (0..4)
        .map(|_| {
            let (whose, pages) = choose(&mut pager, 8);
            pages.into_iter().for_each(|page| pager.captured(page, Captured::Stuck));
            whose.expect("there are pages")
        })
        .collect();
    assert_ne!(asked[0], asked[1]);
    assert_ne!(asked[2], asked[3]);
}

/// A policy may put what was passed over into a queue that it asks in the same batch.
#[test]
fn what_would_not_leave_the_last_time_is_passed_over_by_one_batch_whatever_the_queues() {
    for policy in [Kind::Fifo, Kind::Lru, Kind::Lru3, Kind::S3Fifo, Kind::Sieve] {
        let mut pager = pager(with_policy(policy));
        let target = target(&mut pager, 1 << 20);
        (0..4).for_each(|nth| assert!(touch(&mut pager, target, nth)));
        let (_, all) = choose(&mut pager, 4);
        assert_eq!(all.len(), 4, "{policy:?}");
        all.iter().for_each(|&page| pager.captured(page, Captured::Stuck));
        assert_eq!(choose(&mut pager, 4), (None, Vec::new()), "{policy:?}");
        assert_eq!(choose(&mut pager, 4).1, all, "{policy:?}");
    }
}

#[test]
fn what_was_refused_is_captured_again_once_and_where_it_is() {
    for kind in [Kind::Clock, Kind::S3Fifo] {
        let mut pager = pager(with_policy(kind));
        let target = target(&mut pager, 200_000);
        (0..8).for_each(|nth| assert!(touch(&mut pager, target, nth)));
        let run = |pager: &Pager, nth| {
            let page = page_at(pager, target, nth);
            Run { address: Address(0).plus_pages(place(nth)), page, pages: 1 }
        };
        // Twice the same, one that was given up, one that moved, one that was never touched.
        let mut named: Vec<Run> = (0..4).map(|nth| run(&pager, nth)).collect();
        named.push(named[1]);
        pager.removed(target, Span::of_pages(named[2].address, 1));
        named[3].address = Address(0);
        named.push(run(&pager, 9));
        let again = pager.capturable_again(target, &named);
        assert_eq!(again.iter().map(|run| run.page).collect::<Vec<_>>(), [named[0].page, named[1].page], "{kind:?}");
        assert!(pager.capturable_again(TargetId(target.0 + 1), &named).is_empty());
        for run in again {
            pager.captured(run.page, Captured::Stuck);
            let buffer = pager.take_buffer().expect("enough");
            pager.captured(run.page, Captured::Moved(buffer));
            pager.read(run.page, buffer, Bytes::Here);
        }
        pager.audit();
        assert!(pager.capturable_again(target, &named).is_empty());
    }
}

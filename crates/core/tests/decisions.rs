//! Decisions that were wrong once, as the simulator showed.

use spillway_core::evict::{Bytes, Captured, Run};
use spillway_core::page::{HandleBits, State};
use spillway_core::pager::{Budget, Config, Outcome, Pager, Plan, Served};
use spillway_core::{Address, PageIndex, Span, TargetId};

const BUDGET_PAGES: u64 = 16;

fn pager() -> Pager {
    Pager::new(Config { budget: Budget::Pages(BUDGET_PAGES), buffers: 64, write_batch: 1 })
}

fn span(first: u64, pages: u64) -> Span {
    Span::of_pages(Address(0).plus_pages(first), pages)
}

/// Pages of zeros at `span`, all of them in the target.
fn fill(pager: &mut Pager, target: TargetId, span: Span) {
    pager.add_region(target, span);
    pager.found(target, span);
}

fn page_at(pager: &Pager, target: TargetId, at: u64) -> PageIndex {
    let address = Address(0).plus_pages(at);
    pager.regions().at(target, address).expect("managed").page_at(address)
}

fn captures(pager: &mut Pager, most: u64) -> Vec<Run> {
    let mut runs = Vec::new();
    pager.next_capture(most, |_| true, &mut (), &mut runs);
    runs
}

/// Captures `page` and gives it to the store.
fn send_away(pager: &mut Pager, page: PageIndex) {
    let buffer = pager.take_buffer().expect("enough buffers");
    pager.captured(page, Captured::Moved(buffer));
    pager.read(page, buffer, Bytes::Here);
    let write = pager.next_write(true).expect("it was just captured");
    pager.written(write, HandleBits::MIN, false);
    assert_eq!(pager.state_of(page), State::Remote);
}

#[test]
fn no_page_is_chosen_twice_in_one_batch() {
    let mut pager = pager();
    let target = pager.add_target();
    fill(&mut pager, target, span(100, 3));
    for _ in 0..4 {
        let runs = captures(&mut pager, 16);
        let mut pages: Vec<_> = runs.iter().flat_map(|run| (0..run.pages).map(|i| run.page.plus(i))).collect();
        pages.sort_unstable();
        pages.dedup();
        assert_eq!(pages.len() as u64, runs.iter().map(|run| run.pages).sum(), "{runs:?}");
        assert_eq!(pages.len(), 3);
    }
}

#[test]
fn a_page_that_would_not_move_lets_its_neighbours_go_first_although_another_target_comes_between() {
    let mut pager = pager();
    let (one, other) = (pager.add_target(), pager.add_target());
    fill(&mut pager, one, span(0, 1));
    fill(&mut pager, other, span(0, 2));
    let stuck = page_at(&pager, other, 0);
    pager.captured(stuck, Captured::Stuck);
    // The sweep passes over the stuck page, finds its neighbour, and sees that it is another target's.
    assert_eq!(captures(&mut pager, 8).len(), 1);
    let runs = captures(&mut pager, 1);
    assert_eq!(runs[0].page, stuck.plus(1));
}

#[test]
fn a_store_that_was_full_is_asked_again() {
    let mut pager = pager();
    let target = pager.add_target();
    fill(&mut pager, target, span(0, BUDGET_PAGES + 8));
    let buffer = pager.take_buffer().expect("free");
    let page = page_at(&pager, target, 0);
    pager.captured(page, Captured::Moved(buffer));
    pager.read(page, buffer, Bytes::Here);
    let write = pager.next_write(true).expect("one page");
    pager.write_declined(write);
    // With few pages in buffers,
    let again = pager.next_write(false).expect("one page is in a buffer, and the store may have room again");
    pager.write_declined(again);
    // and with none.
    let plan = pager.fault(target, Address(0));
    assert!(matches!(plan, Plan::Buffer { .. }));
    pager.installed(plan, Outcome { done: 1, stop: None });
    assert_eq!(pager.next_write(false), None);
    assert!(pager.wanted_captures() > 0, "too much is local, and nothing is left to ask the store with");
}

#[test]
fn late_word_of_an_unmapping_leaves_alone_what_moved_there_since() {
    let mut pager = pager();
    let target = pager.add_target();
    fill(&mut pager, target, span(0, 4));
    fill(&mut pager, target, span(50, 4));
    let page = page_at(&pager, target, 51);
    send_away(&mut pager, page);
    // One thread moves 0..4 to 100, and another 50..54 to where that was; the first gets to say last that 0..4 is unmapped.
    pager.remapped(target, span(0, 4), Address(0).plus_pages(100));
    pager.remapped(target, span(50, 4), Address(0));
    pager.unmapped(target, span(50, 4), &[]);
    pager.unmapped(target, span(0, 4), &[]);
    assert_eq!(page_at(&pager, target, 1), page);
    assert_eq!(pager.state_of(page), State::Remote);
    // The next time it is true.
    pager.unmapped(target, span(0, 4), &[]);
    assert_eq!(pager.regions().at(target, Address(0)), None);
    assert_eq!(pager.state_of(page), State::Untouched);
}

#[test]
fn late_words_of_two_unmappings_may_come_in_any_order() {
    let mut pager = pager();
    let target = pager.add_target();
    fill(&mut pager, target, span(0, 4));
    fill(&mut pager, target, span(50, 2));
    let page = page_at(&pager, target, 51);
    send_away(&mut pager, page);
    pager.remapped(target, span(0, 4), Address(0).plus_pages(100));
    pager.remapped(target, span(50, 2), Address(0).plus_pages(1));
    pager.remapped(target, span(1, 1), Address(0).plus_pages(60));
    for late in [span(1, 1), span(50, 2), span(0, 4)] {
        pager.unmapped(target, late, &[]);
    }
    assert_eq!(page_at(&pager, target, 2), page);
}

#[test]
fn a_mapping_that_stays_when_its_pages_move_is_unmapped_later() {
    let mut pager = pager();
    let target = pager.add_target();
    fill(&mut pager, target, span(0, 4));
    pager.remapped(target, span(0, 4), Address(0).plus_pages(100));
    fill(&mut pager, target, span(0, 4));
    pager.unmapped(target, span(0, 4), &[]);
    assert_eq!(pager.regions().at(target, Address(0)), None);
}

#[test]
fn a_page_that_moves_while_its_removal_is_announced_may_leave() {
    let mut pager = pager();
    let target = pager.add_target();
    fill(&mut pager, target, span(0, 1));
    assert!(pager.removed(target, span(0, 1)));
    assert_eq!(captures(&mut pager, 8), []);
    pager.remapped(target, span(0, 1), Address(0).plus_pages(100));
    // Nobody will look for it where it was announced.
    pager.removal_seen(target, span(0, 1));
    assert_eq!(captures(&mut pager, 8).len(), 1);
}

/// Captures `page` and hands it to a store that answers later.
fn hand_over(pager: &mut Pager, page: PageIndex, handle: HandleBits) {
    let buffer = pager.take_buffer().expect("enough buffers");
    pager.captured(page, Captured::Moved(buffer));
    pager.read(page, buffer, Bytes::Here);
    let write = pager.next_write(true).expect("it was just captured");
    pager.handed(write, handle);
}

/// A full store gets room from copies of pages that came home: else they would fill it for good.
#[test]
fn a_full_store_gets_clean_copies_back() {
    let mut pager = pager();
    let target = pager.add_target();
    fill(&mut pager, target, span(100, 2));
    let page = page_at(&pager, target, 100);
    send_away(&mut pager, page);
    let plan = pager.fault(target, span(100, 1).start);
    pager.installed(plan, Outcome { done: 1, stop: None });
    let handle = pager.handle_of(page);
    assert!(handle.is_some() && pager.state_of(page) == State::Mapped);
    pager.forgo_clean(1, |_| 0);
    assert!(!pager.has_released());
    // That pass ends, and the next begins.
    (0..2).for_each(|_| pager.forgo_clean(1, |_| u64::MAX));
    assert_eq!((pager.next_released(), pager.handle_of(page)), (handle, None));
    pager.forgo_clean(10, |_| u64::MAX);
    assert!(!pager.has_released());
    pager.audit();
}

#[test]
fn a_store_that_is_asked_about_many_copies_has_those_back_that_it_names() {
    const PAGES: u64 = 150;
    let mut pager = Pager::new(Config { budget: Budget::Pages(1000), buffers: 64, write_batch: 1 });
    let target = pager.add_target();
    fill(&mut pager, target, span(100, PAGES));
    let handle_of = |at: u64| HandleBits::new(u32::try_from(at).unwrap() + 1).unwrap();
    for at in 0..PAGES {
        let page = page_at(&pager, target, 100 + at);
        let buffer = pager.take_buffer().expect("enough buffers");
        pager.captured(page, Captured::Moved(buffer));
        pager.read(page, buffer, Bytes::Here);
        let write = pager.next_write(true).expect("it was just captured");
        pager.written(write, handle_of(at), false);
    }
    for at in 0..PAGES {
        let plan = pager.fault(target, span(100 + at, 1).start);
        pager.installed(plan, Outcome { done: 1, stop: None });
    }
    let is_named = |handle: &HandleBits| handle.get() % 7 == 3;
    let mut asked = Vec::new();
    pager.forgo_clean(usize::try_from(PAGES).unwrap(), |handles| {
        asked.extend_from_slice(handles);
        handles.iter().enumerate().fold(0, |bits, (at, handle)| bits | u64::from(is_named(handle)) << at)
    });
    assert_eq!(asked, (0..PAGES).map(handle_of).collect::<Vec<_>>());
    let released: Vec<_> = std::iter::from_fn(|| pager.next_released()).collect();
    assert_eq!(released, asked.into_iter().rev().filter(is_named).collect::<Vec<_>>());
    pager.audit();
}

/// What was allowed while much was over must not let faults fill that much again.
#[test]
fn an_overdraft_shrinks_with_the_excess() {
    let mut pager = pager();
    let target = pager.add_target();
    pager.add_region(target, span(100, 4 * BUDGET_PAGES));
    pager.found(target, span(100, 2 * BUDGET_PAGES));
    pager.set_overdraft(4);
    for at in 0..BUDGET_PAGES + 8 {
        let page = page_at(&pager, target, 100 + at);
        send_away(&mut pager, page);
    }
    let before = pager.free_pages();
    let filled = (0..BUDGET_PAGES).take_while(|at| {
        let plan = pager.fault(target, span(100 + 2 * BUDGET_PAGES + at, 1).start);
        let room = plan != Plan::NoRoom;
        if room {
            pager.installed(plan, Outcome { done: 1, stop: None });
        }
        room
    });
    assert_eq!((before, filled.count()), (8, 12));
}

#[test]
fn a_void_handle_that_a_page_gave_up_is_not_freed() {
    let mut pager = pager();
    let target = pager.add_target();
    fill(&mut pager, target, span(100, 2));
    let (refused, kept) = (HandleBits::new(7).expect("not zero"), HandleBits::new(8).expect("not zero"));
    let (first, second) = (page_at(&pager, target, 100), page_at(&pager, target, 101));
    hand_over(&mut pager, first, refused);
    hand_over(&mut pager, second, kept);
    pager.ended(target);
    pager.refused(first, refused);
    assert_eq!((pager.next_released(), pager.next_released()), (Some(kept), None));
    pager.audit();
}

/// With a few pages in all, each is needed until the next one is asked for.
#[test]
fn with_one_page_the_one_that_came_last_stays() {
    let mut pager = Pager::new(Config { budget: Budget::Pages(1), buffers: 64, write_batch: 1 });
    let target = pager.add_target();
    pager.add_region(target, span(100, 2));
    for at in [100, 101, 100, 101] {
        let mut plan = pager.fault(target, span(at, 1).start);
        while plan == Plan::NoRoom {
            assert_eq!(pager.next_batch_pages(), 1);
            let runs = captures(&mut pager, 1);
            send_away(&mut pager, runs[0].page);
            plan = pager.fault(target, span(at, 1).start);
        }
        assert_eq!(pager.installed(plan, Outcome { done: 1, stop: None }), Served::Yes);
        assert_eq!((pager.mapped_pages(), pager.wanted_captures()), (1, 0));
    }
}

/// What is beyond a small budget does not leave by its small batches.
#[test]
fn an_excess_leaves_in_large_batches() {
    let mut pager = pager();
    let target = pager.add_target();
    pager.set_budget(Budget::Pages(4096));
    fill(&mut pager, target, span(100, 2000));
    pager.set_budget(Budget::Pages(1000));
    assert_eq!((pager.batch_pages(), pager.next_batch_pages()), (15, 256));
    pager.set_budget(Budget::Pages(1900));
    assert_eq!(pager.next_batch_pages(), 100);
    pager.set_budget(Budget::Pages(2000));
    assert_eq!(pager.next_batch_pages(), 31);
}

/// A batch is worth another thread's reading from 8 MiB of budget, and takes little of a budget that is smaller.
#[test]
fn batches_follow_the_budget() {
    let mut pager = pager();
    let mut batch = |budget| {
        pager.set_budget(Budget::Pages(budget));
        pager.batch_pages()
    };
    assert_eq!([1, 16, 64, 128, 512].map(&mut batch), [1, 1, 4, 8, 8]);
    assert_eq!([1024, 2048, 6912, 16384, 1 << 20].map(&mut batch), [16, 32, 108, 256, 256]);
}

/// While a slow store takes pages over, capturing more would empty the targets for nothing.
#[test]
fn pages_on_their_way_to_the_store_count_as_room_to_come() {
    let mut pager = pager();
    let target = pager.add_target();
    fill(&mut pager, target, span(100, BUDGET_PAGES));
    let wanted = pager.wanted_captures();
    for at in 0..wanted {
        let page = page_at(&pager, target, 100 + at);
        hand_over(&mut pager, page, HandleBits::MIN.saturating_add(u32::try_from(at).expect("few")));
    }
    assert_eq!((wanted, pager.wanted_captures(), pager.free_pages()), (2 * pager.batch_pages(), 0, 0));
    let page = page_at(&pager, target, 100);
    pager.refused(page, HandleBits::MIN);
    assert_eq!(pager.state_of(page), State::Inactive);
}

#[test]
fn lost_pages_are_known_by_their_places() {
    let mut pager = pager();
    let target = pager.add_target();
    fill(&mut pager, target, span(100, 3));
    assert!(pager.lost_in(target).is_empty());
    let page = page_at(&pager, target, 101);
    let buffer = pager.take_buffer().expect("a free buffer");
    pager.captured(page, Captured::Moved(buffer));
    pager.read(page, buffer, Bytes::Lost);
    assert_eq!(pager.lost_in(target), [span(101, 1).start]);
    pager.remapped(target, span(100, 3), span(200, 1).start);
    assert_eq!(pager.lost_in(target), [span(201, 1).start]);
}

#[test]
fn a_lost_page_is_told_until_its_target_gives_it_back() {
    let mut pager = pager();
    let target = pager.add_target();
    fill(&mut pager, target, span(100, 3));
    let page = page_at(&pager, target, 101);
    send_away(&mut pager, page);
    assert!(pager.lost_in(target).is_empty());
    let plan = pager.fault(target, span(101, 1).start);
    assert!(matches!(plan, Plan::Fetch { pages: 1, .. }), "{plan:?}");
    pager.lost(page);
    assert_eq!(pager.lost_in(target), [span(101, 1).start]);
    pager.removed(target, span(101, 1));
    assert!(pager.lost_in(target).is_empty());
}

#[test]
fn what_came_back_before_its_bytes_were_read_stays_where_it_is() {
    let mut pager = pager();
    let target = pager.add_target();
    fill(&mut pager, target, span(100, 3));
    for (page, bytes) in [(100, Bytes::Here), (101, Bytes::Zero), (102, Bytes::Lost)] {
        let at = page_at(&pager, target, page);
        let buffer = pager.take_buffer().expect("a free buffer");
        pager.captured(at, Captured::Moved(buffer));
        assert_eq!(pager.next_write(true), None, "there is nothing to write yet");
        let plan = pager.fault(target, span(page, 1).start);
        assert!(matches!(plan, Plan::Buffer { .. }));
        pager.installed(plan, Outcome { done: 1, stop: None });
        pager.read(at, buffer, bytes);
        assert_eq!((pager.state_of(at), pager.next_write(true)), (State::Mapped, None));
        pager.audit();
    }
}

#[test]
fn what_was_captured_twice_is_not_written_before_it_was_read_again() {
    let mut pager = pager();
    let target = pager.add_target();
    fill(&mut pager, target, span(100, 1));
    let page = page_at(&pager, target, 100);
    let first = pager.take_buffer().expect("a free buffer");
    pager.captured(page, Captured::Moved(first));
    pager.read(page, first, Bytes::Here);
    let plan = pager.fault(target, span(100, 1).start);
    pager.installed(plan, Outcome { done: 1, stop: None });
    let second = pager.take_buffer().expect("a free buffer");
    pager.captured(page, Captured::Moved(second));
    assert_eq!(pager.next_write(true), None, "its bytes are still to come");
    pager.read(page, second, Bytes::Here);
    assert_eq!(pager.next_write(true).map(|write| (write.page, write.buffer)), Some((page, second)));
}

#[test]
fn what_nobody_is_left_to_access_is_lost_and_not_told() {
    let mut pager = pager();
    let target = pager.add_target();
    fill(&mut pager, target, span(100, 1));
    let page = page_at(&pager, target, 100);
    let buffer = pager.take_buffer().expect("a free buffer");
    pager.captured(page, Captured::Moved(buffer));
    pager.read(page, buffer, Bytes::Gone);
    assert_eq!((pager.state_of(page), pager.counters().lost_pages), (State::Lost, 0));
    assert_eq!(pager.lost_in(target), [span(100, 1).start], "should it be there all the same, it must not read zeros");
}

//! Pages that are in the store before anything of their memory was touched.

use spillway_core::page::{HandleBits, State};
use spillway_core::pager::{Budget, Config, Outcome, Pager, Plan, Served};
use spillway_core::{Address, PageIndex, Span, TargetId};

const FIRST: u32 = 1000;

fn span(first: u64, pages: u64) -> Span {
    Span::of_pages(Address(0).plus_pages(first), pages)
}

fn handle(address: Address) -> HandleBits {
    let page = u32::try_from(address.pages_since(Address(0))).expect("few");
    HandleBits::new(FIRST + page).expect("not zero")
}

/// Pages 100 to 163, of which two are in the target already.
fn guest() -> (Pager, TargetId) {
    let mut pager = Pager::new(Config { budget: Budget::Pages(64), buffers: 16, write_batch: 1 });
    let target = pager.add_target();
    pager.add_region(target, span(100, 64));
    for part in span(100, 64).without(std::iter::once(span(110, 2))) {
        pager.laid_out(target, part, handle);
    }
    pager.found(target, span(110, 2));
    (pager, target)
}

fn page_at(pager: &Pager, target: TargetId, at: u64) -> PageIndex {
    let address = Address(0).plus_pages(at);
    pager.regions().at(target, address).expect("managed").page_at(address)
}

/// Serves a fault, and tells what was asked of the store for the page itself.
fn fetched(pager: &mut Pager, target: TargetId, at: u64) -> HandleBits {
    let plan = pager.fault(target, Address(0).plus_pages(at));
    let Plan::Fetch { pages, .. } = plan else { panic!("{plan:?}") };
    let page = page_at(pager, target, at);
    let handle = pager.handle_of(page).expect("it is in the store");
    assert_eq!(pager.installed(plan, Outcome { done: pages, stop: None }), Served::Yes);
    assert_eq!(pager.state_of(page), State::Mapped);
    handle
}

#[test]
fn each_page_comes_from_its_own_place() {
    let (mut pager, target) = guest();
    assert_eq!((pager.mapped_pages(), pager.remote_pages()), (2, 62));
    for at in [163, 100, 112, 109] {
        assert_eq!(fetched(&mut pager, target, at).get(), FIRST + u32::try_from(at).unwrap());
    }
    pager.audit();
}

#[test]
fn what_was_there_is_not_laid_out_again() {
    let (mut pager, target) = guest();
    pager.laid_out(target, span(100, 64), |_| HandleBits::MIN);
    let there = page_at(&pager, target, 110);
    assert_eq!((pager.state_of(there), pager.handle_of(there)), (State::Mapped, None));
    assert_eq!(fetched(&mut pager, target, 109).get(), FIRST + 109);
    pager.audit();
}

#[test]
fn what_was_given_back_is_zeros_from_then_on() {
    let (mut pager, target) = guest();
    fetched(&mut pager, target, 120);
    assert!(pager.removed(target, span(118, 5)), "one of them is in the target");
    pager.removal_seen(target, span(118, 5));
    for at in 118..123 {
        let plan = pager.fault(target, Address(0).plus_pages(at));
        assert!(matches!(plan, Plan::Zero { page: Some(_), .. }), "{at}: {plan:?}");
    }
    let mut released: Vec<u32> = std::iter::from_fn(|| pager.next_released()).map(HandleBits::get).collect();
    released.sort_unstable();
    assert_eq!(released, (118..123).map(|at| FIRST + at).collect::<Vec<_>>());
    pager.audit();
}

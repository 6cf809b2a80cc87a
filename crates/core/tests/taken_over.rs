//! Memory of the pager's own, which another has elsewhere.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use spillway_core::book::WORDS_MIN;

use spillway_core::evict::{Bytes, Captured};
use spillway_core::lasting::{Lasting, Sheet};
use spillway_core::page::{BufferIndex, HandleBits, State};
use spillway_core::pager::{Budget, Config, Pager};
use spillway_core::table::CHUNK_PAGES;
use spillway_core::{Address, PageIndex, Span, TargetId};

const CONFIG: Config = Config { budget: Budget::Pages(64), buffers: 4, write_batch: 1 };

/// Memory that outlives its pagers.
struct Memory {
    book: &'static [AtomicU64],
    sheets: [Sheet; 2],
}

impl Memory {
    fn new() -> Self {
        let words = |count| -> &'static [AtomicU64] { Vec::leak((0..count).map(|_| AtomicU64::new(0)).collect()) };
        let sheet = || Sheet { number: &words(1)[0], entries: words(CHUNK_PAGES).try_into().expect("as many") };
        Self { book: words(WORDS_MIN), sheets: [sheet(), sheet()] }
    }

    fn lasting(&self) -> Lasting {
        let (used, mut free): (Vec<Sheet>, Vec<Sheet>) =
            self.sheets.iter().copied().partition(|sheet| sheet.number.load(Relaxed) != 0);
        Lasting { book: self.book, sheets: used, more: Box::new(move || free.pop()) }
    }
}

fn at(page: u64) -> Address {
    Address(0).plus_pages(page)
}

fn handle(address: Address) -> HandleBits {
    HandleBits::new(u32::try_from(address.pages_since(Address(0)) + 1).expect("few")).expect("not zero")
}

fn states(pager: &Pager, target: TargetId, start: Address) -> Vec<State> {
    let page =
        |nth| pager.regions().at(target, start.plus_pages(nth)).expect("it is there").page_at(start.plus_pages(nth));
    (0..16).map(|nth| pager.state_of(page(nth))).collect()
}

#[test]
fn what_is_elsewhere_has_the_pages_that_it_had() {
    let memory = Memory::new();
    let mut pager = Pager::lasting(CONFIG, memory.lasting());
    let (other, target) = (pager.add_target(), pager.add_target());
    pager.add_region(other, Span::of_pages(at(90), 4));
    pager.add_region(target, Span::of_pages(at(100), 16));
    pager.laid_out(target, Span::of_pages(at(100), 10), handle);
    pager.found(target, Span::of_pages(at(112), 2));
    let before = states(&pager, target, at(100));
    let first = pager.regions().of(target).next().expect("one region").first;
    // Farther up, across itself, and back down: each time in another process.
    for (from, to) in [(100, 5000), (5000, 5007), (5007, 100)] {
        let mut next = Pager::take_over(CONFIG, memory.lasting(), |_| true, |_, _| false).expect("it is readable");
        assert_eq!(next.regions().of(target).map(|region| region.span.start).collect::<Vec<_>>(), [at(from)]);
        next.rebase(target, at(from), at(to));
        assert_eq!(states(&next, target, at(to)), before);
        assert_eq!(next.regions().address_of(PageIndex(first.0 + 3)), Some((target, at(to + 3))));
        assert_eq!(next.regions().at(target, at(from).plus_pages(if to == 5007 { 0 } else { 8 })), None);
        assert!(next.regions().at(other, at(91)).is_some());
        next.audit();
    }
    pager.rebase(TargetId(2), at(0), at(1));
}

#[test]
fn a_buffer_is_had_by_its_number_once() {
    let mut pager = Pager::new(CONFIG);
    let target = pager.add_target();
    pager.add_region(target, Span::of_pages(at(100), 16));
    pager.found(target, Span::of_pages(at(100), 16));
    let page = pager.regions().of(target).next().expect("one region").first;
    assert!(
        pager.claim_buffer(BufferIndex(2))
            && !pager.claim_buffer(BufferIndex(2))
            && !pager.claim_buffer(BufferIndex(4))
    );
    pager.audit();
    pager.captured(page, Captured::Moved(BufferIndex(2)));
    pager.read(page, BufferIndex(2), Bytes::Here);
    assert!(pager.state_of(page) == State::Inactive && !pager.claim_buffer(BufferIndex(2)));
    assert!(pager.claim_buffer(BufferIndex(0)));
    pager.return_buffer(BufferIndex(0));
    pager.audit();
}

#[test]
fn a_child_is_found_whole_or_not_at_all() {
    let memory = Memory::new();
    let mut pager = Pager::lasting(CONFIG, memory.lasting());
    let parent = pager.add_target();
    pager.add_region(parent, Span::of_pages(at(100), 16));
    pager.laid_out(parent, Span::of_pages(at(100), 10), handle);
    pager.found(parent, Span::of_pages(at(110), 1));
    let page = pager.regions().at(parent, at(110)).expect("it is there").page_at(at(110));
    let buffer = pager.take_buffer().expect("one is free");
    pager.captured(page, Captured::Moved(buffer));
    pager.read(page, buffer, Bytes::Here);

    let found = || Pager::take_over(CONFIG, memory.lasting(), |_| true, |_, _| false).expect("it is readable");
    let child = pager.next_target();
    pager.begin_event(7);
    let (mut shared, mut copied) = (0, 0);
    let is_not_there = || {
        let found = found();
        (found.last_event(), found.targets()) == (0, 1) && found.regions().of(child).next().is_none()
    };
    let share = |bits| {
        shared += 1;
        assert!(is_not_there());
        bits
    };
    let made = pager.forked(parent, share, |_| {
        copied += 1;
        assert!(is_not_there(), "before its bytes are in their buffer");
    });
    assert_eq!((made, shared, copied), (child, 10, 1));
    let found = found();
    assert_eq!((found.last_event(), found.targets()), (7, 2));
    assert_eq!(states(&found, child, at(100)), states(&pager, child, at(100)));
}

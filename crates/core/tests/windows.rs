//! Windows: every page leaves once.

use spillway_core::evict::{Bytes, Captured, Run};
use spillway_core::pager::{Blocks, Budget, Config, Outcome, Pager, Plan};
use spillway_core::sample::{HASHES, hash};
use spillway_core::{Address, Span, TargetId};

const PAGES: u64 = 2000;

fn pager() -> (Pager, TargetId) {
    let mut pager = Pager::new(Config { budget: Budget::Pages(u64::MAX), buffers: 64, write_batch: 1 });
    let target = pager.add_target();
    let span = Span::of_pages(Address(0), PAGES);
    pager.add_region(target, span);
    pager.found(target, span);
    (pager, target)
}

/// Lets the sweep go on by a batch; every page of it held only zeros.
fn sweep(pager: &mut Pager, hash_below: u64) -> Option<Vec<u64>> {
    let mut runs: Vec<Run> = Vec::new();
    pager.next_window_capture(48, hash_below, |_| true, &mut runs)?;
    let pages: Vec<u64> = runs.iter().flat_map(|run| run.page.0..run.page.0 + run.pages).collect();
    for page in runs.iter().flat_map(|run| (0..run.pages).map(|i| run.page.plus(i))) {
        let buffer = pager.take_buffer().expect("more buffers than pages");
        pager.captured(page, Captured::Moved(buffer));
        pager.read(page, buffer, Bytes::Zero);
    }
    assert!(pages.len() <= 48);
    Some(pages)
}

fn touch(pager: &mut Pager, target: TargetId, page: u64) {
    let plan = pager.fault(target, Address(page * 4096));
    assert!(matches!(plan, Plan::Zero { pages: 1, .. }), "{plan:?}");
    pager.installed(plan, Outcome { done: 1, stop: None });
}

#[test]
fn every_page_leaves_once_a_window_though_it_comes_back_meanwhile() {
    let (mut pager, target) = pager();
    pager.set_blocks(Blocks { fill_pages: 1, fetch_pages: 1, ..Blocks::LARGEST });
    for _ in 0..2 {
        assert_eq!(sweep(&mut pager, HASHES), None, "no window, no sweep");
        pager.begin_window();
        let mut left = Vec::new();
        while let Some(pages) = sweep(&mut pager, HASHES) {
            pages.iter().for_each(|&page| touch(&mut pager, target, page));
            left.extend(pages);
        }
        assert_eq!(left, (0..PAGES).collect::<Vec<_>>());
        pager.audit();
    }
}

#[test]
fn of_a_sample_only_its_pages_leave() {
    let (mut pager, _) = pager();
    pager.begin_window();
    let left: Vec<u64> = std::iter::from_fn(|| sweep(&mut pager, HASHES / 8)).flatten().collect();
    let sampled: Vec<u64> = (0..PAGES).filter(|page| hash(*page) < HASHES / 8).collect();
    assert!(!sampled.is_empty());
    assert_eq!(left, sampled);
}

//! Mappings that come under management.

use spillway_core::{Address, Span, TargetId};

use super::{Driver, Report};
use crate::stretch::Stretch;
use crate::sys::uffd::Uffd;
use crate::watcher::Request;

/// How often a stretch is registered in a row while its mappings change.
const ATTEMPTS_MAX: u32 = 4;

impl Driver {
    /// Registers `stretches`; what of them was not registered before. Also the beginning of a scan.
    ///
    /// The kernel lets others map and unmap between what it tells of mappings and the call that registers them; that call
    /// may wait for them, even. So what was cut is looked for behind it, before any fault is served there: halves that were
    /// filled apart are never one mapping again.
    pub(super) fn register(&mut self, id: TargetId, stretches: &[Stretch]) -> Vec<Span> {
        if (id.0 as usize) < self.targets.len() {
            self.settle_at_rest(id.0 as usize);
        }
        let Some(Some(target)) = self.targets.get_mut(id.0 as usize) else { return Vec::new() };
        if !target.inherits && !target.handed {
            // What it has mapped since its fork would be taken for what it has inherited.
            return Vec::new();
        }
        let at_rest = target.unmapped.is_empty() && !target.uffd.is_changing();
        let regions = self.core.regions();
        let is_known = |stretch: &Stretch| at_rest && stretch.mappings.iter().all(|&span| regions.covers(id, span));
        let (mut called, mut done) = (Vec::new(), Vec::new());
        // What was moved there is registered. If it has been unmapped since, that is told of later, and until then what has come in its
        // place must not be taken for it.
        let mut has_skipped = false;
        let mut is_clear = |stretch: &Stretch| {
            let is_clear = target.announced.arrived_in(stretch.span()).is_empty();
            has_skipped |= !is_clear;
            is_clear
        };
        for seen in stretches {
            if !is_clear(seen) {
                continue;
            }
            // What is known is registered again all the same: nothing may ever leave a mapping that is not.
            let asked = if is_known(seen) { None } else { target.as_it_is(seen, self.choice) };
            let Some(mut now) = asked else {
                called.push(seen.span());
                done.extend(register_each(&target.uffd, seen));
                continue;
            };
            now.retain(&mut is_clear);
            for _ in 0..ATTEMPTS_MAX {
                called.extend(now.iter().map(Stretch::span));
                let spans: Vec<Span> = now.iter().flat_map(|stretch| register_whole(&target.uffd, stretch)).collect();
                let then = std::mem::replace(&mut now, target.as_it_is(seen, self.choice).unwrap_or_default());
                now.retain(&mut is_clear);
                // That a call over several mappings succeeds says only that one was there.
                let there =
                    |span: Span| now.iter().flat_map(|now| &now.mappings).filter_map(move |at| at.intersect(span));
                done.extend(spans.into_iter().flat_map(there));
                if now.iter().map(Stretch::mapped).eq(then.iter().map(Stretch::mapped)) {
                    break;
                }
            }
        }
        let new = done.into_iter().flat_map(|span| self.core.add_region(id, span)).collect();
        target.announced.scan_begins();
        if target.doubtful {
            // A removal may be under way that the pager before this one was told of.
            target.announced.during_scan(Span { start: Address(0), end: Address(u64::MAX) });
        }
        // What is at rest only now may not have been when it was registered.
        if !at_rest || target.uffd.is_changing() {
            target.announced.registered(called.into_iter());
        }
        if has_skipped {
            let _ = self.reports.send(Request::Report(Report::Rescan(id)));
        }
        new
    }
}

/// Registers a stretch in one call, or one by one where something of another kind has come into the free space behind it. What
/// was not refused; that is seen again later.
fn register_whole(uffd: &Uffd, stretch: &Stretch) -> Vec<Span> {
    if uffd.register(stretch.span()).is_ok() { vec![stretch.span()] } else { register_each(uffd, stretch) }
}

/// Registers the mappings of a stretch, of which some may be gone, at once and again one by one: which of them are there.
fn register_each(uffd: &Uffd, stretch: &Stretch) -> Vec<Span> {
    let whole = uffd.register(stretch.span()).is_ok();
    let is_there = |&span: &Span| (whole && stretch.mappings.len() == 1) || uffd.register(span).is_ok();
    stretch.mappings.iter().copied().filter(is_there).collect()
}

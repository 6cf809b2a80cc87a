//! What targets do to their own address spaces.

use std::os::fd::AsRawFd;
use std::sync::Arc;

use spillway_core::mappings::BufferCopy;
use spillway_core::{Address, Span, TargetId};

use super::hands::{to_bits, to_handle};
use super::{Driver, RETRY_NS, Report};
use crate::merging::Merging;
use crate::removals::By;
use crate::sys::clock::{now_ns, ticks_since_boot};
use crate::sys::fd::{poll, readable};
use crate::sys::uffd::{Event, Uffd};
use crate::tally::Tally;
use crate::target::Target;
use crate::watcher::Request;

/// How long a fork may wait for the store where there are too few buffers for copies, and where there are enough: as long as
/// a store that is well takes for all of them (4 MiB, at 1 Gbit/s 40 ms).
const WRITE_ALL_NS: u64 = 5_000_000_000;
const COPY_AFTER_NS: u64 = 100_000_000;

impl Driver {
    /// Something changed in a target's address space.
    pub(super) fn change(&mut self, at: usize, event: Event) {
        let Some(target) = &mut self.targets[at] else { return };
        let id = target.id;
        target.changes += u64::from(!matches!(event, Event::Remove(_)));
        match event {
            Event::Remove(span) => {
                target.announced.during_scan(span);
                if let Some(tape) = &mut self.tape {
                    tape.removed(&self.core, id, span);
                }
                if self.shared_removal(at, span) {
                    return;
                }
                let Some(target) = &self.targets[at] else { return };
                // What has grown in place is registered, and the table does not know it yet.
                let knows_all = !target.forked && self.core.regions().covers(id, span);
                if self.core.removed(id, span) || !knows_all {
                    self.announce(id, span);
                }
            }
            Event::Unmap(span) => {
                // Who unmaps goes on only when it has the CPU again, and what it did shows only then.
                target.unmapped.push(span);
                self.core.announced_unmapped(id, span);
                if self.core.regions().within(id, span).is_empty() {
                    self.settle_unmapped(at, None);
                }
            }
            Event::Remap { from, to, bytes } => {
                let span = Span { start: from, end: Address(from.0 + bytes) };
                if let Some(tape) = &mut self.tape {
                    tape.removed(&self.core, id, Span::of_pages(to, span.pages()));
                }
                self.core.remapped(id, span, to);
                // Whoever moved it, and whoever unmaps something, may have gone on since: what is at rest now does not tell.
                target.announced.arrived(Span::of_pages(to, span.pages()));
                let _ = target.uffd.wake(span);
                self.views_changed(at, span, Some(to));
            }
            Event::Fork(uffd) => self.fork(at, uffd, false),
            Event::Fault { .. } | Event::Unknown => {}
        }
    }

    /// Believes what was said to be unmapped as soon as mappings are at rest.
    pub(super) fn settle_at_rest(&mut self, at: usize) {
        let Some(target) = &mut self.targets[at] else { return };
        if (target.unmapped.is_empty() && !target.announced.is_unsettled()) || target.uffd.is_changing() {
            return;
        }
        self.settle_unmapped(at, None);
        if let Some(target) = self.targets[at].as_mut().filter(|target| target.unmapped.is_empty()) {
            target.announced.at_rest();
        }
    }

    /// Believes what was said to be unmapped now: where mappings are changing, all of it, but where something was moved there
    /// meanwhile. That waits until they are at rest, or until the `next` event moves it on: it was there, then.
    pub(super) fn settle_unmapped(&mut self, at: usize, next: Option<&Event>) {
        let Some(target) = &mut self.targets[at] else { return };
        let id = target.id;
        let moves = match next {
            Some(&Event::Remap { from, bytes, .. }) => Some(Span { start: from, end: Address(from.0 + bytes) }),
            _ => None,
        };
        for span in std::mem::take(&mut target.unmapped) {
            let (kept, later) = self.still_mapped(at, span, moves);
            if later == [span] {
                self.target(id).into_iter().for_each(|target| target.unmapped.push(span));
                continue;
            }
            if let Some(tape) = &mut self.tape {
                let gone = span.without(kept.iter().copied());
                gone.into_iter().for_each(|span| tape.removed(&self.core, id, span));
            }
            self.core.unmapped(id, span, &kept);
            later.iter().for_each(|&part| self.core.announced_unmapped(id, part));
            let Some(target) = &mut self.targets[at] else { return };
            target.unmapped.extend(later);
            // Faults that were read and not served may wait for a page that is no more: they are tried again.
            let _ = target.uffd.wake(span);
            self.views_changed(at, span, None);
        }
    }

    /// A removal that concerns pages in the target is to be settled.
    pub(super) fn announce(&mut self, id: TargetId, span: Span) {
        let Some(target) = self.target(id) else { return };
        let (number, span) = target.announced.removal(span);
        let _ = self.reports.send(Request::Report(Report::Removal { target: id, span, number, by: By::Itself }));
    }

    /// Of `span`, said to be unmapped, what is mapped and registered all the same: the kernel says so too when `munmap`
    /// failed half-way, and says it late, when another thread may have moved a mapping there. With it, and once more apart, what cannot
    /// be told of yet. What was moved there and `moves` on now was there.
    fn still_mapped(&self, at: usize, span: Span, moves: Option<Span>) -> (Vec<Span>, Vec<Span>) {
        let Some(target) = &self.targets[at] else { return Default::default() };
        let regions = |part| -> Vec<Span> {
            self.core.regions().within(target.id, part).iter().map(|region| region.span).collect()
        };
        let part = moves.and_then(|moves| moves.intersect(span));
        let mut kept = part.map(|part| target.arrived_in(&regions(part))).unwrap_or_default();
        let later = match target.still_has(&regions(span)) {
            Some(there) => {
                kept.extend(there);
                Vec::new()
            }
            None => part.map_or_else(|| vec![span], |part| span.without(std::iter::once(part))),
        };
        kept.extend(&later);
        (kept, later)
    }

    /// A scan saw these pages in the target, some time after it began.
    pub(super) fn found(&mut self, id: TargetId, span: Span) {
        let stays = self.but_for_removals(id, span);
        if stays != [span] {
            // What is left out costs memory, as it does not leave; what was found and then removed would come back to life.
            return stays.into_iter().for_each(|part| self.core.found(id, part));
        }
        let removed = self.target(id).map(|target| target.announced.removed_during_scan(span)).unwrap_or_default();
        for &part in &removed {
            if self.core.found_removing(id, part) {
                self.announce(id, part);
            }
        }
        span.without(removed.into_iter()).into_iter().for_each(|part| self.core.found(id, part));
    }

    /// A page that a fault was raised for is in the target already.
    pub(super) fn found_by_fault(&mut self, at: usize, address: Address) {
        let Some(target) = &self.targets[at] else { return };
        let (id, page) = (target.id, Span::of_pages(address, 1));
        if !target.announced.removed_during_scan(page).is_empty() && self.core.removed(id, page) {
            self.announce(id, page);
        }
    }

    /// Writes what is in buffers, and waits a while for a store that answers later: what it has is shared with the child, and
    /// costs no buffer. Where there are too few to copy all that is left, it is waited for longer: what finds none is lost to
    /// the child. What arrives is not installed meanwhile: the events that were read with the fork are still to be heeded,
    /// and the child would go without a page that the kernel did not copy and the table takes for mapped.
    fn write_all(&mut self) {
        let begun_ns = now_ns();
        loop {
            while self.write_one(true) {}
            let busy = self.core.buffered_pages() > 0 && !self.hands.store.accepts();
            let most_ns = if self.core.copies_fit() { COPY_AFTER_NS } else { WRITE_ALL_NS };
            let waits = (busy || self.journeys.writes() > 0) && now_ns() - begun_ns < most_ns;
            let Some(store) = self.hands.store.descriptor().filter(|_| waits) else { return };
            let mut polled = [readable(store.as_raw_fd())];
            self.hands.store.flush();
            poll(&mut polled, Some(RETRY_NS));
            self.hear_store();
        }
    }

    /// A target forked. `late`: another pager has read of it, so that what the parent has may have changed since.
    pub(super) fn fork(&mut self, at: usize, uffd: Uffd, late: bool) {
        let Some(target) = &self.targets[at] else { return };
        let (parent, tally, leaving) = (target.id, Arc::clone(&target.tally), target.leaving);
        let (inherits_merging, marked) = (target.merging == Merging::Ours, target.marked.clone());
        let has_known_views = target.has_known_views && !late;
        let mut child = self.child_of(parent, uffd, tally);
        child.has_known_views = has_known_views;
        if has_known_views {
            self.inherit_views(parent, child.id, &child.uffd);
        }
        (child.parent, child.leaving) = (Some(parent), leaving);
        (child.inherits_merging, child.marked) = (inherits_merging, marked);
        self.add_young(child, late.then(ticks_since_boot));
    }

    /// The child of `parent`, which may have ended meanwhile, with its share of what is out.
    pub(super) fn child_of(&mut self, parent: TargetId, uffd: Uffd, tally: Arc<Tally>) -> Target {
        self.hands.finish_reading(true, &mut self.core);
        // Parent and child can share what is in the store, and not what is in a buffer: those are copied, if need be.
        self.write_all();
        self.write_down_child(self.core.next_target(), parent, &uffd, &tally);
        let (store, buffers) = (&mut self.hands.store, &mut self.hands.buffers);
        let share = |bits| to_bits(store.share(to_handle(bits)));
        let child = self.core.forked(parent, share, |BufferCopy { from, to }| buffers.copy(from, to));
        Target { inherits: false, has_known_views: false, ..Target::new(child, 0, uffd, None, tally) }
    }

    /// A target without an agent, which another pager was told of if it says when.
    pub(super) fn add_young(&mut self, target: Target, taken_over: Option<u64>) {
        let (parent, child, has_known_views) = (target.parent, target.id, target.has_known_views);
        let (uffd, tally) = (target.uffd.clone(), Arc::clone(&target.tally));
        let forked = Report::Forked { parent, child, uffd, tally, has_known_views, taken_over };
        let _ = self.reports.send(Request::Report(forked));
        self.add(Target { forked: true, ..target });
    }
}

#[cfg(test)]
mod tests {
    use crate::skipped::skipped;
    use std::sync::Arc;

    use super::*;
    use crate::driver::tests::driver;
    use crate::stretch::Stretch;
    use crate::sys::test::{Aligned, comes_true};
    use crate::sys::uffd::new_of_unmappings;

    /// Who unmaps may be slow to tell of it, and another thread may move memory to that place meanwhile: what was out of that read as
    /// zeros when anything else was to be done before mappings were at rest. What has come there later is not what was moved.
    #[test]
    fn what_was_moved_to_where_something_was_unmapped_is_kept() {
        let uffd = match new_of_unmappings() {
            Ok(uffd) => uffd,
            Err(error) => return skipped(error),
        };
        let (moved, new) = (Aligned::blocks(1), Aligned::blocks(1));
        let of = |memory: &Aligned| Span::of_pages(memory.start(), 4);
        uffd.register(of(&moved)).expect("it can be registered");
        let mut driver = driver();
        let mut seen = Vec::new();
        let further = Address(1 << 31);
        for (to, moves_on) in [(of(&moved), None), (of(&new), None), (of(&moved), Some(further))] {
            let from = Span::of_pages(Address(1 << 30), to.pages());
            let id = driver.core.add_target();
            let at = id.0 as usize;
            driver.add(Target::new(id, 0, uffd.clone(), None, Arc::default()));
            driver.core.add_region(id, from);

            let its = uffd.clone();
            let changes = std::thread::spawn(move || {
                let elsewhere = Aligned::blocks(1);
                its.register(of(&elsewhere)).expect("as above");
            });
            let is_changing = comes_true(|| uffd.is_changing());
            driver.change(at, Event::Remap { from: from.start, to: to.start, bytes: to.end.0 - to.start.0 });
            driver.change(at, Event::Unmap(to));
            driver.settle_unmapped(at, None);
            driver.register(id, &[Stretch { mappings: vec![to], end: to.end }]);
            let is_kept_meanwhile = driver.core.regions().covers(id, to);
            let at_last = Span::of_pages(moves_on.unwrap_or(to.start), to.pages());
            if moves_on.is_some() {
                let event = Event::Remap { from: to.start, to: further, bytes: to.end.0 - to.start.0 };
                driver.settle_unmapped(at, Some(&event));
                driver.change(at, event);
            }

            driver.read_events(at);
            changes.join().expect("it was told of");
            driver.settle_at_rest(at);
            let waits = driver.targets[at].take().is_some_and(|target| !target.unmapped.is_empty());
            seen.push((is_changing, is_kept_meanwhile, waits, driver.core.regions().covers(id, at_last)));
        }
        // Nobody is told of how they end.
        drop((driver, uffd));
        assert_eq!(seen, [(true, true, false, true), (true, true, false, false), (true, true, false, true)]);
    }
}

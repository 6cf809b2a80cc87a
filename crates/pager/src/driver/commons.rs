//! Memory that several targets have mapped: who sees what of it, and how its pages leave ([`crate::commons`]).

use std::fs::File;
use std::sync::Arc;

use spillway_core::{Address, PAGE_BYTES_U64, Span, TargetId};

use super::{Driver, Report};
use crate::commons::{Backing, Commons, View};
use crate::outlook::Outlook;
use crate::procfs::{self, FileId, Mapping};
use crate::removals::By;
use crate::sys::message::MESSAGES;
use crate::sys::pagemap::Pagemap;
use crate::sys::procmap::ProcMap;
use crate::sys::uffd::Uffd;
use crate::tally::Tally;
use crate::target::{Flight, Target, Waiting};
use crate::watcher::Request;

/// Pages that are put back between two looks for faults.
const RESTORED_PAGES: usize = 64;

/// A target sees a file of memory.
#[derive(Clone, Copy, Debug)]
pub struct Joined {
    /// Its identity in the core.
    pub commons: TargetId,
    /// Where the first page of the file is, to the core.
    pub home: Address,
}

impl Driver {
    /// `target` has mapped a file of memory of so many pages: it is managed from now on, and leaves once that is all who have mapped it
    /// ([`super::Command::Open`]). None where it cannot be.
    pub(super) fn join(&mut self, id: TargetId, file: &Arc<File>, pages: u64, mapping: &Mapping) -> Option<Joined> {
        let (file_id, target) = (mapping.file?, self.targets.get(id.0 as usize)?.as_ref()?);
        let (tally, uffd) = (Arc::clone(&target.tally), target.uffd.clone());
        // Without asking one by one nobody could say where a fault of an unknown address is.
        target.procmap.as_ref()?.at_or_behind(mapping.span.start).ok()?;
        let known = self.commons_of(file_id);
        let commons = match known {
            Some(known) if self.target(known)?.tally.tree != tally.tree => return None,
            Some(known) => known,
            None => {
                self.found_commons(Commons::of(file_id, Arc::clone(file), pages, mapping.may_be_open()).ok()?, tally)
            }
        };
        let home = self.common(commons)?.span().start;
        if !self.show(commons, id, &uffd, mapping) {
            // Nobody would ever end what was made for this mapping alone.
            if known.is_none() {
                self.ended(commons);
            }
            return None;
        }
        Some(Joined { commons, home })
    }

    /// A commons that was not known.
    fn found_commons(&mut self, of: (Commons, Uffd), tally: Arc<Tally>) -> TargetId {
        let id = self.core.add_target();
        self.core.assign(id, tally.tree, tally.share());
        self.core.add_region(id, of.0.span());
        self.write_down_commons(id, &of.0, &tally);
        self.add_commons(id, of, tally, false);
        id
    }

    /// `doubtful`: taken over from another pager.
    pub(super) fn add_commons(
        &mut self,
        id: TargetId,
        (commons, uffd): (Commons, Uffd),
        tally: Arc<Tally>,
        doubtful: bool,
    ) {
        let own = std::process::id().cast_signed();
        let pagemap = Pagemap::open(own).ok();
        let target = Target::new(id, own, uffd, None, tally);
        self.add(Target { handed: true, pagemap, doubtful, commons: Some(Box::new(commons)), ..target });
        self.commons.push(id);
    }

    pub(super) fn common(&self, id: TargetId) -> Option<&Commons> {
        self.targets.get(id.0 as usize)?.as_ref()?.commons.as_deref()
    }

    pub(super) fn common_mut(&mut self, id: TargetId) -> Option<&mut Commons> {
        self.target(id)?.commons.as_deref_mut()
    }

    fn commons_of(&self, file: FileId) -> Option<TargetId> {
        self.commons.iter().copied().find(|&id| self.common(id).is_some_and(|commons| commons.id == file))
    }

    fn for_each_commons(&mut self, mut each: impl FnMut(&mut Commons)) {
        for nth in 0..self.commons.len() {
            self.common_mut(self.commons[nth]).into_iter().for_each(&mut each);
        }
    }

    /// Whether a target has mapped any of it.
    pub(super) fn sees_commons(&self, id: TargetId) -> bool {
        self.commons.iter().any(|&commons| self.common(commons).is_some_and(|commons| commons.is_seen_by(id)))
    }

    /// Registers what a mapping of `target` shows of a commons as a view of it; false where that cannot be.
    fn show(&mut self, commons: TargetId, target: TargetId, uffd: &Uffd, mapping: &Mapping) -> bool {
        let Some(commons) = self.common_mut(commons) else { return false };
        let view = View::of(target, uffd, mapping, commons.span());
        let Some(view) = view.filter(|_| uffd.register_shared(mapping.span).is_ok()) else { return false };
        let shows_all = view.span == mapping.span;
        commons.add_view(view);
        shows_all
    }

    /// Whether every mapping of a commons is a view of it: without, nothing leaves.
    pub(super) fn open_commons(&mut self, id: TargetId, is_ready: bool) {
        let Some(target) = self.target(id) else { return };
        // By then all that is there was told.
        target.doubtful &= !is_ready;
        let Some(commons) = &mut target.commons else { return };
        commons.open(is_ready);
        if is_ready && commons.views.is_empty() {
            let _ = self.reports.send(Request::Report(Report::Deserted(id)));
        }
    }

    /// Where a fault belongs: to a commons, if its address shows one. None if that cannot be told now: it waits.
    pub(super) fn whereabouts(&mut self, at: usize, fault: Waiting) -> Option<(usize, Waiting)> {
        let target = self.targets[at].as_ref()?;
        if self.commons.is_empty() || target.commons.is_some() { Some((at, fault)) } else { self.look_up(at, fault) }
    }

    #[inline(never)]
    fn look_up(&mut self, at: usize, fault: Waiting) -> Option<(usize, Waiting)> {
        let target = self.targets[at].as_ref()?;
        let id = target.id;
        if let Some(found) = self.in_commons(target, fault) {
            return Some(found);
        }
        if self.core.regions().at(id, fault.address).is_some() {
            return Some((at, fault));
        }
        // It may be a mapping that has moved, or that was said to be gone and is not: zeros would be everyone's.
        let asked = self.mapping_at(at, fault);
        match asked {
            Some(Some(mapping)) if !mapping.private && mapping.file.is_some() => {
                let uffd = target.uffd.clone();
                let Some(its) = mapping.file.and_then(|file| self.commons_of(file)) else {
                    // It is none of ours, and came to be registered with what lies beside it: the kernel's own again.
                    let _ = uffd.unregister(mapping.span);
                    return None;
                };
                self.show(its, id, &uffd, &mapping);
                let found = self.targets[at].as_ref().and_then(|target| self.in_commons(target, fault));
                if found.is_none() {
                    let _ = self.reports.send(Request::Report(Report::Rescan(id)));
                    self.targets[at].as_mut()?.waiting.push(fault);
                }
                found
            }
            Some(_) => Some((at, fault)),
            None => {
                self.targets[at].as_mut()?.waiting.push(fault);
                None
            }
        }
    }

    /// How many messages of a target may be read now. Where it shares memory, none of a change is read before it was seen what it
    /// is of: `MADV_REMOVE` and `MADV_DONTNEED` are told of in the same words.
    #[inline(never)]
    pub(super) fn messages_to_read(&mut self, at: usize) -> usize {
        let Some(target) = &self.targets[at] else { return 0 };
        let may_see = !target.has_known_views && !self.commons.is_empty();
        if !may_see && !self.sees_commons(target.id) {
            self.hands.estate.iter().for_each(|estate| estate.set_removals(&[]));
            return MESSAGES;
        }
        let Some(target) = &mut self.targets[at] else { return 0 };
        if target.uffd.tells_of_faults_alone() {
            return MESSAGES;
        }
        let (uffd, pid) = (target.uffd.clone(), Some(target.pid).filter(|pid| *pid > 0));
        let mut outlook = target.outlook.take().unwrap_or_else(|| Outlook::of(&uffd));
        let most = outlook.look(&uffd, pid, || self.relatives(at)).min(MESSAGES);
        self.note_removals(at, &outlook);
        if let Some(target) = &mut self.targets[at] {
            target.outlook = Some(outlook);
        }
        most
    }

    /// A change of a target was read: what it is of is known now, if it can be.
    #[inline(never)]
    pub(super) fn look_late(&mut self, at: usize) {
        let Some(target) = &mut self.targets[at] else { return };
        let pid = Some(target.pid).filter(|pid| *pid > 0);
        let Some(mut outlook) = target.outlook.take() else { return };
        outlook.look_late(pid, || self.relatives(at));
        self.note_removals(at, &outlook);
        if let Some(target) = &mut self.targets[at] {
            target.outlook = Some(outlook);
        }
    }

    /// All processes that are served, with their children and grandchildren. All there are, where a child may be anyone's by now.
    fn relatives(&self, at: usize) -> Vec<i32> {
        let parent_of =
            |target: &Target| self.targets.get(target.parent?.0 as usize)?.as_ref().map(|parent| parent.pid);
        let is_lost = |target: &Target| target.pid == 0 && parent_of(target).is_none_or(|pid| pid == 0);
        if self.targets[at].as_ref().is_some_and(is_lost) {
            return procfs::processes().unwrap_or_default();
        }
        let served = self.targets.iter().flatten().filter(|target| target.commons.is_none() && target.pid > 0);
        let mut all: Vec<i32> = served.map(|target| target.pid).collect();
        for _ in 0..2 {
            let children: Vec<i32> = all.iter().flat_map(|&pid| procfs::children(pid).unwrap_or_default()).collect();
            all.extend(children);
            all.sort_unstable();
            all.dedup();
        }
        all
    }

    /// A target gives up pages that it shares, or its own mapping of them; false where it shares none there.
    pub(super) fn shared_removal(&mut self, at: usize, span: Span) -> bool {
        let Some(target) = &self.targets[at] else { return false };
        let removers = target.outlook.as_ref().map_or_else(Vec::new, |outlook| outlook.removers(span));
        let (id, pid) = (target.id, target.pid);
        let all = self.shown_to(at, &removers, span);
        if !removers.is_empty() {
            let homes = all.iter().map(|(its, view)| (*its, Span::of_pages(view.home, view.span.pages())));
            // They may be another's that has the same memory (`CLONE_VM`); and one of its own may not have been seen yet.
            let by = By::These(removers.into_iter().chain((pid > 0).then_some(pid)).collect());
            self.begin_removal(id, span, &homes.collect::<Vec<_>>(), by);
        }
        !all.is_empty()
    }

    /// What a target sees in `span`, which `removers` are about to remove: of which commons, and the part of the view. Of what is not known
    /// to be a view the kernel is asked: of a child whose process is not known what they see, one of whom it is. Another removes it as well.
    pub(super) fn shown_to(&self, at: usize, removers: &[i32], span: Span) -> Vec<(TargetId, View)> {
        let Some(target) = &self.targets[at] else { return Vec::new() };
        let mut all: Vec<_> = self.shown_in(target.id, span).collect();
        let unknown = span.without(all.iter().map(|(_, view)| view.span));
        if removers.is_empty() || unknown.is_empty() {
            return all;
        }
        let theirs = removers.iter().filter(|_| target.procmap.is_none());
        let theirs: Vec<ProcMap> = theirs.filter_map(|&thread| ProcMap::open(thread).ok()).collect();
        for procmap in target.procmap.iter().chain(&theirs) {
            unknown.iter().for_each(|&part| all.extend(self.mapped_in(target, procmap, part)));
        }
        all
    }

    /// What is mapped in `span` that shows a commons, as the kernel says.
    fn mapped_in(&self, target: &Target, procmap: &ProcMap, span: Span) -> impl Iterator<Item = (TargetId, View)> {
        procmap.within(span).filter_map(move |mapping| {
            let its = self.commons_of(mapping.file.filter(|_| !mapping.private)?)?;
            let view = View::of(target.id, &target.uffd, &mapping, self.common(its)?.span())?;
            Some((its, view.within(span)?))
        })
    }

    /// What a target sees in `span`: of which commons, and the part of the view.
    pub(super) fn shown_in(&self, id: TargetId, span: Span) -> impl Iterator<Item = (TargetId, View)> {
        let views = self.commons.iter().filter_map(|&its| Some((its, &self.common(its)?.views)));
        let its = views.flat_map(|(its, views)| views.iter().map(move |view| (its, view)));
        its.filter_map(move |(its, view)| Some((its, view.within(span).filter(|_| view.target == id)?)))
    }

    /// Pages of commons are given up by a target, as it does so in `span`.
    pub(super) fn begin_removal(&mut self, id: TargetId, span: Span, homes: &[(TargetId, Span)], by: By) {
        if homes.is_empty() {
            return;
        }
        // What is there waits until it is gone, and does not leave before.
        for &(its, home) in homes {
            self.core.removed(its, home);
        }
        self.await_removal(id, span, homes, by);
    }

    /// The same of what has begun to be removed.
    pub(super) fn await_removal(&mut self, id: TargetId, span: Span, homes: &[(TargetId, Span)], by: By) {
        let Some((number, span)) = self.target(id).map(|target| target.announced.removal(span)) else { return };
        for &(its, home) in homes {
            self.common_mut(its).into_iter().for_each(|commons| commons.removal_begins(id, number, home));
        }
        let _ = self.reports.send(Request::Report(Report::Removal { target: id, span, number, by }));
    }

    /// A removal must have happened by now, if it was one of shared pages; and all that a target has begun before.
    pub(super) fn shared_removal_over(&mut self, id: TargetId, number: u64) {
        for nth in 0..self.commons.len() {
            let its = self.commons[nth];
            let homes = self.common_mut(its).map(|it| it.removals_end(id, number)).unwrap_or_default();
            let Some(file) = self.common(its).filter(|_| !homes.is_empty()).map(Commons::backing) else { continue };
            let there = |file: &Backing, homes: Vec<Span>| {
                homes.into_iter().map(|home| (home, file.there(home))).collect::<Vec<_>>()
            };
            let then = move |driver: &mut Self, found: Vec<(Span, Vec<Span>)>| driver.end_removals(its, &found);
            self.call_on(its, file, vec![homes], there, then);
        }
    }

    /// What was given up of a commons is gone, but for what is there of each part, as it has come anew.
    fn end_removals(&mut self, its: TargetId, found: &[(Span, Vec<Span>)]) {
        let homes: Vec<Span> = found.iter().map(|(home, _)| *home).collect();
        self.common_mut(its).into_iter().for_each(|commons| commons.removals_are_over(&homes));
        // What another is about to remove waits for that.
        let others = self.common(its).map(Commons::removing).unwrap_or_default();
        for (home, there) in found {
            let others = others.iter().copied().filter(|other| other.intersect(*home).is_some());
            for home in home.without(others) {
                for gone in home.without(there.iter().copied()) {
                    self.core.removal_seen(its, gone);
                }
                self.core.removal_over(its, home);
            }
        }
    }

    /// The page of a commons that a fault of `target` is about, noted as waited for.
    fn in_commons(&self, target: &Target, fault: Waiting) -> Option<(usize, Waiting)> {
        self.commons.iter().find_map(|&its| {
            let commons = self.common(its)?;
            let home = commons.seen_at(target.id, fault.address)?;
            commons.awaits(target.id, &target.uffd, fault.address, home);
            Some((its.0 as usize, Waiting { address: home, ..fault }))
        })
    }

    /// What is mapped where a fault is; none where it cannot be told.
    fn mapping_at(&self, at: usize, fault: Waiting) -> Option<Option<Mapping>> {
        let target = self.targets[at].as_ref()?;
        let of_thread = || ProcMap::open(fault.thread).ok().filter(|_| fault.thread > 0);
        let found = match &target.procmap {
            Some(procmap) => procmap.at_or_behind(fault.address).ok()?,
            None => of_thread()?.at_or_behind(fault.address).ok()?,
        };
        Some(found.filter(|mapping| mapping.span.start <= fault.address))
    }

    /// A thread means to write to a page that was protected while it was to leave.
    #[inline(never)]
    pub(super) fn unprotect(&mut self, at: usize, fault: Waiting) {
        let Some(target) = &mut self.targets[at] else { return };
        if target.uffd.protect(Span::of_pages(fault.address, 1), false).is_err() {
            // Mappings are changing: it is woken later, and asks again.
            target.waiting.push(fault);
        }
    }

    /// Of what its parent sees a child has only what is in `has`.
    pub(super) fn forget_views_but(&mut self, id: TargetId, has: &[Span]) {
        let everything = Span { start: Address(0), end: Address(!(PAGE_BYTES_U64 - 1)) };
        let has_not = everything.without(has.iter().copied());
        self.for_each_commons(|commons| has_not.iter().for_each(|span| commons.forget_views(id, *span)));
    }

    /// What was found of a commons, but for what is being removed of it.
    pub(super) fn but_for_removals(&self, id: TargetId, span: Span) -> Vec<Span> {
        let removing = self.common(id).map(Commons::removing).unwrap_or_default();
        span.without(removing.into_iter())
    }

    /// A child has what its parent sees.
    pub(super) fn inherit_views(&mut self, parent: TargetId, child: TargetId, uffd: &Uffd) {
        self.for_each_commons(|commons| {
            let its = commons.views.iter().filter(|view| view.target == parent).cloned().collect::<Vec<_>>();
            let views = its.into_iter().map(|view| View { target: child, uffd: uffd.clone(), ..view });
            commons.views.extend(views);
        });
    }

    /// A mapping of a target has moved, or is gone: what it sees now.
    pub(super) fn views_changed(&mut self, at: usize, span: Span, to: Option<Address>) {
        let Some(target) = self.targets[at].as_ref().filter(|_| !self.commons.is_empty()) else { return };
        if target.procmap.is_some() {
            return self.look_at_views(at);
        }
        // Of a child whose process is not known what was said must do. What is not so is looked up when it faults.
        let id = target.id;
        self.for_each_commons(|commons| {
            let shown = commons.views.iter().filter(|view| view.target == id).filter_map(|view| view.within(span));
            let moved: Vec<View> = to.map_or(Vec::new(), |to| shown.map(|view| view.moved(span.start, to)).collect());
            commons.forget_views(id, span);
            moved.into_iter().for_each(|view| commons.add_view(view));
        });
        self.tell_deserted();
    }

    /// Mappings of a target have changed: what it sees now.
    pub(super) fn look_at_views(&mut self, at: usize) {
        if self.targets[at].as_ref().is_some_and(|target| self.sees_commons(target.id)) {
            self.look_for_views(at);
            self.tell_deserted();
        }
    }

    /// The process of a target is known: so is what it sees, also if nobody has told so far that it sees anything.
    pub(super) fn come_to_know_views(&mut self, at: usize) {
        if self.targets[at].as_ref().is_some_and(|target| target.has_known_views) {
            return self.look_at_views(at);
        }
        self.look_for_views(at);
        if let Some(target) = &mut self.targets[at] {
            target.has_known_views = target.procmap.is_some();
        }
    }

    /// Asks what a target sees.
    pub(super) fn look_for_views(&mut self, at: usize) {
        let Some(target) = self.targets[at].as_ref().filter(|_| !self.commons.is_empty()) else { return };
        let (id, uffd) = (target.id, target.uffd.clone());
        let Some(procmap) = &target.procmap else { return };
        let everything = Span { start: Address(0), end: Address(u64::MAX) };
        let shared = procmap.within(everything).filter(|mapping| !mapping.private && mapping.file.is_some());
        let mappings: Vec<Mapping> = shared.collect();
        for nth in 0..self.commons.len() {
            let its = self.commons[nth];
            let Some(commons) = self.common_mut(its) else { continue };
            let file = Some(commons.id);
            commons.forget_views(id, everything);
            for mapping in mappings.iter().filter(|mapping| mapping.file == file) {
                if !self.show(its, id, &uffd, mapping) {
                    self.open_commons(its, false);
                }
            }
        }
    }

    /// The views that a target had are no more.
    pub(super) fn forget_views_of(&mut self, id: TargetId) {
        // Whoever has ended has also ended what it was at.
        self.shared_removal_over(id, u64::MAX);
        self.for_each_commons(|commons| commons.forget(id));
        self.tell_deserted();
    }

    /// Tells of what nobody sees any more.
    fn tell_deserted(&self) {
        for &id in &self.commons {
            if self.common(id).is_some_and(|commons| commons.views.is_empty()) {
                let _ = self.reports.send(Request::Report(Report::Deserted(id)));
            }
        }
    }

    /// Ends a commons, unless somebody sees it again.
    pub(super) fn end_commons(&mut self, id: TargetId) -> bool {
        let is_seen = self.common(id).map(|commons| !commons.views.is_empty());
        if self.target(id).is_some_and(|target| target.flight != Flight::Idle) {
            // That is told of again.
            return false;
        }
        if is_seen == Some(false) {
            self.ended(id);
        }
        is_seen != Some(true)
    }

    /// Puts a few pages back into the file of a commons: whether there were any in the part that begins at `from`, and where the next
    /// begins.
    pub(super) fn restore(&mut self, id: TargetId, from: Address) -> Option<(bool, Address)> {
        let mut outside = Vec::with_capacity(RESTORED_PAGES);
        let next = self.core.outside_of(id, from, RESTORED_PAGES, &mut outside);
        if !outside.is_empty() {
            // It waits for no room: it is nobody's any more.
            self.core.lend(u64::MAX / 2);
            self.install_outside(&outside);
            self.lend();
        }
        next.map(|next| (!outside.is_empty(), next))
    }
}

#[cfg(test)]
mod tests {
    use crate::skipped::skipped;
    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;
    use crate::commons::usable;
    use crate::driver::tests::driver;
    use crate::sys::sched::thread_id;
    use crate::sys::uffd::new_of_our_own;
    use crate::sys::window::Window;

    /// A forked child whose pager was killed was seen removing memory that it had not faulted in yet: while it was known which process it
    /// is, and not what it sees, that was taken for a removal of its own, and old bytes came back.
    #[test]
    fn what_a_child_removes_is_known_before_it_is_told_what_it_sees() {
        if let Err(error) = usable() {
            return skipped(error);
        }
        const PAGES: u64 = 4;
        let file = File::from(memfd_create(c"commons", MemfdFlags::CLOEXEC).expect("memory"));
        file.set_len(PAGES * PAGE_BYTES_U64).expect("a length");
        let file = Arc::new(file);
        let [faulted, untouched] = [(); 2].map(|()| Window::of(&file, PAGES).expect("mapped"));
        let own = std::process::id().cast_signed();
        let mapping_at =
            |at: Address| ProcMap::open(own).and_then(|it| it.at_or_behind(at)).expect("asked").expect("mapped");

        let mut driver = driver();
        let (id, uffd) = (driver.core.add_target(), new_of_our_own().expect("it is usable"));
        let mut child = Target::new(id, 0, uffd, None, Arc::default());
        child.look_into(own);
        driver.add(Target { has_known_views: false, ..child });
        let mapping = mapping_at(faulted.span().start);
        let Joined { commons, home } = driver.join(id, &file, PAGES, &mapping).expect("it is memory");

        let at = id.0 as usize;
        let part = Span::of_pages(untouched.span().start.plus_pages(1), 2);
        let shown = |driver: &Driver, removers: &[i32]| {
            let all = driver.shown_to(at, removers, part).into_iter();
            all.map(|(its, view)| (its, view.span, view.home)).collect::<Vec<_>>()
        };
        let its = (commons, part, home.plus_pages(1));
        assert_eq!(shown(&driver, &[thread_id()]), [its]);
        assert!(shown(&driver, &[]).is_empty(), "nobody was asked");

        // What it sees is known from when its process is.
        driver.come_to_know_views(at);
        assert_eq!(shown(&driver, &[]), [its]);
        // Also if nobody has told that it sees anything.
        driver.common_mut(commons).expect("it is one").forget(id);
        driver.targets[at].as_mut().expect("it is there").has_known_views = false;
        driver.come_to_know_views(at);
        assert_eq!(shown(&driver, &[]), [its]);
        assert!(driver.targets[at].as_ref().expect("it is there").has_known_views);
    }
}

//! A *commons*: a file of memory that several processes have mapped (a memfd, or `MAP_SHARED | MAP_ANONYMOUS`).
//!
//! Its pages are the file's, not a process's. So to the core it is a target of its own, whose address space is a mapping of ours
//! (*home*): a page is installed there, and is there for everyone; faults come from the *views*, the mappings of the file in
//! targets, and their addresses mean the page of home that shows the same page of the file. docs/decisions/0030.
//!
//! Invariants: nothing reads or writes through home. A page leaves only while it can be written to in no view, and while the
//! kernel has no reference to it but the file's and those of page tables. Every mapping of the file is a view, as far as can be
//! known, or nothing leaves ([`Commons::open`]).

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use spillway_core::pager::{Outcome, Stop};
use spillway_core::{Address, PAGE_BYTES_U64, Page, Span, TargetId};

use crate::driver::Joined;
use crate::error::Error;
use crate::pins::{FilePages, Pins};
use crate::procfs::{FileId, Mapping};
use crate::stretch::joined;
use crate::sys::clock::now_ns;
use crate::sys::pagemap::{FrameFlags, Pagemap};
use crate::sys::procmap::ProcMap;
use crate::sys::uffd::{Uffd, new_of_our_own};
use crate::sys::window::{Window, next_data, next_page_of_data, punch};
use crate::tally::Tally;
use crate::target::WAITING_ROOM;
use crate::watcher::InheritedCommons;

/// How long it is waited for that pages of a commons may leave that is new, or that somebody new has mapped.
const AWAITED_NS: u64 = 1_000_000_000;
/// How often at most CPUs are told to let go of pages: that takes each of them a moment.
const SETTLES_EVERY_NS: u64 = 20_000_000;
/// So many are looked for one by one.
const FEW_PAGES: u64 = 64;

/// A mapping of the file in a target.
#[derive(Clone, Debug)]
pub struct View {
    /// Whose.
    pub target: TargetId,
    /// Its userfaultfd.
    pub uffd: Uffd,
    /// Where.
    pub span: Span,
    /// Which page of home its first shows.
    pub home: Address,
}

impl View {
    /// What a mapping of the file in `target` shows of `home`: of what lies behind the end that the file had nothing is known.
    pub fn of(target: TargetId, uffd: &Uffd, mapping: &Mapping, home: Span) -> Option<Self> {
        let start = Address(home.start.0.saturating_add(mapping.offset));
        if !mapping.offset.is_multiple_of(PAGE_BYTES_U64) || start >= home.end {
            return None;
        }
        let there = home.end.pages_since(start).min(mapping.span.pages());
        Some(Self { target, uffd: uffd.clone(), span: Span::of_pages(mapping.span.start, there), home: start })
    }

    /// The part of it that lies in `span`.
    pub fn within(&self, span: Span) -> Option<Self> {
        let part = self.span.intersect(span)?;
        let home = self.home.plus_pages(part.start.pages_since(self.span.start));
        Some(Self { span: part, home, ..self.clone() })
    }

    /// The same, where it is once what was at `from` is at `to`.
    pub fn moved(self, from: Address, to: Address) -> Self {
        let start = to.plus_pages(self.span.start.pages_since(from));
        Self { span: Span::of_pages(start, self.span.pages()), ..self }
    }

    /// What it shows of `home`, in its own addresses.
    fn part(&self, home: Span) -> Option<Span> {
        let shown = Span::of_pages(self.home, self.span.pages()).intersect(home)?;
        Some(Span::of_pages(self.span.start.plus_pages(shown.start.pages_since(self.home)), shown.pages()))
    }
}

/// Threads that wait for a page. Views come and go meanwhile.
struct Waits {
    target: TargetId,
    uffd: Uffd,
    address: Address,
    page: Address,
}

/// What became of the pages of a run that was to leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    /// It is out.
    Out,
    /// It stays, as it is in use by the kernel, locked, or part of a huge page.
    Stays,
    /// It was not tried: mappings are changing.
    Untried,
}

/// What tells which pages may leave.
pub struct Eyes {
    pins: Pins,
    flags: FrameFlags,
    own: Pagemap,
    frames: Vec<u64>,
    /// When CPUs were last told to let go of what they hold for a while.
    settled_ns: u64,
}

impl Eyes {
    /// Opens what tells it.
    ///
    /// # Errors
    /// Without the rights to it: without, a page could leave that a device is writing to.
    pub fn open() -> io::Result<Self> {
        let own = Pagemap::open(std::process::id().cast_signed())?;
        // A page that it looks at may be moved just then.
        let pins = Pins::open().or_else(|_| Pins::open())?;
        Ok(Self { pins, flags: FrameFlags::open()?, own, frames: Vec::new(), settled_ns: 0 })
    }

    /// Marks what of the pages of `file` from `first` on, mapped here at `span`, may leave.
    fn look(&mut self, file: FilePages, first: u64, span: Span, taken: &mut [Taken]) {
        let Self { pins, flags, own, frames, settled_ns } = self;
        if own.frames(span, frames).is_err() {
            return;
        }
        for (nth, (frame, taken)) in frames.iter().zip(&mut *taken).enumerate() {
            let may = *frame != 0 && flags.may_leave(*frame).unwrap_or(false);
            let mut leaves = may && !pins.is_pinned(*frame, file, first + nth as u64).unwrap_or(true);
            // A CPU that holds pages because they were lately used does so for long where it is idle.
            if may && !leaves && settled_ns.saturating_add(SETTLES_EVERY_NS) < now_ns() {
                *settled_ns = now_ns();
                // Where it cannot be told to, they leave later.
                let _ = pins.settle();
                leaves = !pins.is_pinned(*frame, file, first + nth as u64).unwrap_or(true);
            }
            *taken = if leaves { Taken::Out } else { Taken::Stays };
        }
    }
}

/// Refuses a machine on which shared memory cannot be managed.
///
/// # Errors
/// With what is missing.
pub fn usable() -> Result<(), Error> {
    let own = std::process::id().cast_signed();
    let asked = ProcMap::open(own).and_then(|procmap| procmap.at_or_behind(Address(0)));
    let needed = asked.map(drop).and_then(|()| Eyes::open()).map(drop).and_then(|()| new_of_our_own()).map(drop);
    needed.map_err(Error::NoSharedMemory)
}

/// See the module's documentation.
pub struct Commons {
    /// Which file it is.
    pub id: FileId,
    file: Arc<File>,
    /// The same to the kernel.
    pages: FilePages,
    home: Window,
    /// Another mapping of ours, through which pages are looked at: there nobody is asked for what is missing.
    probe: Window,
    /// The mappings of it in targets.
    pub views: Vec<View>,
    /// Every mapping of it is a view, and what is there was found.
    is_ready: bool,
    /// Until when faults wait for that where there is no room: it takes a few looks at all processes.
    awaited_until_ns: u64,
    /// Who waits for which page of home.
    waiting: RefCell<Vec<Waits>>,
    /// What is about to be given up of it: by whom, the number that it has there, and of what.
    removals: Vec<(TargetId, u64, Span)>,
    /// What has been, of which it is being asked what is there.
    removed: Vec<Span>,
    /// Somebody may have a descriptor of it, and hold up what we do with the file.
    may_be_open: bool,
    /// What of home is being taken out just now.
    leaving: Vec<Span>,
    /// Views that came since, where that could not be protected yet.
    unprotected: Vec<View>,
    eyes: Eyes,
}

impl Commons {
    /// The first `pages` pages of `file`, and the userfaultfd by which pages of home are installed. `may_be_open`: somebody may have a
    /// descriptor of it.
    ///
    /// # Errors
    /// As the kernel says.
    pub fn of(id: FileId, file: Arc<File>, pages: u64, may_be_open: bool) -> io::Result<(Self, Uffd)> {
        let (home, probe) = (Window::of(&file, pages)?, Window::of(&file, pages)?);
        let uffd = new_of_our_own()?;
        uffd.register(home.span())?;
        let mut eyes = Eyes::open()?;
        let in_kernel = eyes.pins.pages_of(file.as_fd())?;
        let waiting = RefCell::new(Vec::with_capacity(WAITING_ROOM));
        let commons = Self {
            id,
            file,
            pages: in_kernel,
            home,
            probe,
            views: Vec::new(),
            is_ready: false,
            awaited_until_ns: now_ns() + AWAITED_NS,
            waiting,
            removals: Vec::new(),
            removed: Vec::new(),
            may_be_open,
            leaving: Vec::new(),
            unprotected: Vec::new(),
            eyes,
        };
        Ok((commons, uffd))
    }

    /// Where home is.
    pub fn span(&self) -> Span {
        self.home.span()
    }

    /// Whether pages of it may leave now.
    pub fn is_ready(&self) -> bool {
        self.is_ready
    }

    /// Every mapping of it is a view, and what is there was found; or not any more.
    pub fn open(&mut self, is_ready: bool) {
        if self.is_ready && !is_ready {
            self.awaited_until_ns = now_ns() + AWAITED_NS;
        }
        self.is_ready = is_ready;
    }

    /// Whether pages of it may leave, or will soon.
    pub fn takes_orders(&self) -> bool {
        self.is_ready || now_ns() < self.awaited_until_ns
    }

    /// The page of home that `target` sees at `address`.
    pub fn seen_at(&self, target: TargetId, address: Address) -> Option<Address> {
        let at = |view: &&View| view.target == target && view.span.start <= address && address < view.span.end;
        self.views.iter().find(at).map(|view| view.home.plus_pages(address.pages_since(view.span.start)))
    }

    /// Adds a view, which is registered. What is on its way out is not to be written to by it.
    pub fn add_view(&mut self, view: View) {
        let cut = view.span;
        self.forget_views(view.target, cut);
        if !self.leaving.is_empty() {
            self.unprotected.push(view.clone());
            self.protect_late();
        }
        self.views.push(view);
    }

    /// What `target` has in `span` is no view of it any more.
    pub fn forget_views(&mut self, target: TargetId, span: Span) {
        let cut = |view: View| {
            let rest = if view.target == target { view.span.without([span].into_iter()) } else { vec![view.span] };
            rest.into_iter().filter_map(|rest| view.within(rest)).collect::<Vec<_>>()
        };
        self.views = std::mem::take(&mut self.views).into_iter().flat_map(cut).collect();
    }

    /// Nothing of `target` is there any more, nor anyone who waits.
    pub fn forget(&mut self, target: TargetId) {
        self.views.retain(|view| view.target != target);
        self.waiting.borrow_mut().retain(|waiting| waiting.target != target);
    }

    /// Whether `target` has views.
    pub fn is_seen_by(&self, target: TargetId) -> bool {
        self.views.iter().any(|view| view.target == target)
    }

    /// A thread of `target` waits at `address`, where it sees `page` of home.
    pub fn awaits(&self, target: TargetId, uffd: &Uffd, address: Address, page: Address) {
        let (address, page) = (address.page(), page.page());
        let mut waiting = self.waiting.borrow_mut();
        if !waiting.iter().any(|it| (it.target, it.address, it.page) == (target, address, page)) {
            waiting.push(Waits { target, uffd: uffd.clone(), address, page });
        }
    }

    /// Who waits for pages of `home` tries again.
    pub fn wake(&self, home: Span) {
        self.waiting.borrow_mut().retain(|it| {
            let is_there = home.intersect(Span::of_pages(it.page, 1)).is_some();
            if is_there {
                // What is gone has nobody to wake.
                let _ = it.uffd.wake(Span::of_pages(it.address, 1));
            }
            !is_there
        });
    }

    /// From now on an access to the page at `home` raises SIGBUS, by whichever view.
    pub fn poison(&self, home: Address) -> Outcome {
        let outcomes = self.shown(Span::of_pages(home, 1)).map(|(view, part)| view.uffd.poison(part.start));
        // Who has ended, or has unmapped it, has no access.
        let stop = outcomes.filter_map(|outcome| outcome.stop).find(|stop| *stop != Stop::Gone);
        Outcome { done: u64::from(stop.is_none()), stop }
    }

    /// Pages of `home` are about to be given up, for all who have them mapped: removal `number` of what `target` does.
    pub fn removal_begins(&mut self, target: TargetId, number: u64, home: Span) {
        self.removals.push((target, number, home));
    }

    /// All that is being given up.
    pub fn removing(&self) -> Vec<Span> {
        self.removals.iter().map(|(_, _, home)| home).chain(&self.removed).copied().collect()
    }

    /// That has happened, and what `target` has begun before: of which parts. What of them is there is to be asked, and told by
    /// [`Commons::removals_are_over`].
    pub fn removals_end(&mut self, target: TargetId, number: u64) -> Vec<Span> {
        let its = self.removals.extract_if(.., |(by, its, _)| *by == target && *its <= number);
        let ended = joined(its.map(|(.., home)| home).collect());
        self.removed.extend(&ended);
        ended
    }

    /// What is there of these parts, which were given up, is known.
    pub fn removals_are_over(&mut self, homes: &[Span]) {
        for home in homes {
            self.removed.iter().position(|removed| removed == home).map(|at| self.removed.swap_remove(at));
        }
    }

    /// Its file, for calls that take its lock.
    pub fn backing(&self) -> Backing {
        Backing { file: Arc::clone(&self.file), home: self.home.span().start, may_be_open: self.may_be_open }
    }

    /// What a watcher must know of it that did not find it.
    pub fn inherited(&self, id: TargetId, tally: Arc<Tally>) -> InheritedCommons {
        let joined = Joined { commons: id, home: self.span().start };
        InheritedCommons { id: self.id, joined, file: Arc::clone(&self.file), tally }
    }

    /// What every view shows of `home`.
    pub fn shown(&self, home: Span) -> impl Iterator<Item = (&View, Span)> {
        self.views.iter().filter_map(move |view| Some((view, view.part(home)?)))
    }

    /// Reads the pages of `home` into `pages` so that they can be punched out of the file ([`Backing::punch`]), and says which can.
    /// Whose mappings were not as they are known to be is told. [`Commons::end_leaving`] is to follow, whatever became of them.
    ///
    /// In this order: none of them can be written to any more, which who is about to write waits for; the kernel has no reference
    /// by which it would, be it for a device or for a call that is under way; they are read; they are taken out, for all who have
    /// them mapped; and who waits tries again, and asks for what is missing.
    pub fn begin_leaving(&mut self, home: Span, pages: &mut [&mut Page]) -> (Vec<Taken>, Option<TargetId>) {
        let mut taken = vec![Taken::Untried; pages.len()];
        self.leaving.push(home);
        let (is_protected, odd) = self.protect(home);
        if is_protected {
            self.examine(home, &mut taken);
            self.read(home, pages, &mut taken);
        }
        (taken, odd)
    }

    /// What is still there of `home`, or of a part of it, can be written to again.
    pub fn end_leaving(&mut self, home: Span) {
        self.leaving = self.leaving.iter().flat_map(|leaving| leaving.without([home].into_iter())).collect();
        for (view, part) in self.shown(home) {
            // Where mappings are changing, who waits is heard of and told then.
            let _ = view.uffd.protect(part, false);
        }
    }

    /// Nobody may have or write to these pages until [`Commons::end_leaving`]: they may be taken out yet.
    pub fn hold(&mut self, homes: impl Iterator<Item = Span>) {
        self.leaving.extend(homes);
        self.unprotected = self.views.clone();
        self.protect_late();
    }

    /// Protects what is on its way out in views that came since, as soon as mappings are at rest there.
    pub fn protect_late(&mut self) {
        let is_changing = |error: io::Error| error.raw_os_error() == Some(libc::EAGAIN);
        let mut late = std::mem::take(&mut self.unprotected);
        late.retain(|view| {
            let mut parts = self.leaving.iter().filter_map(|leaving| view.part(*leaving));
            parts.any(|part| view.uffd.protect(part, true).is_err_and(is_changing))
        });
        self.unprotected = late;
    }

    /// Whether the page at `address` of home is being taken out just now.
    pub fn is_leaving(&self, address: Address) -> bool {
        self.leaving.iter().any(|leaving| leaving.start <= address && address < leaving.end)
    }

    /// Whether no page of `home` can be written to any more; and who has not mapped what it was known to have.
    fn protect(&mut self, home: Span) -> (bool, Option<TargetId>) {
        for (view, part) in self.shown(home) {
            match view.uffd.protect(part, true).map_err(|error| error.raw_os_error()) {
                // The last has ended.
                Ok(()) | Err(Some(libc::ESRCH)) => {}
                // A change is still to be heard of.
                Err(Some(libc::EAGAIN)) => return (false, None),
                Err(_) => return (false, Some(view.target)),
            }
        }
        (true, None)
    }

    /// Marks what may leave.
    fn examine(&mut self, home: Span, taken: &mut [Taken]) {
        let at = home.start.pages_since(self.home.span().start);
        let span = Span::of_pages(self.probe.span().start.plus_pages(at), home.pages());
        if self.probe.populate(span).is_err() {
            return;
        }
        self.eyes.look(self.pages, at, span, taken);
    }

    fn read(&self, home: Span, pages: &mut [&mut Page], taken: &mut [Taken]) {
        let offset = self.backing().offset(home);
        for (nth, (page, taken)) in pages.iter_mut().zip(taken).enumerate() {
            let at = offset + nth as u64 * PAGE_BYTES_U64;
            if *taken == Taken::Out && self.file.read_exact_at(&mut page[..], at).is_err() {
                *taken = Taken::Stays;
            }
        }
    }
}

/// The file of a commons, for calls that take its lock: where somebody may have a descriptor of it they can be held up.
#[derive(Clone)]
pub struct Backing {
    file: Arc<File>,
    home: Address,
    /// Somebody may have a descriptor of it.
    pub may_be_open: bool,
}

impl Backing {
    /// Where `home` is in it.
    fn offset(&self, home: Span) -> u64 {
        home.start.0 - self.home.0
    }

    /// Takes the pages of `home` out; whether that could be done.
    pub fn punch(&self, home: Span) -> bool {
        punch(&self.file, self.offset(home), home.pages() * PAGE_BYTES_U64).is_ok()
    }

    /// What of `home` is in the file.
    pub fn there(&self, home: Span) -> Vec<Span> {
        let place = |offset: u64| Address(self.home.0 + offset);
        // Where a hole begins the kernel finds by going through all that is before it, and that may be the rest of the file.
        let next = if home.pages() <= FEW_PAGES { next_page_of_data } else { next_data };
        let (mut there, mut from) = (Vec::new(), self.offset(home));
        while let Some((start, end)) = next(&self.file, from).filter(|(start, _)| place(*start) < home.end) {
            from = end;
            let end = place(end.next_multiple_of(PAGE_BYTES_U64));
            there.extend(Span { start: place(start).page(), end }.intersect(home));
        }
        there
    }
}

#[cfg(test)]
mod tests {
    use crate::skipped::skipped;
    use spillway_core::PAGE_BYTES;

    use super::*;
    use crate::sys::pagemap::settle_pages;
    use crate::sys::test::pipe_of_page;

    const FIRST: TargetId = TargetId(3);
    const SECOND: TargetId = TargetId(5);

    /// A file of which each page is full of its number, a commons of it, and a mapping of it that plays a target's.
    fn scene(pages: u8) -> Option<(Arc<File>, Commons, Window)> {
        if let Err(error) = usable() {
            skipped(error);
            return None;
        }
        let fd = rustix::fs::memfd_create(c"commons", rustix::fs::MemfdFlags::CLOEXEC).expect("memory");
        let file = Arc::new(File::from(fd));
        for page in 0..pages {
            file.write_all_at(&[page + 1; PAGE_BYTES], u64::from(page) * PAGE_BYTES_U64).expect("memory");
        }
        let id = FileId { device: (0, 1), inode: 7 };
        let (commons, uffd) = Commons::of(id, Arc::clone(&file), pages.into(), true).expect("it is usable");
        // It is home that pages are installed in by it; here none are.
        drop(uffd);
        let theirs = Window::of(&file, pages.into()).expect("mapped");
        Some((file, commons, theirs))
    }

    fn take_out(commons: &mut Commons, home: Span, pages: &mut [&mut Page]) -> (Vec<Taken>, Option<TargetId>) {
        let (taken, odd) = commons.begin_leaving(home, pages);
        assert!(commons.is_leaving(home.start) && !commons.is_leaving(home.end));
        for (nth, _) in taken.iter().enumerate().filter(|(_, taken)| **taken == Taken::Out) {
            assert!(commons.backing().punch(Span::of_pages(home.start.plus_pages(nth as u64), 1)));
        }
        commons.end_leaving(home);
        assert!(!commons.is_leaving(home.start));
        (taken, odd)
    }

    fn view(target: TargetId, uffd: &Uffd, theirs: &Window, commons: &Commons) -> View {
        View { target, uffd: uffd.clone(), span: theirs.span(), home: commons.span().start }
    }

    #[test]
    fn pages_leave_that_nobody_uses() {
        let Some((file, mut commons, theirs)) = scene(6) else { return };
        theirs.populate(theirs.span()).expect("they are there");
        let uffd = new_of_our_own().expect("it is usable");
        uffd.register_shared(theirs.span()).expect("shared memory");
        commons.add_view(view(FIRST, &uffd, &theirs, &commons));
        let (_pipe, _writer) = pipe_of_page(theirs.span().start.plus_pages(2)).expect("a pipe");

        let mut memory = [[0; PAGE_BYTES]; 4];
        let mut pages: Vec<&mut Page> = memory.iter_mut().collect();
        // A CPU that has just written pages holds them for a while.
        settle_pages().expect("it is usable");
        let home = Span::of_pages(commons.span().start.plus_pages(1), 4);
        let taken = take_out(&mut commons, home, &mut pages);
        assert_eq!(taken, (vec![Taken::Out, Taken::Stays, Taken::Out, Taken::Out], None));
        assert_eq!([0, 2, 3].map(|nth| memory[nth][PAGE_BYTES - 1]), [2, 4, 5]);
        assert_eq!([next_data(&file, 0), next_data(&file, 8192)], [Some((0, 4096)), Some((8192, 12288))]);
        assert_eq!(next_data(&file, 12288), Some((5 * 4096, 6 * 4096)));
    }

    #[test]
    fn nothing_leaves_that_somebody_has_mapped_otherwise() {
        let Some((file, mut commons, theirs)) = scene(2) else { return };
        let uffd = new_of_our_own().expect("it is usable");
        uffd.register_shared(theirs.span()).expect("shared memory");
        let odd = Window::of(&file, 2).expect("mapped");
        commons.add_view(view(FIRST, &uffd, &theirs, &commons));
        commons.add_view(view(SECOND, &uffd, &odd, &commons));
        let mut memory = [[0; PAGE_BYTES]; 2];
        let mut pages: Vec<&mut Page> = memory.iter_mut().collect();
        settle_pages().expect("it is usable");
        let home = commons.span();
        let taken = take_out(&mut commons, home, &mut pages);
        assert_eq!(taken, (vec![Taken::Untried; 2], Some(SECOND)));
        assert_eq!(next_data(&file, 0), Some((0, 2 * 4096)));
    }

    #[test]
    fn a_view_shows_what_it_shows() {
        let Some((_file, mut commons, theirs)) = scene(8) else { return };
        let uffd = new_of_our_own().expect("it is usable");
        let (home, there) = (commons.span().start, theirs.span().start);
        let at = |page| there.plus_pages(page);
        commons.add_view(view(FIRST, &uffd, &theirs, &commons));
        assert_eq!(commons.seen_at(FIRST, at(5).plus_bytes(17)), Some(home.plus_pages(5)));
        assert_eq!((commons.seen_at(FIRST, at(8)), commons.seen_at(SECOND, at(5))), (None, None));
        // What is unmapped in its middle leaves two.
        commons.forget_views(FIRST, Span::of_pages(at(3), 2));
        let seen =
            |commons: &Commons| (0..8).map(|page| commons.seen_at(FIRST, at(page)).is_some()).collect::<Vec<_>>();
        assert_eq!(seen(&commons), [true, true, true, false, false, true, true, true]);
        let parts: Vec<Span> = commons.shown(Span::of_pages(home.plus_pages(2), 4)).map(|(_, part)| part).collect();
        assert_eq!(parts, [Span::of_pages(at(2), 1), Span::of_pages(at(5), 1)]);
        // And one that has moved shows the same elsewhere.
        let moved = commons.views[1].clone().moved(at(5), Address(1 << 30));
        assert_eq!((moved.span, moved.home), (Span::of_pages(Address(1 << 30), 3), home.plus_pages(5)));
        commons.add_view(View { target: SECOND, ..moved });
        commons.forget(FIRST);
        assert_eq!((commons.is_seen_by(FIRST), commons.is_seen_by(SECOND)), (false, true));
    }
}

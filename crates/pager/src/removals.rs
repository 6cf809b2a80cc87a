//! Removals that were announced and may not have happened yet.
//!
//! The kernel tells of `madvise(MADV_DONTNEED)` before it zaps the pages, and nobody when it has. A page captured in
//! between would keep bytes that the target has given up. So pages that were resident at the announcement are not
//! captured until a scan sees them gone, or until no thread that has this memory can be inside that `madvise` any more: what
//! is then still there was spared (`MADV_FREE` leaves pages in place).

use std::sync::Arc;
use std::time::{Duration, Instant};

use spillway_core::{Span, TargetId};

use crate::driver::Command;
use crate::outside::Ticks;
use crate::sys::pagemap::Pagemap;

/// The first scan comes so soon, each further one twice as late as the one before.
const FIRST_SCAN: Duration = Duration::from_millis(1);
/// What is still resident after this was spared, if every thread was seen outside of the kernel's removal since.
const SPARED_AFTER: Duration = Duration::from_millis(500);
/// The same of memory that others share, where messages wait for it: after it every thread is asked.
const SHARED_SPARED_AFTER: Duration = Duration::from_millis(2);
/// When it is looked up who may be at a removal of a target's own memory. Most are over by then, and one look, which is at all processes,
/// does for all that were announced before.
const LOOKED_UP_AFTER: Duration = Duration::from_millis(100);
/// Removals remembered; more of a target are merged into one that covers them all, unless it is being waited for already: were that begun
/// anew with each that comes, none would ever be over.
const REMOVALS_MAX: usize = 512;
/// Beyond this, also then.
const REMOVALS_MOST: usize = 4 * REMOVALS_MAX;

/// Who is at a removal.
pub enum By {
    /// The target, of memory of its own: a thread of any process that has its address space (`CLONE_VM`).
    Itself,
    /// Of memory that others share: these processes, each named by any of its threads.
    These(Vec<i32>),
    /// Of such memory, whoever has it mapped.
    Anyone,
}

impl By {
    /// Of memory that others share that a page is not populated in a target says nothing.
    fn is_shared(&self) -> bool {
        !matches!(self, By::Itself)
    }

    /// Those at either.
    fn join(&mut self, other: Self) {
        match (&mut *self, other) {
            (By::These(these), By::These(others)) => these.extend(others),
            (_, other @ By::Anyone) => *self = other,
            (By::Itself | By::These(_) | By::Anyone, _) => {}
        }
    }
}

struct Removal {
    target: TargetId,
    /// Its number, or the youngest of those it stands for.
    number: u64,
    span: Span,
    announced: Instant,
    next_scan: Instant,
    wait: Duration,
    by: By,
    /// CPU ticks of threads when first looked at after the announcement.
    threads: Option<Arc<[Ticks]>>,
}

/// All removals under way.
#[derive(Default)]
pub struct Removals(Vec<Removal>);

impl Removals {
    /// A removal was announced.
    pub fn announced(&mut self, target: TargetId, span: Span, number: u64, by: By) {
        let now = Instant::now();
        let (is_full, is_too_full) = (self.0.len() >= REMOVALS_MAX, self.0.len() >= REMOVALS_MOST);
        let is_like_it = |it: &&mut Removal| it.target == target && it.by.is_shared() == by.is_shared();
        if is_full
            && let Some(last) = self.0.iter_mut().rev().find(is_like_it)
            && (last.threads.is_none() || is_too_full)
        {
            last.by.join(by);
            last.span = Span { start: last.span.start.min(span.start), end: last.span.end.max(span.end) };
            (last.number, last.announced, last.threads) = (number, now, None);
            return;
        }
        let next_scan = now + FIRST_SCAN;
        let wait = FIRST_SCAN;
        self.0.push(Removal { target, number, span, announced: now, next_scan, wait, by, threads: None });
    }

    /// Whether any waits to be settled soon.
    pub fn are_waiting(&self) -> bool {
        self.0.iter().any(|removal| removal.wait < Duration::from_millis(16))
    }

    /// The target is gone.
    pub fn forget(&mut self, target: TargetId) {
        self.0.retain(|removal| removal.target != target);
    }

    /// Scans those that are due, and tells the fault thread what it found. `having`: who has the address space of a process, that among
    /// them; `sharers`: who has memory mapped that is shared. None where that cannot be told now.
    pub fn settle<'a>(
        &mut self,
        process_of: impl Fn(TargetId) -> Option<(i32, &'a Pagemap)>,
        having: impl Fn(i32) -> Option<Vec<i32>>,
        sharers: impl Fn() -> Option<Vec<i32>>,
        send: impl Fn(Command),
    ) {
        let now = Instant::now();
        let mut looked_up: Vec<(TargetId, Arc<[Ticks]>)> = Vec::new();
        self.0.retain_mut(|removal| {
            if now < removal.next_scan {
                return true;
            }
            let &mut Removal { target, number, span, .. } = removal;
            let is_shared = removal.by.is_shared();
            let spared_after = if is_shared { SHARED_SPARED_AFTER } else { SPARED_AFTER };
            removal.wait = (removal.wait * 2).min(spared_after);
            removal.next_scan = now + removal.wait;
            let (mut own, mut all_gone) = (None, false);
            if !is_shared {
                // That of a forked child may not be known yet.
                let Some((pid, pagemap)) = process_of(target) else { return true };
                let Ok(gone) = gone(pagemap, span) else { return false };
                (own, all_gone) = (Some(pid), gone.len() == 1 && gone[0] == span);
                send(Command::RemovalSeen { target, number, gone });
            }
            let before = removal.threads.as_ref().filter(|_| now >= removal.announced + spared_after);
            if all_gone || before.is_some_and(|before| before.iter().all(Ticks::is_outside)) {
                send(Command::RemovalOver { target, number, span, is_shared });
                return false;
            }
            if removal.threads.is_some() || (!is_shared && now < removal.announced + LOOKED_UP_AFTER) {
                return true;
            }
            let known = looked_up.iter().find(|(whose, _)| *whose == target && !is_shared);
            removal.threads = known.map(|(_, threads)| Arc::clone(threads)).or_else(|| {
                let pids = match &removal.by {
                    By::Itself => own.and_then(&having),
                    By::These(these) => Some(these.clone()),
                    By::Anyone => sharers(),
                };
                pids.and_then(|pids| Ticks::of_all(&pids))
            });
            looked_up.extend(removal.threads.clone().filter(|_| !is_shared).map(|threads| (target, threads)));
            true
        });
        for (target, threads) in looked_up {
            let of_it = |it: &&mut Removal| it.target == target && !it.by.is_shared() && it.threads.is_none();
            self.0.iter_mut().filter(of_it).for_each(|it| it.threads = Some(Arc::clone(&threads)));
        }
    }
}

/// The parts of `span` that are not populated.
fn gone(pagemap: &Pagemap, span: Span) -> std::io::Result<Vec<Span>> {
    let mut populated = Vec::new();
    pagemap.populated(span, |there| populated.push(there))?;
    Ok(span.without(populated.into_iter()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outside::tests::until_asleep;
    use spillway_core::{Address, PAGE_BYTES};

    /// One of a forked child's that is told before its process is known is as old as can be by the time that is: its threads are
    /// looked at then, and were not before.
    #[test]
    fn a_removal_that_waited_for_its_process_is_over_only_by_evidence() {
        let memory = vec![1_u8; 8 * PAGE_BYTES];
        let first = Address(memory.as_ptr().addr() as u64).page().plus_pages(1);
        let (target, span) = (TargetId(3), Span::of_pages(first, 4));
        let pid = std::process::id().cast_signed();
        let pagemap = Pagemap::open(pid).expect("our own");
        let mut removals = Removals::default();
        removals.announced(target, span, 1, By::Itself);
        removals.0[0].announced -= 2 * SPARED_AFTER;
        let told = std::cell::RefCell::new(Vec::new());
        let mut settle = |known: bool| {
            removals.0.iter_mut().for_each(|removal| removal.next_scan = Instant::now());
            let process_of = |_| known.then_some((pid, &pagemap));
            removals.settle(process_of, |pid| Some(vec![pid]), || None, |command| told.borrow_mut().push(command));
        };
        settle(false);
        assert!(told.borrow().is_empty());
        settle(true);
        let is_seen = |command: &Command| matches!(command, Command::RemovalSeen { gone, .. } if gone.is_empty());
        assert!(told.borrow().len() == 1 && is_seen(&told.borrow()[0]), "nothing is gone, and nothing is over");
        assert!(memory[PAGE_BYTES] == 1);
    }

    /// Who had the memory of a target (`CLONE_VM`), and gave it up, was not looked at: the target slept, and what its removal had not reached
    /// left, came back, and was not zeros.
    #[test]
    fn a_removal_is_not_over_while_another_process_that_has_the_memory_may_be_at_it() {
        let memory = vec![1_u8; 8 * PAGE_BYTES];
        let first = Address(memory.as_ptr().addr() as u64).page().plus_pages(1);
        let span = Span::of_pages(first, 4);
        let own = std::process::id().cast_signed();
        let pagemap = Pagemap::open(own).expect("our own");
        let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("sleep");
        let asleep = child.id().cast_signed();
        until_asleep(asleep);
        let looks = std::cell::Cell::new(0);
        let over = |having: Option<Vec<i32>>| {
            let mut removals = Removals::default();
            for number in 1..=3 {
                removals.announced(TargetId(3), span, number, By::Itself);
            }
            let over = std::cell::Cell::new(0);
            let count = |command| over.set(over.get() + u32::from(matches!(command, Command::RemovalOver { .. })));
            for age in [Duration::ZERO, 2 * LOOKED_UP_AFTER, 2 * SPARED_AFTER] {
                removals.0.iter_mut().for_each(|it| {
                    (it.announced, it.next_scan) = (Instant::now() - age, Instant::now());
                });
                let having = |_| {
                    looks.set(looks.get() + 1);
                    having.clone()
                };
                removals.settle(|_| Some((asleep, &pagemap)), having, || None, count);
            }
            over.get()
        };
        assert_eq!((over(Some(vec![asleep])), looks.take()), (3, 1), "one look does for all");
        assert_eq!(over(Some(vec![asleep, own])), 0, "this thread runs");
        assert_eq!(over(None), 0, "it cannot be told");
        child.kill().and_then(|()| child.wait()).expect("it ends");
        assert!(memory[PAGE_BYTES] == 1);
    }

    /// With the list full, each that came began the waiting anew for what it was merged with: under load none was over any more.
    #[test]
    fn who_removes_all_the_time_does_not_keep_what_it_has_removed_from_being_over() {
        let (span, running) = (Span { start: Address(0), end: Address(4096) }, std::process::id().cast_signed());
        let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("sleep");
        let asleep = child.id().cast_signed();
        until_asleep(asleep);
        let (mut removals, over) = (Removals::default(), std::cell::Cell::new(0));
        for number in 0..REMOVALS_MAX as u64 {
            removals.announced(TargetId(1), span, number, By::These(vec![running]));
        }
        for number in 0..20 {
            removals.announced(TargetId(2), span, number, By::These(vec![asleep]));
            let soon =
                |it: &mut Removal| (it.announced, it.next_scan) = (it.announced - 2 * SPARED_AFTER, Instant::now());
            removals.0.iter_mut().filter(|it| it.target == TargetId(2)).for_each(soon);
            let count = |command| over.set(over.get() + u32::from(matches!(command, Command::RemovalOver { .. })));
            removals.settle(|_| None, |_| None, || None, count);
        }
        child.kill().and_then(|()| child.wait()).expect("it ends");
        assert!(over.get() >= 18, "{}", over.get());
        assert!(removals.0.len() <= REMOVALS_MAX + 2);
    }

    /// Memory that others share is given up by one of its threads, or by those of whoever has it mapped: while they run it is not over, nor
    /// where it cannot be told who they are.
    #[test]
    fn a_removal_of_shared_memory_is_over_when_all_who_may_be_at_it_are_seen_elsewhere() {
        let span = Span { start: Address(0), end: Address(4096) };
        let own = std::process::id().cast_signed();
        let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("sleep");
        let asleep = child.id().cast_signed();
        until_asleep(asleep);
        let is_over = |by: By, sharers: Option<Vec<i32>>| {
            let mut removals = Removals::default();
            removals.announced(TargetId(3), span, 1, by);
            removals.0[0].announced -= 2 * SPARED_AFTER;
            let told = std::cell::Cell::new(0);
            for _ in 0..2 {
                removals.0.iter_mut().for_each(|removal| removal.next_scan = Instant::now());
                removals.settle(|_| None, |_| None, || sharers.clone(), |_| told.set(told.get() + 1));
            }
            told.get() == 1
        };
        assert!(!is_over(By::These(vec![own]), None), "this thread runs");
        assert!(is_over(By::These(vec![asleep]), None));
        assert!(!is_over(By::These(vec![asleep, own]), None));
        assert!(!is_over(By::Anyone, None), "it cannot be told");
        assert!(!is_over(By::Anyone, Some(vec![asleep, own])));
        assert!(is_over(By::Anyone, Some(vec![asleep])));
        assert!(is_over(By::Anyone, Some(Vec::new())), "nobody has it");
        child.kill().and_then(|()| child.wait()).expect("it ends");
        assert!(is_over(By::These(vec![asleep]), None), "it has ended");
    }
}

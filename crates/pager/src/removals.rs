//! Removals that were announced and may not have happened yet.
//!
//! The kernel tells of `madvise(MADV_DONTNEED)` before it zaps the pages, and nobody when it has. A page captured in
//! between would keep bytes that the target has given up. So pages that were resident at the announcement are not
//! captured until a scan sees them gone, or until no thread of the target can be inside that `madvise` any more: what
//! is then still there was spared (`MADV_FREE` leaves pages in place).

use std::time::{Duration, Instant};

use spillway_core::{Span, TargetId};

use crate::driver::Command;
use crate::procfs;
use crate::sys::pagemap::Pagemap;

/// The first scan comes so soon, each further one twice as late as the one before.
const FIRST_SCAN: Duration = Duration::from_millis(1);
/// What is still resident after this was spared, if every thread was seen outside of the kernel's removal since.
const SPARED_AFTER: Duration = Duration::from_millis(500);
/// The same of memory that others share, where messages wait for it: after it every thread is asked.
const SHARED_SPARED_AFTER: Duration = Duration::from_millis(2);
/// CPU time, in clock ticks, after which a running thread has certainly left a removal of a few gigabytes.
const TICKS_OUTSIDE: u64 = 3;
/// Removals remembered for one target; more are merged into one that covers them all.
const REMOVALS_MAX: usize = 512;

struct Removal {
    target: TargetId,
    /// Its number, or the youngest of those it stands for.
    number: u64,
    span: Span,
    announced: Instant,
    next_scan: Instant,
    wait: Duration,
    /// Of memory that others share: that a page is not populated here says nothing of it.
    is_shared: bool,
    /// CPU ticks of the target's threads when first looked at after the announcement.
    threads: Option<Vec<(i32, u64)>>,
}

/// All removals under way.
#[derive(Default)]
pub struct Removals(Vec<Removal>);

impl Removals {
    /// A removal was announced.
    pub fn announced(&mut self, target: TargetId, span: Span, number: u64, is_shared: bool) {
        let now = Instant::now();
        let alike = |removal: &&mut Removal| (removal.target, removal.is_shared) == (target, is_shared);
        if self.0.len() >= REMOVALS_MAX
            && let Some(last) = self.0.iter_mut().rev().find(alike)
        {
            last.span = Span { start: last.span.start.min(span.start), end: last.span.end.max(span.end) };
            (last.number, last.announced, last.threads) = (number, now, None);
            return;
        }
        let next_scan = now + FIRST_SCAN;
        let wait = FIRST_SCAN;
        self.0.push(Removal { target, number, span, announced: now, next_scan, wait, is_shared, threads: None });
    }

    /// Whether any waits to be settled soon.
    pub fn are_waiting(&self) -> bool {
        self.0.iter().any(|removal| removal.wait < Duration::from_millis(16))
    }

    /// The target is gone.
    pub fn forget(&mut self, target: TargetId) {
        self.0.retain(|removal| removal.target != target);
    }

    /// Scans those that are due, and tells the fault thread what it found.
    pub fn settle<'a>(&mut self, process_of: impl Fn(TargetId) -> Option<(i32, &'a Pagemap)>, send: impl Fn(Command)) {
        let now = Instant::now();
        self.0.retain_mut(|removal| {
            if now < removal.next_scan {
                return true;
            }
            let Some((pid, pagemap)) = process_of(removal.target) else {
                // A forked child whose process is not known yet.
                removal.wait = (removal.wait * 2).min(SPARED_AFTER);
                removal.next_scan = now + removal.wait;
                return true;
            };
            let Ok(gone) = gone(pagemap, removal.span) else { return false };
            let &mut Removal { target, number, span, .. } = removal;
            let all_gone = !removal.is_shared && gone.len() == 1 && gone[0] == span;
            if !removal.is_shared {
                send(Command::RemovalSeen { target, number, gone });
            }
            let spared_after = if removal.is_shared { SHARED_SPARED_AFTER } else { SPARED_AFTER };
            let spared = now >= removal.announced + spared_after;
            let before = removal.threads.as_deref().filter(|_| spared);
            if all_gone || before.is_some_and(|before| all_outside(pid, before)) {
                send(Command::RemovalOver { target, number, span, is_shared: removal.is_shared });
                return false;
            }
            removal.threads.get_or_insert_with(|| ticks(pid));
            removal.wait = (removal.wait * 2).min(spared_after);
            removal.next_scan = now + removal.wait;
            true
        });
    }
}

/// The parts of `span` that are not populated.
fn gone(pagemap: &Pagemap, span: Span) -> std::io::Result<Vec<Span>> {
    let mut populated = Vec::new();
    pagemap.populated(span, |there| populated.push(there))?;
    Ok(span.without(populated.into_iter()))
}

fn ticks(pid: i32) -> Vec<(i32, u64)> {
    let threads = procfs::threads(pid).unwrap_or_default();
    threads.into_iter().filter_map(|thread| Some((thread, procfs::thread_stat(pid, thread).ok()?.cpu_ticks))).collect()
}

/// Whether each thread that existed then is asleep now, has ended, or has run for long since.
fn all_outside(pid: i32, before: &[(i32, u64)]) -> bool {
    before.iter().all(|&(thread, ticks)| match procfs::thread_stat(pid, thread) {
        Ok(stat) => !matches!(stat.state, b'R' | b'D') || stat.cpu_ticks >= ticks + TICKS_OUTSIDE,
        Err(_) => true,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
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
        removals.announced(target, span, 1, false);
        removals.0[0].announced -= 2 * SPARED_AFTER;
        let told = std::cell::RefCell::new(Vec::new());
        let mut settle = |known: bool| {
            removals.0.iter_mut().for_each(|removal| removal.next_scan = Instant::now());
            removals.settle(|_| known.then_some((pid, &pagemap)), |command| told.borrow_mut().push(command));
        };
        settle(false);
        assert!(told.borrow().is_empty());
        settle(true);
        let is_seen = |command: &Command| matches!(command, Command::RemovalSeen { gone, .. } if gone.is_empty());
        assert!(told.borrow().len() == 1 && is_seen(&told.borrow()[0]), "nothing is gone, and nothing is over");
        assert!(memory[PAGE_BYTES] == 1);
    }
}

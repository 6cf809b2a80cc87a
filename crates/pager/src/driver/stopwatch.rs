//! How long faults wait: from when this thread was there to serve them to when their pages were in the target.
//!
//! In the idle class ([`crate::placement`]) the thread that is woken takes the CPU before the system call that woke it has
//! returned, and gives it back with its next fault. What lies between is the program's own time, not a fault's; and the next
//! fault waits from the moment at which the CPU came back, whatever is finished before it is read.

use spillway_core::streams::BLOCK_PAGES_MAX;

/// Sizes of installations that are told apart: none to a block.
const SIZES: usize = 17;
const _: () = assert!(SIZES as u64 == BLOCK_PAGES_MAX + 1);
/// An installation may take so much longer than the quickest of its size before it counts as interrupted.
const SLOWER: u64 = 2;
const SLOWER_NS: u64 = 1_000;
/// By so little of itself the quickest is forgotten with each that was slower, so that it follows the machine.
const FORGETS: u64 = 64;

/// All times are monotonic, in nanoseconds.
pub(super) struct Stopwatch {
    /// What an installation takes at least, by pages; zero before the first.
    quickest_ns: [u64; SIZES],
    /// When the last one began, and of how many pages.
    began_ns: u64,
    pages: usize,
    /// When the CPU came back, where that was between two faults.
    back_ns: Option<u64>,
}

impl Stopwatch {
    pub(super) fn new() -> Self {
        Self { quickest_ns: [0; SIZES], began_ns: 0, pages: 0, back_ns: None }
    }

    /// No fault waits: the next is not what gave the CPU back.
    pub(super) fn finds_none(&mut self) {
        self.back_ns = None;
    }

    /// Faults are read: since when they have been waiting.
    pub(super) fn reads(&self, now_ns: u64) -> u64 {
        self.back_ns.unwrap_or(now_ns)
    }

    /// An installation of so many pages begins.
    pub(super) fn installs(&mut self, now_ns: u64, pages: usize) {
        (self.began_ns, self.pages) = (now_ns, pages.min(SIZES - 1));
    }

    /// It has returned, and has woken a thread that may have had this CPU meanwhile, if `displaces`; when it was over.
    pub(super) fn installed(&mut self, now_ns: u64, displaces: bool) -> u64 {
        self.back_ns = None;
        let took_ns = now_ns.saturating_sub(self.began_ns);
        let quickest_ns = &mut self.quickest_ns[self.pages];
        let known = *quickest_ns > 0;
        let undisturbed_ns = *quickest_ns;
        *quickest_ns = if known { took_ns.min(undisturbed_ns + undisturbed_ns.div_ceil(FORGETS)) } else { took_ns };
        if !displaces || !known || took_ns <= SLOWER * undisturbed_ns + SLOWER_NS {
            return now_ns;
        }
        self.back_ns = Some(now_ns);
        self.began_ns + undisturbed_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Installs one page; the time that a fault which was read at 0 is said to have taken.
    fn install(watch: &mut Stopwatch, at_ns: u64, took_ns: u64, displaces: bool) -> u64 {
        watch.installs(at_ns, 1);
        watch.installed(at_ns + took_ns, displaces)
    }

    #[test]
    fn the_programs_own_time_is_not_its_faults() {
        let mut watch = Stopwatch::new();
        assert_eq!(install(&mut watch, 10_000, 2_000, true), 12_000);
        // 400 us of the program lie in this one.
        assert_eq!(install(&mut watch, 100_000, 400_000, true), 102_000);
        // Its next fault waits while something else is finished.
        assert_eq!(watch.reads(540_000), 500_000);
        install(&mut watch, 550_000, 2_000, true);
        assert_eq!(watch.reads(600_000), 600_000, "only the next");
    }

    #[test]
    fn slow_installations_are_told_where_nobody_takes_the_cpu() {
        let mut watch = Stopwatch::new();
        install(&mut watch, 0, 2_000, false);
        assert_eq!(install(&mut watch, 10_000, 400_000, false), 410_000);
        assert_eq!(watch.reads(500_000), 500_000);
    }

    #[test]
    fn where_none_waited_a_fault_waits_from_when_it_is_read() {
        let mut watch = Stopwatch::new();
        install(&mut watch, 0, 2_000, true);
        install(&mut watch, 10_000, 400_000, true);
        watch.finds_none();
        assert_eq!(watch.reads(900_000), 900_000);
    }

    #[test]
    fn what_counts_as_quick_follows_the_machine() {
        let mut watch = Stopwatch::new();
        install(&mut watch, 0, 1_000, true);
        // Four times as slow from now on: at first that looks like the program's own time.
        assert_eq!(install(&mut watch, 10_000, 4_000, true), 11_000);
        for _ in 0..200 {
            install(&mut watch, 0, 4_000, true);
        }
        assert_eq!(install(&mut watch, 10_000, 4_000, true), 14_000);
    }
}

//! How long faults wait: from when this thread was there to serve them to when their pages were in the target.
//!
//! In the idle class ([`crate::placement`]) the thread that is woken takes the CPU before the system call that woke it has
//! returned, and gives it back with its next fault. What lies between is the program's own time, not a fault's; and the next
//! fault waits from the moment at which the CPU came back, whatever is finished before it is read. The price: what makes the
//! call itself slow cannot be told from the program there, and is not told.

use spillway_core::streams::BLOCK_PAGES_MAX;

/// Sizes of installations that are told apart: none to a block.
const SIZES: usize = 17;
const _: () = assert!(SIZES as u64 == BLOCK_PAGES_MAX + 1);
/// An installation may take so much longer than the quickest of its size before it counts as interrupted: twice is what caches cost,
/// and two switches of threads, which an interruption takes at least, are more than the rest.
const SLOWER: u64 = 2;
const SLOWER_NS: u64 = 1_000;
/// By so little of itself the quickest is forgotten with each that was slower, so that it follows a machine that is some times
/// slower than it was. What took longer than so many times was interrupted for sure, and says nothing of the machine.
const FORGETS: u64 = 64;
const SLOWEST: u64 = 8;

/// What is installed; each kind costs what it costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Copies,
    /// Of the kernel's page of zeros, or of what raises SIGBUS: nothing is copied.
    Marks,
}

/// An installation that has begun.
struct Begun {
    at_ns: u64,
    kind: Kind,
    pages: usize,
    /// So many pages as were wanted.
    whole: bool,
}

/// All times are monotonic, in nanoseconds.
pub(super) struct Stopwatch {
    /// What an installation takes at least, by kind and pages; zero before the first.
    quickest_ns: [[u64; SIZES]; 2],
    last: Option<Begun>,
    /// Whoever is woken takes this CPU.
    displaced: bool,
    /// When the CPU came back, where that was between two faults.
    back_ns: Option<u64>,
}

impl Stopwatch {
    pub(super) fn new() -> Self {
        Self { quickest_ns: [[0; SIZES]; 2], last: None, displaced: false, back_ns: None }
    }

    /// No fault waits: the next is not what gave the CPU back.
    pub(super) fn finds_none(&mut self) {
        self.back_ns = None;
    }

    /// Faults are read, by a thread that is `displaced` by whom it wakes; since when they have been waiting.
    pub(super) fn reads(&mut self, now_ns: impl FnOnce() -> u64, displaced: bool) -> u64 {
        self.displaced = displaced;
        self.back_ns.take().unwrap_or_else(now_ns)
    }

    /// An installation begins.
    pub(super) fn installs(&mut self, now_ns: u64, kind: Kind) {
        self.last = Some(Begun { at_ns: now_ns, kind, pages: 0, whole: false });
    }

    /// It did `done` pages of so many.
    pub(super) fn did(&mut self, done: u64, of: usize) {
        let pages = usize::try_from(done).map_or(SIZES - 1, |done| done.min(SIZES - 1));
        self.last.iter_mut().for_each(|last| (last.pages, last.whole) = (pages, pages == of));
    }

    /// A fault is served, by the last installation if there was one; when that was over.
    pub(super) fn served(&mut self, now_ns: u64) -> u64 {
        let Some(Begun { at_ns, kind, pages, whole }) = self.last.take() else { return now_ns };
        let took_ns = now_ns.saturating_sub(at_ns);
        let alone_ns = self.quickest_ns[kind as usize][1];
        let quickest_ns = &mut self.quickest_ns[kind as usize][pages];
        // Before the first of a size, so many of one page take longer.
        let undisturbed_ns = if *quickest_ns > 0 { *quickest_ns } else { alone_ns * pages as u64 };
        let interrupted = self.displaced && undisturbed_ns > 0 && took_ns > SLOWER * undisturbed_ns + SLOWER_NS;
        if whole && undisturbed_ns > 0 && took_ns <= SLOWEST * undisturbed_ns {
            *quickest_ns = took_ns.min(undisturbed_ns + undisturbed_ns.div_ceil(FORGETS));
        } else if whole && undisturbed_ns == 0 && !self.displaced {
            *quickest_ns = took_ns;
        }
        if !interrupted {
            return now_ns;
        }
        self.back_ns = Some(now_ns);
        at_ns + undisturbed_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Installs one page; when that is said to be over.
    fn install(watch: &mut Stopwatch, at_ns: u64, took_ns: u64) -> u64 {
        watch.installs(at_ns, Kind::Copies);
        watch.did(1, 1);
        watch.served(at_ns + took_ns)
    }

    /// One that knows what a page takes, two microseconds.
    fn used(displaced: bool) -> Stopwatch {
        let mut watch = Stopwatch::new();
        watch.reads(|| 0, false);
        assert_eq!(install(&mut watch, 0, 2_000), 2_000);
        watch.reads(|| 0, displaced);
        watch
    }

    #[test]
    fn the_programs_own_time_is_not_its_faults() {
        let mut watch = used(true);
        // 400 us of the program lie in this one.
        assert_eq!(install(&mut watch, 100_000, 400_000), 102_000);
        // Its next fault waits while something else is finished.
        assert_eq!(watch.reads(|| 540_000, true), 500_000);
        assert_eq!(watch.reads(|| 600_000, true), 600_000, "only the next");
    }

    #[test]
    fn it_never_becomes_so_however_often() {
        let mut watch = used(true);
        for nth in 1..10_000 {
            let at_ns = nth * 3_000_000;
            assert_eq!(install(&mut watch, at_ns, 2_000_000), at_ns + 2_000);
        }
        // Nor where no page of the kind had been installed before.
        watch.installs(0, Kind::Copies);
        watch.did(16, 16);
        assert_eq!(watch.served(2_000_000), 32_000);
    }

    #[test]
    fn slow_installations_are_told_where_nobody_takes_the_cpu() {
        let mut watch = used(false);
        assert_eq!(install(&mut watch, 10_000, 400_000), 410_000);
        assert_eq!(watch.reads(|| 500_000, false), 500_000);
    }

    #[test]
    fn where_none_waited_a_fault_waits_from_when_it_is_read() {
        let mut watch = used(true);
        install(&mut watch, 10_000, 400_000);
        watch.finds_none();
        assert_eq!(watch.reads(|| 900_000, true), 900_000);
    }

    #[test]
    fn what_is_served_without_an_installation_is_served_now() {
        let mut watch = used(true);
        assert_eq!(watch.served(5_000_000), 5_000_000);
        assert_eq!(watch.reads(|| 6_000_000, true), 6_000_000);
    }

    #[test]
    fn what_installs_nothing_or_less_says_nothing_of_copies() {
        let mut watch = used(true);
        watch.installs(0, Kind::Marks);
        watch.did(16, 16);
        watch.served(100);
        watch.installs(0, Kind::Copies);
        watch.did(1, 16);
        watch.served(100);
        assert_eq!(install(&mut watch, 10_000, 2_500), 12_500);
    }

    #[test]
    fn what_counts_as_quick_follows_the_machine() {
        let mut watch = used(true);
        // Four times as slow from now on: at first that looks like the program's own time.
        assert_eq!(install(&mut watch, 10_000, 8_000), 12_000);
        for _ in 0..200 {
            install(&mut watch, 0, 8_000);
        }
        assert_eq!(install(&mut watch, 10_000, 8_000), 18_000);
    }
}

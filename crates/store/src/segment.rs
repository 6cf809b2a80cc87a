//! Memory for the arena, in segments that a background thread makes ready.
//!
//! Page-faulting 2 MiB takes longer than serving ten faults, so the pool's thread should never do it: [`Refill`] does,
//! elsewhere, and passes segments through a bounded queue. When the queue is empty the pool maps one itself and counts
//! that; its pages then fault one by one as they fill.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, TrySendError, sync_channel};
use std::sync::{Arc, OnceLock};
use std::thread::Thread;
use std::time::Duration;

use memmap2::{Advice, MmapMut};
use spillway_core::PAGE_BYTES;

use crate::sys::memory::{Lending, Memory, Parts};
use crate::vault::{Extent, Vault};

/// A segment: what is asked of and given back to the kernel. A huge page on x86-64.
pub(crate) const SEGMENT_BYTES: u32 = 2 << 20;
/// Segments kept ready. At 100,000 puts of 2 KiB a second, they last 40 ms.
const READY_MAX: usize = 4;
/// So few of them are left when more are asked for: one call for two.
const READY_FEW: u64 = 2;
/// How soon it is looked at the latest whether the pool is still there.
const REST: Duration = Duration::from_secs(1);
/// Segments on their way back: as many as freeing three million pages a second empties in 10 ms.
const RETURNED_MAX: usize = 32;

/// Memory for the arena, all zeros at first.
pub(crate) struct Segment {
    bytes: Memory,
    shared: Arc<Shared>,
}

impl Segment {
    /// As `advice` says, which the kernel may refuse: that only costs speed.
    fn map(shared: &Arc<Shared>, advice: Advice) -> io::Result<Self> {
        if let Some(vault) = &shared.vault {
            let extent = vault.take_segment().ok_or(io::ErrorKind::OutOfMemory)?;
            return Ok(Self::lasting(shared, extent));
        }
        let bytes = MmapMut::map_anon(SEGMENT_BYTES as usize)?;
        let _ = bytes.advise(advice);
        shared.mapped.fetch_add(1, Relaxed);
        Ok(Self { bytes: Memory::new(bytes), shared: Arc::clone(shared) })
    }

    fn map_prefaulted(shared: &Arc<Shared>) -> io::Result<Self> {
        // A huge page saves the pool most of its TLB misses.
        let mut segment = Self::map(shared, Advice::HugePage)?;
        // Written rather than populated by madvise(2), which holds the address space's lock and with it whatever maps
        // memory on the pool's thread.
        for page in segment.bytes_mut(0..SEGMENT_BYTES as usize).chunks_mut(PAGE_BYTES) {
            page[0] = 0;
        }
        Ok(segment)
    }

    /// For the pool's own thread: its pages are to fault one by one, not as a huge page that is cleared at once.
    fn map_inline(shared: &Arc<Shared>) -> io::Result<Self> {
        Self::map(shared, Advice::NoHugePage)
    }

    fn lasting(shared: &Arc<Shared>, extent: Extent) -> Self {
        shared.mapped.fetch_add(1, Relaxed);
        Self { bytes: Memory::lasting(extent), shared: Arc::clone(shared) }
    }

    /// Where it is in memory that outlives this process, if it is there.
    pub(crate) fn extent(&self) -> Option<&Extent> {
        self.bytes.extent()
    }

    /// Bytes of it.
    pub(crate) fn bytes(&self, range: Range<usize>) -> &[u8] {
        self.bytes.bytes(range)
    }

    /// Bytes of it that are not lent, to be written.
    pub(crate) fn bytes_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        self.bytes.bytes_mut(range)
    }

    /// Lends bytes of it.
    pub(crate) fn lend(&mut self, range: Range<usize>, parts: &mut Parts) -> Lending {
        self.bytes.lend(range, parts)
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        self.shared.mapped.fetch_sub(1, Relaxed);
    }
}

/// What both ends know. The counters guard nothing, hence relaxed.
struct Shared {
    /// Segments mapped now, wherever they are.
    mapped: AtomicU64,
    /// Segments in the ready queue.
    ready: AtomicU64,
    /// Segments that there may be.
    allowed: AtomicU64,
    /// Who makes segments ready.
    refill: OnceLock<Thread>,
    /// Where segments are to outlive this process.
    vault: Option<Vault>,
}

impl Shared {
    /// Has the other end look: a system call where it rests, nothing where it has been called already.
    fn call(&self) {
        self.refill.get().into_iter().for_each(Thread::unpark);
    }
}

/// The pool's end: takes segments and gives them back, and never waits.
pub(crate) struct Supply {
    ready: Receiver<Segment>,
    returned: SyncSender<Segment>,
    shared: Arc<Shared>,
    /// Segments that had to be mapped here because none was ready.
    pub(crate) inline_segments: u64,
}

impl Supply {
    /// Both ends.
    pub(crate) fn new(vault: Option<Vault>) -> (Self, Refill) {
        let (mapped, ready, allowed) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(u64::MAX));
        let shared = Arc::new(Shared { mapped, ready, allowed, refill: OnceLock::new(), vault });
        let (ready_in, ready) = sync_channel(READY_MAX);
        let (returned, returned_out) = sync_channel(RETURNED_MAX);
        let refill = Refill { ready: ready_in, returned: returned_out, shared: Arc::clone(&shared) };
        (Self { ready, returned, shared, inline_segments: 0 }, refill)
    }

    /// A segment that was found.
    pub(crate) fn found(&self, extent: Extent) -> Segment {
        Segment::lasting(&self.shared, extent)
    }

    /// Sets how many segments there may be.
    pub(crate) fn allow(&self, segments: u64) {
        if self.shared.allowed.swap(segments, Relaxed) < segments {
            self.shared.call();
        }
    }

    /// How many segments there may be.
    pub(crate) fn allowed(&self) -> u64 {
        self.shared.allowed.load(Relaxed)
    }

    /// A segment, ready or mapped now; `None` when the kernel gives none.
    pub(crate) fn take(&mut self) -> Option<Segment> {
        if let Ok(segment) = self.ready.try_recv() {
            if self.shared.ready.fetch_sub(1, Relaxed) <= READY_FEW + 1 {
                self.shared.call();
            }
            return Some(segment);
        }
        self.shared.call();
        let segment = Segment::map_inline(&self.shared).ok()?;
        self.inline_segments += 1;
        Some(segment)
    }

    /// Gives a segment back; gets it back itself while too many are on their way.
    pub(crate) fn give_back(&mut self, segment: Segment) -> Result<(), Segment> {
        match self.returned.try_send(segment) {
            Ok(()) => {
                self.shared.call();
                Ok(())
            }
            Err(TrySendError::Full(segment)) => Err(segment),
            // No one is there to unmap it: a stall is better than a leak.
            Err(TrySendError::Disconnected(segment)) => {
                drop(segment);
                Ok(())
            }
        }
    }

    /// Bytes mapped, wherever they are.
    pub(crate) fn mapped_bytes(&self) -> u64 {
        self.shared.mapped.load(Relaxed) * u64::from(SEGMENT_BYTES)
    }
}

/// Keeps a [`crate::Local`] in segments: a background thread runs it ([`Refill::run`]).
///
/// Clearing 2 MiB takes 100 us, so let that thread have a low priority: on a busy host it otherwise does so in the middle
/// of one put in a thousand. When it comes too late, puts only take a few microseconds longer.
pub struct Refill {
    ready: SyncSender<Segment>,
    returned: Receiver<Segment>,
    shared: Arc<Shared>,
}

impl Refill {
    /// Keeps the pool in segments for as long as it is there. Wake-ups cost programs that fault more than their CPU time, so there are
    /// none while nothing is to be done, but for one a second.
    pub fn run(mut self) {
        while self.top_up() {
            std::thread::park_timeout(REST);
        }
    }

    /// Unmaps segments that were given back and makes new ones ready. Returns whether the pool is still there: the
    /// thread may end when it is not.
    pub fn top_up(&mut self) -> bool {
        self.shared.refill.get_or_init(std::thread::current);
        loop {
            let wanted = self.shared.ready.load(Relaxed) < READY_MAX as u64;
            let segment = match self.returned.try_recv() {
                Ok(segment) if wanted => segment,
                Ok(_) => continue,
                Err(TryRecvError::Disconnected) => return false,
                Err(TryRecvError::Empty) => {
                    let allowed = self.shared.mapped.load(Relaxed) < self.shared.allowed.load(Relaxed);
                    if !(wanted && allowed) {
                        return true;
                    }
                    // Out of memory: the pool will find out when it needs one.
                    let Ok(segment) = Segment::map_prefaulted(&self.shared) else { return true };
                    segment
                }
            };
            self.shared.ready.fetch_add(1, Relaxed);
            if self.ready.try_send(segment).is_err() {
                self.shared.ready.fetch_sub(1, Relaxed);
                return true;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    /// How long until `holds`, if that is sooner than whoever rests looks of its own accord.
    fn soon(holds: impl Fn() -> bool) -> bool {
        let began = Instant::now();
        while !holds() && began.elapsed() < REST / 2 {
            std::thread::sleep(Duration::from_millis(1));
        }
        holds()
    }

    #[test]
    fn who_rests_is_left_alone_where_nothing_is_to_be_done() {
        let (mut supply, mut refill) = Supply::new(None);
        let its = Arc::clone(&supply.shared);
        let rounds = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&rounds);
        let thread = std::thread::spawn(move || {
            while refill.top_up() {
                counted.fetch_add(1, Relaxed);
                std::thread::park_timeout(REST);
            }
        });
        supply.allow(100);
        assert!(soon(|| its.ready.load(Relaxed) == READY_MAX as u64));
        let taken = supply.take();
        std::thread::sleep(REST / 20);
        let before = rounds.load(Relaxed);
        for _ in 0..20 {
            supply.allow(100);
            std::thread::sleep(REST / 1000);
        }
        assert!(rounds.load(Relaxed) <= before + 1, "{} rounds", rounds.load(Relaxed) - before);
        drop((taken, supply));
        thread.join().unwrap();
    }

    #[test]
    fn who_rests_is_called_when_segments_are_taken_or_given_back() {
        let (mut supply, refill) = Supply::new(None);
        let its = Arc::clone(&supply.shared);
        let ready = || its.ready.load(Relaxed);
        let thread = std::thread::spawn(move || refill.run());
        assert!(soon(|| ready() == READY_MAX as u64));
        for _ in 0..5 {
            let taken: Vec<_> = (0..READY_MAX as u64 - READY_FEW).map(|_| supply.take().unwrap()).collect();
            assert!(soon(|| ready() == READY_MAX as u64), "{} are ready", ready());
            let mapped = its.mapped.load(Relaxed);
            taken.into_iter().for_each(|segment| drop(supply.give_back(segment)));
            assert!(soon(|| its.mapped.load(Relaxed) == mapped - (READY_MAX as u64 - READY_FEW)));
        }
        assert_eq!(supply.inline_segments, 0);
        drop(supply);
        thread.join().unwrap();
    }
}

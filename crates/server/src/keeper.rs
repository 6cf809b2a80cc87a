//! The thread that looks after pages while others serve: ends leases, moves cold pages to the spill file, reads them back.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use crate::parked::Parked;
use crate::pool::{Pool, Work};
use crate::shared::Shared;
use crate::spill::Spill;
use crate::sys::pages::Held;

/// How often leases are looked at, and whether room gets short, when nothing else happens.
const TICK: Duration = Duration::from_millis(20);
/// Pages looked at by the clock before gets are looked after again.
const CLOCK_STEP: u32 = 64;
/// How long the clock rests when the file took no page, or no page could leave.
const REST: Duration = Duration::from_secs(2);
/// Free pages below which cold ones leave, as a share of all: what puts use up while the file is written.
const RESERVE_SHARE: u64 = 16;
/// The same, at most: 64 MiB.
const RESERVE_MAX_PAGES: u64 = 16 << 10;

/// What the keeper's thread knows.
pub(crate) struct Keeper {
    shared: Arc<Shared>,
    gets: Receiver<Parked>,
    work: Work,
    /// The last page that the clock looked at.
    hand: u32,
    /// Pages looked at since one was moved.
    in_vain: u32,
    /// Until when the spill file is left alone.
    resting: Option<Instant>,
}

impl Keeper {
    pub(crate) fn new(shared: Arc<Shared>, gets: Receiver<Parked>) -> Self {
        Self { shared, gets, work: Work::default(), hand: 0, in_vain: 0, resting: None }
    }

    /// Works until the server ends.
    pub(crate) fn run(mut self) {
        while !self.shared.ending.load(Relaxed) {
            let busy = self.spill_some();
            let wait = if busy { Duration::ZERO } else { TICK };
            match self.gets.recv_timeout(wait) {
                Ok(parked) => self.read(parked),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            while let Ok(parked) = self.gets.try_recv() {
                self.read(parked);
            }
            self.end_leases();
        }
        while let Ok(parked) = self.gets.try_recv() {
            parked.discard(&self.shared.pool);
        }
    }

    fn read(&self, mut parked: Parked) {
        parked.read(&self.shared.pool);
        match parked.back.take() {
            Some((inbox, connection)) => inbox.hand_back(parked, connection),
            None => parked.discard(&self.shared.pool),
        }
    }

    fn end_leases(&mut self) {
        for tenant in self.shared.tenants.take_expired(Instant::now()) {
            self.shared.pool.purge(&tenant.table, &mut self.work);
        }
    }

    /// Sends a few cold pages away if room is short. Whether it should go on at once.
    fn spill_some(&mut self) -> bool {
        let shared = Arc::clone(&self.shared);
        let pool = &shared.pool;
        if pool.spill.is_none() || !is_short(pool) || self.resting.is_some_and(|until| Instant::now() < until) {
            return false;
        }
        self.resting = None;
        let numbers = pool.pages.numbers_used();
        for _ in 0..CLOCK_STEP.min(numbers) {
            self.hand = self.hand % numbers + 1;
            let moved = NonZeroU32::new(self.hand).map_or(Ok(false), |number| send_away(pool, number));
            self.in_vain = if let Ok(true) = moved { 0 } else { self.in_vain + 1 };
            // Twice around: the first time unmarks what was got.
            if moved.is_err() || self.in_vain > numbers.saturating_mul(2) {
                self.in_vain = 0;
                self.resting = Some(Instant::now() + REST);
                return false;
            }
        }
        numbers > 0
    }
}

/// Whether puts would soon be declined for want of DRAM.
fn is_short(pool: &Pool) -> bool {
    let reserve = (pool.budget.capacity() / spillway_core::PAGE_BYTES_U64 / RESERVE_SHARE).min(RESERVE_MAX_PAGES);
    pool.free.len() + pool.budget.free_pages() < reserve.max(1)
}

/// The file took no page.
pub(crate) struct Refused;

/// Moves a page to the file, unless it was got since the clock came by last. Whether it moved.
pub(crate) fn send_away(pool: &Pool, number: NonZeroU32) -> Result<bool, Refused> {
    let Some(spill) = &pool.spill else { return Err(Refused) };
    let Some(held) = pool.pages.try_hold(number) else { return Ok(false) };
    let moved = if pool.pages.was_touched(number) { Ok(false) } else { write_away(pool, spill, &held) };
    pool.let_go(held);
    moved
}

fn write_away(pool: &Pool, spill: &Spill, held: &Held) -> Result<bool, Refused> {
    let Some(pin) = pool.pages.pin(held) else { return Ok(false) };
    let place = match spill.write(pool.pages.bytes(&pin)) {
        Ok(Some(place)) => place,
        Ok(None) | Err(_) => {
            pool.unpin(pin);
            return Err(Refused);
        }
    };
    match pool.pages.send_away(pin, place) {
        Ok(mut loose) => {
            pool.note_away(held.number());
            pool.pages.wipe_place(&mut loose);
            pool.free.give_back_place(loose);
            pool.unpin_away(held.number());
            Ok(true)
        }
        // Someone is being sent it: then it is not cold.
        Err(pin) => {
            spill.free(place);
            pool.unpin(pin);
            Ok(false)
        }
    }
}

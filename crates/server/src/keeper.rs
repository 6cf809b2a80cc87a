//! The thread that looks after pages while others serve: ends leases, moves cold pages to the spill file, reads them back.
//!
//! Someone waits for what is read, and for nothing else: the rest is done in small steps, with gets looked after between.

use std::collections::VecDeque;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use crate::parked::Parked;
use crate::pool::{Pool, Work};
use crate::shared::Shared;
use crate::spill::Spill;
use crate::sys::pages::{Held, Pin};
use crate::table::Taken;

/// How often leases are looked at, and whether room gets short, when nothing else happens.
const TICK: Duration = Duration::from_millis(20);
/// Pages looked at by the clock before gets are looked after again.
const CLOCK_STEP: u32 = 1024;
/// Pages written to the file before gets are looked after again, at most. The wait for the disk is theirs together: with so many,
/// as many leave a second as without it (ext4 on a virtual disk, 300 MiB/s; a third less with 64), and a get waits no longer.
const BATCH_PAGES: usize = 256;
/// Pages purged before gets are looked after again: 0.1 ms, measured where they are in the cache. All of a large tenant's
/// take seconds, and a client gives up a page that does.
const PURGE_STEP: usize = 256;
/// Gets looked after before the rest has a step again: else it had none while they keep coming.
const GETS_MAX: usize = 16;
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
    /// Pages of tenants whose leases are over, which nobody can reach any more; the oldest first.
    leftovers: VecDeque<Taken>,
    /// The last page that the clock looked at.
    hand: u32,
    /// Pages looked at since one was moved.
    in_vain: u32,
    /// Until when the spill file is left alone.
    resting: Option<Instant>,
}

impl Keeper {
    pub(crate) fn new(shared: Arc<Shared>, gets: Receiver<Parked>) -> Self {
        Self { shared, gets, work: Work::default(), leftovers: VecDeque::new(), hand: 0, in_vain: 0, resting: None }
    }

    /// Works until the server ends.
    pub(crate) fn run(mut self) {
        while !self.shared.ending.load(Relaxed) {
            if !self.turn() {
                return;
            }
        }
        while let Ok(parked) = self.gets.try_recv() {
            parked.discard(&self.shared.pool);
        }
    }

    /// Looks after some gets and does a step of everything else. Whether more gets may come.
    pub(crate) fn turn(&mut self) -> bool {
        self.end_leases();
        // Purged first: it may make the room that else had to be made.
        let (purging, spilling) = (self.purge_some(), self.spill_some());
        // Only the first is waited for, which does not happen while there are more.
        let mut wait = if purging || spilling { Duration::ZERO } else { TICK };
        for _ in 0..GETS_MAX {
            match self.gets.recv_timeout(std::mem::take(&mut wait)) {
                Ok(parked) => self.read(parked),
                Err(RecvTimeoutError::Timeout) => break,
                Err(RecvTimeoutError::Disconnected) => return false,
            }
        }
        true
    }

    /// Reads what is asked for, unless its connection has ended: a client that comes and goes must not keep the disk busy.
    fn read(&self, mut parked: Parked) {
        if !parked.is_wanted() {
            return parked.discard(&self.shared.pool);
        }
        parked.read(&self.shared.pool);
        match parked.back.take() {
            Some((inbox, connection)) => inbox.hand_back(parked, connection),
            None => parked.discard(&self.shared.pool),
        }
    }

    /// Whoever comes back after this is given an empty table, while what was in the last one is purged.
    fn end_leases(&mut self) {
        let expired = self.shared.tenants.take_expired(Instant::now());
        self.leftovers.extend(expired.into_iter().map(|tenant| tenant.table.take_all()));
    }

    /// Forgets and wipes a few pages that nobody can reach any more. Whether there are others.
    fn purge_some(&mut self) -> bool {
        let Some(taken) = self.leftovers.front_mut() else { return false };
        if self.shared.pool.purge(taken, PURGE_STEP, &mut self.work) < PURGE_STEP {
            self.leftovers.pop_front();
        }
        !self.leftovers.is_empty()
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
        // Once around at most: no page is written twice in a batch.
        let (hand, in_vain) = (&mut self.hand, &mut self.in_vain);
        let looked_at = (0..CLOCK_STEP.min(numbers)).filter_map(|_| {
            *hand = *hand % numbers + 1;
            *in_vain += 1;
            NonZeroU32::new(*hand)
        });
        let moved = send_away(pool, looked_at);
        if moved.as_ref().is_ok_and(|moved| *moved > 0) {
            self.in_vain = 0;
        }
        // Twice around: the first time unmarks what was got.
        if moved.is_err() || self.in_vain > numbers.saturating_mul(2) {
            self.in_vain = 0;
            self.resting = Some(Instant::now() + REST);
            return false;
        }
        numbers > 0
    }
}

/// Whether puts would soon be declined for want of DRAM.
fn is_short(pool: &Pool) -> bool {
    let reserve = (pool.budget.capacity() / spillway_core::PAGE_BYTES_U64 / RESERVE_SHARE).min(RESERVE_MAX_PAGES);
    pool.free.len() + pool.budget.free_pages() < reserve.max(1)
}

/// The file did not take all that it was to take.
pub(crate) struct Refused;

/// A page that was written to the file, and is in the arena still.
struct Written {
    held: Held,
    pin: Pin,
    place: u32,
}

/// Moves some of these pages to the file, as many as may be in a batch, unless they were got since the clock came by last. How
/// many moved. They leave the arena when the disk has them: what only the kernel has is lost if it cannot write it later.
pub(crate) fn send_away(pool: &Pool, numbers: impl IntoIterator<Item = NonZeroU32>) -> Result<usize, Refused> {
    let Some(spill) = &pool.spill else { return Err(Refused) };
    let (mut numbers, mut batch, mut refused) = (numbers.into_iter(), Vec::new(), false);
    while !refused
        && batch.len() < BATCH_PAGES
        && let Some(number) = numbers.next()
    {
        match write(pool, spill, number) {
            Ok(written) => batch.extend(written),
            Err(Refused) => refused = true,
        }
    }
    if !batch.is_empty() && spill.sync().is_err() {
        batch.into_iter().for_each(|written| stay(pool, spill, written));
        return Err(Refused);
    }
    let moved = batch.into_iter().map(|written| usize::from(leave(pool, spill, written))).sum();
    if refused { Err(Refused) } else { Ok(moved) }
}

/// Writes a page, if there is a cold one of this number in the arena.
fn write(pool: &Pool, spill: &Spill, number: NonZeroU32) -> Result<Option<Written>, Refused> {
    let Some(held) = pool.pages.try_hold(number) else { return Ok(None) };
    let pin = if pool.pages.was_touched(number) { None } else { pool.pages.pin(&held) };
    let Some(pin) = pin else {
        pool.let_go(held);
        return Ok(None);
    };
    match spill.write(pool.pages.bytes(&pin)) {
        Ok(Some(place)) => Ok(Some(Written { held, pin, place })),
        Ok(None) | Err(_) => {
            pool.unpin(pin);
            pool.let_go(held);
            Err(Refused)
        }
    }
}

/// Has a page that is in the file leave the arena. Whether it could.
fn leave(pool: &Pool, spill: &Spill, Written { held, pin, place }: Written) -> bool {
    match pool.pages.send_away(pin, place) {
        Ok(mut loose) => {
            pool.note_away(held.number());
            pool.pages.wipe_place(&mut loose);
            pool.free.give_back_place(loose);
            pool.unpin_away(held.number());
            pool.let_go(held);
            true
        }
        // Someone is being sent it: then it is not cold.
        Err(pin) => {
            stay(pool, spill, Written { held, pin, place });
            false
        }
    }
}

/// Has a page stay in the arena after all.
fn stay(pool: &Pool, spill: &Spill, Written { held, pin, place }: Written) {
    spill.free(place);
    pool.unpin(pin);
    pool.let_go(held);
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use spillway_core::PAGE_BYTES;
    use spillway_wire::hello::{Hello, Received, Versions};
    use spillway_wire::request::{self, PutPage, Request, RequestBody};
    use spillway_wire::{Content, Key, checksum};

    use super::*;
    use crate::config::{Config, Limits, SpillConfig};
    use crate::server::prepare;
    use crate::tenants::{Claim, Seat};

    const PAGES: usize = PURGE_STEP * 7 / 2;

    /// A server whose leases are over at once, without threads.
    fn shared(name: &str) -> Arc<Shared> {
        let path = std::env::temp_dir().join(format!("spillway-keeper-{name}-{}", std::process::id()));
        let mut config = Config::new(([127, 0, 0, 1], 0).into(), 16 << 20);
        config.spill = Some(SpillConfig { path, bytes: 1 << 20 });
        config.limits = Limits { lease: Duration::ZERO, ..Limits::default() };
        Arc::new(prepare(config).unwrap())
    }

    /// A tenant's seat, and whether it has been here before.
    fn enter(shared: &Shared, tenant: u8) -> (Seat, bool) {
        let (versions, challenge) = (Versions::default(), [3; 32]);
        let hello = Hello { versions, create: true, take_over: false, tenant: [tenant; 16], nonce: [9; 32] };
        let bytes = hello.encode(b"", &[tenant; 16], &challenge);
        shared.tenants.enter(&Received::decode(&bytes).unwrap(), b"", &challenge, Instant::now()).unwrap()
    }

    fn key(index: usize) -> Key {
        Key { region: 1, index: index.try_into().unwrap() }
    }

    fn put(shared: &Shared, seat: &Seat, at: usize) {
        let mut page = [7; PAGE_BYTES];
        page[..8].copy_from_slice(&at.to_le_bytes());
        let put = PutPage { key: key(at), checksum: checksum(&page), content: Content::Bytes(&page) };
        let mut frame = Vec::new();
        request::put(&mut frame, 0, &[put]);
        let Ok(Some((Request { body: RequestBody::Put(puts), .. }, _))) = Request::decode(&frame) else { panic!() };
        shared.pool.put(&seat.tenant.table, seat.tenant.scope, puts, &mut Work::default());
    }

    /// A get of a page that is away, as a worker parks it.
    fn parked(shared: &Shared, seat: &Seat, at: usize) -> Parked {
        let mut work = Work::default();
        shared.pool.get(&seat.tenant.table, [key(at)].into_iter(), &mut work);
        assert_eq!(work.away.len(), 1);
        let claim = Claim::new(&seat.tenant, Parked::bytes_of(&work.pins, &work.away));
        let (read, gone) = (Vec::new(), Arc::default());
        Parked { id: 1, heads: work.heads, pins: work.pins, away: work.away, read, back: None, claim, gone }
    }

    #[test]
    fn a_large_tenant_is_purged_between_gets() {
        let (to_keeper, gets) = mpsc::channel();
        let shared = shared("between");
        let mut keeper = Keeper::new(Arc::clone(&shared), gets);
        let ((large, _), (other, _)) = (enter(&shared, 1), enter(&shared, 2));
        put(&shared, &other, 0);
        // Twice, as the first time finds it used.
        let moved = [(); 2].map(|()| send_away(&shared.pool, [NonZeroU32::MIN]).ok());
        assert_eq!(moved, [Some(0), Some(1)]);
        (0..PAGES).for_each(|at| put(&shared, &large, at));
        shared.tenants.leave(&large, Instant::now());

        let mut held = vec![shared.pool.holdings().keys];
        while *held.last().unwrap() > 1 {
            to_keeper.send(parked(&shared, &other, 0)).unwrap();
            assert!(keeper.turn());
            assert!(keeper.gets.try_recv().is_err(), "it was read");
            held.push(shared.pool.holdings().keys);
            assert_eq!(shared.tenants.len(), 1, "the other");
        }
        assert!(held.windows(2).all(|two| two[0] - two[1] <= PURGE_STEP as u64), "{held:?}");
        let held = shared.pool.holdings();
        assert_eq!((held.distinct, held.stored_bytes, shared.pool.free.len()), (1, 0, PAGES as u64));
    }

    #[test]
    fn gets_that_keep_coming_leave_time_for_the_rest() {
        let (to_keeper, gets) = mpsc::channel();
        let shared = shared("busy");
        let mut keeper = Keeper::new(Arc::clone(&shared), gets);
        let ((large, _), (other, _)) = (enter(&shared, 1), enter(&shared, 2));
        put(&shared, &other, 0);
        assert!([(); 2].map(|()| send_away(&shared.pool, [NonZeroU32::MIN]).is_ok_and(|moved| moved == 1))[1]);
        (0..PAGES).for_each(|at| put(&shared, &large, at));
        shared.tenants.leave(&large, Instant::now());
        (0..GETS_MAX * 3).for_each(|_| to_keeper.send(parked(&shared, &other, 0)).unwrap());
        let (all, mut turns) = (shared.pool.holdings().keys, 0);
        while other.tenant.parked_bytes() > 0 {
            assert!(keeper.turn());
            turns += 1;
            assert_eq!(shared.pool.holdings().keys, all - turns * PURGE_STEP as u64);
        }
        assert_eq!(turns, 3);
    }

    #[test]
    fn who_comes_back_during_its_purge_starts_anew() {
        let (_to_keeper, gets) = mpsc::channel();
        let shared = shared("anew");
        let mut keeper = Keeper::new(Arc::clone(&shared), gets);
        let (before, _) = enter(&shared, 1);
        (0..PAGES).for_each(|at| put(&shared, &before, at));
        shared.tenants.leave(&before, Instant::now());
        assert!(keeper.turn());
        assert_eq!(shared.pool.holdings().keys, (PAGES - PURGE_STEP) as u64);

        let (after, existed) = enter(&shared, 1);
        assert!(!existed && after.tenant.incarnation != before.tenant.incarnation);
        // One that is being purged, and one that never was there.
        [PAGES - 1, PAGES].iter().for_each(|at| put(&shared, &after, *at));
        assert_eq!(shared.status(&after).tenant_pages, 2);
        while !keeper.leftovers.is_empty() {
            assert!(keeper.turn());
        }
        let status = shared.status(&after);
        assert_eq!((status.tenants, status.tenant_pages, status.pages, status.distinct_pages), (1, 2, 2, 2));
        assert_eq!(shared.tenants.keys(), 2);
    }

    #[test]
    fn what_the_disk_does_not_take_stays() {
        let mut shared = shared("failing");
        // It takes all that is written, and has nothing to say when it is asked whether that has arrived.
        let file = std::fs::File::options().read(true).write(true).open("/dev/zero").unwrap();
        Arc::get_mut(&mut shared).unwrap().pool.spill = Some(Spill::in_file(file, 1 << 20));
        let (seat, _) = enter(&shared, 1);
        put(&shared, &seat, 0);
        let moved = [(); 2].map(|()| send_away(&shared.pool, [NonZeroU32::MIN]).ok());
        assert_eq!(moved, [Some(0), None]);
        let spill = shared.pool.spill.as_ref().unwrap();
        assert_eq!((spill.pages(), spill.free_pages()), (0, 0), "it takes nothing for now");
        let mut work = Work::default();
        shared.pool.get(&seat.tenant.table, [key(0)].into_iter(), &mut work);
        let pin = work.pins.pop().expect("it is here");
        assert_eq!(shared.pool.pages.bytes(&pin)[8..], [7; PAGE_BYTES - 8]);
        shared.pool.unpin(pin);
    }
}

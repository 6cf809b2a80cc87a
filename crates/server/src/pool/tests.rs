//! The pool against a plain map, and what must hold whatever was done to it.

use std::collections::{HashMap, HashSet};

use proptest::prelude::*;
use spillway_core::PAGE_BYTES;
use spillway_wire::request::{self, Request, RequestBody};

use super::*;
use crate::keeper::send_away;

const MIB: u64 = 1 << 20;

/// A page whose bytes tell its number; zero is all zeros. Some compress well, some not at all.
fn page(number: u32) -> Page {
    let mut page = [0; PAGE_BYTES];
    let noisy = (number % 9) as usize * PAGE_BYTES / 4 / 8;
    let mut noise = number;
    for (at, word) in page.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        *word = number.to_le_bytes();
        if (1..noisy).contains(&at) {
            noise = noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            *word = (noise ^ noise >> 15).to_le_bytes();
        }
    }
    page
}

fn key(index: u32) -> Key {
    Key { region: index % 3, index }
}

/// Puts these pages as one batch; what became of them.
fn put(pool: &Pool, table: &Table, scope: u32, pages: &[(Key, u32)], work: &mut Work) -> Vec<PageStatus> {
    let bytes: Vec<Page> = pages.iter().map(|(_, number)| page(*number)).collect();
    let puts: Vec<PutPage<'_>> = pages
        .iter()
        .zip(&bytes)
        .map(|((key, _), bytes)| PutPage { key: *key, checksum: checksum(bytes), content: Content::Bytes(bytes) })
        .collect();
    let mut frame = Vec::new();
    request::put(&mut frame, 0, &puts);
    let Ok(Some((Request { body: RequestBody::Put(puts), .. }, _))) = Request::decode(&frame) else { panic!() };
    pool.put(table, scope, puts, work);
    work.statuses.clone()
}

/// The number of the page that is stored under a key.
fn get(pool: &Pool, table: &Table, key: Key, work: &mut Work) -> Option<u32> {
    pool.get(table, [key].into_iter(), work);
    let head = work.heads[0];
    if let Some((_, held)) = work.away.pop() {
        let (spill, place) = (pool.spill.as_ref().unwrap(), pool.pages.elsewhere(&held).unwrap());
        let (mut bytes, mut stored) = ([0; PAGE_BYTES], vec![0; pool.pages.stored_bytes(&held)]);
        spill.read(place, &mut stored).unwrap();
        unpack(&stored, &mut bytes).unwrap();
        pool.let_go(held);
        return Some(number_of(&bytes, head.checksum));
    }
    let pin = work.pins.pop();
    match head.what {
        Got::Not(status) => {
            assert_eq!(status, PageStatus::Missing);
            None
        }
        Got::Zero => Some(0),
        Got::Bytes => {
            let pin = pin.expect("in the arena");
            let bytes = bytes_of(pool, pin);
            Some(number_of(&bytes, head.checksum))
        }
    }
}

/// The page that is pinned.
fn bytes_of(pool: &Pool, pin: Pin) -> Page {
    match pool.unpacked(pin) {
        Ok(page) => *page,
        Err(pin) => {
            let page = pool.pages.bytes(&pin).try_into().expect("a page");
            pool.unpin(pin);
            page
        }
    }
}

fn number_of(bytes: &Page, expected: u64) -> u32 {
    let number = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    assert!(*bytes == page(number) && expected == checksum(bytes));
    number
}

/// A file for the pool's cold pages.
fn spill() -> Spill {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let name = format!("spillway-pool-{}-{}", std::process::id(), COUNT.fetch_add(1, Relaxed));
    Spill::create(&std::env::temp_dir().join(name), MIB).unwrap()
}

fn free(pool: &Pool, table: &Table, scope: u32, key: Key, work: &mut Work) -> u32 {
    pool.free(table, scope, [Range { first: key, pages: 1 }].into_iter(), work)
}

/// Forgets all of a tenant's pages, a few at a time.
fn purge(pool: &Pool, table: &Table, work: &mut Work) {
    let mut taken = table.take_all();
    while pool.purge(&mut taken, 5, work) == 5 {}
}

/// Takes everything that is free, and sees that nothing of anyone is left in it.
fn assert_wiped(pool: &Pool) {
    // Nothing new is to be touched.
    while pool.budget.take(spillway_core::PAGE_BYTES_U64) {}
    let free = pool.free.grains();
    let lengths = (1..=WHOLE).rev().flat_map(|grains| std::iter::from_fn(move || pool.free.take_place(grains)));
    let taken: u64 = lengths
        .map(|mut place| {
            assert!(pool.pages.loose_bytes(&mut place).iter().all(|byte| *byte == 0));
            u64::from(place.grains())
        })
        .sum();
    assert_eq!(taken, free);
}

#[derive(Clone, Debug)]
enum Step {
    Put(usize, Vec<(u32, u32)>),
    Get(usize, u32),
    Free(usize, u32),
    Purge(usize),
    Settle,
    /// The clock comes by at this page.
    Cool(u32),
}

fn step() -> impl Strategy<Value = Step> {
    let tenant = 0..3usize;
    prop_oneof![
        4 => (tenant.clone(), prop::collection::vec((0..40u32, 0..12u32), 1..8)).prop_map(|(t, p)| Step::Put(t, p)),
        3 => (tenant.clone(), 0..40u32).prop_map(|(t, k)| Step::Get(t, k)),
        3 => (tenant.clone(), 0..40u32).prop_map(|(t, k)| Step::Free(t, k)),
        1 => tenant.prop_map(Step::Purge),
        1 => Just(Step::Settle),
        3 => (1..60u32).prop_map(Step::Cool),
    ]
}

/// Distinct pages that there should be.
fn distinct(models: &[HashMap<u32, u32>], dedupe: Dedupe) -> usize {
    let pages = || {
        let each = models.iter().enumerate();
        each.flat_map(|(tenant, model)| model.values().filter(|number| **number != 0).map(move |n| (tenant, *n)))
    };
    match dedupe {
        Dedupe::Off => pages().count(),
        Dedupe::Tenant => pages().collect::<HashSet<_>>().len(),
        Dedupe::Everyone => pages().map(|(_, number)| number).collect::<HashSet<_>>().len(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn it_behaves_as_maps_do(steps in prop::collection::vec(step(), 1..120), sharing in 0..3usize, spilling: bool, compress: bool) {
        let dedupe = [Dedupe::Off, Dedupe::Tenant, Dedupe::Everyone][sharing];
        let pool = Pool::new(4 * MIB, dedupe, compress, spilling.then(spill)).unwrap();
        let tables: Vec<Table> = (0..3).map(|_| Table::new()).collect();
        let mut models = vec![HashMap::new(); 3];
        let mut work = Work::default();
        let scope = |tenant: usize| u32::try_from(tenant).unwrap() + 1;
        for step in steps {
            match step {
                Step::Put(tenant, pages) => {
                    models[tenant].extend(pages.iter().copied());
                    let pages: Vec<(Key, u32)> = pages.into_iter().map(|(at, number)| (key(at), number)).collect();
                    let statuses = put(&pool, &tables[tenant], scope(tenant), &pages, &mut work);
                    prop_assert!(statuses.iter().all(|status| *status == PageStatus::Ok));
                }
                Step::Get(tenant, at) => {
                    let got = get(&pool, &tables[tenant], key(at), &mut work);
                    prop_assert_eq!(got, models[tenant].get(&at).copied());
                }
                Step::Free(tenant, at) => {
                    let freed = free(&pool, &tables[tenant], scope(tenant), key(at), &mut work);
                    prop_assert_eq!(freed == 1, models[tenant].remove(&at).is_some());
                }
                Step::Purge(tenant) => {
                    purge(&pool, &tables[tenant], &mut work);
                    models[tenant].clear();
                }
                Step::Settle => pool.settle(&mut work),
                Step::Cool(number) => {
                    let first = number.min(pool.pages.numbers_used());
                    let two = || [first, first + 1].into_iter().filter_map(NonZeroU32::new);
                    // Twice, as the first time finds them used.
                    let cooled = send_away(&pool, two()).and_then(|_| send_away(&pool, two()));
                    prop_assert!(cooled.is_ok() == spilling);
                }
            }
            let held = pool.holdings();
            prop_assert!(compress || spilling || held.stored_bytes == held.distinct * 4096);
            prop_assert!(held.stored_bytes <= pool.budget.used() && held.stored_bytes <= held.distinct * 4096);
            prop_assert_eq!(held.keys, models.iter().map(|model| model.len() as u64).sum::<u64>());
            prop_assert_eq!(held.zeros, models.iter().flat_map(|m| m.values()).filter(|n| **n == 0).count() as u64);
            let least = distinct(&models, dedupe) as u64;
            // What is away is not compared, so it may be stored once more.
            let away = pool.spill.as_ref().map_or(0, Spill::pages);
            prop_assert!(held.distinct >= least && (spilling || held.distinct == least));
            prop_assert!(away <= held.distinct);
            for (table, model) in tables.iter().zip(&models) {
                prop_assert_eq!(table.len(), model.len() as u64);
            }
        }
        for table in &tables {
            purge(&pool, table, &mut work);
        }
        prop_assert_eq!(pool.holdings(), Holdings { served: pool.holdings().served, ..Holdings::default() });
        prop_assert_eq!(pool.spill.as_ref().map_or(0, Spill::pages), 0);
        let numbers = u64::from(pool.pages.numbers_used());
        prop_assert_eq!(pool.budget.used(), pool.free.grains() * 512 + numbers * crate::budget::NUMBER_COST_BYTES);
        assert_wiped(&pool);
    }
}

#[test]
fn what_died_is_wiped_before_another_tenant_gets_it() {
    let pool = Pool::new(MIB, Dedupe::Tenant, false, None).unwrap();
    let (one, two, mut work) = (Table::new(), Table::new(), Work::default());
    put(&pool, &one, 1, &[(key(1), 7), (key(2), 8)], &mut work);
    free(&pool, &one, 1, key(1), &mut work);
    assert_eq!(pool.free.len(), 0, "kept for the same tenant");
    put(&pool, &two, 2, &[(key(1), 0)], &mut work);
    assert_eq!(pool.free.len(), 1);
    assert_wiped(&pool);
}

#[test]
fn a_full_pool_declines_and_still_replaces() {
    let pool = Pool::new(MIB, Dedupe::Tenant, false, None).unwrap();
    let (table, mut work) = (Table::new(), Work::default());
    let promised = pool.free_pages();
    let mut stored = 0;
    while put(&pool, &table, 1, &[(key(stored), stored + 1)], &mut work) == [PageStatus::Ok] {
        stored += 1;
    }
    assert_eq!(u64::from(stored), promised);
    assert_eq!(pool.free_pages(), 0);
    assert!(pool.budget.used() <= MIB);
    // What is there stays, also under the key that was declined; what is there can be replaced.
    assert_eq!(get(&pool, &table, key(stored), &mut work), None);
    assert_eq!(put(&pool, &table, 1, &[(key(5), 1000)], &mut work), [PageStatus::Ok]);
    assert_eq!(get(&pool, &table, key(5), &mut work), Some(1000));
    // A twin needs no page, but a key; there may be no room for that either.
    assert_eq!(put(&pool, &table, 1, &[(key(6), 1000)], &mut work), [PageStatus::Ok]);
    assert_eq!(put(&pool, &table, 1, &[(key(5), 1001), (key(6), 1002)], &mut work), [PageStatus::Ok; 2]);
    free(&pool, &table, 1, key(0), &mut work);
    assert_eq!(put(&pool, &table, 1, &[(key(stored), 2000)], &mut work), [PageStatus::Ok]);
    for at in 1..stored {
        let expected = match at {
            5 => 1001,
            6 => 1002,
            at => at + 1,
        };
        assert_eq!(get(&pool, &table, key(at), &mut work), Some(expected));
    }
}

#[test]
fn keys_of_zeros_are_limited_too() {
    let pool = Pool::new(MIB, Dedupe::Off, false, None).unwrap();
    let (table, mut work) = (Table::new(), Work::default());
    let declined = (0..1 << 20).find(|at| put(&pool, &table, 1, &[(key(*at), 0)], &mut work) == [PageStatus::Full]);
    assert!(declined.is_some_and(|at| u64::from(at) <= MIB / KEY_COST_BYTES));
}

#[test]
fn a_replaced_page_is_still_sent_as_it_was() {
    let pool = Pool::new(MIB, Dedupe::Tenant, false, None).unwrap();
    let (table, mut work) = (Table::new(), Work::default());
    put(&pool, &table, 1, &[(key(1), 7)], &mut work);
    pool.get(&table, [key(1)].into_iter(), &mut work);
    let pin = work.pins.pop().expect("pinned");
    put(&pool, &table, 1, &[(key(1), 8), (key(2), 9)], &mut work);
    free(&pool, &table, 1, key(1), &mut work);
    pool.settle(&mut work);
    assert!(bytes_of(&pool, pin) == page(7));
    assert_eq!(pool.holdings().distinct, 1);
}

#[test]
fn pages_with_equal_checksums_and_other_bytes_are_not_shared() {
    let pool = Pool::new(MIB, Dedupe::Everyone, false, None).unwrap();
    let (table, mut work) = (Table::new(), Work::default());
    let (one, two) = (page(1), page(2));
    for (index, bytes, checksum) in [(0, &one, 5), (1, &two, 5), (2, &two, 6), (3, &[0; PAGE_BYTES], 5)] {
        let mut frame = Vec::new();
        request::put(&mut frame, 0, &[PutPage { key: key(index), checksum, content: Content::Bytes(bytes) }]);
        let Ok(Some((Request { body: RequestBody::Put(puts), .. }, _))) = Request::decode(&frame) else { panic!() };
        pool.put(&table, 1, puts, &mut work);
    }
    assert_eq!(pool.holdings().distinct, 4, "zeros with another checksum were something else before");
    pool.get(&table, [key(0), key(1), key(2), key(3)].into_iter(), &mut work);
    let got: Vec<(u64, u8)> =
        work.heads.iter().zip(&work.pins).map(|(head, pin)| (head.checksum, pool.pages.bytes(pin)[0])).collect();
    assert_eq!(got, [(5, 1), (5, 2), (6, 2), (5, 0)]);
    work.pins.drain(..).for_each(|pin| pool.unpin(pin));
}

/// The hash proposes; bytes decide.
#[test]
fn pages_whose_hashes_collide_are_not_shared() {
    let mut pool = Pool::new(MIB, Dedupe::Everyone, false, None).unwrap();
    pool.twins = Some(Twins::weak(1));
    let (table, mut work) = (Table::new(), Work::default());
    let (one, two) = (page(1), page(2));
    // With one checksum, too: whoever makes them collide may choose it.
    for (index, bytes) in [(0, &one), (1, &two), (2, &one), (3, &two)] {
        let mut frame = Vec::new();
        request::put(&mut frame, 0, &[PutPage { key: key(index), checksum: 5, content: Content::Bytes(bytes) }]);
        let Ok(Some((Request { body: RequestBody::Put(puts), .. }, _))) = Request::decode(&frame) else { panic!() };
        pool.put(&table, 1, puts, &mut work);
    }
    for (index, number) in [(0, 1), (1, 2), (2, 1), (3, 2)] {
        pool.get(&table, [key(index)].into_iter(), &mut work);
        let pin = work.pins.pop().expect("in the arena");
        assert!(bytes_of(&pool, pin) == page(number));
    }
}

/// Who gives its own bytes another page's checksum shares with nobody, and keeps nobody else from sharing.
#[test]
fn a_wrong_checksum_does_not_keep_others_from_sharing() {
    let pool = Pool::new(MIB, Dedupe::Everyone, false, None).unwrap();
    let (liar, honest, mut work) = (Table::new(), Table::new(), Work::default());
    for index in 0..3 {
        put(&pool, &honest, 1, &[(key(index), 7)], &mut work);
        let mut frame = Vec::new();
        let lie = PutPage { key: key(index), checksum: checksum(&page(7)), content: Content::Bytes(&page(8)) };
        request::put(&mut frame, 0, &[lie]);
        let Ok(Some((Request { body: RequestBody::Put(puts), .. }, _))) = Request::decode(&frame) else { panic!() };
        pool.put(&liar, 2, puts, &mut work);
    }
    assert_eq!((pool.holdings().keys, pool.holdings().distinct), (6, 2));
}

/// Fifty images that share a base, a tenth of each rewritten: stored is hardly more than must be.
#[test]
fn images_with_a_common_base_take_its_room_once() {
    const BASE_PAGES: u32 = 1024;
    const IMAGES: u32 = 50;
    let pool = Pool::new(64 * MIB, Dedupe::Tenant, false, None).unwrap();
    let (table, mut work) = (Table::new(), Work::default());
    let mut expected = HashSet::new();
    for image in 0..IMAGES {
        for first in (0..BASE_PAGES).step_by(64) {
            let pages: Vec<(Key, u32)> = (first..first + 64)
                .map(|index| {
                    let rewritten = (index.wrapping_mul(2_654_435_761) ^ image.wrapping_mul(40_503)) % 10 == 0;
                    let number = if rewritten { 1 + BASE_PAGES * (image + 1) + index } else { 1 + index };
                    expected.insert(number);
                    (Key { region: image, index }, number)
                })
                .collect();
            assert!(put(&pool, &table, 1, &pages, &mut work).iter().all(|status| *status == PageStatus::Ok));
        }
    }
    let held = pool.holdings();
    assert_eq!(held.keys, u64::from(IMAGES * BASE_PAGES));
    let least = expected.len() as u64;
    assert!(held.distinct * 100 <= least * 102, "{} pages where {least} would do", held.distinct);
    for image in [0, 17, IMAGES - 1] {
        for index in 0..BASE_PAGES {
            assert!(get(&pool, &table, Key { region: image, index }, &mut work).is_some_and(|n| expected.contains(&n)));
        }
    }
}

#[test]
fn threads_that_share_pages_lose_none() {
    let pool = Pool::new(8 * MIB, Dedupe::Everyone, false, None).unwrap();
    let tables = [Table::new(), Table::new()];
    std::thread::scope(|scope| {
        for seed in 0..4u32 {
            let (pool, table) = (&pool, &tables[seed as usize % 2]);
            scope.spawn(move || {
                let (mut work, mut random) = (Work::default(), seed * 77 + 1);
                for _ in 0..4000 {
                    random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    // Keys of its own, pages that all have.
                    let (at, number) = (key((random >> 8) % 64 + seed * 64), (random >> 16) % 5 + 1);
                    match random >> 29 {
                        0..4 => assert_eq!(put(pool, table, seed, &[(at, number)], &mut work), [PageStatus::Ok]),
                        4..7 => assert!(get(pool, table, at, &mut work).is_none_or(|number| number <= 5)),
                        _ => assert!(free(pool, table, seed, at, &mut work) <= 1),
                    }
                }
                pool.settle(&mut work);
            });
        }
    });
    let mut work = Work::default();
    tables.iter().for_each(|table| purge(&pool, table, &mut work));
    assert_eq!(pool.holdings().distinct, 0);
    assert_wiped(&pool);
}

/// What compresses takes less, and as much is reported; what does not still fits; replacing works while there is no room.
#[test]
fn compressed_pages_take_fewer_grains() {
    let pool = Pool::new(MIB, Dedupe::Tenant, true, None).unwrap();
    let (table, mut work) = (Table::new(), Work::default());
    // A number that is 1 modulo 9 is noise to one eighth: two grains.
    let mut stored = 0;
    while put(&pool, &table, 1, &[(key(stored), stored * 9 + 1)], &mut work) == [PageStatus::Ok] {
        stored += 1;
    }
    let held = pool.holdings();
    assert_eq!(held.stored_bytes, u64::from(stored) * 1024);
    assert!(u64::from(stored) * 4096 > 3 * MIB, "{stored} pages in a MiB");
    assert!(pool.budget.used() <= MIB);
    // Neither less nor as much needs room; more is declined, and what was there stays.
    assert_eq!(put(&pool, &table, 1, &[(key(3), 90), (key(4), 91)], &mut work), [PageStatus::Ok; 2]);
    assert_eq!(put(&pool, &table, 1, &[(key(5), 17)], &mut work), [PageStatus::Full]);
    for (at, number) in [(3, 90), (4, 91), (5, 46), (6, 55)] {
        assert_eq!(get(&pool, &table, key(at), &mut work), Some(number));
    }
    purge(&pool, &table, &mut work);
    assert_eq!((pool.holdings().stored_bytes, pool.holdings().distinct), (0, 0));
    assert_eq!(put(&pool, &table, 1, &[(key(5), 17)], &mut work), [PageStatus::Ok]);
    assert_eq!(pool.holdings().stored_bytes, 4096);
}

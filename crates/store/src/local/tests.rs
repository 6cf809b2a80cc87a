mod model;

use super::*;
use crate::slots::{REFS_MAX, REFS_STUCK};
use spillway_core::PAGE_BYTES;

/// A page told by its number: the first `random_bytes` are noise, the rest repeats.
fn page(number: usize, random_bytes: usize) -> Page {
    let mut page = [number.to_le_bytes()[0]; PAGE_BYTES];
    let mut state = (number as u64).wrapping_add(0x9e37_79b9_7f4a_7c15);
    for word in page[..random_bytes].chunks_mut(8) {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mixed = (state ^ state >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word.copy_from_slice(&(mixed ^ mixed >> 32).to_le_bytes()[..word.len()]);
    }
    page
}

fn new(config: Config) -> Local {
    Local::new(config).0
}

fn stored(pool: &mut Local, page: &Page) -> Handle {
    match pool.put(page, None) {
        Ok(Put::Stored(handle)) => handle,
        other => panic!("{other:?}"),
    }
}

fn assert_holds(pool: &mut Local, handle: Handle, page: &Page) {
    let mut got = [0xee; PAGE_BYTES];
    assert_eq!(pool.get(handle, Urgency::Demand, &mut got), Ok(Got::Here));
    assert!(got == *page);
}

/// What the pool keeps: references, and bytes beside slack.
fn kept(pool: &Local) -> (u64, u64) {
    (pool.references, pool.arena.live_bytes())
}

/// What a preparer finds of `page`, whose clean copy is `handle`; the copy stays lent.
fn prepared(pool: &mut Local, preparer: &mut Preparer, handle: Handle, page: &Page) -> Prepared {
    let lent = pool.lend(handle, preparer);
    assert!(lent.is_some());
    let mut known = Prepared::default();
    preparer.prepare(page, lent, &mut known);
    known
}

#[test]
fn what_was_found_the_same_is_not_compared_again() {
    let mut pool = new(Config::default());
    let one = stored(&mut pool, &page(1, 2048));
    let mut preparer = pool.preparer().unwrap();
    let known = prepared(&mut pool, &mut preparer, one, &page(1, 2048));
    preparer.give_back();
    // Whatever is handed in beside it.
    assert_eq!(pool.put_prepared(&page(2, 2048), &known, Some(one)), Ok(Put::Unchanged(one)));
    let known = prepared(&mut pool, &mut preparer, one, &page(2, 2048));
    preparer.give_back();
    let Ok(Put::Stored(two)) = pool.put_prepared(&page(2, 2048), &known, Some(one)) else { panic!("it is another") };
    assert_holds(&mut pool, two, &page(2, 2048));
    assert_eq!(pool.references, 1);
}

/// That some pages do not compress was found out twice, the second time by the thread that serves faults.
#[test]
fn what_does_not_compress_is_not_compressed_again() {
    let mut pool = new(Config::default());
    let one = stored(&mut pool, &page(1, 2048));
    let mut preparer = pool.preparer().unwrap();
    for random_bytes in [2048, PAGE_BYTES] {
        let another = page(2, random_bytes);
        let known = prepared(&mut pool, &mut preparer, one, &another);
        preparer.give_back();
        let packed = known.packed(&another).expect("it was worked out");
        assert_eq!(packed.len() == PAGE_BYTES, random_bytes == PAGE_BYTES);
        let Ok(Put::Stored(two)) = pool.put_prepared(&another, &known, None) else { panic!("it is another") };
        assert_holds(&mut pool, two, &another);
    }
}

#[test]
fn copies_that_are_lent_stay_as_they_are_when_they_are_freed() {
    let mut pool = new(Config::default());
    let one = stored(&mut pool, &page(1, 2048));
    let mut preparer = pool.preparer().unwrap();
    let lent = pool.lend(one, &mut preparer);
    pool.free(one);
    // Of the same size: they would take its place.
    let others: Vec<Handle> = (2..200).map(|number| stored(&mut pool, &page(number, 2048))).collect();
    let mut known = Prepared::default();
    preparer.prepare(&page(1, 2048), lent, &mut known);
    assert_eq!(known.same_as(), Some(one));
    preparer.give_back();
    others.iter().for_each(|other| pool.free(*other));
    assert_eq!(kept(&pool), (0, 0));
}

#[test]
fn pools_of_a_limited_size_lend_nothing() {
    let mut pool = new(Config { size_bytes: Some(SIZE_MIN_BYTES), ..Config::default() });
    let one = stored(&mut pool, &page(1, 2048));
    let mut preparer = pool.preparer().unwrap();
    assert!(pool.lend(one, &mut preparer).is_none());
}

#[test]
fn identical_pages_are_kept_once() {
    let mut pool = new(Config::default());
    let one = stored(&mut pool, &page(1, 2048));
    let (_, bytes) = kept(&pool);
    assert_eq!(pool.put(&page(1, 2048), None), Ok(Put::Stored(one)));
    assert_eq!(kept(&pool), (2, bytes));
    let two = stored(&mut pool, &page(2, 2048));
    assert_ne!(one, two);
    // The page of `two` becomes that of `one`.
    assert_eq!(pool.put(&page(1, 2048), Some(two)), Ok(Put::Stored(one)));
    assert_eq!(kept(&pool), (3, bytes));
    for _ in 0..3 {
        assert_holds(&mut pool, one, &page(1, 2048));
        pool.free(one);
    }
    assert_eq!(kept(&pool), (0, 0));
}

#[test]
fn without_dedupe_each_page_is_its_own() {
    let mut pool = new(Config { dedupe: false, ..Config::default() });
    let (one, two) = (stored(&mut pool, &page(1, 100)), stored(&mut pool, &page(1, 100)));
    assert_ne!(one, two);
    assert_eq!(pool.put(&page(1, 100), Some(one)), Ok(Put::Unchanged(one)));
}

#[test]
fn a_put_that_differs_releases_one_reference_only() {
    let mut pool = new(Config::default());
    let parent = stored(&mut pool, &page(1, 2048));
    let child = pool.share(parent);
    let Ok(Put::Stored(changed)) = pool.put(&page(2, 2048), Some(child)) else { panic!("it differs") };
    assert_ne!(changed, parent);
    assert_holds(&mut pool, parent, &page(1, 2048));
    assert_holds(&mut pool, changed, &page(2, 2048));
    assert_eq!(pool.put(&page(1, 2048), Some(parent)), Ok(Put::Unchanged(parent)));
    assert_eq!(pool.references, 2);
}

#[test]
fn colliding_hashes_mix_nothing_up() {
    let (mut pool, _refill) = Local::with_hash(Config::default(), PageHash::weak(0));
    let handles: Vec<Handle> = (0..60).map(|n| stored(&mut pool, &page(n, 1000))).collect();
    for n in 0..60 {
        let mine = handles[n];
        assert_holds(&mut pool, mine, &page(n, 1000));
        assert_eq!(pool.put(&page(n, 1000), Some(mine)), Ok(Put::Unchanged(mine)));
        // Same hash, other bytes, which are here as well.
        let other = handles[(n + 1) % 60];
        let other = pool.share(other);
        assert_eq!(pool.put(&page(n, 1000), Some(other)), Ok(Put::Stored(mine)));
        pool.free(mine);
    }
    handles.into_iter().for_each(|handle| pool.free(handle));
    assert_eq!(kept(&pool), (0, 0));
}

#[test]
fn flipped_bytes_are_noticed_and_never_shared() {
    for random_bytes in [0, 2000, PAGE_BYTES] {
        let mut pool = new(Config::default());
        let page = page(5, random_bytes);
        let handle = stored(&mut pool, &page);
        let slot = pool.slots.get(handle);
        for at in 0..usize::from(slot.len) {
            pool.arena.bytes_mut(slot.place, slot.len)[at] ^= 1 << (at % 8);
            let mut got = [0; PAGE_BYTES];
            match pool.get(handle, Urgency::Demand, &mut got) {
                Err(error) => {
                    assert_eq!(error, StoreError::Corrupt);
                    assert!(matches!(pool.put(&page, None), Ok(Put::Stored(new)) if new != handle));
                    let Ok(Put::Stored(twin)) = pool.put(&page, None) else { panic!("not stored") };
                    pool.free(twin);
                    pool.free(twin);
                }
                // LZ4 can say the same in two ways.
                Ok(_) => assert!(got == page),
            }
            pool.arena.bytes_mut(slot.place, slot.len)[at] ^= 1 << (at % 8);
        }
        assert_holds(&mut pool, handle, &page);
        pool.arena.bytes_mut(slot.place, slot.len)[0] ^= 1;
        let Ok(Put::Stored(anew)) = pool.put(&page, Some(handle)) else { panic!("the old copy is no good") };
        assert_holds(&mut pool, anew, &page);
        assert_eq!(pool.references, 1);
    }
}

/// A pool of some 5 segments, filled with incompressible pages.
fn full() -> (Local, Vec<Handle>) {
    let size_bytes = 12 << 20;
    let mut pool = new(Config { size_bytes: Some(size_bytes), ..Config::default() });
    let mut handles = Vec::new();
    loop {
        let before = pool.status();
        match pool.put(&page(handles.len(), PAGE_BYTES), None) {
            Ok(Put::Stored(handle)) => handles.push(handle),
            other => {
                assert_eq!((other, pool.status()), (Err(StoreError::Full), before));
                assert!(before.memory_bytes <= size_bytes && before.memory_bytes > size_bytes / 4 * 3);
                return (pool, handles);
            }
        }
    }
}

#[test]
fn a_full_pool_refuses_and_changes_nothing() {
    let (mut pool, handles) = full();
    let shared = pool.share(handles[0]);
    let before = pool.status();
    assert_eq!(pool.put(&page(1 << 32, PAGE_BYTES), Some(shared)), Err(StoreError::Full));
    assert_eq!(pool.status(), before);
    for (n, handle) in handles.iter().enumerate() {
        assert_holds(&mut pool, *handle, &page(n, PAGE_BYTES));
    }
}

#[test]
fn a_full_pool_still_shares_replaces_and_takes_what_fits() {
    let (mut pool, handles) = full();
    assert_eq!(pool.put(&page(7, PAGE_BYTES), None), Ok(Put::Stored(handles[7])));
    assert_eq!(pool.put(&page(8, PAGE_BYTES), Some(handles[8])), Ok(Put::Unchanged(handles[8])));
    // In the room of its own previous copy.
    for (n, handle) in handles.iter().enumerate().skip(100) {
        let n = n + 1_000_000;
        let Ok(Put::Stored(replaced)) = pool.put(&page(n, 4000), Some(*handle)) else { panic!("room is there") };
        assert_holds(&mut pool, replaced, &page(n, 4000));
    }
    pool.free(handles[20]);
    assert!(pool.put(&page(1 << 40, 1000), None).is_ok());
    pool.arena.check();
}

#[test]
fn freeing_a_full_pool_returns_its_segments() {
    let (mut pool, handles) = full();
    assert!(pool.local_status().segments >= 4);
    handles.into_iter().for_each(|handle| pool.free(handle));
    assert_eq!((kept(&pool), pool.local_status().segments), ((0, 0), 1));
}

#[test]
fn pages_with_too_many_references_are_stored_again() {
    let mut pool = new(Config::default());
    let first = stored(&mut pool, &page(1, 500));
    pool.slots.set_refs_to(first, REFS_MAX - 1);
    assert_eq!(pool.put(&page(1, 500), None), Ok(Put::Stored(first)));
    let second = stored(&mut pool, &page(1, 500));
    assert_ne!(first, second);
    assert_eq!(pool.put(&page(1, 500), None), Ok(Put::Stored(second)));
    assert_eq!(pool.put(&page(1, 500), Some(first)), Ok(Put::Unchanged(first)));
}

#[test]
fn a_reference_count_that_overflows_keeps_the_page() {
    let mut pool = new(Config::default());
    let handle = stored(&mut pool, &page(1, 500));
    pool.slots.set_refs_to(handle, REFS_STUCK - 1);
    for _ in 0..3 {
        assert_eq!(pool.share(handle), handle);
    }
    for _ in 0..4 {
        pool.free(handle);
    }
    assert_holds(&mut pool, handle, &page(1, 500));
}

#[test]
fn tidying_gives_memory_back_and_loses_nothing() {
    let (mut pool, mut refill) = Local::new(Config::default());
    let handles: Vec<Handle> = (0..40_000).map(|n| stored(&mut pool, &page(n, n % 3000))).collect();
    for (n, handle) in handles.iter().enumerate() {
        if n % 8 != 0 {
            pool.free(*handle);
        }
    }
    refill.top_up();
    let segments = pool.local_status().segments;
    while pool.tidy() {
        refill.top_up();
    }
    pool.arena.check();
    assert!(pool.local_status().segments * 2 < segments);
    for (n, handle) in handles.iter().enumerate().step_by(8) {
        assert_holds(&mut pool, *handle, &page(n, n % 3000));
        pool.free(*handle);
    }
    assert_eq!(kept(&pool), (0, 0));
}

#[test]
#[should_panic(expected = "was freed before")]
fn freeing_twice_is_a_bug() {
    let mut pool = new(Config::default());
    let handle = stored(&mut pool, &page(1, 100));
    let _other = stored(&mut pool, &page(2, 100));
    pool.free(handle);
    pool.free(handle);
}

#[test]
fn the_pool_may_move_to_its_thread() {
    let (mut pool, mut refill) = Local::new(Config::default());
    let background = std::thread::spawn(move || while refill.top_up() {});
    let owner = std::thread::spawn(move || {
        let handles: Vec<Handle> = (0..4000).map(|n| stored(&mut pool, &page(n, 3000))).collect();
        for (n, handle) in handles.iter().enumerate() {
            assert_holds(&mut pool, *handle, &page(n, 3000));
            pool.free(*handle);
        }
    });
    owner.join().unwrap();
    background.join().unwrap();
}

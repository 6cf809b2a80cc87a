use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, MetadataExt};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

use super::*;
use crate::local::{Config, Local};
use crate::{Got, Handle, Inheritance, Put, Store, Urgency};

fn page(n: u64) -> Page {
    let mut page = [0; PAGE_BYTES];
    let mut word = n;
    // Half of it does not compress.
    for bytes in page[..2048].as_chunks_mut::<8>().0 {
        word = word.wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(17) ^ n;
        *bytes = word.to_le_bytes();
    }
    page
}

fn stored(put: Put) -> Handle {
    let (Put::Stored(handle) | Put::Unchanged(handle)) = put else { panic!("it answers at once") };
    handle
}

/// As another process would find it.
fn again(vault: &Vault) -> Vault {
    Vault::open(&vault.name_only().try_clone_to_owned().unwrap()).unwrap()
}

fn read(pool: &mut Local, handle: Handle) -> Option<Page> {
    let mut into = [0; PAGE_BYTES];
    matches!(pool.get(handle, Urgency::Demand, &mut into), Ok(Got::Here)).then_some(into)
}

#[test]
fn a_pool_is_found_with_every_page_that_is_named() {
    let vault = Vault::create_for(64).unwrap();
    let (mut pool, _refill) = Local::lasting(Config::default(), &vault);
    let mut handles: Vec<Handle> = (0..3000).map(|n| stored(pool.put(&page(n % 2500), None).unwrap())).collect();
    for (n, handle) in (10_000..).zip(handles.iter_mut().step_by(3)) {
        *handle = stored(pool.put(&page(n), Some(*handle)).unwrap());
    }
    let expected: Vec<Option<Page>> = handles.iter().map(|&handle| read(&mut pool, handle)).collect();
    std::mem::forget(pool);

    let vault = again(&vault);
    // Who takes over may be killed as well, before it has counted all.
    for counted in [0, 1000] {
        let (mut pool, _refill) = Local::take_over(Config::default(), &vault);
        handles[..counted].iter().for_each(|&handle| pool.count(handle));
        std::mem::forget(pool);
    }
    let (mut pool, _refill) = Local::take_over(Config::default(), &vault);
    // Every second reference was given up without anyone being told.
    let kept = || handles.iter().step_by(2).copied();
    assert!(kept().all(|handle| pool.has(handle)));
    kept().for_each(|handle| pool.count(handle));
    pool.all_counted();
    for (handle, expected) in handles.iter().zip(&expected).step_by(2) {
        assert_eq!(read(&mut pool, *handle), *expected);
    }
    assert_eq!(pool.status().stored_bytes, kept().count() as u64 * 4096);
    // It goes on as any pool does, and identical pages are found.
    let live_bytes = pool.status().stored_compressed_bytes;
    let twin = stored(pool.put(&expected[0].unwrap(), None).unwrap());
    assert_eq!(pool.status().stored_compressed_bytes, live_bytes);
    pool.free(twin);
    let new: Vec<Handle> = (20_000..23_000).map(|n| stored(pool.put(&page(n), None).unwrap())).collect();
    for (handle, expected) in handles.iter().zip(&expected).step_by(2) {
        assert_eq!(read(&mut pool, *handle), *expected);
    }
    kept().chain(new).for_each(|handle| pool.free(handle));
    assert_eq!(pool.status().stored_compressed_bytes, 0);
}

#[test]
fn what_makes_no_sense_is_not_kept() {
    let vault = Vault::create_for(64).unwrap();
    let (mut pool, _refill) = Local::lasting(Config::default(), &vault);
    let handles: Vec<Handle> = (0..100).map(|n| stored(pool.put(&page(n), None).unwrap())).collect();
    std::mem::forget(pool);
    let vault = again(&vault);
    let (slabs, _) = vault.slabs(Use::SLOTS);
    let word = |handle: Handle, at: usize| &slabs[0][(handle.bits() as usize - 1) * 3 + at];
    // In no segment; beyond a segment; between two objects; another's place; too long for its object.
    word(handles[0], 1).store(77 << 32, Relaxed);
    word(handles[1], 1).store(0xffff_ffff, Relaxed);
    word(handles[2], 1).fetch_add(1, Relaxed);
    word(handles[3], 1).store(word(handles[4], 1).load(Relaxed), Relaxed);
    word(handles[5], 2).store(1 << 32 | 5000, Relaxed);
    let (pool, _refill) = Local::take_over(Config::default(), &vault);
    let kept: Vec<bool> = handles[..7].iter().map(|&handle| pool.has(handle)).collect();
    assert_eq!(kept, [false, false, false, false, true, false, true]);
    assert!(!pool.has(Handle::from_bits(1_000_000).unwrap()));
    std::mem::forget(pool);
}

/// Whoever takes over looks at the last handle first: what it says there must not cost another its page.
#[test]
fn a_slot_that_is_half_vacated_takes_nobodys_place() {
    for stores in 0..=3 {
        let vault = Vault::create_for(64).unwrap();
        let (mut pool, _refill) = Local::lasting(Config::default(), &vault);
        let handles: Vec<Handle> = (1..=100).map(|n| stored(pool.put(&page(n), None).unwrap())).collect();
        std::mem::forget(pool);
        let vault = again(&vault);
        let (slabs, _) = vault.slabs(Use::SLOTS);
        let word = |handle: Handle, at: usize| &slabs[0][(handle.bits() as usize - 1) * 3 + at];
        // As a link it names a slot, as a place the start of a segment, where the first page is.
        let segment = u32::try_from(word(handles[0], 1).load(Relaxed) >> 32).unwrap();
        assert_eq!(word(handles[0], 1).load(Relaxed), u64::from(segment) << 32);
        for (at, value) in crate::slots::vacating(segment).into_iter().take(stores) {
            word(handles[99], at).store(value, Relaxed);
        }
        let (mut pool, _refill) = Local::take_over(Config::default(), &vault);
        assert!(stores > 0 || pool.has(handles[99]));
        for (n, &handle) in (1..100).zip(&handles) {
            assert!(pool.has(handle), "page {n} after {stores} stores");
            pool.count(handle);
        }
        pool.all_counted();
        assert!((1..100).zip(&handles).all(|(n, &handle)| read(&mut pool, handle) == Some(page(n))));
    }
}

#[test]
fn a_file_that_is_not_ours_is_refused() {
    let vault = Vault::create_for(8).unwrap();
    let open = || Vault::open(&vault.name_only().try_clone_to_owned().unwrap()).err();
    assert!(open().is_none());
    let head = vault.0.shared.words(0, 3);
    head[2].store(9, Relaxed);
    assert!(matches!(open(), Some(Foreign::Unknown)));
    head[1].store(VERSION + 1, Relaxed);
    assert!(matches!(open(), Some(Foreign::Version(version)) if version == VERSION + 1));
    head[0].store(0, Relaxed);
    assert!(matches!(open(), Some(Foreign::Unknown)));
    let short = Shared::create("short", 4096).unwrap();
    assert!(matches!(Vault::open(&short.name_only().try_clone_to_owned().unwrap()), Err(Foreign::Unknown)));
}

#[test]
fn what_agents_keep_gives_nothing_away() {
    let vault = Vault::create_for(8).unwrap();
    let name = File::from(vault.name_only().try_clone_to_owned().unwrap());
    assert_eq!(name.metadata().unwrap().mode() & 0o777, 0o600);
    assert!(name.read_at(&mut [0], 0).is_err() && name.write_at(&[0], 0).is_err() && name.set_len(0).is_err());
}

#[test]
fn nobody_cuts_the_file_short() {
    let vault = Vault::create_for(8).unwrap();
    let file = File::from(vault.0.shared.opened_anew().unwrap());
    for bytes in [0, file.metadata().unwrap().len() + 4096] {
        assert_eq!(file.set_len(bytes).unwrap_err().kind(), ErrorKind::PermissionDenied, "{bytes}");
    }
    // One that could be is none of ours, whatever is in it.
    let another = File::from(memfd_create(NAME, MemfdFlags::ALLOW_SEALING).unwrap());
    another.set_len(file.metadata().unwrap().len()).unwrap();
    let mut head = [0; 24];
    file.read_exact_at(&mut head, 0).unwrap();
    another.write_all_at(&head, 0).unwrap();
    let another = OwnedFd::from(another);
    assert!(matches!(Vault::open(&another), Err(Foreign::Unknown)));
    fcntl_add_seals(&another, SealFlags::SHRINK).unwrap();
    assert!(Vault::open(&another).is_ok());
}

#[test]
fn sheets_are_found_with_their_numbers() {
    let vault = Vault::create_for(16).unwrap();
    let mut lasting = vault.lasting();
    assert!(lasting.sheets.is_empty());
    let sheets: Vec<Sheet> = (0..SHEETS + 1).map(|_| (lasting.more)().unwrap()).collect();
    sheets[SHEETS].number.store(5, Relaxed);
    sheets[SHEETS].entries[511].store(6, Relaxed);
    let found = again(&vault).lasting().sheets;
    let found: Vec<&Sheet> = found.iter().filter(|sheet| sheet.number.load(Relaxed) > 0).collect();
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].number.load(Relaxed), found[0].entries[511].load(Relaxed)), (5, 6));
}

#[test]
fn slabs_are_found_as_far_as_they_were_given_out() {
    let vault = Vault::create_for(12).unwrap();
    // Two in an extent.
    let of = Use::rows(100_000);
    let mut slabs = Slabs::new(&vault, of);
    for n in 1..=3 {
        slabs.take().unwrap()[99_999].store(n, Relaxed);
    }
    let last = |slabs: &[&'static [AtomicU64]]| slabs.iter().map(|slab| slab[99_999].load(Relaxed)).collect::<Vec<_>>();
    let (found, mut more) = again(&vault).slabs(of);
    assert_eq!(last(&found), [1, 2, 3]);
    assert!(vault.slabs(Use::striped_pages(100_000)).0.is_empty(), "those are something else");
    more.take().unwrap()[99_999].store(4, Relaxed);
    more.take().unwrap()[99_999].store(5, Relaxed);
    let (found, _) = vault.slabs(of);
    assert_eq!(last(&found), [1, 2, 3, 4, 5]);
    // Where nobody has said how many, all count.
    (FIXED..12).for_each(|extent| vault.record(extent)[1].store(0, Relaxed));
    assert_eq!(last(&vault.slabs(of).0), [1, 2, 3, 4, 5, 0]);
}

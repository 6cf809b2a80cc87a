//! Cold pages in a file, and what happens when the file takes no more.

mod common;

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use common::{Client, LISTEN, MIB, eventually, page, start};
use spillway_server::{Config, Error, Limits, Server, SpillConfig};
use spillway_wire::Key;
use spillway_wire::answer::PageStatus;

fn key(index: u32) -> Key {
    Key { region: 1, index }
}

fn path(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("spillway-spill-{name}-{}", std::process::id()))
}

fn config(path: PathBuf, bytes: u64) -> Config {
    config_of(4 * MIB, path, bytes)
}

fn config_of(memory_bytes: u64, path: PathBuf, bytes: u64) -> Config {
    let mut config = Config::new(LISTEN.into(), memory_bytes);
    config.spill = Some(SpillConfig { path, bytes });
    config
}

/// Puts a page as often as it is declined: the disk may be busy for a while.
fn put(client: &mut Client, at: u32) -> bool {
    put_within(client, at, Duration::from_secs(20))
}

fn put_within(client: &mut Client, at: u32, patience: Duration) -> bool {
    let begun = Instant::now();
    loop {
        if client.put(&[(key(at), page(at.into()))]) == [PageStatus::Ok] {
            return true;
        }
        if begun.elapsed() > patience {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn cold_pages_leave_and_come_back() {
    leave_and_come_back("back", false);
}

#[test]
fn cold_pages_leave_and_come_back_compressed() {
    leave_and_come_back("packed", true);
}

fn leave_and_come_back(name: &str, compress: bool) {
    let path = path(name);
    let server = start(Config { compress, ..config(path.clone(), 64 * MIB) });
    assert!(!path.exists(), "the file has no name");
    let mut client = Client::new(&server, 1);
    const PAGES: u32 = 4096;
    assert!((0..PAGES).all(|at| put(&mut client, at)));
    let status = client.status();
    assert!(status.spilled_pages > 2000 && status.distinct_pages == PAGES.into(), "{status:?}");
    for first in (0..PAGES).step_by(64).rev() {
        let keys: Vec<Key> = (first..first + 64).map(key).collect();
        for (got, key) in client.get(&keys).into_iter().zip(&keys) {
            assert!(got == Ok(page(key.index.into())), "{key:?}");
        }
    }
    // Replaced and freed wherever they are.
    assert!((0..64).all(|at| put(&mut client, at)));
    assert_eq!(client.free(key(0), PAGES), PAGES);
    eventually("an empty file", || client.status().spilled_pages == 0);
    assert_eq!(client.status().distinct_pages, 0);
    assert!((0..PAGES).all(|at| put(&mut client, at)), "places are used again");
}

#[test]
fn the_end_of_a_large_tenant_keeps_nobody_waiting() {
    let lease = Duration::from_millis(100);
    let limits = Limits { lease, ..Limits::default() };
    let server = start(Config { limits, ..config_of(64 * MIB, path("end"), 256 * MIB) });
    let (mut large, mut other) = (Client::new(&server, 1), Client::new(&server, 2));
    const PAGES: u32 = 32 << 10;
    let mine: Vec<Key> = (0..64).map(key).collect();
    // The first to come are the first to leave.
    put_all(&mut other, 0..64);
    put_all(&mut large, 0..PAGES);
    assert!(other.status().spilled_pages > 64);
    drop(large);
    // A get that came during a purge in one go would be answered behind it.
    let (all, mut amid) = (other.status().pages, 0);
    for key in mine.iter().cycle() {
        assert!(other.get(&[*key])[0] == Ok(page(key.index.into())));
        let pages = other.status().pages;
        amid += u32::from(64 < pages && pages < all);
        if pages == 64 {
            break;
        }
    }
    assert!(amid > 1, "{amid} gets were answered amid the purge");
    // Theirs were in the file all the time, and nothing else is anywhere.
    eventually("the end of the purge", || {
        let status = other.status();
        assert_eq!((status.tenants, status.pages, status.tenant_pages), (1, 64, 64));
        (status.distinct_pages, status.spilled_pages, status.stored_bytes) == (64, 64, 0)
    });
    let mut anew = Client::new(&server, 1);
    assert!(!anew.welcome.existed && anew.get(&mine).iter().all(|got| *got == Err(PageStatus::Missing)));
}

/// Puts pages in batches, those that are declined again.
fn put_all(client: &mut Client, pages: std::ops::Range<u32>) {
    let mut left: Vec<_> = pages.rev().collect();
    let began = Instant::now();
    while !left.is_empty() {
        assert!(began.elapsed() < Duration::from_secs(60), "{} are declined", left.len());
        let batch: Vec<_> = (0..64).map_while(|_| left.pop()).collect();
        let statuses = client.put(&batch.iter().map(|at| (key(*at), page((*at).into()))).collect::<Vec<_>>());
        let declined = batch.iter().zip(statuses).filter(|(_, status)| *status != PageStatus::Ok);
        left.extend(declined.map(|(at, _)| *at).rev());
    }
}

#[test]
fn a_file_that_takes_no_more_loses_nothing() {
    // A file system of 2 MiB; needs root, as its mount does.
    let directory = path("disk");
    std::fs::create_dir(&directory).expect("made");
    let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=2m", "none"]).arg(&directory).status();
    if !mounted.is_ok_and(|status| status.success()) {
        std::fs::remove_dir(&directory).expect("removed");
        eprintln!("skipped: only root can mount a small file system");
        return;
    }
    let _unmount = Unmount(directory.clone());
    let server = start(config(directory.join("spill"), 64 * MIB));
    let mut client = Client::new(&server, 1);
    let stored = (0..).find(|at| !put_within(&mut client, *at, Duration::from_secs(1))).expect("it is full");
    assert!(stored > 1000, "{stored}: memory and the small disk");
    for at in 0..stored {
        assert!(client.get(&[key(at)])[0] == Ok(page(at.into())), "{at}");
    }
    assert!(client.get(&[key(stored)])[0] == Err(PageStatus::Missing));
    assert_eq!(client.free(key(0), stored), stored);
    assert!(put(&mut client, 0));
}

struct Unmount(PathBuf);

impl Drop for Unmount {
    fn drop(&mut self) {
        // Lazily: the server has the file open until it ends.
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
        let _ = std::fs::remove_dir(&self.0);
    }
}

#[test]
fn a_file_that_is_there_is_left_alone() {
    let path = path("there");
    std::fs::write(&path, "precious").expect("written");
    let refused = Server::bind(config(path.clone(), 64 * MIB)).err().expect("refused");
    assert!(matches!(refused, Error::Spill(..)) && refused.to_string().contains("does not exist"));
    assert_eq!(std::fs::read_to_string(&path).expect("still there"), "precious");
    std::fs::remove_file(&path).expect("removed");
}

//! Cold pages in a file, and what happens when the file takes no more.

mod common;

use std::path::PathBuf;
use std::process::Command;

use common::{Client, LISTEN, MIB, eventually, page, start};
use spillway_server::{Config, Error, Server, SpillConfig};
use spillway_wire::Key;
use spillway_wire::answer::PageStatus;

fn key(index: u32) -> Key {
    Key { region: 1, index }
}

fn path(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("spillway-spill-{name}-{}", std::process::id()))
}

fn config(path: PathBuf, bytes: u64) -> Config {
    let mut config = Config::new(LISTEN.into(), 4 * MIB);
    config.spill = Some(SpillConfig { path, bytes });
    config
}

/// Puts a page as often as it is declined, up to a limit.
fn put(client: &mut Client, at: u32) -> bool {
    for _ in 0..200 {
        if client.put(&[(key(at), page(at.into()))]) == [PageStatus::Ok] {
            return true;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    false
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
    let stored = (0..).find(|at| !put(&mut client, *at)).expect("it is full");
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

//! Cold pages in a file.
//!
//! The file has no name from the moment it is open: pages are soft state, and whatever way the server ends, nothing of them
//! stays behind. A place has room for a page, is written first, and read only as far as it was written, so
//! nobody sees what was in it before. When the file takes no more (a full disk, a limit, an error), nothing is lost: pages stay in DRAM and new ones are declined.
//! That is known only after [`Spill::sync`]: what was written until then may be in the kernel's cache alone, and be lost there when the disk fails.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard};

use spillway_core::PAGE_BYTES_U64;

#[derive(Default)]
struct Places {
    free: Vec<u32>,
    used: u32,
}

/// The file, and which places in it are free.
pub(crate) struct Spill {
    file: File,
    capacity: u32,
    places: Mutex<Places>,
    taken: AtomicU64,
    /// The last write, or wait for what was written, failed.
    refusing: AtomicBool,
}

impl Spill {
    /// Makes the file. It must not exist: nobody's data is overwritten.
    pub(crate) fn create(path: &Path, bytes: u64) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)?;
        std::fs::remove_file(path)?;
        Ok(Self::in_file(file, bytes))
    }

    pub(crate) fn in_file(file: File, bytes: u64) -> Self {
        let capacity = u32::try_from(bytes / PAGE_BYTES_U64).unwrap_or(u32::MAX / 2);
        Self { file, capacity, places: Mutex::default(), taken: AtomicU64::new(0), refusing: AtomicBool::new(false) }
    }

    pub(crate) fn capacity_pages(&self) -> u32 {
        self.capacity
    }

    /// Pages in the file.
    pub(crate) fn pages(&self) -> u64 {
        self.taken.load(Relaxed)
    }

    /// Pages that it would take.
    pub(crate) fn free_pages(&self) -> u64 {
        if self.refusing.load(Relaxed) { 0 } else { u64::from(self.capacity).saturating_sub(self.pages()) }
    }

    /// Writes what is stored of a page; where it is now. `Ok(None)` when there is no place.
    pub(crate) fn write(&self, bytes: &[u8]) -> io::Result<Option<u32>> {
        let Some(place) = self.take() else { return Ok(None) };
        match self.file.write_all_at(bytes, offset(place)) {
            Ok(()) => Ok(Some(place)),
            Err(error) => {
                self.refusing.store(true, Relaxed);
                self.free(place);
                Err(error)
            }
        }
    }

    /// Waits until the disk has what was written. An error means that it may lack anything since the last time.
    pub(crate) fn sync(&self) -> io::Result<()> {
        let synced = self.file.sync_data();
        self.refusing.store(synced.is_err(), Relaxed);
        synced
    }

    /// Reads what was written to a place.
    pub(crate) fn read(&self, place: u32, into: &mut [u8]) -> io::Result<()> {
        twice(|| self.file.read_exact_at(into, offset(place)))
    }

    /// Frees the place of a page.
    pub(crate) fn free(&self, place: u32) {
        self.places().free.push(place);
        self.taken.fetch_sub(1, Relaxed);
    }

    fn take(&self) -> Option<u32> {
        let mut places = self.places();
        let place = match places.free.pop() {
            Some(place) => place,
            None if places.used < self.capacity => {
                places.used += 1;
                places.used - 1
            }
            None => return None,
        };
        self.taken.fetch_add(1, Relaxed);
        Some(place)
    }

    fn places(&self) -> MutexGuard<'_, Places> {
        self.places.lock().expect("nothing panics with the places locked")
    }
}

fn offset(place: u32) -> u64 {
    u64::from(place) * PAGE_BYTES_U64
}

/// Tries again what has failed: some errors of disks, and of those behind a network above all, pass.
fn twice(mut read: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    read().or_else(|_| read())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_that_passes_is_passed_over() {
        let tried = |results: &[bool]| {
            let mut left = results.iter();
            let read = twice(|| if *left.next().unwrap() { Ok(()) } else { Err(io::ErrorKind::Other.into()) });
            (read.is_ok(), left.len())
        };
        assert_eq!(
            [&[true, true], &[false, true], &[false, false]].map(|results| tried(results)),
            [(true, 1), (true, 0), (false, 0)]
        );
    }
}

//! A store beside the file that a virtual machine's memory was saved to: the file's pages are there from the start, under
//! handles that say where, and never change.
//!
//! What a guest has only read is dropped and read again. What it has written goes to the store below, and so does all that
//! follows. The file must stay as it is while anyone's pages are in it. Reading it waits for its disk where the kernel does
//! not have it in memory.

use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use spillway_core::{PAGE_BYTES, Page};

use crate::{
    Completion, Got, HANDLE_BITS, Handle, Lent, Prepared, Preparer, Protection, Put, Status, Store, StoreError, Urgency,
};

/// Handles with this bit are the file's.
const MARK: u32 = 1 << (HANDLE_BITS - 1);
/// The store below takes no more pages than this, so that none of its handles has the mark: 2 TiB, with room for handles
/// that it keeps free.
const PAGES_MAX: u64 = MARK as u64 - (1 << 20);

/// A saved memory that is open.
#[derive(Clone, Debug)]
pub struct Image {
    file: Arc<File>,
    pages: u64,
}

impl Image {
    /// Opens the file at `path`.
    ///
    /// # Errors
    /// When it cannot be read, is no file, or is larger than handles reach (2 TiB).
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(io::Error::other("it is no regular file"));
        }
        let pages = metadata.len() / PAGE_BYTES as u64;
        if pages > PAGES_MAX {
            return Err(io::Error::other("it is larger than 2 TiB"));
        }
        // Guests soon want much of it. Without this, each page costs a wait for the disk.
        let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::WillNeed);
        Ok(Self { file: Arc::new(file), pages })
    }

    /// Its size, in whole pages.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// What a [`Snapshot`] of it calls its page `number`; `None` for one that it does not have.
    #[must_use]
    pub fn handle(&self, number: u64) -> Option<Handle> {
        let number = u32::try_from(number).ok().filter(|number| u64::from(*number) < self.pages)?;
        Handle::from_bits(MARK | number)
    }

    fn read(&self, handle: Handle, into: &mut Page) -> Result<(), StoreError> {
        let offset = u64::from(handle.bits() & !MARK) * PAGE_BYTES as u64;
        self.file.read_exact_at(into, offset).map_err(|_| StoreError::Lost)
    }
}

fn is_of_file(handle: Handle) -> bool {
    handle.bits() & MARK != 0
}

/// See the module's documentation.
pub struct Snapshot {
    inner: Box<dyn Store>,
    image: Image,
    /// To compare a page with what it was.
    was: Box<Page>,
}

impl Snapshot {
    /// `image` beside `inner`.
    #[must_use]
    pub fn new(inner: Box<dyn Store>, image: Image) -> Self {
        Self { inner, image, was: Box::new([0; PAGE_BYTES]) }
    }

    /// The previous copy, as far as the store below knows of it; or that the page is still what it was in the file.
    fn previous(&mut self, page: &Page, previous: Option<Handle>) -> Result<Option<Handle>, Put> {
        let Some(handle) = previous.filter(|handle| is_of_file(*handle)) else { return Ok(previous) };
        let is_same = self.image.read(handle, &mut self.was).is_ok() && *self.was == *page;
        if is_same { Err(Put::Unchanged(handle)) } else { Ok(None) }
    }

    fn has_room(&self) -> bool {
        self.inner.status().stored_bytes / (PAGE_BYTES as u64) < PAGES_MAX
    }
}

impl Store for Snapshot {
    fn put(&mut self, page: &Page, previous: Option<Handle>) -> Result<Put, StoreError> {
        match self.previous(page, previous) {
            Err(unchanged) => Ok(unchanged),
            Ok(_) if !self.has_room() => Err(StoreError::Full),
            Ok(previous) => self.inner.put(page, previous),
        }
    }

    fn preparer(&self) -> Option<Preparer> {
        self.inner.preparer()
    }

    fn lend(&mut self, handle: Handle, to: &mut Preparer) -> Option<Lent> {
        if is_of_file(handle) { None } else { self.inner.lend(handle, to) }
    }

    fn put_prepared(&mut self, page: &Page, known: &Prepared, previous: Option<Handle>) -> Result<Put, StoreError> {
        match self.previous(page, previous) {
            Err(unchanged) => Ok(unchanged),
            Ok(_) if !self.has_room() => Err(StoreError::Full),
            Ok(previous) => self.inner.put_prepared(page, known, previous),
        }
    }

    fn get(&mut self, handle: Handle, urgency: Urgency, into: &mut Page) -> Result<Got, StoreError> {
        if is_of_file(handle) {
            return self.image.read(handle, into).map(|()| Got::Here);
        }
        self.inner.get(handle, urgency, into)
    }

    fn share(&mut self, handle: Handle) -> Handle {
        if is_of_file(handle) { handle } else { self.inner.share(handle) }
    }

    fn free(&mut self, handle: Handle) {
        if !is_of_file(handle) {
            self.inner.free(handle);
        }
    }

    fn status(&self) -> Status {
        self.inner.status()
    }

    fn protection(&self) -> Option<Protection> {
        self.inner.protection()
    }

    fn burdens(&mut self, handles: &[Handle]) -> u64 {
        let kept = |&(_, handle): &(usize, &Handle)| !is_of_file(*handle);
        handles
            .iter()
            .enumerate()
            .filter(kept)
            .fold(0, |found, (at, &handle)| found | self.inner.burdens(&[handle]) << at)
    }

    fn has_burdens(&mut self) -> bool {
        self.inner.has_burdens()
    }

    fn tidy(&mut self) -> bool {
        self.inner.tidy()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.inner.descriptor()
    }

    fn flush(&mut self) {
        self.inner.flush();
    }

    fn progress(&mut self, done: &mut dyn FnMut(Completion<'_>)) {
        self.inner.progress(done);
    }

    fn accepts(&self) -> bool {
        self.inner.accepts()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local::{Config, Local};

    /// A file of so many pages, each full of its number plus one.
    fn image(name: &str, pages: u8) -> Image {
        let path = std::env::temp_dir().join(format!("spillway-image-{name}-{}", std::process::id()));
        let bytes: Vec<u8> = (1..=pages).flat_map(|number| [number; PAGE_BYTES]).collect();
        std::fs::write(&path, bytes).unwrap();
        let image = Image::open(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        image
    }

    /// The refill thread's other half, which the pool needs to be given memory.
    fn snapshot(image: &Image) -> (Snapshot, crate::Refill) {
        let (local, mut refill) = Local::new(Config::default());
        refill.top_up();
        (Snapshot::new(Box::new(local), image.clone()), refill)
    }

    #[test]
    fn pages_of_the_file_are_there_from_the_start() {
        let image = image("start", 3);
        let (mut store, _refill) = snapshot(&image);
        assert_eq!((image.pages(), image.handle(3)), (3, None));
        let mut page = [0; PAGE_BYTES];
        for number in 0..3_u8 {
            let handle = image.handle(number.into()).unwrap();
            assert_eq!(store.get(handle, Urgency::Demand, &mut page), Ok(Got::Here));
            assert_eq!(page, [number + 1; PAGE_BYTES]);
            assert_eq!(store.share(handle), handle);
            store.free(handle);
        }
        assert_eq!(store.status().stored_bytes, 0);
    }

    #[test]
    fn only_what_was_written_goes_below() {
        let image = image("written", 2);
        let (mut store, _refill) = snapshot(&image);
        let first = image.handle(0).unwrap();
        assert_eq!(store.put(&[1; PAGE_BYTES], Some(first)), Ok(Put::Unchanged(first)));
        assert_eq!(store.status().stored_bytes, 0);

        let Ok(Put::Stored(written)) = store.put(&[9; PAGE_BYTES], Some(first)) else { panic!("it is another") };
        assert!(!is_of_file(written) && store.status().stored_bytes == PAGE_BYTES as u64);
        let mut page = [0; PAGE_BYTES];
        assert_eq!(store.get(written, Urgency::Demand, &mut page), Ok(Got::Here));
        assert_eq!(page, [9; PAGE_BYTES]);
        // And what follows is compared with that.
        assert_eq!(store.put(&[9; PAGE_BYTES], Some(written)), Ok(Put::Unchanged(written)));
        store.free(written);
        assert_eq!(store.status().stored_bytes, 0);
        // The file is what it was.
        assert_eq!(store.get(first, Urgency::Demand, &mut page), Ok(Got::Here));
        assert_eq!(page, [1; PAGE_BYTES]);
    }

    #[test]
    fn a_file_that_was_cut_short_has_lost_its_pages() {
        let image = image("short", 2);
        rustix::fs::ftruncate(&*writable(&image), 4096).unwrap();
        let (mut store, _refill) = snapshot(&image);
        let mut page = [0; PAGE_BYTES];
        assert_eq!(store.get(image.handle(1).unwrap(), Urgency::Demand, &mut page), Err(StoreError::Lost));
        // Nor is a page taken for what cannot be read.
        let put = store.put(&[0; PAGE_BYTES], Some(image.handle(1).unwrap()));
        assert!(matches!(put, Ok(Put::Stored(_))), "{put:?}");
    }

    /// The same file, which has no name any more.
    fn writable(image: &Image) -> Box<File> {
        use std::os::fd::AsRawFd;
        let path = format!("/proc/self/fd/{}", image.file.as_raw_fd());
        Box::new(File::options().write(true).open(path).unwrap())
    }
}

//! `file:`, a file or block device as the pool: flash, usually.
//!
//! A handle's number is the page's place in the file. Reads and writes go past the kernel's page cache (`O_DIRECT`), many at
//! a time (io_uring). Nothing in the file outlives the process: the table is in memory, and so are the checksums.

use std::fs::{File as Disk, OpenOptions};
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, OFlags};
use spillway_codec::Compression;
use spillway_core::size::Bytes;
use spillway_core::{PAGE_BYTES, Page};

use crate::hash::PageHash;
use crate::pool::{OpenError, OpenErrorKind};
use crate::remote::handles::{Handles, Slot, State};
use crate::sys::{PageRing, Transfer};
use crate::{Completion, Got, HANDLE_BITS, Handle, Prepared, Preparer, Put, Status, Store, StoreError, Urgency};

/// The smallest file.
pub const SIZE_MIN_BYTES: u64 = 1 << 20;
/// Transfers at a time: a fast NVMe device reaches its speed at 128.
const BUFFERS: u16 = 256;
/// Buffers that writes leave to reads.
const BUFFERS_FOR_READS: usize = 64;
/// Times that a page is read before it is given up.
const READS_MAX: u8 = 3;

/// How long a pager that is ending may still hold the file: the kernel lets go of transfers some time after their process.
const LOCK_PATIENCE: Duration = Duration::from_secs(5);
/// How often it is looked at meanwhile.
const LOCK_TICK: Duration = Duration::from_millis(20);

#[derive(Clone, Copy)]
struct Op {
    handle: Handle,
    transfer: Transfer,
    tries: u8,
}

/// A file as the pool.
pub struct File {
    ring: PageRing,
    hash: PageHash,
    handles: Handles,
    /// What each buffer is used for.
    ops: Vec<Option<Op>>,
    free: Vec<u16>,
    /// Gets that wait for a buffer.
    waiting: std::collections::VecDeque<Handle>,
    pages: u64,
    pages_max: u64,
}

/// Op of a get that has no buffer yet.
const NO_BUFFER: u16 = u16::MAX;

impl File {
    /// Opens or makes the file. Returns what the user should know beside it.
    ///
    /// # Errors
    /// When it cannot be opened, another pager uses it, or there is no room for `size_bytes`.
    pub fn open(path: &Path, size_bytes: u64) -> Result<(Self, Option<String>), OpenError> {
        Self::open_within(path, size_bytes, LOCK_PATIENCE)
    }

    fn open_within(path: &Path, size_bytes: u64, patience: Duration) -> Result<(Self, Option<String>), OpenError> {
        let fail = |kind, text: String| OpenError { server: path.display().to_string(), kind, text };
        let (disk, direct) = open_alone(path, patience).map_err(|error| {
            if is_used(&error) {
                let text = "another pager or program uses it: name another file, or let that one end first";
                fail(OpenErrorKind::Unsuitable, text.into())
            } else {
                let text = format!("it cannot be opened: {error}; name a file that may be written");
                fail(OpenErrorKind::Unreachable, text)
            }
        })?;
        if let Some(text) = exposure(&disk, path).map_err(|error| fail(OpenErrorKind::System, error.to_string()))? {
            return Err(fail(OpenErrorKind::Unsuitable, text));
        }
        reserve(&disk, size_bytes).map_err(|error| {
            let text = format!("there is no room for {}: {error}; give a smaller size=", Bytes(size_bytes));
            fail(OpenErrorKind::Full, text)
        })?;
        let ring = PageRing::new(disk, BUFFERS).map_err(|error| {
            let text = format!("io_uring is not to be had: {error}; allow it: `sysctl kernel.io_uring_disabled=0`");
            fail(OpenErrorKind::System, text)
        })?;
        let note = (!direct).then(|| {
            format!(
                "pool {}: this file system has no direct access, so pages are also in the kernel's cache",
                path.display()
            )
        });
        let file = Self {
            ring,
            hash: PageHash::sole_evidence(),
            handles: Handles::new(),
            ops: vec![None; usize::from(BUFFERS)],
            free: (0..BUFFERS).rev().collect(),
            waiting: std::collections::VecDeque::with_capacity(1024),
            pages: 0,
            pages_max: (size_bytes / PAGE_BYTES as u64).min((1 << HANDLE_BITS) - 8192),
        };
        Ok((file, note))
    }

    fn start(&mut self, buffer: u16, handle: Handle, transfer: Transfer, tries: u8) {
        self.ops[usize::from(buffer)] = Some(Op { handle, transfer, tries });
        self.handles.slot_mut(handle).op = buffer;
        self.ring.queue(transfer, buffer, u64::from(handle.bits() - 1));
    }

    fn recycle(&mut self, handle: Handle) {
        self.handles.recycle(handle);
        self.pages -= 1;
    }

    fn end(&mut self, buffer: u16, result: io::Result<u32>, done: &mut dyn FnMut(Completion<'_>)) {
        let op = self.ops[usize::from(buffer)].take().expect("transfers have a purpose");
        let whole = result.is_ok_and(|bytes| bytes as usize == PAGE_BYTES);
        let handle = op.handle;
        if self.handles.is_abandoned(handle) {
            self.recycle(handle);
        } else if op.transfer == Transfer::Write {
            self.written(handle, whole, done);
        } else {
            let page = self.ring.buffer(buffer);
            let intact = whole && self.hash.of(page) == self.handles.slot(handle).checksum;
            if !intact && op.tries < READS_MAX {
                return self.start(buffer, handle, Transfer::Read, op.tries + 1);
            }
            self.handles.slot_mut(handle).state = if intact { State::Kept } else { State::Lost };
            let error = if whole { StoreError::Corrupt } else { StoreError::Lost };
            done(Completion::Got { handle, page: if intact { Ok(page) } else { Err(error) } });
        }
        self.free.push(buffer);
    }

    fn written(&mut self, handle: Handle, whole: bool, done: &mut dyn FnMut(Completion<'_>)) {
        if whole {
            self.handles.slot_mut(handle).state = State::Kept;
            return done(Completion::Put { handle, result: Ok(()) });
        }
        self.handles.release_all(handle);
        self.recycle(handle);
        done(Completion::Put { handle, result: Err(StoreError::Unavailable) });
    }

    fn read_waiting(&mut self) {
        while !self.free.is_empty()
            && let Some(handle) = self.waiting.pop_front()
        {
            let slot = *self.handles.slot(handle);
            if slot.state != State::Getting || slot.op != NO_BUFFER {
                continue;
            }
            let buffer = self.free.pop().expect("just seen");
            self.start(buffer, handle, Transfer::Read, 1);
        }
    }

    /// [`Store::put`] of a page with this hash.
    fn put_hashed(&mut self, page: &Page, checksum: u64, previous: Option<Handle>) -> Result<Put, StoreError> {
        if let Some(previous) = previous {
            let slot = *self.handles.get_mut(previous);
            if slot.checksum == checksum && slot.state != State::Lost {
                let pending = slot.state == State::Putting;
                return Ok(if pending { Put::Pending(previous) } else { Put::Unchanged(previous) });
            }
        }
        if self.pages == self.pages_max {
            return Err(StoreError::Full);
        }
        if !self.accepts() {
            return Err(StoreError::Unavailable);
        }
        let slot = Slot::putting(checksum, 0);
        let handle = self.handles.insert(slot).ok_or(StoreError::Full)?;
        self.pages += 1;
        let buffer = self.free.pop().expect("it accepts");
        *self.ring.buffer(buffer) = *page;
        self.start(buffer, handle, Transfer::Write, 1);
        if let Some(previous) = previous {
            self.free(previous);
        }
        Ok(Put::Pending(handle))
    }
}

/// Whether another has locked the file, or has the device to itself.
fn is_used(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::ResourceBusy)
}

/// Opens the file for this pager alone: two would write over each other's pages. The lock ends with whoever holds it.
fn open_alone(path: &Path, patience: Duration) -> io::Result<(Disk, bool)> {
    let until = Instant::now() + patience;
    loop {
        let opened = open(path).and_then(|(disk, direct)| {
            rustix::fs::flock(&disk, FlockOperation::NonBlockingLockExclusive)?;
            Ok((disk, direct))
        });
        match opened {
            Err(error) if is_used(&error) && Instant::now() < until => std::thread::sleep(LOCK_TICK),
            opened => return opened,
        }
    }
}

fn open(path: &Path) -> io::Result<(Disk, bool)> {
    // A device may have several names, and may be mounted: this flag keeps all others off it that ask for it, as mounts do.
    let is_device = std::fs::metadata(path).is_ok_and(|found| found.file_type().is_block_device());
    let alone = if is_device { OFlags::EXCL } else { OFlags::empty() };
    let flags = |flags: OFlags| i32::try_from(flags.bits()).expect("small flags");
    let mut options = OpenOptions::new();
    // Owner only: it holds programs' memory.
    options.read(true).write(true).create(!is_device).truncate(false).mode(0o600).custom_flags(flags(alone));
    match options.clone().custom_flags(flags(alone | OFlags::DIRECT)).open(path) {
        Ok(disk) => Ok((disk, true)),
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok((options.open(path)?, false)),
        Err(error) => Err(error),
    }
}

/// Who else could read a file that was there before, and what to do about it. Who may read a device is its administrator's to say.
fn exposure(disk: &Disk, path: &Path) -> io::Result<Option<String>> {
    let meta = disk.metadata()?;
    if meta.file_type().is_block_device() {
        return Ok(None);
    }
    if meta.uid() != rustix::process::geteuid().as_raw() {
        let text =
            "it belongs to another user, who could read the program's memory in it: name a file that does not exist";
        return Ok(Some(text.into()));
    }
    let others = meta.mode() & 0o077 != 0;
    Ok(others.then(|| {
        format!("others may read or write it, and it is to hold the program's memory: `chmod 600 {}`", path.display())
    }))
}

/// Makes sure that there is room. Of a block device, that it is large enough.
fn reserve(disk: &Disk, size_bytes: u64) -> io::Result<()> {
    if disk.metadata()?.file_type().is_block_device() {
        let device_bytes = rustix::fs::seek(disk, rustix::fs::SeekFrom::End(0))?;
        return if device_bytes < size_bytes { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) };
    }
    Ok(rustix::fs::fallocate(disk, rustix::fs::FallocateFlags::empty(), 0, size_bytes)?)
}

impl Store for File {
    fn put(&mut self, page: &Page, previous: Option<Handle>) -> Result<Put, StoreError> {
        self.put_hashed(page, self.hash.of(page), previous)
    }

    fn preparer(&self) -> Option<Preparer> {
        Some(Preparer::new(self.hash.clone(), Compression::None, 0))
    }

    fn put_prepared(&mut self, page: &Page, known: &Prepared, previous: Option<Handle>) -> Result<Put, StoreError> {
        self.put_hashed(page, known.hash().unwrap_or_else(|| self.hash.of(page)), previous)
    }

    fn get(&mut self, handle: Handle, _urgency: Urgency, into: &mut Page) -> Result<Got, StoreError> {
        let slot = *self.handles.get_mut(handle);
        match slot.state {
            State::Putting => {
                *into = *self.ring.written(slot.op);
                Ok(Got::Here)
            }
            State::Kept => {
                let slot = self.handles.slot_mut(handle);
                (slot.state, slot.op) = (State::Getting, NO_BUFFER);
                self.waiting.push_back(handle);
                self.read_waiting();
                Ok(Got::Pending)
            }
            State::Getting => Ok(Got::Pending),
            _ => Err(StoreError::Lost),
        }
    }

    fn share(&mut self, handle: Handle) -> Handle {
        self.handles.share(handle);
        handle
    }

    fn free(&mut self, handle: Handle) {
        if !self.handles.release(handle) {
            return;
        }
        let slot = *self.handles.slot(handle);
        let in_flight = matches!(slot.state, State::Putting | State::Getting) && slot.op != NO_BUFFER;
        if !in_flight {
            self.waiting.retain(|waiting| *waiting != handle);
            self.recycle(handle);
        }
    }

    fn status(&self) -> Status {
        Status {
            stored_bytes: self.handles.references * PAGE_BYTES as u64,
            stored_compressed_bytes: self.pages * PAGE_BYTES as u64,
            memory_bytes: self.handles.memory_bytes() + u64::from(BUFFERS) * PAGE_BYTES as u64,
        }
    }

    fn tidy(&mut self) -> bool {
        self.handles.top_up()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.ring.descriptor())
    }

    fn flush(&mut self) {
        self.ring.submit();
    }

    fn progress(&mut self, done: &mut dyn FnMut(Completion<'_>)) {
        while let Some((buffer, result)) = self.ring.ended() {
            self.end(buffer, result, done);
        }
        self.read_waiting();
        self.flush();
    }

    fn accepts(&self) -> bool {
        self.free.len() > BUFFERS_FOR_READS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_pagers_do_not_share_a_file() {
        let path = std::env::temp_dir().join(format!("spillway-alone-{}", std::process::id()));
        let open = |patience| File::open_within(&path, SIZE_MIN_BYTES, patience).map(drop);
        let (file, _) = File::open(&path, SIZE_MIN_BYTES).unwrap();
        let refusal = open(Duration::from_millis(50)).unwrap_err();
        assert_eq!(refusal.kind, OpenErrorKind::Unsuitable);
        assert!(refusal.to_string().contains("another pager"), "{refusal}");
        // One that ends is waited for.
        let ends = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(100));
            drop(file);
        });
        assert_eq!(open(LOCK_PATIENCE), Ok(()));
        ends.join().unwrap();
        assert_eq!(open(Duration::ZERO), Ok(()));
        std::fs::remove_file(&path).unwrap();
    }
}

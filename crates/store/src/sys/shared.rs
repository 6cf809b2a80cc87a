//! A memory file, mapped for as long as this process lives.
//!
//! It is its maker's alone, and its length is for ever: who reaches beyond the end of a file that is mapped is ended by the kernel.
//! The mapping is never taken back, so what is handed out of it is good for ever. Words are atomics: whoever else has the
//! file may write them at any time. Bytes are handed out to one owner at a time ([`Area::bytes`]).

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::AtomicU64;

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{
    FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags, fallocate, fchmod, fcntl_add_seals, fcntl_get_seals,
    memfd_create,
};

/// See the module's documentation.
pub(crate) struct Shared {
    file: File,
    name_only: OwnedFd,
    start: *mut u8,
    bytes: usize,
}

// SAFETY: the pointer is that of a mapping which nobody ever unmaps; what is reached through it is shared by its own rules.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    /// A new file of zeros, which takes memory only where it is written to.
    pub(crate) fn create(name: &str, bytes: usize) -> io::Result<Self> {
        let file = File::from(memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
        file.set_len(bytes as u64)?;
        fchmod(&file, Mode::RUSR | Mode::WUSR)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Self::map(file, bytes)
    }

    /// A file that another process has made and given a name to ([`Shared::name_only`]).
    ///
    /// # Errors
    /// EACCES if it is another user's, EINVAL if it is no memory file, `InvalidData` if its length may still change.
    pub(crate) fn open(fd: &OwnedFd) -> io::Result<Self> {
        let file = File::from(opened(fd, OFlags::RDWR)?);
        if !fcntl_get_seals(&file)?.contains(SealFlags::SHRINK) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let bytes = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
        Self::map(file, bytes)
    }

    fn map(file: File, bytes: usize) -> io::Result<Self> {
        let map: MmapRaw = MmapOptions::new().len(bytes).map_raw(&file)?;
        let start = map.as_mut_ptr();
        std::mem::forget(map);
        let name_only = opened(&file, OFlags::PATH)?;
        Ok(Self { file, name_only, start, bytes })
    }

    /// Bytes of it.
    pub(crate) fn len(&self) -> usize {
        self.bytes
    }

    /// What keeps the file alive, and by which its owner can open it: nothing can be read or written through it (`O_PATH`).
    pub(crate) fn name_only(&self) -> BorrowedFd<'_> {
        self.name_only.as_fd()
    }

    /// The user who made it.
    pub(crate) fn owner(&self) -> io::Result<u32> {
        Ok(self.file.metadata()?.uid())
    }

    /// Another open file of it: locks belong to one such.
    pub(crate) fn opened_anew(&self) -> io::Result<OwnedFd> {
        opened(&self.file, OFlags::RDWR)
    }

    /// Words of it.
    ///
    /// # Panics
    /// When they are not all in the file, or not aligned.
    pub(crate) fn words(&self, at: usize, count: usize) -> &'static [AtomicU64] {
        let end = count.checked_mul(8).and_then(|bytes| bytes.checked_add(at));
        assert!(at.is_multiple_of(8) && end.is_some_and(|end| end <= self.bytes), "within the file");
        // SAFETY: in the mapping, which is never unmapped and starts on a page; any bits are atomics, and areas that are handed
        // out as bytes are not handed out as words (`vault.rs` divides the file).
        unsafe { std::slice::from_raw_parts(self.start.add(at).cast(), count) }
    }

    /// A part of it, for one owner. Its caller sees that nobody else gets these bytes.
    pub(crate) fn area(&self, at: usize, len: usize) -> Area {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.bytes), "within the file");
        // SAFETY: the offset is within the mapping.
        Area { start: unsafe { self.start.add(at) }, len }
    }

    /// Gives the memory of a part back: it reads as zeros from then on.
    pub(crate) fn clear(&self, at: usize, len: usize) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&self.file, flags, at as u64, len as u64).map_err(Into::into)
    }
}

fn opened(file: &impl AsRawFd, how: OFlags) -> io::Result<OwnedFd> {
    Ok(rustix::fs::open(format!("/proc/self/fd/{}", file.as_raw_fd()), how | OFlags::CLOEXEC, Mode::empty())?)
}

/// A part of such a file, which has one owner.
pub(crate) struct Area {
    start: *mut u8,
    len: usize,
}

// SAFETY: the bytes have one owner, who may be any thread.
unsafe impl Send for Area {}
// SAFETY: sharing the owner shares no more than reading.
unsafe impl Sync for Area {}

impl Area {
    pub(crate) fn start(&self) -> *mut u8 {
        self.start
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: in a mapping that is never unmapped; writing takes `&mut self`.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and this is the one owner.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

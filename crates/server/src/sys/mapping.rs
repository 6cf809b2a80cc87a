//! Anonymous memory of a fixed size, all zeros at first, that costs DRAM only where it was touched.

use std::io;
use std::ptr::NonNull;

/// A private mapping, unmapped when dropped.
pub(crate) struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread; who may read or write which part of it is the business
// of those who use `start`.
unsafe impl Send for Mapping {}
// SAFETY: as above; `&Mapping` only gives the address away.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps at least `bytes`, in huge pages where the kernel has some to give.
    pub(crate) fn new(bytes: usize) -> io::Result<Self> {
        let bytes = bytes.max(1).next_multiple_of(2 << 20);
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // Not reserved: most of a large arena may never be touched.
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: advice on the whole of our own mapping, which does not change its content. Refusals only cost speed
        // (huge pages) or put other people's pages into core dumps.
        unsafe {
            libc::madvise(start, bytes, libc::MADV_HUGEPAGE);
            libc::madvise(start, bytes, libc::MADV_DONTDUMP);
        }
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, bytes })
    }

    /// The first byte; aligned to a page at least.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// How many bytes there are.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: ours, and whoever borrowed from it has ended: references are tied to the owner's life.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

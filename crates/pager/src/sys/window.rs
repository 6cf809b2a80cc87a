//! Our own mapping of a file of memory, which nothing here ever reads or writes through.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;

use rustix::fs::{FallocateFlags, SeekFrom, fallocate, fstatfs, seek};
use spillway_core::{Address, PAGE_BYTES_U64, Span};

use super::fd::checked;

/// See the module's documentation. It is not locked, forked children do not have it, and it holds no huge pages.
#[derive(Debug)]
pub struct Window {
    base: NonNull<libc::c_void>,
    bytes: usize,
}

// SAFETY: an address and a size, which belong to the process and not to a thread.
unsafe impl Send for Window {}

impl Window {
    /// Maps the first `pages` pages of `file`.
    ///
    /// # Errors
    /// As the kernel says.
    pub fn of(file: &File, pages: u64) -> io::Result<Self> {
        let bytes =
            usize::try_from(Span::of_pages(Address(0), pages).end.0).map_err(|_| io::ErrorKind::InvalidInput)?;
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_NORESERVE);
        // SAFETY: a new mapping, wherever the kernel puts it.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, kind, file.as_raw_fd(), 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let window = Self { base: NonNull::new(base).ok_or(io::ErrorKind::InvalidData)?, bytes };
        // SAFETY: all of our own mapping, of which nothing changes but what the kernel does with it. What we lock from now on
        // (`mlockall`) has locked it, and locked pages are to stay where they are.
        let answer = unsafe {
            libc::madvise(base, bytes, libc::MADV_DONTFORK);
            libc::madvise(base, bytes, libc::MADV_NOHUGEPAGE);
            libc::munlock(base, bytes)
        };
        checked(answer.into()).map(|_| window)
    }

    /// Where it is.
    pub fn span(&self) -> Span {
        let start = Address(self.base.as_ptr().addr() as u64);
        Span { start, end: Address(start.0 + self.bytes as u64) }
    }

    /// Has pages that are in the file mapped here, too; holes become pages of zeros. Only where nobody is asked for missing pages.
    ///
    /// # Errors
    /// As `madvise` (`MADV_POPULATE_READ`, Linux 5.14), and for what is not in the window.
    pub fn populate(&self, span: Span) -> io::Result<()> {
        if self.span().intersect(span) != Some(span) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let at = span.start.0 as *mut libc::c_void;
        let bytes = usize::try_from(span.end.0 - span.start.0).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: a part of our own mapping, to which there are no references.
        checked(unsafe { libc::madvise(at, bytes, libc::MADV_POPULATE_READ) }.into()).map(drop)
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: our own mapping, of this size, to which there are no references.
        unsafe { libc::munmap(self.base.as_ptr(), self.bytes) };
    }
}

/// The pages of a file of memory that are there, from `start` on: where they begin and where they end; none behind the last.
pub fn next_data(file: &File, start: u64) -> Option<(u64, u64)> {
    let data = seek(file, SeekFrom::Data(start)).ok()?;
    Some((data, seek(file, SeekFrom::Hole(data)).ok()?))
}

/// As [`next_data`], one page of it.
pub fn next_page_of_data(file: &File, start: u64) -> Option<(u64, u64)> {
    let data = seek(file, SeekFrom::Data(start)).ok()?;
    Some((data, (data + 1).next_multiple_of(PAGE_BYTES_U64)))
}

/// Takes pages out of a file of memory, whoever has them mapped.
///
/// # Errors
/// EPERM where the file is sealed against that.
pub fn punch(file: &File, start: u64, bytes: u64) -> io::Result<()> {
    Ok(fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, start, bytes)?)
}

/// Whether it is memory that can be had and given back a small page at a time (`tmpfs`), and not of huge pages.
pub fn is_memory(file: &File) -> bool {
    fstatfs(file).is_ok_and(|about| about.f_type == libc::TMPFS_MAGIC)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt as _;

    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    fn memory(pages: u64) -> File {
        let file = File::from(memfd_create(c"window", MemfdFlags::CLOEXEC).expect("memory"));
        file.set_len(pages * 4096).expect("a length");
        file
    }

    #[test]
    fn what_is_there_is_found_and_can_be_taken_out() {
        let file = memory(8);
        assert!(is_memory(&file) && !is_memory(&File::open("/proc/self/exe").expect("ours")));
        assert_eq!(next_data(&file, 0), None);
        file.write_all_at(&[7; 3 * 4096], 2 * 4096).expect("written");
        assert_eq!(next_data(&file, 0), Some((2 * 4096, 5 * 4096)));
        punch(&file, 3 * 4096, 4096).expect("punched");
        assert_eq!(next_data(&file, 0), Some((2 * 4096, 3 * 4096)));
        assert_eq!(next_data(&file, 3 * 4096), Some((4 * 4096, 5 * 4096)));
        let window = Window::of(&file, 8).expect("mapped");
        let span = window.span();
        assert_eq!(span.pages(), 8);
        window.populate(Span::of_pages(span.start, 2)).expect("it is ours");
        assert_eq!(next_data(&file, 0), Some((0, 3 * 4096)));
        assert!(window.populate(Span::of_pages(span.end, 1)).is_err());
        assert!(punch(&file, u64::MAX, 4096).is_err());
    }
}

//! Memory for the workload, and swap for the comparison: system calls that the standard library lacks.

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::AtomicU64;

/// Our swap is used before any other of this machine (`SWAP_FLAG_PREFER` and the highest priority).
const FIRST_OF_ALL: libc::c_int = 0x8000 | 0x7FFF;

/// Private anonymous memory, all zeros, in small pages: so many words, until the process ends.
pub(super) fn words(count: usize) -> io::Result<&'static [AtomicU64]> {
    let bytes = count.checked_mul(size_of::<AtomicU64>()).ok_or(io::ErrorKind::OutOfMemory)?;
    let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping that nothing else refers to, at an address of the kernel's choice.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, kind, -1, 0) };
    if at == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the range is the mapping above; the advice changes no contents, and it is no error where there are no huge pages.
    unsafe { libc::madvise(at, bytes, libc::MADV_NOHUGEPAGE) };
    // SAFETY: the mapping has `count` words, is aligned to a page, is never unmapped, and zeros are valid words. Threads share
    // it through atomics alone.
    Ok(unsafe { std::slice::from_raw_parts(at.cast(), count) })
}

/// Has the kernel swap to this device or file before any other.
pub(super) fn swap_on(path: &Path) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: the path is a string that ends with a zero and outlives the call.
    answer(unsafe { libc::swapon(path.as_ptr(), FIRST_OF_ALL) })
}

/// Ends that; what was swapped out comes home first.
pub(super) fn swap_off(path: &Path) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: as above.
    answer(unsafe { libc::swapoff(path.as_ptr()) })
}

fn answer(done: libc::c_int) -> io::Result<()> {
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

//! `/proc/PID/pagemap` and its PAGEMAP_SCAN call (Linux 6.7, `fs/proc/task_mmu.c`).

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::FileExt;

use spillway_core::{Address, Span};

use super::fd::checked;
use crate::procfs;

const IOC_SCAN: u64 = 0xC060_6610;
const PRESENT: u64 = 1 << 3;
const SWAPPED: u64 = 1 << 4;
/// Of an entry of the file: no other process has mapped the page (4.2).
const EXCLUSIVE: u64 = 1 << 56;

#[repr(C)]
struct ScanArgument {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vector: u64,
    vector_len: u64,
    pages_max: u64,
    inverted: u64,
    all_of: u64,
    any_of: u64,
    returned: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Found {
    start: u64,
    end: u64,
    categories: u64,
}

const _: () = assert!(size_of::<ScanArgument>() == 0x60 && size_of::<Found>() == 24);

/// Ranges returned by one call: the kernel gathers them before it answers, so this bounds the time a call takes.
const BATCH: usize = 512;

/// Of an entry of the file: the frame (`Documentation/admin-guide/mm/pagemap.rst`).
const FRAME: u64 = (1 << 55) - 1;

/// Which frame of memory one of our own pages is in.
///
/// # Errors
/// NotFound without `CAP_SYS_ADMIN`, or when it is in none.
pub fn frame_of(address: Address) -> io::Result<u64> {
    let mut entry = [0_u8; 8];
    let at = address.pages_since(Address(0)) * size_of::<u64>() as u64;
    File::open("/proc/self/pagemap")?.read_exact_at(&mut entry, at)?;
    Some(u64::from_ne_bytes(entry) & FRAME).filter(|frame| *frame != 0).ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// Has all CPUs let go of the pages that they hold because these were lately added, mapped or touched.
///
/// Moving no page begins with that (`do_pages_move` in `mm/migrate.c`: `lru_cache_disable`, since 5.11).
///
/// # Errors
/// ENOSYS on a kernel that knows but one node of memory (without `CONFIG_NUMA`).
pub fn settle_pages() -> io::Result<()> {
    const MOVE: libc::c_int = 1 << 1;
    let (count, none) = (0_usize, std::ptr::NonNull::<u64>::dangling().as_ptr());
    // SAFETY: arrays of no elements; that `none` is not null is what says "move".
    let done = unsafe { libc::syscall(libc::SYS_move_pages, 0, count, none, none, none, MOVE) };
    checked(done).map(drop)
}

/// A process's page tables, to be asked which pages are there.
#[derive(Debug)]
pub struct Pagemap(File);

impl Pagemap {
    /// Opens the page map of `pid`.
    ///
    /// # Errors
    /// Without ptrace rights over it, or when it is gone.
    pub fn open(pid: i32) -> io::Result<Self> {
        let thread = procfs::living_thread(pid).unwrap_or(pid);
        File::open(format!("/proc/{thread}/pagemap")).map(Self)
    }

    /// Calls `each` with the ranges of `span` that are populated, in memory or in the kernel's own swap.
    ///
    /// # Errors
    /// When the process is gone.
    pub fn populated(&self, span: Span, mut each: impl FnMut(Span)) -> io::Result<()> {
        let mut found = [Found::default(); BATCH];
        let mut start = span.start.0;
        while start < span.end.0 {
            let mut argument = ScanArgument {
                size: size_of::<ScanArgument>() as u64,
                flags: 0,
                start,
                end: span.end.0,
                walk_end: 0,
                vector: found.as_mut_ptr() as u64,
                vector_len: BATCH as u64,
                pages_max: 0,
                inverted: 0,
                all_of: 0,
                any_of: PRESENT | SWAPPED,
                returned: PRESENT | SWAPPED,
            };
            // SAFETY: the structure is the kernel's (size asserted), and its vector names `found` with its length.
            let count = unsafe { libc::ioctl(self.0.as_raw_fd(), IOC_SCAN, &raw mut argument) };
            let count = usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
            for range in &found[..count] {
                each(Span { start: Address(range.start), end: Address(range.end) });
            }
            if argument.walk_end <= start {
                break;
            }
            start = argument.walk_end;
        }
        Ok(())
    }

    /// The frames of the pages of `span`; 0 for what is not mapped.
    ///
    /// # Errors
    /// When the process is gone.
    pub fn frames(&self, span: Span, into: &mut Vec<u64>) -> io::Result<()> {
        const PRESENT_ENTRY: u64 = 1 << 63;
        into.clear();
        let mut bytes = [0_u8; BATCH * size_of::<u64>()];
        let mut at = span.start;
        while at < span.end {
            let pages = usize::try_from(span.end.pages_since(at)).map_or(BATCH, |pages| pages.min(BATCH));
            let entries = &mut bytes[..pages * size_of::<u64>()];
            self.0.read_exact_at(entries, at.pages_since(Address(0)) * size_of::<u64>() as u64)?;
            let entries = entries.as_chunks().0.iter().map(|entry| u64::from_ne_bytes(*entry));
            into.extend(entries.map(|entry| if entry & PRESENT_ENTRY == 0 { 0 } else { entry & FRAME }));
            at = at.plus_pages(pages as u64);
        }
        Ok(())
    }

    /// Calls `each` with the ranges of `span` whose pages this process alone has mapped: none that a fork shares.
    ///
    /// # Errors
    /// When the process is gone.
    pub fn exclusive(&self, span: Span, mut each: impl FnMut(Span)) -> io::Result<()> {
        let mut populated = Vec::new();
        self.populated(span, |there| populated.push(there))?;
        let mut bytes = [0_u8; BATCH * size_of::<u64>()];
        for there in populated {
            let mut at = there.start;
            while at < there.end {
                let pages = usize::try_from(there.end.pages_since(at)).map_or(BATCH, |pages| pages.min(BATCH));
                let entries = &mut bytes[..pages * size_of::<u64>()];
                self.0.read_exact_at(entries, at.pages_since(Address(0)) * size_of::<u64>() as u64)?;
                for entry in entries.as_chunks().0 {
                    if u64::from_ne_bytes(*entry) & EXCLUSIVE != 0 {
                        each(Span::of_pages(at, 1));
                    }
                    at = at.plus_pages(1);
                }
            }
        }
        Ok(())
    }
}

/// What the kernel says of frames of memory (`/proc/kpageflags`).
#[derive(Debug)]
pub struct FrameFlags(File);

impl FrameFlags {
    /// Opens what it says.
    ///
    /// # Errors
    /// Without `CAP_SYS_ADMIN`, or where the kernel does not say (`CONFIG_PROC_PAGE_MONITOR`).
    pub fn open() -> io::Result<Self> {
        File::open("/proc/kpageflags").map(Self)
    }

    /// Whether a frame is a small page that no program has locked: what may be taken out.
    ///
    /// # Errors
    /// Where there is no such frame.
    pub fn may_leave(&self, frame: u64) -> io::Result<bool> {
        /// `KPF_COMPOUND_HEAD`, `KPF_COMPOUND_TAIL`, `KPF_HUGE`, `KPF_UNEVICTABLE`, `KPF_HWPOISON`, `KPF_THP`, `KPF_MLOCKED`.
        const STAYS: u64 = 1 << 15 | 1 << 16 | 1 << 17 | 1 << 18 | 1 << 19 | 1 << 22 | 1 << 33;
        let mut flags = [0_u8; 8];
        self.0.read_exact_at(&mut flags, frame * size_of::<u64>() as u64)?;
        Ok(u64::from_ne_bytes(flags) & STAYS == 0)
    }
}

impl AsFd for Pagemap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

//! For tests: memory of which it is known where it lies, and programs.

use std::io::{self, PipeReader, PipeWriter};
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use spillway_core::{Address, Page};

use super::fd::{checked, owned};

const BLOCK_BYTES: usize = 2 << 20;

/// Aligned blocks of 2 MiB, in small pages, that were never touched.
pub struct Aligned {
    all: NonNull<libc::c_void>,
    bytes: usize,
    first: NonNull<Page>,
}

impl Aligned {
    /// So many blocks.
    pub fn blocks(count: usize) -> Self {
        let bytes = (count + 1) * BLOCK_BYTES;
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping, wherever the kernel puts it; the advice changes no contents.
        let all = unsafe {
            let all = libc::mmap(std::ptr::null_mut(), bytes, access, kind, -1, 0);
            assert_ne!(all, libc::MAP_FAILED);
            libc::madvise(all, bytes, libc::MADV_NOHUGEPAGE);
            NonNull::new(all).expect("mapped")
        };
        let gap = all.as_ptr().align_offset(BLOCK_BYTES);
        // SAFETY: a block more than asked for was mapped, so the next boundary and `count` blocks lie inside.
        let first = unsafe { all.byte_add(gap) }.cast();
        Self { all, bytes, first }
    }

    /// Where the first begins.
    pub fn start(&self) -> Address {
        Address(self.first.as_ptr() as u64)
    }

    /// One page.
    pub fn page(&mut self, at: usize) -> &mut Page {
        assert!((at + 1) * size_of::<Page>() + BLOCK_BYTES <= self.bytes);
        // SAFETY: inside the mapping, as just checked, and borrowed as exclusively as all of it.
        unsafe { self.first.add(at).as_mut() }
    }
}

impl Drop for Aligned {
    fn drop(&mut self) {
        // SAFETY: our own mapping, of this size, to which no reference is left.
        unsafe { libc::munmap(self.all.as_ptr(), self.bytes) };
    }
}

/// A pipe that refers to a page of ours instead of having a copy of it: reading, and writing.
pub fn pipe_of_page(page: Address) -> io::Result<(PipeReader, PipeWriter)> {
    let (reader, writer) = io::pipe()?;
    let part = libc::iovec { iov_base: page.0 as *mut _, iov_len: size_of::<Page>() };
    // SAFETY: the kernel reads one range, and what is there: it is only held for as long as the pipe has it.
    let count = unsafe { libc::vmsplice(writer.as_raw_fd(), &raw const part, 1, 0) };
    checked(count as libc::c_long).map(|_| (reader, writer))
}

/// An io_uring that may read and write a page of ours at any time, until it is closed and some moments more.
pub fn ring_of_page(page: Address) -> io::Result<OwnedFd> {
    const REGISTER_BUFFERS: libc::c_uint = 0;
    let mut parameters = [0_u64; 15];
    // SAFETY: `struct io_uring_params`, 120 bytes that are writable.
    let ring = owned(unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, parameters.as_mut_ptr()) })?;
    let part = libc::iovec { iov_base: page.0 as *mut _, iov_len: size_of::<Page>() };
    let (fd, what) = (ring.as_raw_fd(), REGISTER_BUFFERS);
    // SAFETY: one range; nothing is submitted that would use it.
    checked(unsafe { libc::syscall(libc::SYS_io_uring_register, fd, what, &raw const part, 1) }).map(|_| ring)
}

/// A program; killed when this is dropped.
pub struct Program(i32);

impl Program {
    /// One that runs `work`, which only makes system calls and counts.
    pub fn run(work: impl FnOnce()) -> Self {
        // SAFETY: the child has memory of its own, and allocates nothing.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            work();
            // SAFETY: ends the child.
            unsafe { libc::_exit(0) };
        }
        assert!(pid > 0, "no process");
        Self(pid)
    }

    /// One that computes for ever.
    pub fn busy() -> Self {
        Self::run(|| {
            loop {
                std::hint::spin_loop();
            }
        })
    }

    /// The process, and its first thread.
    pub fn pid(&self) -> i32 {
        self.0
    }

    /// The signal that has ended it, if one has.
    pub fn ended_by(&self) -> Option<i32> {
        let (child, options) = (self.0.cast_unsigned(), libc::WEXITED | libc::WNOHANG | libc::WNOWAIT);
        // SAFETY: plain integers, for which zeros are valid.
        let mut told: libc::siginfo_t = unsafe { std::mem::zeroed() };
        // SAFETY: `told` is writable.
        unsafe { libc::waitid(libc::P_PID, child, &raw mut told, options) };
        // SAFETY: zeros, or what is told of a child.
        let (pid, status) = unsafe { (told.si_pid(), told.si_status()) };
        (pid == self.0 && told.si_code == libc::CLD_KILLED).then_some(status)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: no pointers; the process is our child.
        unsafe { libc::kill(self.0, libc::SIGKILL) };
        // Where a thread of it is still seized, it never ends.
        // SAFETY: a null pointer is none.
        comes_true(|| unsafe { libc::waitpid(self.0, std::ptr::null_mut(), libc::WNOHANG) } != 0);
    }
}

/// Whether something becomes true within five seconds.
pub fn comes_true(what: impl Fn() -> bool) -> bool {
    let until = Instant::now() + Duration::from_secs(5);
    while !what() && Instant::now() < until {
        std::thread::sleep(Duration::from_micros(50));
    }
    what()
}

//! Other processes: their descriptors and their memory.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};

use spillway_core::{Address, PAGE_BYTES, Page, Span};

use super::fd::{checked, owned};
use crate::procfs;

/// The kernel's release, such as `6.8.0-45-generic`, as it presents itself to this process: a personality or an emulator
/// may make it older than it is.
pub fn kernel_release() -> String {
    let mut name = std::mem::MaybeUninit::<libc::utsname>::zeroed();
    // SAFETY: the pointer is valid for writes; zeroed bytes are a valid utsname should the call fail.
    let name = unsafe {
        libc::uname(name.as_mut_ptr());
        name.assume_init()
    };
    let bytes: Vec<u8> = name.release.iter().map(|&byte| byte.cast_unsigned()).take_while(|&byte| byte != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Whether our effective user is root.
pub fn is_root() -> bool {
    effective_user() == 0
}

/// Our effective user.
pub fn effective_user() -> u32 {
    // SAFETY: no arguments.
    unsafe { libc::geteuid() }
}

/// Whether the kernel merges pages of processes that ask for it.
///
/// # Errors
/// EINVAL when it does not: it is older than 6.4, or without KSM.
pub fn may_be_merged() -> io::Result<()> {
    // SAFETY: no pointers; it only asks.
    checked(unsafe { libc::prctl(libc::PR_GET_MEMORY_MERGE, 0, 0, 0, 0) }.into()).map(drop)
}

/// A stable name for one thread, by which its own descriptors can be had (6.9).
///
/// # Errors
/// ESRCH when it is gone, EINVAL before 6.9.
pub fn pidfd_of_thread(thread: i32) -> io::Result<OwnedFd> {
    /// `PIDFD_THREAD`.
    const THREAD: libc::c_int = libc::O_EXCL;
    pidfd_open(thread, THREAD)
}

/// A stable name for a process. No descriptor can be taken through it once its first thread has ended.
///
/// # Errors
/// ESRCH when it is gone.
pub fn pidfd_of_process(pid: i32) -> io::Result<OwnedFd> {
    pidfd_open(pid, 0)
}

fn pidfd_open(id: i32, flags: libc::c_int) -> io::Result<OwnedFd> {
    // SAFETY: no pointers.
    owned(unsafe { libc::syscall(libc::SYS_pidfd_open, id, flags) })
}

/// Bytes that wait to be read from a socket.
///
/// # Errors
/// When it is none.
pub fn unread(socket: BorrowedFd<'_>) -> io::Result<libc::c_int> {
    let mut bytes = 0;
    // SAFETY: `bytes` is writable.
    checked(unsafe { libc::ioctl(socket.as_raw_fd(), libc::FIONREAD, &raw mut bytes) }.into())?;
    Ok(bytes)
}

/// Duplicates descriptor `number` of the process behind `pidfd` into ours.
///
/// # Errors
/// EPERM without ptrace rights, EBADF when it has no such descriptor.
pub fn take_fd(pidfd: BorrowedFd<'_>, number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: no pointers.
    owned(unsafe { libc::syscall(libc::SYS_pidfd_getfd, pidfd.as_raw_fd(), number, 0) })
}

/// Reads `into.len()` bytes at `address` of `pid`.
///
/// # Errors
/// EFAULT where nothing is mapped, ESRCH, EPERM; fewer bytes than asked for are an error too.
pub fn read_memory(pid: i32, address: Address, into: &mut [u8]) -> io::Result<()> {
    let local = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    read_vectors(pid, &[local], address, into.len())
}

/// Writes `from` to `address` of `pid`.
///
/// # Errors
/// As [`read_memory`].
pub fn write_memory(pid: i32, address: Address, from: &[u8]) -> io::Result<()> {
    let local = libc::iovec { iov_base: from.as_ptr().cast_mut().cast(), iov_len: from.len() };
    let remote = libc::iovec { iov_base: address.0 as *mut libc::c_void, iov_len: from.len() };
    // SAFETY: the kernel only reads the local bytes, and checks the remote range itself.
    let done = unsafe { libc::process_vm_writev(pid, &raw const local, 1, &raw const remote, 1, 0) };
    complete(done, from.len())
}

/// Pages that are read in one system call, 10 to 25 us: some kernels take the CPU away only between two (`PREEMPT_LAZY`), and a program
/// that is woken there would wait for all of a batch.
pub const PAGES_AT_A_TIME: usize = 16;

/// Reads consecutive pages from `address` of `pid` on, each into the next of `into`, at most [`PAGES_AT_A_TIME`], in one call.
///
/// # Errors
/// As [`read_memory`].
pub fn read_pages<'a>(pid: i32, address: Address, into: impl Iterator<Item = &'a mut Page>) -> io::Result<()> {
    let mut vectors = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; PAGES_AT_A_TIME];
    let mut count = 0;
    for (vector, page) in vectors.iter_mut().zip(into) {
        *vector = libc::iovec { iov_base: page.as_mut_ptr().cast(), iov_len: PAGE_BYTES };
        count += 1;
    }
    if count == 0 {
        return Ok(());
    }
    read_vectors(pid, &vectors[..count], address, count * PAGE_BYTES)
}

fn read_vectors(pid: i32, local: &[libc::iovec], address: Address, bytes: usize) -> io::Result<()> {
    let remote = libc::iovec { iov_base: address.0 as *mut libc::c_void, iov_len: bytes };
    // SAFETY: the local vectors come from live exclusive borrows of our callers; the kernel checks the remote range.
    let done =
        unsafe { libc::process_vm_readv(pid, local.as_ptr(), local.len() as libc::c_ulong, &raw const remote, 1, 0) };
    complete(done, bytes)
}

fn complete(done: isize, wanted: usize) -> io::Result<()> {
    let done = checked(done as libc::c_long)?;
    if usize::try_from(done) == Ok(wanted) { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

/// Makes the pages of `span` count as not touched (`MADV_COLD`, Linux 5.4; of another process 5.10).
///
/// # Errors
/// EPERM without `CAP_SYS_NICE` and ptrace rights, EINVAL where memory is locked.
pub fn forget_touches(pidfd: BorrowedFd<'_>, span: Span) -> io::Result<()> {
    let bytes = usize::try_from(span.end.0 - span.start.0).unwrap_or(usize::MAX);
    let range = libc::iovec { iov_base: span.start.0 as *mut libc::c_void, iov_len: bytes };
    // SAFETY: the range is the other process's, and its contents stay what they are.
    let advised =
        unsafe { libc::syscall(libc::SYS_process_madvise, pidfd.as_raw_fd(), &raw const range, 1, libc::MADV_COLD, 0) };
    checked(advised).map(drop)
}

/// Whether two processes share one address space: a child of `vfork` and its parent do until it calls exec. False where
/// the kernel does not tell (`CONFIG_KCMP`).
pub fn share_memory(one: i32, other: i32) -> bool {
    const KCMP_VM: i32 = 1;
    let [one, other] = [one, other].map(|pid| procfs::living_thread(pid).unwrap_or(pid));
    // SAFETY: no pointers.
    unsafe { libc::syscall(libc::SYS_kcmp, one, other, KCMP_VM, 0, 0) == 0 }
}

/// The processes that have the address space of `pid`, that among them; none where it has ended, or they cannot be listed now. Where the
/// kernel does not tell (`CONFIG_KCMP`), that alone.
pub fn those_with_memory_of(pid: i32) -> Option<Vec<i32>> {
    // What has parted with its memory would have the same as all that never had any.
    procfs::living_thread(pid)?;
    let all = procfs::processes().ok()?;
    Some(all.into_iter().filter(|&other| other == pid || share_memory(pid, other)).collect())
}

/// Where `thread` has its list of robust mutexes (`get_robust_list(2)`); in glibc that is the thread's own descriptor, with
/// the word that the kernel clears when the thread ends.
pub fn robust_list(thread: i32) -> Option<Address> {
    let (mut head, mut length) = (0_u64, 0_usize);
    // SAFETY: both are writable.
    let answer = unsafe { libc::syscall(libc::SYS_get_robust_list, thread, &raw mut head, &raw mut length) };
    (answer == 0 && head != 0).then_some(Address(head))
}

//! userfaultfd: the calls, structures and numbers of `include/uapi/linux/userfaultfd.h`.
//!
//! Owned here rather than taken from a crate, because MOVE (6.8) and POISON (6.6) must be there whatever headers a
//! distribution ships, and because EAGAIN has a meaning of its own: the target's mappings are changing, and events
//! wait to be read.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use spillway_core::pager::{Outcome, Stop};
use spillway_core::{Address, PAGE_BYTES_U64, Page, Span};

pub use super::message::Message;
use super::message::Told;

const API: u64 = 0xAA;
const IOC_API: u64 = 0xC018_AA3F;
/// `UFFDIO_REGISTER`: also issued by the agent.
pub const IOC_REGISTER: u64 = 0xC020_AA00;
/// `UFFDIO_UNREGISTER`: also issued by the agent.
pub const IOC_UNREGISTER: u64 = 0x8010_AA01;
const IOC_WAKE: u64 = 0x8010_AA02;
const IOC_COPY: u64 = 0xC028_AA03;
const IOC_ZEROPAGE: u64 = 0xC020_AA04;
/// `UFFDIO_MOVE`: issued by the agent only, the kernel refuses it from outside.
pub const IOC_MOVE: u64 = 0xC028_AA05;
const IOC_WRITE_PROTECT: u64 = 0xC018_AA06;
const IOC_POISON: u64 = 0xC020_AA08;
/// `USERFAULTFD_IOC_NEW` on `/dev/userfaultfd`.
pub const IOC_NEW: u64 = 0xAA00;

/// `UFFDIO_MOVE_MODE_ALLOW_SRC_HOLES`: a page that is not there is passed over.
pub const MOVE_ALLOW_SRC_HOLES: u64 = 2;
const REGISTER_MISSING: u64 = 1;
const REGISTER_PROTECTED: u64 = 2;

/// `UFFD_FEATURE_EVENT_FORK`.
pub const EVENT_FORK: u64 = 1 << 1;
/// `UFFD_FEATURE_EVENT_REMOVE`.
pub const EVENT_REMOVE: u64 = 1 << 3;
/// `UFFD_FEATURE_SIGBUS`: faults are signals instead of messages.
pub const SIGBUS: u64 = 1 << 7;

/// `UFFD_FEATURE_EVENT_FORK`, `_REMAP`, `_REMOVE` and `_UNMAP`: all that is told of but faults.
const EVENTS: u64 = EVENT_FORK | 1 << 2 | EVENT_REMOVE | 1 << 6;

/// `UFFD_FEATURE_WP_ASYNC`: who writes to a protected page does not wait.
pub const WP_ASYNC: u64 = 1 << 15;

/// What shared memory needs: faults of protected pages that say so, missing pages, protection that outlives the page's mapping
/// (5.19).
pub const SHARED_MEMORY: u64 = 1 | 1 << 5 | 1 << 12;

/// Features that adoption needs: all events, thread ids, POISON, MOVE, and [`SHARED_MEMORY`].
pub const FEATURES: u64 = EVENTS | 1 << 8 | 1 << 14 | 1 << 16 | SHARED_MEMORY;

#[repr(C)]
struct ApiArgument {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// `struct uffdio_range`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct RangeArgument {
    start: u64,
    len: u64,
}

/// `struct uffdio_register`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct RegisterArgument {
    range: RangeArgument,
    mode: u64,
    ioctls: u64,
}

/// `struct uffdio_copy`.
#[repr(C)]
struct CopyArgument {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    copy: i64,
}

/// `struct uffdio_zeropage`, and `struct uffdio_poison` of the same shape.
#[repr(C)]
struct FillArgument {
    range: RangeArgument,
    mode: u64,
    done: i64,
}

/// `struct uffdio_writeprotect`.
#[repr(C)]
struct ProtectArgument {
    range: RangeArgument,
    mode: u64,
}

/// `struct uffdio_move`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct MoveArgument {
    /// Where the pages go.
    pub dst: u64,
    /// Where they are.
    pub src: u64,
    /// Bytes.
    pub len: u64,
    /// Flags.
    pub mode: u64,
    /// Bytes moved, or a negative error number, when the call returns.
    pub moved: i64,
}

/// What `/proc/PID/fd` calls one.
pub const LINK: &str = "anon_inode:[userfaultfd]";

/// The last page of user space, which nothing is ever mapped to.
pub const NOWHERE: Address = Address(0x7fff_ffff_e000);

const _: () = {
    assert!(size_of::<ApiArgument>() == 0x18);
    assert!(size_of::<RegisterArgument>() == 0x20);
    assert!(size_of::<RangeArgument>() == 0x10);
    assert!(size_of::<CopyArgument>() == 0x28);
    assert!(size_of::<FillArgument>() == 0x20);
    assert!(size_of::<ProtectArgument>() == 0x18);
    assert!(size_of::<MoveArgument>() == 0x28);
};

impl From<Span> for RangeArgument {
    fn from(span: Span) -> Self {
        Self { start: span.start.0, len: span.pages() * PAGE_BYTES_U64 }
    }
}

impl From<Span> for RegisterArgument {
    fn from(span: Span) -> Self {
        Self { range: span.into(), mode: REGISTER_MISSING, ioctls: 0 }
    }
}

/// What a userfaultfd tells.
#[derive(Debug)]
pub enum Event {
    /// A thread waits for a page.
    Fault {
        /// Where.
        address: Address,
        /// Which thread, as the pager sees thread ids.
        thread: i32,
        /// Whether it means to write.
        write: bool,
        /// Whether the page is there, and protected from writes.
        protected: bool,
    },
    /// The address space was duplicated; the child's faults arrive here.
    Fork(Uffd),
    /// A mapping moved.
    Remap {
        /// From here.
        from: Address,
        /// To here.
        to: Address,
        /// So many bytes.
        bytes: u64,
    },
    /// `madvise` is about to drop pages.
    Remove(Span),
    /// A mapping is gone.
    Unmap(Span),
    /// An event of a newer kernel.
    Unknown,
}

impl Message {
    /// The change in it, if it tells of one that is still of interest to who did not read it. A fork's descriptor was opened in the table
    /// of who did: `keeps` gives a copy of it.
    pub fn change(&self, keeps: impl FnOnce(RawFd) -> Option<Uffd>) -> Option<Event> {
        let is_page = |at: Address| at == at.page() && at < NOWHERE;
        let is_span = |span: Span| is_page(span.start) && is_page(span.end) && span.start < span.end;
        match self.told() {
            Told::Remap { from, to, bytes } if bytes <= NOWHERE.0 => {
                let moved = |start: Address| Span { start, end: start.plus_bytes(bytes) };
                (is_span(moved(from)) && is_span(moved(to))).then_some(Event::Remap { from, to, bytes })
            }
            Told::Remove(span) => is_span(span).then_some(Event::Remove(span)),
            Told::Unmap(span) => is_span(span).then_some(Event::Unmap(span)),
            Told::Fork { fd } => keeps(fd).map(Event::Fork),
            Told::Remap { .. } | Told::Fault { .. } | Told::Unknown => None,
        }
    }

    /// The event in it. Takes ownership of a fork's descriptor: call it once a message.
    pub fn decode(&self) -> Event {
        match self.told() {
            Told::Fault { address, thread, write, protected } => Event::Fault { address, thread, write, protected },
            // SAFETY: the kernel has just opened this descriptor in our table for us (resolve_userfault_fork), and a
            // message is decoded once, so nobody else owns it.
            Told::Fork { fd } => Event::Fork(unsafe { OwnedFd::from_raw_fd(fd) }.into()),
            Told::Remap { from, to, bytes } => Event::Remap { from, to, bytes },
            Told::Remove(span) => Event::Remove(span),
            Told::Unmap(span) => Event::Unmap(span),
            Told::Unknown => Event::Unknown,
        }
    }
}

/// A userfaultfd of a target. Its calls act on the target's address space, from whichever process they come. Copies share the
/// descriptor, which therefore cannot run out for them.
#[derive(Clone, Debug)]
pub struct Uffd {
    fd: Arc<OwnedFd>,
    /// Others have it open as well, and may make it one that waits to be read.
    of_others: bool,
    /// It tells of no change of mappings.
    faults_alone: bool,
}

impl From<OwnedFd> for Uffd {
    fn from(fd: OwnedFd) -> Self {
        Self { fd: Arc::new(fd), of_others: false, faults_alone: false }
    }
}

impl AsRawFd for Uffd {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

impl Uffd {
    /// One that a process has made for itself, has agreed on with these features, and keeps.
    pub fn of_others(fd: OwnedFd, features: u64) -> Self {
        Self { fd: Arc::new(fd), of_others: true, faults_alone: features & EVENTS == 0 }
    }

    /// Whether it tells of faults, and of no change of mappings.
    pub fn tells_of_faults_alone(&self) -> bool {
        self.faults_alone
    }

    /// Agrees on the features with the kernel.
    ///
    /// # Errors
    /// EINVAL where a feature is missing, EPERM without `CAP_SYS_PTRACE` (fork events need it).
    pub fn handshake(&self) -> io::Result<()> {
        self.agree(FEATURES)
    }

    /// Agrees on no more than shared memory of our own needs: nothing is told of it.
    ///
    /// # Errors
    /// EINVAL where a feature is missing.
    pub fn handshake_of_our_own(&self) -> io::Result<()> {
        self.agree(SHARED_MEMORY)
    }

    fn agree(&self, features: u64) -> io::Result<()> {
        self.call(IOC_API, &mut ApiArgument { api: API, features, ioctls: 0 })
    }

    /// The features that this kernel offers, asked on a fresh descriptor.
    ///
    /// # Errors
    /// As the kernel says.
    pub fn offered(&self) -> io::Result<u64> {
        let mut argument = ApiArgument { api: API, features: 0, ioctls: 0 };
        self.call(IOC_API, &mut argument)?;
        Ok(argument.features)
    }

    /// From now on missing pages of `span` raise faults here. Does nothing where that is so already.
    ///
    /// # Errors
    /// EINVAL where the span holds no mapping or one that cannot be managed, EBUSY where another userfaultfd has it.
    pub fn register(&self, span: Span) -> io::Result<()> {
        self.call(IOC_REGISTER, &mut RegisterArgument::from(span))
    }

    /// From now on missing pages of `span`, which is of shared memory, raise faults here, and so do writes to protected ones.
    ///
    /// # Errors
    /// As [`Uffd::register`], and EPERM where the mapping may never be written to.
    pub fn register_shared(&self, span: Span) -> io::Result<()> {
        let mode = REGISTER_MISSING | REGISTER_PROTECTED;
        self.call(IOC_REGISTER, &mut RegisterArgument { range: span.into(), mode, ioctls: 0 })
    }

    /// Writes to `span`, registered for that, wait from now on; or do no more, and those that wait go on.
    ///
    /// # Errors
    /// EAGAIN while mappings are changing, ENOENT where nothing is mapped and registered so, ESRCH when the address space is gone.
    pub fn protect(&self, span: Span, protect: bool) -> io::Result<()> {
        self.call(IOC_WRITE_PROTECT, &mut ProtectArgument { range: span.into(), mode: protect.into() })
    }

    /// Missing pages of `span` are the kernel's own again; waiting faults proceed.
    ///
    /// # Errors
    /// EINVAL where nothing is mapped.
    pub fn unregister(&self, span: Span) -> io::Result<()> {
        self.call(IOC_UNREGISTER, &mut RangeArgument::from(span))
    }

    /// Waiting faults in `span` are tried again.
    ///
    /// # Errors
    /// As the kernel says; none is expected.
    pub fn wake(&self, span: Span) -> io::Result<()> {
        self.call(IOC_WAKE, &mut RangeArgument::from(span))
    }

    /// Wakes everyone who waits for a page: those faults are raised again.
    pub fn wake_all(&self) {
        /// Above what `vm.mmap_min_addr` forbids.
        const LOWEST: Address = Address(1 << 16);
        // An address space that is gone has nobody to wake.
        let _ = self.wake(Span { start: LOWEST, end: NOWHERE });
    }

    /// Whether the target's address space still exists.
    pub fn is_alive(&self) -> bool {
        // Nothing is ever mapped there: a live address space answers ENOENT, a dead one ESRCH.
        let span = Span::of_pages(NOWHERE, 1);
        let mut argument = FillArgument { range: span.into(), mode: 0, done: 0 };
        let answer = self.call(IOC_ZEROPAGE, &mut argument);
        !matches!(answer, Err(error) if error.raw_os_error() == Some(libc::ESRCH))
    }

    /// Whether mappings of the target are changing: an event is announced, or about to be, that was not read yet.
    pub fn is_changing(&self) -> bool {
        self.refusal_to_copy_to(NOWHERE) == Some(libc::EAGAIN)
    }

    /// Whether a mapping is at `address` and registered here; none while mappings are changing.
    pub fn is_registered(&self, address: Address) -> Option<bool> {
        match self.refusal_to_copy_to(address) {
            Some(libc::EAGAIN) => None,
            refusal => Some(matches!(refusal, Some(libc::EFAULT | libc::EEXIST))),
        }
    }

    /// Why the kernel refuses to install a page there from memory that does not exist: it looks for changes first, then
    /// for a registered mapping (ENOENT), and only then at the page (EEXIST) and at the source (EFAULT).
    fn refusal_to_copy_to(&self, address: Address) -> Option<i32> {
        let mut argument = CopyArgument { dst: address.0, src: NOWHERE.0, len: PAGE_BYTES_U64, mode: 0, copy: 0 };
        self.call(IOC_COPY, &mut argument).err().and_then(|error| error.raw_os_error())
    }

    /// Installs `pages` at `address` and wakes who waits for them.
    pub fn copy(&self, address: Address, pages: &[Page]) -> Outcome {
        let mut argument = CopyArgument {
            dst: address.0,
            src: pages.as_ptr() as u64,
            len: pages.len() as u64 * PAGE_BYTES_U64,
            mode: 0,
            copy: 0,
        };
        let answer = self.call(IOC_COPY, &mut argument);
        outcome(answer, argument.copy)
    }

    /// Maps the kernel's zero page at `pages` pages from `address` on and wakes who waits for them.
    pub fn zero(&self, address: Address, pages: u64) -> Outcome {
        let mut argument = FillArgument { range: Span::of_pages(address, pages).into(), mode: 0, done: 0 };
        let answer = self.call(IOC_ZEROPAGE, &mut argument);
        outcome(answer, argument.done)
    }

    /// From now on an access to the page at `address` raises SIGBUS.
    pub fn poison(&self, address: Address) -> Outcome {
        let mut argument = FillArgument { range: Span::of_pages(address, 1).into(), mode: 0, done: 0 };
        let answer = self.call(IOC_POISON, &mut argument);
        outcome(answer, argument.done)
    }

    /// Reads messages that wait, at most as many as `into` holds; none when no message waits.
    ///
    /// # Errors
    /// As the kernel says; EAGAIN is not an error here.
    pub fn read<'a>(&self, into: &'a mut [Message]) -> io::Result<&'a [Message]> {
        let vector = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: size_of_val(into) };
        let count = if self.of_others {
            // SAFETY: one vector, of a buffer that is writable for its length; any bytes make a valid Message.
            messages(unsafe { libc::preadv2(self.as_raw_fd(), &raw const vector, 1, -1, libc::RWF_NOWAIT) })
        } else {
            // SAFETY: the same buffer.
            messages(unsafe { read(self.as_raw_fd(), vector.iov_base, vector.iov_len) })
        };
        Ok(&into[..count?])
    }

    /// The same, by way of words that outlive this process, four for a message: the messages are still there if it is killed
    /// before it has made anything of them.
    ///
    /// # Errors
    /// As [`Uffd::read`].
    pub fn read_by_way_of<'a>(&self, words: &[AtomicU64], into: &'a mut [Message]) -> io::Result<&'a [Message]> {
        let bytes = size_of_val(words).min(size_of_val(into));
        // SAFETY: atomics may be written through a shared reference, also by the kernel, for the length given.
        let read = unsafe { read(self.as_raw_fd(), words.as_ptr().cast_mut().cast(), bytes) };
        let count = messages(read)?;
        for (message, words) in into[..count].iter_mut().zip(words.as_chunks().0) {
            let words: &[AtomicU64; 4] = words;
            *message = Message::from_words(std::array::from_fn(|at| words[at].load(Relaxed)));
        }
        Ok(&into[..count])
    }

    /// The descriptor, to be passed on.
    pub fn borrow(&self) -> BorrowedFd<'_> {
        std::os::fd::AsFd::as_fd(&self.fd)
    }

    fn call<T>(&self, request: u64, argument: &mut T) -> io::Result<()> {
        // SAFETY: each request above is paired with the structure that the kernel expects, whose size is asserted; the
        // addresses in it belong to the target or, for a copy's source, to a borrowed slice of ours.
        let answer =
            unsafe { libc::syscall(libc::SYS_ioctl, self.fd.as_raw_fd(), request, std::ptr::from_mut(argument)) };
        if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

/// `read`, which in libc is more: it may be cancelled. A fault has no use for that, and each function of libc is in another page.
///
/// # Safety
/// As for [`libc::read`].
unsafe fn read(fd: RawFd, into: *mut libc::c_void, bytes: usize) -> libc::c_long {
    // SAFETY: the caller's; the kernel's answer is a number of bytes, or -1.
    unsafe { libc::syscall(libc::SYS_read, fd, into, bytes) }
}

/// How many messages a read has given.
fn messages(read: impl TryInto<usize>) -> io::Result<usize> {
    match read.try_into() {
        Ok(bytes) => Ok(bytes / size_of::<Message>()),
        Err(_) => match io::Error::last_os_error() {
            error if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR)) => Ok(0),
            error => Err(error),
        },
    }
}

/// The kernel reports bytes done, or a negative error number when it did not even start; with some pages done it
/// answers EAGAIN whatever stopped it.
fn outcome(answer: io::Result<()>, bytes: i64) -> Outcome {
    let done = u64::try_from(bytes).map_or(0, |bytes| bytes / PAGE_BYTES_U64);
    let stop = answer.err().map(|error| match error.raw_os_error() {
        Some(libc::EEXIST) => Stop::Exists,
        Some(libc::EAGAIN | libc::EINTR) => Stop::Changing,
        Some(libc::ENOMEM) => Stop::NoMemory,
        _ => Stop::Gone,
    });
    Outcome { done, stop }
}

/// A userfaultfd of our own address space, made through `/dev/userfaultfd`.
///
/// # Errors
/// As the kernel says.
pub fn new_from_device(device: &std::fs::File) -> io::Result<Uffd> {
    // SAFETY: the argument is a number, not a pointer.
    let fd = unsafe { libc::ioctl(device.as_raw_fd(), IOC_NEW, libc::O_CLOEXEC | libc::O_NONBLOCK) };
    super::fd::owned(fd.into()).map(Uffd::from)
}

/// A userfaultfd of our own address space, made by the system call.
///
/// # Errors
/// EPERM without `CAP_SYS_PTRACE` where `vm.unprivileged_userfaultfd` is 0.
pub fn new_from_syscall() -> io::Result<Uffd> {
    // SAFETY: no pointers.
    super::fd::owned(unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) })
        .map(Uffd::from)
}

/// For tests: one that is told what of our own address space is unmapped, and of nothing else.
///
/// # Errors
/// As the kernel says.
#[cfg(test)]
pub fn new_of_unmappings() -> io::Result<Uffd> {
    const EVENT_UNMAP: u64 = 1 << 6;
    let uffd = new_from_syscall()?;
    uffd.agree(EVENT_UNMAP).map(|()| uffd)
}

/// A userfaultfd of our own address space for shared memory, through the device where we may open it.
///
/// # Errors
/// As the kernel says.
pub fn new_of_our_own() -> io::Result<Uffd> {
    let device = std::fs::File::options().read(true).write(true).open("/dev/userfaultfd");
    let uffd = device.map_or_else(|_| new_from_syscall(), |device| new_from_device(&device))?;
    uffd.handshake_of_our_own().map(|()| uffd)
}

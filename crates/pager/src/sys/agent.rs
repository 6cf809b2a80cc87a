//! The agent: a thread of ours inside a target. It carries out lists of system calls, and does nothing else.
//!
//! It exists because `UFFDIO_MOVE` and `madvise(DONTNEED)` are refused from outside an address space. It is a loop of
//! a few dozen instructions without a stack: wait for a byte on a socket, run the calls listed in the control pages,
//! answer with a byte. When the socket ends, its pager is dead, and it kills its process or, if it was told so, keeps
//! the userfaultfd open for ever, so that faults wait instead of reading zeros.
//! Where another pager may take over, the agent keeps the pager's end of the socket open as well: then it does not end, and
//! the agent waits for whoever takes that end out of its descriptor table.
//!
//! The control pages are shared with the target, which could scribble on them; the pager therefore believes nothing in
//! them but results, and those only as far as they cannot harm anyone else.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{Ordering, fence};

use rustix::fs::{SealFlags, fcntl_add_seals, fcntl_get_seals};
use spillway_core::{Address, PAGE_BYTES_U64, Span};

use super::uffd::{IOC_MOVE, IOC_REGISTER, IOC_UNREGISTER, MOVE_ALLOW_SRC_HOLES};
use super::uffd::{MoveArgument, RangeArgument, RegisterArgument};

/// Moves in one batch, and pages in the staging area.
pub const BATCH_PAGES: usize = 256;
const _: () = assert!(BATCH_PAGES as u64 == spillway_core::evict::BATCH_PAGES_MAX);
/// Bytes of the agent's code.
pub const CODE_BYTES: u64 = PAGE_BYTES_U64;
/// Bytes of the control pages.
pub const CONTROL_BYTES: u64 = 7 * PAGE_BYTES_U64;
/// Bytes of the memory file: code first, then control.
pub const FILE_BYTES: u64 = CODE_BYTES + CONTROL_BYTES;

/// Nobody changes its length.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

const CALLS: usize = BATCH_PAGES + 8;
/// The result of a call that the agent has not come to: none of those in its lists gives it.
pub const NOT_BEGUN: i64 = -(libc::EINTR as i64);

/// One system call: number, arguments, and where the agent puts the result.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Call {
    number: i64,
    arguments: [u64; 6],
    result: i64,
}

/// The control pages, as the agent's code below sees them.
#[repr(C)]
struct Control {
    count: u32,
    scratch: [u32; 15],
    calls: [Call; CALLS],
    moves: [MoveArgument; BATCH_PAGES],
    register: RegisterArgument,
    range: RangeArgument,
}

const _: () = {
    assert!(size_of::<Call>() == 64);
    assert!(std::mem::offset_of!(Control, calls) == 64);
    assert!(size_of::<Control>() as u64 <= CONTROL_BYTES);
};

// Registers: r15 control pages, r14 socket, r13 non-zero to kill on the pager's death. rcx and r11 are lost at each call.
std::arch::global_asm!(
    ".pushsection .rodata",
    ".balign 64",
    ".globl spillway_agent_start",
    "spillway_agent_start:",
    "2:", // wait: read(socket, scratch, 1)
    "xor eax, eax",
    "mov edi, r14d",
    "lea rsi, [r15 + 4]",
    "mov edx, 1",
    "syscall",
    "cmp rax, 1",
    "je 3f",
    "cmp rax, -4", // EINTR: a stop and a continue
    "je 2b",
    "jmp 6f",
    "3:", // run
    "mov r12d, [r15]",
    "lea rbx, [r15 + 64]",
    "4:",
    "test r12d, r12d",
    "jz 5f",
    "mov rax, [rbx]",
    "mov rdi, [rbx + 8]",
    "mov rsi, [rbx + 16]",
    "mov rdx, [rbx + 24]",
    "mov r10, [rbx + 32]",
    "mov r8, [rbx + 40]",
    "mov r9, [rbx + 48]",
    "syscall",
    "mov [rbx + 56], rax",
    "add rbx, 64",
    "dec r12d",
    "jmp 4b",
    "5:", // answer: sendto(socket, scratch, 1, MSG_NOSIGNAL, 0, 0)
    "mov eax, 44",
    "mov edi, r14d",
    "lea rsi, [r15 + 4]",
    "mov edx, 1",
    "mov r10d, 0x4000",
    "xor r8d, r8d",
    "xor r9d, r9d",
    "syscall",
    "jmp 2b",
    "6:", // the pager is dead
    "test r13d, r13d",
    "jz 7f",
    "mov eax, 39", // getpid
    "syscall",
    "mov edi, eax",
    "mov esi, 9",  // SIGKILL
    "mov eax, 62", // kill
    "syscall",
    "7:", // hold: pause, for ever
    "mov eax, 34",
    "syscall",
    "jmp 7b",
    ".globl spillway_agent_call",
    "spillway_agent_call:", // a call on somebody's behalf; let go in it, the thread ends: exit(0)
    "syscall",
    "mov eax, 60",
    "xor edi, edi",
    "syscall",
    ".globl spillway_agent_end",
    "spillway_agent_end:",
    ".popsection",
);

unsafe extern "C" {
    static spillway_agent_start: u8;
    static spillway_agent_call: u8;
    static spillway_agent_end: u8;
}

fn code() -> &'static [u8] {
    let start = &raw const spillway_agent_start;
    let end = &raw const spillway_agent_end;
    // SAFETY: both labels stand in the same read-only section, the end behind the start, with the code between them.
    unsafe { std::slice::from_raw_parts(start, end.addr() - start.addr()) }
}

/// Where in the code there is a system call from which no thread goes on to anything but its end.
pub fn last_call_offset() -> u64 {
    ((&raw const spillway_agent_call).addr() - (&raw const spillway_agent_start).addr()) as u64
}

/// What stands there.
pub fn last_call() -> &'static [u8] {
    let from = usize::try_from(last_call_offset()).expect("within a page");
    &code()[from..]
}

/// Where things of ours are in a target.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// Captured pages land here.
    pub staging: Address,
    /// Scratch for adoption; follows the staging area in the same mapping.
    pub scratch: Address,
    /// The control pages.
    pub control: Address,
    /// The code.
    pub code: Address,
}

/// The agent's memory file, mapped here.
pub struct Memory {
    base: NonNull<u8>,
    _file: File,
}

// SAFETY: the mapping belongs to this value alone and is as usable from one thread as from another.
unsafe impl Send for Memory {}

impl Memory {
    /// Sizes the file behind `fd` for good (`MFD_ALLOW_SEALING`): where it ended, reading from it would end us. Maps it, and writes the
    /// agent's code into it.
    ///
    /// # Errors
    /// When memory or descriptors run out.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        let file = File::from(fd);
        file.set_len(FILE_BYTES)?;
        fcntl_add_seals(&file, SEALS)?;
        let memory = Self::map(file)?;
        let code = code();
        assert!(code.len() as u64 <= CODE_BYTES, "the agent's code fits its page");
        // SAFETY: the mapping is writable and longer than the code; the target does not run it yet.
        unsafe { std::ptr::copy_nonoverlapping(code.as_ptr(), memory.base.as_ptr(), code.len()) };
        Ok(memory)
    }

    /// Maps the file of an agent that runs already.
    ///
    /// # Errors
    /// As [`Memory::new`], and when this is no such file.
    pub fn again(fd: OwnedFd) -> io::Result<Self> {
        let file = File::from(fd);
        if file.metadata()?.len() != FILE_BYTES || !fcntl_get_seals(&file)?.contains(SEALS) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Self::map(file)
    }

    fn map(file: File) -> io::Result<Self> {
        let bytes = usize::try_from(FILE_BYTES).expect("a few pages");
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { base: NonNull::new(base.cast()).ok_or(io::ErrorKind::InvalidData)?, _file: file })
    }

    fn control(&self) -> *mut Control {
        // SAFETY: the control pages follow the code page in the same mapping, page-aligned, and Control fits them.
        unsafe { self.base.as_ptr().add(4096).cast() }
    }

    /// A new list of calls. It must not be made while the agent runs an older one.
    pub fn list(&mut self) -> List<'_> {
        List { memory: self, count: 0, moves: 0 }
    }

    /// The result of the call at `index` of the last list.
    pub fn result(&self, index: usize) -> i64 {
        assert!(index < CALLS, "lists are no longer");
        fence(Ordering::Acquire);
        // SAFETY: inside the mapping; the target may write it at any time, hence volatile. Any bits are a valid i64.
        unsafe { (&raw const (*self.control()).calls[index].result).read_volatile() }
    }

    /// Bytes that the move at `index` (counting moves only) of the last list has moved.
    pub fn moved(&self, index: usize) -> i64 {
        assert!(index < BATCH_PAGES, "lists are no longer");
        // SAFETY: as in `result`.
        unsafe { (&raw const (*self.control()).moves[index].moved).read_volatile() }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let bytes = usize::try_from(FILE_BYTES).expect("a few pages");
        // SAFETY: maps what `new` mapped; no reference into it outlives a method call.
        unsafe { libc::munmap(self.base.as_ptr().cast(), bytes) };
    }
}

/// A list of calls being written.
pub struct List<'a> {
    memory: &'a mut Memory,
    count: usize,
    moves: usize,
}

impl List<'_> {
    /// Adds a call; returns its index.
    pub fn call(&mut self, number: libc::c_long, arguments: [u64; 6]) -> usize {
        assert!(self.count < CALLS, "batches are cut to the control pages");
        let call = Call { number, arguments, result: NOT_BEGUN };
        // SAFETY: inside the mapping, and the agent does not run.
        unsafe { (&raw mut (*self.memory.control()).calls[self.count]).write_volatile(call) };
        self.count += 1;
        self.count - 1
    }

    /// Registers `span` with the agent's userfaultfd `uffd`.
    pub fn register(&mut self, layout: &Layout, uffd: i32, span: Span) -> usize {
        let offset = std::mem::offset_of!(Control, register) as u64;
        // SAFETY: as in `call`.
        unsafe { (&raw mut (*self.memory.control()).register).write_volatile(span.into()) };
        self.call(libc::SYS_ioctl, [fd_argument(uffd), IOC_REGISTER, layout.control.0 + offset, 0, 0, 0])
    }

    /// Unregisters `span`.
    pub fn unregister(&mut self, layout: &Layout, uffd: i32, span: Span) -> usize {
        let offset = std::mem::offset_of!(Control, range) as u64;
        // SAFETY: as in `call`.
        unsafe { (&raw mut (*self.memory.control()).range).write_volatile(span.into()) };
        self.call(libc::SYS_ioctl, [fd_argument(uffd), IOC_UNREGISTER, layout.control.0 + offset, 0, 0, 0])
    }

    /// Moves `pages` pages from `source` to `destination`, passing over those that are not there.
    pub fn move_pages(&mut self, layout: &Layout, uffd: i32, source: Address, destination: Address, pages: u64) {
        let len = pages * PAGE_BYTES_U64;
        let argument = MoveArgument { dst: destination.0, src: source.0, len, mode: MOVE_ALLOW_SRC_HOLES, moved: 0 };
        let offset = std::mem::offset_of!(Control, moves) + self.moves * size_of::<MoveArgument>();
        assert!(self.moves < BATCH_PAGES, "batches are cut to the control pages");
        // SAFETY: as in `call`.
        unsafe { (&raw mut (*self.memory.control()).moves[self.moves]).write_volatile(argument) };
        self.moves += 1;
        self.call(libc::SYS_ioctl, [fd_argument(uffd), IOC_MOVE, layout.control.0 + offset as u64, 0, 0, 0]);
    }

    /// Ends the list: the next byte on the socket makes the agent run it. Returns the number of calls.
    pub fn finish(self) -> usize {
        let count = u32::try_from(self.count).expect("bounded by CALLS");
        // SAFETY: as in `call`.
        unsafe { (&raw mut (*self.memory.control()).count).write_volatile(count) };
        fence(Ordering::Release);
        self.count
    }
}

fn fd_argument(fd: i32) -> u64 {
    u64::from(fd.cast_unsigned())
}

//! Reading the kernel's memory, by a BPF program that does nothing else (`BPF_PROG_TYPE_SYSCALL`, Linux 5.14;
//! `kernel/bpf/syscall.c`).

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;

use super::fd::owned;

/// The most that is read at once: a table of pages.
pub const READ_BYTES: usize = 4096;
/// What the map holds: more, so that the verifier sees that it is never too small.
const VALUE_BYTES: usize = 2 * READ_BYTES;
/// The same, for instructions: a mask.
const VALUE_MASK: i32 = 0x1FFF;

const MAP_CREATE: libc::c_int = 0;
const PROG_LOAD: libc::c_int = 5;
const PROG_TEST_RUN: libc::c_int = 10;
const MAP_TYPE_ARRAY: u32 = 2;
const PROG_TYPE_SYSCALL: u32 = 31;
const MMAPABLE: u32 = 1 << 10;
const SLEEPABLE: u32 = 1 << 4;
/// `BPF_PSEUDO_MAP_VALUE`: the address of what is in a map.
const MAP_VALUE: u8 = 2;
const HELPER_CURRENT_TASK: i32 = 35;
const HELPER_PROBE_READ_KERNEL: i32 = 113;

/// `struct bpf_insn`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Instruction {
    code: u8,
    registers: u8,
    offset: i16,
    value: i32,
}

/// What the program is given, and gives back.
#[repr(C)]
#[derive(Default)]
struct Context {
    /// Where to read; zero asks for the task that runs.
    address: u64,
    bytes: u64,
    /// Zero, or a negative error number; the task.
    answer: u64,
}

/// The part of `union bpf_attr` that a call uses, and zeros.
type Attributes = [u64; 16];

const INSTRUCTIONS: u32 = 13;
const CONTEXT_BYTES: u32 = 24;
const ATTRIBUTES_BYTES: libc::c_uint = 128;

const _: () = {
    assert!(VALUE_BYTES == VALUE_MASK as usize + 1 && VALUE_BYTES.is_power_of_two());
    assert!(size_of::<Context>() == CONTEXT_BYTES as usize && size_of::<Attributes>() == ATTRIBUTES_BYTES as usize);
    assert!(size_of::<Instruction>() == 8);
};

/// A program that reads the kernel's memory, and where it puts what it reads.
pub struct KernelMemory {
    program: OwnedFd,
    /// The map's value, shared with the program; it lasts as long as the map, which the program holds.
    value: NonNull<[u8; VALUE_BYTES]>,
}

// SAFETY: the mapping is ours alone, and may be read from any one thread at a time.
unsafe impl Send for KernelMemory {}

impl KernelMemory {
    /// Loads the program.
    ///
    /// # Errors
    /// EPERM without `CAP_BPF` and `CAP_PERFMON`; as the kernel says where it has no BPF, or forbids it (lockdown).
    pub fn open() -> io::Result<Self> {
        let mut map: Attributes = [0; 16];
        map[0] = pair(MAP_TYPE_ARRAY, 4);
        map[1] = pair(VALUE_MASK.cast_unsigned() + 1, 1);
        map[2] = pair(MMAPABLE, 0);
        let map = owned(bpf(MAP_CREATE, &mut map)?.into())?;
        // SAFETY: a new mapping of a map of this size, wherever the kernel puts it.
        let value = unsafe {
            libc::mmap(std::ptr::null_mut(), VALUE_BYTES, libc::PROT_READ, libc::MAP_SHARED, map.as_raw_fd(), 0)
        };
        if value == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let value = NonNull::new(value.cast()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        let instructions = program(map.as_raw_fd());
        let mut load: Attributes = [0; 16];
        load[0] = pair(PROG_TYPE_SYSCALL, INSTRUCTIONS);
        load[1] = instructions.as_ptr() as u64;
        load[2] = c"GPL".as_ptr() as u64;
        load[5] = pair(0, SLEEPABLE);
        let program = owned(bpf(PROG_LOAD, &mut load)?.into())?;
        Ok(Self { program, value })
    }

    /// The kernel's address of the task that runs this.
    ///
    /// # Errors
    /// As the kernel says.
    pub fn current_task(&self) -> io::Result<u64> {
        self.run(Context::default())
    }

    /// Reads `bytes` at a kernel's address, at most [`READ_BYTES`]; they last until the next reading.
    ///
    /// # Errors
    /// EFAULT where nothing is.
    pub fn read(&mut self, address: u64, bytes: usize) -> io::Result<&[u8]> {
        let bytes = bytes.min(READ_BYTES);
        let answer = self.run(Context { address, bytes: bytes as u64, answer: 0 })?.cast_signed();
        if answer != 0 {
            return Err(io::Error::from_raw_os_error(i32::try_from(-answer).unwrap_or(libc::EFAULT)));
        }
        // SAFETY: the mapping is of this size, and the program, which alone writes to it, runs only in `run`, which takes
        // `self`, borrowed exclusively here for as long as the slice lives.
        Ok(unsafe { &self.value.as_ref()[..bytes] })
    }

    /// Reads a word at a kernel's address.
    ///
    /// # Errors
    /// As [`KernelMemory::read`].
    pub fn word(&mut self, address: u64) -> io::Result<u64> {
        let bytes = self.read(address, 8)?;
        bytes.first_chunk().map(|bytes| u64::from_ne_bytes(*bytes)).ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }

    /// Follows pointers: each is at the next offset from where the last one leads.
    ///
    /// # Errors
    /// As [`KernelMemory::read`].
    pub fn follow(&mut self, from: u64, offsets: &[u64]) -> io::Result<u64> {
        offsets.iter().try_fold(from, |at, offset| self.word(at.wrapping_add(*offset)))
    }

    fn run(&self, mut context: Context) -> io::Result<u64> {
        let mut test: Attributes = [0; 16];
        test[0] = u64::from(self.program.as_raw_fd().cast_unsigned());
        test[5] = pair(CONTEXT_BYTES, 0);
        test[6] = (&raw mut context) as u64;
        bpf(PROG_TEST_RUN, &mut test)?;
        Ok(context.answer)
    }
}

impl Drop for KernelMemory {
    fn drop(&mut self) {
        // SAFETY: our own mapping, of this size, to which no reference is left.
        unsafe { libc::munmap(self.value.as_ptr().cast(), VALUE_BYTES) };
    }
}

/// The program: `answer = address ? probe_read_kernel(value, bytes % VALUE_BYTES, address) : current_task()`.
fn program(map: i32) -> [Instruction; INSTRUCTIONS as usize] {
    let step = |code, to: u8, from: u8, offset, value| Instruction { code, registers: from << 4 | to, offset, value };
    let [address, bytes, answer] = [0_i16, 8, 16];
    [
        step(0xBF, 6, 1, 0, 0),                   //  0: r6 = context
        step(0x79, 3, 6, address, 0),             //  1: r3 = address
        step(0x55, 3, 0, 2, 0),                   //  2: to 5 if it is not zero
        step(0x85, 0, 0, 0, HELPER_CURRENT_TASK), //  3: r0 = the task
        step(0x05, 0, 0, 5, 0),                   //  4: to 10
        step(0x18, 1, MAP_VALUE, 0, map),         //  5: r1 = the map's value
        step(0, 0, 0, 0, 0),                      //  6: (its offset)
        step(0x79, 2, 6, bytes, 0),               //  7: r2 = bytes
        step(0x57, 2, 0, 0, VALUE_MASK),          //  8: r2 %= VALUE_BYTES
        step(0x85, 0, 0, 0, HELPER_PROBE_READ_KERNEL),
        step(0x7B, 6, 0, answer, 0), // 10: answer = r0
        step(0xB7, 0, 0, 0, 0),      // 11: r0 = 0
        step(0x95, 0, 0, 0, 0),      // 12: exit
    ]
}

fn pair(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

fn bpf(command: libc::c_int, attributes: &mut Attributes) -> io::Result<libc::c_int> {
    // SAFETY: the kernel reads and writes no more of the attributes than their size, and what they point to is alive during the
    // call: the caller's instructions, licence, and context.
    let answer = unsafe { libc::syscall(libc::SYS_bpf, command, attributes.as_mut_ptr(), ATTRIBUTES_BYTES) };
    i32::try_from(answer).ok().filter(|answer| *answer >= 0).ok_or_else(io::Error::last_os_error)
}

//! A detour for a thread of a target: code at the unused end of its vDSO that makes a system call for us and then goes back to where the
//! thread was, all by itself. So we may be killed at any moment while the thread is on it.
//!
//! The vDSO's last page is filled up with zeros by the kernel, and is never what a program runs or reads. Written to through
//! `/proc/PID/mem`, it becomes the process's own copy of that page, as with a debugger's breakpoint.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use spillway_core::{Address, PAGE_BYTES_U64, Span};

use super::fd::checked;
use super::process::read_memory;
use super::ptrace::Registers;
use super::sched::Hurried;

// No instruction changes a flag, and nothing needs a stack. Where a call makes a thread, that one finds zero in rax and ends.
std::arch::global_asm!(
    ".pushsection .rodata",
    ".balign 64",
    ".globl spillway_detour_start",
    "spillway_detour_start:", // a call that makes a thread
    "syscall",
    "mov rcx, rax",
    "jrcxz 4f",
    "jmp 3f",
    ".globl spillway_detour_last",
    "spillway_detour_last:", // one from which a thread goes on to nothing but its end: exit(0)
    "syscall",
    "4:",
    "mov eax, 60",
    "mov edi, 0",
    "syscall",
    ".globl spillway_detour_call",
    "spillway_detour_call:", // one that does not
    "syscall",
    ".globl spillway_detour_back",
    "spillway_detour_back:",
    "3:",
    // Their middle, so that each word of what is saved is within a byte's reach: there is little room behind some images.
    "lea rbx, [rip + 5f + 10 * 8]",
    "mov eax, 14", // rt_sigprocmask(SIG_SETMASK, mask, 0, 8)
    "mov edi, 2",
    "lea rsi, [rbx + 6 * 8]",
    "mov edx, 0",
    "mov r10d, 8",
    "syscall",
    "mov eax, 144", // sched_setscheduler(0, or nobody, policy, parameter)
    "mov rdi, [rbx + 7 * 8]",
    "mov rsi, [rbx + 8 * 8]",
    "lea rdx, [rbx + 9 * 8]",
    "syscall",
    "mov r15, [rbx - 10 * 8]",
    "mov r14, [rbx - 9 * 8]",
    "mov r13, [rbx - 8 * 8]",
    "mov r12, [rbx - 7 * 8]",
    "mov rbp, [rbx - 6 * 8]",
    "mov r11, [rbx - 4 * 8]",
    "mov r10, [rbx - 3 * 8]",
    "mov r9, [rbx - 2 * 8]",
    "mov r8, [rbx - 8]",
    "mov rax, [rbx]",
    "mov rcx, [rbx + 8]",
    "mov rdx, [rbx + 2 * 8]",
    "mov rsi, [rbx + 3 * 8]",
    "mov rdi, [rbx + 4 * 8]",
    "mov rbx, [rbx - 5 * 8]",
    "jmp [rip + 5f + 15 * 8]",
    ".balign 8",
    ".globl spillway_detour_end",
    "spillway_detour_end:",
    "5:", // what is to be had back: `Saved`
    ".popsection",
);

unsafe extern "C" {
    static spillway_detour_start: u8;
    static spillway_detour_call: u8;
    static spillway_detour_back: u8;
    static spillway_detour_last: u8;
    static spillway_detour_end: u8;
}

/// Words behind the code: fifteen registers and where to go on, the signal mask, whose scheduling is to be restored, to what policy, and
/// its parameter.
const SAVED_BYTES: usize = 20 * 8;
/// Places for detours in one vDSO, from its end on, as far as there is room.
const PLACES: usize = 4;
/// Zeros before them that are left alone: the image may end with some of its own.
const GAP_BYTES: usize = 64;
/// How long somebody else may be at it: an adoption takes less, and a guardian gives up what its pager had a moment after that.
const LOCKED_WITHIN: Duration = Duration::from_millis(20);
/// Whose scheduling cannot be set.
const NOBODY: u64 = u64::MAX;

fn code() -> &'static [u8] {
    let (start, end) = (&raw const spillway_detour_start, &raw const spillway_detour_end);
    // SAFETY: both labels stand in the same read-only section, the end behind the start, with the code between them.
    unsafe { std::slice::from_raw_parts(start, end.addr() - start.addr()) }
}

/// A place for a detour in a process, which is ours as long as this lives.
#[derive(Debug)]
pub struct Detour {
    memory: File,
    at: Address,
    /// Nobody has left anything else there.
    is_alone: bool,
}

impl Detour {
    /// In a process whose first living thread is `first`, and whose vDSO is there. None where that is full, where somebody else is at
    /// it, and where its memory may not be written to. Where a pager was killed that led a thread back, that stays: nobody can tell
    /// whether the thread still has to go there.
    pub fn new(first: i32, vdso: Span) -> Option<Self> {
        let memory = File::options().read(true).write(true).open(format!("/proc/{first}/mem")).ok()?;
        let begun = Instant::now();
        while !is_locked(&memory) {
            if begun.elapsed() > LOCKED_WITHIN {
                return None;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        // Only now: another may have been killed meanwhile.
        let mut image = vec![0; usize::try_from(vdso.pages() * PAGE_BYTES_U64).ok()?];
        memory.read_exact_at(&mut image, vdso.start.0).ok()?;
        let at = vdso.start.plus_bytes(free_places(&image).next()? as u64);
        let detour = Self { memory, at, is_alone: free_places(&image).count() == PLACES };
        // Now, so that the page is not copied while a thread stands still.
        detour.forget().ok()?;
        Some(detour)
    }

    /// Makes it lead `thread` of the process, which has stopped, back to these registers, this signal mask, and how it was scheduled.
    ///
    /// # Errors
    /// Where it cannot be written to, or the thread does not see it: it has called exec.
    pub fn lead(&self, thread: i32, registers: &Registers, mask: u64, hurried: Option<&Hurried>) -> io::Result<()> {
        let (whose, policy) = hurried.map_or((NOBODY, 0), |hurried| (0, hurried.policy_before()));
        let words = saved(&resumed(registers)).into_iter().chain([mask, whose, policy, 0]);
        self.lay(thread, &code().iter().copied().chain(words.flat_map(u64::to_ne_bytes)).collect::<Vec<_>>())
    }

    /// Makes it a place for last calls of `thread` of the process, and nothing else.
    ///
    /// # Errors
    /// As [`Detour::lead`].
    pub fn end(&self, thread: i32) -> io::Result<()> {
        self.lay(thread, code())
    }

    fn lay(&self, thread: i32, image: &[u8]) -> io::Result<()> {
        self.memory.write_all_at(image, self.at.0)?;
        let mut seen = vec![0; image.len()];
        read_memory(thread, self.at, &mut seen)?;
        if seen == image { Ok(()) } else { Err(io::ErrorKind::NotFound.into()) }
    }

    /// Where a call is made that makes a thread, which ends if we are killed before it has other registers.
    pub fn clone_call(&self) -> u64 {
        self.at.0
    }

    /// Where any other call is made.
    pub fn call(&self) -> u64 {
        self.address_of(&raw const spillway_detour_call)
    }

    /// The registers with which a thread goes back that had these.
    pub fn back(&self, saved: &Registers) -> Registers {
        Registers { rip: self.address_of(&raw const spillway_detour_back), orig_rax: u64::MAX, ..*saved }
    }

    /// Where a call is made from which no thread goes on to anything but its end.
    pub fn last_call(&self) -> u64 {
        self.address_of(&raw const spillway_detour_last)
    }

    fn address_of(&self, label: *const u8) -> u64 {
        self.at.0 + (label.addr() - (&raw const spillway_detour_start).addr()) as u64
    }

    /// It leads nobody back any more: who was to go there has its registers. Who is to make its last call may still be there.
    ///
    /// # Errors
    /// When the process has ended.
    pub fn forget(&self) -> io::Result<()> {
        self.memory.write_all_at(&[0; SAVED_BYTES], self.at.0 + code().len() as u64)
    }

    /// The page that it is on, of which the process needs no copy of its own when nobody is on it any more; none if another may still
    /// have to go that way.
    pub fn page(&self) -> Option<Span> {
        let page = Span::of_pages(Address(self.at.0 / PAGE_BYTES_U64 * PAGE_BYTES_U64), 1);
        self.is_alone.then_some(page)
    }

    /// Leaves zeros there. No thread may be on it.
    ///
    /// # Errors
    /// When the process has ended.
    pub fn clear(&self) -> io::Result<()> {
        self.memory.write_all_at(&vec![0; bytes()], self.at.0)
    }
}

/// Takes the lock of a process's memory, if nobody has it.
fn is_locked(memory: &File) -> bool {
    // SAFETY: no pointers. The lock is given up with the last descriptor of the file, also if we are killed.
    checked(unsafe { libc::flock(memory.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) }.into()).is_ok()
}

/// What a detour takes.
fn bytes() -> usize {
    code().len() + SAVED_BYTES
}

/// Where in this image of a vDSO there is room for a detour.
fn free_places(image: &[u8]) -> impl Iterator<Item = usize> {
    let from = |place: usize| image.len().checked_sub(place * bytes()).filter(|&from| from >= GAP_BYTES);
    let is_zeros = |bytes: &[u8]| bytes.iter().all(|&byte| byte == 0);
    // The same code may be there, as nobody has to go back that way.
    let is_free = move |&from: &usize| {
        let (before, (old, saved)) = (&image[from - GAP_BYTES..from], image[from..][..bytes()].split_at(code().len()));
        is_zeros(before) && (is_zeros(old) || old == code()) && is_zeros(saved)
    };
    (1..=PLACES).filter_map(from).filter(is_free)
}

/// The registers in the order of the code, and where to go on.
fn saved(registers: &Registers) -> [u64; 16] {
    let Registers { r15, r14, r13, r12, rbp, rbx, r11, r10, r9, r8, rax, rcx, rdx, rsi, rdi, rip, .. } = *registers;
    [r15, r14, r13, r12, rbp, rbx, r11, r10, r9, r8, rax, rcx, rdx, rsi, rdi, rip]
}

/// As the kernel would let a stopped thread go on (`arch_do_signal_or_restart`): a system call that was broken off is made again.
fn resumed(registers: &Registers) -> Registers {
    /// `ERESTARTSYS`, `ERESTARTNOINTR`, `ERESTARTNOHAND`: include/linux/errno.h.
    const AGAIN: [i64; 3] = [-512, -513, -514];
    /// `ERESTART_RESTARTBLOCK`.
    const GO_ON: i64 = -516;
    let mut resumed = *registers;
    if registers.orig_rax.cast_signed() >= 0 {
        let again = match registers.rax.cast_signed() {
            answer if AGAIN.contains(&answer) => Some(registers.orig_rax),
            GO_ON => Some(libc::SYS_restart_syscall.cast_unsigned()),
            _ => None,
        };
        if let Some(number) = again {
            resumed.rax = number;
            // The instruction `syscall`.
            resumed.rip -= 2;
        }
    }
    resumed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_that_were_broken_off_are_made_again() {
        // SAFETY: plain integers, for which zeros are valid.
        let none: Registers = unsafe { std::mem::zeroed() };
        let stopped = |orig_rax: i64, rax: i64| {
            let registers =
                Registers { orig_rax: orig_rax.cast_unsigned(), rax: rax.cast_unsigned(), rip: 1000, ..none };
            let resumed = resumed(&registers);
            (resumed.rax.cast_signed(), resumed.rip)
        };
        for again in [-512, -513, -514] {
            assert_eq!(stopped(libc::SYS_read, again), (libc::SYS_read, 998));
        }
        assert_eq!(stopped(libc::SYS_nanosleep, -516), (libc::SYS_restart_syscall, 998));
        for answer in [-4, 0, 7] {
            assert_eq!(stopped(libc::SYS_read, answer), (answer, 1000));
        }
        // Not in a call: whatever it has there is its own.
        assert_eq!(stopped(-1, -512), (-512, 1000));
    }

    /// Linux 6.18's own image ends 1,487 bytes before the end of its last page, and three detours filled that up.
    #[test]
    fn there_is_room_for_all_places_behind_the_largest_image_seen() {
        let mut image = vec![0; 2 * 4096];
        image[..2 * 4096 - 1487].fill(0xcc);
        assert_eq!(free_places(&image).count(), PLACES);
    }

    #[test]
    fn what_somebody_has_left_stays() {
        let mut image = vec![0; 2 * 4096];
        image[..6000].fill(0xcc);
        let free_place = |image: &[u8]| free_places(image).next();
        let mut places = Vec::new();
        assert_eq!(free_places(&image).count(), PLACES);
        while let Some(place) = free_place(&image) {
            // What a pager leaves that is killed when nobody has to go back that way any more.
            image[place..][..code().len()].copy_from_slice(code());
            assert_eq!(free_place(&image), Some(place));
            image[place + code().len()] = 1;
            places.push(place);
            assert!(free_places(&image).count() < PLACES, "its page must not be given back");
        }
        assert_eq!(places.len(), PLACES);
        assert!(places.windows(2).all(|pair| pair[1] + bytes() == pair[0]) && places[PLACES - 1] >= 6000 + GAP_BYTES);
        image[places[1]..][..bytes()].fill(0);
        assert_eq!(free_place(&image), Some(places[1]));
        image[places[1] - 1] = 1;
        assert_eq!(free_place(&image), None, "it may be the image's own zeros");
        assert_eq!((free_place(&[0xcc; 8192]), free_place(&[0; 32]), free_place(&[])), (None, None, None));
    }
}

//! Restartable sequences (rseq(2)): what allocators do for one CPU without a lock, and begin anew when they were interrupted.

use spillway_core::Address;

use super::process::read_memory;
use super::ptrace::{Registers, Seized};

/// Of `struct rseq`, where it is told which sequence the thread may be in.
const SEQUENCE_OFFSET: u64 = 8;

/// Takes a thread that has stopped in a restartable sequence to where that is given up, as the kernel would: once it has run a call of
/// ours, the kernel finds it elsewhere and forgets about the sequence (`rseq_ip_fixup`), whose rest would then work on another CPU's
/// data.
pub fn give_up(stopped: &Seized, registers: &mut Registers) {
    let Some(area) = stopped.sequences() else { return };
    let Some([sequence]) = words(stopped.thread(), area.plus_bytes(SEQUENCE_OFFSET)) else { return };
    // A version and flags, where it begins, how long it is, and where it is given up (`struct rseq_cs`).
    let Some([_, start, length, give_up]) = words(stopped.thread(), Address(sequence)) else { return };
    if registers.rip.wrapping_sub(start) < length {
        registers.rip = give_up;
    }
}

fn words<const COUNT: usize>(thread: i32, at: Address) -> Option<[u64; COUNT]> {
    let mut words = [[0; 8]; COUNT];
    read_memory(thread, at, words.as_flattened_mut()).ok()?;
    Some(words.map(u64::from_ne_bytes))
}

#[cfg(test)]
mod tests {
    use super::super::test::Program;
    use super::*;
    use crate::skipped::skipped;

    /// Begins a sequence that never ends, anew whenever it was given up; never returns.
    fn stay_in_a_sequence(area: usize) -> ! {
        // SAFETY: `area` is what this thread has registered, the descriptor and the code are as rseq(2) has them, and nothing else is
        // touched.
        unsafe {
            std::arch::asm!(
                ".pushsection .data.rel, \"aw\"",
                ".balign 32",
                "25:",
                ".long 0, 0",
                ".quad 26f, 27f - 26f, 28f",
                ".popsection",
                "24:",
                "lea rax, [rip + 25b]",
                "mov qword ptr [rcx + 8], rax",
                "26:",
                "jmp 26b",
                "27:",
                ".long 0x53053053",
                "28:",
                "jmp 24b",
                in("rcx") area,
                options(noreturn)
            )
        }
    }

    /// Where this thread's sequences are told of, if its C library does that.
    fn area() -> Option<usize> {
        // SAFETY: a name that ends.
        let offset = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"__rseq_offset".as_ptr()) }.cast::<isize>();
        let thread: usize;
        // SAFETY: the first word of a thread's own memory is its address (the x86-64 psABI).
        unsafe { std::arch::asm!("mov {}, fs:[0]", out(reg) thread, options(pure, readonly, nostack)) };
        // SAFETY: glibc's number, where there is one.
        (!offset.is_null()).then(|| thread.wrapping_add_signed(unsafe { *offset }))
    }

    fn stopped(program: &Program) -> Seized {
        std::thread::sleep(std::time::Duration::from_millis(20));
        let mut seized = Seized::new(program.pid()).expect("a child of ours");
        seized.stop().expect("it runs");
        seized
    }

    #[test]
    fn a_sequence_that_the_stop_interrupted_is_given_up() {
        let Some(area) = area() else { return skipped("this C library registers no restartable sequences") };
        let program = Program::run(|| stay_in_a_sequence(area));
        // Where the thread lost its CPU just then, the kernel has given the sequence up before it stopped.
        let is_inside = |seized: &Seized| {
            let area = seized.sequences().expect("it has one").plus_bytes(SEQUENCE_OFFSET);
            words(seized.thread(), area) != Some([0])
        };
        let seized = (0..100).map(|_| stopped(&program)).find(is_inside).expect("it is in one nearly always");
        let before = seized.registers().expect("it has stopped");
        let mut after = before;
        give_up(&seized, &mut after);
        // Behind a jump of two bytes and the signature.
        assert_eq!(after.rip, before.rip + 2 + 4);
    }

    #[test]
    fn who_is_in_no_sequence_goes_on_where_it_is() {
        let program = Program::busy();
        let seized = stopped(&program);
        let before = seized.registers().expect("it has stopped");
        let mut after = before;
        give_up(&seized, &mut after);
        assert_eq!(after.rip, before.rip);
    }
}

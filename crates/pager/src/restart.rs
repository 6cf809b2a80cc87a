//! System calls that the kernel does not restart when a thread is stopped in them.
//!
//! Most calls go on by themselves after a stop, with what was left of their time. A few return EINTR to the program
//! instead (signal(7)), which it would not have seen without us. Their registers are set so that the call is made again,
//! with what is left of its time where a register or a copy can say so.

use std::time::Duration;

use spillway_core::Address;

use crate::procfs;
use crate::sys::process;
use crate::sys::ptrace::Registers;
use crate::sys::sched::{Cpus, thread_id};

/// Where such a call has its time-out.
enum TimeOut {
    /// Nowhere: it waits for ever, or by an option of its socket, whose time then begins anew.
    None,
    /// Milliseconds in the fourth argument; negative for ever.
    Milliseconds,
    /// A `struct timespec` at the fourth argument.
    FourthArgument,
    /// A `struct timespec` at the third argument.
    ThirdArgument,
    /// A `struct timespec` at the fifth argument.
    FifthArgument,
}

fn time_out(call: i64) -> Option<TimeOut> {
    match call {
        libc::SYS_epoll_wait | libc::SYS_epoll_pwait => Some(TimeOut::Milliseconds),
        libc::SYS_epoll_pwait2 | libc::SYS_semtimedop => Some(TimeOut::FourthArgument),
        libc::SYS_rt_sigtimedwait => Some(TimeOut::ThirdArgument),
        libc::SYS_io_getevents => Some(TimeOut::FifthArgument),
        libc::SYS_semop
        | libc::SYS_io_uring_enter
        | libc::SYS_recvfrom
        | libc::SYS_recvmsg
        | libc::SYS_recvmmsg
        | libc::SYS_sendto
        | libc::SYS_sendmsg
        | libc::SYS_accept
        | libc::SYS_accept4
        | libc::SYS_connect
        | libc::SYS_sendmmsg
        | libc::SYS_read
        | libc::SYS_readv
        | libc::SYS_write
        | libc::SYS_writev => Some(TimeOut::None),
        _ => None,
    }
}

/// How long `thread` of `pid` has been asleep; zero where the kernel does not tell. Takes the calling thread to the CPU
/// on which the other last ran, because only that CPU's clock compares.
pub fn asleep_ns(pid: i32, thread: i32) -> u64 {
    let Ok(stat) = procfs::thread_stat(pid, thread) else { return 0 };
    if stat.state == b'R' {
        return 0;
    }
    let Ok(allowed) = Cpus::of(0) else { return 0 };
    if Cpus::one(stat.cpu).confine(0).is_err() {
        return 0;
    }
    // The clock is read when a thread comes to its CPU: leave it for a moment.
    std::thread::sleep(Duration::from_micros(50));
    let now = procfs::last_ran_ms(std::process::id().cast_signed(), thread_id());
    // A failure leaves us where we are, which is slower and not wrong.
    let _ = allowed.confine(0);
    match (procfs::last_ran_ms(pid, thread), now) {
        (Some(then), Some(now)) if now > then => {
            u64::try_from(Duration::from_secs_f64((now - then) / 1e3).as_nanos()).unwrap_or(u64::MAX)
        }
        _ => 0,
    }
}

/// Makes `registers`, of `thread` as it was just stopped, repeat a call that the stop broke off. `mask` is what it has blocked,
/// `slept_ns` how long it had slept. `spare` is memory of ours in the target, for a `struct timespec`.
pub fn repeat(thread: i32, registers: &mut Registers, mask: u64, slept_ns: u64, spare: Option<Address>) {
    let broken_off = registers.rax.cast_signed() == -i64::from(libc::EINTR);
    let call = registers.orig_rax.cast_signed();
    let Some(time_out) = (broken_off && call >= 0).then(|| time_out(call)).flatten() else { return };
    if has_signal(thread, mask) {
        // The program's own signal broke it off, or will: that it does see.
        return;
    }
    let shortened = match time_out {
        TimeOut::None => true,
        TimeOut::Milliseconds => {
            let left = i32::from_ne_bytes(low_half(registers.r10));
            if left > 0 {
                let slept_ms = i32::try_from(slept_ns / 1_000_000).unwrap_or(i32::MAX);
                registers.r10 = u64::from(left.saturating_sub(slept_ms).max(0).cast_unsigned());
            }
            true
        }
        TimeOut::ThirdArgument => shorten(thread, &mut registers.rdx, slept_ns, spare),
        TimeOut::FourthArgument => shorten(thread, &mut registers.r10, slept_ns, spare),
        TimeOut::FifthArgument => shorten(thread, &mut registers.r8, slept_ns, spare),
    };
    if !shortened {
        // That it was interrupted is true, at least.
        return;
    }
    // The two bytes of `syscall`, once more.
    registers.rip -= 2;
    registers.rax = registers.orig_rax;
    // Nothing for the kernel to restart on its own.
    registers.orig_rax = u64::MAX;
}

/// Lets `argument` point at a copy of its time-out, less what has passed. False where it cannot be told any more: it points at the copy
/// that an earlier adoption made, whose memory is gone, or is this one's.
fn shorten(thread: i32, argument: &mut u64, slept_ns: u64, spare: Option<Address>) -> bool {
    let Some(spare) = spare.filter(|_| *argument != 0) else { return true };
    let mut time = [0_u8; 16];
    if *argument == spare.0 || process::read_memory(thread, Address(*argument), &mut time).is_err() {
        return false;
    }
    let [a, b] = [&time[..8], &time[8..]].map(|half| u64::from_ne_bytes(half.try_into().expect("eight bytes")));
    let left = a.saturating_mul(1_000_000_000).saturating_add(b).saturating_sub(slept_ns);
    let image: Vec<u8> =
        [left / 1_000_000_000, left % 1_000_000_000].iter().flat_map(|word| word.to_ne_bytes()).collect();
    if process::write_memory(thread, spare, &image).is_ok() {
        *argument = spare.0;
    }
    true
}

fn has_signal(thread: i32, mask: u64) -> bool {
    let set = |name| procfs::status_field(thread, name).and_then(|set| u64::from_str_radix(&set, 16).ok()).unwrap_or(0);
    (set("SigPnd") | set("ShdPnd")) & !mask != 0
}

fn low_half(register: u64) -> [u8; 4] {
    let [a, b, c, d, ..] = register.to_le_bytes();
    [a, b, c, d]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stopped_in(call: i64, result: i64) -> Registers {
        Registers {
            r15: 0,
            r14: 0,
            r13: 0,
            r12: 0,
            rbp: 0,
            rbx: 0,
            r11: 0,
            r10: 1000,
            r9: 0,
            r8: 0,
            rax: result.cast_unsigned(),
            rcx: 0,
            rdx: 0,
            rsi: 0,
            rdi: 0,
            orig_rax: call.cast_unsigned(),
            rip: 0x1002,
            cs: 0x33,
            eflags: 0,
            rsp: 0,
            ss: 0,
            fs_base: 0,
            gs_base: 0,
            ds: 0,
            es: 0,
            fs: 0,
            gs: 0,
        }
    }

    fn own_thread() -> i32 {
        std::process::id().cast_signed()
    }

    #[test]
    fn a_broken_epoll_wait_is_made_again_for_the_rest_of_its_time() {
        let mut registers = stopped_in(libc::SYS_epoll_wait, -4);
        repeat(own_thread(), &mut registers, 0, 300_000_000, None);
        assert_eq!((registers.rip, registers.rax, registers.r10), (0x1000, 232, 700));
        let mut late = stopped_in(libc::SYS_epoll_wait, -4);
        repeat(own_thread(), &mut late, 0, 5_000_000_000, None);
        assert_eq!(late.r10, 0);
    }

    #[test]
    fn calls_that_the_kernel_restarts_are_left_to_it() {
        for (call, result) in [(libc::SYS_clock_nanosleep, -516), (libc::SYS_epoll_wait, 3), (libc::SYS_pause, -4)] {
            let mut registers = stopped_in(call, result);
            repeat(own_thread(), &mut registers, 0, 0, None);
            assert_eq!(registers.rip, 0x1002);
        }
    }
}

//! Restartable sequences (`kernel/rseq.c`): glibc registers an area for each thread, of which it uses the number of the CPU alone, to
//! tell it in `sched_getcpu`. For that the kernel writes to the thread's memory whenever the thread has been switched to, and the fault
//! thread is switched to once or twice a fault.

/// Has the kernel leave the calling thread's memory alone from now on; whether it does. glibc asks the kernel for the CPU then
/// (`sched_getcpu.c`). Where the thread's area is not found, or has another length, it stays registered.
#[cfg(all(target_arch = "x86_64", target_env = "gnu"))]
pub fn leave() -> bool {
    // Of glibc 2.35 and later. What it registers is the area of the kernel's first version, whatever later fields it uses.
    const LENGTH: usize = 32;
    const UNREGISTER: i32 = 1;
    // What stands before each abort handler on this architecture: `RSEQ_SIG` of glibc's sys/rseq.h.
    const SIGNATURE: u32 = 0x5305_3053;
    // SAFETY: the name ends in a zero byte; where no library has it, null comes back.
    let offset = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"__rseq_offset".as_ptr()) }.cast::<i64>();
    if offset.is_null() {
        return false;
    }
    // SAFETY: glibc's `const ptrdiff_t __rseq_offset`, set before `main` and for ever.
    let offset = unsafe { offset.read() };
    // SAFETY: no arguments. To glibc on this architecture it is the thread pointer, which the offset is relative to.
    let pointer = unsafe { libc::pthread_self() };
    let area = pointer.wrapping_add_signed(offset);
    // SAFETY: the kernel compares the address with the one that is registered, and writes there only if they are the same: glibc's area,
    // which lives as long as the thread.
    unsafe { libc::syscall(libc::SYS_rseq, area, LENGTH, UNREGISTER, SIGNATURE) == 0 }
}

/// Nothing is registered by other C libraries, and elsewhere the area is not looked for.
#[cfg(not(all(target_arch = "x86_64", target_env = "gnu")))]
pub fn leave() -> bool {
    false
}

#[cfg(all(test, target_arch = "x86_64", target_env = "gnu"))]
mod tests {
    use super::leave;
    use crate::sys::sched::{Cpus, current_cpu};

    #[test]
    fn a_thread_that_has_left_still_knows_its_cpu() {
        let thread = std::thread::spawn(|| {
            assert!(leave(), "glibc had registered it");
            assert!(!leave(), "it is registered no more");
            let cpu = current_cpu().expect("it runs on one");
            Cpus::one(cpu).confine(0).expect("it may run there");
            assert_eq!(current_cpu(), Some(cpu));
        });
        thread.join().unwrap();
    }
}

//! What it is to do to real processes.

use super::*;
use crate::sys::test::{Program, comes_true};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// A process that cannot stop for `busy_ms`: it waits in the kernel for its child to end, as after vfork(2).
fn unstoppable(busy_ms: u32) -> i32 {
    // SAFETY: each has memory of its own, and until they end, the child and its child make nothing but system calls.
    unsafe {
        let pid = libc::fork();
        if pid == 0 {
            if libc::syscall(libc::SYS_clone, libc::CLONE_VFORK | libc::SIGCHLD, 0, 0, 0, 0) == 0 {
                libc::usleep(busy_ms * 1000);
                libc::_exit(0);
            }
            libc::sleep(20);
            libc::_exit(0);
        }
        assert!(pid > 0, "no process");
        pid
    }
}

/// The same, once it was seized, did not stop in time, and was not wanted any more.
fn given_up(busy_ms: u32) -> i32 {
    let pid = unstoppable(busy_ms);
    std::thread::sleep(Duration::from_millis(50));
    let mut seized = Seized::new(pid).expect("a child of ours");
    assert!(matches!(seized.stop_within(20_000_000), Err(CallError::Stuck)));
    pid
}

/// Torture seed 1795283334032: it stopped after it had been given up, and stayed stopped.
#[test]
fn a_thread_that_stops_too_late_is_let_go_when_it_does() {
    let pid = given_up(600);
    let tracer = || procfs::status_field(pid, "TracerPid");
    assert_ne!(tracer().as_deref(), Some("0"), "it has not stopped yet");
    let until_ns = now_ns() + 5_000_000_000;
    while tracer().as_deref() != Some("0") && now_ns() < until_ns {
        let_go_of_left();
        std::thread::sleep(Duration::from_millis(10));
    }
    let state = procfs::stat(pid).map(|stat| stat.state);
    // SAFETY: no pointers but a null one; the process is our child.
    unsafe {
        libc::kill(pid, libc::SIGKILL);
        libc::waitpid(pid, std::ptr::null_mut(), 0);
    }
    assert_eq!((tracer_was_gone(until_ns), state.ok()), (true, Some(b'S')));
}

/// A process that shared memory, and did not stop in time, was taken for one that a debugger has when it was tried again.
#[test]
fn a_thread_that_did_not_stop_can_be_seized_again_before_it_does() {
    let pid = given_up(400);
    assert!(is_left(pid));
    let again = Seized::new(pid).map(|mut seized| seized.stop().is_ok() && seized.registers().is_ok());
    let is_left = is_left(pid);
    // SAFETY: no pointers but a null one; the process is our child.
    unsafe {
        libc::kill(pid, libc::SIGKILL);
        libc::waitpid(pid, std::ptr::null_mut(), 0);
    }
    assert_eq!((again.ok(), is_left), (Some(true), false));
}

/// What a program and this test both see: how often it has done what it does.
fn shared_counter() -> &'static AtomicU64 {
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping, which is never unmapped; zeros are an atomic.
    unsafe {
        let page = libc::mmap(std::ptr::null_mut(), 4096, protection, flags, -1, 0);
        assert_ne!(page, libc::MAP_FAILED);
        &*page.cast::<AtomicU64>()
    }
}

/// What `clone` is told that makes a thread.
const A_THREAD: [u64; 6] = {
    let shared = libc::CLONE_VM | libc::CLONE_FS | libc::CLONE_SIGHAND | libc::CLONE_THREAD;
    [shared.cast_unsigned() as u64, 0, 0, 0, 0, 0]
};

/// Where there is a `syscall` instruction, in a forked child as well.
fn system_call() -> u64 {
    let code = (libc::syscall as *const u8).cast::<[u8; 2]>();
    // SAFETY: code of libc's; a system call is within the few instructions of this function.
    let at = (0..64).find(|&at| unsafe { code.byte_add(at).read_unaligned() } == [0x0f, 0x05]).expect("a system call");
    (code.addr() + at) as u64
}

/// Seizes it, lets it go on for a moment as adoption does, stops it, and lets it go.
fn seize_and_let_go(program: &Program) {
    let mut seized = Seized::new(program.pid()).expect("a child of ours");
    std::thread::sleep(Duration::from_micros(100));
    seized.stop().expect("it runs");
}

/// What a tracer that ends leaves behind, after `until` of what it does to a program.
fn left_by_a_tracer(until: impl FnOnce(&mut Seized) + Send + 'static) -> Program {
    let program = Program::busy();
    let pid = program.pid();
    let tracer = std::thread::spawn(move || {
        let mut seized = Seized::new(pid).expect("a child of ours");
        seized.stop().expect("it runs");
        until(&mut seized);
        std::mem::forget(seized);
    });
    tracer.join().expect("it does not fail");
    program
}

/// A program went on with the registers of a call of ours when the pager was killed in the middle of adopting it.
#[test]
fn a_program_does_not_outlive_a_tracer_in_the_middle_of_a_call() {
    let program = left_by_a_tracer(|seized| {
        let registers = seized.registers().expect("it has stopped");
        seized.set_registers(&Registers { rax: 1, ..registers }).expect("the same");
        seized.set_killed_with_us(true).expect("the same");
    });
    assert!(comes_true(|| program.ended_by() == Some(libc::SIGKILL)));
}

#[test]
fn a_program_outlives_a_tracer_that_has_let_it_run_on() {
    let program = left_by_a_tracer(|seized| seized.resume().expect("it has stopped"));
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(program.ended_by(), None);
}

/// A thread that a program was just making when it was adopted never ran, and the program never ended.
#[test]
fn a_thread_that_is_made_while_its_maker_is_seized_runs() {
    static mut STACK: [u128; 4096] = [0; 4096];
    static LIVES: AtomicI32 = AtomicI32::new(0);
    extern "C" fn end(_: *mut libc::c_void) -> i32 {
        0
    }
    let made = shared_counter();
    let shared = libc::CLONE_VM | libc::CLONE_FS | libc::CLONE_FILES | libc::CLONE_SIGHAND | libc::CLONE_THREAD;
    let (none, flags) = (std::ptr::null_mut::<libc::c_void>(), shared | libc::CLONE_CHILD_CLEARTID);
    let program = Program::run(|| {
        loop {
            LIVES.store(1, Relaxed);
            // SAFETY: the thread only ends, which the kernel tells, and the next is made then: the stack is nobody else's.
            unsafe { libc::clone(end, (&raw mut STACK).add(1).cast(), flags, none, none, none, LIVES.as_ptr()) };
            while LIVES.load(Relaxed) != 0 {
                std::hint::spin_loop();
            }
            made.fetch_add(1, Relaxed);
        }
    });
    for round in 0..200 {
        seize_and_let_go(&program);
        let before = made.load(Relaxed);
        assert!(comes_true(|| made.load(Relaxed) > before + 1), "after {round} rounds");
    }
}

/// Where a thread of ours was killed as it made another, nobody knew of that one, and `spillway run` waited for ever.
#[test]
fn a_program_that_is_killed_while_a_thread_is_made_in_it_ends() {
    for round in 0..300 {
        let program = Program::busy();
        let pid = program.pid();
        let mut seized = Seized::new(pid).expect("a child of ours");
        seized.stop().expect("it runs");
        let registers = seized.registers().expect("it has stopped");
        let killer = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_micros(round % 100));
            // SAFETY: no pointers.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        });
        let called = seized.call(&registers, system_call(), libc::SYS_clone, A_THREAD);
        // Let go before that, either would go on behind a call that is not its own.
        killer.join().expect("it has killed it");
        drop((called, seized));
        let_go_of_strays(pid);
        // SAFETY: a null pointer is none.
        let ended = || unsafe { libc::waitpid(pid, std::ptr::null_mut(), libc::WNOHANG) } != 0;
        assert!(
            comes_true(|| {
                let_go_of_left();
                ended()
            }),
            "in round {round}"
        );
    }
}

/// A program that was stopped and continued all the time could not be adopted: its `clone` was broken off, which counted as its answer.
#[test]
fn a_call_that_a_stop_breaks_off_is_made_again() {
    let program = Program::busy();
    let pid = program.pid();
    let is_over = Arc::new(AtomicBool::new(false));
    let stopper = std::thread::spawn({
        let is_over = Arc::clone(&is_over);
        move || {
            while !is_over.load(Relaxed) {
                // SAFETY: no pointers.
                unsafe { libc::kill(pid, libc::SIGSTOP) };
                // SAFETY: no pointers.
                unsafe { libc::kill(pid, libc::SIGCONT) };
            }
        }
    });
    let mut seized = Seized::new(pid).expect("a child of ours");
    seized.stop().expect("it runs");
    let registers = seized.registers().expect("it has stopped");
    let a_millisecond = [0, 0, 1, 0, 0, 0];
    let calls: Vec<_> =
        (0..100).map(|_| seized.call(&registers, system_call(), libc::SYS_poll, a_millisecond)).collect();
    is_over.store(true, Relaxed);
    stopper.join().expect("it ends");
    let broken_off: Vec<_> = calls.iter().filter_map(|call| call.as_ref().err()).collect();
    assert!(broken_off.is_empty(), "{broken_off:?}");
}

#[test]
fn a_signal_on_its_way_to_who_is_seized_arrives() {
    const SENT: u64 = 20_000;
    static HEARD: AtomicPtr<AtomicU64> = AtomicPtr::new(std::ptr::null_mut());
    extern "C" fn hear(_: i32) {
        // SAFETY: set before the handler is, to a counter that lives for ever.
        unsafe { &*HEARD.load(Relaxed) }.fetch_add(1, Relaxed);
    }
    let heard = shared_counter();
    let is_ready = shared_counter();
    HEARD.store(std::ptr::from_ref(heard).cast_mut(), Relaxed);
    let program = Program::run(|| {
        let handler: extern "C" fn(i32) = hear;
        // SAFETY: the handler only counts.
        unsafe { libc::signal(libc::SIGRTMIN(), handler as libc::sighandler_t) };
        is_ready.store(1, Relaxed);
        loop {
            std::hint::spin_loop();
        }
    });
    assert!(comes_true(|| is_ready.load(Relaxed) == 1));
    let pid = program.pid();
    // Signals of this kind are queued: none stands for two.
    let sender = std::thread::spawn(move || {
        for _ in 0..SENT {
            // SAFETY: no pointers.
            assert_eq!(unsafe { libc::kill(pid, libc::SIGRTMIN()) }, 0);
            std::thread::sleep(Duration::from_micros(5));
        }
    });
    while !sender.is_finished() {
        seize_and_let_go(&program);
    }
    sender.join().expect("all were sent");
    assert!(comes_true(|| heard.load(Relaxed) == SENT), "{} of {SENT}", heard.load(Relaxed));
}

fn tracer_was_gone(until_ns: u64) -> bool {
    now_ns() < until_ns
}

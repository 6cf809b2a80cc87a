//! Where and how threads run, and what keeps the pager itself in memory.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::OnceLock;
use std::time::Duration;

use super::fd::checked;

/// How eagerly the kernel runs a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// As any program (`SCHED_OTHER`).
    Normal,
    /// Only where nothing else wants the CPU (`SCHED_IDLE`). To the kernel's wake-up placement a CPU that runs only
    /// such threads counts as idle, so a thread woken from there stays there (`select_idle_sibling`).
    Idle,
    /// Before all ordinary programs (`SCHED_FIFO`): for what is waited for and short. From the idle class to the normal one is not enough
    /// for that: who has used more than the share of that class waits until others have had as much more, 1 to 3 ms (`entity_eligible`).
    Urgent,
}

/// The calling thread's id.
pub fn thread_id() -> i32 {
    // SAFETY: no arguments.
    unsafe { libc::gettid() }
}

/// The CPU that the calling thread is on, for now.
pub fn current_cpu() -> Option<usize> {
    // SAFETY: no arguments.
    usize::try_from(unsafe { libc::sched_getcpu() }).ok()
}

/// Sets the class of `thread` (0: the calling one).
///
/// In the normal class it is the nicest that others could be to it, where that is allowed: beside busy programs it would
/// otherwise wait for the end of their slices, 3 ms, whenever it wakes up. It runs for microseconds at a time, so nobody misses
/// them. Who may not be urgent is in the normal class instead.
///
/// All threads of a pager that are so at all must be: one of them weighs as much as 88 ordinary ones. Wherever it runs, the weight of its
/// group (autogroup, cgroup) goes, away from the group's ordinary threads on other CPUs, which have a tenth of their share then.
///
/// From the urgent class to the idle one a thread goes by way of the normal one. Directly, the kernel takes what the thread weighed as a
/// real-time one for what it weighs as an idle one (`set_load_weight` sees its old class, `attach_entity_load_avg` its new weight), so
/// that with each turn it counts for 341 times as much in the load of its group (autogroup, cgroup), and the group's other threads get
/// next to no share of their CPUs. A niceness of 0 is what the urgent class weighs.
///
/// # Errors
/// As the kernel says.
pub fn set_class(thread: i32, class: Class) -> io::Result<()> {
    let (policy, nice, priority) = match class {
        Class::Normal => (libc::SCHED_OTHER, FIRST_NICE, 0),
        Class::Idle => (libc::SCHED_IDLE, 0, 0),
        Class::Urgent => (libc::SCHED_FIFO, 0, 1),
    };
    let size = u32::try_from(size_of::<Attributes>()).expect("48");
    let wanted = Attributes { size, policy: policy.cast_unsigned(), nice, priority, ..Attributes::default() };
    if class == Class::Idle {
        let between = Attributes { policy: libc::SCHED_OTHER.cast_unsigned(), ..wanted };
        // Who is in the idle class already, without the right to leave it, does not come from the urgent one.
        let _ = set_attributes(thread, &between);
    }
    set_attributes(thread, &wanted).or_else(|refused| match class {
        Class::Urgent => set_class(thread, Class::Normal),
        Class::Normal => set_attributes(thread, &Attributes { nice: 0, ..wanted }),
        Class::Idle => Err(refused),
    })
}

/// Whether this process may take a thread of its own out of the idle class again: not without `CAP_SYS_NICE` or an `RLIMIT_NICE` of
/// 20, as that class counts as a niceness of 20 (`user_check_sched_setscheduler`). A thread that cannot starves wherever other programs
/// want its CPU. Asked of the kernel once, with a thread that ends.
pub fn idle_class_can_be_left() -> bool {
    static ANSWER: OnceLock<bool> = OnceLock::new();
    let probe = || set_class(0, Class::Idle).is_ok() && set_class(0, Class::Normal).is_ok();
    *ANSWER.get_or_init(|| std::thread::Builder::new().spawn(probe).is_ok_and(|thread| thread.join().unwrap_or(false)))
}

/// What `/proc` says of a thread of this process (proc_pid_stat(5), fields 41 and 19).
#[cfg(test)]
pub fn class_and_niceness(thread: i32) -> (i32, i32) {
    let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")).expect("it runs");
    let fields: Vec<&str> = stat.rsplit_once(')').expect("a name").1.split_whitespace().collect();
    let number = |nth: usize| fields[nth - 3].parse().expect("a number");
    (number(41), number(19))
}

fn set_attributes(thread: i32, attributes: &Attributes) -> io::Result<()> {
    // SAFETY: the structure outlives the call and says its size.
    checked(unsafe { libc::syscall(libc::SYS_sched_setattr, thread, attributes as *const Attributes, 0) })?;
    Ok(())
}

/// Of a thread that must not wait for others.
const FIRST_NICE: i32 = -20;

/// How a thread is scheduled, to be given back to it as it was: `struct sched_attr` of its first version.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Attributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

const _: () = assert!(size_of::<Attributes>() == 48);

/// A thread that runs before all ordinary ones for as long as this lives.
#[derive(Debug)]
pub struct Hurried {
    thread: i32,
    before: Attributes,
}

impl Hurried {
    /// Hurries `thread` (0: the calling one); none without `CAP_SYS_NICE`, or where it is a real-time thread already.
    ///
    /// All have the same rank, so that none takes the CPU of one that waits for it: who waits does so in [`nap`]s.
    pub fn new(thread: i32) -> Option<Self> {
        Self::planned(thread).and_then(Self::begun)
    }

    /// The same, to be begun later.
    pub fn planned(thread: i32) -> Option<Self> {
        let mut before = Attributes::default();
        let bytes = size_of::<Attributes>();
        // SAFETY: the structure is writable for the size given.
        let answer = unsafe { libc::syscall(libc::SYS_sched_getattr, thread, &raw mut before, bytes, 0) };
        checked(answer).ok()?;
        let ordinary = [libc::SCHED_OTHER, libc::SCHED_BATCH, libc::SCHED_IDLE].map(i32::cast_unsigned);
        ordinary.contains(&before.policy).then_some(Self { thread, before })
    }

    /// What was planned.
    pub fn begun(self) -> Option<Self> {
        let parameter = libc::sched_param { sched_priority: 1 };
        // Not those that it creates meanwhile: nobody would give them back what they should have.
        let policy = libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK;
        // SAFETY: `parameter` outlives the call.
        checked(unsafe { libc::sched_setscheduler(self.thread, policy, &raw const parameter) }.into()).ok()?;
        Some(self)
    }

    /// The policy with which the thread would itself be as it was, its niceness being kept. But for what may be its children's: only with
    /// `CAP_SYS_NICE` can it take back that they are not to be nastier to others than usual.
    pub fn policy_before(&self) -> u64 {
        u64::from(self.before.policy | libc::SCHED_RESET_ON_FORK.cast_unsigned())
    }
}

impl Drop for Hurried {
    fn drop(&mut self) {
        // SAFETY: the structure is what the kernel gave; a thread that has ended needs nothing back.
        unsafe { libc::syscall(libc::SYS_sched_setattr, self.thread, &raw const self.before, 0) };
    }
}

/// Sleeps for a moment, and lets those run first that are hurried as the caller is: a nap may be over before the thread sleeps, so that
/// it would never leave its CPU.
pub fn nap(duration: Duration) {
    std::thread::yield_now();
    std::thread::sleep(duration);
}

/// A set of CPUs.
#[derive(Clone, Copy)]
pub struct Cpus(libc::cpu_set_t);

impl Cpus {
    /// Only `cpu`.
    pub fn one(cpu: usize) -> Self {
        // SAFETY: cpu_set_t is an array of integers; zeros are valid.
        let mut set = Self(unsafe { std::mem::zeroed() });
        // SAFETY: CPU_SET checks the bounds of the set.
        unsafe { libc::CPU_SET(cpu, &mut set.0) };
        set
    }

    /// These but for `cpu`.
    pub fn without(mut self, cpu: usize) -> Self {
        // SAFETY: CPU_CLR checks the bounds of the set.
        unsafe { libc::CPU_CLR(cpu, &mut self.0) };
        self
    }

    /// Those that `thread` (0: the calling one) may use.
    ///
    /// # Errors
    /// When it is gone.
    pub fn of(thread: i32) -> io::Result<Self> {
        // SAFETY: as in `one`.
        let mut set = Self(unsafe { std::mem::zeroed() });
        // SAFETY: the set is writable for its size.
        checked(unsafe { libc::sched_getaffinity(thread, size_of::<libc::cpu_set_t>(), &raw mut set.0) }.into())?;
        Ok(set)
    }

    /// How many they are.
    pub fn count(&self) -> i32 {
        // SAFETY: reads the set.
        unsafe { libc::CPU_COUNT(&self.0) }
    }

    /// Confines `thread` (0: the calling one) to them.
    ///
    /// # Errors
    /// When it is gone, or none of them is allowed.
    pub fn confine(&self, thread: i32) -> io::Result<()> {
        // SAFETY: the set outlives the call.
        checked(unsafe { libc::sched_setaffinity(thread, size_of::<libc::cpu_set_t>(), &raw const self.0) }.into())?;
        Ok(())
    }
}

/// Lets this process have as many descriptors as it may: each target takes six.
///
/// # Errors
/// As the kernel says.
pub fn raise_descriptor_limit() -> io::Result<()> {
    let mut limit = descriptor_limit()?;
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: the structure outlives the call.
    checked(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }.into())?;
    Ok(())
}

fn descriptor_limit() -> io::Result<libc::rlimit> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the structure is writable.
    checked(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) }.into())?;
    Ok(limit)
}

/// Makes sure that descriptors are left for what cannot be put off: each child that a target forks takes one, and what is asked of
/// `/proc` takes one for a moment. `any` is one that is open, and `more` are to come for certain.
///
/// # Errors
/// EMFILE when they are not.
pub fn spare_descriptors(any: BorrowedFd<'_>, more: u64) -> io::Result<()> {
    /// So many, or a quarter of all.
    const SPARE: u64 = 64;
    let limit = descriptor_limit()?.rlim_cur;
    // The kernel gives the lowest that is free.
    let next = u64::try_from(any.try_clone_to_owned()?.as_raw_fd()).unwrap_or(0);
    if next + more < limit - SPARE.min(limit / 4) { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EMFILE)) }
}

/// Keeps this process's memory, present and future, in DRAM as it is touched.
///
/// # Errors
/// EPERM or ENOMEM where `RLIMIT_MEMLOCK` is too small and `CAP_IPC_LOCK` is missing.
pub fn lock_memory() -> io::Result<()> {
    // SAFETY: no pointers.
    checked(unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT) }.into())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::skipped::skipped;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc::channel;
    use std::time::Instant;

    use super::*;

    /// Without that, two adoptions on two CPUs kept both programs from running for most of a second.
    #[test]
    fn who_hurries_another_and_naps_leaves_its_cpu_to_that_one() {
        // SAFETY: no pointers.
        let cpu = Cpus::one(usize::try_from(unsafe { libc::sched_getcpu() }).expect("a CPU"));
        let ran = Arc::new(AtomicBool::new(false));
        let (tells, told) = channel();
        let (goes, goes_on) = channel();
        let other = std::thread::spawn({
            let ran = Arc::clone(&ran);
            move || {
                cpu.confine(0).expect("a CPU that is allowed");
                tells.send(thread_id()).expect("the test waits");
                goes_on.recv().expect("the test tells");
                ran.store(true, Ordering::Release);
            }
        });
        let waits = std::thread::spawn(move || {
            let other = told.recv().expect("it is told");
            cpu.confine(0).expect("a CPU that is allowed");
            let ourselves = Hurried::new(0);
            let _hurried = Hurried::new(other);
            let until = Instant::now() + Duration::from_millis(300);
            goes.send(()).expect("it waits");
            while ourselves.is_some() && !ran.load(Ordering::Acquire) && Instant::now() < until {
                nap(Duration::ZERO);
            }
            ourselves.is_some().then(|| ran.load(Ordering::Acquire))
        });
        match waits.join().expect("no panic") {
            Some(ran) => assert!(ran, "it did not run beside one that only waits for it"),
            None => skipped("real-time scheduling needs CAP_SYS_NICE"),
        }
        other.join().expect("no panic");
    }

    /// How long it takes until a thread runs that is woken in the idle class, where it has just used more than its share beside a busy
    /// one, and then becomes of `class`: the median of some times. None where that may not be tried.
    fn wake_up_as(class: Class) -> Option<Duration> {
        let allowed = Cpus::of(0).expect("it lives");
        let cpu = current_cpu().filter(|_| allowed.count() > 1 && idle_class_can_be_left())?;
        allowed.without(cpu).confine(0).expect("another one is allowed");
        let stop = Arc::new(AtomicBool::new(false));
        let stops = Arc::clone(&stop);
        let busy = std::thread::spawn(move || {
            Cpus::one(cpu).confine(0).expect("a CPU that is allowed");
            while !stops.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        let ((goes, goes_on), (tells, told)) = (channel::<()>(), channel());
        let woken = std::thread::spawn(move || {
            Cpus::one(cpu).confine(0).expect("a CPU that is allowed");
            set_class(0, Class::Idle).expect("anybody may");
            tells.send((thread_id(), Instant::now())).expect("the test waits");
            while goes_on.recv().is_ok() {
                let ran = Instant::now();
                tells.send((0, ran)).expect("the test waits");
                while ran.elapsed() < Duration::from_millis(1) {
                    std::hint::spin_loop();
                }
            }
        });
        let (thread, _) = told.recv().expect("it begins");
        let mut took: Vec<Duration> = (0..21)
            .map(|_| {
                std::thread::sleep(Duration::from_micros(1500));
                goes.send(()).expect("it waits");
                let began = Instant::now();
                set_class(thread, class).expect("it lives");
                let (_, ran) = told.recv().expect("it runs");
                set_class(thread, Class::Idle).expect("it lives");
                ran.saturating_duration_since(began)
            })
            .collect();
        drop(goes);
        stop.store(true, Ordering::Relaxed);
        let ended = [busy.join(), woken.join()];
        allowed.confine(0).expect("as before");
        assert!(ended.iter().all(Result::is_ok));
        took.sort_unstable();
        Some(took[took.len() / 2])
    }

    /// In the normal class it takes 2.4 ms, for which a fault without room waited for the reader beside a thread that clears memory.
    #[test]
    fn who_becomes_urgent_runs_at_once_whatever_it_has_used() {
        match wake_up_as(Class::Urgent) {
            Some(took) => assert!(took < Duration::from_millis(1), "{took:?}"),
            None => skipped("needs two CPUs, and CAP_SYS_NICE"),
        }
    }

    /// What the kernel's load tracking says of the calling thread; none where it does not tell.
    fn load_of_this_thread() -> Option<u64> {
        let told = std::fs::read_to_string(format!("/proc/self/task/{}/sched", thread_id())).ok()?;
        let line = told.lines().find(|line| line.starts_with("se.avg.load_avg"))?;
        line.rsplit(':').next()?.trim().parse().ok()
    }

    /// With a load that grew by 341 with each turn, a second later all other threads of the pager had next to no share of their CPUs, and
    /// a program's first touches took 20 s rather than 0.4 s beside four busy ones.
    #[test]
    fn who_is_urgent_again_and_again_does_not_weigh_more_each_time() {
        let turns = || {
            let mut largest = load_of_this_thread()?;
            for _ in 0..100 {
                set_class(0, Class::Urgent).expect("it lives");
                set_class(0, Class::Idle).expect("anybody may");
                largest = largest.max(load_of_this_thread()?);
            }
            Some(largest)
        };
        match std::thread::spawn(move || idle_class_can_be_left().then(turns)).join().expect("no panic") {
            // What a thread of the nicest niceness to itself weighs.
            Some(Some(largest)) => assert!(largest <= 88_761, "{largest}"),
            Some(None) => skipped("the kernel does not tell what threads weigh (CONFIG_SCHED_DEBUG)"),
            None => skipped("needs CAP_SYS_NICE"),
        }
    }
}

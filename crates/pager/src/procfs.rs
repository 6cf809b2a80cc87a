//! What `/proc` says of processes and threads; of their memory in `mappings.rs`, of files of memory in `files.rs`. Parsers take text, so
//! that they can be fuzzed; none panics on any input.

mod files;
mod mappings;

use std::fs;
use std::io::{self, Read as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};

use spillway_core::PAGE_BYTES;

use crate::adopt::NAME as AGENT_NAME;

pub use files::{is_open_elsewhere, open_mapped, open_of};
pub use mappings::{
    FileId, Mapping, Size, has_registered_memory, mappings, mappings_with_flag, parse_flags, parse_statm, size,
};

/// What `/proc/PID/stat` or `/proc/PID/task/TID/stat` says of a process or thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    /// `R` running, `S` asleep, `D` waiting, `T` stopped, `t` traced, `Z` zombie, …
    pub state: u8,
    /// Its parent.
    pub parent: i32,
    /// CPU time in user mode, in clock ticks,
    pub user_ticks: u64,
    /// and in the kernel.
    pub kernel_ticks: u64,
    /// How many threads its process has, those that have ended and were not collected among them; none of a process that was.
    pub threads: usize,
    /// When it started, in clock ticks since boot: with the pid, its identity.
    pub started: u64,
    /// The CPU on which it last ran.
    pub cpu: usize,
    /// What it ended with; 0 while it has not, or where we may not know.
    pub exit_status: u8,
    /// Made by the kernel for itself in this process (`PF_USER_WORKER`, `PF_IO_WORKER`: KVM's, io_uring's, vhost's): it is never
    /// in user mode.
    pub is_kernels: bool,
    /// It is on its way out (`PF_EXITING`).
    pub is_ending: bool,
}

/// `PF_IO_WORKER | PF_USER_WORKER`: include/linux/sched.h. Before 6.4 workers of io_uring have the former alone.
const KERNELS_FLAGS: u32 = 0x10 | 0x4000;

/// `PF_EXITING`: include/linux/sched.h.
const ENDING_FLAG: u32 = 0x4;

/// Parses `/proc/PID/stat`. The command in it may hold anything, parentheses and spaces too.
pub fn parse_stat(text: &str) -> Option<Stat> {
    let rest = &text[text.rfind(')')? + 1..];
    // Without allocating: the fault thread asks where its program runs. Fields are numbered from 3 (state) here: proc_pid_stat(5).
    let mut fields = (3..).zip(rest.split_ascii_whitespace());
    let mut field = |number: usize| fields.find(|(at, _)| *at == number).map(|(_, text)| text);
    let (state, parent) = (*field(3)?.as_bytes().first()?, field(4)?.parse().ok()?);
    let flags = field(9)?.parse::<u32>().ok()?;
    Some(Stat {
        state,
        parent,
        is_kernels: flags & KERNELS_FLAGS != 0,
        is_ending: flags & ENDING_FLAG != 0,
        user_ticks: field(14)?.parse().ok()?,
        kernel_ticks: field(15)?.parse().ok()?,
        threads: field(20)?.parse().ok()?,
        started: field(22)?.parse().ok()?,
        cpu: field(39)?.parse().ok()?,
        // As wait(2) tells it: that of `exit` stands above the signal.
        exit_status: field(52).and_then(|code| code.parse::<u32>().ok()).map_or(0, |code| code.to_le_bytes()[1]),
    })
}

/// The state of process `pid`.
///
/// # Errors
/// When it is gone.
pub fn stat(pid: i32) -> io::Result<Stat> {
    ThreadStat(fs::File::open(format!("/proc/{pid}/stat"))?).read()
}

/// The state of thread `thread` of `pid`.
///
/// # Errors
/// When it is gone.
pub fn thread_stat(pid: i32, thread: i32) -> io::Result<Stat> {
    ThreadStat::open(pid, thread)?.read()
}

/// What tells of one thread, or of a process, kept open: to be asked often.
pub struct ThreadStat(fs::File);

impl ThreadStat {
    /// That of thread `thread` of `pid`.
    ///
    /// # Errors
    /// When it is gone.
    pub fn open(pid: i32, thread: i32) -> io::Result<Self> {
        fs::File::open(format!("/proc/{pid}/task/{thread}/stat")).map(Self)
    }

    /// The thread's state now.
    ///
    /// # Errors
    /// When it is gone: ESRCH, also where another thread has its number since.
    pub fn read(&self) -> io::Result<Stat> {
        let mut bytes = [0; PAGE_BYTES];
        let count = self.0.read_at(&mut bytes, 0)?;
        // The name may be cut within a character; what follows it is plain, and nothing is allocated for it.
        let behind = bytes[..count].iter().rposition(|&byte| byte == b')').map(|at| &bytes[at..count]);
        let text = behind.and_then(|behind| std::str::from_utf8(behind).ok());
        text.and_then(parse_stat).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }
}

/// How often threads are listed before their process is taken to live: each listing that misses one is cut short by another that ends
/// at that moment.
const LISTINGS_MAX: usize = 64;

/// A thread of `pid` that has not ended, and is not an agent of ours; none when all have. It has a directory of its own in
/// `/proc`. That of the process is about its first thread: a process may outlive that (`pthread_exit`), and from then on
/// nothing there tells of memory or descriptors.
///
/// Where the kernel cannot be asked, the process lives, for all we know.
pub fn living_thread(pid: i32) -> Option<i32> {
    if is_alive(stat(pid)) {
        return Some(pid);
    }
    let mut dead = Vec::new();
    for _ in 0..LISTINGS_MAX {
        let listed = match threads(pid) {
            Err(error) if is_for_want_of(&error) => vec![pid],
            threads => threads.unwrap_or_default(),
        };
        let known = dead.len();
        for thread in listed {
            if dead.contains(&thread) {
                continue;
            }
            if is_alive(thread_stat(pid, thread)) && !is_agent(pid, thread) {
                return Some(thread);
            }
            dead.push(thread);
        }
        // The last one listed may have made another meanwhile, or taken the number of the first (execve).
        if dead.len() > known {
            continue;
        }
        let first = stat(pid);
        let count = first.as_ref().map_or(0, |first| first.threads);
        if is_alive(first) {
            return Some(pid);
        }
        // A listing ends early where a thread ends as it is listed (`next_tid`, fs/proc/base.c). The count does not err; and who is
        // still there after it was taken, was counted.
        if dead.iter().filter(|&&thread| thread_stat(pid, thread).is_ok()).count() >= count {
            return None;
        }
    }
    Some(pid)
}

/// Whether a process's first thread, or a thread, has not ended, as far as can be told.
pub fn is_alive(stat: io::Result<Stat>) -> bool {
    stat.map_or_else(|error| is_for_want_of(&error), |stat| !matches!(stat.state, b'Z' | b'X'))
}

/// Whether we could not ask, for want of descriptors or memory of our own: that says nothing of who was asked about.
pub fn is_for_want_of(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM))
}

/// Whether `thread` of `pid` is an agent, of whichever pager.
pub fn is_agent(pid: i32, thread: i32) -> bool {
    thread_name(pid, thread).is_some_and(|name| name == AGENT_NAME)
}

/// What a thread is called, if it is there and we could ask.
pub fn thread_name(pid: i32, thread: i32) -> Option<String> {
    name_of(pid, thread).ok()
}

/// What a thread is called.
///
/// # Errors
/// As of a file.
pub fn name_of(pid: i32, thread: i32) -> io::Result<String> {
    fs::read_to_string(format!("/proc/{pid}/task/{thread}/comm")).map(|name| name.trim_end().to_owned())
}

/// What `/proc` says of a process's memory; nothing when it has none.
fn read_of_living(pid: i32, name: &str) -> io::Result<Vec<u8>> {
    let of = |pid| fs::read(format!("/proc/{pid}/{name}"));
    match of(pid) {
        Ok(text) if !text.is_empty() => Ok(text),
        nothing => living_thread(pid).filter(|&thread| thread != pid).map_or(nothing, of),
    }
}

/// What a file says that the kernel gives whole in one read, being shorter than a page.
pub(crate) fn read_short(path: &str) -> io::Result<String> {
    let mut bytes = [0; PAGE_BYTES];
    let count = fs::File::open(path)?.read(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes[..count]).into_owned())
}

/// Whether a process runs the program that we are.
pub fn is_of_our_program(pid: i32) -> bool {
    let program = |of: &str| fs::metadata(format!("/proc/{of}/exe")).map(|about| (about.dev(), about.ino())).ok();
    program("self").is_some_and(|ours| program(&pid.to_string()) == Some(ours))
}

/// The threads of `pid`.
///
/// # Errors
/// When it is gone.
pub fn threads(pid: i32) -> io::Result<Vec<i32>> {
    numbers_in(&format!("/proc/{pid}/task"))
}

/// All processes that we can see.
///
/// # Errors
/// Where `/proc` is not mounted.
pub fn processes() -> io::Result<Vec<i32>> {
    numbers_in("/proc")
}

fn numbers_in(path: &str) -> io::Result<Vec<i32>> {
    Ok(fs::read_dir(path)?.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect())
}

/// The children of `pid`, of any of its threads (`CONFIG_PROC_CHILDREN`).
///
/// # Errors
/// When it is gone, or the kernel does not tell.
pub fn children(pid: i32) -> io::Result<Vec<i32>> {
    let mut all = Vec::new();
    for thread in threads(pid)? {
        let text = fs::read_to_string(format!("/proc/{pid}/task/{thread}/children")).unwrap_or_default();
        all.extend(text.split_ascii_whitespace().filter_map(|child| child.parse::<i32>().ok()));
    }
    Ok(all)
}

/// What `/proc/PID/status` says.
pub fn status(pid: i32) -> Option<String> {
    let text = fs::read(format!("/proc/{pid}/status")).ok()?;
    Some(String::from_utf8_lossy(&text).into_owned())
}

/// A field of it, such as `TracerPid`.
pub fn status_field(pid: i32, name: &str) -> Option<String> {
    parse_field(&status(pid)?, name)
}

/// Parses `/proc/PID/status`: the value of the field of that name.
pub fn parse_field(text: &str, name: &str) -> Option<String> {
    text.lines().find_map(|line| Some(line.strip_prefix(name)?.strip_prefix(':')?.trim().to_owned()))
}

/// Our own soft limit of that name, as `/proc/self/limits` prints it.
pub fn limit(name: &str) -> Option<String> {
    parse_limit(&fs::read_to_string("/proc/self/limits").ok()?, name)
}

/// Parses `/proc/PID/limits`: the soft limit of that name, a number or `unlimited`.
pub fn parse_limit(text: &str, name: &str) -> Option<String> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_ascii_whitespace().next().map(str::to_owned)
}

/// The process that `thread` is of, if it is there.
///
/// # Errors
/// When we could not ask ([`is_for_want_of`]).
pub fn process_of(thread: i32) -> io::Result<Option<i32>> {
    let text = if_asked(fs::read(format!("/proc/{thread}/status")))?.unwrap_or_default();
    Ok(parse_field(&String::from_utf8_lossy(&text), "Tgid").and_then(|pid| pid.parse().ok()))
}

/// What was read; none where there is nothing to read.
///
/// # Errors
/// When we could not ask.
pub fn if_asked<T>(read: io::Result<T>) -> io::Result<Option<T>> {
    match read {
        Err(error) if is_for_want_of(&error) => Err(error),
        read => Ok(read.ok()),
    }
}

/// Time that CPUs had nothing to do, of all CPUs together and since boot, in clock ticks.
pub fn idle_ticks() -> Option<u64> {
    parse_idle(&fs::read_to_string("/proc/stat").ok()?)
}

/// Parses the first line of `/proc/stat`: idle time and time idle while waiting for devices.
pub fn parse_idle(text: &str) -> Option<u64> {
    let mut fields = text.lines().next()?.strip_prefix("cpu ")?.split_ascii_whitespace().skip(3);
    let (idle, waiting) = (fields.next()?.parse::<u64>().ok()?, fields.next()?.parse::<u64>().ok()?);
    idle.checked_add(waiting)
}

/// When `thread` of `pid` was last on its CPU, in milliseconds of that CPU's own clock (`CONFIG_SCHED_DEBUG`); none where
/// the kernel does not tell. Clocks of different CPUs do not compare.
pub fn last_ran_ms(pid: i32, thread: i32) -> Option<f64> {
    parse_last_ran(&fs::read_to_string(format!("/proc/{pid}/task/{thread}/sched")).ok()?)
}

/// Parses `/proc/PID/task/TID/sched`: when the thread was last on its CPU, in milliseconds.
pub fn parse_last_ran(text: &str) -> Option<f64> {
    let line = text.lines().find(|line| line.starts_with("se.exec_start"))?;
    line.rsplit(':').next()?.trim().parse().ok().filter(|ms: &f64| ms.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_open_tells_of_one_thread_until_it_ends() {
        let (told, tells) = std::sync::mpsc::channel();
        let (ends, end) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            told.send(crate::sys::sched::thread_id()).expect("the test waits");
            let _ = end.recv();
        });
        let (pid, tid) = (std::process::id().cast_signed(), tells.recv().expect("it runs"));
        let stat = ThreadStat::open(pid, tid).expect("it is there");
        for _ in 0..2 {
            let now = stat.read().expect("it is there still");
            assert_eq!(now.started, thread_stat(pid, tid).expect("as above").started);
            assert!(matches!(now.state, b'S' | b'R'), "{now:?}");
        }
        drop(ends);
        thread.join().expect("it has ended");
        // Its end is told of before the kernel has removed it.
        while thread_stat(pid, tid).is_ok() {
            std::thread::yield_now();
        }
        assert_eq!(stat.read().expect_err("it is gone").raw_os_error(), Some(libc::ESRCH));
        assert!(ThreadStat::open(pid, tid).is_err());
    }

    #[test]
    fn a_command_may_hold_parentheses() {
        let text = "42 (a) b) R) S 7 42 42 0 -1 4194304 1 0 0 0 10 20 0 0 20 0 1 0 999 1000 10 \
                    18446744073709551615 1 1 0 0 0 0 0 0 0 0 0 0 17 1 0 0 0 0 0 0 0 0 0 0 0 0 0";
        let stat = parse_stat(text).expect("a good line");
        let flags = (stat.is_kernels, stat.is_ending);
        assert_eq!((stat.state, stat.parent, stat.started, stat.cpu), (b'S', 7, 999, 1));
        assert_eq!((stat.user_ticks, stat.kernel_ticks), (10, 20));
        assert_eq!((stat.exit_status, flags), (0, (false, false)));
        let workers = text.replacen(" 4194304 ", " 4210688 ", 1);
        assert!(parse_stat(&workers).expect("a good line").is_kernels, "{workers}");
        let ending = text.replacen(" 4194304 ", " 4194308 ", 1);
        assert!(parse_stat(&ending).expect("a good line").is_ending, "{ending}");
        let ended = parse_stat(&format!("{}1792", &text[..text.len() - 1])).expect("a good line");
        assert_eq!(ended.exit_status, 7);
        assert_eq!(parse_stat("42 (a"), None);
        assert_eq!(parse_stat(")"), None);
    }

    #[test]
    fn idle_time_is_that_of_all_cpus() {
        assert_eq!(parse_idle("cpu  10 20 30 400 5 0 1 2 0 0\ncpu0 1 2 3 4 5"), Some(405));
        assert_eq!(parse_idle("cpu0 1 2 3 4 5"), None);
        assert_eq!(parse_idle(""), None);
    }

    #[test]
    fn fields_are_found_by_their_whole_names() {
        let text = "Name:\tTracerPid:\nTracerPidX:\t1\nTracerPid:\t42\nCapEff:\n";
        assert_eq!(parse_field(text, "TracerPid").as_deref(), Some("42"));
        assert_eq!(parse_field(text, "CapEff").as_deref(), Some(""));
        assert_eq!(parse_field(text, "Tracer"), None);
    }

    #[test]
    fn limits_and_clocks() {
        let limits = "Limit                     Soft Limit  Hard Limit  Units\nMax locked memory         8388608     unlimited   bytes\n";
        assert_eq!(parse_limit(limits, "Max locked memory").as_deref(), Some("8388608"));
        assert_eq!(parse_limit(limits, "Max open files"), None);
        let sched = "x (1, #threads: 1)\n-----\nse.exec_start      :      123.456789\nse.vruntime : 1.0\n";
        assert_eq!(parse_last_ran(sched), Some(123.456_789));
        assert_eq!(parse_last_ran("se.exec_start : nan"), None);
    }
}

//! What `/proc` says about a process. Parsers take text, so that they can be fuzzed; none panics on any input.

use std::fs;
use std::io::{self, Read as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use spillway_core::{Address, PAGE_BYTES, Span};

use crate::adopt::NAME as AGENT_NAME;
use crate::guardian;
use spillway_store::vault;

/// What the kernel calls memory of `MAP_SHARED | MAP_ANONYMOUS`.
const ANONYMOUS_SHARED: &str = "/dev/zero (deleted)";

/// Which file a mapping shows, whatever it is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileId {
    /// The device, major and minor.
    pub device: (u32, u32),
    /// The inode.
    pub inode: u64,
}

/// A line of `/proc/PID/maps`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// Where.
    pub span: Span,
    /// Readable.
    pub readable: bool,
    /// Writable.
    pub writable: bool,
    /// Executable.
    pub executable: bool,
    /// Private to the process.
    pub private: bool,
    /// The file that backs it.
    pub file: Option<FileId>,
    /// Where in the file it begins, in bytes.
    pub offset: u64,
    /// Path, or a name in brackets; may be empty.
    pub name: String,
}

impl Mapping {
    /// Adds it to mappings that were seen before it, each further up than the last. They change between two looks, and the
    /// newest is right: one that has grown is seen a second time, and taken as it is now.
    pub fn seen_behind(self, seen: &mut Vec<Self>) {
        while seen.pop_if(|last| last.span.start >= self.span.start).is_some() {}
        if let Some(last) = seen.last_mut() {
            last.span.end = last.span.end.min(self.span.start);
        }
        seen.push(self);
    }

    /// Parses one line.
    pub fn parse(line: &str) -> Option<Self> {
        let mut fields = line.split_ascii_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let start = Address(u64::from_str_radix(start, 16).ok()?);
        let end = Address(u64::from_str_radix(end, 16).ok()?);
        let &[r, w, x, p] = fields.next()?.as_bytes() else { return None };
        let offset = u64::from_str_radix(fields.next()?, 16).ok()?;
        let (major, minor) = fields.next()?.split_once(':')?;
        let device = (u32::from_str_radix(major, 16).ok()?, u32::from_str_radix(minor, 16).ok()?);
        let inode = fields.next()?.parse().ok()?;
        let file = (inode != 0).then_some(FileId { device, inode });
        let name = fields.collect::<Vec<_>>().join(" ");
        (start < end && start.page() == start && end.page() == end).then_some(Self {
            span: Span { start, end },
            readable: r == b'r',
            writable: w == b'w',
            executable: x == b'x',
            private: p == b'p',
            file,
            offset,
            name,
        })
    }

    /// Whether it is memory that processes share, and that nobody finds by a path: a memfd, or `MAP_SHARED | MAP_ANONYMOUS`.
    /// (`/memfd:` may also be one of huge pages: that shows in its file system.)
    pub fn is_common(&self) -> bool {
        let memfd = self.name.strip_prefix("/memfd:").and_then(|name| name.strip_suffix(" (deleted)"));
        let memfd = memfd.is_some_and(|name| ![AGENT_NAME, vault::NAME].contains(&name));
        !self.private && !self.executable && self.file.is_some() && (self.name == ANONYMOUS_SHARED || memfd)
    }

    /// Whether somebody may have a descriptor of such memory, by which it is read and written past all mappings.
    pub fn may_be_open(&self) -> bool {
        self.name != ANONYMOUS_SHARED
    }

    /// Whether its pages may be managed: private anonymous memory for data. A mapping without any access is included,
    /// because it is an allocator's reserve and becomes writable without notice. Stacks that grow by themselves are not:
    /// the kernel extends them under us. Memory that holds code (just-in-time compilers) stays local.
    pub fn is_manageable(&self) -> bool {
        let anonymous = self.private && self.file.is_none() && !self.executable && (self.writable || !self.readable);
        let special = self.name.starts_with("[stack") || self.name.starts_with("[v");
        anonymous && !special
    }
}

/// The mappings of `pid`.
///
/// # Errors
/// Without rights over it, or when it is gone.
pub fn mappings(pid: i32) -> io::Result<Vec<Mapping>> {
    let text = read_of_living(pid, "maps")?;
    let mut seen = Vec::new();
    for mapping in String::from_utf8_lossy(&text).lines().filter_map(Mapping::parse) {
        mapping.seen_behind(&mut seen);
    }
    Ok(seen)
}

/// Pages of memory in a process, from `/proc/PID/statm`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Size {
    /// Address space.
    pub total_pages: u64,
    /// Resident and not backed by a file: what could be managed, and stacks.
    pub anonymous_pages: u64,
}

/// How large `pid` is.
///
/// # Errors
/// When it is gone.
pub fn size(pid: i32) -> io::Result<Size> {
    let of = |pid| parse_statm(&read_short(&format!("/proc/{pid}/statm"))?).ok_or(io::ErrorKind::InvalidData.into());
    match of(pid)? {
        Size { total_pages: 0, .. } => of(living_thread(pid).ok_or(io::ErrorKind::NotFound)?),
        size => Ok(size),
    }
}

/// Parses `/proc/PID/statm`.
pub fn parse_statm(text: &str) -> Option<Size> {
    let mut fields = text.split_ascii_whitespace().map(|field| field.parse::<u64>());
    let (total, resident, shared) = (fields.next()?.ok()?, fields.next()?.ok()?, fields.next()?.ok()?);
    Some(Size { total_pages: total, anonymous_pages: resident.saturating_sub(shared) })
}

/// What `/proc/PID/stat` or `/proc/PID/task/TID/stat` says of a process or thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    /// `R` running, `S` asleep, `D` waiting, `T` stopped, `t` traced, `Z` zombie, …
    pub state: u8,
    /// Its parent.
    pub parent: i32,
    /// CPU time in user mode and in the kernel, in clock ticks.
    pub cpu_ticks: u64,
    /// When it started, in clock ticks since boot: with the pid, its identity.
    pub started: u64,
    /// The CPU on which it last ran.
    pub cpu: usize,
    /// What it ended with; 0 while it has not, or where we may not know.
    pub exit_status: u8,
    /// Made by the kernel for itself in this process (`PF_USER_WORKER`, `PF_IO_WORKER`: KVM's, io_uring's, vhost's): it is never
    /// in user mode.
    pub is_kernels: bool,
}

/// `PF_IO_WORKER | PF_USER_WORKER`: include/linux/sched.h. Before 6.4 workers of io_uring have the former alone.
const KERNELS_FLAGS: u32 = 0x10 | 0x4000;

/// Parses `/proc/PID/stat`. The command in it may hold anything, parentheses and spaces too.
pub fn parse_stat(text: &str) -> Option<Stat> {
    let rest = &text[text.rfind(')')? + 1..];
    // Without allocating: the fault thread asks where its program runs. Fields are numbered from 3 (state) here: proc_pid_stat(5).
    let mut fields = (3..).zip(rest.split_ascii_whitespace());
    let mut field = |number: usize| fields.find(|(at, _)| *at == number).map(|(_, text)| text);
    Some(Stat {
        state: *field(3)?.as_bytes().first()?,
        parent: field(4)?.parse().ok()?,
        is_kernels: field(9)?.parse::<u32>().ok()? & KERNELS_FLAGS != 0,
        cpu_ticks: field(14)?.parse::<u64>().ok()?.checked_add(field(15)?.parse().ok()?)?,
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

/// A thread of `pid` that has not ended, and is not an agent of ours; none when all have. It has a directory of its own in
/// `/proc`. That of the process is about its first thread: a process may outlive that (`pthread_exit`), and from then on
/// nothing there tells of memory or descriptors.
///
/// Where the kernel cannot be asked, the process lives, for all we know.
pub fn living_thread(pid: i32) -> Option<i32> {
    if is_alive(stat(pid)) {
        return Some(pid);
    }
    let mut threads = match threads(pid) {
        Err(error) if is_for_want_of(&error) => vec![pid],
        threads => threads.unwrap_or_default(),
    }
    .into_iter();
    threads.find(|&thread| is_alive(thread_stat(pid, thread)) && !is_agent(pid, thread))
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

/// What a thread is called.
pub fn thread_name(pid: i32, thread: i32) -> Option<String> {
    fs::read_to_string(format!("/proc/{pid}/task/{thread}/comm")).ok().map(|name| name.trim_end().to_owned())
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

fn is_file(about: &fs::Metadata, id: FileId) -> bool {
    let device = (rustix::fs::major(about.dev()), rustix::fs::minor(about.dev()));
    id == FileId { device, inode: about.ino() }
}

/// Opens the file that `pid` has mapped there.
///
/// # Errors
/// Without the rights, or where that mapping is gone.
pub fn open_mapped(pid: i32, Span { start, end }: Span) -> io::Result<fs::File> {
    fs::File::options().read(true).write(true).open(format!("/proc/{pid}/map_files/{:x}-{:x}", start.0, end.0))
}

/// Opens a file that any of `pids` has mapped, or open.
pub fn open_of(id: FileId, pids: &[i32]) -> Option<fs::File> {
    let is_it = |file: &fs::File| file.metadata().is_ok_and(|about| is_file(&about, id));
    let mapped = |pid: &i32| {
        let its = mappings(*pid).ok()?.into_iter().filter(|mapping| mapping.file == Some(id));
        its.filter_map(|mapping| open_mapped(*pid, mapping.span).ok()).find(is_it)
    };
    let open = |pid: &i32| {
        let path = descriptor_of(id, *pid).ok()??;
        fs::File::options().read(true).write(true).open(path).ok().filter(is_it)
    };
    pids.iter().find_map(mapped).or_else(|| pids.iter().find_map(open))
}

/// A descriptor that `pid` has of a file of memory, by its path; no other files are looked at, as they may be of a host that is away.
fn descriptor_of(id: FileId, pid: i32) -> io::Result<Option<PathBuf>> {
    let living = living_thread(pid).unwrap_or(pid);
    let open = if_asked(fs::read_dir(format!("/proc/{living}/fd")))?.into_iter().flatten().flatten();
    let mut paths = open.map(|entry| entry.path());
    let is_memory = |path: &Path| {
        let link = fs::read_link(path).unwrap_or_default();
        let name = link.as_os_str().as_bytes();
        name.starts_with(b"/memfd:") || name == ANONYMOUS_SHARED.as_bytes()
    };
    Ok(paths.find(|path| is_memory(path) && fs::metadata(path).is_ok_and(|about| is_file(&about, id))))
}

/// Whether any process but this one, and its guardian, has a file of memory open, or mapped, or may have: where we could not ask.
pub fn is_open_elsewhere(id: FileId) -> bool {
    let own = [Some(std::process::id().cast_signed()), guardian::ours().map(|ours| ours.pid)];
    let has = |pid: i32| -> io::Result<bool> {
        let mapped = if_asked(mappings(pid))?.into_iter().flatten().any(|mapping| mapping.file == Some(id));
        Ok(mapped || descriptor_of(id, pid)?.is_some())
    };
    processes().map_or(true, |pids| {
        pids.into_iter().filter(|pid| !own.contains(&Some(*pid))).any(|pid| has(pid).unwrap_or(true))
    })
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

/// A field of `/proc/PID/status`, such as `TracerPid`.
pub fn status_field(pid: i32, name: &str) -> Option<String> {
    let text = fs::read(format!("/proc/{pid}/status")).ok()?;
    parse_field(&String::from_utf8_lossy(&text), name)
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

/// Mappings of `pid` that carry one of `flags` (two letters each, proc(5), `VmFlags`). Walks its page tables, as
/// everything does that tells flags: not for every day. None of one that has ended.
///
/// # Errors
/// When we could not ask ([`is_for_want_of`]).
pub fn mappings_with_flag(pid: i32, flags: &[&str]) -> io::Result<Vec<(Span, String)>> {
    let text = if_asked(read_of_living(pid, "smaps"))?.unwrap_or_default();
    Ok(parse_flags(&String::from_utf8_lossy(&text), flags))
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

/// Parses `/proc/PID/smaps`: the mappings that carry one of `flags`, each with the first of them that it carries.
pub fn parse_flags(text: &str, flags: &[&str]) -> Vec<(Span, String)> {
    let mut found = Vec::new();
    let mut mapping = None;
    for line in text.lines() {
        if let Some(carried) = line.strip_prefix("VmFlags:") {
            let flag = flags.iter().find(|flag| carried.split_ascii_whitespace().any(|carried| carried == **flag));
            found.extend(mapping.take().zip(flag.map(|flag| (*flag).to_owned())));
        } else if let Some(header) = Mapping::parse(line) {
            mapping = Some(header.span);
        }
    }
    found
}

/// Whether any of its memory is registered with a userfaultfd.
///
/// # Errors
/// When we could not ask ([`is_for_want_of`]).
pub fn has_registered_memory(pid: i32) -> io::Result<bool> {
    Ok(!mappings_with_flag(pid, &["um"])?.is_empty())
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

    fn parse(line: &str) -> Mapping {
        Mapping::parse(line).expect("a good line")
    }

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
    fn what_changes_while_it_is_looked_at_is_taken_as_seen_last() {
        let look = |lines: &[&str]| {
            let mut seen = Vec::new();
            lines.iter().for_each(|line| parse(line).seen_behind(&mut seen));
            seen.iter().map(|it| (it.span.start.0, it.span.end.0)).collect::<Vec<_>>()
        };
        let [low, grown] = ["10000-14000 rw-p 00000000 00:00 0", "10000-18000 rw-p 00000000 00:00 0"];
        let [inner, next] = ["12000-16000 rw-p 00000000 00:00 0", "18000-20000 rw-p 00000000 00:00 0"];
        assert_eq!(look(&[low, next]), [(0x10000, 0x14000), (0x18000, 0x20000)]);
        assert_eq!(look(&[low, grown, next]), [(0x10000, 0x18000), (0x18000, 0x20000)]);
        assert_eq!(look(&[low, inner]), [(0x10000, 0x12000), (0x12000, 0x16000)]);
        assert_eq!(look(&[low, inner, grown]), [(0x10000, 0x18000)]);
    }

    #[test]
    fn only_private_anonymous_data_is_manageable() {
        for (line, manageable) in [
            ("7f0000000000-7f0000200000 rw-p 00000000 00:00 0 ", true),
            ("55d000000000-55d000021000 rw-p 00000000 00:00 0                          [heap]", true),
            ("7f0000000000-7f0000200000 ---p 00000000 00:00 0 ", true),
            ("7f0000000000-7f0000200000 rw-p 00000000 00:00 0                          [anon: glibc: malloc]", true),
            ("7f0000000000-7f0000200000 r--p 00000000 00:00 0 ", false),
            ("7f0000000000-7f0000200000 rwxp 00000000 00:00 0 ", false),
            ("7f0000000000-7f0000200000 rw-s 00000000 00:01 7 /dev/zero (deleted)", false),
            ("7f0000000000-7f0000200000 rw-p 00001000 fe:01 7 /usr/lib/a b.so", false),
            ("7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0                          [stack]", false),
            ("7ffc00000000-7ffc00004000 r--p 00000000 00:00 0                          [vvar]", false),
        ] {
            assert_eq!(parse(line).is_manageable(), manageable, "{line}");
        }
    }

    #[test]
    fn garbage_is_no_mapping() {
        for line in ["", "x", "1-2", "2000-1000 rw-p 0 0 0", "1001-2000 rw-p 0 0:0 0", "1000-2000 rw 0 0:0 0", "-"] {
            assert_eq!(Mapping::parse(line), None, "{line}");
        }
    }

    #[test]
    fn a_command_may_hold_parentheses() {
        let text = "42 (a) b) R) S 7 42 42 0 -1 4194304 1 0 0 0 10 20 0 0 20 0 1 0 999 1000 10 \
                    18446744073709551615 1 1 0 0 0 0 0 0 0 0 0 0 17 1 0 0 0 0 0 0 0 0 0 0 0 0 0";
        let stat = parse_stat(text).expect("a good line");
        assert_eq!(
            stat,
            Stat { state: b'S', parent: 7, cpu_ticks: 30, started: 999, cpu: 1, exit_status: 0, is_kernels: false }
        );
        let workers = text.replacen(" 4194304 ", " 4210688 ", 1);
        assert!(parse_stat(&workers).expect("a good line").is_kernels, "{workers}");
        let ended = parse_stat(&format!("{}1792", &text[..text.len() - 1])).expect("a good line");
        assert_eq!(ended.exit_status, 7);
        assert_eq!(parse_stat("42 (a"), None);
        assert_eq!(parse_stat(")"), None);
    }

    #[test]
    fn flags_belong_to_the_mapping_above_them() {
        let text = "1000-2000 rw-p 00000000 00:00 0 \nRss: 4 kB\nVmFlags: rd wr mr mw me ac \n\
                    2000-5000 rw-p 00000000 00:00 0 \nVmFlags: rd wr wf um \nVmFlags: wf\nnonsense\n";
        let found = parse_flags(text, &["wf", "dc"]);
        assert_eq!(found, [(Span { start: Address(0x2000), end: Address(0x5000) }, "wf".to_owned())]);
    }

    #[test]
    fn idle_time_is_that_of_all_cpus() {
        assert_eq!(parse_idle("cpu  10 20 30 400 5 0 1 2 0 0\ncpu0 1 2 3 4 5"), Some(405));
        assert_eq!(parse_idle("cpu0 1 2 3 4 5"), None);
        assert_eq!(parse_idle(""), None);
    }

    #[test]
    fn statm_counts_what_no_file_backs() {
        let size = parse_statm("1000 300 100 5 0 200 0\n").expect("a good line");
        assert_eq!(size, Size { total_pages: 1000, anonymous_pages: 200 });
        assert_eq!(parse_statm("1000"), None);
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

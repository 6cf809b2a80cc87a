//! Where the workload's memory may be: all local, in the kernel's swap, or under Spillway with some pool.
//!
//! Invariant: a mode gives the workload the same budget as any other, and undoes what it set up before the next one begins.

use super::child::{Child, Ended, Stop};
use super::figures::{Figures, Timed};
use super::kernel::{Cgroup, Hierarchy, Swap, SwapFile, mkswap_lacks, zram_lacks};
use super::plan::Work;
use crate::sys::{self, Inherited};
use crate::{pool, say};
use std::ffi::{OsStr, OsString};
use std::fmt::Display;
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Longest time for one run, before it counts as hung.
const RUN_LONGEST: Duration = Duration::from_secs(180);
/// Longest time that a server may take to start.
const START_LONGEST: Duration = Duration::from_secs(10);
/// Under a cgroup's limit the kernel sometimes kills with swap still free; on a busy machine a short run may be over before a
/// pager has found it. Such runs are repeated this often, and counted.
const TRIES: u32 = 5;
/// What a pool or swap needs beyond the workload's own memory: its program, page tables, stacks.
const BESIDES_BYTES: u64 = 64 << 20;

/// A mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Mode {
    /// All memory local: what nothing can beat
    Native,
    /// The kernel's swap to compressed memory (zram, lz4)
    Zram,
    /// The kernel's swap to a file
    File,
    /// Spillway with its embedded pool
    Local,
    /// Spillway with a memory server of its own on this host, over TCP
    Tcp,
    /// Spillway with memcached on this host
    Memcached,
    /// Another build of Spillway, with its embedded pool (--against)
    #[value(skip)]
    Base,
}

impl Mode {
    /// What is compared unless something else is asked for.
    pub(super) const ALL: [Self; 6] = [Self::Native, Self::Zram, Self::File, Self::Local, Self::Tcp, Self::Memcached];

    /// In a word.
    pub(super) fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }

    /// As people read it.
    pub(super) fn title(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Zram => "kernel swap, zram",
            Self::File => "kernel swap, file",
            Self::Local => "spillway",
            Self::Tcp => "spillway, tcp",
            Self::Memcached => "spillway, memcached",
            Self::Base => "base build",
        }
    }

    /// Whether it is the kernel's swap: what fails there says something about it, not about us.
    pub(super) fn is_kernel(self) -> bool {
        matches!(self, Self::Zram | Self::File)
    }
}

/// What runs in a mode.
pub(super) struct Job {
    /// Bytes of its memory, and how many of these may be local.
    size: u64,
    local: u64,
    /// The program, with its words. It reads a line before it begins.
    words: Vec<OsString>,
    /// It has processes of its own to end.
    group: bool,
    /// After so long it counts as hung.
    longest: Duration,
}

impl Job {
    /// A line for the shell, which reads nothing.
    pub(super) fn line(line: &OsStr, size: u64, local: u64, longest: Duration) -> Self {
        let begin = r#"read -r _; exec sh -c "$1" </dev/null"#;
        let words = ["sh".as_ref(), "-c".as_ref(), begin.as_ref(), "spillway-bench".as_ref(), line];
        Self { size, local, words: words.map(OsString::from).to_vec(), group: true, longest: longest.max(RUN_LONGEST) }
    }
}

/// A run that ended well, and how often it had to begin again: because the kernel had killed it, or, under Spillway, because it
/// was over before a pager had managed it, so that it measured nothing.
pub(super) struct Run<F = Figures> {
    pub(super) figures: F,
    pub(super) repeated: u32,
}

/// What all runs share.
pub(super) struct Bench {
    /// This program, which is also the workload.
    ours: PathBuf,
    /// Another build.
    base: Option<PathBuf>,
    inherited: Inherited,
    groups: Option<Hierarchy>,
    swap_file: Option<SwapFile>,
    spoil: bool,
}

impl Bench {
    /// Signals must be blocked already.
    pub(super) fn new(ours: PathBuf, base: Option<PathBuf>, inherited: Inherited, spoil: bool) -> Self {
        Self { ours, base, inherited, groups: None, swap_file: None, spoil }
    }

    /// Readies a mode. What it says is why it cannot run here.
    pub(super) fn prepare(&mut self, mode: Mode, size: u64, swap_directory: &Path) -> Result<(), String> {
        let root = || if sys::effective_uid() == 0 { Ok(()) } else { Err("it needs root".to_owned()) };
        match mode {
            Mode::Native => Ok(()),
            Mode::Zram => {
                root()?;
                zram_lacks().map_or(Ok(()), Err)?;
                self.find_groups()?;
                // As for a run, and undone: a container may lack the device, a kernel lz4.
                let made = Swap::on_zram(size + BESIDES_BYTES);
                made.map(drop).map_err(|error| format!("no swap on zram: {}", say::error(&error)))
            }
            Mode::File => {
                root()?;
                mkswap_lacks().map_or(Ok(()), Err)?;
                self.find_groups()?;
                let place = swap_directory.display();
                let why =
                    |error| format!("no swap file in {place}: {}; --swap-dir names another place", say::error(&error));
                let file = SwapFile::make(swap_directory, size + BESIDES_BYTES).map_err(why)?;
                Swap::on_file(&file).map_err(why)?;
                self.swap_file = Some(file);
                Ok(())
            }
            Mode::Memcached if !installed("memcached") => Err("`memcached` is not installed".into()),
            Mode::Local | Mode::Tcp | Mode::Memcached | Mode::Base => pages_can_be_moved(),
        }
    }

    fn find_groups(&mut self) -> Result<(), String> {
        if self.groups.is_some() {
            return Ok(());
        }
        let found = Hierarchy::find(Path::new("/sys/fs/cgroup"));
        let found = found.ok_or("there is no memory cgroup, of version 1 or 2")?;
        let made = Cgroup::make(&found, BESIDES_BYTES);
        made.map(drop).map_err(|error| format!("no cgroup of ours: {}", say::error(&error)))?;
        self.groups = Some(found);
        Ok(())
    }

    /// Runs the workload once.
    pub(super) fn run(&self, mode: Mode, work: &Work) -> Result<Run, Stop> {
        let job = self.workload(work);
        self.run_until(mode, &job, "give --size more", |ended| {
            let mut figures = figures(ended)?;
            figures.local_peak_bytes = counter(ended, "burst_peak_bytes");
            Some(figures)
        })
    }

    /// Runs a program of the user's once, to a good end.
    pub(super) fn run_program(&self, mode: Mode, job: &Job) -> Result<Run<Timed>, Stop> {
        self.run_until(mode, job, "give a program that takes longer", |ended| {
            let local_peak_bytes = counter(ended, "burst_peak_bytes");
            ended.status.success().then_some(Timed {
                seconds: ended.took.as_secs_f64(),
                said: ended.said,
                local_peak_bytes,
            })
        })
    }

    /// The most memory that a program has which Spillway could place elsewhere.
    pub(super) fn footprint(&self, job: &Job) -> Result<u64, Stop> {
        let ended = self.under_spillway(Mode::Local, job, "all", pool::DEFAULT)?;
        let most = counter(&ended, "local_peak_bytes").filter(|_| ended.status.success());
        most.ok_or_else(|| Stop::failed(why(Mode::Local, &ended)))
    }

    /// Runs until it ends with `figures`, a few times at most where it was no fault of the program's that it did not.
    fn run_until<F>(
        &self,
        mode: Mode,
        job: &Job,
        remedy: &str,
        figures: impl Fn(&Ended) -> Option<F>,
    ) -> Result<Run<F>, Stop> {
        let mut repeated = 0;
        loop {
            let ended = self.run_once(mode, job).map_err(|stop| match stop {
                Stop::Failed(why) => Stop::Failed(format!("{}: {why}", mode.title())),
                signal @ Stop::Signal(_) => signal,
            })?;
            let last = repeated + 1 == TRIES;
            match figures(&ended).filter(|_| !ended.starved) {
                Some(figures) if mode.is_kernel() || mode == Mode::Native || evicted(&ended) => {
                    return Ok(Run { figures, repeated });
                }
                Some(_) if last => {
                    let early = "it was over before a pager had managed it";
                    return Err(Stop::failed(format!("{}: {early}: {remedy}", mode.title())));
                }
                None if last || !ended.starved => return Err(Stop::failed(why(mode, &ended))),
                // It was too early for a pager, or too large for the kernel.
                Some(_) | None => {}
            }
            repeated += 1;
        }
    }

    fn run_once(&self, mode: Mode, job: &Job) -> Result<Ended, Stop> {
        let local = job.local.to_string();
        match mode {
            Mode::Native => self.finish(self.start_job(job, &[])?, job),
            Mode::Zram | Mode::File => self.under_kernel(mode, job),
            Mode::Local | Mode::Base => self.under_spillway(mode, job, &local, pool::DEFAULT),
            Mode::Tcp => {
                let (_server, url) = self.serve(job)?;
                self.under_spillway(mode, job, &local, &url)
            }
            Mode::Memcached => {
                let (_server, url) = self.memcached(job)?;
                self.under_spillway(mode, job, &local, &url)
            }
        }
    }

    fn under_kernel(&self, mode: Mode, job: &Job) -> Result<Ended, Stop> {
        let broken = |error| Stop::failed(format!("{}: {}", mode.title(), say::error(&error)));
        let groups = self.groups.as_ref().ok_or_else(|| Stop::failed("no cgroup"))?;
        let swap = match &self.swap_file {
            Some(file) if mode == Mode::File => Swap::on_file(file),
            _ => Swap::on_zram(job.size + BESIDES_BYTES),
        };
        // It stays on until the program and its cgroup have ended.
        let _swap = swap.map_err(broken)?;
        let group = Cgroup::make(groups, job.local).map_err(broken)?;
        let child = self.start_job(job, &[])?;
        group.enter(child.pid()).map_err(broken)?;
        let ended = self.finish(child, job)?;
        let starved = group.has_starved() || ended.status.signal() == Some(libc::SIGKILL);
        Ok(Ended { starved, ..ended })
    }

    fn under_spillway(&self, mode: Mode, job: &Job, local: &str, pool: &str) -> Result<Ended, Stop> {
        let spillway = if mode == Mode::Base { self.base.as_deref() } else { None }.unwrap_or(&self.ours);
        // Its counters: after all that the program may have said.
        let words = ["run", "-q", "--local", local, "--pool", pool, "--stats", "/dev/stderr", "--"].map(OsString::from);
        let words = [&[spillway.as_os_str().to_owned()], &words[..]].concat();
        self.finish(self.start_job(job, &words)?, job)
    }

    fn workload(&self, work: &Work) -> Job {
        let mut words = vec![self.ours.clone().into_os_string(), "bench-walk".into(), "--wait".into()];
        words.extend(work.words().into_iter().map(OsString::from));
        words.extend(self.spoil.then(|| "--spoil".into()));
        Job { size: work.size, local: work.local, words, group: false, longest: RUN_LONGEST }
    }

    /// Starts a job, with words before it.
    fn start_job(&self, job: &Job, before: &[OsString]) -> Result<Child, Stop> {
        let words = [before, &job.words].concat();
        let mut command = Command::new(&words[0]);
        // A pager of its own, also where there is one for all of this host; and the same environment in every mode.
        command.args(&words[1..]).env("SPILLWAY_DAEMON", "off");
        if job.group { Child::start_group(command, self.inherited) } else { self.start(command) }
    }

    fn start(&self, command: Command) -> Result<Child, Stop> {
        Child::start(command, self.inherited)
    }

    fn finish(&self, mut child: Child, job: &Job) -> Result<Ended, Stop> {
        child.say_go();
        child.finish(job.longest)
    }

    fn serve(&self, job: &Job) -> Result<(Child, String), Stop> {
        let mut command = Command::new(&self.ours);
        let memory = (2 * job.size + BESIDES_BYTES).to_string();
        command.args(["serve", "--listen", "127.0.0.1:0", "--memory", &memory]);
        let mut server = self.start(command)?;
        let address = server.await_ready(START_LONGEST, |server| {
            let line = server.hear_line();
            line.split_once(" on ").and_then(|(_, rest)| rest.split_once(';')).map(|(address, _)| address.to_owned())
        })?;
        Ok((server, format!("tcp://{address}")))
    }

    fn memcached(&self, job: &Job) -> Result<(Child, String), Stop> {
        // It cannot be asked for a port that is free: one that was a moment ago.
        let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
        let address = free.map_err(|error| Stop::failed(format!("no free port: {}", say::error(&error))))?;
        let mut command = Command::new("memcached");
        let memory = ((2 * (job.size + BESIDES_BYTES)) >> 20).to_string();
        command.args(["-M", "-l", "127.0.0.1", "-U", "0", "-t", "1", "-m", &memory, "-p", &address.port().to_string()]);
        if sys::effective_uid() == 0 {
            command.args(["-u", "root"]);
        }
        let mut server = self.start(command)?;
        server.await_ready(START_LONGEST, |_| TcpStream::connect(address).ok())?;
        Ok((server, format!("memcached://{address}")))
    }
}

fn installed(program: &str) -> bool {
    let mut asked = Command::new(program);
    asked.arg("-V").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    asked.status().is_ok_and(|status| status.success())
}

fn pages_can_be_moved() -> Result<(), String> {
    spillway_pager::usable().map_err(|error| say::plain(&error.to_string()))
}

/// What a workload said, if it came to its end.
fn figures(of: &Ended) -> Option<Figures> {
    of.out.lines().rev().find_map(|line| serde_json::from_str(line).ok())
}

/// What a pager counted, if there was one, and where that begins in what was said. Few words may follow it.
fn counters(of: &Ended) -> Option<(usize, serde_json::Value)> {
    of.err.rmatch_indices('{').find_map(|(at, _)| {
        let first = serde_json::Deserializer::from_str(&of.err[at..]).into_iter::<serde_json::Value>().next();
        Some((at, first?.ok().filter(|told| told["evicted_pages"].is_u64())?))
    })
}

/// One of these.
fn counter(of: &Ended, name: &str) -> Option<u64> {
    counters(of)?.1[name].as_u64()
}

/// Whether pages left, as they must where less is local than is touched.
fn evicted(of: &Ended) -> bool {
    counter(of, "evicted_pages").is_some_and(|pages| pages > 0)
}

fn why(mode: Mode, ended: &Ended) -> String {
    if ended.starved {
        return format!("{}: killed under its limit, {TRIES} times", mode.title());
    }
    let said = counters(ended).map_or(&*ended.err, |(at, _)| &ended.err[..at]);
    let last: &dyn Display = &say::clean(said.lines().last().unwrap_or("it said nothing"));
    format!("{}: no result: {}: {last}", mode.title(), ended.status)
}

//! What a dead pager has left in its targets, and how it is found.
//!
//! An agent keeps in its own descriptor table: the userfaultfd, both ends of the socket, the file of its control pages, and
//! the vault. While it has both ends it reads no end of the socket: it waits for whoever takes the other one.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use spillway_core::TreeId;
use spillway_core::policy::Settings;
use spillway_core::shares::Share;
use spillway_store::vault::{self, Claim, Vault};

use crate::adopt::Agent;
use crate::driver::{CommonsHeir, DEPUTY_NAME, Heir, Heirs, YoungHeir};
use crate::error::Error;
use crate::estate::{Estate, Found, FoundYoung};
use crate::merging::Merging;
use crate::procfs::{self, if_asked};
use crate::sys::agent::Memory;
use crate::sys::fd::{Heard, receive_byte};
use crate::sys::process::{effective_user, pidfd_of_thread, take_fd, unread};
use crate::sys::ptrace::Seized;
use crate::sys::sched::spare_descriptors;
use crate::sys::uffd::{LINK, Uffd};
use crate::sys::window::is_memory;
use crate::tally::Tally;
use crate::target::POPULATE_WRITE;
use crate::watcher::Inherited;
use crate::{Choice, Local, stray};

/// How long an agent may take to end what it was told to do: some 270 system calls.
const IDLE_WITHIN: Duration = Duration::from_secs(2);
/// What a pager opens for itself once it has taken over, and who talks to it: events, timers, and its socket.
const OWN_DESCRIPTORS: u64 = 8;

/// How long whoever takes over may take until it says that it serves: its servers are asked before that.
const CLAIMED_WITHIN: Duration = Duration::from_secs(10);

/// How often it is tried to open a file that is mapped.
const OPENED_WITHIN_LOOKS: u32 = 5;

/// See the module's documentation.
pub struct Remains {
    root: i32,
    estate: Estate,
    heirs: Heirs,
    claim: Claim,
}

/// The agent of a process, if it has one.
pub(crate) fn agent_of(pid: i32) -> Option<i32> {
    procfs::threads(pid).ok()?.into_iter().find(|&thread| procfs::is_agent(pid, thread))
}

/// A pager that has died; what it managed waits for another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Lost {
    /// What it was called, and when it was started, in clock ticks since boot.
    pub pager: (i32, u64),
    /// Whether it was a daemon's.
    pub daemon: bool,
}

/// The pager of a process, if it has died; none of other users' processes, whose pagers this one may not ask.
#[must_use]
pub fn lost_by(pid: i32) -> Option<Lost> {
    let estate = Estate::new(vault_in(pid)?.ok()?);
    living_pager(&estate).is_none().then(|| Lost { pager: estate.pager(), daemon: estate.is_daemon() })
}

/// Whether this kernel gives threads' own descriptors to others (6.9).
#[must_use]
pub fn can_take_over() -> bool {
    pidfd_of_thread(crate::sys::sched::thread_id()).is_ok()
}

/// The pager that serves, if it lives.
pub(crate) fn living_pager(estate: &Estate) -> Option<i32> {
    let (pid, started) = estate.pager();
    let begun = Instant::now();
    loop {
        let stat = procfs::stat(pid).ok().filter(|stat| stat.started == started)?;
        let is_dead = matches!(stat.state, b'Z' | b'X');
        // A thread that is being killed may be in its last system call: it may still read a message, and we would not see it. The
        // one that makes calls on files reads none, and may be held up by who waits for us.
        let ends =
            is_dead && procfs::threads(pid).is_ok_and(|all| all.iter().any(|&it| it != pid && !is_deputy(pid, it)));
        if !ends || begun.elapsed() > IDLE_WITHIN {
            return (!is_dead || ends).then_some(pid);
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// The vault that the agent of a process keeps open, if there is one.
fn vault_in(pid: i32) -> Option<Result<Vault, Error>> {
    agent_of(pid).and_then(|thread| vault_of(pid, thread))
}

/// The vault that an agent keeps open, if it keeps one.
pub(crate) fn vault_of(pid: i32, thread: i32) -> Option<Result<Vault, Error>> {
    let wanted = format!("/memfd:{} (deleted)", vault::NAME);
    let system = |error| Error::System { what: "taking a descriptor of the agent", error };
    let number = number_of(pid, thread, |_, link| link == wanted).transpose()?;
    let taken = number.and_then(|number| take_fd(pidfd_of_thread(thread)?.as_fd(), number)).map_err(system);
    let opened = taken.and_then(|fd| match Vault::open(&fd) {
        Ok(vault) if may_name(&vault, pid) => Ok(vault),
        Ok(_) | Err(vault::Foreign::Others) => Err(Error::OthersPager(pid)),
        Err(why) => Err(Error::Foreign { pid, why: why.to_string() }),
    });
    Some(opened)
}

/// Whether a process may be among those of a vault.
fn may_name(vault: &Vault, pid: i32) -> bool {
    let user = fs::metadata(format!("/proc/{pid}")).ok().map(|process| process.uid());
    vault.owner().is_ok_and(|owner| is_believed(owner, effective_user(), user))
}

/// What we have left ourselves is believed, and another user's of that user's processes. Anybody can give a thread an agent's name, and
/// write a vault that says what a pager of root's should do to others.
fn is_believed(owner: u32, ourselves: u32, process: Option<u32>) -> bool {
    owner == ourselves || process == Some(owner)
}

/// The number of the first of a thread's own descriptors of which this is true, by its number and what it is called.
///
/// # Errors
/// When we could not ask.
fn number_of(pid: i32, thread: i32, is_it: impl Fn(i32, &str) -> bool) -> io::Result<Option<i32>> {
    let entries = if_asked(fs::read_dir(format!("/proc/{pid}/task/{thread}/fd")))?;
    Ok(entries.into_iter().flatten().flatten().find_map(|entry| {
        let (link, number) = (fs::read_link(entry.path()).ok()?, entry.file_name().to_str()?.parse().ok()?);
        is_it(number, link.to_str()?).then_some(number)
    }))
}

impl Remains {
    /// What is left in `pid`; none if there is no agent in it that waits for a pager.
    ///
    /// # Errors
    /// When it cannot be taken over, or need not be.
    pub fn find(pid: i32) -> Result<Option<Self>, Error> {
        stray::end(pid)?;
        let Some(vault) = vault_in(pid) else { return Ok(None) };
        Self::within(Estate::new(vault?), pid).map(Some)
    }

    /// What a daemon has left that was killed; none if none was, or nothing is left.
    ///
    /// # Errors
    /// When it cannot be taken over.
    pub fn of_daemon() -> Result<Option<Self>, Error> {
        for pid in procfs::processes().unwrap_or_default() {
            // One that cannot be read is nobody's whom this user could take over from.
            let Some(Ok(vault)) = vault_in(pid) else { continue };
            if !vault.owner().is_ok_and(|owner| owner == effective_user()) {
                continue;
            }
            let estate = Estate::new(vault);
            if !estate.is_daemon() || living_pager(&estate).is_some() {
                continue;
            }
            // A stray is not among what it has left, and may be all there is.
            if stray::end(pid).is_err() || agent_of(pid).is_none() {
                continue;
            }
            match Self::within(estate, pid) {
                // It ends just now, or what is written down is of others.
                Err(Error::Foreign { .. }) if procfs::living_thread(pid).is_none() => {}
                found => return found.map(Some),
            }
        }
        Ok(None)
    }

    fn within(estate: Estate, pid: i32) -> Result<Self, Error> {
        let claim = claim(&estate, pid)?;
        let mut heirs: Vec<Heir> = Vec::new();
        for found in estate.targets() {
            // Who is passed over loses all that is out of it: not for want of a descriptor of ours.
            let told = if_asked(procfs::stat(found.pid))
                .map_err(|error| Error::System { what: "looking at a process that waits", error })?;
            let lives = told.is_some_and(|stat| stat.started == found.started);
            if lives && procfs::is_agent(found.pid, found.thread) && may_name(estate.vault(), found.pid) {
                let tally = tally_of(&heirs, found.tree, found.root, found.share);
                tally.merges.fetch_or(found.merging != Merging::Untold, Relaxed);
                let (pid, thread) = (found.pid, found.thread);
                match Heir::of(found, tally) {
                    Ok(heir) => heirs.push(heir),
                    // It has ended since we looked.
                    Err(_) if has_ended(pid, thread) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        if heirs.is_empty() {
            return Err(Error::Foreign { pid, why: "it names no process that lives".into() });
        }
        let root = if heirs.iter().any(|heir| heir.found.pid == pid) { pid } else { heirs[0].found.pid };
        let commons = commons_of(&estate, &heirs, pid)?;
        // Each has page tables to look at, and the pager opens some for itself: with fewer it could neither hear of forks nor make room.
        let more = heirs.len() as u64 + OWN_DESCRIPTORS;
        let young = young_of(&estate, &heirs)
            .and_then(|young| spare_descriptors(claim.as_fd(), more).map(|()| young))
            .map_err(|error| Error::System { what: "taking over what the last pager had open", error })?;
        Ok(Self { root, estate, heirs: Heirs { processes: heirs, young, commons }, claim })
    }

    /// Whether a daemon has left it.
    #[must_use]
    pub fn is_daemon(&self) -> bool {
        self.estate.is_daemon()
    }

    /// The processes that wait.
    #[must_use]
    pub fn pids(&self) -> Vec<i32> {
        self.heirs.processes.iter().map(|heir| heir.found.pid).collect()
    }

    /// The pool's URL.
    #[must_use]
    pub fn pool(&self) -> String {
        self.estate.pool().unwrap_or_default()
    }

    /// The budget.
    #[must_use]
    pub fn local(&self) -> Local {
        self.estate.local()
    }

    /// Which mappings are managed.
    #[must_use]
    pub fn choice(&self) -> Choice {
        self.estate.choice()
    }

    /// Which pages leave.
    #[must_use]
    pub fn replacement(&self) -> Settings {
        self.estate.settings()
    }

    /// The memory.
    #[must_use]
    pub fn vault(&self) -> &Vault {
        self.estate.vault()
    }

    /// The claim is to be held until the estate names this process.
    pub(crate) fn into_parts(self) -> (i32, Estate, Heirs, Claim) {
        (self.root, self.estate, self.heirs, self.claim)
    }
}

/// What is told of a tree: of these heirs', or one that is new.
pub(crate) fn tally_of(heirs: &[Heir], tree: TreeId, root: (i32, u64), share: Share) -> Arc<Tally> {
    let known = heirs.iter().map(|heir| &heir.tally).find(|tally| tally.tree == tree);
    known.map_or_else(|| Tally::new(tree, root, share, false), Arc::clone)
}

/// Targets that had no agent. One whose userfaultfd nobody has kept is lost.
fn young_of(estate: &Estate, heirs: &[Heir]) -> io::Result<Vec<YoungHeir>> {
    let heir = |found: FoundYoung| {
        let uffd = found.guardian.keeps(found.number).transpose()?;
        let tally = tally_of(heirs, found.tree, found.root, found.share);
        Some(uffd.map(|uffd| YoungHeir { found, uffd, tally }))
    };
    estate.young().into_iter().filter_map(heir).collect()
}

/// Files of memory that were managed. One that nobody has any more is gone, and all pages of it.
fn commons_of(estate: &Estate, heirs: &[Heir], pid: i32) -> Result<Vec<CommonsHeir>, Error> {
    let (left, mut all) = (estate.commons(), Vec::new());
    if left.is_empty() {
        return Ok(all);
    }
    // Which file is opened, and written to, is not for others to say.
    if estate.vault().owner().map_err(|error| Error::System { what: "looking at the vault", error })?
        != effective_user()
    {
        return Err(Error::OthersPager(pid));
    }
    let mut pids: Vec<i32> = heirs.iter().map(|heir| heir.found.pid).collect();
    // Somebody else may have it open.
    pids.extend(procfs::processes().unwrap_or_default());
    for found in left {
        // Mappings may change between two looks.
        match (0..OPENED_WITHIN_LOOKS).find_map(|_| procfs::open_of(found.file, &pids)).filter(is_nameless) {
            Some(file) => {
                let tally = tally_of(heirs, found.tree, found.root, found.share);
                all.push(CommonsHeir { found, file: Arc::new(file), tally });
            }
            None if procfs::is_open_elsewhere(found.file) => {
                return Err(Error::Foreign { pid, why: "memory that it shares with others cannot be opened".into() });
            }
            None => {}
        }
    }
    Ok(all)
}

/// Whether it is memory that no directory has: a memfd, or what was mapped as anonymous.
fn is_nameless(file: &fs::File) -> bool {
    is_memory(file) && file.metadata().is_ok_and(|about| about.nlink() == 0)
}

/// Whether a thread has ended, or is about to: it has given its descriptors up before it is gone.
fn has_ended(pid: i32, thread: i32) -> bool {
    let stat = procfs::thread_stat(pid, thread);
    stat.as_ref().is_ok_and(|stat| stat.is_ending) || !procfs::is_alive(stat)
}

/// Whether a thread of a pager makes calls on files of memory, and nothing else.
fn is_deputy(pid: i32, thread: i32) -> bool {
    procfs::thread_name(pid, thread).is_some_and(|name| name == DEPUTY_NAME)
}

/// The right to take over, which nobody who lives has: two that did would write over each other's pages.
fn claim(estate: &Estate, pid: i32) -> Result<Claim, Error> {
    let begun = Instant::now();
    loop {
        if let Some(pager) = living_pager(estate) {
            return Err(Error::Managed { pid, pager });
        }
        let claim = estate.vault().claim();
        match claim.map_err(|error| Error::System { what: "claiming what the pager has left", error })? {
            // Another may have had it meanwhile, who then serves.
            Some(claim) if living_pager(estate).is_none() => return Ok(claim),
            None if begun.elapsed() > CLAIMED_WITHIN => return Err(Error::BeingTakenOver(pid)),
            _ => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

impl Heir {
    /// Takes what the agent keeps, and waits until it has nothing to do, or nothing that needs to be known.
    fn of(found: Found, tally: Arc<Tally>) -> Result<Self, Error> {
        let (pid, thread) = (found.pid, found.thread);
        let system = |error| Error::System { what: "taking a descriptor of the agent", error };
        let pidfd = pidfd_of_thread(thread).map_err(system)?;
        let link = fs::read_link(format!("/proc/{pid}/task/{thread}/fd/{}", found.uffd));
        if !link.is_ok_and(|link| link.to_str() == Some(LINK)) {
            return Err(Error::Foreign { pid, why: "its agent has no userfaultfd".into() });
        }
        let take = |number| take_fd(pidfd.as_fd(), number).map_err(system);
        let (uffd, socket) = (Uffd::from(take(found.uffd)?), take(found.socket)?);
        let memory = Memory::again(take(found.memory)?);
        let memory = memory.map_err(|error| Error::Foreign { pid, why: format!("its control pages: {error}") })?;
        let take_end = |number| take_fd(pidfd.as_fd(), number).ok();
        let at_work = await_idle(&found, socket.as_fd(), take_end)? == Agents::Populating;
        // What it has answered to the dead. One at work will still answer.
        while !at_work && receive_byte(socket.as_fd()) == Heard::Byte {}
        let is_theirs = |number, link: &str| number != found.socket && link.starts_with("socket:");
        let without = || Error::Foreign { pid, why: "its agent has no socket".into() };
        let orders = number_of(pid, thread, is_theirs).map_err(system)?.ok_or_else(without)?;
        Ok(Self { agent: Agent::again(&found, socket, orders, memory), uffd, found, tally, at_work })
    }
}

/// What an agent was found at.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Agents {
    /// It waits for an order.
    Idle,
    /// It populates pages ([`crate::target::Target::unshare`]): one of them may be out, and it then waits for a pager.
    Populating,
}

/// What the agent does, by its line in `/proc/PID/task/TID/syscall`; none while it does anything that will end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Doing {
    /// It reads from the descriptor of this number, or has just read: its end of the socket.
    Reading(i32),
    /// See [`Agents::Populating`].
    Populating,
}

fn doing(line: &str) -> Option<Doing> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let argument = |nth: usize| u64::from_str_radix(words.get(nth + 1)?.trim_start_matches("0x"), 16).ok();
    match words.first()?.parse().ok()? {
        // "0 0x5 ...": read.
        libc::SYS_read => Some(Doing::Reading(i32::try_from(argument(0)?).ok()?)),
        // "28 0x7f.. 0x1000 0x17 ...": madvise.
        libc::SYS_madvise => (argument(2)? == POPULATE_WRITE).then_some(Doing::Populating),
        _ => None,
    }
}

/// Waits until the agent has no order, or is at work on what may wait for us. `answers` is our end of its socket.
///
/// An order that it has not read is taken back, as if the pager had died before it gave it: the agent of a process that is stopped or
/// frozen reads none. One that it has read is waited for. A thread that was stopped on its way out of `read` looks as if it still waited
/// there: it is believed only asleep. A tracer may let it run while its process is stopped.
fn await_idle(found: &Found, answers: BorrowedFd<'_>, take: impl Fn(i32) -> Option<OwnedFd>) -> Result<Agents, Error> {
    let (pid, thread) = (found.pid, found.thread);
    let told = |file| fs::read_to_string(format!("/proc/{pid}/task/{thread}/{file}")).unwrap_or_default();
    let orders = |socket: &OwnedFd| unread(socket.as_fd()).unwrap_or(0);
    let begun = Instant::now();
    let mut led: Option<Seized> = None;
    loop {
        if !found.is_ordered || unread(answers).is_ok_and(|bytes| bytes > 0) {
            return Ok(Agents::Idle);
        }
        let is_in = |state| procfs::stat(thread).is_ok_and(|stat| stat.state == state);
        // Asked after all else: what is on its way out of `read` sleeps nowhere before it has done what it was told.
        let is_asleep = || is_in(b'S') && !told("wchan").contains("freezer");
        match doing(&told("syscall")) {
            Some(Doing::Populating) => return Ok(Agents::Populating),
            Some(Doing::Reading(number)) => match take(number) {
                Some(socket) if orders(&socket) > 0 && receive_byte(socket.as_fd()) == Heard::Byte => {
                    return Ok(Agents::Idle);
                }
                Some(socket) if orders(&socket) == 0 && is_asleep() => return Ok(Agents::Idle),
                _ => {}
            },
            None => {}
        }
        if led.is_none() && is_in(b'T') {
            led = Seized::to_lead(thread);
        }
        led.as_mut().map(Seized::tend);
        if begun.elapsed() > IDLE_WITHIN {
            return Err(Error::DidNotStop(pid));
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

impl Inherited {
    /// What the watcher must know of it.
    pub(crate) fn of(heir: &Heir) -> Self {
        let Found { id: target, pid, started, thread: agent, .. } = heir.found;
        let tally = Arc::clone(&heir.tally);
        Self { target, pid, started, agent, staging: heir.agent.staging_and_scratch(), uffd: heir.uffd.clone(), tally }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_leaves_other_users_processes() {
        const ROOT: u32 = 0;
        assert!(is_believed(ROOT, ROOT, Some(1000)), "root's pagers have everyone's");
        assert!(is_believed(1000, ROOT, Some(1000)) && is_believed(1000, 1000, Some(1000)));
        for process in [Some(ROOT), Some(1001), None] {
            assert!(!is_believed(1000, ROOT, process), "{process:?}");
        }
    }

    /// "taking a descriptor of the agent failed: No such process": a whole family was not taken over when one of it ended just then.
    #[test]
    fn who_ends_is_told_from_who_lives() {
        let ours = std::process::id().cast_signed();
        assert!(!has_ended(ours, ours));
        let mut child = std::process::Command::new("true").spawn().expect("a program");
        let pid = child.id().cast_signed();
        let until = Instant::now() + Duration::from_secs(10);
        while !has_ended(pid, pid) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        // Nobody has waited for it: it is still there.
        assert!(has_ended(pid, pid) && procfs::stat(pid).is_ok());
        child.wait().expect("our child");
        assert!(has_ended(pid, pid));
    }

    #[test]
    fn what_an_agent_does_is_read() {
        assert_eq!(doing("0 0x5 0x7f0000001004 0x1 0x0 0x0 0x0 0x0 0x7f0000000010"), Some(Doing::Reading(5)));
        assert_eq!(doing("28 0x7f0000001000 0x1000 0x17 0x0 0x0 0x0 0x0 0x0"), Some(Doing::Populating));
        for line in
            ["28 0x7f0000001000 0x1000 0x4 0x0 0x0 0x0 0x0 0x0", "28 0x1", "157 0x43 0x1", "running\n", "0", "", "x"]
        {
            assert!(doing(line).is_none(), "{line}");
        }
    }
}

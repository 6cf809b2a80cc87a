//! A process that keeps userfaultfds of forked children when the pager is killed.
//!
//! What the pager has of a child that is just forked is its userfaultfd alone, which the kernel opens as the fork is read of. Were that
//! closed, the child would read zeros where its pages are out. An agent keeps it later; until then the guardian does: it has the same
//! descriptor table from the first, so there is no moment at which it has it not. When the pager is dead, it closes all
//! else, and ends once nothing is left to keep, or whoever takes over has taken it and says so ([`Named::end`]). Where nobody takes over
//! whoever touches a page that is out is told that it is lost ([`Duty::Refuse`]).

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use spillway_core::Span;

use crate::procfs::{self, if_asked};
use crate::sys::fd::{poll, readable};
use crate::sys::message::MESSAGES;
use crate::sys::process::{pidfd_of_process, take_fd};
use crate::sys::sched::{Class, raise_descriptor_limit, set_class};
use crate::sys::twin::{self, Second, Twin};
use crate::sys::uffd::{Event, LINK, Message, Uffd};

/// What the process is called. Not after us: who kills all processes of that name means pagers.
const NAME: &str = "guardian";
/// How often it looks whether what it keeps is of anyone.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// And how often whether there are faults to answer.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// What a guardian does for whoever needs what it keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Duty {
    /// They wait for the next pager.
    Keep,
    /// There will be none: where they touch a page that is out they get SIGBUS.
    Refuse,
}

static OURS: OnceLock<Ours> = OnceLock::new();

struct Ours {
    named: Named,
    name: OwnedFd,
    /// This process's, for it.
    _own: OwnedFd,
}

/// Which process one is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Named {
    /// Its number.
    pub pid: i32,
    /// When it was started, in clock ticks since boot, as far as 21 bits tell.
    pub started: u64,
}

/// Hours: nobody else has its number, its name and started then.
const STARTED_BITS: u32 = 21;

/// Makes the guardian of this process: before it makes any thread.
///
/// # Errors
/// When there can be none.
pub fn begin(duty: Duty) -> io::Result<()> {
    // Of both, which have one table: who cannot have as many as are open cannot look which there are.
    let _ = raise_descriptor_limit();
    match twin::split()? {
        Twin::First { pid, name, own } => {
            let _ = OURS.set(Ours { named: Named { pid, started: started(pid)? }, name, _own: own });
            Ok(())
        }
        Twin::Second(second) => guard(second, duty),
    }
}

fn started(pid: i32) -> io::Result<u64> {
    procfs::stat(pid).map(|stat| stat.started & ((1 << STARTED_BITS) - 1))
}

/// The life of a guardian.
fn guard(second: Second, duty: Duty) -> ! {
    twin::set_name(c"guardian");
    let _ = std::env::set_current_dir("/");
    let mut left = second.outlive(|pid| hurry(pid, Class::Urgent));
    let is_kept = |number, link: &str| link == LINK && twin::uffd(number).is_none_or(|uffd| uffd.is_alive());
    let mut is_first = true;
    loop {
        match (left.close_all_but(is_kept), duty) {
            (Ok(kept), _) if kept.is_empty() => twin::end(),
            // Who has an agent is killed by it meanwhile, as it hears that the pager's sockets are closed.
            (Ok(kept), Duty::Refuse) if !is_first => refuse(&kept),
            (Err(error), _) if !procfs::is_for_want_of(&error) => twin::end(),
            (Ok(_) | Err(_), _) => std::thread::sleep(LOOK_EVERY),
        }
        is_first = false;
    }
}

/// Has the threads of a pager that ends do so outside of the idle class: one that is in it, and left to free all of the pager's memory,
/// takes seconds for that where other programs want the CPUs, and who takes over, or has told it to end, waits for it.
pub(crate) fn hurry(pid: i32, class: Class) {
    for thread in procfs::threads(pid).unwrap_or_default() {
        // One that has ended needs it no more.
        let _ = set_class(thread, class);
    }
}

/// Has whoever touches a page that is out told that it is lost, for a while.
fn refuse(kept: &[RawFd]) {
    let mut polled: Vec<_> = kept.iter().map(|number| readable(*number)).collect();
    // Faults that the pager has read are raised again, and so are those that could not be answered.
    kept.iter().filter_map(|number| twin::uffd(*number)).for_each(|uffd| uffd.wake_all());
    let begun = Instant::now();
    while let Some(left) = LOOK_EVERY.checked_sub(begun.elapsed()) {
        poll(&mut polled, Some(u64::try_from(left.as_nanos()).unwrap_or(0)));
        let ready = polled.iter().filter(|polled| polled.revents & libc::POLLIN != 0);
        if ready.filter_map(|polled| twin::uffd(polled.fd)).map(|uffd| answer(&uffd)).sum::<usize>() == 0 {
            // Nothing, or nothing that can be read.
            std::thread::sleep(LOOK_AGAIN);
        }
    }
}

/// Answers what one has to tell; how much that was.
fn answer(uffd: &Uffd) -> usize {
    let mut messages = [Message::default(); MESSAGES];
    let told = uffd.read(&mut messages).unwrap_or_default();
    for message in told {
        match message.decode() {
            Event::Fault { address, protected, .. } => {
                let page = Span::of_pages(address.page(), 1);
                // Where it has only lost its mapping it is protected as well, and no poison takes the place of that.
                let _ = uffd.protect(page, false);
                if !protected {
                    // Where mappings are changing it waits until all is woken.
                    let _ = uffd.poison(page.start);
                }
            }
            // It is kept by its number from now on.
            Event::Fork(child) => std::mem::forget(child),
            Event::Remap { .. } | Event::Remove(_) | Event::Unmap(_) | Event::Unknown => {}
        }
    }
    told.len()
}

/// Ours, if we have one and it lives.
pub fn ours() -> Option<Named> {
    let ours = OURS.get()?;
    let lives = !poll(&mut [readable(ours.name.as_raw_fd())], Some(0));
    lives.then_some(ours.named)
}

/// Ends ours: nothing is to be kept any more.
pub fn dismiss() {
    if let Some(ours) = OURS.get() {
        twin::kill(ours.name.as_fd());
        twin::reap(ours.named.pid);
    }
}

impl Named {
    /// A stable name for it, if it is there.
    fn find(self) -> io::Result<Option<OwnedFd>> {
        let Some(name) = if_asked(pidfd_of_process(self.pid))? else { return Ok(None) };
        let is_as_old = if_asked(started(self.pid))? == Some(self.started);
        let is_it = is_as_old && if_asked(procfs::name_of(self.pid, self.pid))?.is_some_and(|name| name == NAME);
        Ok(is_it.then_some(name))
    }

    /// The userfaultfd that it keeps by this number, if its address space is there.
    ///
    /// # Errors
    /// When we could not ask: whoever it is of would read zeros if it were taken for gone.
    pub fn keeps(self, number: i32) -> io::Result<Option<Uffd>> {
        let Some(name) = self.find()? else { return Ok(None) };
        let Ok(link) = std::fs::read_link(format!("/proc/{}/fd/{number}", self.pid)) else { return Ok(None) };
        let fd = if_asked(take_fd(name.as_fd(), number))?.filter(|_| link.to_str() == Some(LINK));
        Ok(fd.map(Uffd::from).filter(Uffd::is_alive))
    }

    /// Ends it: what it keeps, somebody else has.
    pub fn end(self) {
        self.find().ok().flatten().into_iter().for_each(|name| twin::kill(name.as_fd()));
    }
}

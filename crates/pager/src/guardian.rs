//! A process that keeps userfaultfds of forked children when the pager is killed.
//!
//! What the pager has of a child that is just forked is its userfaultfd alone, which the kernel opens as the fork is read of. Were that
//! closed, the child would read zeros where its pages are out. An agent keeps it later; until then the guardian does: it has the same
//! descriptor table from the first, so there is no moment at which it has it not. When the pager is dead, it closes all
//! else, and ends once nothing is left to keep, or whoever takes over has taken it and says so ([`Named::end`]).

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::OnceLock;
use std::time::Duration;

use crate::procfs;
use crate::sys::fd::{poll, readable};
use crate::sys::process::{pidfd_of_process, take_fd};
use crate::sys::twin::{self, Second, Twin};
use crate::sys::uffd::{LINK, Uffd};

/// What the process is called. Not after us: who kills all processes of that name means pagers.
const NAME: &str = "guardian";
/// How often it looks whether what it keeps is of anyone.
const LOOK_EVERY: Duration = Duration::from_millis(200);

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
pub fn begin() -> io::Result<()> {
    match twin::split()? {
        Twin::First { pid, name, own } => {
            let _ = OURS.set(Ours { named: Named { pid, started: started(pid)? }, name, _own: own });
            Ok(())
        }
        Twin::Second(second) => guard(second),
    }
}

fn started(pid: i32) -> io::Result<u64> {
    procfs::stat(pid).map(|stat| stat.started & ((1 << STARTED_BITS) - 1))
}

/// The life of a guardian.
fn guard(second: Second) -> ! {
    twin::set_name(c"guardian");
    let _ = std::env::set_current_dir("/");
    let mut left = second.outlive();
    let is_kept = |number, link: &str| link == LINK && twin::is_of_living(number);
    while left.close_all_but(is_kept).is_ok_and(|kept| kept > 0) {
        std::thread::sleep(LOOK_EVERY);
    }
    twin::end()
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
    fn find(self) -> Option<OwnedFd> {
        let name = pidfd_of_process(self.pid).ok()?;
        let is_it = started(self.pid).is_ok_and(|started| started == self.started)
            && procfs::thread_name(self.pid, self.pid).is_some_and(|name| name == NAME);
        is_it.then_some(name)
    }

    /// The userfaultfd that it keeps by this number, if its address space is there.
    pub fn keeps(self, number: i32) -> Option<Uffd> {
        let name = self.find()?;
        let link = std::fs::read_link(format!("/proc/{}/fd/{number}", self.pid)).ok()?;
        let fd = take_fd(name.as_fd(), number).ok().filter(|_| link.to_str() == Some(LINK))?;
        Some(Uffd::from(fd)).filter(Uffd::is_alive)
    }

    /// Ends it: what it keeps, somebody else has.
    pub fn end(self) {
        self.find().into_iter().for_each(|name| twin::kill(name.as_fd()));
    }
}

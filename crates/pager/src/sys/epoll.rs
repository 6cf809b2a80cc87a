//! Waiting for many descriptors: the kernel looks at those alone that have news, however many there are (epoll(7)).

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;

use super::fd::{checked, owned, timespec};

/// What is waited for.
pub struct Epoll(Arc<OwnedFd>);

/// A descriptor that is waited for as long as this lives.
///
/// Others may have the same file open, and the kernel tells of it for as long as anybody has: this must be dropped before the
/// descriptor is closed.
#[derive(Debug)]
pub struct Ear {
    epoll: Arc<OwnedFd>,
    fd: RawFd,
    name: u64,
    listens: bool,
}

/// Which descriptors have something to read, by the names that they were given.
#[derive(Default)]
pub struct Ready {
    events: Vec<libc::epoll_event>,
    count: usize,
}

fn control(epoll: &OwnedFd, operation: i32, fd: RawFd, name: u64, listens: bool) -> io::Result<()> {
    let events = if listens { libc::EPOLLIN.cast_unsigned() } else { 0 };
    let mut event = libc::epoll_event { events, u64: name };
    // SAFETY: `event` is a writable event; numbers that are no descriptors, or none that is waited for, are refused.
    checked(unsafe { libc::epoll_ctl(epoll.as_raw_fd(), operation, fd, &raw mut event) }.into()).map(drop)
}

impl Epoll {
    /// Nothing to wait for yet.
    ///
    /// # Errors
    /// When descriptors run out.
    pub fn new() -> io::Result<Self> {
        // SAFETY: no pointers are involved.
        owned(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) }.into()).map(|epoll| Self(Arc::new(epoll)))
    }

    /// Waits for `fd` as well, from now on.
    ///
    /// # Errors
    /// ENOMEM or ENOSPC where the kernel has no room for it.
    pub fn listen_to(&self, fd: BorrowedFd<'_>, name: u64) -> io::Result<Ear> {
        let fd = fd.as_raw_fd();
        control(&self.0, libc::EPOLL_CTL_ADD, fd, name, true)?;
        Ok(Ear { epoll: Arc::clone(&self.0), fd, name, listens: true })
    }

    /// Waits until one of them is ready or `timeout_ns` have passed (`None`: for ever); whether one is. Interruptions end the wait early.
    pub fn wait(&self, ready: &mut Ready, timeout_ns: Option<u64>) -> bool {
        let timeout = timeout_ns.map(timespec);
        let timeout = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        let (events, most) = (ready.events.as_mut_ptr(), ready.events.len());
        let no_mask: *const libc::sigset_t = std::ptr::null();
        // SAFETY: `events` is a writable array of `most` events; `timeout` is null or outlives the call; there is no signal mask.
        let count = unsafe {
            libc::syscall(libc::SYS_epoll_pwait2, self.0.as_raw_fd(), events, most, timeout, no_mask, 0_usize)
        };
        ready.count = usize::try_from(count).unwrap_or(0);
        ready.count > 0
    }
}

impl Ear {
    /// Whether it is waited for now.
    pub fn set_listening(&mut self, listens: bool) {
        if self.listens != listens {
            self.listens = listens;
            let _ = control(&self.epoll, libc::EPOLL_CTL_MOD, self.fd, self.name, listens);
        }
    }
}

impl Drop for Ear {
    fn drop(&mut self) {
        let _ = control(&self.epoll, libc::EPOLL_CTL_DEL, self.fd, self.name, false);
    }
}

impl Ready {
    /// Room for so many.
    pub fn reserve(&mut self, count: usize) {
        if self.events.len() < count {
            self.events.resize(count.next_power_of_two(), libc::epoll_event { events: 0, u64: 0 });
        }
    }

    /// Their names.
    pub fn names(&self) -> impl Iterator<Item = u64> + '_ {
        self.events[..self.count].iter().map(|event| event.u64)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use super::*;
    use crate::sys::fd::Bell;

    #[test]
    fn who_is_not_listened_to_is_not_heard_though_others_have_the_file_open() {
        let (epoll, mut ready) = (Epoll::new().expect("descriptors"), Ready::default());
        ready.reserve(3);
        let bells: Vec<Bell> = (0..3).map(|_| Bell::new().expect("descriptors")).collect();
        let mut ears: Vec<Ear> =
            (7..).zip(&bells).map(|(name, bell)| epoll.listen_to(bell.as_fd(), name).expect("room")).collect();
        let heard = |ready: &mut Ready| {
            epoll.wait(ready, Some(0));
            let mut names: Vec<u64> = ready.names().collect();
            names.sort_unstable();
            names
        };
        assert!(!epoll.wait(&mut ready, Some(1000)) && ready.names().next().is_none());
        bells.iter().for_each(Bell::ring);
        assert_eq!(heard(&mut ready), [7, 8, 9]);
        bells[0].silence();
        ears[1].set_listening(false);
        assert_eq!(heard(&mut ready), [9]);
        ears[1].set_listening(true);
        assert_eq!(heard(&mut ready), [8, 9]);
        // Another has it open, as an agent has its userfaultfd.
        let other = bells[2].as_fd().try_clone_to_owned().expect("descriptors");
        ears.pop();
        drop(bells);
        assert_eq!(heard(&mut ready), [0_u64; 0]);
        drop(other);
    }
}

//! Whom the fault thread listens to: commands, the store, and of each target its userfaultfd and its agent.

use std::os::fd::{AsFd as _, BorrowedFd};

use crate::sys::clock::now_ns;
use crate::sys::epoll::{Ear, Epoll, Ready};
use crate::sys::fd::Bell;
use crate::target::Target;

const BELL: u64 = u64::MAX;
const STORE: u64 = u64::MAX - 1;

/// See the module's documentation.
pub(super) struct Ears {
    epoll: Epoll,
    bell: Option<Ear>,
    store: Option<Ear>,
    ready: Ready,
    heard: Heard,
}

/// Who has something to say.
#[derive(Default)]
pub(super) struct Heard {
    pub(super) bell: bool,
    pub(super) store: bool,
    /// Targets whose agents do, and those with faults or events, as the driver numbers them.
    pub(super) agents: Vec<usize>,
    pub(super) targets: Vec<usize>,
}

impl Ears {
    pub(super) fn new(epoll: Epoll) -> Self {
        Self { epoll, bell: None, store: None, ready: Ready::default(), heard: Heard::default() }
    }

    /// Listens to everybody, but not to targets that must wait. True if that cannot be, for want of memory or descriptors: then it is
    /// to be tried again soon.
    pub(super) fn prick(&mut self, bell: &Bell, store: Option<BorrowedFd<'_>>, targets: &mut [Option<Target>]) -> bool {
        let epoll = &self.epoll;
        let mut deaf = false;
        let listen = |deaf: &mut bool, ear: &mut Option<Ear>, fd: BorrowedFd<'_>, name: u64| {
            if ear.is_none() {
                *ear = epoll.listen_to(fd, name).ok();
                *deaf |= ear.is_none();
            }
        };
        listen(&mut deaf, &mut self.bell, bell.as_fd(), BELL);
        if let Some(store) = store {
            listen(&mut deaf, &mut self.store, store, STORE);
        }
        for (at, target) in (0..).zip(targets.iter_mut()).filter_map(|(at, target)| Some((at, target.as_mut()?))) {
            let is_unread = target.unread_until_ns > 0;
            deaf |= is_unread;
            let listens = target.may_read() && !(is_unread && now_ns() < target.unread_until_ns);
            if listens {
                listen(&mut deaf, &mut target.ear, target.uffd.borrow(), 2 * at);
            }
            if let Some(ear) = &mut target.ear {
                ear.set_listening(listens);
                target.looked |= listens;
            }
            if let Some(agent) = &mut target.agent {
                listen(&mut deaf, &mut agent.ear, agent.socket.as_fd(), 2 * at + 1);
            }
        }
        let most = 2 * targets.len() + 2;
        self.ready.reserve(most);
        self.heard.agents.reserve(most);
        self.heard.targets.reserve(most);
        deaf
    }

    /// Listens until somebody has something to say or `timeout_ns` have passed (`None`: for ever); whether anybody has.
    pub(super) fn listen(&mut self, timeout_ns: Option<u64>) -> bool {
        let heard = &mut self.heard;
        (heard.bell, heard.store) = (false, false);
        heard.agents.clear();
        heard.targets.clear();
        let is_ready = self.epoll.wait(&mut self.ready, timeout_ns);
        for name in self.ready.names() {
            let at = usize::try_from(name / 2).unwrap_or(usize::MAX);
            match name {
                BELL => heard.bell = true,
                STORE => heard.store = true,
                _ if name % 2 == 0 => heard.targets.push(at),
                _ => heard.agents.push(at),
            }
        }
        is_ready
    }

    /// Who was heard last; to be given back ([`Ears::forget`]).
    pub(super) fn heard(&mut self) -> Heard {
        std::mem::take(&mut self.heard)
    }

    /// What was heard was acted on.
    pub(super) fn forget(&mut self, heard: Heard) {
        self.heard = heard;
    }

    /// Whether no target has faults or events.
    pub(super) fn is_quiet(&self) -> bool {
        self.heard.targets.is_empty()
    }
}

//! Calls on a file of memory that take its lock, which a program can hold up.
//!
//! Who calls `write` on a memfd has the file's lock (`inode_lock`), and may wait for a page of what it writes: for us. Taking pages out
//! of the file takes the same lock, and so does asking which are there. So another thread makes those calls. Mostly they are over at
//! once, and waited for; what is held up is gone on with when they are over, and meanwhile all goes on but for more of the kind.
//!
//! Invariants: a commons with such a call has something in flight ([`Flight::Other`]): nothing more of it leaves, and it does not end.
//! Pages that are on their way out are neither installed nor made writable; who wants that waits. One call takes the lock once: who
//! has it by turns with us may need what the last one took out.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use spillway_core::TargetId;

use super::eviction::OVERDRAFT_PAGES;
use super::{Driver, Report};
use crate::commons::{Backing, Commons};
use crate::shared::Shared;
use crate::sys::clock::now_ns;
use crate::sys::sched::{Class, set_class};
use crate::target::{Flight, Target, Waiting};
use crate::watcher::Request;

/// For how long calls are waited for at once, and for how much longer for each of them: one that nobody holds up takes some 5 us.
const PATIENCE: Duration = Duration::from_micros(300);
const PATIENCE_EACH: Duration = Duration::from_micros(10);
/// What that thread is called.
pub const DEPUTY_NAME: &str = "files";
/// Calls are short, and so is their stack; all of it is locked.
const STACK_BYTES: usize = 128 << 10;

type Call = Box<dyn FnOnce() + Send>;
/// Goes on with what there is an answer to, waiting for so long; true when there was one to all.
type GoOn = Box<dyn FnMut(&mut Driver, Duration) -> bool>;

/// The other thread, from the first such call on.
#[derive(Default)]
pub(super) struct Deputy {
    calls: Option<Sender<Call>>,
    /// Calls that are held up, and on which file.
    held_up: Vec<(TargetId, GoOn)>,
    /// Who means to write to a page that is on its way out.
    writers: Vec<(usize, Waiting)>,
}

impl Deputy {
    /// Has it make calls; those for which there is no thread are made here.
    fn make(&mut self, calls: Call, shared: &Shared) {
        let to = self.calls.get_or_insert_with(|| {
            let (calls, to_make) = channel::<Call>();
            let cpus = shared.cpus.get().copied();
            let work = move || {
                // It would be where the fault thread is now, and in its class.
                let _ = set_class(0, Class::Normal);
                let _ = cpus.map(|cpus| cpus.confine(0));
                to_make.into_iter().for_each(|call| call());
            };
            // Without it the channel is closed.
            let _ = std::thread::Builder::new().name(DEPUTY_NAME.into()).stack_size(STACK_BYTES).spawn(work);
            calls
        });
        if let Err(unsent) = to.send(calls) {
            (unsent.0)();
        }
    }

    /// Whether calls are held up.
    pub(super) fn is_held_up(&self) -> bool {
        !self.held_up.is_empty()
    }

    fn is_held_up_on(&self, commons: TargetId) -> bool {
        self.held_up.iter().any(|(other, _)| *other == commons)
    }

    /// A target is gone.
    pub(super) fn forget(&mut self, target: TargetId) {
        self.writers.retain(|(at, _)| *at != target.0 as usize);
    }
}

impl Driver {
    /// Makes calls on the file of a commons that take its lock, one with each of `with`; has `then` done with each answer. That
    /// is at once, unless the file may be open elsewhere, and is held up.
    pub(super) fn call_on<W: Send + 'static, T: Send + 'static>(
        &mut self,
        commons: TargetId,
        file: Backing,
        with: Vec<W>,
        call: impl Fn(&Backing, W) -> T + Send + 'static,
        mut then: impl FnMut(&mut Self, T) + 'static,
    ) {
        if !file.may_be_open {
            return with.into_iter().for_each(|with| then(self, call(&file, with)));
        }
        let (reply, answers) = channel();
        // What was asked for first is heard first: a removal is over only when what was on its way out is.
        let waits = !self.deputy.is_held_up_on(commons);
        let (bell, begun, mut left) = (Arc::clone(&self.bell), Instant::now(), with.len());
        let patience = PATIENCE + PATIENCE_EACH * u32::try_from(left).unwrap_or(u32::MAX);
        let calls = move || {
            for with in with {
                // Whoever would hear of it is there until it has.
                let _ = reply.send(call(&file, with));
                if !waits || begun.elapsed() > patience / 2 {
                    bell.ring();
                }
            }
        };
        self.deputy.make(Box::new(calls), &self.shared);
        let mut go_on: GoOn = Box::new(move |driver, patience| {
            let until = Instant::now() + patience;
            while left > 0 {
                match answers.recv_timeout(until.saturating_duration_since(Instant::now())) {
                    Ok(answer) => {
                        left -= 1;
                        then(driver, answer);
                    }
                    Err(RecvTimeoutError::Timeout) => return false,
                    Err(RecvTimeoutError::Disconnected) => unreachable!("a call that was made is answered"),
                }
            }
            true
        });
        if !waits || !go_on(self, patience) {
            self.deputy.held_up.push((commons, go_on));
            // Calls on other files are no business of who holds these up. That thread ends when they are over.
            self.deputy.calls = None;
            self.fly(commons, Flight::Other);
        }
    }

    /// Goes on with what was held up, as far as it is not any more.
    #[inline(never)]
    pub(super) fn go_on_with_calls(&mut self) {
        let held_up = std::mem::take(&mut self.deputy.held_up);
        let mut files: Vec<TargetId> = held_up.iter().map(|(commons, _)| *commons).collect();
        for (commons, mut go_on) in held_up {
            if self.deputy.is_held_up_on(commons) || !go_on(self, Duration::ZERO) {
                self.deputy.held_up.push((commons, go_on));
            }
        }
        files.retain(|commons| !self.deputy.is_held_up_on(*commons));
        for commons in files {
            self.fly(commons, Flight::Idle);
            if self.common(commons).is_some_and(|commons| commons.views.is_empty()) {
                let _ = self.reports.send(Request::Report(Report::Deserted(commons)));
            }
        }
        for nth in 0..self.commons.len() {
            self.common_mut(self.commons[nth]).into_iter().for_each(Commons::protect_late);
        }
        for (at, fault) in std::mem::take(&mut self.deputy.writers) {
            if !self.must_wait_to_write(at, fault) {
                self.unprotect(at, fault);
            }
        }
        // Who holds a call up must not wait for room, of which that call may have to make some.
        match (self.deputy.is_held_up(), self.targets.iter().flatten().any(Target::may_look)) {
            (true, true) => self.core.set_overdraft(OVERDRAFT_PAGES),
            (true, false) => self.core.set_overdraft(u64::MAX / 2),
            (false, _) if !self.yields.is_resting(now_ns()) => self.core.set_overdraft(0),
            (false, _) => {}
        }
    }

    fn fly(&mut self, commons: TargetId, flight: Flight) {
        self.awaits_agent &= flight != Flight::Idle;
        if let Some(target) = self.target(commons) {
            target.flight = flight;
        }
        self.note_rest();
    }

    /// Whether somebody who means to write to a protected page must wait as that is on its way out: noted, if so.
    pub(super) fn must_wait_to_write(&mut self, at: usize, fault: Waiting) -> bool {
        let Some(target) = self.targets[at].as_ref().filter(|_| self.deputy.is_held_up()) else { return false };
        let id = target.id;
        let place = |commons: &Commons| Some(commons.is_leaving(commons.seen_at(id, fault.address)?));
        // What it is that is protected there may not be known now.
        let is_leaving = self.commons.iter().filter_map(|&its| self.common(its)).find_map(place).unwrap_or(true);
        let noted = |(other, its): &(usize, Waiting)| (*other, its.address) == (at, fault.address);
        if is_leaving && !self.deputy.writers.iter().any(noted) {
            self.deputy.writers.push((at, fault));
        }
        is_leaving
    }
}

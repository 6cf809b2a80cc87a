//! Calls that a program can hold up, and what is served meanwhile.
//!
//! Who calls `write` on a memfd has the file's lock (`inode_lock`) and may wait for a page of what it writes: for us. Taking pages out
//! of the file takes the same lock, and so does asking which are there. So another thread makes those calls, and until it is back
//! faults are served, and nothing else is begun.
//!
//! Invariants: no change of mappings is read meanwhile but by an accident (a fault that was counted is interrupted before it is read).
//! Pages that are on their way out are neither installed nor made writable; who wants that waits.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use super::Driver;
use crate::commons::Backing;
use crate::outlook::Outlook;
use crate::sys::message::MESSAGES;
use crate::sys::sched::nap;
use crate::target::Waiting;

/// For how long the fault thread only waits: a call that nobody holds up takes some 10 us.
const PATIENCE: Duration = Duration::from_millis(1);
/// Between two looks afterwards, unless something comes.
const LOOK_EVERY_NS: u64 = 5_000_000;
const REST: Duration = Duration::from_micros(50);
/// Calls are short, and so is their stack; all of it is locked.
const STACK_BYTES: usize = 128 << 10;

type Call = Box<dyn FnOnce() + Send>;

/// The other thread, from the first such call on.
#[derive(Default)]
pub(super) struct Deputy {
    calls: Option<Sender<Call>>,
    /// Answers of its are waited for.
    is_awaited: bool,
    /// One has not come in time.
    is_held_up: bool,
    /// Who means to write to a page that is protected, and is told when nothing is on its way out any more.
    writers: Vec<(usize, Waiting)>,
}

impl Deputy {
    /// Has it make a call; one for which there is no thread is made here.
    fn make(&mut self, call: Call) {
        let calls = self.calls.get_or_insert_with(|| {
            let (calls, to_make) = channel::<Call>();
            let work = move || to_make.into_iter().for_each(|call| call());
            // Without it the channel is closed.
            let _ = std::thread::Builder::new().name("files".into()).stack_size(STACK_BYTES).spawn(work);
            calls
        });
        if let Err(unsent) = calls.send(call) {
            (unsent.0)();
        }
    }
}

impl Driver {
    /// Makes calls on a file that take its lock, `call` with each of `with`, and has `then` done with the answer to each as soon as it is
    /// there. Where the file may be open elsewhere, faults are served until it is.
    pub(super) fn call_on<W: Send + 'static, T: Send + 'static>(
        &mut self,
        file: Backing,
        with: Vec<W>,
        call: impl Fn(&Backing, W) -> T + Send + 'static,
        mut then: impl FnMut(&mut Self, T),
    ) {
        if !file.may_be_open {
            return with.into_iter().for_each(|with| then(self, call(&file, with)));
        }
        let (reply, answers) = channel();
        let (bell, begun, count) = (Arc::clone(&self.bell), Instant::now(), with.len());
        let awaited_already = std::mem::replace(&mut self.deputy.is_awaited, true);
        self.deputy.make(Box::new(move || {
            for with in with {
                // They are waited for until they are there.
                let _ = reply.send(call(&file, with));
                if begun.elapsed() > PATIENCE / 2 {
                    bell.ring();
                }
            }
        }));
        for _ in 0..count {
            let answer = self.answer(&answers);
            then(self, answer);
        }
        if !awaited_already {
            self.deputy.is_awaited = false;
            if std::mem::take(&mut self.deputy.is_held_up) {
                // What was silenced may have been for commands.
                self.bell.ring();
            }
            while let Some((at, fault)) = self.deputy.writers.pop() {
                self.unprotect(at, fault);
            }
        }
    }

    /// The next answer, serving faults until it is there.
    fn answer<T>(&mut self, answers: &Receiver<T>) -> T {
        loop {
            match answers.recv_timeout(if self.deputy.is_held_up { Duration::ZERO } else { PATIENCE }) {
                Ok(answer) => return answer,
                Err(RecvTimeoutError::Timeout) => {
                    self.deputy.is_held_up = true;
                    self.serve_faults_alone();
                }
                Err(RecvTimeoutError::Disconnected) => unreachable!("a call that was made is answered"),
            }
        }
    }

    /// Whether who means to write to a protected page must wait: noted, if so.
    pub(super) fn is_kept_waiting(&mut self, at: usize, fault: Waiting) -> bool {
        if self.deputy.is_awaited {
            self.deputy.writers.push((at, fault));
        }
        self.deputy.is_awaited
    }

    /// Serves faults, which must not wait for room as none is made, and goes on with what was begun.
    fn serve_faults_alone(&mut self) {
        self.wait(Some(LOOK_EVERY_NS));
        if self.polled[0].revents != 0 {
            self.bell.silence();
        }
        if self.polled.last().is_some_and(|store| store.revents != 0) {
            self.progress();
        }
        let mut served = 0;
        for at in 0..self.targets.len() {
            if self.polled.get(2 * at + 2).is_some_and(|polled| polled.revents != 0) {
                self.hear_agent(at);
            }
            if self.polled.get(2 * at + 1).is_some_and(|polled| polled.revents != 0) {
                served += self.read_faults_alone(at);
            }
        }
        if served == 0 {
            // A change that is not read is announced on and on.
            nap(REST);
        }
        self.hands.finish_reading(false, &mut self.core);
        self.core.set_overdraft(u64::MAX / 2);
        self.retry_waiting();
        self.arrive();
    }

    fn read_faults_alone(&mut self, at: usize) -> usize {
        let Some(target) = self.targets[at].as_ref().filter(|target| target.may_read()) else { return 0 };
        let faults = match &target.outlook {
            Some(outlook) => outlook.faults(),
            None => Outlook::of(&target.uffd).faults(),
        };
        self.read_messages(at, faults.min(MESSAGES))
    }
}

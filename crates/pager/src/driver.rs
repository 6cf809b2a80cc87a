//! The fault thread: wait, ask the core, perform, report. The only loop that touches the table, the store and the
//! targets' memory.
//!
//! On a fault it makes the system calls that the kernel requires (one wait, one read, one installation) and nothing
//! else: no lock, no log, no allocation. Captures and writes come after the faults that wait, except when the budget
//! is used up, and then only as many as make room.

mod buffers;
mod burial;
mod changes;
mod commands;
mod commons;
mod departure;
mod ears;
mod eviction;
mod handed;
mod hands;
mod held_up;
mod journeys;
mod merging;
mod moved;
mod outgoing;
mod reader;
mod recall;
mod register;
mod release;
mod serve;
mod start;
mod stopwatch;
mod takeover;
mod tape;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, Sender};

use spillway_core::TargetId;
use spillway_core::pager::Pager;
use spillway_core::streams::BLOCK_PAGES_MAX;

use crate::access::Access;
use crate::choice::Choice;
use crate::guardian;
use crate::placement::Placement;
use crate::procfs::is_for_want_of;
use crate::shared::Shared;
use crate::sys::clock::now_ns;
use crate::sys::fd::{Bell, Heard, receive_byte};
use crate::sys::message::MESSAGES;
use crate::sys::sched::Class;
use crate::sys::uffd::{Event, Message};
use crate::tally::Tally;
use crate::target::{Flight, Target, Waiting};
use crate::watcher::Request;

pub use commands::{Command, Homeward, Report, Seen, portions};
pub use commons::Joined;
use departure::Leaving;
use ears::Ears;
use eviction::{WRITES_PER_TURN, Yield};
use hands::{Hands, index, to_handle};
pub use held_up::DEPUTY_NAME;
use held_up::Deputy;
use journeys::{Journeys, LOOKS_PER_PAGE};
use release::Release;
pub use start::Wires;
pub use takeover::{CommonsHeir, Heir, Heirs, YoungHeir};
use tape::Tape;

/// Page buffers: what is captured and not yet stored. 4 MiB, of which a small budget uses a part.
const BUFFERS: u32 = 1024;

/// Handles freed between two looks for faults.
const FREES_PER_TURN: usize = 256;

/// Turns between two looks at everything that can be waited for: commands and agents wait so long at most.
const UNPOLLED_MAX: u32 = 64;

/// Pages that a store which answers later is given at once: each message of its own would wake it.
const WRITE_BATCH: u64 = 32;

/// A wait longer than this was one: a poll that finds something ready takes a fraction of it.
const SLEPT_NS: u64 = 3_000;

/// How soon to look again at faults that wait for the end of a change of mappings. The kernel wakes nobody then.
const RETRY_NS: u64 = 100_000;

/// How soon to read events again that could not be read: some process has to end first.
const UNREAD_NS: u64 = 1_000_000;

/// How soon to offer a page again to a store that declined.
const ASK_AGAIN_NS: u64 = 20_000_000;

/// See the module's documentation.
pub struct Driver {
    core: Pager,
    /// Which mappings are managed.
    choice: Choice,
    hands: Hands,
    journeys: Journeys,
    targets: Vec<Option<Target>>,
    /// What targets have touched, where that can be seen.
    access: Option<Access>,
    commands: Receiver<Command>,
    bell: Arc<Bell>,
    reports: Sender<Request>,
    shared: Arc<Shared>,
    placement: Placement,
    /// Which place and class of the fault thread this is, of all that it has had; agents are to have the same. The first is 1.
    place: u64,
    class: Class,
    ears: Ears,
    release: Option<Release>,
    /// Trees that are let go while others are served on.
    leaving: Vec<Leaving>,
    /// Targets that have ended, of which not all is forgotten yet.
    graves: Vec<TargetId>,
    /// The last wait was one.
    slept: bool,
    /// When it was last looked for orders that nobody takes.
    recalled_ns: u64,
    /// Turns since descriptors were last polled.
    unpolled: u32,
    /// The last reading of events found none.
    dry: bool,
    /// The store may have more to tidy up.
    untidy: bool,
    yields: Yield,
    /// Faults that are tried again now; empty, with room for more, at other times.
    retried: Vec<Waiting>,
    /// What is recorded, if anything is.
    tape: Option<Tape>,
    /// The last sweep found nothing to capture but in targets whose agent is busy: the next waits for one.
    awaits_agent: bool,
    /// The last sweep found nothing to capture, and pages are on their way to the store: the next waits for it.
    awaits_store: bool,
    /// It has taken over from another pager.
    succeeds: bool,
    /// There may be something to tell the kernel of merging.
    owes_errands: bool,
    /// Targets whose record had no room, or that have none: nobody could take over as long as there is one.
    unrecorded: Vec<TargetId>,
    /// Which of the targets are memory that several have mapped.
    commons: Vec<TargetId>,
    /// Who makes calls for it that a program may hold up.
    deputy: Deputy,
    /// Pages of a commons that were taken out since that was last begun, and those that would not leave.
    outgone: (u64, u64),
}

impl Driver {
    /// Serves until every sender of commands is gone.
    pub fn run(mut self) {
        loop {
            if self.serve_at_once() || self.receive_at_once() {
                continue;
            }
            let timeout = [self.timeout(), self.until_recall()].into_iter().flatten().min();
            self.wait(timeout);
            let heard = self.ears.heard();
            if heard.bell {
                self.bell.silence();
                if !self.obey() {
                    return;
                }
            }
            if heard.store {
                self.progress();
            }
            self.begin_window();
            let local_before = self.core.local_pages();
            heard.agents.iter().for_each(|&at| self.hear_agent(at));
            for &at in &heard.targets {
                self.read_events(at);
            }
            let busy = !heard.targets.is_empty();
            self.ears.forget(heard);
            self.end_turn(busy, local_before);
        }
    }

    /// Reads and serves what events there are, without asking first whether there are any: on one CPU the faulting thread
    /// has raised its next fault by the time this thread runs again. That saves a system call for each.
    fn serve_at_once(&mut self) -> bool {
        let letting_go = self.release.is_some() || !self.leaving.is_empty();
        if self.dry || self.unpolled >= UNPOLLED_MAX || self.journeys.are_under_way() || letting_go {
            return false;
        }
        let is_process = |target: &Target| target.commons.is_none();
        let mut there = (0..self.targets.len()).filter(|&at| self.targets[at].as_ref().is_some_and(is_process));
        let (Some(at), None) = (there.next(), there.next()) else { return false };
        let Some(target) = self.targets[at].as_mut().filter(|target| target.may_read()) else { return false };
        target.looked = true;
        self.slept = false;
        self.unpolled += 1;
        let local_before = self.core.local_pages();
        self.dry = self.read_events(at) == 0;
        if self.dry {
            self.hands.watch.finds_none();
        } else {
            self.end_turn(true, local_before);
        }
        !self.dry
    }

    /// Asks a store whether what it was asked for is there, without waiting: a server on the same CPU has answered by now.
    fn receive_at_once(&mut self) -> bool {
        let owed = self.journeys.under_way();
        if owed == 0 || self.unpolled >= UNPOLLED_MAX {
            return false;
        }
        self.unpolled += 1;
        self.hands.store.flush();
        let local_before = self.core.local_pages();
        self.progress();
        let came = self.journeys.under_way() < owed;
        if came {
            self.dry = false;
            self.end_turn(true, local_before);
        }
        came
    }

    fn end_turn(&mut self, busy: bool, local_before: u64) {
        // As many pages leave the buffers as became local: the reserve stays what it is.
        let came = self.core.local_pages().saturating_sub(local_before);
        self.work(busy, index(came.min(BLOCK_PAGES_MAX)));
        Tally::add(&self.shared.progress, 1);
    }

    /// How long to wait: not at all while there is work, for ever when there is none.
    fn timeout(&self) -> Option<u64> {
        let live = || self.targets.iter().flatten();
        if self.release.is_some() && live().all(|target| target.flight == Flight::Idle) {
            return if self.journeys.are_under_way() { Some(RETRY_NS) } else { Some(0) };
        }
        let evicting = (self.core.wanted_captures() > 0 || self.may_sweep())
            && live().any(Target::may_look)
            && !self.hands.reader.is_at_work()
            && !self.awaits_agent
            && !(self.awaits_store && self.journeys.writes() > 0)
            && self.release.is_none();
        let rest_ns = self.yields.until_ns.saturating_sub(if self.yields.until_ns > 0 { now_ns() } else { 0 });
        let writes = self.core.has_due_writes() && self.hands.store.accepts();
        if writes || self.core.has_released() || !self.graves.is_empty() || (evicting && rest_ns == 0) {
            return Some(0);
        }
        let waits = live().any(|target| {
            !target.doubts.is_empty()
                || !target.unmapped.is_empty()
                || (!target.waiting.is_empty() && target.may_serve())
        });
        let due = match (waits, evicting) {
            _ if self.untidy => Some(0),
            (true, _) => Some(RETRY_NS),
            (false, true) => Some(rest_ns),
            (false, false) => self.core.is_store_full().then_some(ASK_AGAIN_NS),
        };
        // No more room is made before what was captured has been read.
        let reading = self.hands.reader.patience_ns().filter(|_| self.core.wanted_captures() > 0);
        [due, reading, self.until_window(), self.until_homeward()].into_iter().flatten().min()
    }

    fn wait(&mut self, timeout: Option<u64>) {
        let is_deaf = self.ears.prick(&self.bell, self.hands.store.descriptor(), &mut self.targets);
        let timeout = if is_deaf { Some(timeout.map_or(RETRY_NS, |ns| ns.min(RETRY_NS))) } else { timeout };
        self.hands.store.flush();
        if timeout != Some(0) {
            self.publish();
        }
        if self.journeys.are_under_way() && timeout != Some(0) {
            self.look_while_waiting();
        }
        let since = now_ns();
        // While pages are on their way, waiting says nothing of where the faulting thread is.
        let owes = self.journeys.are_under_way();
        let ready = !owes && self.ears.listen(Some(0));
        if !ready && !owes && timeout != Some(0) && !self.is_waited_for() && self.placement.chase(&self.shared) {
            self.place_agents();
        }
        if !ready && (owes || timeout != Some(0)) {
            self.ears.listen(timeout);
        }
        let now_ns = now_ns();
        self.slept = !owes && now_ns - since > SLEPT_NS;
        self.recall(now_ns);
        self.unpolled = 0;
        self.dry = self.ears.is_quiet();
        if self.dry && self.targets.iter().flatten().all(Target::may_read) {
            self.hands.watch.finds_none();
        }
    }

    /// Whether what this thread waits for is not the next fault, but what faults wait for.
    fn is_waited_for(&self) -> bool {
        self.targets.iter().flatten().any(|target| !target.may_read() || !target.waiting.is_empty())
    }

    fn publish(&self) {
        let processes = self.targets.iter().flatten().filter(|target| target.agent.is_some()).count();
        self.shared.publish(&self.core, &*self.hands.store, processes as u64);
        let ready =
            self.targets.iter().flatten().filter(|it| it.commons.as_ref().is_some_and(|commons| commons.is_ready()));
        self.shared.shared_files.store(self.commons.len() as u64, Relaxed);
        self.shared.shared_files_ready.store(ready.count() as u64, Relaxed);
    }

    /// Reads events and acts on them; how many there were.
    fn read_events(&mut self, at: usize) -> usize {
        let mut messages = [Message::default(); MESSAGES];
        let most = if self.commons.is_empty() { MESSAGES } else { self.messages_to_read(at) };
        if most == 0 {
            return 0;
        }
        let Some(target) = &self.targets[at] else { return 0 };
        // Aside it is on another CPU than whom it wakes.
        let displaced = self.shared.idle.load(Relaxed) && !self.shared.aside.load(Relaxed);
        let since_ns = self.hands.watch.reads(now_ns, displaced);
        let (mut number, estate) = (0, self.hands.estate.as_ref());
        let read = match estate {
            Some(estate) => {
                number = estate.begin_inbox(target.id);
                target.uffd.read_by_way_of(estate.inbox(), &mut messages[..most])
            }
            None => target.uffd.read(&mut messages[..most]),
        };
        let is_unread = read.as_ref().is_err_and(is_for_want_of);
        let count = read.map_or(0, <[Message]>::len);
        if is_unread || target.unread_until_ns > 0 {
            self.note_unread(at, is_unread);
        }
        if !self.commons.is_empty() && messages[..count].iter().any(|message| !message.is_fault()) {
            self.look_late(at);
        }
        // The kernel hands out faults first. But a change that was read has happened by the time a fault is served, and
        // whoever made it goes on: what it made void must not be installed any more.
        for (nth, message) in messages[..count].iter().enumerate().filter(|(_, message)| !message.is_fault()) {
            let event = message.decode();
            self.settle_unmapped(at, Some(&event));
            self.core.begin_event(number + nth as u64);
            self.change(at, event);
            if let Some(estate) = &self.hands.estate {
                estate.settle_message(nth);
            }
        }
        for message in messages[..count].iter().filter(|message| message.is_fault()) {
            if let Event::Fault { address, thread, write, protected } = message.decode() {
                let fault = Waiting { address: address.page(), write, thread, since_ns };
                if !protected {
                    self.serve(at, fault);
                } else if !self.must_wait_to_write(at, fault) {
                    self.unprotect(at, fault);
                }
                self.note_thread(at, thread);
            }
        }
        self.settle_at_rest(at);
        count
    }

    /// A target's events could be read, or could not for want of descriptors or memory.
    #[inline(never)]
    fn note_unread(&mut self, at: usize, is_unread: bool) {
        if let Some(target) = &mut self.targets[at] {
            target.unread_until_ns = if is_unread { now_ns() + UNREAD_NS } else { 0 };
        }
    }

    fn hear_agent(&mut self, at: usize) {
        let Some(target) = &mut self.targets[at] else { return };
        let Some(agent) = &target.agent else { return };
        self.awaits_agent = false;
        match receive_byte(std::os::fd::AsFd::as_fd(&agent.socket)) {
            Heard::Nothing => {}
            Heard::End => {
                if matches!(target.flight, Flight::Capture { .. }) {
                    self.lose_capture(at);
                }
                let Some(target) = &mut self.targets[at] else { return };
                if let Some(estate) = &self.hands.estate {
                    estate.set_batch(target.id, None);
                    guardian::ours().into_iter().for_each(|ours| estate.lose_agent(target.id, &target.uffd, ours));
                }
                target.agent = None;
                (target.flight, target.deaf) = (Flight::Idle, false);
                target.holds = None;
                target.buffers.drain(..).for_each(|buffer| self.core.return_buffer(buffer));
                let _ = self.reports.send(Request::Report(Report::AgentGone(target.id)));
            }
            Heard::Byte => {
                target.deaf = false;
                self.errand_is_over(at, true);
            }
        }
        self.note_rest();
    }

    /// The agent has done what it was told to, or has not begun to.
    fn errand_is_over(&mut self, at: usize, done: bool) {
        let Some(target) = &mut self.targets[at] else { return };
        if let Some(estate) = &self.hands.estate {
            estate.set_ordered(target.id, false);
        }
        match std::mem::replace(&mut target.flight, Flight::Idle) {
            Flight::Capture { first_call, again } => self.collect(at, first_call, again),
            Flight::Merging(errand) if done => self.heard_of_merging(at, errand),
            Flight::Merging(_) => self.owes_errands = true,
            Flight::Other => self.heard_of_hold(at, done),
            Flight::Idle => {}
        }
    }

    fn note_rest(&self) {
        if self.targets.iter().flatten().all(|target| target.flight == Flight::Idle) {
            self.shared.errands_over.store(self.shared.errands_begun.load(Relaxed), Relaxed);
        }
    }

    /// What is due besides faults, a little at a time.
    fn work(&mut self, busy: bool, came: usize) {
        let read = self.hands.finish_reading(false, &mut self.core);
        if !read && self.reader_is_wanted() {
            self.hands.reader.hurry();
        }
        self.arrive();
        if self.deputy.is_held_up() {
            self.go_on_with_calls();
        }
        for _ in 0..FREES_PER_TURN {
            let Some(bits) = self.core.next_released() else { break };
            if self.journeys.are_possible() {
                self.journeys.forget(bits, &self.core);
            }
            self.hands.store.free(to_handle(bits));
        }
        // Once more: what is freed will not come.
        self.arrive();
        self.bury(busy);
        self.write(busy, came);
        if self.core.is_store_full() {
            // Soon there are none.
            self.core.forgo_clean(FREES_PER_TURN, |_| u64::MAX);
        }
        self.retry_waiting();
        if self.owes_errands {
            self.tend_merging();
        }
        if !self.leaving.is_empty() {
            self.bring_some_home();
        }
        // What was asked for just now may be here, or lost, at once; nothing would announce it.
        self.arrive();
        if self.release.is_some() {
            self.bring_home();
        } else if !read {
            // What was captured last comes first.
        } else if self.may_sweep() {
            self.sweep();
        } else if self.core.wanted_captures() > 0 {
            // While faults keep coming they are served from the reserve, and pages leave when it runs low.
            if !busy || self.core.is_low() {
                self.evict();
            }
        } else if !busy {
            self.drop_staged();
            self.untidy = self.hands.store.tidy();
            // Also of a program to which nothing comes home.
            self.lay_others_down(LOOKS_PER_PAGE);
        }
    }

    /// Whether what is being read of captured pages must not wait for the CPU that it is read on.
    fn reader_is_wanted(&self) -> bool {
        self.hands.reader.patience_ns() == Some(0)
            || self.targets.iter().flatten().any(|target| !target.waiting.is_empty())
    }

    /// Hands pages to the store.
    fn write(&mut self, busy: bool, came: usize) {
        let most = match (self.journeys.are_possible(), busy) {
            (true, _) if self.core.has_due_writes() || self.core.is_store_full() => {
                // What is wanted goes first.
                self.hands.store.flush();
                index(WRITE_BATCH)
            }
            (true, _) => 0,
            (false, true) => came.max(1),
            (false, false) => WRITES_PER_TURN,
        };
        for _ in 0..most {
            if !self.write_one(false) {
                break;
            }
        }
    }

    fn target(&mut self, id: TargetId) -> Option<&mut Target> {
        self.targets.get_mut(id.0 as usize)?.as_mut()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use spillway_core::pager::Budget;
    use spillway_core::policy::Settings;
    use spillway_store::local::{Config, Local};

    use super::*;
    use crate::sys::epoll::Epoll;

    /// One with nobody to serve.
    pub(super) fn driver() -> Driver {
        let ((_, commands), (reports, _)) = (channel(), channel());
        let bell = Arc::new(Bell::new().expect("a descriptor"));
        let epoll = Epoll::new().expect("a descriptor");
        let wires = Wires { commands, epoll, bell, reports, shared: Arc::new(Shared::default()) };
        let (store, _refill) = Local::new(Config::default());
        Driver::new(Budget::Pages(1024), Settings::default(), Box::new(store), None, wires)
    }
}

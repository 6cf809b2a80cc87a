//! How a driver begins, and how targets and settings come to it.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, Sender};

use spillway_core::TargetId;
use spillway_core::pager::{Budget, Config, Pager};
use spillway_core::policy::{Kind, Settings};
use spillway_store::Store;

use super::ears::Ears;
use super::eviction::Yield;
use super::hands::Hands;
use super::held_up::Deputy;
use super::journeys::Journeys;
use super::tape::Tape;
use super::{BUFFERS, Command, Driver, UNPOLLED_MAX, WRITE_BATCH};
use crate::access::Access;
use crate::choice::Choice;
use crate::estate::Estate;
use crate::placement::Placement;
use crate::recording::Recording;
use crate::shared::Shared;
use crate::sys::epoll::Epoll;
use crate::sys::fd::Bell;
use crate::sys::sched::{Class, Cpus, set_class, thread_id};
use crate::target::{Flight, Target, WAITING_ROOM};
use crate::watcher::Request;

/// What joins the fault thread to the others.
pub struct Wires {
    /// What is asked of it,
    pub commands: Receiver<Command>,
    /// what it waits with,
    pub epoll: Epoll,
    /// and what wakes it for that.
    pub bell: Arc<Bell>,
    /// What it tells the watcher.
    pub reports: Sender<Request>,
    /// What it publishes.
    pub shared: Arc<Shared>,
}

impl Driver {
    /// A driver without targets, to be run on the thread that makes it.
    pub fn new(
        budget: Budget,
        replacement: Settings,
        store: Box<dyn Store>,
        estate: Option<Estate>,
        wires: Wires,
    ) -> Self {
        let config = Self::config(budget, &*store);
        let core = match &estate {
            Some(estate) => Pager::lasting(config, estate.vault().lasting()),
            None => Pager::new(config),
        };
        Self::with(core, replacement, store, estate, wires)
    }

    /// What a core is made with that has this store.
    pub(super) fn config(budget: Budget, store: &dyn Store) -> Config {
        let write_batch = if store.descriptor().is_some() { WRITE_BATCH } else { 1 };
        Config { budget, buffers: BUFFERS, write_batch }
    }

    /// A driver around this core.
    pub(super) fn with(
        core: Pager,
        replacement: Settings,
        store: Box<dyn Store>,
        estate: Option<Estate>,
        Wires { commands, epoll, bell, reports, shared }: Wires,
    ) -> Self {
        shared.thread.store(thread_id(), Relaxed);
        // Where every CPU is busy it stays in this class from its first fault on. A failure leaves it slower and not wrong.
        let _ = set_class(0, Class::Normal);
        let cpus = Cpus::of(0).ok();
        if let Some(cpus) = cpus {
            let _ = shared.cpus.set(cpus);
        }
        let follow = std::env::var_os("SPILLWAY_PLACEMENT").is_none_or(|value| value != "off");
        let journeys = Journeys::new(store.as_ref());
        let mut driver = Self {
            tape: None,
            core,
            choice: Choice::default(),
            journeys,
            hands: Hands::new(store, BUFFERS, estate, Arc::clone(&bell)),
            targets: Vec::new(),
            access: None,
            commands,
            bell,
            reports,
            shared,
            placement: Placement::new(follow, cpus),
            place: 1,
            class: Class::Normal,
            ears: Ears::new(epoll),
            release: None,
            leaving: Vec::new(),
            slept: false,
            recalled_ns: 0,
            unpolled: UNPOLLED_MAX,
            dry: true,
            untidy: false,
            yields: Yield::default(),
            retried: Vec::with_capacity(WAITING_ROOM),
            graves: Vec::new(),
            awaits_agent: false,
            awaits_store: false,
            succeeds: false,
            owes_errands: false,
            unrecorded: Vec::new(),
            commons: Vec::new(),
            deputy: Deputy::default(),
            outgone: (0, 0),
        };
        driver.set_replacement(replacement);
        driver.core.restock();
        driver
    }

    /// The same, of which only some mappings are managed.
    pub fn choose(self, choice: Choice) -> Self {
        Self { choice, ..self }
    }

    /// The same, recording what happens, if that is asked for.
    pub fn record(mut self, recording: Option<Recording>) -> Self {
        self.tape = recording.map(|recording| Tape::begin(recording, &mut self.core));
        self
    }

    pub(super) fn add(&mut self, target: Target) {
        let at = target.id.0 as usize;
        if self.targets.len() <= at {
            self.targets.resize_with(at + 1, || None);
        }
        self.watch(target.id, target.agent.as_ref().map(|agent| agent.pid));
        self.targets[at] = Some(target);
    }

    /// Its access bits are looked at from now on, where they can be.
    pub(super) fn watch(&mut self, target: TargetId, pid: Option<i32>) {
        if let (Some(access), Some(pid)) = (&mut self.access, pid) {
            // Without, its pages leave in turn.
            let _ = access.add(target, pid);
        }
    }

    /// Other replacement settings; access bits are looked at from now on where those need them, and no more where they do not.
    pub(super) fn set_replacement(&mut self, settings: Settings) {
        self.core.set_replacement(settings);
        if settings.policy != Kind::Nru {
            self.access = None;
        } else if self.access.is_none() {
            self.access = Access::open().ok();
            for at in 0..self.targets.len() {
                let Some(target) = &self.targets[at] else { continue };
                self.watch(target.id, target.agent.as_ref().map(|agent| agent.pid));
            }
        }
        self.shared.access_bits.store(self.access.is_some(), Relaxed);
    }

    /// Agents run where and as the fault thread runs, from their next errand on; in another class at once: what is under way may
    /// need it.
    pub(super) fn place_agents(&mut self) {
        self.hands.reader.dismiss();
        let class = self.agents_class();
        let changes = std::mem::replace(&mut self.class, class) != class;
        self.place += 1;
        for at in 0..self.targets.len() {
            if changes && self.targets[at].as_ref().is_some_and(|target| target.flight != Flight::Idle) {
                self.place_agent(at);
            }
        }
    }

    fn agents_class(&self) -> Class {
        if self.shared.idle.load(Relaxed) { Class::Idle } else { Class::Normal }
    }

    /// Nobody is served any more: back to where the kernel puts this thread.
    pub(super) fn settle_if_alone(&mut self) {
        if self.targets.iter().all(Option::is_none) {
            self.placement.settle(&self.shared);
        }
    }

    /// Places an agent, before or as it is sent on an errand.
    pub(super) fn place_agent(&mut self, at: usize) {
        let class = self.agents_class();
        let Some(target) = self.targets[at].as_mut().filter(|target| target.placed != self.place) else { return };
        target.placed = self.place;
        let cpus = match self.placement.followed() {
            Some(cpu) => Ok(Cpus::one(cpu)),
            None => Cpus::of(0),
        };
        if let (Some(agent), Ok(cpus)) = (&target.agent, cpus) {
            // A failure leaves it where it is, which is slower and not wrong.
            let _ = cpus.confine(agent.thread);
            let _ = set_class(agent.thread, class);
            if class == Class::Idle && !self.shared.idle.load(Relaxed) {
                // The watchdog has taken all out of that class meanwhile.
                let _ = set_class(agent.thread, Class::Normal);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::driver;
    use super::*;
    use crate::skipped::skipped;
    use crate::sys::sched::class_and_niceness;

    /// With the niceness of a program it had a tenth of its share beside busy ones, as the watcher and the agents had the weight: of programs
    /// begun while all CPUs were busy one in eight took five times as long as the others.
    #[test]
    fn who_serves_faults_is_as_nice_to_others_as_the_watcher_from_the_beginning() {
        let niceness = |begin: fn()| {
            std::thread::spawn(move || {
                begin();
                class_and_niceness(thread_id())
            })
        };
        let served = niceness(|| drop(driver())).join().expect("no panic");
        let watcher = niceness(|| drop(set_class(0, Class::Normal))).join().expect("no panic");
        assert_eq!(served, watcher);
        if watcher.1 == 0 {
            skipped("a niceness below 0 needs CAP_SYS_NICE");
        }
    }
}

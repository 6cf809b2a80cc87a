//! The watcher: adopts, reads mappings, scans pages, settles removals. What it saw may be old when the driver hears of it.

use spillway_core::{Span, TargetId};

use crate::driver::Driver;
use crate::kernel::Kernel;
use crate::letters::{Command, Report};
use crate::memory::{Heritage, Mapping, overlap, range, span};
use crate::mutation::Mutation;
use crate::rng::Rng;

/// An address space that the watcher knows.
#[derive(Clone, Debug)]
struct Known {
    target: TargetId,
    space: usize,
    equipped: bool,
    /// Its mappings should be read again.
    rescan: bool,
    /// All of its pages are to be looked at with the next reading, not only those of new mappings.
    unseen: bool,
}

/// What is under way. Between two steps of it any time may pass.
#[derive(Clone, Debug)]
enum Job {
    /// Mappings were read, and the driver registers them.
    Registering { asked: Vec<Span> },
    /// They are registered: pages are to be scanned.
    Registered { target: TargetId, new: Vec<Span> },
    /// Pages were looked at, or a removal: the driver is to be told.
    Seen { target: TargetId, commands: Vec<Command> },
}

/// See the module's documentation.
#[derive(Clone, Debug, Default)]
pub struct Watcher {
    known: Vec<Known>,
    /// Spaces that are being adopted.
    adopting: Vec<usize>,
    job: Option<Job>,
    removals: Vec<(TargetId, Span, u64)>,
    /// Forked children whose mappings are to be looked at.
    heirs: Vec<(TargetId, u64)>,
    /// Everything was let go of.
    pub released: bool,
}

impl Watcher {
    /// The watcher of a pager that takes over: it knows of what was managed, and looks at everything again.
    pub fn succeed(targets: impl Iterator<Item = (TargetId, usize, bool)>) -> Self {
        let known = |(target, space, equipped)| Known { target, space, equipped, rescan: true, unseen: true };
        Self { known: targets.map(known).collect(), ..Self::default() }
    }

    /// Whether nothing is left to be looked at.
    pub fn is_at_rest(&self, kernel: &Kernel) -> bool {
        let settled = |known: &Known| kernel.spaces[known.space].alive && !(known.equipped && known.rescan);
        self.released
            || (self.job.is_none()
                && self.heirs.is_empty()
                && self.removals.is_empty()
                && self.known.iter().all(settled))
    }

    /// Whether a space that lives has no agent.
    pub fn has_orphans(&self) -> bool {
        self.known.iter().any(|known| !known.equipped)
    }

    /// Targets with agents, and their spaces.
    pub fn equipped(&self) -> impl Iterator<Item = (TargetId, usize)> + '_ {
        self.known.iter().filter(|known| known.equipped).map(|known| (known.target, known.space))
    }

    /// Everything is looked at once more: pages that moved between their registration and their scan are known to nobody.
    pub fn rescan(&mut self) {
        self.known.iter_mut().for_each(|known| (known.rescan, known.unseen) = (true, true));
    }

    /// One step: hears what there is to hear, then does one thing. `orphans` when forked children are adopted now.
    pub fn step(&mut self, kernel: &mut Kernel, driver: &mut Driver, rng: &mut Rng, orphans: bool) {
        while let Some(report) = driver.reports.pop_front() {
            self.hear(driver, report);
        }
        if self.released {
            return;
        }
        match self.job.take() {
            Some(job @ Job::Registering { .. }) => self.job = Some(job),
            Some(Job::Registered { target, new }) => {
                if let Some(space) = self.space_of(target) {
                    let populated = |new: &Span| kernel.spaces[space].populated(&range(*new));
                    let spans = new.iter().flat_map(populated).map(|found| span(&found)).collect();
                    self.job = Some(Job::Seen { target, commands: vec![Command::Found { target, spans }] });
                }
            }
            Some(Job::Seen { commands, .. }) => driver.commands.extend(commands),
            None => self.begin(kernel, driver, rng, orphans),
        }
    }

    fn begin(&mut self, kernel: &mut Kernel, driver: &mut Driver, rng: &mut Rng, orphans: bool) {
        match rng.below(4) {
            _ if !self.heirs.is_empty() => self.look_at_heir(kernel),
            0 => self.bury_or_adopt(kernel, driver, orphans),
            1 if !self.removals.is_empty() => {
                let at = rng.below(self.removals.len());
                self.settle(kernel, at);
            }
            _ => {
                let wanted = self.known.iter().position(|known| known.equipped && known.rescan);
                // Now and then for no reason, unless everything is to come to rest.
                let unasked = !self.known.is_empty() && !kernel.quiet && rng.percent(2);
                let any = || unasked.then(|| rng.below(self.known.len()));
                if let Some(known) = wanted.or_else(any).map(|at| &mut self.known[at]).filter(|known| known.equipped) {
                    known.rescan = false;
                    let asked: Vec<Span> = kernel.spaces[known.space].anonymous().iter().map(span).collect();
                    let target = known.target;
                    driver.commands.push_back(Command::Register { target, spans: asked.clone() });
                    self.job = Some(Job::Registering { asked });
                }
            }
        }
    }

    fn hear(&mut self, driver: &mut Driver, report: Report) {
        let fresh = |target, space| Known { target, space, equipped: true, rescan: true, unseen: false };
        match report {
            Report::Added(target, space) => self.known.push(fresh(target, space)),
            Report::Forked(target, space) => {
                self.known.push(Known { equipped: false, unseen: true, ..fresh(target, space) });
            }
            Report::Registered(target, new) => {
                let Some(Job::Registering { asked }) = self.job.take() else { return };
                let trusting = driver.mutation == Some(Mutation::ScanOnlyNew);
                let Some(known) = self.known.iter_mut().find(|known| known.target == target) else { return };
                // What a child was forked with has been in its table since then, and was never looked for.
                let unseen = std::mem::take(&mut known.unseen) && !trusting;
                self.job = Some(Job::Registered { target, new: if unseen { asked } else { new } });
            }
            Report::Rescan(target) => {
                self.known.iter_mut().filter(|known| known.target == target).for_each(|known| known.rescan = true);
            }
            Report::Removal(target, span, id) => self.removals.push((target, span, id)),
            Report::Thread(target, changes) => self.heirs.push((target, changes)),
            Report::AgentGone(target) => self.end(driver, target),
            Report::Released => self.released = true,
        }
    }

    /// Notices who ended, and adopts who is not managed yet.
    fn bury_or_adopt(&mut self, kernel: &mut Kernel, driver: &mut Driver, orphans: bool) {
        // With an agent in it, the agent's end tells.
        let dead = self.known.iter().find(|known| !known.equipped && !kernel.spaces[known.space].alive);
        if let Some(target) = dead.map(|known| known.target) {
            return self.end(driver, target);
        }
        if let Some(known) = self.known.iter_mut().find(|known| !known.equipped && orphans) {
            if kernel.guest_of(known.space).is_some() {
                known.equipped = true;
                let agent = kernel.start_threads(known.space, 1, true);
                driver.commands.push_back(Command::Equip { target: known.target, agent });
            }
            return;
        }
        let managed = |space: &usize| self.adopting.contains(space) || self.known.iter().any(|it| it.space == *space);
        let strangers = (0..kernel.spaces.len()).filter(|&space| kernel.spaces[space].alive);
        let registered = |space: &usize| kernel.spaces[*space].slots.iter().any(crate::memory::Slot::is_registered);
        if let Some(space) = strangers.into_iter().find(|space| !managed(space) && !registered(space)) {
            self.adopting.push(space);
            let agent = kernel.start_threads(space, 1, true);
            driver.commands.push_back(Command::Add { space, agent });
        }
    }

    /// Finds out what a forked child has of its parent's memory, from its own mappings.
    fn look_at_heir(&mut self, kernel: &Kernel) {
        let Some((target, changes)) = self.heirs.pop() else { return };
        let Some(space) = self.space_of(target).map(|space| &kernel.spaces[space]) else { return };
        let mappings = space.anonymous();
        let is = |test: fn(&Mapping) -> bool| {
            let tested =
                mappings.iter().filter(move |range| space.slots[range.start].mapping.as_ref().is_some_and(test));
            tested.map(span).collect::<Vec<Span>>()
        };
        let has = is(|mapping| mapping.registered);
        let wiped = is(|mapping| mapping.heritage == Heritage::Zeros);
        self.job = Some(Job::Seen { target, commands: vec![Command::Inherit { target, wiped, has, changes }] });
    }

    /// Scans a removal, and says so when no thread can be inside it any more.
    fn settle(&mut self, kernel: &Kernel, at: usize) {
        let (target, removed, removal) = self.removals[at];
        let Some(space) = self.space_of(target) else {
            self.removals.remove(at);
            return;
        };
        let space = &kernel.spaces[space];
        let pages = range(removed);
        let mut gone: Vec<Span> = Vec::new();
        let mut cursor = pages.start;
        for there in space.populated(&pages) {
            if cursor < there.start {
                gone.push(span(&(cursor..there.start)));
            }
            cursor = there.end;
        }
        if cursor < pages.end {
            gone.push(span(&(cursor..pages.end)));
        }
        let all = gone == [removed];
        let mut commands = vec![Command::RemovalSeen { target, removal, gone, all }];
        // Who has not announced its removal yet will do so later, and be waited for then.
        let inside = space.removals.iter().any(|it| overlap(&it.range, &pages) && !space.uffd.announces(it.thread));
        if !all && !inside {
            commands.push(Command::RemovalOver { target, removal });
        }
        self.job = Some(Job::Seen { target, commands });
        if all || !inside {
            self.removals.remove(at);
        }
    }

    fn end(&mut self, driver: &mut Driver, target: TargetId) {
        self.known.retain(|known| known.target != target);
        self.removals.retain(|(of, _, _)| *of != target);
        if matches!(&self.job, Some(Job::Registered { target: of, .. } | Job::Seen { target: of, .. }) if *of == target)
        {
            self.job = None;
        }
        driver.commands.push_back(Command::Ended { target });
    }

    fn space_of(&self, target: TargetId) -> Option<usize> {
        self.known.iter().find(|known| known.target == target).map(|known| known.space)
    }
}

//! Which members are suspected: those that leave questions unanswered for long.

use std::time::{Duration, Instant};

use super::members::{Health, Members};

/// What a member may leave unanswered before it is suspected, while others answer in a fraction of that.
pub(super) const SUSPECT_AFTER: Duration = Duration::from_millis(50);
/// What is suspected and has said nothing at all for so long is silent: nobody waits for it to take what others can. By then it
/// was asked whether it lives, after a quarter of the patience with it and a tick (0.4 s), so what is only slow is not silent.
/// And no access is to take a second.
pub(super) const SILENT_AFTER: Duration = Duration::from_millis(500);
/// How long suspicion lasts if nothing is heard; any answer ends it.
const SUSPECTED_FOR: Duration = Duration::from_secs(1);
/// How members are is spread over much memory, and hardly ever news. Who has gone is told of by their timer as well.
const LOOKED_AT_EVERY: Duration = Duration::from_millis(1);

/// What is remembered of members.
pub(super) struct Watch {
    members: Vec<Watched>,
    next_look: Option<Instant>,
}

#[derive(Clone, Copy, Default)]
struct Watched {
    suspected_until: Option<Instant>,
    silent: bool,
    known: Health,
}

impl Watch {
    pub(super) fn new(members: usize) -> Self {
        let mut watched = Vec::with_capacity(usize::from(u8::MAX));
        watched.resize(members, Watched::default());
        Self { members: watched, next_look: None }
    }

    pub(super) fn suspect(&mut self, member: u8, now: Instant) {
        self.members[usize::from(member)].suspected_until = Some(now + SUSPECTED_FOR);
    }

    pub(super) fn answered(&mut self, member: u8) {
        let watched = &mut self.members[usize::from(member)];
        (watched.suspected_until, watched.silent) = (None, false);
    }

    /// Listens to those that are suspected; suspicion lasts as long as silence. Returns whether one is silent.
    pub(super) fn listen(&mut self, members: &dyn Members, now: Instant) -> bool {
        let mut any = false;
        for member in 0..members.count() {
            let silent = self.is_suspect(member, now) && members.silence(member, now) >= SILENT_AFTER;
            self.members[usize::from(member)].silent = silent;
            if silent {
                self.suspect(member, now);
            }
            any |= silent;
        }
        any
    }

    /// Whether it was silent when it was last listened to.
    pub(super) fn is_silent(&self, member: u8) -> bool {
        self.members[usize::from(member)].silent
    }

    pub(super) fn is_suspect(&self, member: u8, now: Instant) -> bool {
        self.members[usize::from(member)].suspected_until.is_some_and(|until| now < until)
    }

    /// Takes note of how members are, unless that was just done and none has come since. Returns whether one has come, gone, or
    /// forgotten what it had.
    pub(super) fn look(&mut self, members: &dyn Members, now: Instant) -> bool {
        let count = usize::from(members.count());
        if count == self.members.len() && self.next_look.is_some_and(|at| now < at) {
            return false;
        }
        self.next_look = Some(now + LOOKED_AT_EVERY);
        let mut changed = false;
        self.members.resize(count, Watched::default());
        for (member, watched) in (0..members.count()).zip(&mut self.members) {
            let health = members.health(member, now);
            let known = std::mem::replace(&mut watched.known, health);
            let seen = |health: Health| (health.ready, health.gone, health.life, health.leaving);
            changed |= seen(health) != seen(known);
        }
        changed
    }

    /// Whether it could be asked when it was last looked at.
    pub(super) fn is_ready(&self, member: u8) -> bool {
        self.members[usize::from(member)].known.ready
    }

    /// Whether one is leaving.
    pub(super) fn is_one_leaving(&self) -> bool {
        self.members.iter().any(|watched| watched.known.leaving)
    }

    /// Members that cannot be asked, of those that the pool has.
    pub(super) fn away(&self) -> usize {
        self.members.iter().filter(|watched| !watched.known.ready && !watched.known.is_retired()).count()
    }
}

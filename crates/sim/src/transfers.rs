//! What a store that answers later has been asked for and has not answered: each answer takes its own time, so that
//! they come in any order.

use crate::rng::Rng;

/// How a store answers that answers later. Times in steps.
#[derive(Clone, Debug)]
pub struct Manner {
    /// Most answers take no longer than this.
    delay_most: usize,
    /// How many of a hundred gets take so long that a page can be given up, filled and written meanwhile.
    slow: usize,
    /// How many of a hundred puts fail in the end.
    fails: usize,
    /// With so many transfers under way no put is taken.
    under_way_most: usize,
}

impl Manner {
    /// What follows from the store's own chance.
    pub fn of(rng: &mut Rng) -> Self {
        Self {
            delay_most: if rng.percent(40) { rng.between(0, 8) } else { rng.between(8, 150) },
            slow: if rng.percent(60) { rng.between(1, 20) } else { 0 },
            fails: if rng.percent(40) { rng.between(1, 20) } else { 0 },
            under_way_most: if rng.percent(30) { rng.between(1, 12) } else { 1000 },
        }
    }

    fn delay(&self, kind: Kind, rng: &mut Rng) -> u64 {
        let slow = kind == Kind::Get && rng.percent(self.slow);
        (if slow { rng.between(200, 4000) } else { rng.between(0, self.delay_most) }) as u64
    }
}

/// What is transferred.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A page to the store.
    Put,
    /// A page from the store.
    Get,
}

/// One answer that is to come.
#[derive(Clone, Copy, Debug)]
pub struct Transfer {
    /// The place of the page in the store.
    pub at: usize,
    /// Which way.
    pub kind: Kind,
    /// Whether it fails.
    pub fails: bool,
    due: u64,
}

/// All of them.
#[derive(Clone, Debug)]
pub struct Transfers {
    manner: Manner,
    list: Vec<Transfer>,
    rng: Rng,
}

impl Transfers {
    /// None yet.
    pub fn new(mut rng: Rng) -> Self {
        Self { manner: Manner::of(&mut rng), list: Vec::new(), rng }
    }

    /// How they are answered.
    pub fn manner(&self) -> &Manner {
        &self.manner
    }

    /// A transfer begins, and fails sooner or later unless the store is `well`.
    pub fn begin(&mut self, at: usize, kind: Kind, now: u64, well: bool) {
        let fails = kind == Kind::Put && !well && self.rng.percent(self.manner.fails);
        let due = now + self.manner.delay(kind, &mut self.rng);
        self.list.push(Transfer { at, kind, fails, due });
    }

    /// Whether this is under way.
    pub fn has(&self, at: usize, kind: Kind) -> bool {
        self.list.iter().any(|transfer| transfer.at == at && transfer.kind == kind)
    }

    /// What is under way for the page at `at` ends without a word.
    pub fn call_off(&mut self, at: usize) {
        self.list.retain(|transfer| transfer.at != at);
    }

    /// All that is under way, which ends without a word.
    pub fn take_all(&mut self) -> Vec<Transfer> {
        std::mem::take(&mut self.list)
    }

    /// Whether another put would be taken.
    pub fn have_room(&self) -> bool {
        self.list.len() < self.manner.under_way_most
    }

    /// One of those that have ended by `now`, any of them.
    pub fn ended(&mut self, now: u64) -> Option<Transfer> {
        let due: Vec<usize> = (0..self.list.len()).filter(|&i| self.list[i].due <= now).collect();
        let which = *due.get(self.rng.below(due.len().max(1)))?;
        Some(self.list.remove(which))
    }

    /// True in `percent` of a hundred cases.
    pub fn chance(&mut self, percent: usize) -> bool {
        self.rng.percent(percent)
    }
}

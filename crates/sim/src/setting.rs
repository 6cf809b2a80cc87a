//! What the seed says about a run: sizes, habits, and who is slow.

use spillway_core::pager::Budget;
use spillway_core::policy::{Block, Kind, Scheme, Scope, Settings};

use crate::guest::{Habits, Theme};
use crate::rng::Rng;

/// See the module's documentation.
#[derive(Clone, Debug)]
pub struct Setting {
    /// What it is about.
    pub theme: Theme,
    /// Pages of address space of a guest.
    pub space_pages: usize,
    /// Pages that it starts with.
    pub mapped_pages: usize,
    /// Guests at the start.
    pub guests: usize,
    /// The budget.
    pub budget: Budget,
    /// Which pages leave, when and whose.
    pub replacement: Settings,
    /// Whether users change that now and then.
    pub changes_replacement: bool,
    /// The driver's page buffers.
    pub buffers: u32,
    /// What guests like.
    pub habits: Habits,
    /// How often each takes a step: guests, agents, the pager, the watcher, nature.
    pub speeds: [usize; 5],
    /// Whether the store shares identical pages.
    pub store_shares: bool,
    /// Whether the store is full at times.
    pub store_fills: bool,
    /// Whether the store loses pages.
    pub store_loses: bool,
    /// Whether guests reach limits of their own at times.
    pub tight: bool,
    /// How many of a hundred looks adopt forked children.
    pub adopts_children: usize,
}

impl Setting {
    /// What follows from the seed.
    pub fn of(rng: &mut Rng) -> Self {
        const THEMES: [Theme; 5] = [Theme::Removals, Theme::Fresh, Theme::Moves, Theme::Forks, Theme::Anything];
        let theme = THEMES[rng.weighted(&[20, 20, 15, 20, 25])];
        // Beyond 512 pages regions start on chunks of their own.
        let space_pages = match rng.below(100) {
            0..5 if theme == Theme::Anything => rng.between(600, 1400),
            0..50 if theme == Theme::Anything => rng.between(40, 300),
            _ => rng.between(28, 60),
        };
        let mapped_pages = space_pages * rng.between(50, 95) / 100;
        let budget = if rng.percent(20) {
            Budget::Percent { percent: rng.between(10, 90) as u64, floor_pages: 16 }
        } else {
            Budget::Pages(rng.between(1, mapped_pages.max(17)) as u64)
        };
        let few_buffers = theme == Theme::Forks || rng.percent(40);
        let mut setting = Self {
            theme,
            space_pages,
            mapped_pages,
            guests: if rng.percent(75) { 1 } else { 2 },
            budget,
            buffers: u32::try_from(if few_buffers { rng.between(12, 24) } else { rng.between(24, 128) }).expect("few"),
            replacement: Settings::default(),
            changes_replacement: false,
            habits: Habits::of(theme, rng),
            speeds: [0; 5],
            store_shares: rng.percent(60),
            store_fills: rng.percent(20),
            store_loses: rng.percent(15),
            tight: rng.percent(8),
            adopts_children: if rng.percent(50) { 0 } else { rng.between(1, 100) },
        };
        setting.draw_speeds(rng);
        setting
    }

    /// Makes it about what happens to pages on their way.
    pub fn be_about_journeys(&mut self, rng: &mut Rng) {
        self.theme = Theme::Journeys;
        self.habits = Habits::of(self.theme, rng);
        self.budget = Budget::Pages(rng.between(1, 24) as u64);
        self.store_loses = rng.percent(50);
        self.tight = rng.percent(30);
        if rng.percent(50) {
            // A few pages, given up and written again and again.
            self.space_pages = rng.between(24, 32);
            self.mapped_pages = self.space_pages - 2;
            self.habits.locality = rng.between(60, 95);
            self.habits.weights = [30, 40, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
            (self.habits.drowsy, self.habits.lock_wait_most, self.habits.run_most) = (0, 0, 8);
        }
    }

    /// Some other replacement than the one that is the default.
    pub fn draw_replacement(rng: &mut Rng) -> Settings {
        Settings {
            policy: Kind::ALL[rng.below(Kind::ALL.len())],
            evict: Scheme::ALL[rng.below(Scheme::ALL.len())],
            scope: Scope::ALL[rng.below(Scope::ALL.len())],
            block: Block::ALL[rng.below(Block::ALL.len())],
        }
    }

    /// Who is slow from now on.
    pub fn draw_speeds(&mut self, rng: &mut Rng) {
        let slow_or_fast = |rng: &mut Rng| if rng.percent(20) { 1 } else { rng.between(2, 30) };
        self.speeds = [
            slow_or_fast(rng),
            slow_or_fast(rng),
            slow_or_fast(rng) + 4,
            slow_or_fast(rng),
            usize::from(rng.percent(60)),
        ];
        if matches!(self.theme, Theme::Removals | Theme::Fresh) && rng.percent(60) {
            // A pager that is quicker than a thread on its way from an announcement to a removal, and a slow watcher.
            self.speeds = [6, 20, 40, 2, 1];
        }
    }
}

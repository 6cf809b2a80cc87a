//! The pager is killed between any two stores into what outlives it, and any two calls of its servers; then another takes over. It
//! may be killed while it does so.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use super::model::Model;
use super::servers::Simulated;
use crate::stripe::Stripes;
use crate::{Inheritance, Store};

thread_local! {
    /// How often the pager may still pass a point where it can be killed.
    static LIVES: Cell<Option<u64>> = const { Cell::new(None) };
}

struct Killed;

/// Here the pager may be killed.
pub(in crate::stripe) fn point() {
    match LIVES.get() {
        Some(0) => {
            LIVES.set(None);
            resume_unwind(Box::new(Killed));
        }
        lives => LIVES.set(lives.map(|lives| lives - 1)),
    }
}

/// Whether the pager was killed before it was done.
fn kills(lives: u64, pager: impl FnOnce()) -> bool {
    LIVES.set(Some(lives));
    let end = catch_unwind(AssertUnwindSafe(pager));
    LIVES.set(None);
    match end {
        Ok(()) => false,
        Err(end) if end.is::<Killed>() => true,
        Err(end) => resume_unwind(end),
    }
}

impl Model {
    /// So many steps, whoever takes them.
    pub(super) fn live_and_die(&mut self, steps: u64) {
        let mut left = steps;
        while left > 0 {
            let spread = self.below(9);
            let lives = self.below(2 << spread);
            let killed = kills(lives, || {
                while left > 0 {
                    left -= 1;
                    self.step();
                }
            });
            if killed {
                self.succeed();
            }
        }
    }

    fn succeed(&mut self) {
        self.seen.deaths += 1;
        self.world.clear_poison();
        self.heed();
        if self.below(8) == 0 {
            self.worse();
        }
        loop {
            let lives = self.below(500);
            self.world.lock().unwrap().take_over();
            if !kills(lives, || self.take_over()) {
                break;
            }
            self.seen.deaths += 1;
            self.world.clear_poison();
        }
    }

    /// What was told before the end counts, or nobody heard it any more.
    fn heed(&mut self) {
        let heard = self.below(2) == 0;
        for (handle, page, result) in std::mem::take(&mut self.told) {
            if heard {
                self.tell(handle, page.as_ref(), result);
            }
        }
        // The page is in a buffer, where it was written from; it may have its older copy, or none.
        let writing = self.writing.take();
        let drops = self.below(2) == 0;
        for at in 0..self.table.len() {
            let Some(entry) = &mut self.table[at] else { continue };
            entry.getting = None;
            if entry.putting || drops && writing == Some(at) {
                self.table[at] = None;
            }
        }
        self.doubted = writing.filter(|_| !drops);
    }

    fn take_over(&mut self) {
        let members = Box::new(Simulated(Arc::clone(&self.world)));
        let stripes = Stripes::take_over(members, self.setting.shape, &self.vault);
        self.stripes = stripes;
        self.prepare();
        for at in 0..self.table.len() {
            let Some(entry) = self.table[at] else { continue };
            if self.stripes.has(entry.handle) {
                self.stripes.count(entry.handle);
            } else {
                assert!(self.doubted == Some(at), "an acknowledged page is not found: {entry:?}");
                self.table[at] = None;
            }
        }
        self.stripes.all_counted();
        self.doubted = None;
        let held = self.table.iter().flatten().count() as u64;
        assert_eq!(self.stripes.status().stored_bytes, held * 4096, "references are counted");
    }
}

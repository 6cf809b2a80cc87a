//! Wiped memory that waits to be used, and the numbers of pages that have gone.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard};

use spillway_core::PAGE_BYTES_U64;

use crate::budget::{Budget, NUMBER_COST_BYTES};
use crate::sys::grains::{Grains, Loose, WHOLE};
use crate::sys::pages::{Bare, Blank, Pages};

struct Lists {
    grains: Grains,
    numbers: Vec<Bare>,
}

/// What may be used next. All of it is wiped.
pub(crate) struct FreeList {
    lists: Mutex<Lists>,
    /// Grains that may be had without touching memory for the first time.
    grains: AtomicU64,
}

impl FreeList {
    pub(crate) fn new(grains: Grains) -> Self {
        Self { lists: Mutex::new(Lists { grains, numbers: Vec::new() }), grains: AtomicU64::new(0) }
    }

    /// Pages that can be had without touching memory for the first time; where pages are compressed, about.
    pub(crate) fn len(&self) -> u64 {
        self.grains.load(Relaxed) / u64::from(WHOLE)
    }

    /// Numbers of pages that have gone.
    pub(crate) fn numbers(&self) -> u64 {
        self.lists().numbers.len() as u64
    }

    /// Grains that may be had without touching memory for the first time.
    #[cfg(test)]
    pub(crate) fn grains(&self) -> u64 {
        self.grains.load(Relaxed)
    }

    /// A run that was open before.
    #[cfg(test)]
    pub(crate) fn take_place(&self, grains: u32) -> Option<Loose> {
        let place = self.lists().grains.take(grains)?;
        self.grains.fetch_sub(grains.into(), Relaxed);
        Some(place)
    }

    /// A blank page of so many grains: of memory that was used before, or as the budget allows.
    pub(crate) fn take(&self, pages: &Pages, budget: &Budget, grains: u32) -> Option<Blank> {
        let mut lists = self.lists();
        let place = self.place(&mut lists, budget, grains)?;
        match self.number(&mut lists, pages, budget) {
            Some(number) => Some(pages.join(number, place)),
            None => {
                self.put_back(&mut lists, place);
                None
            }
        }
    }

    fn place(&self, lists: &mut Lists, budget: &Budget, grains: u32) -> Option<Loose> {
        loop {
            if let Some(place) = lists.grains.take(grains) {
                self.grains.fetch_sub(grains.into(), Relaxed);
                return Some(place);
            }
            if !budget.take(PAGE_BYTES_U64) {
                return None;
            }
            if !lists.grains.open() {
                budget.give_back(PAGE_BYTES_U64);
                return None;
            }
            self.grains.fetch_add(WHOLE.into(), Relaxed);
        }
    }

    fn put_back(&self, lists: &mut Lists, place: Loose) {
        self.grains.fetch_add(place.grains().into(), Relaxed);
        lists.grains.give_back(place);
    }

    fn number(&self, lists: &mut Lists, pages: &Pages, budget: &Budget) -> Option<Bare> {
        if let Some(number) = lists.numbers.pop() {
            return Some(number);
        }
        if !self.make_room(lists, pages, budget, NUMBER_COST_BYTES) {
            return None;
        }
        let number = pages.fresh_number();
        if number.is_none() {
            budget.give_back(NUMBER_COST_BYTES);
        }
        number
    }

    /// Takes bytes for something else than a page: if need be, those of a free page.
    pub(crate) fn take_bytes(&self, pages: &Pages, budget: &Budget, bytes: u64) -> bool {
        budget.take(bytes) || self.make_room(&mut self.lists(), pages, budget, bytes)
    }

    fn make_room(&self, lists: &mut Lists, pages: &Pages, budget: &Budget, bytes: u64) -> bool {
        if budget.take(bytes) {
            return true;
        }
        let Some(mut closed) = lists.grains.close() else { return false };
        self.grains.fetch_sub(closed.grains().into(), Relaxed);
        pages.give_up(&mut closed);
        budget.give_back(PAGE_BYTES_U64);
        budget.take(bytes)
    }

    /// Takes a wiped page back.
    pub(crate) fn give_back(&self, pages: &Pages, blank: Blank) {
        let (number, place) = pages.part(blank);
        let mut lists = self.lists();
        lists.numbers.push(number);
        self.put_back(&mut lists, place);
    }

    /// Takes the number of a page back whose bytes were away.
    pub(crate) fn give_back_number(&self, bare: Bare) {
        self.lists().numbers.push(bare);
    }

    /// Takes wiped memory back that belonged to a page.
    pub(crate) fn give_back_place(&self, loose: Loose) {
        self.put_back(&mut self.lists(), loose);
    }

    fn lists(&self) -> MutexGuard<'_, Lists> {
        self.lists.lock().expect("nothing panics with the lists locked")
    }
}

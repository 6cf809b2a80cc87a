//! Blank, wiped pages that wait to be used, and the two halves that pages are made of while some are away.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard};

use spillway_core::PAGE_BYTES_U64;

use crate::budget::{Budget, NUMBER_COST_BYTES};
use crate::sys::pages::{Bare, Blank, Loose, Pages};

#[derive(Default)]
struct Lists {
    blanks: Vec<Blank>,
    numbers: Vec<Bare>,
    places: Vec<Loose>,
    /// Places whose memory was given back to the kernel: they count as never used.
    given_up: Vec<Loose>,
}

/// What may be used next. All places in it are wiped.
#[derive(Default)]
pub(crate) struct FreeList {
    lists: Mutex<Lists>,
    /// Blank pages and places without a page, but those given up.
    len: AtomicU64,
}

impl FreeList {
    /// Pages that can be had without touching memory for the first time.
    pub(crate) fn len(&self) -> u64 {
        self.len.load(Relaxed)
    }

    /// A blank page: one that was used before, or a new one as far as the budget allows.
    pub(crate) fn take(&self, pages: &Pages, budget: &Budget) -> Option<Blank> {
        let mut lists = self.lists();
        if let Some(blank) = lists.blanks.pop() {
            self.len.fetch_sub(1, Relaxed);
            return Some(blank);
        }
        let place = self.place(&mut lists, pages, budget)?;
        match self.number(&mut lists, pages, budget) {
            Some(number) => Some(pages.join(number, place)),
            None => {
                lists.places.push(place);
                self.len.fetch_add(1, Relaxed);
                None
            }
        }
    }

    fn place(&self, lists: &mut Lists, pages: &Pages, budget: &Budget) -> Option<Loose> {
        if let Some(place) = lists.places.pop() {
            self.len.fetch_sub(1, Relaxed);
            return Some(place);
        }
        if !budget.take(PAGE_BYTES_U64) {
            return None;
        }
        let place = lists.given_up.pop().or_else(|| pages.fresh_place());
        if place.is_none() {
            budget.give_back(PAGE_BYTES_U64);
        }
        place
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
        let place = lists.places.pop().or_else(|| {
            let (number, place) = pages.part(lists.blanks.pop()?);
            lists.numbers.push(number);
            Some(place)
        });
        let Some(mut place) = place else { return false };
        self.len.fetch_sub(1, Relaxed);
        pages.give_up(&mut place);
        lists.given_up.push(place);
        budget.give_back(PAGE_BYTES_U64);
        budget.take(bytes)
    }

    /// Takes a wiped page back.
    pub(crate) fn give_back(&self, blank: Blank) {
        self.lists().blanks.push(blank);
        self.len.fetch_add(1, Relaxed);
    }

    /// Takes the number of a page back whose bytes were away.
    pub(crate) fn give_back_number(&self, bare: Bare) {
        self.lists().numbers.push(bare);
    }

    /// Takes the wiped place of a page that went away.
    pub(crate) fn give_back_place(&self, loose: Loose) {
        self.lists().places.push(loose);
        self.len.fetch_add(1, Relaxed);
    }

    fn lists(&self) -> MutexGuard<'_, Lists> {
        self.lists.lock().expect("nothing panics with the lists locked")
    }
}

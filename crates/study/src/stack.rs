//! Stack distances: how many distinct pages were touched since a page was last touched, itself included.
//!
//! Under LRU a touch is a hit in a memory of that many pages and of any more (Mattson, Gecsei, Slutz and Traiger,
//! "Evaluation techniques for storage hierarchies", IBM Systems Journal 1970). Last touches lie in slots in the order of
//! time, and a Fenwick tree counts those that are taken (Bennett and Kruskal, "LRU stack processing", IBM Journal of
//! Research and Development 1975): a touch costs the logarithm of the number of pages.

use std::collections::BTreeMap;

/// Free slots at least, so that renumbering is rare.
const SLOTS_LEAST: usize = 1024;

/// Pages in the order of their last touches.
#[derive(Default)]
pub struct Stack {
    slots: BTreeMap<u64, usize>,
    /// Which page's last touch a slot is.
    pages: Vec<Option<u64>>,
    /// A Fenwick tree over `pages`, from 1.
    tree: Vec<usize>,
    next: usize,
}

impl Stack {
    /// Touches `page`: its distance, or none when it was not there.
    pub fn touch(&mut self, page: u64) -> Option<u64> {
        if self.next == self.pages.len() {
            self.renumber();
        }
        let slot = self.next;
        self.next += 1;
        let before = self.slots.insert(page, slot);
        let distance = before.map(|before| {
            let distance = self.slots.len() - self.taken_to(before) + 1;
            self.vacate(before);
            distance as u64
        });
        self.pages[slot] = Some(page);
        self.add(slot, 1);
        distance
    }

    /// Forgets the pages from `first` to before `end`, and returns them.
    pub fn remove(&mut self, first: u64, end: u64) -> Vec<u64> {
        let gone: Vec<u64> = self.slots.range(first..end).map(|(page, _)| *page).collect();
        for page in &gone {
            if let Some(slot) = self.slots.remove(page) {
                self.vacate(slot);
            }
        }
        gone
    }

    /// Pages in it.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    fn vacate(&mut self, slot: usize) {
        self.pages[slot] = None;
        self.add(slot, -1);
    }

    /// Slots taken up to and including `slot`.
    fn taken_to(&self, slot: usize) -> usize {
        let (mut at, mut taken) = (slot + 1, 0);
        while at > 0 {
            taken += self.tree[at];
            at &= at - 1;
        }
        taken
    }

    fn add(&mut self, slot: usize, change: isize) {
        let mut at = slot + 1;
        while at < self.tree.len() {
            self.tree[at] = self.tree[at].wrapping_add_signed(change);
            at += at & at.wrapping_neg();
        }
    }

    /// Moves all pages to the first slots, and makes as much room again.
    fn renumber(&mut self) {
        let mut pages: Vec<Option<u64>> = self.pages.iter().copied().filter(Option::is_some).collect();
        let live = pages.len();
        for (slot, page) in pages.iter().enumerate() {
            self.slots.extend(page.map(|page| (page, slot)));
        }
        pages.resize((2 * live).max(live + SLOTS_LEAST), None);
        self.tree = vec![0; pages.len() + 1];
        self.pages = pages;
        (0..live).for_each(|slot| self.add(slot, 1));
        self.next = live;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The definition: a list, most recently touched first.
    #[derive(Default)]
    struct List(Vec<u64>);

    impl List {
        fn touch(&mut self, page: u64) -> Option<u64> {
            let at = self.0.iter().position(|other| *other == page);
            at.map(|at| self.0.remove(at));
            self.0.insert(0, page);
            at.map(|at| at as u64 + 1)
        }
    }

    proptest! {
        #[test]
        fn distances_are_those_of_a_list(steps in proptest::collection::vec((0_u64..60, 0_u8..10), 0..1200)) {
            let (mut stack, mut list) = (Stack::default(), List::default());
            for (page, dice) in steps {
                if dice == 0 {
                    stack.remove(page, page + 3);
                    list.0.retain(|other| !(page..page + 3).contains(other));
                } else {
                    prop_assert_eq!(stack.touch(page), list.touch(page));
                }
                prop_assert_eq!(stack.len(), list.0.len());
            }
        }
    }
}

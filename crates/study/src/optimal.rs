//! The optimum: what no policy that moves pages on demand can do better than (Belady, "A study of replacement algorithms
//! for a virtual-storage computer", IBM Systems Journal 1966): the page that leaves is the one needed last.

use std::collections::BinaryHeap;

use crate::references::{Does, References};

/// What the optimum comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Optimum {
    /// Pages touched for the first time, or after they were given back.
    pub first_touches: u64,
    /// Pages that had to come back.
    pub misses: u64,
}

const NEVER: u32 = u32::MAX;
const OUTSIDE: u32 = u32::MAX - 1;

/// The optimum with `local_pages` pages of memory, at least one.
pub fn optimum(references: &References, local_pages: u64) -> Optimum {
    let local_pages = usize::try_from(local_pages.max(1)).unwrap_or(usize::MAX);
    let next = next_uses(references);
    let pages = references.pages() as usize;
    // For a page in memory, when it is needed next.
    let mut needed = vec![OUTSIDE; pages];
    let mut touched = vec![false; pages];
    let mut latest: BinaryHeap<(u32, u32)> = BinaryHeap::new();
    let (mut inside, mut optimum) = (0_usize, Optimum { first_touches: 0, misses: 0 });
    for (step, &next) in references.steps().iter().zip(&next) {
        let page = step.page().0 as usize;
        if step.does() == Does::Remove {
            inside -= usize::from(std::mem::replace(&mut needed[page], OUTSIDE) != OUTSIDE);
            touched[page] = false;
            continue;
        }
        if needed[page] == OUTSIDE {
            match std::mem::replace(&mut touched[page], true) {
                true => optimum.misses += 1,
                false => optimum.first_touches += 1,
            }
            if inside == local_pages {
                evict(&mut latest, &mut needed);
                inside -= 1;
            }
            inside += 1;
        }
        needed[page] = next;
        latest.push((next, step.page().0));
    }
    optimum
}

/// Removes the page that is needed last. Entries that are out of date are passed over.
fn evict(latest: &mut BinaryHeap<(u32, u32)>, needed: &mut [u32]) {
    while let Some((next, page)) = latest.pop() {
        if needed[page as usize] == next {
            needed[page as usize] = OUTSIDE;
            return;
        }
    }
    unreachable!("every page in memory has an entry");
}

/// For each step, the number of the next one that touches its page; [`NEVER`] when none does before it is given back.
fn next_uses(references: &References) -> Vec<u32> {
    let mut upcoming = vec![NEVER; references.pages() as usize];
    let mut next = vec![NEVER; references.steps().len()];
    for (at, step) in references.steps().iter().enumerate().rev() {
        let page = step.page().0 as usize;
        next[at] = upcoming[page];
        upcoming[page] = match step.does() {
            Does::Touch { .. } => u32::try_from(at).expect("below REFERENCES_MAX"),
            Does::Remove => NEVER,
        };
    }
    next
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Access;
    use crate::source::Step;

    fn references(pages: &[u64]) -> References {
        let mut all = References::default();
        for &page in pages {
            all.push(Step::Touch { page, access: Access::Read, served: None, ran_ns: 1 }).expect("room");
        }
        all
    }

    #[test]
    fn a_textbook_example() {
        let pages = [7, 0, 1, 2, 0, 3, 0, 4, 2, 3, 0, 3, 2, 1, 2, 0, 1, 7, 0, 1];
        // Nine faults with three frames, of which six are first touches.
        assert_eq!(optimum(&references(&pages), 3), Optimum { first_touches: 6, misses: 3 });
    }

    #[test]
    fn a_cycle_misses_once_for_each_page_that_does_not_fit_and_round() {
        let cycle: Vec<u64> = (0..50).cycle().take(50 * 41).collect();
        for local in [1, 10, 49, 50, 100] {
            let misses = optimum(&references(&cycle), local).misses;
            // In the long run (N - C) / (N - 1) of the references, as for any cycle.
            let expected = 2000.0 * (50.0 - local.min(50) as f64) / 49.0;
            assert!((misses as f64 - expected).abs() <= 50.0, "{local}: {misses} against {expected}");
        }
    }

    #[test]
    fn what_is_given_back_makes_room() {
        let mut all = references(&[1, 2, 3]);
        all.push(Step::Removed { page: 1, pages: 3 }).expect("room");
        for page in [4, 5, 6, 1] {
            all.push(Step::Touch { page, access: Access::Read, served: None, ran_ns: 1 }).expect("room");
        }
        assert_eq!(optimum(&all, 4), Optimum { first_touches: 7, misses: 0 });
    }
}

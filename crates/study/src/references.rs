//! A whole trace in memory: what replays and the optimum need, which look at it more than once.
//!
//! Pages get small numbers, in the order of their first touch. A touch of the page that was touched last is counted and
//! not kept: it misses nowhere.

use std::io::BufRead;

use crate::error::Error;
use crate::footprint::Footprint;
pub use crate::footprint::{DENSE_MAX, Dense};
use crate::record::{Access, Fault};
use crate::source::{self, About, Step};

/// The most steps that are kept: 2 GiB, and as much again for the optimum.
pub const REFERENCES_MAX: usize = 1 << 28;

/// Times of service that are kept for their median: when there are more, every second one goes, and as many of the next.
const SERVED_MAX: usize = 1 << 16;

const WRITES: u32 = 1 << 30;
const REMOVES: u32 = 1 << 31;

/// One step of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packed {
    word: u32,
    ran: u32,
}

/// What a step does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Does {
    /// It touches the page, perhaps to write.
    Touch {
        /// Whether it may have written.
        write: bool,
    },
    /// It gives the page back.
    Remove,
}

impl Packed {
    /// Which page.
    pub fn page(self) -> Dense {
        Dense(self.word & (DENSE_MAX - 1))
    }

    /// What is done.
    pub fn does(self) -> Does {
        if self.word & REMOVES != 0 { Does::Remove } else { Does::Touch { write: self.word & WRITES != 0 } }
    }

    /// For how long the program ran before it, at most 4 seconds.
    pub fn ran_ns(self) -> u64 {
        self.ran.into()
    }
}

/// A trace in memory.
#[derive(Default)]
pub struct References {
    steps: Vec<Packed>,
    footprint: Footprint,
    touches: u64,
    ran_ns: u64,
    /// What faults took that were served from a buffer: each so many'th, a power of two by its logarithm.
    served: Vec<u32>,
    served_one_of: u32,
    refaults: u64,
}

impl References {
    /// Reads all of a file; see [`source::read`].
    ///
    /// # Errors
    /// When it cannot be read, holds no reference, or too many.
    pub fn read(from: impl BufRead, reference_ns: u64) -> Result<(Self, About), Error> {
        let mut all = Self::default();
        let about = source::read(from, reference_ns, &mut |step| all.push(step))?;
        if all.touches == 0 { Err(Error::Empty) } else { Ok((all, about)) }
    }

    /// Adds a step.
    ///
    /// # Errors
    /// When there are too many.
    pub fn push(&mut self, step: Step) -> Result<(), Error> {
        match step {
            Step::Touch { page, access, served, ran_ns } => {
                self.touches += 1;
                self.ran_ns = self.ran_ns.saturating_add(ran_ns);
                if let Some((Fault::Refault, ns)) = served {
                    self.was_served(ns);
                }
                let Dense(dense) = self.footprint.touch(page)?;
                // Of a fault it is known that it read, and not that nothing was written later.
                let write = if access == Access::Read && served.is_none() { 0 } else { WRITES };
                let ran = u32::try_from(ran_ns).unwrap_or(u32::MAX);
                match self.steps.last_mut().filter(|last| last.word & !WRITES == dense) {
                    Some(last) => {
                        last.word |= write;
                        last.ran = last.ran.saturating_add(ran);
                    }
                    None => self.keep(Packed { word: dense | write, ran })?,
                }
            }
            Step::Window => {}
            Step::Removed { page, pages } => {
                for Dense(dense) in self.footprint.remove(page, pages) {
                    self.keep(Packed { word: dense | REMOVES, ran: 0 })?;
                }
            }
        }
        Ok(())
    }

    fn keep(&mut self, step: Packed) -> Result<(), Error> {
        if self.steps.len() >= REFERENCES_MAX {
            return Err(Error::TooLong);
        }
        self.steps.push(step);
        Ok(())
    }

    /// A fault was served from a buffer.
    fn was_served(&mut self, ns: u64) {
        let nth = self.refaults;
        self.refaults += 1;
        if nth.trailing_zeros() < self.served_one_of {
            return;
        }
        self.served.push(u32::try_from(ns).unwrap_or(u32::MAX));
        if self.served.len() == SERVED_MAX {
            let mut at = 0..;
            self.served.retain(|_| at.next().is_some_and(|at: u32| at.is_multiple_of(2)));
            self.served_one_of += 1;
        }
    }

    /// The steps, in order.
    pub fn steps(&self) -> &[Packed] {
        &self.steps
    }

    /// Touches, those that are not kept among them.
    pub fn touches(&self) -> u64 {
        self.touches
    }

    /// Distinct pages.
    pub fn pages(&self) -> u32 {
        self.footprint.pages()
    }

    /// The most pages that were the program's at one time.
    pub fn peak_pages(&self) -> u64 {
        self.footprint.peak_pages()
    }

    /// For how long the program ran by itself.
    pub fn ran_ns(&self) -> u64 {
        self.ran_ns
    }

    /// It ran for so long, whatever the trace says: the time between faults is scaled to that.
    pub fn set_ran(&mut self, ran_ns: u64) {
        let scale = ran_ns as f64 / self.ran_ns.max(1) as f64;
        self.steps.iter_mut().for_each(|step| step.ran = scaled(step.ran, scale));
        self.ran_ns = ran_ns;
    }

    /// What a fault took that was served from a buffer, at the median: all of a fault but the store. Known when enough were
    /// seen.
    pub fn refault_ns(&self) -> Option<u64> {
        const ENOUGH: usize = 50;
        let mut served = self.served.clone();
        served.sort_unstable();
        (served.len() >= ENOUGH).then(|| served[served.len() / 2].into())
    }

    /// Runs of adjacent pages; see [`Footprint::runs`].
    pub fn runs(&self) -> Vec<(u64, Vec<Dense>)> {
        self.footprint.runs()
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "saturates, and is positive")]
fn scaled(ran: u32, scale: f64) -> u32 {
    (f64::from(ran) * scale).round() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(page: u64) -> Step {
        Step::Touch { page, access: Access::Read, served: None, ran_ns: 10 }
    }

    #[test]
    fn pages_get_numbers_and_repetitions_are_counted() {
        let mut all = References::default();
        for page in [900, 900, 5, 6, 900] {
            all.push(touch(page)).expect("room");
        }
        let pages: Vec<u32> = all.steps().iter().map(|step| step.page().0).collect();
        assert_eq!(pages, [0, 1, 2, 0]);
        assert_eq!((all.touches(), all.pages(), all.peak_pages(), all.ran_ns()), (5, 3, 3, 50));
        assert_eq!(all.steps()[0].ran_ns(), 20);
        assert_eq!(all.runs(), [(5, vec![Dense(1), Dense(2)]), (900, vec![Dense(0)])]);
    }

    #[test]
    fn times_of_service_have_a_limit_and_keep_their_median() {
        let mut all = References::default();
        for nth in 0..5 * SERVED_MAX as u64 {
            let served = Some((Fault::Refault, 1000 + nth * 7919 % 1001));
            all.push(Step::Touch { page: 1, access: Access::Read, served, ran_ns: 10 }).expect("room");
            assert!(all.served.len() < SERVED_MAX);
        }
        let median = all.refault_ns().expect("enough");
        assert!((1495..=1505).contains(&median), "{median}");
    }

    #[test]
    fn a_removal_of_any_length_concerns_what_was_touched() {
        let mut all = References::default();
        [10, 70, 200].into_iter().for_each(|page| all.push(touch(page)).expect("room"));
        all.push(Step::Removed { page: 11, pages: 1 << 51 }).expect("room");
        all.push(Step::Removed { page: 11, pages: 1 << 51 }).expect("room");
        let removed: Vec<u32> =
            all.steps().iter().filter(|step| step.does() == Does::Remove).map(|step| step.page().0).collect();
        assert_eq!(removed, [1, 2]);
        all.push(touch(70)).expect("room");
        assert_eq!((all.pages(), all.peak_pages()), (3, 3));
    }
}

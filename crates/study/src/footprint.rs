//! Which pages a program has, and a small number for each that it ever touched.

use std::collections::BTreeMap;

use crate::error::Error;

/// The number of a page in a trace, in the order of first touches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Dense(pub u32);

/// Pages beyond are refused: two bits of 32 are left for what a step is.
pub const DENSE_MAX: u32 = 1 << 30;

/// Pages in one leaf of the index.
const LEAF_PAGES: usize = 64;
const LEAF: u64 = LEAF_PAGES as u64;
const NONE: u32 = u32::MAX;

/// See the module's documentation.
#[derive(Default)]
pub struct Footprint {
    leaves: BTreeMap<u64, [u32; LEAF_PAGES]>,
    live: Vec<bool>,
    live_pages: u64,
    peak_pages: u64,
}

impl Footprint {
    /// The program touches `page`.
    ///
    /// # Errors
    /// When it has touched too many.
    pub fn touch(&mut self, page: u64) -> Result<Dense, Error> {
        let leaf = self.leaves.entry(page / LEAF).or_insert([NONE; LEAF_PAGES]);
        let dense = &mut leaf[usize::try_from(page % LEAF).expect("below a leaf's length")];
        if *dense == NONE {
            let next = u32::try_from(self.live.len()).ok().filter(|next| *next < DENSE_MAX).ok_or(Error::TooLong)?;
            *dense = next;
            self.live.push(false);
        }
        self.live_pages += u64::from(!std::mem::replace(&mut self.live[*dense as usize], true));
        self.peak_pages = self.peak_pages.max(self.live_pages);
        Ok(Dense(*dense))
    }

    /// The program gives back `pages` pages from `page` on; returns those that it had.
    pub fn remove(&mut self, page: u64, pages: u64) -> Vec<Dense> {
        let end = page.saturating_add(pages);
        let leaves = self.leaves.range(page / LEAF..end.div_ceil(LEAF));
        let within = leaves.flat_map(|(leaf, dense)| (leaf * LEAF..).zip(dense));
        let known = within.filter(|(at, dense)| (page..end).contains(at) && **dense != NONE);
        let gone: Vec<Dense> =
            known.map(|(_, dense)| Dense(*dense)).filter(|dense| self.live[dense.0 as usize]).collect();
        gone.iter().for_each(|dense| self.live[dense.0 as usize] = false);
        self.live_pages -= gone.len() as u64;
        gone
    }

    /// Distinct pages that it ever touched.
    pub fn pages(&self) -> u32 {
        u32::try_from(self.live.len()).expect("below DENSE_MAX")
    }

    /// The most pages that it had at one time.
    pub fn peak_pages(&self) -> u64 {
        self.peak_pages
    }

    /// Runs of adjacent pages: the first one, and the numbers of it and its successors.
    pub fn runs(&self) -> Vec<(u64, Vec<Dense>)> {
        let mut runs: Vec<(u64, Vec<Dense>)> = Vec::new();
        for (leaf, within) in &self.leaves {
            for (page, dense) in (leaf * LEAF..).zip(within).filter(|(_, dense)| **dense != NONE) {
                match runs.last_mut().filter(|(first, run)| first + run.len() as u64 == page) {
                    Some((_, run)) => run.push(Dense(*dense)),
                    None => runs.push((page, vec![Dense(*dense)])),
                }
            }
        }
        runs
    }
}

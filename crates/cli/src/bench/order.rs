//! In which order the workload touches its pages.

use super::content::{index, mix};

/// How far a strided walk goes at a time, in pages: no power of two, and beyond what a block reaches.
const STRIDE_PAGES: usize = 17;
/// How often a phased walk turns to another part of its memory.
const PHASES: u64 = 8;
/// The share of the pages that a phase uses most.
const PHASE_PART: usize = 4;
/// One access in so many leaves that part.
const PHASE_LEAVES: u64 = 10;
/// As in YCSB.
const THETA: f64 = 0.99;

/// An order of accesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Order {
    /// Each page as likely as any other
    Uniform,
    /// Some pages far more likely than others (Zipf, 0.99), and scattered
    Zipf,
    /// One after the other
    Sequential,
    /// Every seventeenth, and so on until all had their turn
    Strided,
    /// Nine of ten in one quarter, which changes eight times
    Phased,
}

/// Chooses pages for one thread.
pub(super) struct Chooser<'a> {
    order: Order,
    pages: usize,
    accesses: u64,
    zipf: &'a Zipf,
    /// Where this thread begins.
    offset: usize,
    /// The numbers so far.
    state: u64,
    seed: u64,
}

impl<'a> Chooser<'a> {
    /// For thread `number` of `threads`, each of which makes so many accesses.
    pub(super) fn new(
        order: Order,
        zipf: &'a Zipf,
        pages: usize,
        accesses: u64,
        number: usize,
        threads: usize,
    ) -> Self {
        let seed = mix(number as u64 + 1);
        Self { order, pages, accesses, zipf, offset: number * pages / threads.max(1), state: seed, seed }
    }

    /// A random number.
    pub(super) fn dice(&mut self) -> u64 {
        self.state = self.state.wrapping_add(1);
        mix(self.state ^ self.seed.rotate_left(32))
    }

    /// The page of the access with this number.
    pub(super) fn page(&mut self, access: u64) -> usize {
        let (dice, pages) = (self.dice(), self.pages as u64);
        let at = match self.order {
            Order::Uniform => dice % pages,
            // An odd multiplier scatters popular ranks over all of the memory.
            Order::Zipf => self.zipf.rank(dice).wrapping_mul(2_654_435_761) % pages,
            Order::Sequential => access + self.offset as u64,
            Order::Strided => strided(access, pages) + self.offset as u64,
            Order::Phased => self.phased(access, dice),
        };
        index(at % pages)
    }

    fn phased(&mut self, access: u64, dice: u64) -> u64 {
        if dice.is_multiple_of(PHASE_LEAVES) {
            return self.dice();
        }
        let phase = access * PHASES / self.accesses.max(1);
        let part = (self.pages / PHASE_PART).max(1);
        // Neighbours in time are not neighbours in place, and each part has its turn twice.
        (phase * 3 % PHASE_PART as u64) * part as u64 + (dice >> 8) % part as u64
    }
}

/// Each page once in as many accesses as there are pages.
fn strided(access: u64, pages: u64) -> u64 {
    let (stride, turn) = (STRIDE_PAGES as u64, access % pages);
    // How many pages begin at each offset: the first offsets have one more where the stride does not divide.
    let (rows, longer) = (pages / stride, pages % stride);
    let long = longer * (rows + 1);
    match turn < long {
        true => turn % (rows + 1) * stride + turn / (rows + 1),
        false => (turn - long) % rows.max(1) * stride + longer + (turn - long) / rows.max(1),
    }
}

/// Popularity by Zipf's law: Gray et al., "Quickly generating billion-record synthetic databases" (SIGMOD 1994).
pub(super) struct Zipf {
    ranks: f64,
    zeta: f64,
    alpha: f64,
    eta: f64,
}

impl Zipf {
    /// For so many ranks.
    pub(super) fn new(ranks: usize) -> Self {
        let zeta: f64 = (1..=ranks).map(|rank| (rank as f64).powf(-THETA)).sum();
        let eta = (1.0 - (2.0 / ranks as f64).powf(1.0 - THETA)) / (1.0 - (1.0 + 0.5f64.powf(THETA)) / zeta);
        Self { ranks: ranks as f64, zeta, alpha: 1.0 / (1.0 - THETA), eta }
    }

    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between 0 and the number of ranks")]
    fn rank(&self, dice: u64) -> u64 {
        let share = (dice >> 11) as f64 / (1u64 << 53) as f64;
        let scaled = share * self.zeta;
        if scaled < 1.0 {
            return 0;
        }
        if scaled < 1.0 + 0.5f64.powf(THETA) {
            return 1;
        }
        (self.ranks * (self.eta * share - self.eta + 1.0).powf(self.alpha)).min(self.ranks - 1.0) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(order: Order, pages: usize, accesses: u64) -> Vec<u64> {
        let zipf = Zipf::new(pages);
        let mut chooser = Chooser::new(order, &zipf, pages, accesses, 0, 1);
        let mut counts = vec![0; pages];
        (0..accesses).for_each(|access| counts[chooser.page(access)] += 1);
        counts
    }

    #[test]
    fn orders_touch_what_they_say() {
        for pages in [16, 17, 18, 1000, 4097] {
            for order in [Order::Sequential, Order::Strided] {
                assert_eq!(counts(order, pages, pages as u64), vec![1; pages], "{order:?} over {pages}");
            }
        }
        let zipf = Zipf::new(1000);
        let mut chooser = Chooser::new(Order::Strided, &zipf, 1000, 1000, 0, 1);
        assert_eq!([chooser.page(0), chooser.page(1), chooser.page(2)], [0, 17, 34]);
        let uniform = counts(Order::Uniform, 100, 100_000);
        assert!(uniform.iter().all(|&count| (800..1200).contains(&count)), "{uniform:?}");
    }

    #[test]
    fn zipf_has_its_favourites() {
        let mut counts = counts(Order::Zipf, 1000, 100_000);
        counts.sort_unstable_by(|a, b| b.cmp(a));
        // 1 / zeta(1000, 0.99) = 12.9 %, and half as much for the second.
        assert!((12_000..14_000).contains(&counts[0]) && (6_000..7_500).contains(&counts[1]), "{:?}", &counts[..2]);
    }

    #[test]
    fn phases_have_their_own_quarter() {
        let zipf = Zipf::new(1000);
        let mut chooser = Chooser::new(Order::Phased, &zipf, 1000, 80_000, 0, 1);
        let mut quarters = Vec::new();
        for phase in 0..PHASES {
            let mut counts = [0; 4];
            (phase * 10_000..(phase + 1) * 10_000).for_each(|access| counts[chooser.page(access) / 250] += 1);
            let favourite = (0..4).max_by_key(|&quarter| counts[quarter]).expect("four");
            assert!(counts[favourite] > 9_000, "{counts:?}");
            quarters.push(favourite);
        }
        assert_eq!(quarters, [0, 3, 2, 1, 0, 3, 2, 1]);
    }
}

//! The one source of chance: everything that a run does follows from its seed.

/// SplitMix64 (Steele, Lea, Flood 2014): one addition and two multiplications, and every seed is a good one.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// Draws that follow from `seed`; near seeds give unrelated draws.
    pub fn new(seed: u64) -> Self {
        Self(seed ^ 0x5EED_0F5B_111A_4A4E)
    }

    /// Any number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    }

    /// A number below `end`, which is not zero. The bias of the modulus does not matter here.
    pub fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.draw() % end as u64).expect("below a usize")
    }

    /// A number from `least` to `most`, both included.
    pub fn between(&mut self, least: usize, most: usize) -> usize {
        least + self.below(most - least + 1)
    }

    /// True in `percent` of a hundred cases.
    pub fn percent(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    /// The position of one of `weights`, each as likely as its weight; they are not all zero.
    pub fn weighted(&mut self, weights: &[usize]) -> usize {
        let mut left = self.below(weights.iter().sum());
        for (at, &weight) in weights.iter().enumerate() {
            if left < weight {
                return at;
            }
            left -= weight;
        }
        unreachable!("the draw is below the sum")
    }
}

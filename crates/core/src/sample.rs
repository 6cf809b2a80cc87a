//! Which pages are in a sample: by a hash of the page, so that either all of its touches count or none.

/// Hashes are below this.
pub const HASHES: u64 = 1 << 24;

/// The hash of a page: the finalizer of splitmix64, so that neighbours have nothing in common.
pub fn hash(page: u64) -> u64 {
    let mut x = page.wrapping_add(0x9E37_79B9_7F4A_7C15);
    x = (x ^ x >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ x >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    (x ^ x >> 31) & (HASHES - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_of_neighbours_has_its_share() {
        for below in [HASHES / 64, HASHES / 4] {
            let sampled = (0..1 << 18).filter(|page| hash(*page) < below).count() as f64;
            let expected = below as f64 / HASHES as f64 * f64::from(1 << 18);
            assert!((sampled / expected - 1.0).abs() < 0.06, "{sampled} against {expected}");
        }
    }
}

//! Parity: one chunk by XOR, two by Reed-Solomon, or copies where a row has one data chunk.
//!
//! Positions are numbered data first, then parity. Data chunks that a short row does not have are zeros.

use reed_solomon_simd::{ReedSolomonDecoder, ReedSolomonEncoder};
use spillway_core::{PAGE_BYTES, Page};

use super::Shape;

/// Makes parity, and chunks out of others.
pub(super) enum Code {
    Copies,
    Xor,
    ReedSolomon(Box<(ReedSolomonEncoder, ReedSolomonDecoder)>),
}

const FITS: &str = "the shape was checked, and chunks are pages";

impl Code {
    pub(super) fn new(shape: Shape) -> Self {
        match (shape.data, shape.parity) {
            (1, _) => Self::Copies,
            (_, 1) => Self::Xor,
            (data, parity) => {
                let encoder = ReedSolomonEncoder::new(data, parity, PAGE_BYTES).expect(FITS);
                let decoder = ReedSolomonDecoder::new(data, parity, PAGE_BYTES).expect(FITS);
                Self::ReedSolomon(Box::new((encoder, decoder)))
            }
        }
    }

    /// Writes the parity of `chunks[..length]` behind `chunks[..data]`.
    pub(super) fn encode(&mut self, shape: Shape, chunks: &mut [Page], length: usize) {
        let (data, parity) = chunks.split_at_mut(shape.data);
        data[length..].iter_mut().for_each(|page| *page = [0; PAGE_BYTES]);
        match self {
            Self::Copies => parity.fill(data[0]),
            Self::Xor => {
                parity[0] = data[0];
                data[1..length].iter().for_each(|page| xor(&mut parity[0], page));
            }
            Self::ReedSolomon(coders) => {
                let encoder = &mut coders.0;
                data.iter().for_each(|page| encoder.add_original_shard(page).expect(FITS));
                let encoded = encoder.encode().expect(FITS);
                for (to, from) in parity.iter_mut().zip(encoded.recovery_iter()) {
                    to.copy_from_slice(from);
                }
            }
        }
    }

    /// Makes the chunk at `wanted` out of `length` others, each with its position.
    pub(super) fn decode(&mut self, shape: Shape, length: usize, others: &[(u8, &Page)], wanted: u8, into: &mut Page) {
        assert!(others.len() >= length, "as many chunks as a row has data");
        match self {
            Self::Copies => *into = *others[0].1,
            Self::Xor => {
                *into = *others[0].1;
                others[1..length].iter().for_each(|(_, page)| xor(into, page));
            }
            Self::ReedSolomon(coders) => {
                let (encoder, decoder) = &mut **coders;
                let data = |position: u8| usize::from(position) < shape.data;
                let zeros = [0; PAGE_BYTES];
                let mut known: [Option<&Page>; super::table::DATA_MAX] = [None; super::table::DATA_MAX];
                known[length..shape.data].fill(Some(&zeros));
                for (position, page) in others.iter().filter(|(position, _)| data(*position)) {
                    known[usize::from(*position)] = Some(page);
                }
                let known = &known[..shape.data];
                for (position, page) in known.iter().enumerate() {
                    page.iter().for_each(|page| decoder.add_original_shard(position, page).expect(FITS));
                }
                for (position, page) in others.iter().filter(|(position, _)| !data(*position)) {
                    decoder.add_recovery_shard(usize::from(*position) - shape.data, page).expect(FITS);
                }
                let decoded = decoder.decode().expect(FITS);
                if data(wanted) {
                    into.copy_from_slice(decoded.restored_original(usize::from(wanted)).expect("it was not known"));
                    return;
                }
                for (position, page) in known.iter().enumerate() {
                    match page {
                        Some(page) => encoder.add_original_shard(page).expect(FITS),
                        None => {
                            let page = decoded.restored_original(position).expect("it was not known");
                            encoder.add_original_shard(page).expect(FITS);
                        }
                    }
                }
                let encoded = encoder.encode().expect(FITS);
                into.copy_from_slice(encoded.recovery(usize::from(wanted) - shape.data).expect(FITS));
            }
        }
    }
}

fn xor(into: &mut Page, page: &Page) {
    for (into, from) in into.iter_mut().zip(page) {
        *into ^= from;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(seed: u64) -> Page {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        std::array::from_fn(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()[3]
        })
    }

    /// Every chunk out of every set of others that is large enough, for rows of every length.
    #[test]
    fn any_chunk_is_made_out_of_enough_others() {
        for (data, parity) in [(1, 1), (1, 2), (2, 1), (4, 1), (2, 2), (4, 2), (7, 2)] {
            let shape = Shape { data, parity };
            let mut code = Code::new(shape);
            for length in 1..=data {
                let mut chunks: Vec<Page> = (0..data + parity).map(|n| noise(n as u64 + 1)).collect();
                code.encode(shape, &mut chunks, length);
                let there: Vec<u8> = (0..data + parity)
                    .filter(|at| *at < length || *at >= data)
                    .map(|at| u8::try_from(at).unwrap())
                    .collect();
                for &wanted in &there {
                    for &absent in &there {
                        let others = there.iter().filter(|at| **at != wanted && (parity == 1 || **at != absent));
                        let mut others: Vec<(u8, &Page)> = others.map(|at| (*at, &chunks[usize::from(*at)])).collect();
                        others.truncate(length);
                        if others.len() < length {
                            continue;
                        }
                        let mut made = [0; PAGE_BYTES];
                        code.decode(shape, length, &others, wanted, &mut made);
                        assert!(made == chunks[usize::from(wanted)], "{data}+{parity} {length} {wanted} {absent}");
                    }
                }
            }
        }
    }
}

//! LZ4 blocks of exactly one page: decoded, or compared with a page without decoding.
//!
//! Compression is `lz4_flex`'s. Decoding is ours because it stands between a fault and its wake: `lz4_flex` 0.14
//! repeats runs byte by byte (0.77 us for half a page of one byte, 0.13 us here; 1.4 us with its `safe-decode`), and it
//! cannot compare. On other pages the two are level (`benches/pool.rs`). No input makes it panic or write past the page.
//!
//! Format: <https://github.com/lz4/lz4/blob/dev/doc/lz4_Block_format.md>

use spillway_core::{PAGE_BYTES, Page};

/// A block that does not decode to a page.
#[derive(Debug, PartialEq, Eq)]
pub struct Undecodable;

/// Decodes `block`. After an error, `into` holds anything.
pub(crate) fn decode(block: &[u8], into: &mut Page) -> Result<(), Undecodable> {
    walk(block, &mut Decoder(into)).ok_or(Undecodable)
}

/// Whether `block` decodes to `page`: every byte of it is compared.
pub(crate) fn decodes_to(block: &[u8], page: &Page) -> bool {
    walk(block, &mut Comparer(page)).is_some()
}

/// What is done with a block's literals and matches. `None` ends the walk.
trait Visitor {
    /// The page's next bytes, from `at`, are the first `len` (below 16) of `bytes`.
    fn few_literals(&mut self, at: usize, bytes: &[u8; 16], len: usize) -> Option<()>;
    /// The page's next bytes are `bytes`.
    fn literals(&mut self, at: usize, bytes: &[u8]) -> Option<()>;
    /// As `repeat`, with `len` below 19.
    fn repeat_few(&mut self, at: usize, distance: usize, len: usize) -> Option<()>;
    /// The page's next `len` bytes repeat those that start `distance` (1 to `at`) before.
    fn repeat(&mut self, at: usize, distance: usize, len: usize) -> Option<()>;
}

#[inline(always)]
fn walk(block: &[u8], visitor: &mut impl Visitor) -> Option<()> {
    // Next byte of the block, and of the page.
    let (mut from, mut at) = (0, 0);
    loop {
        let token = usize::from(*block.get(from)?);
        from += 1;
        let mut literals = token >> 4;
        if literals < 15
            && at + 16 <= PAGE_BYTES
            && let Some(bytes) = block.get(from..from + 16).and_then(<[u8]>::first_chunk)
        {
            visitor.few_literals(at, bytes, literals)?;
            from += literals;
            at += literals;
        } else {
            if literals == 15 {
                literals += long_length(block, &mut from)?;
            }
            visitor.literals(at, block.get(from..from.checked_add(literals)?)?)?;
            from += literals;
            at += literals;
            // Only here: the other branch leaves some of the block for what follows.
            if from == block.len() {
                return (at == PAGE_BYTES).then_some(());
            }
        }
        let distance = usize::from(u16::from_le_bytes(*block.get(from..)?.first_chunk()?));
        from += 2;
        if distance == 0 || distance > at {
            return None;
        }
        let mut len = (token & 15) + 4;
        if len < 19 {
            visitor.repeat_few(at, distance, len)?;
        } else {
            len += long_length(block, &mut from)?;
            visitor.repeat(at, distance, len)?;
        }
        at += len;
    }
}

/// The rest of a length that its half of the token had no room for.
fn long_length(block: &[u8], from: &mut usize) -> Option<usize> {
    let mut length = 0;
    loop {
        let byte = *block.get(*from)?;
        *from += 1;
        length += usize::from(byte);
        if byte != u8::MAX {
            return Some(length);
        }
    }
}

struct Decoder<'a>(&'a mut Page);

impl Visitor for Decoder<'_> {
    #[inline(always)]
    fn few_literals(&mut self, at: usize, bytes: &[u8; 16], _len: usize) -> Option<()> {
        // All sixteen, as a fixed size needs no branch; what is too much is overwritten by what follows.
        self.0.get_mut(at..at + 16)?.copy_from_slice(bytes);
        Some(())
    }

    #[inline(always)]
    fn literals(&mut self, at: usize, bytes: &[u8]) -> Option<()> {
        self.0.get_mut(at..at + bytes.len())?.copy_from_slice(bytes);
        Some(())
    }

    #[inline(always)]
    fn repeat_few(&mut self, at: usize, distance: usize, len: usize) -> Option<()> {
        // Eight bytes at a time: a wider load of bytes just written would wait for their stores.
        if distance >= 8
            && let Some(window) = self.0.get_mut(at - distance..at + 18)
        {
            copy_forward::<8>(window, 0, distance)?;
            copy_forward::<8>(window, 8, distance)?;
            return copy_forward::<2>(window, 16, distance);
        }
        self.repeat(at, distance, len)
    }

    fn repeat(&mut self, at: usize, distance: usize, len: usize) -> Option<()> {
        let (start, end) = (at - distance, at.checked_add(len)?);
        if end > PAGE_BYTES {
            return None;
        }
        if distance == 1 {
            let byte = self.0[start];
            self.0[at..end].fill(byte);
            return Some(());
        }
        // A match may overlap itself: it then repeats with a period of `distance`, and so does all that is written
        // from `start`, so each copy may take twice as much as the one before.
        let mut done = at;
        while done < end {
            let step = (done - start).min(end - done);
            self.0.copy_within(start..start + step, done);
            done += step;
        }
        Some(())
    }
}

#[inline(always)]
fn copy_forward<const N: usize>(window: &mut [u8], from: usize, distance: usize) -> Option<()> {
    let bytes: [u8; N] = *window.get(from..)?.first_chunk()?;
    window.get_mut(from + distance..from + distance + N)?.copy_from_slice(&bytes);
    Some(())
}

struct Comparer<'a>(&'a Page);

impl Visitor for Comparer<'_> {
    #[inline(always)]
    fn few_literals(&mut self, at: usize, bytes: &[u8; 16], len: usize) -> Option<()> {
        let page = self.0.get(at..at + 16)?.first_chunk()?;
        same_start(page, bytes, len).then_some(())
    }

    #[inline(always)]
    fn literals(&mut self, at: usize, bytes: &[u8]) -> Option<()> {
        (self.0.get(at..at + bytes.len())? == bytes).then_some(())
    }

    // What lies before `at` was found equal, so the page itself says what a match repeats.

    #[inline(always)]
    fn repeat_few(&mut self, at: usize, distance: usize, len: usize) -> Option<()> {
        let start = at - distance;
        if len <= 16
            && let Some(here) = self.0.get(at..at + 16).and_then(<[u8]>::first_chunk)
            && let Some(there) = self.0.get(start..start + 16).and_then(<[u8]>::first_chunk)
        {
            return same_start(here, there, len).then_some(());
        }
        self.repeat(at, distance, len)
    }

    fn repeat(&mut self, at: usize, distance: usize, len: usize) -> Option<()> {
        let start = at - distance;
        (self.0.get(at..at.checked_add(len)?)? == &self.0[start..start + len]).then_some(())
    }
}

/// Whether the first `len` bytes, at most all, are the same.
#[inline(always)]
fn same_start(a: &[u8; 16], b: &[u8; 16], len: usize) -> bool {
    let differ = u128::from_le_bytes(*a) ^ u128::from_le_bytes(*b);
    differ.trailing_zeros() as usize >= len * 8
}

#[cfg(test)]
mod tests {
    use super::*;
    use lz4_flex::block::{compress, decompress_into};
    use proptest::collection::vec;
    use proptest::prelude::*;

    /// Pages of literals and of repetitions from every distance, near ones more often.
    fn pages() -> impl Strategy<Value = Page> {
        let piece = prop_oneof![
            vec(any::<u8>(), 1..60).prop_map(|bytes| (bytes, 0, 0)),
            (1..40_usize, 4..80_usize).prop_map(|(distance, len)| (Vec::new(), distance, len)),
            (1..4096_usize, 4..1000_usize).prop_map(|(distance, len)| (Vec::new(), distance, len)),
        ];
        vec(piece, 1..200).prop_map(|pieces| {
            let mut bytes = Vec::new();
            for (literals, distance, len) in pieces.iter().cycle() {
                bytes.extend_from_slice(literals);
                let start = bytes.len().saturating_sub(*distance);
                (start..(start + len) * usize::from(start < bytes.len())).for_each(|at| bytes.push(bytes[at]));
                bytes.push(7);
                if bytes.len() >= PAGE_BYTES {
                    break;
                }
            }
            *bytes.first_chunk().unwrap()
        })
    }

    /// What `lz4_flex` makes of a block, and what is made of it here.
    fn assert_agree(block: &[u8]) {
        let mut theirs = [0; PAGE_BYTES];
        let mut ours = [0xff; PAGE_BYTES];
        let decoded = decode(block, &mut ours);
        assert_eq!(matches!(decompress_into(block, &mut theirs), Ok(PAGE_BYTES)), decoded.is_ok());
        if decoded.is_ok() {
            assert!(ours == theirs);
            assert!(decodes_to(block, &ours));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn compressed_pages_come_back(page in pages(), at in 0..PAGE_BYTES, bit in 0..8_u32) {
            let block = compress(&page);
            assert_agree(&block);
            let mut other = page;
            other[at] ^= 1_u8 << bit;
            prop_assert!(decodes_to(&block, &page));
            prop_assert!(!decodes_to(&block, &other));
        }

        #[test]
        fn damaged_blocks_are_told_as_lz4_flex_tells_them(
            page in pages(),
            damages in vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
            cut in 0..3_usize,
        ) {
            let mut block = compress(&page);
            for (at, byte) in damages {
                let at = at.index(block.len());
                block[at] = byte;
            }
            block.truncate(block.len() - cut);
            assert_agree(&block);
        }

        #[test]
        fn noise_does_no_harm(block in vec(any::<u8>(), 0..200)) {
            assert_agree(&block);
        }
    }
}

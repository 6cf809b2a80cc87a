//! Pages to stored bytes and back: LZ4 blocks, or the page itself where that does not pay.
//!
//! Stored bytes as long as a page *are* the page; anything shorter is an LZ4 block. Both the embedded pool and the memory
//! server keep pages so; neither believes that what it kept is intact.
#![forbid(unsafe_code)]

mod lz4;

use lz4_flex::block::{CompressTable, compress_into_with_table, get_maximum_output_size};
use spillway_core::{PAGE_BYTES, Page};

pub use lz4::Undecodable;

/// Compressed pages larger than this are kept as they are: an eighth saved is not worth the decoding on every fetch.
const PACKED_MAX_BYTES: usize = PAGE_BYTES / 8 * 7;

/// What compression may need on the way.
const PACKED_ROOM_BYTES: usize = get_maximum_output_size(PAGE_BYTES);

/// How pages are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compression {
    /// LZ4 blocks (`compress=lz4`).
    #[default]
    Lz4,
    /// As they are (`compress=none`).
    None,
}

/// Turns pages into stored bytes, with tables that are reused so that nothing is allocated for a page.
pub struct Codec {
    table: Option<CompressTable>,
    packed: Box<[u8; PACKED_ROOM_BYTES]>,
}

impl Codec {
    /// Tables for pages that are kept so.
    #[must_use]
    pub fn new(compression: Compression) -> Self {
        Self {
            table: (compression == Compression::Lz4).then(CompressTable::small),
            packed: Box::new([0; PACKED_ROOM_BYTES]),
        }
    }

    /// The bytes to store for `page`.
    pub fn pack<'a>(&'a mut self, page: &'a Page) -> &'a [u8] {
        let Some(table) = &mut self.table else { return page };
        match compress_into_with_table(page, &mut *self.packed, table) {
            Ok(len) if len <= PACKED_MAX_BYTES => &self.packed[..len],
            _ => page,
        }
    }
}

/// Whether `stored` is `page`, byte for byte. Stored bytes that do not decode are no page.
#[must_use]
pub fn same(stored: &[u8], page: &Page) -> bool {
    if stored.len() == PAGE_BYTES { stored == page } else { lz4::decodes_to(stored, page) }
}

/// The page that `stored` was made from, provided it is intact.
///
/// # Errors
/// When it is not; then `into` holds anything.
pub fn unpack(stored: &[u8], into: &mut Page) -> Result<(), Undecodable> {
    match <&Page>::try_from(stored) {
        Ok(page) => {
            *into = *page;
            Ok(())
        }
        Err(_) => lz4::decode(stored, into),
    }
}

/// Whether every byte of `page` is zero: such pages need no store.
#[must_use]
pub fn is_zero(page: &Page) -> bool {
    // 256 bytes at a time: wide enough for vector registers, small enough that most other pages are told in one.
    page.as_chunks::<256>().0.iter().all(|chunk| chunk.iter().fold(0, |all, byte| all | byte) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_bit_makes_a_page_differ_from_zero() {
        let mut page = [0; PAGE_BYTES];
        assert!(is_zero(&page));
        for at in 0..PAGE_BYTES {
            page[at] = 1 << (at % 8);
            assert!(!is_zero(&page));
            page[at] = 0;
        }
    }

    #[test]
    fn pages_that_compress_little_are_kept_as_they_are() {
        let mut codec = Codec::new(Compression::Lz4);
        let mut page = [0; PAGE_BYTES];
        let mut random = 1_u32;
        for (at, byte) in page.iter_mut().enumerate() {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            *byte = if at < PAGE_BYTES * 19 / 20 { (random >> 24).to_le_bytes()[0] } else { 0 };
        }
        assert_eq!(codec.pack(&page), page);
        page[..PAGE_BYTES / 2].fill(7);
        let packed = codec.pack(&page).to_vec();
        assert!(packed.len() < PACKED_MAX_BYTES && same(&packed, &page));
        let mut back = [1; PAGE_BYTES];
        assert_eq!(unpack(&packed, &mut back), Ok(()));
        assert!(back == page);
        assert_eq!(unpack(&packed[..packed.len() - 1], &mut back), Err(Undecodable));
    }
}

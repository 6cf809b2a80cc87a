//! Pages to stored bytes and back: LZ4 blocks, or the page itself where that does not pay.
//!
//! Stored bytes as long as a page *are* the page; anything shorter is an LZ4 block.

use lz4_flex::block::{CompressTable, compress_into_with_table, get_maximum_output_size};
use spillway_core::{PAGE_BYTES, Page};

use crate::lz4::{self, Undecodable};

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
pub(crate) struct Codec {
    table: Option<CompressTable>,
    packed: Box<[u8; PACKED_ROOM_BYTES]>,
}

impl Codec {
    pub(crate) fn new(compression: Compression) -> Self {
        Self {
            table: (compression == Compression::Lz4).then(CompressTable::small),
            packed: Box::new([0; PACKED_ROOM_BYTES]),
        }
    }

    /// The bytes to store for `page`.
    pub(crate) fn pack<'a>(&'a mut self, page: &'a Page) -> &'a [u8] {
        let Some(table) = &mut self.table else { return page };
        match compress_into_with_table(page, &mut *self.packed, table) {
            Ok(len) if len <= PACKED_MAX_BYTES => &self.packed[..len],
            _ => page,
        }
    }
}

/// Whether `stored` is `page`, byte for byte. Stored bytes that do not decode are no page.
pub(crate) fn same(stored: &[u8], page: &Page) -> bool {
    if stored.len() == PAGE_BYTES { stored == page } else { lz4::decodes_to(stored, page) }
}

/// The page that `stored` was made from, provided it is intact.
pub(crate) fn unpack(stored: &[u8], into: &mut Page) -> Result<(), Undecodable> {
    match <&Page>::try_from(stored) {
        Ok(page) => {
            *into = *page;
            Ok(())
        }
        Err(_) => lz4::decode(stored, into),
    }
}

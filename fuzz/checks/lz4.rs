//! Any block is decoded, compared and refused as `lz4_flex` decodes and refuses it.

use spillway_core::PAGE_BYTES;

#[path = "../../crates/codec/src/lz4.rs"]
mod codec;

/// Holds one input to it.
pub fn check(block: &[u8]) {
    let (mut theirs, mut ours) = ([0; PAGE_BYTES], [0xff; PAGE_BYTES]);
    let decoded = codec::decode(block, &mut ours).is_ok();
    assert_eq!(decoded, matches!(lz4_flex::block::decompress_into(block, &mut theirs), Ok(PAGE_BYTES)));
    if decoded {
        assert!(ours == theirs && codec::decodes_to(block, &ours));
        ours[block[0] as usize * 16 + 15] ^= 1;
        assert!(!codec::decodes_to(block, &ours));
    }
}

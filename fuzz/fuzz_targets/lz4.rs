//! Any block is decoded, compared and refused as `lz4_flex` decodes and refuses it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use spillway_core::PAGE_BYTES;

#[path = "../../crates/store/src/lz4.rs"]
mod lz4;

fuzz_target!(|block: &[u8]| {
    let (mut theirs, mut ours) = ([0; PAGE_BYTES], [0xff; PAGE_BYTES]);
    let decoded = lz4::decode(block, &mut ours).is_ok();
    assert_eq!(decoded, matches!(lz4_flex::block::decompress_into(block, &mut theirs), Ok(PAGE_BYTES)));
    if decoded {
        assert!(ours == theirs && lz4::decodes_to(block, &ours));
        ours[block[0] as usize * 16 + 15] ^= 1;
        assert!(!lz4::decodes_to(block, &ours));
    }
});

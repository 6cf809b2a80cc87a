//! Whatever a Redis says is an answer, or ends the connection; nothing in it makes the pager panic.
#![no_main]

use libfuzzer_sys::fuzz_target;
use spillway_store::rehearsal::redis;

fuzz_target!(|bytes: &[u8]| {
    let Some((kind, bytes)) = bytes.split_first() else { return };
    let understood = redis(bytes, kind & 1 == 1);
    // What was understood is understood again without the rest.
    assert_eq!(redis(&bytes[..understood.bytes], kind & 1 == 1), understood);
});

//! Whatever a memory server says is an answer, or ends the connection; nothing in it makes the pager panic.

use spillway_store::rehearsal::tcp;

/// Holds one input to it.
pub fn check(bytes: &[u8]) {
    let Some((kind, bytes)) = bytes.split_first() else { return };
    let understood = tcp(bytes, kind & 1 == 1);
    // What was understood is understood again without the rest.
    assert_eq!(tcp(&bytes[..understood.bytes], kind & 1 == 1), understood);
}

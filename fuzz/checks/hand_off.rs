//! What a monitor says after it has handed over, as it comes: the first byte says in which pieces. What is kept has a limit.

use spillway_pager::handed::{Frames, Later};

use super::handed::{is_a_line, is_possible};

/// The longest message, with its length.
const MESSAGE_BYTES_MAX: usize = (64 << 10) + 4;

/// Holds one input to it.
pub fn check(bytes: &[u8]) {
    let Some((&piece, said)) = bytes.split_first() else { return };
    let whole = heard(said, said.len().max(1));
    assert_eq!(heard(said, usize::from(piece).max(1)), whole, "the same however it comes");
}

/// What is heard, and whether all of it could be read.
fn heard(said: &[u8], piece: usize) -> (Vec<Later>, bool) {
    let (mut frames, mut all) = (Frames::default(), Vec::new());
    for piece in said.chunks(piece) {
        frames.push(piece);
        loop {
            match frames.take() {
                Ok(Some(later)) => {
                    if let Later::Plugged(region) = &later {
                        is_possible(region);
                    }
                    all.push(later);
                }
                Ok(None) => break,
                Err(refusal) => {
                    is_a_line(&refusal);
                    return (all, false);
                }
            }
        }
        assert!(frames.kept_bytes() < MESSAGE_BYTES_MAX, "{} bytes are kept", frames.kept_bytes());
    }
    (all, true)
}

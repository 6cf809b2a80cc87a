//! What a pager finds of the groups of another that has died: every page that is taken over is in a group, at a place of its own.

use spillway_store::rehearsal::rows;

/// How many words of groups there are, those, and pages.
pub fn check(bytes: &[u8]) {
    let Some((groups, words)) = bytes.split_first_chunk() else { return };
    let (pages, groups) = rows(words, usize::from(u16::from_le_bytes(*groups)));
    assert!(pages <= words.len() / 8 && groups <= pages);
}

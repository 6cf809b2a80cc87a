//! What a pager finds of the ledger of another that has died: it is refused, or names pages at servers that there are.

use spillway_store::rehearsal::ledger;

/// How many words of notes there are, those, and entries.
pub fn check(bytes: &[u8]) {
    let Some((notes, words)) = bytes.split_first_chunk() else { return };
    let notes = usize::from(u16::from_le_bytes(*notes));
    if let Some((pages, servers)) = ledger(words, notes) {
        assert!(pages <= words.len() / 16 && servers <= 255);
    }
}

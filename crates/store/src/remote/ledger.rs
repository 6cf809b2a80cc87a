//! What outlives the pager of a pool on other hosts: which page is where, and how the servers know this pager.
//!
//! An entry is two words a handle, the second of which counts: it is written after the first, before the page is sent, again when
//! the server keeps it, and zeroed when the server has forgotten it. So whoever takes over knows of everything that a server
//! may have. A server's note is written aside and then declared to be the one that counts. The reader believes no number.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Release};

use super::news::SERVERS_MAX;
use crate::Handle;
use crate::slots::SLAB_WORDS;
use crate::vault::{Slabs, Use, Vault};

const ENTRY_WORDS: usize = 2;
const SLAB_ENTRIES: usize = SLAB_WORDS / ENTRY_WORDS;
/// The longest name of a server that is written down, and the longest identity.
const NAME_BYTES_MAX: usize = 264;
pub(crate) const IDENTITY_BYTES_MAX: usize = 368;
const NAME_WORDS: usize = 1 + NAME_BYTES_MAX / 8;
const SIDE_WORDS: usize = 1 + IDENTITY_BYTES_MAX / 8;
/// Which side counts, the name, two sides.
const NOTE_WORDS: usize = 1 + NAME_WORDS + 2 * SIDE_WORDS;
/// Behind the number of servers.
const NOTES_AT: usize = 1;

/// How far a page is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// The server may have it.
    Sent = 1,
    /// The server has said that it keeps it.
    Kept = 2,
}

/// A page that a server may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) checksum: u64,
    pub(crate) epoch: u16,
    pub(crate) server: u8,
    pub(crate) stage: Stage,
}

/// A server as it was left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Note {
    /// As [`super::Peer::name`].
    pub(crate) name: String,
    /// Of the last connection.
    pub(crate) epoch: u16,
    pub(crate) valid_since: u16,
    /// As [`super::protocol::Protocol::identity`] gave it.
    pub(crate) identity: Vec<u8>,
}

/// See the module's documentation.
pub(crate) struct Ledger {
    slabs: Vec<&'static [AtomicU64]>,
    source: Slabs,
    notes: &'static [AtomicU64],
}

impl Ledger {
    /// An empty one; none when there is no room.
    pub(crate) fn new(vault: &Vault) -> Option<Self> {
        Some(Self { slabs: Vec::new(), source: Slabs::new(vault, Use::SLOTS), notes: vault.notes()? })
    }

    /// What was left, if it makes sense.
    pub(crate) fn found(vault: &Vault) -> Option<(Self, Vec<Note>)> {
        let (slabs, source) = vault.slabs(Use::SLOTS);
        let ledger = Self { slabs, source, notes: vault.notes()? };
        let servers = usize::try_from(ledger.notes[0].load(Acquire)).ok()?;
        if servers == 0 || servers > SERVERS_MAX {
            return None;
        }
        let notes = (0..servers).map(|at| ledger.note(at)).collect::<Option<Vec<_>>>()?;
        Some((ledger, notes))
    }

    /// All pages that servers may have.
    pub(crate) fn entries(&self) -> impl Iterator<Item = (Handle, Entry)> + '_ {
        let all = self.slabs.iter().flat_map(|slab| slab.as_chunks::<ENTRY_WORDS>().0);
        (1..).zip(all).filter_map(|(bits, [checksum, rest])| {
            let [e0, e1, server, stage, ..] = rest.load(Acquire).to_le_bytes();
            let stage = match stage {
                1 => Stage::Sent,
                2 => Stage::Kept,
                _ => return None,
            };
            let entry = Entry { checksum: checksum.load(Acquire), epoch: u16::from_le_bytes([e0, e1]), server, stage };
            Some((Handle::from_bits(bits)?, entry))
        })
    }

    /// A page is about to be sent, or is kept. Without room for it, nobody can take over from now on.
    pub(crate) fn set(&mut self, handle: Handle, entry: Entry) {
        let at = handle.bits() as usize - 1;
        while at / SLAB_ENTRIES >= self.slabs.len() {
            let Some(slab) = self.source.take() else { return self.give_up() };
            self.slabs.push(slab);
        }
        let words = &self.slabs[at / SLAB_ENTRIES][at % SLAB_ENTRIES * ENTRY_WORDS..];
        words[0].store(entry.checksum, Release);
        let [e0, e1] = entry.epoch.to_le_bytes();
        words[1].store(u64::from_le_bytes([e0, e1, entry.server, entry.stage as u8, 0, 0, 0, 0]), Release);
    }

    /// No server has this page.
    pub(crate) fn clear(&mut self, handle: Handle) {
        let at = handle.bits() as usize - 1;
        if let Some(slab) = self.slabs.get(at / SLAB_ENTRIES) {
            slab[at % SLAB_ENTRIES * ENTRY_WORDS + 1].store(0, Release);
        }
    }

    /// The pool has these servers, of which notes follow.
    pub(crate) fn set_servers(&self, count: usize) {
        self.notes[0].store(count as u64, Release);
    }

    /// One more server, of which nothing was asked yet. It counts when all of its note is there.
    pub(crate) fn add_server(&self, note: &Note) {
        let count = self.notes[0].load(Acquire);
        // None where it was given up.
        if let Some(at) = usize::try_from(count).ok().filter(|at| (1..SERVERS_MAX).contains(at)) {
            self.set_note(at, note);
            if self.notes[0].load(Acquire) == count {
                self.set_servers(at + 1);
            }
        }
    }

    fn give_up(&self) {
        self.set_servers(0);
    }

    /// How a server is from now on. What is too long to be written down cannot be taken over.
    pub(crate) fn set_note(&self, at: usize, note: &Note) {
        if note.name.len() > NAME_BYTES_MAX || note.identity.len() > IDENTITY_BYTES_MAX {
            return self.give_up();
        }
        let words = self.words_of(at);
        let side = 1 - usize::try_from(words[0].load(Acquire)).map_or(0, |side| side.saturating_sub(1).min(1));
        let (name, sides) = words[1..].split_at(NAME_WORDS);
        write(name, 0, note.name.as_bytes());
        let head = u32::from(note.epoch) | u32::from(note.valid_since) << 16;
        write(&sides[side * SIDE_WORDS..][..SIDE_WORDS], head, &note.identity);
        words[0].store(side as u64 + 1, Release);
    }

    fn note(&self, at: usize) -> Option<Note> {
        let words = self.words_of(at);
        let side = usize::try_from(words[0].load(Acquire)).ok()?.checked_sub(1).filter(|side| *side < 2)?;
        let (name, sides) = words[1..].split_at(NAME_WORDS);
        let (_, name) = read(name)?;
        let (head, identity) = read(&sides[side * SIDE_WORDS..][..SIDE_WORDS])?;
        let [e0, e1, v0, v1] = head.to_le_bytes();
        let (epoch, valid_since) = (u16::from_le_bytes([e0, e1]), u16::from_le_bytes([v0, v1]));
        Some(Note { name: String::from_utf8(name).ok()?, epoch, valid_since, identity })
    }

    fn words_of(&self, at: usize) -> &'static [AtomicU64] {
        &self.notes[NOTES_AT + at * NOTE_WORDS..][..NOTE_WORDS]
    }
}

/// Length and a number in the first word, bytes behind it.
fn write(words: &[AtomicU64], head: u32, bytes: &[u8]) {
    let length = u32::try_from(bytes.len()).expect("it was checked");
    words[0].store(u64::from(head) << 32 | u64::from(length), Release);
    for (word, bytes) in words[1..].iter().zip(bytes.chunks(8)) {
        let mut eight = [0; 8];
        eight[..bytes.len()].copy_from_slice(bytes);
        word.store(u64::from_le_bytes(eight), Release);
    }
}

/// What [`write()`] has written; none if that is not what is there.
fn read(words: &[AtomicU64]) -> Option<(u32, Vec<u8>)> {
    let first = words[0].load(Acquire);
    let length = usize::try_from(first & u64::from(u32::MAX)).ok().filter(|length| *length <= (words.len() - 1) * 8)?;
    let bytes = words[1..].iter().flat_map(|word| word.load(Acquire).to_le_bytes()).take(length).collect();
    Some((u32::try_from(first >> 32).ok()?, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(checksum: u64, stage: Stage) -> Entry {
        Entry { checksum, epoch: 7, server: 3, stage }
    }

    fn note(name: &str, epoch: u16, identity: &[u8]) -> Note {
        Note { name: name.into(), epoch, valid_since: 2, identity: identity.into() }
    }

    #[test]
    fn what_was_written_down_is_found() {
        let vault = Vault::create().unwrap();
        let mut ledger = Ledger::new(&vault).unwrap();
        let handle = |bits| Handle::from_bits(bits).unwrap();
        for bits in [1, 384, 385, 200_000] {
            ledger.set(handle(bits), entry(u64::from(bits), Stage::Sent));
        }
        ledger.set(handle(385), entry(9, Stage::Kept));
        ledger.clear(handle(384));
        ledger.clear(handle(100_000_000));
        let notes = [note("a:7070", 1, &[1; 57]), note("[::1]:7", 9, &[])];
        ledger.set_servers(2);
        ledger.set_note(0, &note("a:7070", 0, &[2; 60]));
        notes.iter().enumerate().for_each(|(at, note)| ledger.set_note(at, note));
        let (again, found) = Ledger::found(&vault).unwrap();
        let entries: Vec<(u32, Entry)> = again.entries().map(|(handle, entry)| (handle.bits(), entry)).collect();
        let expected =
            [(1, entry(1, Stage::Sent)), (385, entry(9, Stage::Kept)), (200_000, entry(200_000, Stage::Sent))];
        assert_eq!((entries.as_slice(), found.as_slice()), (expected.as_slice(), notes.as_slice()));
    }

    #[test]
    fn a_note_that_was_begun_leaves_the_one_before() {
        let vault = Vault::create().unwrap();
        let ledger = Ledger::new(&vault).unwrap();
        ledger.set_servers(1);
        for epoch in 1..4 {
            ledger.set_note(0, &note("a:1", epoch, &[7; 57]));
            let words = ledger.words_of(0);
            let side = usize::try_from(words[0].load(Acquire)).unwrap() - 1;
            let other = &words[1 + NAME_WORDS + (1 - side) * SIDE_WORDS..][..SIDE_WORDS];
            other.iter().for_each(|word| word.store(u64::MAX, Release));
            assert_eq!(Ledger::found(&vault).unwrap().1, [note("a:1", epoch, &[7; 57])]);
        }
    }

    #[test]
    fn servers_are_added_unless_it_was_given_up() {
        let vault = Vault::create().unwrap();
        let ledger = Ledger::new(&vault).unwrap();
        let notes = [note("a:1", 4, &[1; 57]), note("b:1", 0, &[2; 48])];
        ledger.set_servers(1);
        ledger.set_note(0, &notes[0]);
        ledger.add_server(&notes[1]);
        assert_eq!(Ledger::found(&vault).unwrap().1, notes);
        ledger.add_server(&note(&"x".repeat(300), 0, &[]));
        assert!(Ledger::found(&vault).is_none(), "what is not written down must not be missed");
        ledger.add_server(&notes[1]);
        assert!(Ledger::found(&vault).is_none(), "it stays so");
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let vault = Vault::create().unwrap();
        assert!(Ledger::found(&vault).is_none(), "there is nothing");
        let ledger = Ledger::new(&vault).unwrap();
        for word in [u64::MAX, SERVERS_MAX as u64 + 1, 1] {
            ledger.notes[0].store(word, Release);
            assert!(Ledger::found(&vault).is_none(), "no note was written");
        }
        ledger.set_note(0, &note("a:1", 1, &[1; 57]));
        for at in 0..NOTE_WORDS {
            let word = &ledger.words_of(0)[at];
            let before = word.swap(u64::MAX, Release);
            // Whatever is found, nothing panics.
            let _ = Ledger::found(&vault);
            word.store(before, Release);
        }
        ledger.set_note(0, &note(&"x".repeat(300), 1, &[]));
        assert!(Ledger::found(&vault).is_none(), "it cannot be written down");
    }
}

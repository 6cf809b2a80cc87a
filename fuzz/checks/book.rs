//! What a pager finds of another that has died: whatever it is, it is refused, or makes a table in which all counts agree.

use std::sync::Mutex;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use spillway_core::lasting::{Lasting, Sheet};
use spillway_core::pager::{Budget, Config, Pager};
use spillway_core::table::CHUNK_PAGES;
use spillway_core::{Address, TargetId};

const BOOK_WORDS: usize = 1024;
const SHEETS: usize = 2;

static BOOK: [AtomicU64; BOOK_WORDS] = [const { AtomicU64::new(0) }; BOOK_WORDS];
static NUMBERS: [AtomicU64; SHEETS] = [const { AtomicU64::new(0) }; SHEETS];
static ENTRIES: [[AtomicU64; CHUNK_PAGES]; SHEETS] = [const { [const { AtomicU64::new(0) }; CHUNK_PAGES] }; SHEETS];
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Words: how many are the book's, those, then for each sheet its number, how many entries follow, and pairs of place and entry.
pub fn check(bytes: &[u8]) {
    let _turn = ONE_AT_A_TIME.lock();
    let mut words = bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes")));
    let all = BOOK.iter().chain(&NUMBERS).chain(ENTRIES.as_flattened());
    all.for_each(|word| word.store(0, Relaxed));
    let count = words.next().unwrap_or(0);
    for (at, word) in BOOK.iter().zip(0..count).filter_map(|(at, _)| Some((at, words.next()?))) {
        at.store(word, Relaxed);
    }
    for (number, entries) in NUMBERS.iter().zip(&ENTRIES) {
        number.store(words.next().unwrap_or(0), Relaxed);
        for _ in 0..words.next().unwrap_or(0).min(CHUNK_PAGES as u64) {
            let (Some(at), Some(entry)) = (words.next(), words.next()) else { break };
            entries[usize::try_from(at % CHUNK_PAGES as u64).expect("small")].store(entry, Relaxed);
        }
    }
    let sheets = NUMBERS.iter().zip(&ENTRIES).map(|(number, entries)| Sheet { number, entries }).collect();
    let lasting = Lasting { book: &BOOK, sheets, more: Box::new(|| None) };
    let config = Config { budget: Budget::Pages(64), buffers: 32, write_batch: 1 };
    let kept = |handle: spillway_core::page::HandleBits| handle.get() % 2 == 1;
    let Ok(mut pager) = Pager::take_over(config, lasting, kept, |page, _| page.0 % 3 == 0) else { return };
    pager.audit();
    // It can be used.
    for id in 0..pager.targets().min(4) {
        pager.fault(TargetId(id), Address(0x10_0000));
        pager.removing(TargetId(id));
        pager.ended(TargetId(id));
    }
    pager.audit();
}

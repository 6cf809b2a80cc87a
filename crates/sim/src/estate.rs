//! Memory that outlives a simulated pager, and is used again by later runs on the same thread.

use std::cell::RefCell;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};

use spillway_core::lasting::{Lasting, Sheet};
use spillway_core::table::CHUNK_PAGES;

/// Words of a book: so few that it is often full.
const BOOK_WORDS: usize = 4096;

type Book = &'static [AtomicU64];

thread_local! {
    static BOOKS: RefCell<Vec<Book>> = const { RefCell::new(Vec::new()) };
    static SHEETS: RefCell<Vec<Sheet>> = const { RefCell::new(Vec::new()) };
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Estate {
    book: Book,
    sheets: Arc<Mutex<Sheets>>,
}

struct Sheets {
    all: Vec<Sheet>,
    spare: Vec<Sheet>,
}

impl std::fmt::Debug for Sheets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} sheets", self.all.len())
    }
}

impl Estate {
    /// An empty one.
    pub fn new() -> Self {
        let fresh = || -> Book { Vec::leak((0..BOOK_WORDS).map(|_| AtomicU64::new(0)).collect()) };
        let book = BOOKS.with(|books| books.borrow_mut().pop()).unwrap_or_else(fresh);
        let spare = SHEETS.with(RefCell::take);
        Self { book, sheets: Arc::new(Mutex::new(Sheets { all: Vec::new(), spare })) }
    }

    /// What a pager is given of it.
    pub fn lasting(&self) -> Lasting {
        let sheets = Arc::clone(&self.sheets);
        let used = sheets.lock().expect("nobody panics with it").all.clone();
        let more = move || {
            let mut sheets = sheets.lock().expect("nobody panics with it");
            let sheet = sheets.spare.pop().unwrap_or_else(|| Sheet {
                number: Box::leak(Box::new(AtomicU64::new(0))),
                entries: Box::leak(Box::new([const { AtomicU64::new(0) }; CHUNK_PAGES])),
            });
            sheets.all.push(sheet);
            Some(sheet)
        };
        Lasting { book: self.book, sheets: used, more: Box::new(more) }
    }
}

impl Drop for Estate {
    fn drop(&mut self) {
        let Ok(mut sheets) = self.sheets.lock() else { return };
        let used = std::mem::take(&mut sheets.all);
        for sheet in &used {
            sheet.number.store(0, Relaxed);
            sheet.entries.iter().for_each(|entry| entry.store(0, Relaxed));
        }
        SHEETS.with(|spare| {
            spare.borrow_mut().extend(used);
            spare.borrow_mut().append(&mut sheets.spare);
        });
        BOOKS.with(|books| books.borrow_mut().push(self.book));
    }
}

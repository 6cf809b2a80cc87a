//! What every store owes its pager, tried with random histories against a table that simply remembers.

use spillway_core::{PAGE_BYTES, Page};
use spillway_store::{Completion, Got, Handle, Put, Store, StoreError, Urgency};

use super::page;

/// Entries of the page table, and different pages among them: few, so that the same ones meet often.
const ENTRIES: usize = 200;
const CONTENTS: u64 = 300;

/// Of a put, or of a get with its page.
type Outcome = Result<Option<Box<Page>>, StoreError>;

/// What a page table has of a page.
#[derive(Clone, Copy, Debug)]
struct Entry {
    handle: Handle,
    content: u64,
    /// Its put is not complete.
    putting: bool,
    /// A get was asked for by this entry.
    getting: bool,
}

/// A store, and the table of whoever uses it.
pub struct Contract<'a> {
    store: &'a mut dyn Store,
    table: Vec<Option<Entry>>,
    random: u64,
    pub got: u64,
    pub declined: u64,
}

impl<'a> Contract<'a> {
    pub fn new(store: &'a mut dyn Store, seed: u64) -> Self {
        Self { store, table: vec![None; ENTRIES], random: seed | 1, got: 0, declined: 0 }
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 20) % limit
    }

    /// Random steps, with everything read now and then, at last once more; then all of it is freed.
    pub fn run(&mut self, steps: u64) {
        for step in 1..=steps {
            self.step();
            // However slowly a busy machine answers in between: here every entry is got.
            if step == steps || step % 500 == 0 {
                self.settle();
                (0..ENTRIES).for_each(|at| self.get(at, Urgency::Demand));
                self.settle();
            }
        }
        let held = self.table.iter().flatten().count() as u64;
        assert_eq!(self.store.status().stored_bytes, held * PAGE_BYTES as u64);
        for at in 0..ENTRIES {
            self.free(at);
        }
        assert_eq!(self.store.status().stored_bytes, 0);
        self.settle();
    }

    fn step(&mut self) {
        let at = usize::try_from(self.below(ENTRIES as u64)).unwrap();
        match self.below(100) {
            0..40 => self.put(at),
            40..60 => self.get(at, Urgency::Demand),
            60..70 => self.get(at, Urgency::Prefetch),
            70..78 => self.share(at),
            78..90 => self.free(at),
            90..94 => self.store.flush(),
            94 => {
                self.store.tidy();
            }
            _ => self.progress(),
        }
    }

    fn put(&mut self, at: usize) {
        // An entry that is being got has no page to put.
        if self.table[at].is_some_and(|entry| entry.getting) {
            return;
        }
        let kept = self.table[at].map(|entry| entry.content);
        let content = match kept {
            Some(content) if self.below(4) == 0 => content,
            _ => self.below(CONTENTS),
        };
        let previous = self.table[at];
        let handle = previous.map(|entry| entry.handle);
        let new = match self.store.put(&page(content), handle) {
            Ok(Put::Unchanged(handle)) => {
                let entry = previous.expect("unchanged from nothing");
                assert_eq!((handle, content, false), (entry.handle, entry.content, entry.putting));
                entry
            }
            Ok(Put::Stored(handle)) => Entry { handle, content, putting: false, getting: false },
            Ok(Put::Pending(handle)) => Entry { handle, content, putting: true, getting: false },
            Err(StoreError::Full | StoreError::Unavailable) => {
                self.declined += 1;
                return self.progress();
            }
            Err(error) => panic!("{error}"),
        };
        self.table[at] = Some(new);
    }

    fn get(&mut self, at: usize, urgency: Urgency) {
        let Some(Entry { handle, content, .. }) = self.table[at] else { return };
        let mut got = [0xee; PAGE_BYTES];
        match self.store.get(handle, urgency, &mut got) {
            Ok(Got::Here) => self.check(content, &got),
            Ok(Got::Pending) => self.table[at].as_mut().expect("just seen").getting = true,
            Err(error) => panic!("{error}"),
        }
    }

    fn check(&mut self, content: u64, got: &Page) {
        assert!(*got == page(content), "not the page that was put: {content}");
        self.got += 1;
    }

    /// To another entry, as a fork does.
    fn share(&mut self, from: usize) {
        let to = usize::try_from(self.below(ENTRIES as u64)).unwrap();
        let Some(entry) = self.table[from].filter(|_| from != to) else { return };
        let handle = self.store.share(entry.handle);
        self.free(to);
        self.table[to] = Some(Entry { handle, getting: false, ..entry });
    }

    fn free(&mut self, at: usize) {
        if let Some(entry) = self.table[at].take() {
            self.store.free(entry.handle);
        }
    }

    fn progress(&mut self) {
        let mut done: Vec<(Handle, Outcome)> = Vec::new();
        self.store.progress(&mut |completion| match completion {
            Completion::Got { handle, page } => done.push((handle, page.map(|page| Some(Box::new(*page))))),
            Completion::Put { handle, result } => done.push((handle, result.map(|()| None))),
        });
        for (handle, result) in done {
            self.complete(handle, &result);
        }
    }

    fn complete(&mut self, handle: Handle, result: &Outcome) {
        let entries: Vec<usize> =
            (0..ENTRIES).filter(|at| self.table[*at].is_some_and(|entry| entry.handle == handle)).collect();
        assert!(!entries.is_empty(), "a completion for what was freed");
        for at in entries {
            let entry = self.table[at].as_mut().expect("just seen");
            match result {
                Ok(Some(page)) => {
                    entry.getting = false;
                    let content = entry.content;
                    self.check(content, page);
                }
                Ok(None) => {
                    assert!(entry.putting, "a put completes once");
                    entry.putting = false;
                }
                Err(StoreError::Full | StoreError::Unavailable) => {
                    assert!(entry.putting, "only puts are declined");
                    self.declined += 1;
                    self.table[at] = None;
                }
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn is_settled(&self) -> bool {
        self.table.iter().flatten().all(|entry| !entry.putting && !entry.getting)
    }

    /// Waits until everything is complete.
    fn settle(&mut self) {
        let started = std::time::Instant::now();
        while !self.is_settled() {
            self.store.flush();
            self.progress();
            assert!(started.elapsed().as_secs() < 30, "something is never completed");
            std::thread::sleep(std::time::Duration::from_micros(50));
        }
    }
}

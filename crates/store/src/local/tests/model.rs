//! Random histories against a table that simply remembers.

use std::collections::{HashMap, HashSet};

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

/// Entries of the page table.
const ENTRIES: usize = 24;
/// Different pages: few, so that the same ones meet often.
const CONTENTS: usize = 10;

#[derive(Clone, Copy, Debug)]
enum Op {
    Put {
        entry: usize,
        content: usize,
    },
    Get {
        entry: usize,
    },
    Share {
        from: usize,
        to: usize,
    },
    Free {
        entry: usize,
    },
    /// Begins to compare an entry's copy with what it is to hold next.
    Lend {
        entry: usize,
        content: usize,
    },
    /// Puts what was compared.
    PutLent,
    Tidy,
    TopUp,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let entry = 0..ENTRIES;
    let op = prop_oneof![
        8 => (entry.clone(), 0..CONTENTS).prop_map(|(entry, content)| Op::Put { entry, content }),
        2 => entry.clone().prop_map(|entry| Op::Get { entry }),
        2 => (entry.clone(), entry.clone()).prop_map(|(from, to)| Op::Share { from, to }),
        3 => entry.clone().prop_map(|entry| Op::Free { entry }),
        4 => (entry, 0..CONTENTS).prop_map(|(entry, content)| Op::Lend { entry, content }),
        1 => Just(Op::PutLent),
        1 => Just(Op::Tidy),
        1 => Just(Op::TopUp),
    ];
    vec(op, 1..300)
}

fn configs() -> impl Strategy<Value = Config> {
    (any::<bool>(), any::<bool>()).prop_map(|(lz4, dedupe)| Config {
        compression: if lz4 { Compression::Lz4 } else { Compression::None },
        dedupe,
        size_bytes: None,
    })
}

/// From one repeated byte to incompressible.
fn content(number: usize) -> Page {
    page(number, PAGE_BYTES * (number % 5) / 4)
}

struct Model {
    pool: Local,
    refill: Refill,
    /// What each entry holds, and under which handle.
    table: [Option<(Handle, usize)>; ENTRIES],
    preparer: Preparer,
    /// Entries whose copies are lent, and what they are to hold; not those that changed since.
    lent: Vec<(usize, usize, Option<Lent>)>,
}

impl Model {
    fn apply(&mut self, op: Op) {
        match op {
            Op::Put { entry, content: number } => self.put(entry, number),
            Op::Get { entry } => self.get(entry),
            Op::Share { from, to } => {
                if let Some((handle, number)) = self.table[from] {
                    let shared = self.pool.share(handle);
                    self.free(to);
                    self.table[to] = Some((shared, number));
                }
            }
            Op::Free { entry } => self.free(entry),
            Op::Lend { entry, content } => {
                if let Some((handle, _)) = self.table[entry] {
                    let lent = self.pool.lend(handle, &mut self.preparer);
                    self.lent.push((entry, content, lent));
                }
            }
            Op::PutLent => self.put_lent(),
            Op::Tidy => {
                self.pool.tidy();
            }
            Op::TopUp => assert!(self.refill.top_up()),
        }
    }

    fn put(&mut self, entry: usize, number: usize) {
        self.put_with(entry, number, &Prepared::default());
    }

    fn put_lent(&mut self) {
        let mut prepared = Vec::new();
        for (entry, number, lent) in std::mem::take(&mut self.lent) {
            let mut known = Prepared::default();
            self.preparer.prepare(&content(number), lent, &mut known);
            prepared.push((entry, number, known));
        }
        self.preparer.give_back();
        for (at, (entry, number, known)) in prepared.iter().enumerate() {
            if prepared[..at].iter().all(|(before, ..)| before != entry) {
                self.put_with(*entry, *number, known);
                self.check();
            }
        }
    }

    fn put_with(&mut self, entry: usize, number: usize, known: &Prepared) {
        self.lent.retain(|(lent, ..)| *lent != entry);
        let previous = self.table[entry];
        let put = self.pool.put_prepared(&content(number), known, previous.map(|(handle, _)| handle)).unwrap();
        let handle = match (put, previous) {
            (Put::Unchanged(handle), Some((before, same))) => {
                assert_eq!((handle, number), (before, same));
                handle
            }
            (Put::Stored(handle), previous) => {
                assert!(previous.is_none_or(|(_, before)| before != number), "it was unchanged");
                handle
            }
            (Put::Unchanged(_), None) => panic!("unchanged from nothing"),
            (Put::Pending(_), _) => panic!("this pool answers at once"),
        };
        self.table[entry] = Some((handle, number));
    }

    fn get(&mut self, entry: usize) {
        if let Some((handle, number)) = self.table[entry] {
            assert_holds(&mut self.pool, handle, &content(number));
        }
    }

    fn free(&mut self, entry: usize) {
        self.lent.retain(|(lent, ..)| *lent != entry);
        if let Some((handle, _)) = self.table[entry].take() {
            self.pool.free(handle);
        }
    }

    fn check(&self) {
        let held: Vec<(Handle, usize)> = self.table.iter().flatten().copied().collect();
        assert_eq!(self.pool.status().stored_bytes, (held.len() * PAGE_BYTES) as u64);
        let by_handle: HashMap<Handle, usize> = held.iter().copied().collect();
        for (handle, number) in &held {
            assert_eq!(by_handle[handle], *number, "one handle, two contents");
        }
        if self.pool.config.dedupe {
            let numbers: HashSet<usize> = held.iter().map(|(_, number)| *number).collect();
            assert_eq!(by_handle.len(), numbers.len(), "one content, two handles");
        }
        self.pool.arena.check();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// The hash is weakened to none, two or all of its bits.
    #[test]
    fn histories_agree(ops in ops(), config in configs(), mask in prop_oneof![Just(0), Just(3 << 60), Just(u64::MAX)]) {
        let (pool, refill) = Local::with_hash(config, PageHash::weak(mask));
        let preparer = pool.preparer().expect("this pool has one");
        let mut model = Model { pool, refill, table: [None; ENTRIES], preparer, lent: Vec::new() };
        for op in ops {
            model.apply(op);
            model.check();
        }
        model.put_lent();
        for entry in 0..ENTRIES {
            model.get(entry);
        }
        for entry in 0..ENTRIES {
            model.free(entry);
            model.check();
        }
        model.pool.tidy();
        let status = model.pool.local_status();
        prop_assert_eq!((status.status.stored_bytes, status.status.stored_compressed_bytes), (0, 0));
        prop_assert!(status.segments <= 1);
    }
}

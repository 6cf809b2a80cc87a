//! A ring of records from one thread to another, without a lock: the fault thread puts records in, somebody takes them
//! out. What finds no room is counted and dropped; putting in never waits.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::record::{Raw, Record, VALUE_MAX, What};

/// A record in three words: time; page; tag and value.
type Slot = [AtomicU64; 3];

struct Ring {
    slots: Box<[Slot]>,
    /// Records ever put in; written by the producer alone.
    head: AtomicU64,
    /// Records ever taken out; written by the consumer alone.
    tail: AtomicU64,
    /// Records dropped; written by the producer alone.
    dropped: AtomicU64,
}

/// The end that records go into.
pub struct Producer(Arc<Ring>);

/// The end that they come out of.
pub struct Consumer {
    ring: Arc<Ring>,
    dropped_seen: u64,
}

/// A ring for `slots` records at a time.
///
/// # Panics
/// When `slots` is zero.
pub fn ring(slots: usize) -> (Producer, Consumer) {
    assert!(slots > 0, "a ring without room drops everything");
    let slots = (0..slots).map(|_| Slot::default()).collect();
    let ring = Ring { slots, head: AtomicU64::new(0), tail: AtomicU64::new(0), dropped: AtomicU64::new(0) };
    let ring = Arc::new(ring);
    (Producer(Arc::clone(&ring)), Consumer { ring, dropped_seen: 0 })
}

impl Ring {
    fn slot(&self, number: u64) -> &Slot {
        let slots = self.slots.len() as u64;
        &self.slots[usize::try_from(number % slots).expect("below the number of slots")]
    }
}

impl Producer {
    /// Puts a record in, or counts it as dropped. Needs exclusive use: there is one producer.
    pub fn put(&mut self, record: Record) {
        let ring = &*self.0;
        let head = ring.head.load(Relaxed);
        if head - ring.tail.load(Acquire) >= ring.slots.len() as u64 {
            ring.dropped.store(ring.dropped.load(Relaxed) + 1, Relaxed);
            return;
        }
        let Raw { tag, page, value } = record.what.into();
        let words = [record.time_ns, page, u64::from(tag) << 56 | value & VALUE_MAX];
        ring.slot(head).iter().zip(words).for_each(|(to, word)| to.store(word, Relaxed));
        ring.head.store(head + 1, Release);
    }
}

impl Consumer {
    /// Takes the oldest record out.
    pub fn take(&mut self) -> Option<Record> {
        let ring = &*self.ring;
        let tail = ring.tail.load(Relaxed);
        if tail == ring.head.load(Acquire) {
            return None;
        }
        let [time_ns, page, rest] = ring.slot(tail).each_ref().map(|word| word.load(Relaxed));
        ring.tail.store(tail + 1, Release);
        let tag = u8::try_from(rest >> 56).expect("eight bits are left");
        let what = Raw { tag, page, value: rest & VALUE_MAX }.what();
        // The producer makes pages from indices, which a target can spread over all of its address space and no further.
        Some(Record { time_ns, what: what.unwrap_or(What::Dropped { count: 1 }) })
    }

    /// How many records were dropped since this was last asked.
    pub fn dropped(&mut self) -> u64 {
        let all = self.ring.dropped.load(Relaxed);
        all - std::mem::replace(&mut self.dropped_seen, all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn evicted(page: u64) -> Record {
        Record { time_ns: page * 3, what: What::Evicted { page, pages: 1 } }
    }

    #[test]
    fn a_full_ring_drops_what_comes_and_says_so() {
        let (mut producer, mut consumer) = ring(3);
        (0..5).for_each(|page| producer.put(evicted(page)));
        assert_eq!((consumer.dropped(), consumer.dropped()), (2, 0));
        assert_eq!(consumer.take(), Some(evicted(0)));
        producer.put(evicted(9));
        let rest: Vec<_> = std::iter::from_fn(|| consumer.take()).collect();
        assert_eq!(rest, [evicted(1), evicted(2), evicted(9)]);
    }

    #[test]
    fn between_threads_every_record_arrives_or_is_counted() {
        const RECORDS: u64 = 200_000;
        let (mut producer, mut consumer) = ring(64);
        let from = std::thread::spawn(move || (0..RECORDS).for_each(|page| producer.put(evicted(page))));
        let (mut seen, mut next) = (0, 0);
        loop {
            let ended = from.is_finished();
            while let Some(record) = consumer.take() {
                let What::Evicted { page, .. } = record.what else { panic!("{record:?}") };
                assert_eq!(record, evicted(page));
                assert!(page >= next, "in order");
                (next, seen) = (page + 1, seen + 1);
            }
            if ended {
                break;
            }
        }
        from.join().expect("no panic");
        assert_eq!(seen + consumer.dropped(), RECORDS);
    }
}

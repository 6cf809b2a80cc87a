//! Nanoseconds per operation of the embedded pool with many pages stored, so that its tables are cache-cold.
//!
//! `cargo bench -p spillway-store [-- PAGES]`. Every operation picks a page at random; the median and the best of several
//! rounds are printed. Before them the bare parts, to tell the pool's share from that of lz4 and the hash; after them the
//! longest puts, with a thread that keeps segments ready, as the pool is meant to be used.

use std::hint::black_box;
use std::time::{Duration, Instant};

use lz4_flex::block::{CompressTable, compress_into_with_table, decompress_into, get_maximum_output_size};
use spillway_core::{PAGE_BYTES, Page};
use spillway_store::local::{Config, Local};
use spillway_store::{Handle, Put, Store, Urgency, is_zero};
use twox_hash::XxHash3_64;

/// Operations in a round.
const ROUND: usize = 50_000;
const ROUNDS: usize = 7;

fn main() {
    let pages = std::env::args().skip(1).find_map(|arg| arg.parse().ok()).unwrap_or(500_000);
    println!("{pages} pages stored; ns per operation, median (best) of {ROUNDS} rounds of {ROUND}");
    for kind in [Kind::Half, Kind::Records, Kind::Random] {
        println!("\n{}", kind.name());
        parts(kind);
        pool(kind, pages);
    }
    println!();
    longest(pages);
}

/// What pages hold.
#[derive(Clone, Copy)]
enum Kind {
    /// 2 KiB of random bytes, then one byte repeated.
    Half,
    /// 16-byte records: a pointer-like word with three random bytes, and a small number.
    Records,
    /// Incompressible.
    Random,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Half => "half random, half constant",
            Self::Records => "records",
            Self::Random => "random",
        }
    }

    fn page(self, number: u64) -> Page {
        let mut random = Random(number + 1);
        let mut page = [0xa5; PAGE_BYTES];
        match self {
            Self::Half => random.fill(&mut page[..PAGE_BYTES / 2]),
            Self::Records => {
                for record in page.chunks_exact_mut(16) {
                    record[..8].copy_from_slice(&(0x7f00_0000_0000 | random.next() >> 40).to_le_bytes());
                    record[8..].copy_from_slice(&(random.next() >> 58).to_le_bytes());
                }
            }
            Self::Random => random.fill(&mut page),
        }
        page
    }
}

/// SplitMix64: reproducible, and good enough to be incompressible.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    fn fill(&mut self, bytes: &mut [u8]) {
        for word in bytes.chunks_exact_mut(8) {
            word.copy_from_slice(&self.next().to_le_bytes());
        }
    }

    fn below(&mut self, limit: usize) -> usize {
        usize::try_from((u128::from(self.next()) * limit as u128) >> 64).expect("below a usize")
    }
}

/// Prints the time of `operation`, which is called with prepared inputs only inside the clock.
fn measure<T>(name: &str, mut prepare: impl FnMut() -> T, mut operation: impl FnMut(T)) {
    // Inputs are made in batches, as a clock reading takes longer than some operations.
    const BATCH: usize = 250;
    let mut rounds: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let mut elapsed = 0.0;
            for _ in 0..ROUND / BATCH {
                let inputs: Vec<T> = (0..BATCH).map(|_| prepare()).collect();
                let start = Instant::now();
                inputs.into_iter().for_each(&mut operation);
                elapsed += start.elapsed().as_secs_f64();
            }
            elapsed * 1e9 / ROUND as f64
        })
        .collect();
    rounds.sort_by(f64::total_cmp);
    println!("  {name:<34} {:>6.0} ({:.0})", rounds[ROUNDS / 2], rounds[0]);
}

/// The parts that a pool cannot do without.
fn parts(kind: Kind) {
    let mut number = 0;
    let mut fresh = || {
        number += 1;
        kind.page(number)
    };
    let mut table = CompressTable::small();
    let mut packed = [0; get_maximum_output_size(PAGE_BYTES)];
    let mut len = 0;
    measure("  lz4 compress", &mut fresh, |page| {
        len = compress_into_with_table(&page, &mut packed, &mut table).unwrap();
    });
    println!("    compressed bytes                   {len:>6}");
    let mut page = [0; PAGE_BYTES];
    measure(
        "  lz4 decompress",
        || (),
        |()| {
            black_box(decompress_into(black_box(&packed[..len]), &mut page).unwrap());
        },
    );
    let secret = [7; 192];
    measure("  xxh3-64", &mut fresh, |page| {
        black_box(XxHash3_64::oneshot_with_secret(&secret, &page)).expect("the secret is long enough");
    });
    measure(
        "  is_zero of zeros",
        || (),
        |()| {
            black_box(is_zero(black_box(&[0; PAGE_BYTES])));
        },
    );
}

fn pool(kind: Kind, pages: usize) {
    let (mut pool, mut refill) = Local::new(Config::default());
    let mut handles: Vec<Handle> = (0..pages)
        .map(|number| {
            if number % 200 == 0 {
                refill.top_up();
            }
            put(&mut pool, &kind.page(number as u64), None)
        })
        .collect();
    let mut versions: Vec<u64> = (0..pages as u64).collect();
    let mut random = Random(1);
    let mut next = pages as u64;

    let mut got = [0; PAGE_BYTES];
    measure(
        "get",
        || handles[random.below(pages)],
        |handle| {
            pool.get(handle, Urgency::Demand, &mut got).unwrap();
        },
    );
    measure(
        "put unchanged",
        || {
            let at = random.below(pages);
            (kind.page(versions[at]), handles[at])
        },
        |(page, handle)| assert_eq!(pool.put(&page, Some(handle)), Ok(Put::Unchanged(handle))),
    );
    let mut shared = Vec::new();
    measure(
        "put, dedupe hit",
        || kind.page(versions[random.below(pages)]),
        |page| shared.push(put(&mut pool, &page, None)),
    );
    shared.into_iter().for_each(|handle| pool.free(handle));
    measure(
        "put, previous differs",
        || {
            next += 1;
            let at = random.below(pages);
            versions[at] = next;
            (kind.page(next), at)
        },
        |(page, at)| handles[at] = put(&mut pool, &page, Some(handles[at])),
    );
    let mut fresh = Vec::new();
    refill.top_up();
    measure(
        "put fresh, pool growing",
        || {
            next += 1;
            if next.is_multiple_of(250) {
                refill.top_up();
            }
            kind.page(next)
        },
        |page| fresh.push(put(&mut pool, &page, None)),
    );
    let mut fresh = fresh.into_iter();
    measure(
        "free",
        || {
            refill.top_up();
            fresh.next().unwrap()
        },
        |handle| pool.free(handle),
    );

    let status = pool.local_status();
    let (live, memory) = (status.status.stored_compressed_bytes as f64, status.status.memory_bytes as f64);
    println!("  bytes a page: {:.0} live, {:.0} in all", live / pages as f64, memory / pages as f64);
    println!("  segments made inline: {}", status.inline_segments);
}

/// Each put by itself, 100,000 a second, while the pool grows from nothing and then has half of its pages replaced.
fn longest(pages: usize) {
    let (mut pool, refill) = Local::new(Config::default());
    let background = std::thread::spawn(move || refill.run());
    let mut random = Random(2);
    let mut handles = vec![None; pages];
    let mut times = Vec::with_capacity(pages * 3 / 2);
    let mut due = Instant::now();
    for number in 0..pages * 3 / 2 {
        let at = if number < pages { number } else { random.below(pages) };
        let page = Kind::Half.page(number as u64);
        due += Duration::from_micros(10);
        while Instant::now() < due {
            std::hint::spin_loop();
        }
        let start = Instant::now();
        handles[at] = Some(put(&mut pool, &page, handles[at]));
        times.push(start.elapsed());
    }
    times.sort_unstable();
    let [p50, p99, p999, p9999] = [2, 100, 1000, 10_000].map(|share| times[times.len() - 1 - times.len() / share]);
    let (longest, inline_segments) = (times[times.len() - 1], pool.local_status().inline_segments);
    println!("one put: p50 {p50:?}, p99 {p99:?}, p99.9 {p999:?}, p99.99 {p9999:?}, longest {longest:?}");
    println!("segments made inline: {inline_segments}");
    drop(pool);
    background.join().unwrap();
}

fn put(pool: &mut Local, page: &Page, previous: Option<Handle>) -> Handle {
    match pool.put(page, previous) {
        Ok(Put::Stored(handle) | Put::Unchanged(handle)) => handle,
        other => panic!("{other:?}"),
    }
}

//! `spillway bench-walk`: the program under comparison. It fills memory, touches it in one order, goes through it, and says
//! what an access cost.
//!
//! Invariants: each word that an access reads is verified at once, and all bytes of all pages at the end, after the clock
//! has stopped. Accesses begin a moment after the memory was filled, when what is too much has been evicted. What is timed is the touch alone, not its verification. One JSON object on standard output; exit status 1
//! when a byte was wrong.

use super::content::Pages;
use super::figures::{Figures, percentiles, table};
use super::order::{Chooser, Order, Zipf};
use crate::failure::{FAILED, Failure};
use crate::say;
use hdrhistogram::Histogram;
use spillway_core::PAGE_BYTES_U64;
use spillway_core::size::{Bytes, parse_bytes};
use std::io::BufRead;
use std::time::{Duration, Instant};

/// The least that the orders make sense for.
const PAGES_LEAST: u64 = 64;
/// Between filling the memory and the first access. A pager finds new memory by looking, so a program that fills memory and
/// ends within some tens of milliseconds may be over before its budget is enforced.
const SETTLE: Duration = Duration::from_millis(100);
/// The most threads: beyond, they would only wait for each other.
const THREADS_MOST: u16 = 256;

/// What the workload is given.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// How much memory it touches
    #[arg(long, value_name = "SIZE", default_value = "512M")]
    size: String,
    /// In which order
    #[arg(long, value_enum, default_value = "uniform")]
    order: Order,
    /// How often, all threads together
    #[arg(long, value_name = "COUNT", default_value_t = 200_000)]
    accesses: u64,
    /// No longer than this
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0)]
    seconds: f64,
    /// How many of 100 accesses also write
    #[arg(long, value_name = "PERCENT", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=100))]
    write: u8,
    /// How many threads touch it
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=i64::from(THREADS_MOST)))]
    threads: u16,
    /// How much of each page does not compress
    #[arg(long, value_name = "PERCENT", default_value_t = 50, value_parser = clap::value_parser!(u8).range(0..=100))]
    noise: u8,
    /// Begin when a line comes on standard input
    #[arg(long)]
    wait: bool,
    /// Change a bit behind its own back, to see that it is told
    #[arg(long, hide = true)]
    spoil: bool,
}

/// Runs the workload, and prints its figures.
pub(crate) fn walk(args: &Args) -> Result<u8, Failure> {
    let bytes = parse_bytes(&args.size).map_err(|error| Failure::refused(error.to_string()))?;
    let pages = bytes / PAGE_BYTES_U64;
    if pages < PAGES_LEAST {
        let least = Bytes(PAGES_LEAST * PAGE_BYTES_U64);
        return Err(Failure::refused(format!("--size {} is too little to measure: give {least} or more", args.size)));
    }
    if args.accesses == 0 {
        return Err(Failure::refused("--accesses 0 measures nothing: give one at least"));
    }
    let failed = |error: std::io::Error| Failure::new(FAILED, format!("the workload: {}", say::error(&error)));
    if args.wait {
        std::io::stdin().lock().read_line(&mut String::new()).map_err(failed)?;
    }
    let count = usize::try_from(pages).map_err(|_| Failure::refused("--size is beyond this machine"))?;
    let figures = measure(args, &Pages::new(count, args.noise.into()).map_err(failed)?);
    let text = serde_json::to_string(&figures).map_err(|error| Failure::new(FAILED, error.to_string()))?;
    say::print(&(text + "\n"))?;
    Ok(u8::from(figures.wrong > 0))
}

fn measure(args: &Args, pages: &Pages) -> Figures {
    let each = |began: Instant| micros(began.elapsed()) / pages.count() as f64;
    let zipf = Zipf::new(pages.count());
    let began = Instant::now();
    (0..pages.count()).for_each(|page| pages.fill(page));
    let first_touch_us = each(began);
    if args.spoil {
        pages.spoil(pages.count() / 2);
    }

    std::thread::sleep(SETTLE);
    let accesses = args.accesses.div_ceil(args.threads.into());
    let began = Instant::now();
    let until = began + Duration::from_secs_f64(args.seconds.clamp(0.0, 86_400.0));
    let walked = std::thread::scope(|scope| {
        let start = |number: u16| {
            let threads = args.threads.into();
            let chooser = Chooser::new(args.order, &zipf, pages.count(), accesses, number.into(), threads);
            scope.spawn(move || walk_one(pages, chooser, accesses, args.write.into(), until))
        };
        let started: Vec<_> = (0..args.threads).map(start).collect();
        let ended = started.into_iter().map(|thread| thread.join().unwrap_or_else(|p| std::panic::resume_unwind(p)));
        ended.fold(Walked::new(), |all, one| all.and(&one))
    });
    let accesses_s = began.elapsed().as_secs_f64();

    let began = Instant::now();
    let read = |page: usize| pages.read(page, page as u64);
    let passed = (0..pages.count()).filter(|&page| {
        let (word, at) = read(page);
        word != pages.expected(page, at)
    });
    let scanned_wrong = passed.count() as u64;
    let scan_us = each(began);
    let pages_wrong = (0..pages.count()).filter(|&page| !pages.is_right(page)).count() as u64;

    let [p50_us, p99_us, p999_us] = percentiles(&walked.times, [0.5, 0.99, 0.999]);
    Figures {
        pages: pages.count() as u64,
        accesses: walked.times.len(),
        writes: walked.writes,
        first_touch_us,
        mean_us: walked.sum_ns as f64 / 1e3 / walked.times.len().max(1) as f64,
        p50_us,
        p99_us,
        p999_us,
        max_us: walked.largest_ns as f64 / 1e3,
        accesses_per_s: walked.times.len() as f64 / accesses_s.max(f64::EPSILON),
        scan_us,
        wrong: walked.wrong + scanned_wrong + pages_wrong,
        local_peak_bytes: None,
        histogram_ns: table(&walked.times),
    }
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// What a thread saw.
struct Walked {
    times: Histogram<u64>,
    sum_ns: u64,
    largest_ns: u64,
    writes: u64,
    wrong: u64,
}

impl Walked {
    fn new() -> Self {
        Self { times: super::figures::histogram(), sum_ns: 0, largest_ns: 0, writes: 0, wrong: 0 }
    }

    fn and(mut self, other: &Self) -> Self {
        // Both have the same bounds.
        let _ = self.times.add(&other.times);
        self.sum_ns += other.sum_ns;
        self.largest_ns = self.largest_ns.max(other.largest_ns);
        self.writes += other.writes;
        self.wrong += other.wrong;
        self
    }
}

fn walk_one(pages: &Pages, mut chooser: Chooser<'_>, accesses: u64, write_percent: u64, until: Instant) -> Walked {
    let mut walked = Walked::new();
    for access in 0..accesses {
        let (page, dice) = (chooser.page(access), chooser.dice());
        let writes = dice % 100 < write_percent;
        let began = Instant::now();
        let (word, at) = pages.read(page, dice >> 32);
        if writes {
            pages.write(page);
        }
        let ended = Instant::now();
        let ns = u64::try_from((ended - began).as_nanos()).unwrap_or(u64::MAX);
        walked.times.saturating_record(ns);
        walked.sum_ns += ns;
        walked.largest_ns = walked.largest_ns.max(ns);
        walked.wrong += u64::from(word != pages.expected(page, at));
        if writes {
            pages.wrote(page);
            walked.writes += 1;
        }
        if ended >= until {
            break;
        }
    }
    walked
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args() -> Args {
        Args {
            size: "1M".into(),
            order: Order::Uniform,
            accesses: 10_000,
            seconds: 60.0,
            write: 30,
            threads: 2,
            noise: 50,
            wait: false,
            spoil: false,
        }
    }

    #[test]
    fn a_walk_measures_and_finds_nothing_wrong() {
        let figures = measure(&args(), &Pages::new(256, 50).expect("memory"));
        assert_eq!((figures.pages, figures.accesses, figures.wrong), (256, 10_000, 0));
        assert!((2_500..3_500).contains(&figures.writes), "{}", figures.writes);
        assert!(figures.p50_us <= figures.p99_us && figures.p99_us <= figures.p999_us);
        assert!(figures.p999_us <= figures.max_us * 1.02, "{figures:?}");
        assert_eq!(figures.histogram_ns.iter().map(|(_, count)| count).sum::<u64>(), 10_000);
        let timed = Args { accesses: u64::MAX, seconds: 0.01, ..args() };
        assert!(measure(&timed, &Pages::new(256, 50).expect("memory")).accesses < 10_000_000);
    }

    #[test]
    fn a_wrong_bit_is_told() {
        let spoilt = Args { spoil: true, ..args() };
        assert!(measure(&spoilt, &Pages::new(256, 50).expect("memory")).wrong > 0);
    }
}

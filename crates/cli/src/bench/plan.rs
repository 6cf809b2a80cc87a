//! Which workloads are compared, at which sizes, and how long that takes.

use super::modes::Mode;
use super::order::Order;
use spillway_core::PAGE_BYTES_U64;
use std::time::Duration;

/// A workload and its share of local memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Case {
    pub(super) order: Order,
    pub(super) write_percent: u8,
    pub(super) threads: u16,
    /// Of its memory, what may be local.
    pub(super) local_percent: u64,
}

impl Case {
    const fn new(order: Order, write_percent: u8, threads: u16, local_percent: u64) -> Self {
        Self { order, write_percent, threads, local_percent }
    }

    /// The workload, whatever its local share.
    pub(super) fn workload(self) -> String {
        let order = format!("{:?}", self.order).to_lowercase();
        let writes = if self.write_percent > 0 { format!(", {} % writes", self.write_percent) } else { String::new() };
        let threads = if self.threads > 1 { format!(", {} threads", self.threads) } else { String::new() };
        order + &writes + &threads
    }

    /// As people read it.
    pub(super) fn title(self) -> String {
        format!("{}, {} % local", self.workload(), self.local_percent)
    }
}

/// One minute's worth: half local, and one workload with more and less.
const QUICK: [Case; 5] = [
    Case::new(Order::Uniform, 0, 1, 50),
    Case::new(Order::Sequential, 0, 1, 50),
    Case::new(Order::Zipf, 30, 1, 25),
    Case::new(Order::Zipf, 30, 1, 50),
    Case::new(Order::Zipf, 30, 1, 75),
];

const FULL: [Case; 10] = [
    Case::new(Order::Uniform, 0, 1, 25),
    Case::new(Order::Uniform, 0, 1, 50),
    Case::new(Order::Uniform, 0, 1, 75),
    Case::new(Order::Zipf, 30, 1, 25),
    Case::new(Order::Zipf, 30, 1, 50),
    Case::new(Order::Zipf, 30, 1, 75),
    Case::new(Order::Sequential, 0, 1, 50),
    Case::new(Order::Strided, 0, 1, 50),
    Case::new(Order::Phased, 10, 1, 50),
    Case::new(Order::Uniform, 0, 2, 50),
];

/// What is to be done.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) cases: Vec<Case>,
    /// Bytes that a workload touches.
    pub(super) size: u64,
    /// Accesses of a run, and the longest time for them.
    pub(super) accesses: u64,
    pub(super) seconds: f64,
    /// Rounds at most, and at least.
    pub(super) rounds: (u32, u32),
    /// No round begins that would end later than this.
    pub(super) budget: Duration,
}

impl Plan {
    /// One that ends within a minute.
    pub(super) fn quick() -> Self {
        let budget = Duration::from_secs(55);
        Self { cases: QUICK.to_vec(), size: 64 << 20, accesses: 40_000, seconds: 1.0, rounds: (5, 1), budget }
    }

    /// One that ends within about ten minutes, and has a spread to tell.
    pub(super) fn full() -> Self {
        let budget = Duration::from_secs(570);
        Self { cases: FULL.to_vec(), size: 128 << 20, accesses: 100_000, seconds: 2.0, rounds: (5, 3), budget }
    }

    /// So many rounds, whatever time they take.
    pub(super) fn set_rounds(&mut self, rounds: u32) {
        (self.rounds, self.budget) = ((rounds, rounds), Duration::MAX);
    }

    /// Whether one more round is to begin, when so many are done and the last took so long.
    pub(super) fn goes_on(&self, done: u32, spent: Duration, last: Duration) -> bool {
        done < self.rounds.1 || (done < self.rounds.0 && spent + last < self.budget)
    }

    /// About how long the rest takes.
    pub(super) fn left(&self, done: u32, spent: Duration, last: Duration) -> Duration {
        let more = (done + 1..=self.rounds.0)
            .take_while(|&next| self.goes_on(next - 1, spent + last * (next - 1 - done), last));
        last * u32::try_from(more.count()).unwrap_or(u32::MAX)
    }

    /// About how long all takes: a guess, before anything was measured. Seconds a mode for 128 MiB on a small virtual machine, and what
    /// programs take in a round.
    pub(super) fn guess(&self, modes: &[Mode], programs: Duration) -> Duration {
        let cost = |mode: &Mode| match mode {
            Mode::Native => 0.3,
            Mode::Zram | Mode::Local | Mode::Base => 1.2,
            Mode::File | Mode::Tcp | Mode::Memcached => 1.8,
        };
        let size = self.size as f64 / f64::from(128 << 20);
        let round = modes.iter().map(cost).sum::<f64>() * size * self.cases.len() as f64 + programs.as_secs_f64();
        let rounds = (self.budget.as_secs_f64() / round).floor().clamp(self.rounds.1.into(), self.rounds.0.into());
        Duration::from_secs_f64(round * rounds)
    }
}

/// One run of a workload.
#[derive(Clone, Copy, Debug)]
pub(super) struct Work {
    pub(super) case: Case,
    /// Bytes that it touches, and that may be local.
    pub(super) size: u64,
    pub(super) local: u64,
    pub(super) accesses: u64,
    pub(super) seconds: f64,
}

impl Work {
    /// A case of a plan.
    pub(super) fn of(plan: &Plan, case: Case) -> Self {
        let local = (plan.size * case.local_percent / 100).next_multiple_of(PAGE_BYTES_U64);
        Self { case, size: plan.size, local, accesses: plan.accesses, seconds: plan.seconds }
    }

    /// What the workload is told.
    pub(super) fn words(&self) -> Vec<String> {
        let order = format!("{:?}", self.case.order).to_lowercase();
        let told = [
            ("--size", self.size.to_string()),
            ("--order", order),
            ("--accesses", self.accesses.to_string()),
            ("--seconds", self.seconds.to_string()),
            ("--write", self.case.write_percent.to_string()),
            ("--threads", self.case.threads.to_string()),
        ];
        told.into_iter().flat_map(|(name, value)| [name.to_owned(), value]).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_go_on_while_there_is_time() {
        let second = Duration::from_secs(1);
        let quick = Plan::quick();
        assert!(quick.goes_on(0, second * 100, second));
        assert!(quick.goes_on(1, second * 20, second * 20) && !quick.goes_on(1, second * 40, second * 20));
        assert!(!quick.goes_on(5, second, second));
        assert_eq!(quick.left(1, second * 10, second * 10), second * 40);
        assert_eq!(quick.left(3, second * 3, second), second * 2);
        let mut fixed = Plan::quick();
        fixed.set_rounds(2);
        assert!(fixed.goes_on(1, second * 1000, second * 1000) && !fixed.goes_on(2, second, second));
        assert!(
            Plan::quick().guess(&Mode::ALL, Duration::ZERO) <= second * 60
                && Plan::full().guess(&Mode::ALL, Duration::ZERO) <= second * 600
        );
    }

    #[test]
    fn cases_have_names() {
        assert_eq!(QUICK[2].title(), "zipf, 30 % writes, 25 % local");
        assert_eq!(FULL[9].workload(), "uniform, 2 threads");
        assert_eq!(Work::of(&Plan::quick(), QUICK[0]).local, 32 << 20);
    }
}

//! What a comparison found: every run, and what follows from them.
//!
//! Invariant: a ratio is of two runs of one round, so that what slows the machine for a while slows both.

use super::figures::{self, Figures, Timed};
use super::machine::Machine;
use super::modes::{Mode, Run};
use super::plan::Case;
use super::programs::{Program, Timings};
use hdrhistogram::Histogram;
use serde::Serialize;
use std::collections::BTreeMap;

/// A figure of a run; no number where it has none.
pub(super) type Figure<F = Figures> = fn(&F) -> f64;

/// What is shown: its name in JSON, and its heading.
pub(super) const SHOWN: [(&str, &str, Figure); 9] = [
    ("first_touch_us", "first touch", |of| of.first_touch_us),
    ("mean_us", "mean", |of| of.mean_us),
    ("p50_us", "p50", |of| of.p50_us),
    ("p99_us", "p99", |of| of.p99_us),
    ("p999_us", "p99.9", |of| of.p999_us),
    ("max_us", "max", |of| of.max_us),
    ("accesses_per_s", "accesses/s", |of| of.accesses_per_s),
    ("scan_us", "scan", |of| of.scan_us),
    ("local_peak_mib", "peak MiB", |of| {
        of.local_peak_bytes.map_or(f64::NAN, |bytes| bytes as f64 / f64::from(1 << 20))
    }),
];

/// The median of some figures, and between which they were.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Median {
    pub(super) median: f64,
    pub(super) min: f64,
    pub(super) max: f64,
}

impl Median {
    /// `None` of nothing.
    pub(super) fn of(mut figures: Vec<f64>) -> Option<Self> {
        figures.retain(|figure| figure.is_finite());
        figures.sort_by(f64::total_cmp);
        let (&min, &max) = (figures.first()?, figures.last()?);
        let (low, high) = (figures[(figures.len() - 1) / 2], figures[figures.len() / 2]);
        Some(Self { median: f64::midpoint(low, high), min, max })
    }
}

/// All runs of one mode in one case.
pub(super) struct Runs<F = Figures> {
    /// By round; none where the run failed.
    rounds: Vec<Option<F>>,
    /// How often a run had to begin again.
    pub(super) repeated: u32,
}

impl<F> Default for Runs<F> {
    fn default() -> Self {
        Self { rounds: Vec::new(), repeated: 0 }
    }
}

impl<F> Runs<F> {
    /// Adds one; what it says is why it failed.
    pub(super) fn add(&mut self, run: Result<Run<F>, String>) -> Result<(), String> {
        self.repeated += run.as_ref().map_or(0, |run| run.repeated);
        let (figures, failed) = run.map_or_else(|why| (None, Err(why)), |run| (Some(run.figures), Ok(())));
        self.rounds.push(figures);
        failed
    }

    /// Those that ended well.
    pub(super) fn done(&self) -> impl Iterator<Item = &F> {
        self.rounds.iter().flatten()
    }

    /// How many there were, failed ones among them.
    pub(super) fn rounds(&self) -> usize {
        self.rounds.len()
    }

    /// A figure over all rounds.
    pub(super) fn median(&self, figure: Figure<F>) -> Option<Median> {
        Median::of(self.done().map(figure).collect())
    }

    /// As a ratio to another mode's.
    pub(super) fn ratio(&self, to: &Self, figure: Figure<F>) -> Option<Median> {
        Median::of(self.ratios(to, figure).flatten().collect())
    }

    /// Each round's ratio to another mode's; none where one of the two failed.
    pub(super) fn ratios(&self, to: &Self, figure: Figure<F>) -> impl Iterator<Item = Option<f64>> {
        self.rounds.iter().zip(&to.rounds).map(move |(ours, theirs)| {
            let (ours, theirs) = (figure(ours.as_ref()?), figure(theirs.as_ref()?));
            (theirs > 0.0).then(|| ours / theirs)
        })
    }
}

impl Runs {
    /// The latencies of all rounds together.
    pub(super) fn latencies(&self) -> Histogram<u64> {
        let mut all = figures::histogram();
        for (ns, count) in self.done().flat_map(|figures| &figures.histogram_ns) {
            all.saturating_record_n(*ns, *count);
        }
        all
    }
}

/// A case and its runs, by mode.
pub(super) struct Compared {
    pub(super) case: Case,
    pub(super) modes: BTreeMap<Mode, Runs>,
}

/// Everything that was found.
pub(super) struct Results {
    pub(super) cases: Vec<Compared>,
    /// Programs of the user's.
    pub(super) programs: Vec<Timings>,
    /// What the reader must know: what could not run and why, what went wrong.
    pub(super) remarks: Vec<String>,
    /// Runs of ours that failed.
    pub(super) failures: u32,
}

impl Results {
    /// Nothing so far.
    pub(super) fn new(cases: &[Case], programs: &[Program]) -> Self {
        let empty = |&case: &Case| Compared { case, modes: BTreeMap::new() };
        let programs = programs.iter().map(Timings::new).collect();
        Self { cases: cases.iter().map(empty).collect(), programs, remarks: Vec::new(), failures: 0 }
    }

    /// Adds a run of a case.
    pub(super) fn add(&mut self, case: usize, mode: Mode, run: Result<Run, String>) {
        let compared = &mut self.cases[case];
        if let Err(why) = compared.modes.entry(mode).or_default().add(run) {
            self.failures += u32::from(!mode.is_kernel());
            self.remarks.push(format!("{}: {why}", compared.case.title()));
        }
    }

    /// Adds a run of a program with such a share of its memory local.
    pub(super) fn add_timed(&mut self, program: usize, share: u64, mode: Mode, run: Result<Run<Timed>, String>) {
        let timings = &mut self.programs[program];
        if let Err(why) = timings.add(share, mode, run) {
            self.failures += u32::from(!mode.is_kernel());
            self.remarks.push(format!("{}, {share} % local: {why}", timings.title()));
        }
    }

    /// How many rounds were begun.
    pub(super) fn rounds(&self) -> usize {
        let of_cases = self.runs().map(Runs::rounds);
        of_cases.chain(self.programs.iter().map(Timings::rounds)).max().unwrap_or(0)
    }

    fn runs(&self) -> impl Iterator<Item = &Runs> {
        self.cases.iter().flat_map(|of| of.modes.values())
    }

    /// Words and pages that were not what they had to be, in all runs.
    pub(super) fn wrong(&self) -> u64 {
        self.runs().flat_map(Runs::done).map(|figures| figures.wrong).sum()
    }

    /// How often runs had to begin again: because the kernel killed the workload, and because no pager had managed it yet.
    pub(super) fn repeated(&self) -> (u32, u32) {
        let of_cases = self.cases.iter().flat_map(|of| &of.modes).map(|(mode, runs)| (*mode, runs.repeated));
        let all = of_cases.chain(self.programs.iter().flat_map(Timings::repeated));
        all.fold((0, 0), |(killed, early), (mode, repeated)| match mode.is_kernel() {
            true => (killed + repeated, early),
            false => (killed, early + repeated),
        })
    }

    /// That, in words; empty when there were none.
    pub(super) fn repeated_words(&self) -> Vec<String> {
        let (killed, early) = self.repeated();
        let words = [
            (killed, "Runs that the kernel killed under its own limit, and that began again"),
            (early, "Runs that were over before a pager had managed them, and that began again"),
        ];
        words.into_iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{what}: {count}.")).collect()
    }

    /// Of which programs a wrong result would not be seen.
    pub(super) fn unverified_words(&self) -> Vec<String> {
        let unverified = self.programs.iter().filter(|program| !program.is_verified());
        unverified
            .map(|of| {
                format!("{}: it says nothing, or something else every time: no wrong result would be seen.", of.title())
            })
            .collect()
    }

    /// For programs: all of it.
    pub(super) fn json(&self, machine: &Machine) -> serde_json::Value {
        let told = |mode: &Mode, runs: &Runs, all: &BTreeMap<Mode, Runs>| {
            let medians: BTreeMap<_, _> =
                SHOWN.iter().filter_map(|&(name, _, figure)| Some((name, runs.median(figure)?))).collect();
            let ratios: BTreeMap<_, _> = [Mode::Native, Mode::Zram, Mode::Base]
                .into_iter()
                .filter(|other| other != mode)
                .filter_map(|other| {
                    let to = all.get(&other)?;
                    let each = SHOWN.iter().filter_map(|&(name, _, figure)| Some((name, runs.ratio(to, figure)?)));
                    Some((other, each.collect::<BTreeMap<_, _>>()))
                })
                .collect();
            let rounds: Vec<_> = runs.done().collect();
            serde_json::json!({
                "mode": mode, "title": mode.title(), "repeated": runs.repeated, "median": medians, "ratio_to": ratios, "rounds": rounds,
            })
        };
        let cases = self.cases.iter().map(|Compared { case, modes }| {
            let modes: Vec<_> = modes.iter().map(|(mode, runs)| told(mode, runs, modes)).collect();
            serde_json::json!({
                "workload": case.workload(), "order": case.order, "write_percent": case.write_percent, "threads": case.threads,
                "local_percent": case.local_percent, "modes": modes,
            })
        });
        serde_json::json!({
            "machine": machine, "rounds": self.rounds(), "wrong": self.wrong(), "repeated": self.repeated(), "remarks": self.remarks,
            "cases": cases.collect::<Vec<_>>(),
            "programs": self.programs.iter().map(Timings::json).collect::<Vec<_>>(),
        })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::order::Order;
    use super::*;

    /// A run in which everything took so long.
    pub(crate) fn figures(us: f64, wrong: u64) -> Figures {
        Figures {
            pages: 256,
            accesses: 10,
            writes: 0,
            first_touch_us: us,
            mean_us: us,
            p50_us: us,
            p99_us: us,
            p999_us: us,
            max_us: us,
            accesses_per_s: 1e6 / us,
            scan_us: us,
            wrong,
            local_peak_bytes: None,
            histogram_ns: vec![(1000, 9), (20_000, 1)],
        }
    }

    /// Two modes, two rounds.
    pub(crate) fn results() -> Results {
        let case = Case { order: Order::Zipf, write_percent: 30, threads: 1, local_percent: 50 };
        let mut results = Results::new(&[case], &[]);
        for (native, ours) in [(1.0, 3.0), (2.0, 10.0)] {
            results.add(0, Mode::Native, Ok(Run { figures: figures(native, 0), repeated: 0 }));
            results.add(0, Mode::Local, Ok(Run { figures: figures(ours, 0), repeated: 0 }));
        }
        results
    }

    #[test]
    fn medians_have_a_spread() {
        assert_eq!(Median::of(vec![]), None);
        assert_eq!(Median::of(vec![3.0, 1.0, f64::NAN, 2.0]), Some(Median { median: 2.0, min: 1.0, max: 3.0 }));
        assert_eq!(Median::of(vec![4.0, 1.0]), Some(Median { median: 2.5, min: 1.0, max: 4.0 }));
    }

    #[test]
    fn ratios_are_of_one_round() {
        let results = results();
        let modes = &results.cases[0].modes;
        let ratio = modes[&Mode::Local].ratio(&modes[&Mode::Native], |of| of.mean_us);
        assert_eq!(ratio, Some(Median { median: 4.0, min: 3.0, max: 5.0 }));
        assert_eq!(modes[&Mode::Local].latencies().len(), 20);
        assert_eq!((results.rounds(), results.wrong(), results.failures), (2, 0, 0));
        let json = results.json(&Machine::examine(64 << 20));
        assert_eq!(json["cases"][0]["modes"][1]["ratio_to"]["native"]["mean_us"]["median"], 4.0);
    }

    #[test]
    fn what_went_wrong_is_counted() {
        let mut results = results();
        results.add(0, Mode::Zram, Ok(Run { figures: figures(1.0, 0), repeated: 2 }));
        results.add(0, Mode::Zram, Err("killed too often".into()));
        assert_eq!((results.repeated(), results.failures), ((2, 0), 0));
        results.add(0, Mode::Local, Ok(Run { figures: figures(1.0, 0), repeated: 1 }));
        assert_eq!(results.repeated(), (2, 1));
        assert!(results.repeated_words()[1].ends_with("managed them, and that began again: 1."));
        results.add(0, Mode::Local, Ok(Run { figures: figures(1.0, 7), repeated: 0 }));
        results.add(0, Mode::Tcp, Err("no server".into()));
        assert_eq!((results.wrong(), results.failures), (7, 1));
        assert_eq!(
            results.remarks,
            ["zipf, 30 % writes, 50 % local: killed too often", "zipf, 30 % writes, 50 % local: no server"]
        );
    }
}

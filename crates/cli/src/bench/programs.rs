//! Programs of the user's: how long they take with all of their memory local, and with less of it in every mode.
//!
//! Invariant: with each share of local memory every mode is compared with a run of the same round that had all of it.

use super::child::Stop;
use super::figures::Timed;
use super::modes::{Bench, Job, Mode, Run};
use super::results::{Median, Runs};
use super::rounds::in_turn;
use crate::failure::{FAILED, Failure};
use crate::say;
use spillway_core::PAGE_BYTES_U64;
use spillway_core::size::Bytes;
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::time::Duration;

/// Of what a program needs, what may be local, in per cent.
const SHARES: [u64; 3] = [75, 50, 25];
/// How much longer than alone a program may take at most.
const SLOWEST: u32 = 50;
/// A program may take so long alone.
const ALONE_LONGEST: Duration = Duration::from_secs(3600);
/// So much of its line is shown.
const TITLE_CHARACTERS: usize = 40;

/// One of them.
pub(super) struct Program {
    /// What the shell is given.
    line: OsString,
    /// The most memory that it has which could be elsewhere.
    pub(super) footprint: u64,
    /// A hash of what it said, if anything.
    said: Option<u64>,
    /// How long it took, for a guess.
    took: Duration,
}

impl Program {
    /// Runs each with all of its memory local, to see what it says, and how much memory that is.
    pub(super) fn examine(bench: &Bench, lines: &[OsString], least: u64) -> Result<Vec<Self>, Failure> {
        lines.iter().map(|line| Self::of(bench, line, least)).collect()
    }

    fn of(bench: &Bench, line: &OsStr, least: u64) -> Result<Self, Failure> {
        let title = title(line);
        say::note(format!("bench: how much memory does it need: {title}"));
        let alone = |stop| match stop {
            Stop::Failed(why) => Failure::new(FAILED, format!("bench: {title}: with all of its memory local: {why}")),
            stop @ Stop::Signal(_) => stop.into(),
        };
        let job = Job::line(line, 0, 0, ALONE_LONGEST);
        let native = bench.run_program(Mode::Native, &job).map_err(alone)?.figures;
        let footprint = bench.footprint(&job).map_err(alone)?;
        if footprint < least {
            return Err(Failure::refused(format!(
                "--program {title}: of its memory {} are private and in processes of 8 MiB or more: too little to compare; give it work that \
                 needs {} or more",
                Bytes(footprint),
                Bytes(least)
            )));
        }
        Ok(Self { line: line.into(), footprint, said: native.said, took: Duration::from_secs_f64(native.seconds) })
    }

    /// About how long a round of it takes.
    pub(super) fn guess(&self, modes: usize) -> Duration {
        self.took + self.took * 2 * u32::try_from(SHARES.len() * modes.saturating_sub(1)).unwrap_or(u32::MAX)
    }

    /// What is run in one round: alone first.
    pub(super) fn steps(modes: &[Mode], round: u32) -> Vec<(u64, Mode)> {
        let others: Vec<Mode> = modes.iter().copied().filter(|mode| *mode != Mode::Native).collect();
        let each = SHARES.iter().flat_map(|&share| in_turn(&others, round).map(move |mode| (share, mode)));
        std::iter::once((100, Mode::Native)).chain(each).collect()
    }

    /// Runs it once with such a share of its memory.
    pub(super) fn run(&self, bench: &Bench, share: u64, mode: Mode) -> Result<Run<Timed>, Stop> {
        let local = (self.footprint * share / 100).next_multiple_of(PAGE_BYTES_U64);
        bench.run_program(mode, &Job::line(&self.line, self.footprint, local, self.took * SLOWEST))
    }

    /// Its line, as far as it is shown.
    pub(super) fn title(&self) -> String {
        title(&self.line)
    }
}

fn title(line: &OsStr) -> String {
    let clean = say::clean(&line.to_string_lossy());
    let short: String = clean.chars().take(TITLE_CHARACTERS).collect();
    if short.len() < clean.len() { short + "..." } else { short }
}

/// A figure by mode, and by share of local memory.
pub(super) type ByShare = BTreeMap<Mode, BTreeMap<u64, Median>>;

/// How long the runs of one took.
pub(super) struct Timings {
    title: String,
    line: String,
    footprint: u64,
    /// A hash of what it says; none where that is nothing, or differs by itself.
    said: Option<u64>,
    pub(super) alone: Runs<Timed>,
    /// By share, and by mode.
    pub(super) shares: BTreeMap<u64, BTreeMap<Mode, Runs<Timed>>>,
}

impl Timings {
    /// None so far.
    pub(super) fn new(of: &Program) -> Self {
        let (line, footprint) = (of.line.to_string_lossy().into_owned(), of.footprint);
        Self { title: of.title(), line, footprint, said: of.said, alone: Runs::default(), shares: BTreeMap::new() }
    }

    /// Adds one; an error tells what there is to say of it.
    pub(super) fn add(&mut self, share: u64, mode: Mode, run: Result<Run<Timed>, String>) -> Result<(), String> {
        let differs = run.as_ref().is_ok_and(|run| self.said.is_some() && self.said != run.figures.said);
        if mode == Mode::Native {
            if differs {
                self.said = None;
            }
            return self.alone.add(run);
        }
        let something_else = || format!("{}: it said something else than with all of its memory local", mode.title());
        let run = if differs { Err(something_else()) } else { run };
        self.shares.entry(share).or_default().entry(mode).or_default().add(run)
    }

    /// Whether it says the same every time, so that a wrong result would be seen.
    pub(super) fn is_verified(&self) -> bool {
        self.said.is_some()
    }

    /// Its line, as far as it is shown.
    pub(super) fn title(&self) -> &str {
        &self.title
    }

    /// What it needs, and how long it takes alone.
    pub(super) fn heading(&self) -> String {
        let seconds = self.alone.median(|of| of.seconds).map_or("?".into(), |of| format!("{:.2}", of.median));
        format!("{}: {} of memory, {seconds} s with all of it local", self.title, Bytes(self.footprint))
    }

    /// Those who were compared, and the ratio of their run time to that with all memory local, by share.
    pub(super) fn slowdowns(&self) -> ByShare {
        self.by_share(|runs, _| runs.ratio(&self.alone, |of| of.seconds))
    }

    /// What is told in tables, each with its heading. The last is only there if zram was compared.
    pub(super) fn tables(&self) -> Vec<(&'static str, ByShare)> {
        let mut to_zram = self.by_share(|runs, zram| self.excess_to_zram(runs, zram?));
        let zram = to_zram.remove(&Mode::Zram);
        let excess = self.by_share(|runs, _| self.excess(runs));
        let mut all = vec![("times as long", self.slowdowns()), ("excess run time", excess)];
        all.extend(zram.filter(|_| !to_zram.is_empty()).map(|_| ("excess by zram's", to_zram)));
        all
    }

    /// A figure of each mode, from its runs and from those under zram with the same share.
    fn by_share(&self, figure: impl Fn(&Runs<Timed>, Option<&Runs<Timed>>) -> Option<Median>) -> ByShare {
        let mut all = ByShare::new();
        for (&share, modes) in &self.shares {
            for (&mode, runs) in modes {
                let found = figure(runs, modes.get(&Mode::Zram));
                all.entry(mode).or_default().extend(found.map(|found| (share, found)));
            }
        }
        all
    }

    /// By round, (time / all-local time) - 1; none where it has not ended.
    fn losses(&self, of: &Runs<Timed>) -> impl Iterator<Item = Option<f64>> {
        of.ratios(&self.alone, |of| of.seconds).map(|ratio| Some(ratio? - 1.0))
    }

    /// The excess run time.
    fn excess(&self, of: &Runs<Timed>) -> Option<Median> {
        Median::of(self.losses(of).flatten().collect())
    }

    /// That by zram's of the same round. None where zram loses nothing: in such a round, or in the median of them, and then at all.
    fn excess_to_zram(&self, of: &Runs<Timed>, zram: &Runs<Timed>) -> Option<Median> {
        let both = self.losses(of).zip(self.losses(zram)).filter_map(|(ours, zrams)| Some((ours?, zrams?)));
        let both: Vec<_> = both.collect();
        Median::of(both.iter().map(|(_, zrams)| *zrams).collect()).filter(|zrams| zrams.median > 0.0)?;
        Median::of(both.iter().filter(|(_, zrams)| *zrams > 0.0).map(|(ours, zrams)| ours / zrams).collect())
    }

    fn runs(&self) -> impl Iterator<Item = (Mode, &Runs<Timed>)> {
        self.shares.values().flatten().map(|(mode, runs)| (*mode, runs))
    }

    /// How many rounds were begun.
    pub(super) fn rounds(&self) -> usize {
        self.alone.rounds()
    }

    /// How often runs of a mode had to begin again.
    pub(super) fn repeated(&self) -> impl Iterator<Item = (Mode, u32)> {
        self.runs().map(|(mode, runs)| (mode, runs.repeated))
    }

    /// For programs.
    pub(super) fn json(&self) -> serde_json::Value {
        let told = |mode: Mode, runs: &Runs<Timed>, zram: Option<&Runs<Timed>>| {
            let zram = zram.filter(|_| mode != Mode::Zram);
            let to_zram = zram.and_then(|zram| runs.ratio(zram, |of| of.seconds));
            let excess_to_zram = zram.and_then(|zram| self.excess_to_zram(runs, zram));
            serde_json::json!({
                "mode": mode, "title": mode.title(), "repeated": runs.repeated, "seconds": runs.median(|of| of.seconds),
                "ratio_to": { "native": runs.ratio(&self.alone, |of| of.seconds), "zram": to_zram },
                "excess": self.excess(runs), "excess_to_zram": excess_to_zram,
                "rounds": runs.done().collect::<Vec<_>>(),
            })
        };
        let shares = self.shares.iter().map(|(share, modes)| {
            let zram = modes.get(&Mode::Zram);
            let modes: Vec<_> = modes.iter().map(|(mode, runs)| told(*mode, runs, zram)).collect();
            serde_json::json!({ "local_percent": share, "modes": modes })
        });
        serde_json::json!({
            "command": self.line, "footprint_bytes": self.footprint, "verified": self.is_verified(),
            "native": { "seconds": self.alone.median(|of| of.seconds), "rounds": self.alone.done().collect::<Vec<_>>() },
            "shares": shares.collect::<Vec<_>>(),
        })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    fn run(seconds: f64, said: u64) -> Result<Run<Timed>, String> {
        Ok(Run { figures: Timed { seconds, said: Some(said), local_peak_bytes: None }, repeated: 0 })
    }

    /// Nothing is known yet of how long it takes.
    fn untimed() -> Timings {
        let (line, said, took) = ("sort <x | wc".into(), Some(7), Duration::from_secs(2));
        Timings::new(&Program { line, footprint: 64 << 20, said, took })
    }

    /// One that takes 2 s alone, and three times as long half local under Spillway.
    pub(crate) fn timings() -> Timings {
        let mut timings = untimed();
        timings.add(100, Mode::Native, run(2.0, 7)).expect("it said the same");
        timings.add(50, Mode::Local, run(6.0, 7)).expect("it said the same");
        timings
    }

    /// A quarter local, in rounds of so many seconds: alone, under zram, where it may not have ended, and under Spillway.
    pub(crate) fn beside_zram(rounds: &[(f64, Option<f64>, f64)]) -> Timings {
        let mut timings = untimed();
        for &(alone, zram, ours) in rounds {
            timings.add(100, Mode::Native, run(alone, 7)).expect("it said the same");
            let _ = timings.add(25, Mode::Zram, zram.map_or(Err("killed".into()), |zram| run(zram, 7)));
            timings.add(25, Mode::Local, run(ours, 7)).expect("it said the same");
        }
        timings
    }

    #[test]
    fn who_says_something_else_has_no_run_time() {
        let mut timings = timings();
        let why = timings.add(50, Mode::Zram, run(1.0, 8)).expect_err("it said something else");
        assert!(why.starts_with("kernel swap, zram: it said something else"), "{why}");
        let slowdowns = timings.slowdowns();
        assert_eq!(slowdowns[&Mode::Local][&50], Median { median: 3.0, min: 3.0, max: 3.0 });
        assert!(slowdowns[&Mode::Zram].is_empty() && timings.is_verified());
        // One that tells the time, say, says something else by itself.
        timings.add(100, Mode::Native, run(2.0, 9)).expect("nothing to compare with");
        timings.add(50, Mode::Zram, run(4.0, 10)).expect("nothing to compare with");
        assert!(!timings.is_verified() && !timings.slowdowns()[&Mode::Zram].is_empty());
        assert_eq!((timings.rounds(), &timings.json()["verified"]), (2, &false.into()));
    }

    #[test]
    fn what_is_lost_is_compared_with_zram_in_the_same_round() {
        let told = |rounds: &[(f64, Option<f64>, f64)]| {
            let modes = beside_zram(rounds).json()["shares"][0]["modes"].clone();
            assert_eq!((&modes[0]["mode"], &modes[1]["mode"]), (&"zram".into(), &"local".into()));
            assert!(modes[0]["excess_to_zram"].is_null());
            [&modes[0]["excess"], &modes[1]["excess"], &modes[1]["excess_to_zram"]].map(Clone::clone)
        };
        let of = |median: f64, min: f64, max: f64| serde_json::json!(Median { median, min, max });
        // All of the second round takes twice as long; the medians of times would give another ratio than those of rounds.
        let found = told(&[(2.0, Some(4.0), 3.0), (4.0, Some(6.0), 7.0), (2.0, Some(3.0), 2.5)]);
        assert_eq!(found, [of(0.5, 0.5, 1.0), of(0.5, 0.25, 0.75), of(0.5, 0.5, 1.5)]);
        // A round in which zram did not end, or lost nothing, has no such ratio.
        let found = told(&[(2.0, None, 5.0), (2.0, Some(4.0), 3.0), (2.0, Some(4.0), 5.0), (2.0, Some(2.0), 3.0)]);
        assert_eq!(found, [of(1.0, 0.0, 1.0), of(1.0, 0.5, 1.5), of(1.0, 0.5, 1.5)]);
        // Nor is there one where zram usually loses nothing, or never ends.
        for zram in [Some(1.0), Some(2.0), None] {
            let [_, ours, to_zram] = told(&[(2.0, zram, 3.0)]);
            assert_eq!((ours, to_zram), (of(0.5, 0.5, 0.5), serde_json::Value::Null), "{zram:?}");
        }
        let seldom = [(2.0, Some(4.0), 3.0), (2.0, Some(2.0), 3.0), (2.0, Some(1.5), 3.0)];
        assert!(told(&seldom)[2].is_null());
        // Without zram there is nothing to compare with.
        let headings = |of: &Timings| of.tables().into_iter().map(|(heading, _)| heading).collect::<Vec<_>>();
        assert_eq!(headings(&timings()), ["times as long", "excess run time"]);
        let both = beside_zram(&[(2.0, None, 3.0)]);
        assert_eq!(headings(&both), ["times as long", "excess run time", "excess by zram's"]);
        assert_eq!(both.tables()[2].1.keys().collect::<Vec<_>>(), [&Mode::Local]);
    }

    #[test]
    fn every_share_has_every_mode_once_a_round() {
        let modes = [Mode::Native, Mode::Zram, Mode::Local];
        let first = [(100, Mode::Native), (75, Mode::Zram), (75, Mode::Local), (50, Mode::Zram), (50, Mode::Local)];
        assert_eq!(Program::steps(&modes, 0)[..5], first);
        assert_eq!(Program::steps(&modes, 1)[1..3], [(75, Mode::Local), (75, Mode::Zram)]);
        assert_eq!((Program::steps(&modes, 1).len(), Program::steps(&[Mode::Native], 3).len()), (7, 1));
        assert_eq!(title("a\tb".as_ref()), say::clean("a\tb"));
        assert_eq!(title("x".repeat(50).as_ref()), "x".repeat(40) + "...");
    }
}

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
    pub(super) fn slowdowns(&self) -> BTreeMap<Mode, BTreeMap<u64, Median>> {
        let mut all: BTreeMap<Mode, BTreeMap<u64, Median>> = BTreeMap::new();
        for (&share, modes) in &self.shares {
            for (&mode, runs) in modes {
                let slowdown = runs.ratio(&self.alone, |of| of.seconds);
                all.entry(mode).or_default().extend(slowdown.map(|slowdown| (share, slowdown)));
            }
        }
        all
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
            let to_zram = zram.filter(|_| mode != Mode::Zram).and_then(|zram| runs.ratio(zram, |of| of.seconds));
            serde_json::json!({
                "mode": mode, "title": mode.title(), "repeated": runs.repeated, "seconds": runs.median(|of| of.seconds),
                "ratio_to": { "native": runs.ratio(&self.alone, |of| of.seconds), "zram": to_zram },
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

    /// One that takes 2 s alone, and three times as long half local under Spillway.
    pub(crate) fn timings() -> Timings {
        let program =
            Program { line: "sort <x | wc".into(), footprint: 64 << 20, said: Some(7), took: Duration::from_secs(2) };
        let mut timings = Timings::new(&program);
        timings.add(100, Mode::Native, run(2.0, 7)).expect("it said the same");
        timings.add(50, Mode::Local, run(6.0, 7)).expect("it said the same");
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

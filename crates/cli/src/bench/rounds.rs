//! The rounds of a comparison, and how they are told of while they go on.
//!
//! Invariant: whatever is compared with each other runs in the same round.

use super::child::{self, Stop};
use super::modes::{Bench, Mode};
use super::plan::{Plan, Work};
use super::programs::Program;
use super::results::Results;
use crate::failure::Failure;
use crate::say;
use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

/// How much later than another process of the group this one may get a signal that was sent to all.
const SIGNAL_LATE: Duration = Duration::from_millis(200);

/// Waits for such a signal, whatever else comes.
fn heed_late() -> Result<(), Stop> {
    let until = Instant::now() + SIGNAL_LATE;
    while let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
        child::heed(left)?;
    }
    Ok(())
}

/// Modes in the order of a round. Whoever is first finds colder caches: it changes from round to round.
pub(super) fn in_turn(modes: &[Mode], round: u32) -> impl Iterator<Item = Mode> {
    let turn = round as usize % modes.len().max(1);
    modes[turn..].iter().chain(&modes[..turn]).copied()
}

/// What is run in one round, as one step after the other.
enum Step {
    /// A case, by its number.
    Case(usize, Mode),
    /// A program, by its number, with such a share of its memory local.
    Program(usize, u64, Mode),
}

/// All steps of a round, in groups that are of the same case or program, and what that is.
fn steps(plan: &Plan, programs: &[Program], modes: &[Mode], round: u32) -> Vec<(String, Vec<Step>)> {
    let cases = plan.cases.iter().enumerate().map(|(number, case)| {
        let each = in_turn(modes, round).map(move |mode| Step::Case(number, mode));
        (case.title(), each.collect())
    });
    let programs = programs.iter().enumerate().map(|(number, program)| {
        let each = Program::steps(modes, round).into_iter().map(|(share, mode)| Step::Program(number, share, mode));
        (program.title(), each.collect())
    });
    cases.chain(programs).collect()
}

/// All rounds: in each, every case and program, and in each of these every mode.
pub(super) fn measure(
    bench: &Bench,
    plan: &Plan,
    programs: &[Program],
    modes: &[Mode],
    results: &mut Results,
) -> Result<(), Failure> {
    let (began, mut last, mut done) = (Instant::now(), Duration::ZERO, 0);
    let of_programs: Duration = programs.iter().map(|program| program.guess(modes.len())).sum();
    let mut progress = Progress::new(plan.guess(modes, of_programs));
    'rounds: while plan.goes_on(done, began.elapsed(), last) {
        let round = Instant::now();
        for (title, steps) in steps(plan, programs, modes, done) {
            // Programs take what they take: they are compared once at least.
            if began.elapsed() > plan.budget && (programs.is_empty() || done > 0) {
                let said = format!("this machine was slower than expected: round {} ended before {title}", done + 1);
                results.remarks.push(said);
                break 'rounds;
            }
            for step in steps {
                let ended = match step {
                    Step::Case(number, mode) => {
                        progress.show(&format!("round {}: {title}: {}", done + 1, mode.title()));
                        child::heed(Duration::ZERO).map_err(Failure::from)?;
                        let work = Work::of(plan, plan.cases[number]);
                        unless_stopped(bench.run(mode, &work)).map(|run| results.add(number, mode, run))
                    }
                    Step::Program(number, share, mode) => {
                        let local = if mode == Mode::Native { String::new() } else { format!(", {share} % local") };
                        progress.show(&format!("round {}: {title}{local}: {}", done + 1, mode.title()));
                        child::heed(Duration::ZERO).map_err(Failure::from)?;
                        let run = unless_stopped(programs[number].run(bench, share, mode));
                        run.map(|run| results.add_timed(number, share, mode, run))
                    }
                };
                ended?;
            }
        }
        (last, done) = (round.elapsed(), done + 1);
        if plan.goes_on(done, began.elapsed(), last) {
            progress.note(&format!("round {done} took {} s; it goes on", last.as_secs()));
            progress.guess = began.elapsed() + plan.left(done, began.elapsed(), last);
        }
    }
    results.cases.retain(|case| !case.modes.is_empty());
    Ok(())
}

/// A run, or why it failed; an error where somebody wants us to end.
fn unless_stopped<T>(run: Result<T, Stop>) -> Result<Result<T, String>, Failure> {
    match run {
        Ok(run) => Ok(Ok(run)),
        Err(stop @ Stop::Signal(_)) => Err(stop.into()),
        Err(Stop::Failed(why)) => {
            // A key on the terminal reaches all that was started, and some of it before us.
            heed_late().map_err(Failure::from)?;
            Ok(Err(why))
        }
    }
}

/// What is being done: one line that is overwritten on a terminal, a line a step anywhere else.
struct Progress {
    terminal: bool,
    width: usize,
    began: Instant,
    guess: Duration,
}

impl Progress {
    fn new(guess: Duration) -> Self {
        say::note(format!(
            "bench: this takes about {} s; Ctrl-C ends it and leaves nothing behind",
            guess.as_secs().max(1)
        ));
        Self { terminal: io::stderr().is_terminal(), width: 0, began: Instant::now(), guess }
    }

    fn show(&mut self, what: &str) {
        let text = format!("{:3} of about {} s: {what}", self.began.elapsed().as_secs(), self.guess.as_secs().max(1));
        if self.terminal {
            let _ = write!(io::stderr(), "\r{text:<0$}", self.width);
            self.width = text.len();
        } else {
            say::note(format!("bench: {text}"));
        }
    }

    fn note(&mut self, text: &str) {
        if !self.terminal {
            say::note(format!("bench: {text}"));
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.width > 0 {
            let _ = writeln!(io::stderr());
        }
    }
}

//! Results as text for a terminal.

use super::modes::Mode;
use super::programs::Timings;
use super::results::{Compared, Median, Results, Runs, SHOWN};
use std::fmt::Write;

/// How wide the first column is.
const NAME: usize = 20;
/// What others are measured against.
const YARDSTICKS: [Mode; 3] = [Mode::Native, Mode::Zram, Mode::Base];

/// What of programs the reader has to know.
pub(super) const EXCESS: &str = "Excess run time: (time / all-local time) - 1, of two runs of one round. By zram's: below 1 is less than \
                                 under the kernel's swap to zram.";

/// A table for each case; below, what there is to say.
pub(super) fn text(results: &Results) -> String {
    let mut text = String::new();
    results.cases.iter().for_each(|case| text += &one(case));
    results.programs.iter().for_each(|program| text += &slowdowns(program));
    let _ = writeln!(text, "Rounds: {}, the modes in turn.", results.rounds());
    if !results.cases.is_empty() {
        let _ = writeln!(
            text,
            "Medians, in microseconds but for accesses/s. Ratios of mean accesses, each of one round, with their spread.\n\
             Wrong bytes: {}.",
            if results.wrong() == 0 { "none".into() } else { format!("{} words or pages", results.wrong()) },
        );
    }
    if !results.programs.is_empty() {
        text += &format!("{EXCESS}\n");
    }
    results.unverified_words().iter().for_each(|words| text += &format!("{words}\n"));
    results.repeated_words().iter().for_each(|words| text += &format!("{words}\n"));
    results.remarks.iter().for_each(|remark| text += &format!("{remark}\n"));
    text
}

fn one(case: &Compared) -> String {
    let mut text = format!("{}\n{:NAME$}", case.case.title(), "");
    SHOWN.iter().for_each(|(_, heading, _)| text += &format!(" {heading:>10}"));
    let yardsticks = || YARDSTICKS.into_iter().filter(|mode| case.modes.contains_key(mode));
    yardsticks().for_each(|mode| text += &format!("  {:<18}", format!("mean to {}", mode.name())));
    text = text.trim_end().to_owned() + "\n";
    for (&mode, runs) in &case.modes {
        text += &format!("{:NAME$}", mode.title());
        for (_, _, figure) in SHOWN {
            text += &format!(" {:>10}", runs.median(figure).map_or("-".into(), |of| number(of.median)));
        }
        yardsticks().for_each(|other| text += &format!("  {:<18}", ratio(runs, mode, other, case)));
        text = text.trim_end().to_owned() + "\n";
    }
    if let (Some(ours), Some(base)) = (case.modes.get(&Mode::Local), case.modes.get(&Mode::Base)) {
        let ratios = SHOWN.map(|(_, _, figure)| ours.ratio(base, figure));
        let mut row = |name: &str, of: fn(Median) -> f64| {
            let cells = ratios.map(|ratio| format!(" {:>10}", ratio.map_or("-".into(), |ratio| number(of(ratio)))));
            text += &format!("{name:NAME$}{}\n", cells.concat());
        };
        row("this build to base", |of| of.median);
        row("  least", |of| of.min);
        row("  most", |of| of.max);
    }
    text + "\n"
}

/// By how much longer a program takes, by share of local memory, in every way that it is told, with the spread.
fn slowdowns(program: &Timings) -> String {
    let mut text = program.heading() + "\n";
    let shares = || program.shares.keys().rev();
    for (heading, modes) in program.tables() {
        text += &format!("{heading:NAME$}");
        shares().for_each(|share| text += &format!("  {:<18}", format!("{share} % local")));
        text = text.trim_end().to_owned() + "\n";
        for (mode, by_share) in modes {
            text += &format!("{:NAME$}", mode.title());
            shares().for_each(|share| {
                text += &format!("  {:<18}", by_share.get(share).copied().map_or("-".into(), spread));
            });
            text = text.trim_end().to_owned() + "\n";
        }
    }
    text + "\n"
}

/// The mean access as a ratio to another mode's.
fn ratio(runs: &Runs, mode: Mode, other: Mode, case: &Compared) -> String {
    let to = case.modes.get(&other).filter(|_| other != mode);
    to.and_then(|to| runs.ratio(to, |of| of.mean_us)).map_or(String::new(), spread)
}

/// `1.5 (1.2..1.9)`.
pub(super) fn spread(of: Median) -> String {
    format!("{} ({}..{})", number(of.median), number(of.min), number(of.max))
}

/// Three digits, as far as they say anything.
pub(super) fn number(of: f64) -> String {
    match of {
        _ if of >= 100.0 => format!("{of:.0}"),
        _ if of >= 10.0 => format!("{of:.1}"),
        _ => format!("{of:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_and_their_spread_are_shown() {
        let mut results = super::super::results::tests::results();
        results.remarks.push("kernel swap, zram: it needs root".into());
        let text = text(&results);
        let rows: Vec<&str> = text.lines().collect();
        assert_eq!(rows[0], "zipf, 30 % writes, 50 % local");
        assert!(rows[1].contains("p99.9") && rows[1].ends_with("mean to native"), "{text}");
        assert!(rows[2].starts_with("native                     1.50       1.50"), "{text}");
        assert!(rows[3].starts_with("spillway") && rows[3].ends_with("4.00 (3.00..5.00)"), "{text}");
        assert!(text.contains("Wrong bytes: none.") && text.ends_with("zram: it needs root\n"), "{text}");
        // Two builds are compared by every figure, not by the mean alone.
        let figures = super::super::results::tests::figures;
        for us in [2.0, 5.0] {
            let run = super::super::modes::Run { figures: figures(us, 0), repeated: 0 };
            results.add(0, Mode::Base, Ok(run));
        }
        let text = super::text(&results);
        let row = |name: &str| text.lines().find(|line| line.starts_with(name)).unwrap_or_default().to_owned();
        assert!(row("this build to base").ends_with("      0.58       1.75          -"), "{text}");
        assert!(
            row("  least").ends_with("      0.50       1.50          -")
                && row("  most").ends_with("      0.67       2.00          -"),
            "{text}"
        );
        let mut results = super::super::results::Results::new(&[], &[]);
        results.programs.push(super::super::programs::tests::timings());
        let text = super::text(&results);
        assert!(
            text.starts_with(
                "sort <x | wc: 64.0 MiB of memory, 2.00 s with all of it local\ntimes as long         50 % local\n"
            ),
            "{text}"
        );
        assert!(
            text.contains("\nspillway              3.00 (3.00..3.00)\n") && !text.contains("Wrong bytes"),
            "{text}"
        );
        assert!(
            text.contains("\nexcess run time       50 % local\nspillway              2.00 (2.00..2.00)\n")
                && text.contains("\nExcess run time: (time / all-local time) - 1"),
            "{text}"
        );
        assert!(!text.contains("excess by zram's"), "{text}");
        results.programs = vec![super::super::programs::tests::beside_zram(&[(2.0, Some(4.0), 3.0)])];
        let text = super::text(&results);
        assert!(
            text.contains("\nexcess by zram's      25 % local\nspillway              0.50 (0.50..0.50)\n"),
            "{text}"
        );
        assert_eq!([number(0.123), number(12.34), number(1234.5)], ["0.12", "12.3", "1234"]);
    }
}

//! `spillway sim cost`: performance per dollar of larger servers, more servers, and pooled memory.

use crate::failure::{FAILED, Failure};
use crate::say;
use spillway_study::cost::{Comparison, PAPER, compare};
use std::fmt::Write;
use std::io::Read;
use std::path::{Path, PathBuf};

/// The longest description.
const BYTES_MOST: u64 = 1 << 20;

/// What `spillway sim cost` is given.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Systems and what they cost, as --example shows it; without one, the paper's comparisons
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,
    /// As JSON
    #[arg(long)]
    json: bool,
    /// Print a description to begin with: the paper's
    #[arg(long, conflicts_with_all = ["file", "json"])]
    example: bool,
}

/// Compares, and prints what came out.
pub(crate) fn cost(args: &Args) -> Result<u8, Failure> {
    if args.example {
        say::print(PAPER)?;
        return Ok(0);
    }
    let text = args.file.as_deref().map(read).transpose()?;
    let compared = compare(text.as_deref().unwrap_or(PAPER)).map_err(|error| {
        let file = args.file.as_deref().unwrap_or(Path::new("the paper")).to_string_lossy().into_owned();
        Failure::refused(format!("{}: {error}; see `spillway sim cost --example`", say::clean(&file)))
    })?;
    let json = || serde_json::to_string_pretty(&compared).map(|text| text + "\n");
    let text = match args.json {
        true => json().map_err(|error| Failure::new(FAILED, error.to_string()))?,
        false => compared.iter().map(table).collect::<Vec<_>>().join("\n"),
    };
    say::print(&text)?;
    Ok(0)
}

fn read(path: &Path) -> Result<String, Failure> {
    let mut text = String::new();
    let read = std::fs::File::open(path).and_then(|file| file.take(BYTES_MOST + 1).read_to_string(&mut text));
    let name = || say::clean(&path.to_string_lossy());
    let refuse = |error| Failure::refused(format!("cannot read {}: {}", name(), say::error(&error)));
    match read.map_err(refuse)? as u64 {
        0..=BYTES_MOST => Ok(text),
        _ => Err(Failure::refused(format!("{} is too long for a description of systems; see --example", name()))),
    }
}

fn table(of: &Comparison) -> String {
    let width = of.systems.iter().map(|system| system.name.chars().count()).max().unwrap_or(0);
    let mut text = format!(
        "{}, over {} years\n{:width$} {:>7} {:>10} {:>10} {:>10} {:>12} {:>10} {:>10}\n",
        of.study, of.years, "", "servers", "hardware", "operation", "total", "performance", "for 1000", "compared",
    );
    for system in &of.systems {
        let compared = match system.name == of.baseline {
            true => "baseline".into(),
            false => format!("{:+.0} %", 100.0 * (system.to_baseline - 1.0)),
        };
        let _ = writeln!(
            text,
            "{:width$} {:>7} {:>10.0} {:>10.0} {:>10.0} {:>12.3} {:>10.3} {compared:>10}",
            system.name,
            system.servers,
            system.hardware,
            system.operation,
            system.total,
            system.performance,
            system.performance_per_1000,
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_papers_comparisons_are_shown() {
        let text: Vec<String> = compare(PAPER).expect("its own").iter().map(table).collect();
        assert!(text[0].contains("pooled, by latency") && text[0].contains("+51 %"), "{}", text[0]);
        assert!(text[1].lines().last().expect("rows").ends_with("+17 %"), "{}", text[1]);
        assert!(text.iter().all(|text| text.contains("baseline\n")));
    }
}

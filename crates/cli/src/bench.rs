//! `spillway bench`: what Spillway costs and gives on this machine, beside what a user would otherwise pick.
//!
//! Invariants: the modes run the same workload with the same budget, in turn, in one run; a mode that cannot run here is named,
//! with the reason; however the command ends, unless it is killed outright, nothing that it set up is left; a wrong byte makes its
//! exit status 1.

mod charts;
mod child;
mod content;
mod figures;
mod html;
mod kernel;
mod machine;
mod modes;
mod order;
mod plan;
mod programs;
mod results;
mod rounds;
mod sys;
mod table;
pub(crate) mod walk;

use crate::failure::{FAILED, Failure};
use crate::replace::Place;
use crate::say;
use machine::Machine;
use modes::{Bench, Mode};
use order::Order;
use plan::Plan;
use programs::Program;
use results::Results;
use rounds::measure;
use spillway_core::size::{Bytes, parse_bytes};
use std::ffi::OsString;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// With less, a quarter of it would be too little for a pager, or for a program under the kernel's limit.
const SIZE_LEAST: u64 = 32 << 20;

/// What `spillway bench` is given.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A first impression, within about a minute; without it, about ten
    #[arg(long)]
    quick: bool,
    /// Where report.html and results.json go [default: spillway-bench; with --json nowhere]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// The results as JSON
    #[arg(long)]
    json: bool,
    #[arg(long, value_name = "SIZE", help = size_help())]
    size: Option<String>,
    /// So many rounds, however long they take
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: Option<u32>,
    /// Only these, with commas between; native is always among them
    #[arg(long, value_enum, value_name = "MODE,..", value_delimiter = ',')]
    mode: Vec<Mode>,
    /// Only these orders of access, with commas between
    #[arg(long, value_enum, value_name = "ORDER,..", value_delimiter = ',')]
    order: Vec<Order>,
    /// How much longer this program takes, a line for the shell such as 'seq 2000000 | rev | sort -S 1G | md5sum'; may be given several
    /// times. No application is measured without, and there is no chart of slowdowns by application. Instead of the workloads above,
    /// unless orders are named, too
    #[arg(long, value_name = "LINE")]
    program: Vec<OsString>,
    /// Where the file to swap to is put for the while
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    swap_dir: PathBuf,
    /// Compare with another build of spillway, too
    #[arg(long, value_name = "BINARY")]
    against: Option<PathBuf>,
    /// Have the workload change a bit of its own memory, to see that it is told
    #[arg(long, hide = true)]
    spoil: bool,
}

/// The figures are the plan's own: written twice, they would part.
fn size_help() -> String {
    let [full, quick] = [Plan::full(), Plan::quick()].map(|plan| plan.size >> 20);
    format!("How much memory a workload touches [default: {full}M, with --quick {quick}M]")
}

/// Compares, and tells what was found.
pub(crate) fn bench(args: &Args) -> Result<u8, Failure> {
    let plan = plan(args)?;
    let ours = std::env::current_exe()
        .map_err(|error| Failure::refused(format!("where is this program? {}", say::error(&error))))?;
    if let Some(base) = args.against.as_deref().filter(|base| !base.is_file()) {
        let base = say::clean(&base.to_string_lossy());
        return Err(Failure::refused(format!("--against {base}: no such program; give the path of a spillway binary")));
    }
    let out = args.out.clone().or_else(|| (!args.json).then(|| PathBuf::from("spillway-bench")));
    let files = out.as_deref().map(Files::prepare).transpose()?;
    let inherited = crate::sys::block_signals();
    crate::sys::adopt_orphans();
    let mut bench = Bench::new(ours, args.against.clone(), inherited, args.spoil);
    let programs = programs(args, &bench)?;
    let size = programs.iter().map(|program| program.footprint).fold(plan.size, u64::max);
    let (modes, remarks) = modes(args, size, &mut bench);
    let mut results = Results::new(&plan.cases, &programs);
    results.remarks = remarks;
    results.remarks.extend(machine::busy());
    measure(&bench, &plan, &programs, &modes, &mut results)?;
    drop(bench);
    tell(args, &results, &Machine::examine(plan.size), files)?;
    Ok(if results.wrong() + u64::from(results.failures) > 0 { FAILED } else { 0 })
}

fn tell(args: &Args, results: &Results, machine: &Machine, files: Option<Files>) -> Result<(), Failure> {
    let failed = |error: String| Failure::new(FAILED, format!("bench: the results could not be written: {error}"));
    let json = results.json(machine);
    let json = serde_json::to_string(&json).map_err(|error| failed(error.to_string()))? + "\n";
    let text = if args.json { &json } else { &format!("{}\n\n{}", machine.line(), table::text(results)) };
    say::print(text)?;
    let Some(files) = files else { return Ok(()) };
    let charts = charts::all(results).map_err(|error| failed(error.to_string()))?;
    let page = html::page(results, &charts, machine);
    let directory = files.directory.display().to_string();
    files.write(&page, &json).map_err(|error| failed(say::error(&error)))?;
    say::note(format!("bench: report.html and results.json are in {}", say::clean(&directory)));
    Ok(())
}

/// Where the results go.
struct Files {
    directory: PathBuf,
    page: Option<Place>,
    json: Option<Place>,
}

impl Files {
    /// Makes sure that they can be written later.
    fn prepare(directory: &Path) -> Result<Self, Failure> {
        let prepare = || -> io::Result<Self> {
            fs::create_dir_all(directory)?;
            let place = |name: &str| Place::prepare(&directory.join(name)).map(Some);
            Ok(Self { directory: directory.into(), page: place("report.html")?, json: place("results.json")? })
        };
        prepare().map_err(|error| {
            let directory = say::clean(&directory.to_string_lossy());
            Failure::refused(format!(
                "cannot write to {directory}: {}; give --out another directory",
                say::error(&error)
            ))
        })
    }

    fn write(mut self, page: &str, json: &str) -> io::Result<()> {
        for (place, text) in [(self.page.take(), page), (self.json.take(), json)] {
            place.map_or(Ok(()), |place| place.replace(|mut file| file.write_all(text.as_bytes())))?;
        }
        Ok(())
    }
}

impl Drop for Files {
    /// A directory that nothing was written to is not left.
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.directory);
    }
}

/// The programs that are to be compared, once they are known to fit.
fn programs(args: &Args, bench: &Bench) -> Result<Vec<Program>, Failure> {
    let programs = Program::examine(bench, &args.program, SIZE_LEAST)?;
    programs.iter().try_for_each(|program| fits(&program.title(), program.footprint, "give it less to do"))?;
    Ok(programs)
}

/// What is compared, what its pool keeps of it, and as much again for everybody else.
fn fits(what: &str, size: u64, remedy: &str) -> Result<(), Failure> {
    let Some(available) = crate::serve::available().filter(|available| size > available / 3) else { return Ok(()) };
    let (size, available) = (Bytes(size), Bytes(available));
    Err(Failure::refused(format!(
        "{what} of {size} needs three times as much, and {available} are available: {remedy}"
    )))
}

fn plan(args: &Args) -> Result<Plan, Failure> {
    let mut plan = if args.quick { Plan::quick() } else { Plan::full() };
    if let Some(size) = &args.size {
        plan.size = parse_bytes(size).map_err(|error| Failure::refused(format!("--size: {error}")))? >> 20 << 20;
        if plan.size < SIZE_LEAST {
            return Err(Failure::refused(format!(
                "--size {size} is too little to compare: give {} or more",
                Bytes(SIZE_LEAST)
            )));
        }
    }
    fits("a workload", plan.size, "give --size less")?;
    if args.program.iter().any(|line| line.to_string_lossy().trim().is_empty()) {
        return Err(Failure::refused("--program: that is no program; give a line for the shell"));
    }
    if !args.program.is_empty() {
        // A round of them may take longer than all else.
        plan.rounds.1 = 1;
    }
    if let Some(rounds) = args.rounds {
        plan.set_rounds(rounds);
    }
    if !args.order.is_empty() || !args.program.is_empty() {
        plan.cases.retain(|case| args.order.contains(&case.order));
        if plan.cases.is_empty() && !args.order.is_empty() {
            return Err(Failure::refused(
                "--quick has no such order: give uniform, zipf or sequential, or leave --quick out",
            ));
        }
    }
    Ok(plan)
}

/// Those that can run here; why not, for the others.
fn modes(args: &Args, size: u64, bench: &mut Bench) -> (Vec<Mode>, Vec<String>) {
    let asked =
        Mode::ALL.into_iter().filter(|mode| args.mode.is_empty() || *mode == Mode::Native || args.mode.contains(mode));
    let (mut able, mut remarks) = (Vec::new(), Vec::new());
    for mode in asked.chain(args.against.is_some().then_some(Mode::Base)) {
        match bench.prepare(mode, size, &args.swap_dir) {
            Ok(()) => able.push(mode),
            Err(why) => remarks.push(format!("not run: {}: {why}", mode.title())),
        }
    }
    remarks.iter().for_each(|remark| say::note(format!("bench: {remark}")));
    (able, remarks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        bench: Args,
    }

    fn help() -> String {
        <Line as clap::CommandFactory>::command().render_long_help().to_string()
    }

    #[test]
    fn the_sizes_that_are_told_are_those_that_are_taken() {
        let help = help();
        let told = help.split_once("How much memory a workload touches [default: ").expect("told").1;
        let (full, quick) =
            told.split_once(']').and_then(|(told, _)| told.split_once(", with --quick ")).expect("both");
        for (words, size) in [(vec!["bench"], full), (vec!["bench", "--quick"], quick)] {
            let plan = plan(&Line::parse_from(words).bench).expect("room for it");
            assert_eq!(plan.size, parse_bytes(size).expect("a size"), "{size}");
        }
    }
}

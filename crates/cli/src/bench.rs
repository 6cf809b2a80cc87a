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
mod results;
mod sys;
mod table;
pub(crate) mod walk;

use crate::failure::{FAILED, Failure};
use crate::replace::Place;
use crate::say;
use child::Stop;
use machine::Machine;
use modes::{Bench, Mode};
use order::Order;
use plan::{Plan, Work};
use results::Results;
use spillway_core::size::{Bytes, parse_bytes};
use std::fs;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

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
    /// How much memory a workload touches [default: 256M, with --quick 64M]
    #[arg(long, value_name = "SIZE")]
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
    let mut bench = Bench::new(ours, args.against.clone(), inherited, args.spoil);
    let (modes, remarks) = modes(args, &plan, &mut bench);
    let mut results = Results::new(&plan.cases);
    results.remarks = remarks;
    results.remarks.extend(machine::busy());
    measure(&bench, &plan, &modes, &mut results)?;
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
    // The workload, what its pool keeps of it, and as much again for everybody else.
    if let Some(available) = crate::serve::available().filter(|available| plan.size > available / 3) {
        let (size, available) = (Bytes(plan.size), Bytes(available));
        return Err(Failure::refused(format!(
            "a workload of {size} needs three times as much, and {available} are available: give --size less"
        )));
    }
    if let Some(rounds) = args.rounds {
        plan.set_rounds(rounds);
    }
    if !args.order.is_empty() {
        plan.cases.retain(|case| args.order.contains(&case.order));
        if plan.cases.is_empty() {
            return Err(Failure::refused(
                "--quick has no such order: give uniform, zipf or sequential, or leave --quick out",
            ));
        }
    }
    Ok(plan)
}

/// Those that can run here; why not, for the others.
fn modes(args: &Args, plan: &Plan, bench: &mut Bench) -> (Vec<Mode>, Vec<String>) {
    let asked =
        Mode::ALL.into_iter().filter(|mode| args.mode.is_empty() || *mode == Mode::Native || args.mode.contains(mode));
    let (mut able, mut remarks) = (Vec::new(), Vec::new());
    for mode in asked.chain(args.against.is_some().then_some(Mode::Base)) {
        match bench.prepare(mode, plan.size, &args.swap_dir) {
            Ok(()) => able.push(mode),
            Err(why) => remarks.push(format!("not run: {}: {why}", mode.title())),
        }
    }
    remarks.iter().for_each(|remark| say::note(format!("bench: {remark}")));
    (able, remarks)
}

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

/// All rounds: in each, every case, and in each of these every mode.
fn measure(bench: &Bench, plan: &Plan, modes: &[Mode], results: &mut Results) -> Result<(), Failure> {
    let (began, mut last, mut done) = (Instant::now(), Duration::ZERO, 0);
    let mut progress = Progress::new(plan.guess(modes));
    'rounds: while plan.goes_on(done, began.elapsed(), last) {
        let round = Instant::now();
        for (number, &case) in plan.cases.iter().enumerate() {
            if began.elapsed() > plan.budget {
                let said =
                    format!("this machine was slower than expected: round {} ended before {}", done + 1, case.title());
                results.remarks.push(said);
                break 'rounds;
            }
            let work = Work::of(plan, case);
            // Whoever is first finds colder caches: the order changes from round to round.
            let turn = done as usize % modes.len();
            for &mode in modes[turn..].iter().chain(&modes[..turn]) {
                progress.show(&format!("round {}: {}: {}", done + 1, case.title(), mode.title()));
                child::heed(Duration::ZERO).map_err(Failure::from)?;
                match bench.run(mode, &work) {
                    Err(stop @ Stop::Signal(_)) => return Err(stop.into()),
                    Err(Stop::Failed(why)) => {
                        // A key on the terminal reaches all that was started, and some of it before us.
                        heed_late().map_err(Failure::from)?;
                        results.add(number, mode, Err(why));
                    }
                    Ok(run) => results.add(number, mode, Ok(run)),
                }
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

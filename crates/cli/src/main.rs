//! The `spillway` command: one file a command.
//!
//! Invariants: standard output belongs to the target, to `ps` and to `doctor`; everything else we say goes to standard
//! error, a line at a time. Every way to end is listed in [`EXIT_STATUSES`].

mod advise;
mod attach;
mod behind;
mod bench;
mod control;
mod cost;
mod daemon;
mod detach;
mod doctor;
mod failure;
mod keeper;
mod lines;
mod local;
mod pager_process;
mod pool;
mod pool_drain;
mod pool_status;
mod processes;
mod progress;
mod ps;
mod recorder;
mod replace;
mod replacement;
mod report;
mod request;
mod resize;
mod run;
mod say;
mod serve;
mod service;
mod set;
mod sim;
mod sockets;
mod stops;
mod sys;
mod terms;
mod trace;
mod trouble;
mod upgrade;
mod vmm;
mod waiting;
mod witness;

use clap::error::{ContextKind, ErrorKind};
use clap::{Parser, Subcommand};
use failure::{Failure, REFUSED};
use std::process::ExitCode;

const EXIT_STATUSES: &str = "\
Exit status:
  0    done
  1    something that was begun could not be finished, doctor found something amiss, or bench a wrong byte,
       a failed run (the kernel's swap aside) or a program that says something else under Spillway
  2    refused: the line on standard error says what to do, and nothing was changed
  run  the program's own status, or 128 + the number of the signal that ended it;
       70 if the pager died (the program is killed: its memory is gone),
       126 if the program cannot be executed, 127 if it is not found

Examples:
  spillway run --local 2G -- python3 train.py
  spillway attach 4711 --local 1G
  spillway resize 4711 4G
  spillway upgrade 4711
  spillway set 4711 policy=lru3 evict=pre-evict
  spillway daemon --local 8G";

/// Runs or adopts any program inside a budget of local memory; the rest goes to a pool
#[derive(Parser)]
#[command(version, after_help = EXIT_STATUSES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a program inside a budget of local memory
    Run(run::Args),
    /// Adopt a process that runs already; Ctrl-C or `detach` lets it go
    Attach(attach::Args),
    /// Serve all targets of this host with one pager, under one budget
    Daemon(daemon::Args),
    /// Bring all pages of a process home and let it go
    Detach(detach::Args),
    /// Take a process over from the pager that `attach` started, with this binary
    Upgrade(upgrade::Args),
    /// Change the budget of a managed process
    Resize(resize::Args),
    /// Change which pages of a managed process leave, when and whose
    Set(set::Args),
    /// Serve virtual machines whose monitor hands over its userfaultfd
    Vmm(vmm::Args),
    /// List managed processes and what they hold
    Ps(ps::Args),
    /// Look at a pool's servers
    Pool(pool_status::Args),
    /// Lend this host's memory to others
    Serve(serve::Args),
    /// Record what a pager sees of a program
    Trace(trace::Args),
    /// Replay a trace under each policy, and the optimum; or compare costs
    Sim(sim::Args),
    /// Say how much local memory a program needs
    Advise(advise::Args),
    /// Compare native speed, the kernel's swap and Spillway on this machine
    Bench(bench::Args),
    /// Examine this machine: what is missing, what it costs, what mends it
    Doctor(doctor::Args),
    /// Touch memory in a known order, verify it, and say what an access cost: what `bench` measures with
    #[command(hide = true)]
    BenchWalk(bench::walk::Args),
    #[command(name = "__pager", hide = true)]
    Pager(pager_process::Args),
}

fn main() -> ExitCode {
    let done = Cli::try_parse().map_or_else(|error| misused(&error), |cli| perform(&cli.command));
    let status = done.unwrap_or_else(|failure| {
        say::note(&failure);
        failure.status
    });
    ExitCode::from(status)
}

fn perform(command: &Command) -> Result<u8, Failure> {
    match command {
        Command::Run(args) => run::run(args),
        Command::Attach(args) => attach::attach(args),
        Command::Daemon(args) => daemon::daemon(args),
        Command::Detach(args) => detach::detach(args),
        Command::Upgrade(args) => upgrade::upgrade(args),
        Command::Resize(args) => resize::resize(args),
        Command::Set(args) => set::set(args),
        Command::Vmm(args) => vmm::vmm(args),
        Command::Ps(args) => ps::ps(args),
        Command::Pool(args) => pool_status::pool(args),
        Command::Serve(args) => serve::serve(args),
        Command::Trace(args) => trace::trace(args),
        Command::Sim(args) => sim::sim(args),
        Command::Advise(args) => advise::advise(args),
        Command::Doctor(args) => doctor::doctor(args),
        Command::Bench(args) => bench::bench(args),
        Command::BenchWalk(args) => bench::walk::walk(args),
        Command::Pager(args) => pager_process::serve(args),
    }
}

/// One line for what the parser explains in many; its help texts as they are.
fn misused(error: &clap::Error) -> Result<u8, Failure> {
    let text = error.to_string();
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            say::print(&format!("{}\n", text.trim_end()))?;
            return Ok(0);
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand | ErrorKind::MissingSubcommand => {
            return Err(Failure::new(REFUSED, "say what to do: `spillway run -- CMD`, or see `spillway --help`"));
        }
        ErrorKind::MissingRequiredArgument => {
            let missing =
                text.lines().map(str::trim).filter(|line| line.starts_with('<')).collect::<Vec<_>>().join(" ");
            let usage = text.lines().find_map(|line| line.strip_prefix("Usage: ")).unwrap_or("spillway --help");
            return Err(Failure::new(REFUSED, format!("{missing} is missing: `{usage}`")));
        }
        _ => {}
    }
    let what: Vec<&str> = text.lines().take_while(|line| !line.is_empty()).map(str::trim).collect();
    let what = what.join(" ");
    let what = what.strip_prefix("error: ").unwrap_or(&what);
    let suggested = [ContextKind::SuggestedArg, ContextKind::SuggestedSubcommand]
        .into_iter()
        .find_map(|kind| error.get(kind))
        .map(|suggested| format!("; did you mean {suggested}?"))
        .unwrap_or_default();
    Err(Failure::new(REFUSED, format!("{what}{suggested}; see `spillway --help`")))
}

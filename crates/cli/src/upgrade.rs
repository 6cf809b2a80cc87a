//! `spillway upgrade`: this binary takes a process over from its running pager.
//!
//! The pager ends at once, in whatever it is doing: what it leaves is good for whoever comes next, and so there is no other way
//! to hand over that would have to be right as well.

use crate::attach::{self, Changes, Told};
use crate::control::{self, Request};
use crate::failure::Failure;
use crate::{sockets, sys};
use spillway_pager::{Error, Remains};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// How long the old pager may take to stand still. Longer than it takes at the most: once it stands it ends, asked for still or not.
const STANDS_WITHIN: Duration = Duration::from_secs(10);
/// How long the old pager's process may take to end.
const END_WITHIN: Duration = Duration::from_secs(5);

/// What `spillway upgrade` is given.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A process that `spillway attach` manages
    #[arg(value_name = "PID", value_parser = clap::value_parser!(i32).range(1..))]
    pid: i32,
    /// Write the final counters to this file, as JSON
    #[arg(long, value_name = "FILE")]
    stats: Option<PathBuf>,
    /// Say nothing but what went wrong
    #[arg(short, long)]
    quiet: bool,
}

/// Takes over, and stays until the process is gone or free.
pub(crate) fn upgrade(args: &Args) -> Result<u8, Failure> {
    attach::begin_guardian(args.quiet);
    // The process itself says who its pager is. Others need not be asked, of which one may not answer.
    let known = match Remains::find(args.pid) {
        Err(Error::Managed { pager, .. }) => sockets::pager_that_is(pager),
        _ => None,
    };
    let mut found = known.map_or_else(|| sockets::pager_of(args.pid), Ok)?;
    if found.listing.daemon {
        let daemon = found.listing.pager_pid;
        return Err(Failure::refused(format!(
            "a daemon manages process {}: `kill -HUP {daemon}`, and start `spillway daemon` again, which takes over",
            args.pid
        )));
    }
    // Whoever ends must be outlived: no signal may end us between the two.
    sys::block_signals();
    let begun = Instant::now();
    let request = Request::HandOver { version: spillway_store::vault::VERSION };
    control::ask(&mut found.lines, &request, STANDS_WITHIN, &mut |_, _| {}).map_err(Failure::refused)?;
    let root = found.listing.snapshot.pid;
    let remains = loop {
        match Remains::find(root) {
            Ok(Some(remains)) => break remains,
            Err(Error::Managed { .. }) if begun.elapsed() < END_WITHIN => {
                std::thread::sleep(Duration::from_micros(200))
            }
            Ok(None) => return Err(Failure::refused(format!("process {root} has ended"))),
            Err(error) => return Err(error.into()),
        }
    };
    let told = Told { stats: args.stats.as_deref(), quiet: args.quiet };
    attach::serve_on(root, remains, begun, "its old pager", Changes::default(), told)
}

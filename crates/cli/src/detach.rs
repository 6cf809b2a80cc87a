//! `spillway detach`: asks a pager to bring all pages home and to let its targets go.

use crate::control::{self, Request};
use crate::failure::{FAILED, Failure};
use crate::progress::Progress;
use crate::sockets;
use std::time::{Duration, Instant};

/// How long the pager may be silent while pages come home.
const SILENCE_LIMIT: Duration = Duration::from_secs(60);

/// What `spillway detach` is given.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A managed process, or the `spillway run` before it; a daemon, to let all go and end it
    #[arg(value_name = "PID", value_parser = clap::value_parser!(i32).range(1..))]
    pid: i32,
}

/// Returns when all pages are home.
pub(crate) fn detach(args: &Args) -> Result<u8, Failure> {
    let mut found = sockets::pager_of(args.pid)?;
    let since = Instant::now();
    let mut line = Progress::new("pages come home");
    let mut all = 0;
    let mut progress = |done, total| {
        all = total;
        line.show(done, total, since);
    };
    let request = match (found.listing.daemon, found.is_daemon_itself()) {
        (true, true) => Request::Shutdown,
        (true, false) => Request::Release { pid: found.known_by },
        (false, _) => Request::Detach,
    };
    let done = control::ask(&mut found.lines, &request, SILENCE_LIMIT, &mut progress);
    // It is not told of each page, and of the last ones least of all.
    if done.is_ok() {
        line.show(all, all, since);
    }
    drop(line);
    done.map(|_| 0).map_err(|text| Failure::new(FAILED, text))
}

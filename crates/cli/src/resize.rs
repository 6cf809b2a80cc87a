//! `spillway resize`: asks a pager to keep another budget; a daemon, another maximum for one target.

use crate::control::{self, Request};
use crate::failure::Failure;
use crate::request::ShareText;
use crate::{local, say, sockets};

/// What `spillway resize` is given.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A managed process, or the `spillway run` before it; a daemon, for all of its targets
    #[arg(value_name = "PID", value_parser = clap::value_parser!(i32).range(1..))]
    pid: i32,
    /// Local memory from now on: 512M, 2G, or a share of what was touched
    #[arg(value_name = "SIZE|PERCENT", allow_hyphen_values = true)]
    local: String,
}

/// Returns when the pager has taken the order; memory above the new budget is given back in the background.
pub(crate) fn resize(args: &Args) -> Result<u8, Failure> {
    // How little it may be is known to the pager.
    let bare = local::warning(local::parse_from(&args.local, 0)?);
    let mut found = sockets::pager_of(args.pid)?;
    let local = args.local.clone();
    let request = if found.listing.daemon && !found.is_daemon_itself() {
        Request::Share { pid: found.known_by, share: ShareText { max: Some(local), ..ShareText::default() } }
    } else {
        Request::Resize { local }
    };
    control::ask(&mut found.lines, &request, sockets::ANSWER_LIMIT, &mut |_, _| {}).map_err(Failure::refused)?;
    bare.into_iter().for_each(say::note);
    Ok(0)
}

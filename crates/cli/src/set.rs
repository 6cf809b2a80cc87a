//! `spillway set`: tells a pager which pages leave from now on, when and whose, and how many move together.

use crate::control::{self, Request};
use crate::failure::Failure;
use crate::sockets;
use spillway_core::policy::Settings;

/// What `spillway set` is given.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A managed process, or the `spillway run` before it
    #[arg(value_name = "PID", value_parser = clap::value_parser!(i32).range(1..))]
    pid: i32,
    /// policy=NAME, evict=on-demand or pre-evict, scope=target or global, block=elastic or 4k to 64k
    #[arg(required = true, value_name = "KEY=VALUE")]
    settings: Vec<String>,
}

/// Returns when the pager has taken the order: all of it, or none.
pub(crate) fn set(args: &Args) -> Result<u8, Failure> {
    check(&args.settings)?;
    let mut found = sockets::pager_of(args.pid)?;
    let request = Request::Set { settings: args.settings.clone() };
    control::ask(&mut found.lines, &request, sockets::ANSWER_LIMIT, &mut |_, _| {}).map_err(Failure::refused)?;
    Ok(0)
}

/// Refuses what no pager would understand, before one is asked.
fn check(settings: &[String]) -> Result<(), Failure> {
    let mut any = Settings::default();
    settings.iter().try_for_each(|pair| any.set(pair)).map_err(|error| Failure::refused(error.to_string()))
}

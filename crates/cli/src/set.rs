//! `spillway set`: tells a pager which pages leave from now on, when and whose, and how many move together.

use crate::control::{self, Request};
use crate::daemon::share;
use crate::failure::Failure;
use crate::{say, sockets};
use spillway_core::policy::Settings;

/// What `spillway set` is given.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A managed process, or the `spillway run` before it; a daemon, for all of its targets
    #[arg(value_name = "PID", value_parser = clap::value_parser!(i32).range(1..))]
    pid: i32,
    /// policy=, evict=, scope=, block=NAME; share-pages=on|off; with a daemon: min=, max=, weight=
    #[arg(required = true, value_name = "KEY=VALUE")]
    settings: Vec<String>,
}

/// Returns when the pager has taken the order: all of it, or none.
pub(crate) fn set(args: &Args) -> Result<u8, Failure> {
    if let [pair] = &args.settings[..]
        && let Some(("share-pages", value)) = pair.split_once('=')
    {
        return share_pages(args.pid, value);
    }
    let wanted = share::read(&args.settings).map_err(Failure::refused)?;
    let is_share = |pair: &&String| pair.split_once('=').is_some_and(|(key, _)| share::KEYS.contains(&key));
    let (of_one, of_all): (Vec<&String>, Vec<&String>) = args.settings.iter().partition(is_share);
    check(&of_all)?;
    let mut found = sockets::pager_of(args.pid)?;
    let pager = found.listing.pager_pid;
    let of_target = found.listing.daemon && !found.is_daemon_itself();
    let request = match wanted {
        Some(share) if of_all.is_empty() && of_target => Request::Share { pid: found.known_by, share },
        None if !of_target => Request::Set { settings: args.settings.clone() },
        Some(_) if !found.listing.daemon => {
            let keys = share::KEYS.join(", ");
            return Err(Failure::refused(format!(
                "{keys} divide a daemon's memory, and process {} has a pager of its own: `spillway resize` changes its budget",
                args.pid
            )));
        }
        Some(_) if !of_target => {
            let pair = of_one[0];
            return Err(Failure::refused(format!(
                "`{pair}` is for one target: `spillway set PID {pair}`; `spillway ps` lists them"
            )));
        }
        _ => {
            let pair = of_all[0];
            return Err(Failure::refused(format!(
                "`{pair}` is for all targets of the daemon: `spillway set {pager} {pair}`"
            )));
        }
    };
    control::ask(&mut found.lines, &request, sockets::ANSWER_LIMIT, &mut |_, _| {}).map_err(Failure::refused)?;
    Ok(0)
}

/// Whether equal pages of the target and of others are kept once in memory.
fn share_pages(pid: i32, value: &str) -> Result<u8, Failure> {
    let on = match value {
        "on" => true,
        "off" => false,
        _ => return Err(Failure::refused(format!("`{}` is neither on nor off", say::clean(value)))),
    };
    let mut found = sockets::pager_of(pid)?;
    if found.is_daemon_itself() {
        return Err(Failure::refused(format!(
            "`share-pages={value}` is for one target: `spillway set PID share-pages={value}`; `spillway ps` lists them"
        )));
    }
    let request = Request::SharePages { pid: found.known_by, on };
    control::ask(&mut found.lines, &request, sockets::ANSWER_LIMIT, &mut |_, _| {}).map_err(Failure::refused)?;
    Ok(0)
}

/// Refuses what no pager would understand, before one is asked.
fn check(settings: &[&String]) -> Result<(), Failure> {
    if settings.iter().any(|pair| pair.starts_with("share-pages=")) {
        return Err(Failure::refused("`share-pages=` is set alone: give the other settings to another `spillway set`"));
    }
    let mut any = Settings::default();
    settings.iter().try_for_each(|pair| any.set(pair)).map_err(|error| Failure::refused(error.to_string()))
}

//! `spillway pool drain`: has a server leave its pool, and waits until it holds nothing.

use crate::failure::{FAILED, Failure, REFUSED};
use crate::progress::Progress;
use crate::say;
use spillway_store::pool::{self, Drain, OpenError, OpenErrorKind};
use std::time::{Duration, Instant};

/// How often the server is asked how much is left.
const ASK_EVERY: Duration = Duration::from_millis(200);

/// What `spillway pool drain` is given.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The server that is to leave, as the pool names it: b:7070
    #[arg(value_name = "SERVER")]
    server: String,
    /// The pool, as for `run --pool`: tcp://a:7070,b:7070
    #[arg(value_name = "URL")]
    url: String,
    /// Have it take pages again instead
    #[arg(long)]
    cancel: bool,
    /// Give up waiting when no page has left for so long; the server goes on leaving
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..))]
    patience: u32,
}

fn failed(error: &OpenError) -> Failure {
    let status = if error.kind == OpenErrorKind::Unreachable { FAILED } else { REFUSED };
    Failure::new(status, say::clean(&error.to_string()))
}

/// Returns when the server is empty. The status is 1 when it does not get there.
pub(crate) fn drain(args: &Args) -> Result<u8, Failure> {
    let mut drain = Drain::ask(&args.url, &args.server, !args.cancel).map_err(|error| failed(&error))?;
    let server = say::clean(&drain.server);
    if args.cancel {
        say::note(format!("{server} takes pages again"));
        return Ok(0);
    }
    let (mut left, mut tenants) = drain.left().map_err(|error| failed(&error))?;
    say::note(format!("{server} leaves: {left} pages of {tenants} pagers move to the others"));
    let (began, total) = (Instant::now(), left);
    let mut moved = began;
    let mut line = Progress::new("pages move");
    while left > 0 {
        if moved.elapsed() > Duration::from_secs(args.patience.into()) {
            drop(line);
            return Err(Failure::new(FAILED, why_not(args, &server, left, tenants)));
        }
        std::thread::sleep(ASK_EVERY);
        let before = left;
        (left, tenants) = drain.left().map_err(|error| failed(&error))?;
        if left < before {
            moved = Instant::now();
        }
        line.show(total.saturating_sub(left), total, began);
    }
    drop(line);
    say::note(format!("{server} holds nothing and takes nothing: it may be stopped"));
    Ok(0)
}

/// What may keep pages where they are.
fn why_not(args: &Args, server: &str, left: u64, tenants: u64) -> String {
    let others = pool::status(&args.url).unwrap_or_default();
    let others: Vec<_> = others.iter().filter(|report| report.server != server).collect();
    let usable = others.iter().filter(|report| report.error.is_none() && report.leaving == Some(false));
    let free: u64 =
        usable.map(|report| report.capacity_bytes.unwrap_or(0).saturating_sub(report.used_bytes.unwrap_or(0))).sum();
    let why = match () {
        () if others.is_empty() => "the pool has no other server: pagers that are started with more have where to go".to_owned(),
        () if others.iter().all(|report| report.error.is_some()) => "no other server answers: start them".to_owned(),
        () if free < left.saturating_mul(spillway_core::PAGE_BYTES_U64) => {
            "the others have no room for them: give them more memory, or add a server".to_owned()
        }
        () => "those pagers have too few other servers for their parity, use a pool without parity, are stopped, or are of a \
               version that knows no leaving: see `spillway ps` on their hosts"
            .to_owned(),
    };
    format!("{server} still has {left} pages of {tenants} pagers, and none has left for {} s: {why}", args.patience)
}

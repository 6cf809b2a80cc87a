//! `--pool`: from a URL to a store and the thread that keeps it supplied.

use crate::failure::{FAILED, Failure};
use spillway_pager::LastingPool;
use spillway_store::pool::{self, Lookup, Membership, Opened, TakenOver, Url};
use spillway_store::vault::Vault;
use spillway_store::{Inheritance, Refill, Store};

/// What `--pool` is when it is not given.
pub(crate) const DEFAULT: &str = "local:";

/// Reads a URL; refuses one that names no pool. Nothing is opened.
pub(crate) fn parse(url: &str) -> Result<Url, Failure> {
    Url::parse(url).map_err(|error| Failure::refused(error.to_string()))
}

/// Opens the pool, and starts the threads that it may need.
pub(crate) fn open(url: &str) -> Result<Box<dyn Store>, Failure> {
    begin(pool::open(url).map_err(|error| Failure::refused(error.to_string()))?)
}

fn begin(Opened { store, refill, membership, lookup, note }: Opened) -> Result<Box<dyn Store>, Failure> {
    begin_threads(refill, membership, lookup)?;
    note.into_iter().for_each(|note| crate::say::note(&note));
    Ok(store)
}

/// The same in memory that outlives this process, where the pool and the kernel allow that.
pub(crate) fn open_lasting(url: &str) -> Result<(Box<dyn Store>, Option<LastingPool>), Failure> {
    let refused = |error: pool::OpenError| Failure::refused(error.to_string());
    // Threads of an older kernel cannot be asked for their descriptors.
    let vault = Vault::create().ok().filter(|_| spillway_pager::can_take_over());
    let Some(vault) = vault else { return Ok((open(url)?, None)) };
    let Some(opened) = pool::open_lasting(url, &vault).map_err(refused)? else {
        return Ok((open(url)?, None));
    };
    Ok((begin(opened)?, Some(LastingPool { vault, url: url.into() })))
}

/// The pool that a dead pager has left.
pub(crate) fn take_over(url: &str, vault: &Vault) -> Result<Box<dyn Inheritance>, Failure> {
    let opened = pool::take_over(url, vault).map_err(|error| Failure::refused(error.to_string()))?;
    let Some(TakenOver { store, refill, membership, lookup }) = opened else {
        return Err(Failure::refused(format!("the pool `{url}` cannot be taken over from a dead pager")));
    };
    begin_threads(refill, membership, lookup)?;
    Ok(store)
}

fn supply(refill: Refill) -> Result<(), Failure> {
    start("refill", move || refill.run())
}

/// What a pool has to be done beside it.
fn begin_threads(
    refill: Option<Refill>,
    membership: Option<Membership>,
    lookup: Option<Lookup>,
) -> Result<(), Failure> {
    refill.map(supply).transpose()?;
    membership.map(follow).transpose()?;
    lookup.map(look_up).transpose()?;
    Ok(())
}

fn follow(membership: Membership) -> Result<(), Failure> {
    start("members", move || membership.run(|line| crate::say::note(crate::say::clean(line))))
}

fn look_up(lookup: Lookup) -> Result<(), Failure> {
    start("names", move || lookup.run())
}

fn start(name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), Failure> {
    let failed = |error| Failure::new(FAILED, format!("the pool's thread could not be started: {error}"));
    crate::control::thread(name).spawn(work).map(drop).map_err(failed)
}

//! `--pool`: from a URL to a store and the thread that keeps it supplied.

use crate::failure::{FAILED, Failure};
use spillway_store::pool::{self, Opened, Url};
use spillway_store::{Refill, Store};
use std::time::Duration;

/// What `--pool` is when it is not given.
pub(crate) const DEFAULT: &str = "local:";
/// How often the embedded pool's reserve is filled up: four times while a full one lasts at full speed.
const TOP_UP_EVERY: Duration = Duration::from_millis(10);

/// Reads a URL; refuses one that names no pool. Nothing is opened.
pub(crate) fn parse(url: &str) -> Result<Url, Failure> {
    Url::parse(url).map_err(|error| Failure::refused(error.to_string()))
}

/// Opens the pool, and starts the thread that it may need.
pub(crate) fn open(url: &str) -> Result<Box<dyn Store>, Failure> {
    let Opened { store, refill, note } = pool::open(url).map_err(|error| Failure::refused(error.to_string()))?;
    if let Some(refill) = refill {
        let started = crate::control::thread("refill").spawn(move || top_up(refill));
        started.map_err(|error| Failure::new(FAILED, format!("the pool's thread could not be started: {error}")))?;
    }
    note.into_iter().for_each(|note| crate::say::note(&note));
    Ok(store)
}

fn top_up(mut refill: Refill) {
    while refill.top_up() {
        std::thread::sleep(TOP_UP_EVERY);
    }
}

//! A simulation of everything around the pager's core, from one seed.
//!
//! The core that is shipped runs against a virtual kernel ([`kernel`], [`uffd`], [`calls`]), whose guests check each byte
//! they read against a shadow memory ([`shadow`]), and over a store that lies ([`store`]) and may answer late
//! ([`transfers`], [`journeys`]). The driver and the watcher
//! ([`driver`], [`watcher`]) follow the real ones rule by rule. Who takes the next step is drawn from the seed, so any
//! interleaving can occur, and occurs again under the same seed.
//!
//! A run fails when a guest reads what it must not, waits for ever, or is told of a loss that did not happen; when the
//! core's counts are wrong or its budget is exceeded without an excuse; when a page stays that could leave; and when
//! anything is left at the end.
//!
//! ```
//! let plan = spillway_sim::Plan { seed: 1, steps: 500, mutation: None };
//! assert!(spillway_sim::run(plan).is_ok());
//! ```
#![forbid(unsafe_code)]

pub mod agent;
pub mod calls;
mod capture;
mod checks;
mod death;
pub mod driver;
mod estate;
mod failure;
mod fork;
pub mod guest;
pub mod journeys;
pub mod kernel;
pub mod letters;
mod many;
pub mod memory;
mod mutation;
mod reader;
mod release;
mod removals;
mod rng;
mod setting;
pub mod shadow;
pub mod store;
mod target;
mod trace;
pub mod transfers;
pub mod uffd;
pub mod watcher;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};

pub use failure::Failure;
pub use many::run_many;
pub use mutation::Mutation;
pub use world::{DEATHS, DEATHS_AFAR, Plan, Seen};

use trace::Trace;
use world::World;

/// One run.
///
/// # Errors
/// When something was seen that must not be; a panic of the core counts as such. The run is then repeated with a trace,
/// of which the failure holds the end.
pub fn run(plan: Plan) -> Result<Seen, Failure> {
    attempt(plan, false).or_else(|_| attempt(plan, true))
}

fn attempt(plan: Plan, trace: bool) -> Result<Seen, Failure> {
    let mut world = World::new(plan, Trace::new(trace));
    let result = catch_unwind(AssertUnwindSafe(|| world.run(plan)));
    let result = result.unwrap_or_else(|panic| Err(Failure::new(format!("panic: {}", text_of(&*panic)))));
    result.map_err(|failure| Failure { seed: plan.seed, step: world.now(), tail: world.tail(), ..failure })
}

fn text_of(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without a message")
}

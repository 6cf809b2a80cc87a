//! The memory server: lends this host's memory to pagers on others.
//!
//! [`Server::bind`] prepares everything that can fail, [`Server::run`] serves until [`Stop::stop`]. What is said on the
//! wire is in `spillway-wire`, and so is TLS, which may lie between that and the sockets.
//!
//! Threads: *workers*, each with its own connections and its own epoll; one *keeper*, which ends leases and has the spill
//! file. What they share is in `Shared`: the pool of pages behind many small locks, none of which is held while anyone
//! reads or writes a socket or a file.
#![deny(unsafe_code)]

mod budget;
mod config;
mod connection;
mod keeper;
mod mix;
mod nearby;
mod output;
mod parked;
mod pool;
mod refusals;
pub mod rehearsal;
mod server;
mod session;
mod shared;
mod spill;
mod stats;
#[allow(unsafe_code)]
mod sys;
mod table;
mod tenants;
mod twins;
mod worker;

pub use config::{Config, Limits, MEMORY_MIN_BYTES, SpillConfig};
pub use pool::Dedupe;
pub use refusals::{Refusal, Refusals, Teller, Why, refusals};
pub use server::{Error, Server, Stop};
pub use spillway_wire::tls;

//! What is to be recorded for study, and where it goes.

use std::time::Duration;

use spillway_study::ring::Producer;

/// A recording of everything that the pager sees; see [`spillway_study::record`].
pub struct Recording {
    /// Records go here. What finds no room is dropped and counted: the fault thread waits for nobody.
    pub to: Producer,
    /// Makes first touches visible, for an exact trace.
    pub windows: Option<Windows>,
}

/// Windows of time. At the start of each, pages leave the target, so that the first touch of each raises a fault.
#[derive(Clone, Copy, Debug)]
pub struct Windows {
    /// How long each lasts, or longer where pages take longer to leave.
    pub length: Duration,
    /// Only pages leave whose [`spillway_core::sample::hash`] is below.
    pub hash_below: u64,
}

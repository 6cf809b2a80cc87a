//! The pager's pure centre: no thread, no socket, no clock, no unsafe code.
#![forbid(unsafe_code)]

pub mod size;
pub mod units;

pub use units::{PAGE_BYTES, Page};

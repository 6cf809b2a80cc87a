//! Studies paging: traces of references to pages, and what can be computed from them.
//!
//! Invariants: nothing here touches a process, a thread or a clock; what is read from outside never panics and takes
//! memory in proportion to the distinct pages and references that it names, up to [`references::REFERENCES_MAX`].
#![forbid(unsafe_code)]

pub mod advice;
pub mod cost;
pub mod curve;
pub mod error;
pub mod footprint;
pub mod optimal;
pub mod record;
pub mod references;
pub mod replay;
pub mod ring;
pub mod sampled;
pub mod source;
pub mod stack;
pub mod text;
pub mod trace;
pub mod workingset;

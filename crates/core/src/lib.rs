//! The pager's pure centre: no thread, no socket, no clock, no unsafe code.
#![forbid(unsafe_code)]

pub mod blocks;
pub mod book;
mod captures;
mod chunks;
pub mod evict;
pub mod lasting;
pub mod mappings;
pub mod page;
pub mod pager;
pub mod policy;
mod reach;
pub mod regions;
pub mod sample;
pub mod shares;
pub mod size;
pub mod streams;
mod survival;
pub mod table;
pub mod time;
pub mod touches;
pub mod trend;
pub mod units;
pub mod window;

pub use units::{Address, PAGE_BYTES, PAGE_BYTES_U64, Page, PageIndex, Span, TargetId, TreeId};

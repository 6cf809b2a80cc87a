//! On what terms a program is managed, whether it is started or adopted.

use crate::trace::Tape;
use spillway_core::policy::Settings;
use spillway_pager::Choice;
use std::path::Path;

/// See the module's documentation.
pub(crate) struct Terms<'a> {
    /// As for `--local`.
    pub(crate) local: &'a str,
    /// Which mappings are managed.
    pub(crate) choice: Choice,
    /// As for `--pool`.
    pub(crate) pool: &'a str,
    /// Which pages leave, when and whose, and how many move together.
    pub(crate) replacement: Settings,
    /// Whether equal pages of it and others are kept once in memory.
    pub(crate) share_pages: bool,
    /// For the final counters.
    pub(crate) stats: Option<&'a Path>,
    /// Say nothing but what went wrong.
    pub(crate) quiet: bool,
    /// What is to be recorded.
    pub(crate) tape: Option<&'a Tape>,
}

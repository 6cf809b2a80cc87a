//! Why a command ends without having done its work.
//!
//! Invariant: a failure is one line which names the remedy; `main` prints it and nothing else does.

use std::fmt;

/// Bad input, or a machine or target that does not allow what was asked; nothing was changed.
pub(crate) const REFUSED: u8 = 2;
/// What was begun could not be finished.
pub(crate) const FAILED: u8 = 1;
/// The pager of a running target died, and the target with it (`EX_SOFTWARE`).
pub(crate) const PAGER_DIED: u8 = 70;
/// The program to run was found but could not be executed, as `env` and shells say it.
pub(crate) const NOT_EXECUTABLE: u8 = 126;
/// The program to run was not found, as `env` and shells say it.
pub(crate) const NOT_FOUND: u8 = 127;

/// A line for the user and the exit status that goes with it.
#[derive(Debug)]
pub(crate) struct Failure {
    /// The command's exit status.
    pub(crate) status: u8,
    text: String,
}

impl Failure {
    /// A failure with the given exit status.
    pub(crate) fn new(status: u8, text: impl Into<String>) -> Self {
        Self { status, text: text.into() }
    }

    /// What was asked cannot be done, and nothing was changed.
    pub(crate) fn refused(text: impl Into<String>) -> Self {
        Self::new(REFUSED, text)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl From<spillway_pager::Error> for Failure {
    fn from(error: spillway_pager::Error) -> Self {
        Self::refused(error.to_string())
    }
}

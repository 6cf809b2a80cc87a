//! Words for the user.
//!
//! Invariants: a closed or full stream never ends us, unlike `println!`; nothing that a stranger chose (a command
//! line, a file name, another pager's text) reaches a terminal with control characters in it.

use std::fmt::Display;
use std::io::{self, Write};

/// Writes a line to standard error, after our name.
pub(crate) fn note(text: impl Display) {
    let _ = writeln!(io::stderr(), "spillway: {text}");
}

/// Writes text to standard output. False when nobody reads it any more.
pub(crate) fn print(text: &str) -> bool {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).is_ok()
}

/// The text with control characters made harmless.
pub(crate) fn clean(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

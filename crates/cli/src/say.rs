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

/// An error of the system without its number.
pub(crate) fn error(error: &io::Error) -> String {
    let text = error.to_string();
    text.rfind(" (os error").map_or(text.clone(), |end| text[..end].to_owned())
}

/// The text with control characters made harmless.
pub(crate) fn clean(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_plain() {
        assert_eq!(error(&io::Error::from_raw_os_error(libc::ENOENT)), "No such file or directory");
        assert_eq!(error(&io::Error::other("odd")), "odd");
        assert_eq!(clean("a\x1b[31m\nb\u{9b}ü"), "a?[31m?b?ü");
    }
}

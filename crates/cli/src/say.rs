//! Words for the user.
//!
//! Invariants: a closed or full stream never ends us, unlike `println!`; nothing that a stranger chose (a command
//! line, a file name, another pager's text) reaches a terminal with control characters in it; no line carries the
//! numbers that the standard library appends to errors of the system.

use crate::failure::{FAILED, Failure};
use std::fmt::Display;
use std::io::{self, Write};

/// Writes a line to standard error, after our name.
pub(crate) fn note(text: impl Display) {
    let _ = writeln!(io::stderr(), "spillway: {}", plain(&text.to_string()));
}

/// Writes what was asked for to standard output. That nobody reads it any more is no failure.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(why) if why.kind() != io::ErrorKind::BrokenPipe => {
            Err(Failure::new(FAILED, format!("the output could not be written: {}", error(&why))))
        }
        _ => Ok(()),
    }
}

/// An error of the system without its number.
pub(crate) fn error(error: &io::Error) -> String {
    plain(&error.to_string())
}

/// The text without the numbers of errors of the system, wherever in it they are: the words say the same.
pub(crate) fn plain(text: &str) -> String {
    let mut pieces = text.split(" (os error ");
    let mut plain = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        match piece.split_once(')') {
            Some((number, rest)) if number.parse::<i32>().is_ok() => plain.push_str(rest),
            _ => plain.extend([" (os error ", piece]),
        }
    }
    plain
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
        let text = "userfaultfd (Operation not permitted (os error 1)); x: Exec format error (os error 8)";
        assert_eq!(plain(text), "userfaultfd (Operation not permitted); x: Exec format error");
        for text in ["", "plain", " (os error ", "x (os error y) z", "x (os error 1"] {
            assert_eq!(plain(text), text);
        }
        assert_eq!(clean("a\x1b[31m\nb\u{9b}ü"), "a?[31m?b?ü");
    }
}

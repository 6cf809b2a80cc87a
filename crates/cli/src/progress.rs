//! A line that shows how far pages are on their way.
//!
//! Invariants: on a terminal one line is overwritten in place, plain text without colours or escape sequences; anywhere
//! else nothing is written.

use spillway_core::{PAGE_BYTES_U64, size::Bytes};
use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

/// The line. Dropping it makes room for the next one.
pub(crate) struct Progress {
    what: &'static str,
    shown: bool,
    width: usize,
}

impl Progress {
    /// A line on standard error, if that is a terminal; `what` is being done.
    pub(crate) fn new(what: &'static str) -> Self {
        Self { what, shown: io::stderr().is_terminal(), width: 0 }
    }

    /// Overwrites the line.
    pub(crate) fn show(&mut self, done: u64, total: u64, since: Instant) {
        if self.shown && total > 0 {
            let text = line(self.what, done, total, since.elapsed());
            let _ = write!(io::stderr(), "\r{text:<0$}", self.width);
            self.width = text.len();
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.width > 0 {
            let _ = writeln!(io::stderr());
        }
    }
}

fn line(what: &str, done: u64, total: u64, spent: Duration) -> String {
    let share = done.min(total) * 100 / total.max(1);
    let bar = "#".repeat(usize::try_from(share / 5).unwrap_or(0));
    format!(
        "{what} [{bar:<20}] {share}% of {}{}",
        Bytes(total.saturating_mul(PAGE_BYTES_U64)),
        left(done, total, spent)
    )
}

/// How long the rest takes at the speed so far, as words to append; empty before there is a speed.
pub(crate) fn left(done: u64, total: u64, spent: Duration) -> String {
    if done == 0 || done >= total {
        return String::new();
    }
    let rest = spent.as_millis() * u128::from(total - done) / u128::from(done);
    format!(", {} s left", rest.div_ceil(1000))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOME: &str = "pages come home";

    #[test]
    fn lines() {
        let second = Duration::from_secs(1);
        assert_eq!(line(HOME, 0, 512, second), "pages come home [                    ] 0% of 2.0 MiB");
        assert_eq!(line(HOME, 128, 512, second), "pages come home [#####               ] 25% of 2.0 MiB, 3 s left");
        assert_eq!(line(HOME, 600, 512, second), "pages come home [####################] 100% of 2.0 MiB");
        assert_eq!(left(1, u64::MAX, second), ", 18446744073709551614 s left");
    }
}

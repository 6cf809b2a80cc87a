//! Times as people write and read them: `4us`, `100ms`, `30s`.

use std::fmt;

/// Units from the smallest, in nanoseconds.
const UNITS: [(&str, u64); 5] =
    [("ns", 1), ("us", 1_000), ("ms", 1_000_000), ("s", 1_000_000_000), ("min", 60_000_000_000)];

/// The longest time that is understood in nanoseconds: a year.
const LONGEST_NS: u64 = 365 * 24 * 60 * 60_000_000_000;

/// A text that is no time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoTime(String);

impl fmt::Display for NoTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` is no time: write a whole number and a unit, such as 4us, 100ms or 30s", self.0.escape_debug())
    }
}

impl std::error::Error for NoTime {}

/// Reads a time in nanoseconds: a whole number and one of `ns`, `us`, `ms`, `s`, `min`.
///
/// # Errors
/// When `text` is no such time, or more than a year.
pub fn parse_ns(text: &str) -> Result<u64, NoTime> {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let unit = UNITS.iter().find(|(name, _)| *name == unit).map(|(_, ns)| *ns);
    let ns = number.parse::<u64>().ok().zip(unit).and_then(|(number, unit)| number.checked_mul(unit));
    ns.filter(|ns| *ns <= LONGEST_NS).ok_or_else(|| NoTime(text.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read() {
        for (text, ns) in
            [("0ns", 0), ("4us", 4_000), ("100ms", 100_000_000), ("30s", 30_000_000_000), ("2min", 120_000_000_000)]
        {
            assert_eq!(parse_ns(text), Ok(ns), "{text}");
        }
        for text in ["", "4", "us", "-1s", "1.5s", "4 us", "99999999999999999999s", "9999999min", "4µs", "４s"] {
            assert!(parse_ns(text).is_err_and(|error| error.to_string().contains("such as 4us")), "{text}");
        }
    }
}

//! Lists of addresses as other tools write them, one reference a line.
//!
//! | line | from |
//! |---|---|
//! | ` L 04222cac,8`, ` S ..`, ` M ..`, `I  ..` | `valgrind --tool=lackey --trace-mem=yes` (hexadecimal address, bytes) |
//! | `0x7f001234 R` or `W` | tools built on Pin and their like |
//! | `0x401000: R 0x7f001234` | Pin's `pinatrace` (instruction, access, address) |
//! | `7f001234` | a hexadecimal address |
//!
//! Empty lines, and lines that begin with `#` or `==`, are passed over.

use std::io::{BufRead, Read};

use spillway_core::PAGE_BYTES_U64;

use crate::error::Error;
use crate::record::{Access, PAGES_MAX};

/// The longest line that is read, in bytes: far beyond any of those formats.
const LINE_BYTES_MAX: u64 = 4096;
/// The largest access in bytes: a whole save area of a processor's state fits.
const ACCESS_BYTES_MAX: u64 = 64 << 10;
/// How much of a line an error shows.
const SHOWN: usize = 40;

/// Adjacent pages that a line refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reference {
    /// The first.
    pub page: u64,
    /// How many, at least one.
    pub pages: u64,
    /// What was done.
    pub access: Access,
}

/// The references of a text.
pub struct Lines<R: BufRead> {
    from: R,
    line: Vec<u8>,
    number: u64,
}

impl<R: BufRead> Lines<R> {
    /// Reads `from`.
    pub fn new(from: R) -> Self {
        Self { from, line: Vec::new(), number: 0 }
    }

    /// The next reference; `None` at the end.
    ///
    /// # Errors
    /// When a line is no reference, or one to what no program has.
    pub fn next_reference(&mut self) -> Result<Option<Reference>, Error> {
        loop {
            self.line.clear();
            self.number += 1;
            let got = Read::take(&mut self.from, LINE_BYTES_MAX).read_until(b'\n', &mut self.line)?;
            if got == 0 {
                return Ok(None);
            }
            let text = String::from_utf8_lossy(&self.line);
            let line = text.trim();
            if line.is_empty() || line.starts_with('#') || line.starts_with("==") {
                continue;
            }
            let whole = self.line.ends_with(b"\n") || (got as u64) < LINE_BYTES_MAX;
            return match parse(line).filter(|_| whole) {
                Some(reference) if reference.page + reference.pages > PAGES_MAX => Err(Error::TooHigh(self.number)),
                Some(reference) => Ok(Some(reference)),
                None => Err(Error::NoReference { line: self.number, text: line.chars().take(SHOWN).collect() }),
            };
        }
    }
}

/// Reads one line, without spaces around it.
pub fn parse(line: &str) -> Option<Reference> {
    let mut words = line.split_ascii_whitespace();
    let first = words.next()?;
    let second = words.next();
    let third = words.next();
    if words.next().is_some() {
        return None;
    }
    match (first, second, third) {
        ("L" | "I", Some(operand), None) => sized(operand, Access::Read),
        ("S" | "M", Some(operand), None) => sized(operand, Access::Write),
        (instruction, Some(access), Some(address)) => {
            hexadecimal(instruction.strip_suffix(':')?)?;
            reference(hexadecimal(address)?, 1, letter(access)?)
        }
        (address, Some(access), None) => reference(hexadecimal(address)?, 1, letter(access)?),
        (address, None, None) => reference(hexadecimal(address)?, 1, Access::Unknown),
        _ => None,
    }
}

fn letter(access: &str) -> Option<Access> {
    match access {
        "R" => Some(Access::Read),
        "W" => Some(Access::Write),
        _ => None,
    }
}

fn sized(operand: &str, access: Access) -> Option<Reference> {
    let (address, bytes) = operand.split_once(',')?;
    let bytes = bytes.parse().ok().filter(|bytes| (1..=ACCESS_BYTES_MAX).contains(bytes))?;
    reference(hexadecimal(address)?, bytes, access)
}

fn hexadecimal(text: &str) -> Option<u64> {
    let digits = text.strip_prefix("0x").unwrap_or(text);
    u64::from_str_radix(digits, 16).ok().filter(|_| !digits.starts_with('+'))
}

fn reference(address: u64, bytes: u64, access: Access) -> Option<Reference> {
    let last = address.checked_add(bytes - 1)? / PAGE_BYTES_U64;
    let page = address / PAGE_BYTES_U64;
    Some(Reference { page, pages: last - page + 1, access })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_told_apart() {
        let of = |page, pages, access| Some(Reference { page, pages, access });
        for (line, expected) in [
            ("L 04222cac,8", of(0x4222, 1, Access::Read)),
            ("S 04222ffc,8", of(0x4222, 2, Access::Write)),
            ("M 0421c7cc,4", of(0x421c, 1, Access::Write)),
            ("I  04016b20,3", of(0x4016, 1, Access::Read)),
            ("0x7f001234 R", of(0x7f001, 1, Access::Read)),
            ("0x7f001234 W", of(0x7f001, 1, Access::Write)),
            ("0x401000: W 0x7f001234", of(0x7f001, 1, Access::Write)),
            ("7f001234", of(0x7f001, 1, Access::Unknown)),
            ("ffffffffffffffff", of((1 << 52) - 1, 1, Access::Unknown)),
        ] {
            assert_eq!(parse(line), expected, "{line}");
        }
        for line in
            ["hello", "L 04222cac", "L 0,0", "L 0,99999", "S ffffffffffffffff,2", "+5", "0x1 X", "1 R 2", "1: R 2 3"]
        {
            assert_eq!(parse(line), None, "{line}");
        }
    }

    #[test]
    fn what_is_no_reference_is_named_by_its_line() {
        let mut lines = Lines::new(&b"==12== Lackey\n\n# note\n 0x1000 R\nwhat is this\n"[..]);
        assert_eq!(lines.next_reference().expect("a reference").map(|found| found.page), Some(1));
        let error = lines.next_reference().expect_err("no reference").to_string();
        assert!(error.contains("line 5 is `what is this`"), "{error}");
        let mut lines = Lines::new(&b"0xffffffffff600000 R\nffffffffffdfffff\nS ffffffffffdfffff,2\n"[..]);
        for page in [0xf_ffff_ffff_f600, PAGES_MAX - 1] {
            assert_eq!(lines.next_reference().expect("a reference").map(|found| found.page), Some(page));
        }
        let error = lines.next_reference().expect_err("beyond all programs").to_string();
        assert!(error.contains("line 3"), "{error}");
        let long = format!("{:0>5000}\n", 1);
        assert!(Lines::new(long.as_bytes()).next_reference().is_err());
    }
}

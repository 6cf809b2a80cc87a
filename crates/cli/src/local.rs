//! `--local` and the size of `resize`: bytes, or a share of what the targets have touched.

use crate::failure::Failure;
use spillway_core::size::{Bytes, parse_bytes};
use spillway_pager::{LOCAL_FLOOR_BYTES, Local};

/// No limit.
pub(crate) const ALL: &str = "all";

/// Parses `512M`, `2G`, `1073741824`, `50%` or `all`.
pub(crate) fn parse(text: &str) -> Result<Local, Failure> {
    parse_from(text, LOCAL_FLOOR_BYTES)
}

/// The same where a budget may have `floor_bytes`, and no less.
pub(crate) fn parse_from(text: &str, floor_bytes: u64) -> Result<Local, Failure> {
    let refuse = |why: String| Err(Failure::refused(why));
    if text == ALL {
        return Ok(Local::All);
    }
    if let Some(number) = text.strip_suffix('%') {
        return match number.parse() {
            Ok(percent @ 1..=100) => Ok(Local::Percent(percent)),
            _ => refuse(format!("`{text}` is no share: give 1% to 100%, or a size such as 512M")),
        };
    }
    match parse_bytes(text) {
        Err(error) => refuse(error.to_string()),
        Ok(bytes) if bytes < floor_bytes => {
            let least = Bytes(floor_bytes);
            refuse(format!("`{text}` of local memory is too little to run in: give at least {least}"))
        }
        Ok(bytes) => Ok(Local::Bytes(bytes)),
    }
}

/// A budget below this is enough for no instruction that touches many pages at once.
const BARE_BYTES: u64 = 16 * 4096;

/// What to expect of a budget that is only for guests of a software emulation, which touches one page of theirs at a time.
pub(crate) fn warning(local: Local) -> Option<&'static str> {
    let is_bare = matches!(local, Local::Bytes(bytes) if bytes < BARE_BYTES);
    is_bare.then_some(
        "in less than 64K only a guest of QEMU's software emulation is sure to go on: docs/VMM.md; `spillway resize` gives more",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_shares() {
        for (text, local) in [
            ("4M", Local::Bytes(4 << 20)),
            ("2g", Local::Bytes(2 << 30)),
            ("1073741824", Local::Bytes(1 << 30)),
            ("1%", Local::Percent(1)),
            ("100%", Local::Percent(100)),
            ("all", Local::All),
        ] {
            assert_eq!(parse(text).ok(), Some(local), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_refused_with_a_remedy() {
        for text in [
            "",
            "%",
            "0%",
            "101%",
            "300%",
            "-5%",
            "x",
            "M",
            "-1M",
            "1X",
            "99999999999999999999",
            "18446744073709551615T",
            "½G",
            "1 G G",
        ] {
            let failure = parse(text).expect_err(text);
            assert_eq!(failure.status, crate::failure::REFUSED);
            assert!(failure.to_string().contains(": "), "{failure}");
        }
        for text in ["0", "1", "4095K", "3M"] {
            assert!(parse(text).expect_err(text).to_string().contains("at least 4.0 MiB"));
        }
        assert!(warning(Local::Bytes(BARE_BYTES)).is_none() && warning(Local::Bytes(4096)).is_some());
        assert_eq!(parse_from("720K", 4096).ok(), Some(Local::Bytes(180 * 4096)));
        assert!(parse_from("4095", 4096).expect_err("a byte less").to_string().contains("at least 4.0 KiB"));
    }
}

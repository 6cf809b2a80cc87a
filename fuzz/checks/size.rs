//! Sizes and times are read exactly or refused in one clear line, and those shown can be read again.

use spillway_core::size::{Bytes, parse_bytes};
use spillway_core::time::parse_ns;

/// Holds one input to it.
pub fn check(text: &str) {
    if let Ok(ns) = parse_ns(text) {
        assert_eq!(parse_ns(&format!("{ns}ns")), Ok(ns));
    }
    match parse_bytes(text) {
        Ok(bytes) => {
            assert_eq!(parse_bytes(&bytes.to_string()), Ok(bytes));
            // Units that are shown and not read start at 1024 TiB.
            if bytes < 1023 << 40 {
                let again = parse_bytes(&Bytes(bytes).to_string()).unwrap();
                assert!(again.abs_diff(bytes) <= bytes / 16, "{bytes} is shown as {}", Bytes(bytes));
            }
        }
        Err(error) => {
            let line = error.to_string();
            assert!(!line.is_empty() && !line.contains(char::is_control), "{line:?}");
        }
    }
}

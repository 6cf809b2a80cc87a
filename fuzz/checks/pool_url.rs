//! Whatever is typed after `--pool` names a pool or gives one clear line.

use spillway_store::local::SIZE_MIN_BYTES;
use spillway_store::pool::Url;

/// Holds one input to it.
pub fn check(text: &str) {
    match Url::parse(text) {
        Ok(Url::Local(config)) => {
            assert!(text.starts_with("local:"));
            assert!(config.size_bytes.is_none_or(|bytes| bytes >= SIZE_MIN_BYTES));
        }
        Err(error) => {
            let line = error.to_string();
            assert!(!line.is_empty() && !line.contains(char::is_control), "{line:?}");
        }
    }
}

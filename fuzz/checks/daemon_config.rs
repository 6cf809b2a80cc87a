//! Whatever stands in a daemon's file of settings is read, or refused in one clear line.

#[path = "../../crates/cli/src/daemon/config.rs"]
#[allow(dead_code, reason = "its values are the daemon's business")]
mod config;

use config::Config;

/// Holds one input to it.
pub fn check(text: &str) {
    if let Err(why) = Config::parse(text) {
        assert!(!why.is_empty() && !why.contains(char::is_control), "{why:?}");
    }
}

//! The daemon's settings, as TOML. What is not known is refused, with its line.

use serde::Deserialize;
use spillway_core::policy::Settings;

/// What a file says; what it does not is as it was, or the default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Config {
    /// As for `--local`.
    pub(crate) local: Option<String>,
    /// As for `--pool`.
    pub(crate) pool: Option<String>,
    /// Which pages leave, when and whose, and how many move together, if any of that is said.
    pub(crate) replacement: Option<Settings>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    local: Option<String>,
    pool: Option<String>,
    policy: Option<String>,
    evict: Option<String>,
    scope: Option<String>,
    block: Option<String>,
}

impl Config {
    /// Reads it; the error is one line.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let read: Text = toml::from_str(text).map_err(|error| {
            let line = error.span().map_or(1, |span| text[..span.start.min(text.len())].matches('\n').count() + 1);
            let what: Vec<&str> = error.message().lines().map(str::trim).collect();
            let what: String = what.join("; ").chars().map(|c| if c.is_control() { '?' } else { c }).collect();
            format!("line {line}: {what}")
        })?;
        let mut settings = Settings::default();
        let mut any = false;
        let pairs = [("policy", read.policy), ("evict", read.evict), ("scope", read.scope), ("block", read.block)];
        for (key, value) in pairs {
            if let Some(value) = value {
                settings.set(&format!("{key}={value}")).map_err(|error| error.to_string())?;
                any = true;
            }
        }
        Ok(Self { local: read.local, pool: read.pool, replacement: any.then_some(settings) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spillway_core::policy::{Kind, Scope};

    #[test]
    fn what_is_said_is_read() {
        assert_eq!(Config::parse(""), Ok(Config::default()));
        let text = "# all\nlocal = \"8G\"\npool = \"local:?compress=lz4\"\npolicy = \"lru3\"\nscope = \"target\"\n";
        let settings = Settings { policy: Kind::Lru3, scope: Scope::Target, ..Settings::default() };
        let (local, pool) = (Some("8G".into()), Some("local:?compress=lz4".into()));
        assert_eq!(Config::parse(text), Ok(Config { local, pool, replacement: Some(settings) }));
    }

    #[test]
    fn what_is_not_known_is_refused_with_its_line() {
        for (text, expected) in [
            ("local = \"8G\"\n\nlocla = \"8G\"\n", "line 3: unknown field `locla`"),
            ("local = 8\n", "line 1: "),
            ("local = \"8G\n", "line 1: "),
            ("pool = \"local:\"\npool = \"local:\"\n", "line 2: duplicate key"),
            ("[x]\n", "line 1: unknown field `x`"),
            ("policy = \"fast\"\n", "one of rr, clock"),
        ] {
            let why = Config::parse(text).expect_err(text);
            assert!(why.contains(expected) && !why.contains('\n'), "{text}: {why}");
        }
    }
}

//! Pool URLs: how users name a store.

use std::fmt;

use spillway_core::size::{SizeError, parse_bytes};

use crate::local::{Compression, Config, SIZE_MIN_BYTES};

/// A pool, as named by a URL such as `local:?compress=lz4&size=8G`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Url {
    /// `local:`, the embedded pool.
    Local(Config),
}

/// Why a text names no pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UrlError {
    /// There is no colon.
    NoScheme(String),
    /// The scheme is none of those known.
    UnknownScheme(String),
    /// There is something between the scheme and the parameters.
    UnexpectedPath(String),
    /// The pool has no such parameter.
    UnknownParameter(String),
    /// A parameter is given twice.
    RepeatedParameter(&'static str),
    /// A parameter's value is not among those it takes.
    BadValue {
        /// The parameter.
        parameter: &'static str,
        /// What was given.
        value: String,
        /// What may be given.
        expected: &'static str,
    },
    /// A size is none.
    BadSize(SizeError),
    /// A size is too small.
    SizeTooSmall(u64),
}

impl fmt::Display for UrlError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoScheme(text) => {
                write!(f, "pool `{}` has no scheme: the known one is `local:`", text.escape_debug())
            }
            Self::UnknownScheme(scheme) => {
                write!(f, "pool scheme `{}:` is unknown: the known one is `local:`", scheme.escape_debug())
            }
            Self::UnexpectedPath(path) => {
                write!(f, "`local:` takes no path, but `{}` follows it: parameters start with `?`", path.escape_debug())
            }
            Self::UnknownParameter(name) => {
                write!(f, "`local:` has no parameter `{}`: it has `compress`, `dedupe` and `size`", name.escape_debug())
            }
            Self::RepeatedParameter(name) => write!(f, "pool parameter `{name}` is given twice: keep one"),
            Self::BadValue { parameter, value, expected } => {
                write!(f, "pool parameter `{parameter}` cannot be `{}`: give {expected}", value.escape_debug())
            }
            Self::BadSize(error) => write!(f, "pool parameter `size`: {error}"),
            Self::SizeTooSmall(bytes) => {
                write!(f, "pool parameter `size` is {bytes} bytes: give at least {}M", SIZE_MIN_BYTES >> 20)
            }
        }
    }
}

impl std::error::Error for UrlError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::BadSize(error) => Some(error),
            _ => None,
        }
    }
}

impl Url {
    /// Reads `local:?compress=lz4|none&dedupe=0|1&size=SIZE`; every parameter is optional.
    pub fn parse(text: &str) -> Result<Self, UrlError> {
        let (scheme, rest) = text.split_once(':').ok_or_else(|| UrlError::NoScheme(text.into()))?;
        if scheme != "local" {
            return Err(UrlError::UnknownScheme(scheme.into()));
        }
        let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
        if !path.is_empty() {
            return Err(UrlError::UnexpectedPath(path.into()));
        }
        parse_local(query).map(Self::Local)
    }
}

fn parse_local(query: &str) -> Result<Config, UrlError> {
    let (mut compression, mut dedupe, mut size_bytes) = (None, None, None);
    for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
        let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
        let repeated = match name {
            "compress" => compression.replace(parse_compression(value)?).map(|_| "compress"),
            "dedupe" => dedupe.replace(parse_switch("dedupe", value)?).map(|_| "dedupe"),
            "size" => size_bytes.replace(parse_size(value)?).map(|_| "size"),
            _ => return Err(UrlError::UnknownParameter(name.into())),
        };
        if let Some(name) = repeated {
            return Err(UrlError::RepeatedParameter(name));
        }
    }
    let default = Config::default();
    Ok(Config {
        compression: compression.unwrap_or(default.compression),
        dedupe: dedupe.unwrap_or(default.dedupe),
        size_bytes,
    })
}

fn parse_compression(value: &str) -> Result<Compression, UrlError> {
    match value {
        "lz4" => Ok(Compression::Lz4),
        "none" => Ok(Compression::None),
        _ => Err(UrlError::BadValue { parameter: "compress", value: value.into(), expected: "`lz4` or `none`" }),
    }
}

fn parse_switch(parameter: &'static str, value: &str) -> Result<bool, UrlError> {
    match value {
        "0" => Ok(false),
        "1" => Ok(true),
        _ => Err(UrlError::BadValue { parameter, value: value.into(), expected: "`0` or `1`" }),
    }
}

fn parse_size(value: &str) -> Result<u64, UrlError> {
    match parse_bytes(value).map_err(UrlError::BadSize)? {
        bytes if bytes < SIZE_MIN_BYTES => Err(UrlError::SizeTooSmall(bytes)),
        bytes => Ok(bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn local(text: &str) -> Config {
        match Url::parse(text) {
            Ok(Url::Local(config)) => config,
            Err(error) => panic!("{text}: {error}"),
        }
    }

    #[test]
    fn pools_are_read() {
        let default = Config::default();
        assert_eq!(local("local:"), default);
        assert_eq!(local("local:?"), default);
        assert_eq!(local("local:?compress=lz4&dedupe=1"), default);
        let other = Config { compression: Compression::None, dedupe: false, size_bytes: Some(3 << 29) };
        assert_eq!(local("local:?compress=none&dedupe=0&size=1.5GiB"), other);
        assert_eq!(local("local:?size=8M").size_bytes, Some(SIZE_MIN_BYTES));
    }

    #[test]
    fn mistakes_are_named_in_a_line_with_their_remedy() {
        let mistakes = [
            ("", "pool `` has no scheme: the known one is `local:`"),
            ("tcp://a:7070", "pool scheme `tcp:` is unknown: the known one is `local:`"),
            ("local:x?size=1G", "`local:` takes no path, but `x` follows it: parameters start with `?`"),
            ("local:?a=1", "`local:` has no parameter `a`: it has `compress`, `dedupe` and `size`"),
            ("local:?size=1G&size=2G", "pool parameter `size` is given twice: keep one"),
            ("local:?compress=zstd", "pool parameter `compress` cannot be `zstd`: give `lz4` or `none`"),
            ("local:?dedupe", "pool parameter `dedupe` cannot be ``: give `0` or `1`"),
            ("local:?size=1M", "pool parameter `size` is 1048576 bytes: give at least 8M"),
            (
                "local:?size=50%",
                "pool parameter `size`: `50%` is a share: a number of bytes is needed here, such as 512M",
            ),
        ];
        for (text, line) in mistakes {
            assert_eq!(Url::parse(text).unwrap_err().to_string(), line);
        }
    }

    #[test]
    fn what_users_typed_cannot_break_the_line() {
        let error = Url::parse("lo\ncal:").unwrap_err().to_string();
        assert_eq!(error, "pool scheme `lo\\ncal:` is unknown: the known one is `local:`");
    }
}

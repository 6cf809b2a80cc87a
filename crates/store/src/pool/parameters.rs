//! What follows the `?` of a pool's URL.

use std::ops::RangeInclusive;
use std::time::Duration;

use super::UrlError;
use crate::layer;
use crate::local::Compression;
use crate::remote::names::GIVEN_BYTES_MAX;

/// Parameters, each given once and known to the scheme.
pub(super) struct Parameters<'a> {
    given: Vec<(&'static str, &'a str)>,
}

impl<'a> Parameters<'a> {
    pub(super) fn new(scheme: &'static str, known: &'static [&'static str], query: &'a str) -> Result<Self, UrlError> {
        let mut given: Vec<(&'static str, &'a str)> = Vec::new();
        for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
            let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
            let Some(name) = known.iter().find(|known| **known == name) else {
                return Err(UrlError::UnknownParameter { scheme, known, name: name.into() });
            };
            if given.iter().any(|(given, _)| given == name) {
                return Err(UrlError::RepeatedParameter(name));
            }
            given.push((name, value));
        }
        Ok(Self { given })
    }

    pub(super) fn get(&self, name: &str) -> Option<&'a str> {
        self.given.iter().find(|(given, _)| *given == name).map(|(_, value)| *value)
    }

    fn read<T>(
        &self,
        parameter: &'static str,
        expected: &'static str,
        read: impl Fn(&str) -> Option<T>,
    ) -> Result<Option<T>, UrlError> {
        let Some(value) = self.get(parameter) else { return Ok(None) };
        let bad = || UrlError::BadValue { parameter, value: value.into(), expected };
        read(value).ok_or_else(bad).map(Some)
    }

    pub(super) fn number(
        &self,
        name: &'static str,
        range: RangeInclusive<usize>,
        expected: &'static str,
    ) -> Result<Option<usize>, UrlError> {
        self.read(name, expected, |value| value.parse().ok().filter(|number| range.contains(number)))
    }

    pub(super) fn switch(&self, name: &'static str) -> Result<Option<bool>, UrlError> {
        self.read(name, "`0` or `1`", |value| match value {
            "0" => Some(false),
            "1" => Some(true),
            _ => None,
        })
    }

    pub(super) fn compression(&self) -> Result<Option<Compression>, UrlError> {
        self.read("compress", "`lz4` or `none`", |value| match value {
            "lz4" => Some(Compression::Lz4),
            "none" => Some(Compression::None),
            _ => None,
        })
    }

    pub(super) fn duration(&self, name: &'static str) -> Result<Option<Duration>, UrlError> {
        self.read(name, "a time such as `4us`, `250ms` or `10s`, up to an hour", duration)
    }

    /// What is to be done to the store.
    pub(super) fn layer(&self) -> Result<layer::Config, UrlError> {
        let delay = self.duration("delay")?.unwrap_or_default();
        let expected = "faults such as `lose:1000,corrupt:1000,decline:10,stall:100:50ms`, each one in so many";
        let faults = self.read("fault", expected, faults)?.unwrap_or_default();
        Ok(layer::Config { delay, ..faults })
    }

    pub(super) fn prefix(&self) -> Result<Option<String>, UrlError> {
        let expected = "1 to 200 letters, digits and `-_.:`";
        self.read("prefix", expected, |value| {
            let fits = (1..=GIVEN_BYTES_MAX).contains(&value.len());
            let plain = value.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.:".contains(&byte));
            (fits && plain).then(|| value.to_owned())
        })
    }
}

fn faults(text: &str) -> Option<layer::Config> {
    let mut config = layer::Config::default();
    for fault in text.split(',') {
        let (name, rest) = fault.split_once(':')?;
        let (one_in, time) = rest.split_once(':').map_or((rest, None), |(one_in, time)| (one_in, Some(time)));
        let one_in = Some(one_in.parse().ok()?).filter(|one_in| *one_in > 0)?;
        match (name, time) {
            ("decline", None) => config.decline_one_in = one_in,
            ("lose", None) => config.lose_one_in = one_in,
            ("corrupt", None) => config.corrupt_one_in = one_in,
            ("stall", Some(time)) => (config.stall_one_in, config.stall) = (one_in, duration(time)?),
            _ => return None,
        }
    }
    Some(config)
}

fn duration(text: &str) -> Option<Duration> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().ok()?;
    let ns = match unit {
        "ns" => 1,
        "us" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        _ => return None,
    };
    let duration = Duration::from_nanos(number.checked_mul(ns)?);
    (duration <= Duration::from_secs(3600)).then_some(duration)
}

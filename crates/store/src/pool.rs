//! Pool URLs: how users name a store; and opening one.

mod cluster;
mod drain;
mod error;
mod hosts;
mod lookup;
mod membership;
mod open;
mod parameters;
mod roll;
mod same;
mod status;
mod tls;

use std::path::PathBuf;
use std::time::Duration;

use spillway_cluster::Cluster;
use spillway_core::size::parse_bytes;

use crate::file;
use crate::layer;
use crate::local::{Compression, Config, SIZE_MIN_BYTES};
use crate::remote::Settings;
use crate::stripe::{DATA_MAX, PARITY_MAX, Shape};
pub use cluster::Etcd;
pub use drain::Drain;
pub use error::{OpenError, OpenErrorKind, UrlError};
pub use lookup::Lookup;
pub use membership::Membership;
pub use open::{Opened, TakenOver, open, open_lasting, take_over};
use parameters::Parameters;
pub use same::{is_same, without_password};
pub use spillway_cluster::Host;
pub use status::{ServerReport, status, warning};
pub use tls::Tls;

/// A pool, as named by a URL such as `local:?compress=lz4&size=8G`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Url {
    /// `local:`, the embedded pool.
    Local(Config),
    /// `memcached://host[:port],...`
    Memcached(Cache),
    /// `redis://[:password@]host[:port],...`
    Redis(Cache),
    /// `tcp://host[:port],...`: our own servers.
    Tcp(Tcp),
    /// `etcd://host[:port],.../name`: those of our own servers that have joined.
    Etcd(Etcd),
    /// `file:///path?size=8G`
    File(File),
    /// `emulated:?delay=4us`
    Emulated(Emulated),
}

/// Caches of others, used as a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cache {
    /// One or more.
    pub hosts: Vec<Host>,
    /// Of all of them; Redis only.
    pub password: Option<String>,
    /// What names of pages start with, before something random.
    pub prefix: Option<String>,
    /// Whether servers that may evict are accepted.
    pub lossy: bool,
    /// How pages are sent and kept.
    pub compression: Compression,
    /// What of it may be lost; `None` for nothing.
    pub stripes: Option<Shape>,
    /// Deadlines.
    pub settings: Settings,
    /// What is done to it on purpose.
    pub layer: layer::Config,
}

/// Our own servers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tcp {
    /// One or more.
    pub hosts: Vec<Host>,
    /// The file that the servers' token is in.
    pub token_file: Option<PathBuf>,
    /// Whom to trust, and who to be; `None` for no TLS.
    pub tls: Option<Tls>,
    /// What of it may be lost; `None` for nothing.
    pub stripes: Option<Shape>,
    /// Deadlines.
    pub settings: Settings,
    /// What is done to it on purpose.
    pub layer: layer::Config,
}

/// A file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    /// An absolute path.
    pub path: PathBuf,
    /// Bytes of pages.
    pub size_bytes: u64,
    /// What is done to it on purpose.
    pub layer: layer::Config,
}

/// Memory that takes its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Emulated {
    /// Of each transfer.
    pub delay: Duration,
    /// Whether one transfer waits for the other.
    pub serialize: bool,
    /// Bytes of pages.
    pub size_bytes: Option<u64>,
}

impl Url {
    /// Reads a URL; docs/NETWORK.md has the parameters. Nothing is opened.
    pub fn parse(text: &str) -> Result<Self, UrlError> {
        let (scheme, rest) = text.split_once(':').ok_or_else(|| UrlError::NoScheme(text.into()))?;
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        match scheme {
            "local" => parse_local(place, query),
            "memcached" => parse_cache("memcached", 11211, place, query).map(Self::Memcached),
            "redis" => parse_cache("redis", 6379, place, query).map(Self::Redis),
            "tcp" => {
                let place = place.strip_prefix("//").ok_or(UrlError::NoHost { scheme: "tcp" })?;
                let hosts = hosts::parse("tcp", place, 7070)?;
                parse_tcp("tcp", hosts, query)?.with_enough_hosts().map(Self::Tcp)
            }
            "etcd" => {
                let cluster = Cluster::parse(place).map_err(UrlError::BadCluster)?;
                Ok(Self::Etcd(Etcd { cluster, tcp: parse_tcp("etcd", Vec::new(), query)? }))
            }
            "file" => parse_file(place, query),
            "emulated" => parse_emulated(place, query),
            _ => Err(UrlError::UnknownScheme(scheme.into())),
        }
    }
}

fn no_place(scheme: &'static str, place: &str) -> Result<(), UrlError> {
    if place.is_empty() { Ok(()) } else { Err(UrlError::UnexpectedPath { scheme, path: place.into() }) }
}

fn parse_local(place: &str, query: &str) -> Result<Url, UrlError> {
    no_place("local", place)?;
    let parameters = Parameters::new("local", &["compress", "dedupe", "size"], query)?;
    let default = Config::default();
    Ok(Url::Local(Config {
        compression: parameters.compression()?.unwrap_or(default.compression),
        dedupe: parameters.switch("dedupe")?.unwrap_or(default.dedupe),
        size_bytes: size(&parameters, SIZE_MIN_BYTES)?,
    }))
}

fn parse_cache(scheme: &'static str, port: u16, place: &str, query: &str) -> Result<Cache, UrlError> {
    let known = &["compress", "data", "deadline", "delay", "fault", "lossy", "parity", "prefix", "replicas"];
    let parameters = Parameters::new(scheme, known, query)?;
    let place = place.strip_prefix("//").ok_or(UrlError::NoHost { scheme })?;
    let (password, hosts) = match place.rsplit_once('@') {
        Some((user, hosts)) if scheme == "redis" => {
            (Some(user.strip_prefix(':').ok_or(UrlError::NoPassword)?.to_owned()), hosts)
        }
        _ => (None, place),
    };
    let hosts = hosts::parse(scheme, hosts, port)?;
    Ok(Cache {
        stripes: enough(stripes(&parameters)?, &hosts)?,
        hosts,
        password,
        prefix: parameters.prefix()?,
        lossy: parameters.switch("lossy")?.unwrap_or(false),
        compression: parameters.compression()?.unwrap_or(Compression::None),
        settings: settings(&parameters)?,
        layer: parameters.layer()?,
    })
}

/// Of these servers, which may be too few for what is asked of them.
fn parse_tcp(scheme: &'static str, hosts: Vec<Host>, query: &str) -> Result<Tcp, UrlError> {
    let known = &[
        "data",
        "deadline",
        "delay",
        "fault",
        "parity",
        "replicas",
        "tls",
        "tls-ca",
        "tls-cert",
        "tls-key",
        "tls-name",
        "token-file",
    ];
    let parameters = Parameters::new(scheme, known, query)?;
    let token_file = parameters.get("token-file").map(PathBuf::from);
    let (tls, settings) = (Tls::parse(&parameters)?, settings(&parameters)?);
    let stripes = stripes(&parameters)?;
    Ok(Tcp { hosts, token_file, tls, stripes, settings, layer: parameters.layer()? })
}

fn parse_file(place: &str, query: &str) -> Result<Url, UrlError> {
    let parameters = Parameters::new("file", &["delay", "fault", "size"], query)?;
    let path = place.strip_prefix("//").unwrap_or(place);
    if !path.starts_with('/') || path.contains('\0') {
        return Err(UrlError::NoPath(path.into()));
    }
    let size_bytes = size(&parameters, file::SIZE_MIN_BYTES)?.ok_or(UrlError::NoSize)?;
    Ok(Url::File(File { path: path.into(), size_bytes, layer: parameters.layer()? }))
}

fn parse_emulated(place: &str, query: &str) -> Result<Url, UrlError> {
    no_place("emulated", place)?;
    let parameters = Parameters::new("emulated", &["delay", "serialize", "size"], query)?;
    Ok(Url::Emulated(Emulated {
        delay: parameters.duration("delay")?.unwrap_or(Duration::ZERO),
        serialize: parameters.switch("serialize")?.unwrap_or(false),
        size_bytes: size(&parameters, SIZE_MIN_BYTES)?,
    }))
}

fn size(parameters: &Parameters<'_>, min_bytes: u64) -> Result<Option<u64>, UrlError> {
    let Some(value) = parameters.get("size") else { return Ok(None) };
    match parse_bytes(value).map_err(UrlError::BadSize)? {
        bytes if bytes < min_bytes => Err(UrlError::SizeTooSmall { bytes, min_bytes }),
        bytes => Ok(Some(bytes)),
    }
}

/// What `data`, `parity` and `replicas` ask for.
fn stripes(parameters: &Parameters<'_>) -> Result<Option<Shape>, UrlError> {
    let data = parameters.number("data", 1..=DATA_MAX, "a number of pages in a group, 1 to 16")?;
    let parity = parameters.number("parity", 1..=PARITY_MAX, "how many servers may be lost, `1` or `2`")?;
    let replicas = parameters.number("replicas", 2..=PARITY_MAX + 1, "a number of copies, `2` or `3`")?;
    match (data, parity, replicas) {
        (None, None, None) => Ok(None),
        (Some(data), Some(parity), None) => Ok(Some(Shape { data, parity })),
        (None, None, Some(copies)) => Ok(Some(Shape { data: 1, parity: copies - 1 })),
        (Some(_), None, None) => Err(UrlError::Alone { parameter: "data", needs: "parity=1" }),
        (None, Some(_), None) => Err(UrlError::Alone { parameter: "parity", needs: "data=4" }),
        (_, _, Some(_)) => Err(UrlError::ReplicasWithParity),
    }
}

/// The same, if these servers are as many as it takes.
fn enough(stripes: Option<Shape>, hosts: &[Host]) -> Result<Option<Shape>, UrlError> {
    match stripes {
        Some(shape) if hosts.len() < shape.width() => Err(UrlError::TooFewHosts { shape, hosts: hosts.len() }),
        stripes => Ok(stripes),
    }
}

impl Tcp {
    /// The same, if its servers are as many as its groups take.
    fn with_enough_hosts(self) -> Result<Self, UrlError> {
        enough(self.stripes, &self.hosts).map(|stripes| Self { stripes, ..self })
    }
}

fn settings(parameters: &Parameters<'_>) -> Result<Settings, UrlError> {
    let default = Settings::default();
    let deadline = parameters.duration("deadline")?.unwrap_or(default.deadline);
    if deadline < Duration::from_millis(100) {
        let value = parameters.get("deadline").unwrap_or_default().into();
        return Err(UrlError::BadValue { parameter: "deadline", value, expected: "at least `100ms`" });
    }
    Ok(Settings { deadline })
}

#[cfg(test)]
mod tests;

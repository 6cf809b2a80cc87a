//! From a URL to a store.

use std::path::Path;

use super::{Cache, Host, OpenError, OpenErrorKind, Tcp, Tls, Url, hosts};
use crate::emulated::Emulated;
use crate::file::File;
use crate::layer::{self, Layer};
use crate::memcached::Memcached;
use crate::redis::Redis;
use crate::remote::names::Names;
use crate::remote::protocol::Protocol;
use crate::remote::{Peer, Remote};
use crate::stripe::{Shape, Stripes};
use crate::tcp;
use crate::vault::Vault;
use crate::{Local, Refill, Store};

/// Longer tokens are a mistake.
const TOKEN_BYTES_MAX: u64 = 4096;

/// An open pool.
pub struct Opened {
    /// To be used by one thread.
    pub store: Box<dyn Store>,
    /// For the embedded pool, what a background thread must keep topped up.
    pub refill: Option<Refill>,
    /// What the user should know, in a line.
    pub note: Option<String>,
}

impl Opened {
    fn new(store: impl Store + 'static) -> Self {
        Self { store: Box::new(store), refill: None, note: None }
    }

    fn with(self, config: layer::Config) -> Result<Self, OpenError> {
        if config == layer::Config::default() {
            return Ok(self);
        }
        Ok(Self { store: Box::new(Layer::new(self.store, config)?), ..self })
    }
}

/// Opens the pool that a URL names. Looks names up and waits for servers, some seconds at most.
///
/// # Errors
/// One line that says what is wrong and what helps.
pub fn open(url: &str) -> Result<Opened, OpenError> {
    match Url::parse(url)?.with_servers()? {
        Url::Local(config) => {
            let (store, refill) = Local::new(config);
            Ok(Opened { store: Box::new(store), refill: Some(refill), note: None })
        }
        Url::Memcached(cache) => {
            let names = names(&cache);
            let memcached = || Memcached::new(names.clone(), cache.compression, cache.lossy);
            connect(&cache.hosts, cache.settings, cache.stripes, None, memcached)?.with(cache.layer)
        }
        Url::Redis(cache) => {
            let names = names(&cache);
            let redis = || Redis::new(names.clone(), cache.password.clone(), cache.compression, cache.lossy);
            connect(&cache.hosts, cache.settings, cache.stripes, None, redis)?.with(cache.layer)
        }
        Url::Tcp(Tcp { hosts, token_file, tls, stripes, settings, layer }) => {
            let token = token_file.as_deref().map(read_token).transpose()?.unwrap_or_default();
            connect(&hosts, settings, stripes, tls.as_ref(), || tcp::Tcp::new(token.clone()))?.with(layer)
        }
        Url::Etcd(_) => unreachable!("its servers are known by now"),
        Url::File(super::File { path, size_bytes, layer }) => {
            let (file, note) = File::open(&path, size_bytes)?;
            Opened { note, ..Opened::new(file) }.with(layer)
        }
        Url::Emulated(config) => {
            let (store, refill) = Emulated::new(config)?;
            Ok(Opened { refill: Some(refill), ..Opened::new(store) })
        }
    }
}

/// The same, in memory that outlives this process; none for a pool that is not this process's own.
///
/// # Errors
/// As [`open`].
pub fn open_lasting(url: &str, vault: &Vault) -> Result<Option<(Local, Refill)>, OpenError> {
    Ok(match Url::parse(url)? {
        Url::Local(config) => Some(Local::lasting(config, vault)),
        _ => None,
    })
}

/// The pool that was opened so by another process, under the same URL.
///
/// # Errors
/// As [`open`].
pub fn take_over(url: &str, vault: &Vault) -> Result<Option<(Local, Refill)>, OpenError> {
    Ok(match Url::parse(url)? {
        Url::Local(config) => Some(Local::take_over(config, vault)),
        _ => None,
    })
}

fn connect<P: Protocol>(
    hosts: &[Host],
    settings: crate::remote::Settings,
    stripes: Option<Shape>,
    tls: Option<&Tls>,
    speak: impl Fn() -> P,
) -> Result<Opened, OpenError> {
    let tls = tls.map(Tls::read).transpose()?;
    let peer = |host: &Host| {
        let tls = tls.as_ref().map(|tls| tls.of(host)).transpose()?;
        Ok(Peer { name: host.to_string(), addresses: hosts::resolve(host)?, protocol: speak(), tls })
    };
    let peers = hosts.iter().map(peer).collect::<Result<_, OpenError>>()?;
    let remote = Remote::open(peers, settings)?;
    Ok(match stripes {
        None => Opened::new(remote),
        Some(shape) => Opened::new(Stripes::new(Box::new(remote.into_members()), shape)),
    })
}

/// Pagers that share a cache must not share names.
fn names(cache: &Cache) -> Names {
    let mut random = [0; 8];
    getrandom::fill(&mut random).expect("getrandom(2) fails only before the system is up");
    let prefix = cache.prefix.as_deref().unwrap_or("spillway");
    Names::new(format!("{prefix}-{:016x}", u64::from_le_bytes(random)))
}

pub(super) fn read_token(path: &Path) -> Result<Vec<u8>, OpenError> {
    let fail = |text: String| OpenError { server: path.display().to_string(), kind: OpenErrorKind::Denied, text };
    let length = std::fs::metadata(path).map_err(|error| fail(format!("the token cannot be read: {error}")))?.len();
    if length > TOKEN_BYTES_MAX {
        return Err(fail("this is no token: it is longer than 4096 bytes".into()));
    }
    let token = std::fs::read(path).map_err(|error| fail(format!("the token cannot be read: {error}")))?;
    // As `spillway serve` reads it.
    let token = token.trim_ascii().to_vec();
    if token.is_empty() { Err(fail("the token's file is empty: copy the server's".into())) } else { Ok(token) }
}

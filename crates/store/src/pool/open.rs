//! From a URL to a store.

use std::path::Path;

use super::{Cache, Etcd, Host, OpenError, OpenErrorKind, Tcp, Tls, Url, hosts};
use crate::emulated::Emulated;
use crate::file::File;
use crate::layer::{self, Layer};
use crate::memcached::Memcached;
use crate::redis::Redis;
use crate::remote::ledger::{Ledger, Note};
use crate::remote::names::Names;
use crate::remote::protocol::Protocol;
use crate::remote::{Peer, Remote};
use crate::stripe::{Shape, Stripes};
use crate::tcp;
use crate::vault::Vault;
use crate::{Inheritance, Local, Refill, Store};

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

/// A pool that was taken over.
pub struct TakenOver {
    /// To be used by one thread, once its references are counted.
    pub store: Box<dyn Inheritance>,
    /// As in [`Opened`].
    pub refill: Option<Refill>,
}

/// Opens the pool that a URL names. Looks names up and waits for servers, some seconds at most.
///
/// # Errors
/// One line that says what is wrong and what helps.
pub fn open(url: &str) -> Result<Opened, OpenError> {
    open_in(Url::parse(url)?, None)
}

fn open_in(url: Url, vault: Option<&Vault>) -> Result<Opened, OpenError> {
    match url.with_servers()? {
        Url::Local(config) => {
            let (store, refill) = vault.map_or_else(|| Local::new(config), |vault| Local::lasting(config, vault));
            Ok(Opened { refill: Some(refill), ..Opened::new(store) })
        }
        Url::Memcached(cache) => {
            let names = names(&cache);
            let memcached = || Memcached::new(names.clone(), cache.compression, cache.lossy);
            connect(&cache.hosts, cache.settings, cache.stripes, None, memcached, vault)?.with(cache.layer)
        }
        Url::Redis(cache) => {
            let names = names(&cache);
            let redis = || Redis::new(names.clone(), cache.password.clone(), cache.compression, cache.lossy);
            connect(&cache.hosts, cache.settings, cache.stripes, None, redis, vault)?.with(cache.layer)
        }
        Url::Tcp(Tcp { hosts, token_file, tls, stripes, settings, layer }) => {
            let token = token_file.as_deref().map(read_token).transpose()?.unwrap_or_default();
            let speak = || tcp::Tcp::new(token.clone());
            connect(&hosts, settings, stripes, tls.as_ref(), speak, vault)?.with(layer)
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

/// The same, where the memory that matters outlives this process: the vault has what [`take_over`] needs. None for a pool of
/// which that cannot be said: one in a file, emulated, or with faults.
///
/// # Errors
/// As [`open`].
pub fn open_lasting(url: &str, vault: &Vault) -> Result<Option<Opened>, OpenError> {
    let url = Url::parse(url)?;
    lasts(&url).then(|| open_in(url, Some(vault))).transpose()
}

/// The pool that was opened so by another process, under the same URL, with its servers as they were. None where there is
/// nothing to take over.
///
/// # Errors
/// As [`open`]; and one line about a server that refuses, or that none is there.
pub fn take_over(url: &str, vault: &Vault) -> Result<Option<TakenOver>, OpenError> {
    let url = Url::parse(url)?;
    if !lasts(&url) {
        return Ok(None);
    }
    if let Url::Local(config) = url {
        let (store, refill) = Local::take_over(config, vault);
        return Ok(Some(TakenOver { store: Box::new(store), refill: Some(refill) }));
    }
    let Some(left) = Ledger::found(vault) else { return Ok(None) };
    let store = match url {
        Url::Memcached(cache) => {
            let memcached = || Memcached::new(names(&cache), cache.compression, cache.lossy);
            let remote = connect_again(left, cache.settings, cache.stripes, None, memcached, vault)?;
            inherit(remote, cache.stripes, vault)
        }
        Url::Redis(cache) => {
            let redis = || Redis::new(names(&cache), cache.password.clone(), cache.compression, cache.lossy);
            let remote = connect_again(left, cache.settings, cache.stripes, None, redis, vault)?;
            inherit(remote, cache.stripes, vault)
        }
        Url::Tcp(Tcp { token_file, tls, stripes, settings, .. })
        | Url::Etcd(Etcd { tcp: Tcp { token_file, tls, stripes, settings, .. }, .. }) => {
            let token = token_file.as_deref().map(read_token).transpose()?.unwrap_or_default();
            let speak = || tcp::Tcp::new(token.clone());
            inherit(connect_again(left, settings, stripes, tls.as_ref(), speak, vault)?, stripes, vault)
        }
        Url::Local(_) | Url::File(_) | Url::Emulated(_) => return Ok(None),
    };
    Ok(Some(TakenOver { store, refill: None }))
}

/// Whether another process can take such a pool over.
fn lasts(url: &Url) -> bool {
    match url {
        Url::Local(_) => true,
        Url::Memcached(cache) | Url::Redis(cache) => cache.layer == layer::Config::default(),
        Url::Tcp(tcp) | Url::Etcd(Etcd { tcp, .. }) => tcp.layer == layer::Config::default(),
        Url::File(_) | Url::Emulated(_) => false,
    }
}

fn connect_again<P: Protocol>(
    (ledger, notes): (Ledger, Vec<Note>),
    settings: crate::remote::Settings,
    stripes: Option<Shape>,
    tls: Option<&Tls>,
    speak: impl Fn() -> P,
    vault: &Vault,
) -> Result<Remote<P>, OpenError> {
    let tls = tls.map(Tls::read).transpose()?;
    let resume = |note: Note| {
        let unknown = || OpenError {
            server: note.name.clone(),
            kind: OpenErrorKind::Url,
            text: "this server is written down, and its name makes no sense".into(),
        };
        let host = &Host::parse(&note.name, 0).ok_or_else(unknown)?;
        let tls = tls.as_ref().map(|tls| tls.of(host)).transpose()?;
        let peer = Peer { name: host.to_string(), addresses: hosts::resolve(host)?, protocol: speak(), tls };
        Ok((peer, note))
    };
    let servers = notes.into_iter().map(resume).collect::<Result<_, OpenError>>()?;
    let spare = stripes.map_or(0, |shape| shape.parity);
    Remote::take_over(ledger, servers, settings, spare, vault)
}

/// The pool that these servers were.
fn inherit<P: Protocol>(remote: Remote<P>, stripes: Option<Shape>, vault: &Vault) -> Box<dyn Inheritance> {
    match stripes {
        None => Box::new(remote),
        Some(shape) => Box::new(Stripes::take_over(Box::new(remote.into_members()), shape, vault)),
    }
}

fn connect<P: Protocol>(
    hosts: &[Host],
    settings: crate::remote::Settings,
    stripes: Option<Shape>,
    tls: Option<&Tls>,
    speak: impl Fn() -> P,
    vault: Option<&Vault>,
) -> Result<Opened, OpenError> {
    let tls = tls.map(Tls::read).transpose()?;
    let peer = |host: &Host| {
        let tls = tls.as_ref().map(|tls| tls.of(host)).transpose()?;
        Ok(Peer { name: host.to_string(), addresses: hosts::resolve(host)?, protocol: speak(), tls })
    };
    let peers = hosts.iter().map(peer).collect::<Result<_, OpenError>>()?;
    let remote = Remote::open(peers, settings, vault)?;
    Ok(match stripes {
        None => Opened::new(remote),
        Some(shape) => Opened::new(Stripes::new(Box::new(remote.into_members()), shape, vault)),
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

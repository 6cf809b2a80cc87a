//! From a URL to a store.

use std::net::SocketAddr;
use std::path::Path;

use super::{Cache, Etcd, Host, Lookup, Membership, OpenError, OpenErrorKind, Tcp, Tls, Url, hosts};
use crate::emulated::Emulated;
use crate::file::File;
use crate::layer::{self, Layer};
use crate::memcached::Memcached;
use crate::redis::Redis;
use crate::remote::ledger::{Ledger, Note};
use crate::remote::names::Names;
use crate::remote::news::News;
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
    /// Of servers that come and go, what a background thread must run.
    pub membership: Option<Membership>,
    /// Of servers that have names, what a background thread must run.
    pub lookup: Option<Lookup>,
    /// What the user should know, in a line.
    pub note: Option<String>,
}

impl Opened {
    fn new(store: impl Store + 'static) -> Self {
        Self { store: Box::new(store), refill: None, membership: None, lookup: None, note: None }
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
    /// As in [`Opened`].
    pub membership: Option<Membership>,
    /// As in [`Opened`].
    pub lookup: Option<Lookup>,
}

/// Opens the pool that a URL names. Looks names up and waits for servers, some seconds at most.
///
/// # Errors
/// One line that says what is wrong and what helps.
pub fn open(url: &str) -> Result<Opened, OpenError> {
    open_in(Url::parse(url)?, None)
}

fn open_in(url: Url, vault: Option<&Vault>) -> Result<Opened, OpenError> {
    match url {
        Url::Local(config) => {
            let (store, refill) = vault.map_or_else(|| Local::new(config), |vault| Local::lasting(config, vault));
            Ok(Opened { refill: Some(refill), ..Opened::new(store) })
        }
        Url::Memcached(cache) => {
            let names = names(&cache);
            let memcached = || Memcached::new(names.clone(), cache.compression, cache.lossy);
            connect(&cache.hosts, cache.settings, cache.stripes, None, memcached, vault, None)?.with(cache.layer)
        }
        Url::Redis(cache) => {
            let names = names(&cache);
            let redis = || Redis::new(names.clone(), cache.password.clone(), cache.compression, cache.lossy);
            connect(&cache.hosts, cache.settings, cache.stripes, None, redis, vault, None)?.with(cache.layer)
        }
        Url::Tcp(tcp) => open_tcp(&tcp, vault, None)?.with(tcp.layer),
        Url::Etcd(etcd) => {
            let found = etcd.find()?;
            let (membership, news) = found.follow()?;
            let opened = open_tcp(&found.tcp, vault, Some(news))?;
            let note = opened.note.or(found.warning());
            Opened { membership: Some(membership), note, ..opened }.with(found.tcp.layer)
        }
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

fn open_tcp(
    Tcp { hosts, token_file, tls, stripes, settings, .. }: &Tcp,
    vault: Option<&Vault>,
    news: Option<News<tcp::Tcp>>,
) -> Result<Opened, OpenError> {
    let token = token_file.as_deref().map(read_token).transpose()?.unwrap_or_default();
    connect(hosts, *settings, *stripes, tls.as_ref(), || tcp::Tcp::new(token.clone()), vault, news)
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
        return Ok(Some(TakenOver { store: Box::new(store), refill: Some(refill), membership: None, lookup: None }));
    }
    let Some(left) = Ledger::found(vault) else { return Ok(None) };
    let taken_over = match url {
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
        Url::Tcp(tcp) => inherit(tcp_again(left, &tcp, vault)?, tcp.stripes, vault),
        Url::Etcd(Etcd { cluster, tcp }) => {
            // By number, as pages name them.
            let addresses: Vec<String> = left.1.iter().map(|note| note.name.clone()).collect();
            let mut remote = tcp_again(left, &tcp, vault)?;
            let (followed, news) = Membership::new(&cluster, &tcp, addresses, &[])?;
            remote.follow(news);
            TakenOver { membership: Some(followed), ..inherit(remote, tcp.stripes, vault) }
        }
        Url::Local(_) | Url::File(_) | Url::Emulated(_) => return Ok(None),
    };
    Ok(Some(taken_over))
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

fn tcp_again(left: (Ledger, Vec<Note>), tcp: &Tcp, vault: &Vault) -> Result<Remote<tcp::Tcp>, OpenError> {
    let token = tcp.token_file.as_deref().map(read_token).transpose()?.unwrap_or_default();
    connect_again(left, tcp.settings, tcp.stripes, tcp.tls.as_ref(), || tcp::Tcp::new(token.clone()), vault)
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
        // A server that is no more may have no name any more: it counts as one that is away, until its name is known again.
        let addresses = hosts::resolve(host).unwrap_or_default();
        Ok((Peer { name: host.to_string(), addresses, protocol: speak(), tls }, note))
    };
    let servers = notes.into_iter().map(resume).collect::<Result<_, OpenError>>()?;
    let spare = stripes.map_or(0, |shape| shape.parity);
    Remote::take_over(ledger, servers, settings, spare, vault)
}

/// The pool that these servers were.
fn inherit<P: Protocol>(mut remote: Remote<P>, stripes: Option<Shape>, vault: &Vault) -> TakenOver {
    let lookup = Lookup::of(&mut remote);
    let store: Box<dyn Inheritance> = match stripes {
        None => Box::new(remote),
        Some(shape) => Box::new(Stripes::take_over(Box::new(remote.into_members()), shape, vault)),
    };
    TakenOver { store, refill: None, membership: None, lookup }
}

fn connect<P: Protocol>(
    hosts: &[Host],
    settings: crate::remote::Settings,
    stripes: Option<Shape>,
    tls: Option<&Tls>,
    speak: impl Fn() -> P,
    vault: Option<&Vault>,
    news: Option<News<P>>,
) -> Result<Opened, OpenError> {
    let tls = tls.map(Tls::read).transpose()?;
    let peer = |host: &Host| {
        let tls = tls.as_ref().map(|tls| tls.of(host)).transpose()?;
        Ok(Peer { name: host.to_string(), addresses: hosts::resolve(host)?, protocol: speak(), tls })
    };
    let peers = hosts.iter().map(peer).collect::<Result<Vec<_>, OpenError>>()?;
    // In a cluster, one that has registered anew under another name is soon there once only.
    if news.is_none() {
        let places: Vec<(&str, &[SocketAddr])> =
            peers.iter().map(|peer| (&peer.name[..], &peer.addresses[..])).collect();
        hosts::are_distinct(&places)?;
    }
    let mut remote = Remote::open(peers, settings, vault)?;
    news.into_iter().for_each(|news| remote.follow(news));
    let lookup = Lookup::of(&mut remote);
    let opened = match stripes {
        None => Opened::new(remote),
        Some(shape) => Opened::new(Stripes::new(Box::new(remote.into_members()), shape, vault)),
    };
    Ok(Opened { lookup, ..opened })
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

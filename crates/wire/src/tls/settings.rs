//! What each side is told once, for all its sessions.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use rustls::client::Resumption;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{ClientConfig, ClientConnection, Error, InconsistentKeys, RootCertStore, ServerConfig, ServerConnection};

use super::files::{self, FileError, Kind};
use super::session::Session;

/// TLS 1.3 is what ring does; more is not asked of it.
const TLS13_WITH_RING: &str = "ring has TLS 1.3";
/// A session begins with random bytes and nothing else that could be missing.
const RANDOM: &str = "random bytes fail only before the system is up";

/// Files that prove who one is: the certificate with what lies between it and the authority, and its key.
#[derive(Clone, Copy, Debug)]
pub struct Identity<'a> {
    /// PEM, the own certificate first.
    pub certificate: &'a Path,
    /// PEM, for nobody else to read.
    pub key: &'a Path,
}

/// The two files' content.
type Pair = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

impl Identity<'_> {
    fn read(self) -> Result<Pair, FileError> {
        Ok((files::certificates(Kind::Certificate, self.certificate)?, files::key(self.key)?))
    }

    /// What was read was not taken.
    fn error(self, error: &Error) -> FileError {
        match error {
            Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => {
                FileError::Mismatch { certificate: self.certificate.into(), key: self.key.into() }
            }
            Error::InvalidCertificate(_) => FileError::Garbled(Kind::Certificate, self.certificate.into()),
            _ => FileError::Garbled(Kind::Key, self.key.into()),
        }
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

fn authorities(path: &Path) -> Result<Arc<RootCertStore>, FileError> {
    let mut roots = RootCertStore::empty();
    for certificate in files::certificates(Kind::Authority, path)? {
        roots.add(certificate).map_err(|_| FileError::Garbled(Kind::Authority, path.into()))?;
    }
    Ok(Arc::new(roots))
}

/// The side that is connected to.
#[derive(Clone)]
pub struct Server(Arc<ServerConfig>);

impl Server {
    /// With `client_ca`, only clients whose certificate one of those authorities has signed.
    ///
    /// # Errors
    /// When a file will not do.
    pub fn read(identity: Identity<'_>, client_ca: Option<&Path>) -> Result<Self, FileError> {
        let (chain, key) = identity.read()?;
        let provider = provider();
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider));
        let builder = builder.with_protocol_versions(&[&TLS13]).expect(TLS13_WITH_RING);
        let builder = match client_ca {
            None => builder.with_no_client_auth(),
            Some(path) => {
                let verifier = WebPkiClientVerifier::builder_with_provider(authorities(path)?, provider).build();
                let verifier = verifier.map_err(|_| FileError::Garbled(Kind::Authority, path.into()))?;
                builder.with_client_cert_verifier(verifier)
            }
        };
        let mut config = builder.with_single_cert(chain, key).map_err(|error| identity.error(&error))?;
        config.send_tls13_tickets = 0;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        Ok(Self(Arc::new(config)))
    }

    /// A new session, for a connection that was accepted.
    ///
    /// # Panics
    /// Before the system has random bytes.
    #[must_use]
    pub fn accept(&self) -> Session {
        Session::new(ServerConnection::new(Arc::clone(&self.0)).expect(RANDOM).into())
    }
}

impl fmt::Debug for Server {
    /// Without a word about the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").finish_non_exhaustive()
    }
}

/// What the side that connects trusts, and who it is itself.
#[derive(Clone)]
pub struct Trust(Arc<ClientConfig>);

impl Trust {
    /// Servers whose certificate one of the authorities in `ca` has signed.
    ///
    /// # Errors
    /// When a file will not do.
    pub fn read(ca: &Path, identity: Option<Identity<'_>>) -> Result<Self, FileError> {
        let builder = ClientConfig::builder_with_provider(provider());
        let builder = builder.with_protocol_versions(&[&TLS13]).expect(TLS13_WITH_RING);
        let builder = builder.with_root_certificates(authorities(ca)?);
        let mut config = match identity {
            None => builder.with_no_client_auth(),
            Some(identity) => {
                let (chain, key) = identity.read()?;
                builder.with_client_auth_cert(chain, key).map_err(|error| identity.error(&error))?
            }
        };
        config.resumption = Resumption::disabled();
        Ok(Self(Arc::new(config)))
    }

    /// The server of this name or address; `None` when no certificate can have it.
    #[must_use]
    pub fn of(&self, name: &str) -> Option<Client> {
        // A zone is of no meaning but here.
        let name = name.split_once('%').map_or(name, |(address, _)| address);
        Some(Client { config: Arc::clone(&self.0), name: ServerName::try_from(name).ok()?.to_owned() })
    }
}

/// Whether a certificate can be for this.
#[must_use]
pub fn is_name(name: &str) -> bool {
    ServerName::try_from(name).is_ok()
}

/// The side that connects, to one server.
#[derive(Clone)]
pub struct Client {
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
}

impl Client {
    /// A new session, for a connection that was made.
    ///
    /// # Panics
    /// Before the system has random bytes.
    #[must_use]
    pub fn connect(&self) -> Session {
        Session::new(ClientConnection::new(Arc::clone(&self.config), self.name.clone()).expect(RANDOM).into())
    }
}

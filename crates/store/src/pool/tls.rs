//! What a URL says of TLS, and the files that it names.

use std::path::PathBuf;

use spillway_wire::tls::{self, FileError, Identity, Trust};

use super::parameters::Parameters;
use super::{Host, OpenError, OpenErrorKind, UrlError};

/// How connections to servers are encrypted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tls {
    /// PEM: who must have signed the servers' certificates.
    pub ca: PathBuf,
    /// PEM: a certificate to show, and its key.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// What the servers' certificates are for, if not for the hosts.
    pub name: Option<String>,
}

impl Tls {
    pub(super) fn parse(parameters: &Parameters<'_>) -> Result<Option<Self>, UrlError> {
        let path = |name| parameters.get(name).map(PathBuf::from);
        let together = |parameter, needs| Err(UrlError::Alone { parameter, needs });
        if parameters.switch("tls")? != Some(true) {
            let others = ["tls-ca", "tls-cert", "tls-key", "tls-name"];
            let other = others.into_iter().find(|name| parameters.get(name).is_some());
            return other.map_or(Ok(None), |other| together(other, "tls=1"));
        }
        let Some(ca) = path("tls-ca") else { return together("tls", "tls-ca=FILE") };
        let identity = match (path("tls-cert"), path("tls-key")) {
            (Some(_), None) => return together("tls-cert", "tls-key=FILE"),
            (None, Some(_)) => return together("tls-key", "tls-cert=FILE"),
            (certificate, key) => certificate.zip(key),
        };
        let name = parameters.get("tls-name").map(|name| {
            let expected = "a name or an address as certificates have it";
            let bad = || UrlError::BadValue { parameter: "tls-name", value: name.into(), expected };
            tls::is_name(name).then(|| name.to_owned()).ok_or_else(bad)
        });
        Ok(Some(Self { ca, identity, name: name.transpose()? }))
    }

    /// Reads the files.
    pub(super) fn read(&self) -> Result<Credentials, OpenError> {
        let identity = self.identity.as_ref().map(|(certificate, key)| Identity { certificate, key });
        let trust = Trust::read(&self.ca, identity).map_err(|error: FileError| OpenError {
            server: String::new(),
            kind: OpenErrorKind::Denied,
            text: error.to_string(),
        })?;
        Ok(Credentials { trust, name: self.name.clone() })
    }
}

/// What is the same for all servers of a pool.
pub(super) struct Credentials {
    trust: Trust,
    name: Option<String>,
}

impl Credentials {
    /// One of the servers.
    pub(super) fn of(&self, host: &Host) -> Result<tls::Client, OpenError> {
        self.trust.of(self.name.as_ref().unwrap_or(&host.name)).ok_or_else(|| OpenError {
            server: host.to_string(),
            kind: OpenErrorKind::Url,
            text: "no certificate can be for this name: give the one that it is for with `tls-name=NAME`".into(),
        })
    }
}

//! Certificates and keys in PEM files.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// All authorities of the web take a quarter of it.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// Who else could read a key.
const OTHERS: u32 = 0o077;

/// What a file is to hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// One's own certificate, and those between it and the authority.
    Certificate,
    /// The key to it.
    Key,
    /// Authorities that are trusted.
    Authority,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Certificate => "certificate",
            Self::Key => "private key",
            Self::Authority => "authority's certificate",
        })
    }
}

/// Why files cannot be used for TLS, in a line.
#[derive(Debug)]
pub enum FileError {
    /// It is not there, or not to be read.
    Unreadable(Kind, PathBuf, io::Error),
    /// It is too long, not PEM, damaged, or holds something else.
    Garbled(Kind, PathBuf),
    /// Others can read the key.
    Exposed(PathBuf),
    /// The key is another certificate's.
    Mismatch {
        /// The certificate's file.
        certificate: PathBuf,
        /// The key's.
        key: PathBuf,
    },
}

impl fmt::Display for FileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |path: &Path| path.display().to_string().escape_debug().to_string();
        match self {
            Self::Unreadable(kind, path, error) => {
                write!(f, "the {kind} in `{}` cannot be read: {error}; correct the path, or its rights", name(path))
            }
            Self::Garbled(kind, path) => {
                write!(f, "`{}` holds no {kind}: give a PEM file, made as docs/NETWORK.md shows", name(path))
            }
            Self::Exposed(path) => write!(f, "others can read the private key `{}`: `chmod 600` it", name(path)),
            Self::Mismatch { certificate, key } => write!(
                f,
                "the key in `{}` is not that of the certificate in `{}`: give the two that were made together",
                name(key),
                name(certificate)
            ),
        }
    }
}

impl std::error::Error for FileError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Unreadable(_, _, error) => Some(error),
            _ => None,
        }
    }
}

fn read(kind: Kind, path: &Path) -> Result<Vec<u8>, FileError> {
    let unreadable = |error| FileError::Unreadable(kind, path.into(), error);
    let file = File::open(path).map_err(unreadable)?;
    if kind == Kind::Key && file.metadata().map_err(unreadable)?.mode() & OTHERS != 0 {
        return Err(FileError::Exposed(path.into()));
    }
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() as u64 > FILE_BYTES_MAX { Err(FileError::Garbled(kind, path.into())) } else { Ok(bytes) }
}

/// The certificates in a file, at least one.
pub(super) fn certificates(kind: Kind, path: &Path) -> Result<Vec<CertificateDer<'static>>, FileError> {
    let bytes = read(kind, path)?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    let found = found.ok().filter(|found| !found.is_empty());
    found.ok_or_else(|| FileError::Garbled(kind, path.into()))
}

/// The key in a file that nobody else can read.
pub(super) fn key(path: &Path) -> Result<PrivateKeyDer<'static>, FileError> {
    let bytes = read(Kind::Key, path)?;
    PrivateKeyDer::from_pem_slice(&bytes).map_err(|_| FileError::Garbled(Kind::Key, path.into()))
}

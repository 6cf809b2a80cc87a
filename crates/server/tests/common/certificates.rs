//! An authority of certificates for one test, and files that it fills.
#![allow(dead_code, unreachable_pub, reason = "a part of each test file, which uses its own share of it")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

/// Signs certificates; its files are removed with it.
pub struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    directory: PathBuf,
}

/// A certificate's file and its key's.
pub struct Pair {
    pub certificate: PathBuf,
    pub key: PathBuf,
}

impl Authority {
    pub fn new() -> Self {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let name = format!("spillway-authority-{}-{}", std::process::id(), MADE.fetch_add(1, Relaxed));
        let directory = std::env::temp_dir().join(&name);
        fs::create_dir(&directory).expect("a directory");
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().expect("a key")).expect("signed");
        let authority = Self { issuer, directory };
        authority.file("ca.pem", &authority.issuer.pem(), 0o644);
        authority
    }

    /// A file beside the certificates.
    pub fn file(&self, name: &str, content: &str, mode: u32) -> PathBuf {
        let path = self.directory.join(name);
        fs::write(&path, content).expect("written");
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("set");
        path
    }

    /// Its own certificate.
    pub fn ca(&self) -> PathBuf {
        self.directory.join("ca.pem")
    }

    /// A certificate for these names and addresses.
    pub fn issue(&self, file: &str, names: &[&str]) -> Pair {
        self.issue_with(file, names, |_| {})
    }

    pub fn issue_with(&self, file: &str, names: &[&str], change: impl FnOnce(&mut CertificateParams)) -> Pair {
        let names: Vec<String> = names.iter().map(ToString::to_string).collect();
        let (mut params, key) = (CertificateParams::new(names).expect("names"), KeyPair::generate().expect("a key"));
        change(&mut params);
        let certificate = params.signed_by(&key, &self.issuer).expect("signed");
        Pair {
            certificate: self.file(&format!("{file}.pem"), &certificate.pem(), 0o644),
            key: self.file(&format!("{file}.key"), &key.serialize_pem(), 0o600),
        }
    }
}

impl Drop for Authority {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// As text for an argument or a URL.
pub fn text(path: &Path) -> &str {
    path.to_str().expect("text")
}

//! Why a session is over, in the words of the end that connects, or of the end that was connected to.

use std::fmt;

use rustls::{AlertDescription, CertificateError, Error, InvalidMessage};

/// Why a session is over. The text is about the other end, which is a server, and says what helps.
#[derive(Clone, Debug, PartialEq)]
pub enum Failure {
    /// The other end speaks something else.
    NotTls,
    /// The other end has no TLS 1.3.
    NoVersion,
    /// No authority that is trusted has signed the certificate.
    UnknownIssuer,
    /// The certificate is for these names, and the one that was asked for is none of them.
    OtherName(Vec<String>),
    /// The certificate's time is over.
    Expired,
    /// The certificate's time has not come.
    NotYetValid,
    /// The certificate is not as it should be.
    Unfit(String),
    /// The other end shows no certificate, and one is wanted.
    NoCertificate,
    /// The other end wants a certificate of ours.
    CertificateWanted,
    /// The other end does not accept our certificate.
    CertificateRefused(&'static str),
    /// A message is longer than any that is needed.
    TooLong,
    /// Bytes were changed on their way, or the other end is no good.
    Broken(String),
}

impl Failure {
    pub(super) fn new(error: Error, handshaking: bool) -> Self {
        match error {
            Error::InvalidMessage(InvalidMessage::InvalidContentType) if handshaking => Self::NotTls,
            Error::InvalidCertificate(error) => Self::certificate(error),
            Error::AlertReceived(alert) => Self::alert(alert),
            Error::PeerIncompatible(_) => Self::NoVersion,
            Error::NoCertificatesPresented => Self::NoCertificate,
            error => Self::Broken(error.to_string()),
        }
    }

    fn certificate(error: CertificateError) -> Self {
        match error {
            CertificateError::UnknownIssuer | CertificateError::BadSignature => Self::UnknownIssuer,
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => Self::Expired,
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => Self::NotYetValid,
            CertificateError::NotValidForName => Self::OtherName(Vec::new()),
            CertificateError::NotValidForNameContext { presented, .. } => {
                Self::OtherName(presented.iter().map(|name| bare(name)).collect())
            }
            CertificateError::Other(other) => Self::Unfit(other.0.to_string()),
            error => Self::Unfit(error.to_string()),
        }
    }

    fn alert(alert: AlertDescription) -> Self {
        match alert {
            AlertDescription::CertificateRequired => Self::CertificateWanted,
            AlertDescription::UnknownCA => Self::CertificateRefused("it does not know who signed it"),
            AlertDescription::CertificateExpired => Self::CertificateRefused("its time is over, or has not come"),
            AlertDescription::CertificateRevoked => Self::CertificateRefused("it was revoked"),
            AlertDescription::BadCertificate
            | AlertDescription::UnsupportedCertificate
            | AlertDescription::CertificateUnknown
            | AlertDescription::AccessDenied
            | AlertDescription::DecryptError => Self::CertificateRefused("it is not as it should be"),
            AlertDescription::ProtocolVersion | AlertDescription::HandshakeFailure => Self::NoVersion,
            alert => Self::Broken(format!("it says {alert:?}")),
        }
    }

    /// Whether it is about who may speak to whom.
    #[must_use]
    pub fn is_denial(&self) -> bool {
        !matches!(self, Self::NotTls | Self::NoVersion | Self::TooLong | Self::Broken(_))
    }

    /// The text about a client, in the words of its server.
    pub fn of_client(&self) -> impl fmt::Display + '_ {
        OfClient(self)
    }
}

/// The text about a client.
struct OfClient<'a>(&'a Failure);

impl fmt::Display for OfClient<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Failure::NotTls => f.write_str("it speaks no TLS: a pager's URL needs `tls=1&tls-ca=FILE`"),
            Failure::NoVersion => f.write_str("it does not speak TLS 1.3 as spillway does"),
            Failure::UnknownIssuer => f.write_str("no authority in --client-ca has signed its certificate"),
            Failure::Expired => f.write_str("its certificate has expired: make it a new one"),
            Failure::NotYetValid => f.write_str("its certificate is not valid yet: correct its clock, or this host's"),
            Failure::NoCertificate => f.write_str(
                "it shows no certificate: its URL needs `tls-cert` and `tls-key`, signed by an authority in --client-ca",
            ),
            Failure::CertificateWanted => f.write_str("it wants another certificate than that in --tls-cert"),
            Failure::CertificateRefused(why) => write!(
                f,
                "it refuses the certificate in --tls-cert ({why}): its `tls-ca` must be the authority that signed it, and \
                 the host in its URL one that it is for"
            ),
            Failure::OtherName(_) => f.write_str("its certificate is for something else"),
            Failure::Unfit(what) => write!(f, "its certificate will not do ({})", what.escape_debug()),
            Failure::TooLong => f.write_str("its part of the TLS handshake is too long"),
            Failure::Broken(what) => write!(f, "TLS failed ({})", what.escape_debug()),
        }
    }
}

/// What is between the brackets of `DnsName("host")`.
fn bare(name: &str) -> String {
    let inner = name.split_once('(').and_then(|(_, inner)| inner.strip_suffix(')'));
    inner.map_or(name, |inner| inner.trim_matches('"')).to_owned()
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotTls => f.write_str(
                "it speaks no TLS: start it with --tls-cert and --tls-key, or leave out `tls=1`, and check the port",
            ),
            Self::NoVersion => f.write_str("it does not speak TLS 1.3 as spillway does: check the port"),
            Self::UnknownIssuer => {
                f.write_str("no authority in `tls-ca` has signed its certificate: give the one that has")
            }
            Self::OtherName(names) => {
                f.write_str("its certificate is for another name")?;
                if let Some((first, others)) = names.split_first() {
                    write!(f, " (`{}`{})", first.escape_debug(), if others.is_empty() { "" } else { " and others" })?;
                }
                f.write_str(": correct the host, or give `tls-name=NAME`")
            }
            Self::Expired => {
                f.write_str("its certificate has expired: make it a new one, or correct this host's clock")
            }
            Self::NotYetValid => {
                f.write_str("its certificate is not valid yet: correct this host's clock, or the server's")
            }
            Self::Unfit(what) => {
                write!(f, "its certificate will not do ({}): make one as docs/NETWORK.md shows", what.escape_debug())
            }
            Self::NoCertificate => f.write_str("it shows no certificate: check the port"),
            Self::CertificateWanted => f.write_str(
                "it wants a certificate of its clients: give `tls-cert` and `tls-key`, signed by its --client-ca",
            ),
            Self::CertificateRefused(why) => {
                write!(f, "it refuses the certificate in `tls-cert` ({why}): give one that its --client-ca has signed")
            }
            Self::TooLong => f.write_str("its part of the TLS handshake is too long: check the port"),
            Self::Broken(what) => {
                write!(
                    f,
                    "TLS failed ({}): see whether something between the hosts changes packets",
                    what.escape_debug()
                )
            }
        }
    }
}

impl std::error::Error for Failure {}

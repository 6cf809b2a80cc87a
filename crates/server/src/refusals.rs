//! Peers that are not let in, for whoever lends the memory to see.
//!
//! Invariants: nobody who serves waits for whoever tells. A few are kept until they are told, the others are counted; what
//! was told is followed by a pause. So strangers can fill neither memory nor a disk.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use spillway_wire::hello::Code;
use spillway_wire::tls;

/// Refusals that are told one by one, between two pauses; enough to see who it is.
pub const KEPT_MAX: usize = 4;

/// What a handshake of TLS begins with: its type, and the first byte of its version.
const TLS_HANDSHAKE: [u8; 2] = [22, 3];

/// Why a peer was not let in. The text is about the peer, and says what helps.
#[derive(Clone, Debug, PartialEq)]
pub enum Why {
    /// For what it was told.
    Told(Code),
    /// The handshake of TLS failed.
    Tls(tls::Failure),
    /// It speaks TLS, and this server does not.
    SpeaksTls,
    /// It has said no hello, and others came when there were as many such connections as are allowed.
    Crowd(usize),
}

impl Why {
    /// Why a hello is not one.
    pub(crate) fn malformed(hello: &[u8]) -> Self {
        if hello.starts_with(&TLS_HANDSHAKE) { Self::SpeaksTls } else { Self::Told(Code::Malformed) }
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Told(code) => code.fmt(f),
            Self::Tls(failure) => failure.of_client().fmt(f),
            Self::SpeaksTls => {
                f.write_str("it speaks TLS: give this server --tls-cert and --tls-key, or leave `tls=1` out of its URL")
            }
            Self::Crowd(most) => {
                write!(f, "it has not said hello, as {most} others have not, and no more than that are allowed")
            }
        }
    }
}

/// A peer that was not let in.
#[derive(Clone, Debug, PartialEq)]
pub struct Refusal {
    /// Who.
    pub peer: SocketAddr,
    /// Why.
    pub why: Why,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "refused {}: {}", self.peer, self.why)
    }
}

/// Where refusals are put by those who serve.
#[derive(Clone, Debug)]
pub struct Refusals {
    kept: SyncSender<Refusal>,
    others: Arc<AtomicU64>,
}

/// Where they are taken from.
#[derive(Debug)]
pub struct Teller {
    kept: Receiver<Refusal>,
    others: Arc<AtomicU64>,
}

/// Both ends.
#[must_use]
pub fn refusals() -> (Refusals, Teller) {
    let (to, from) = sync_channel(KEPT_MAX);
    let others = Arc::new(AtomicU64::new(0));
    (Refusals { kept: to, others: Arc::clone(&others) }, Teller { kept: from, others })
}

impl Refusals {
    pub(crate) fn note(&self, peer: SocketAddr, why: Why) {
        if self.kept.try_send(Refusal { peer, why }).is_err() {
            self.others.fetch_add(1, Relaxed);
        }
    }
}

impl Teller {
    /// Waits for refusals and has a few of them told (`KEPT_MAX`), and how many others there were; then pauses, again and
    /// again, until nobody is left who could refuse.
    pub fn run(self, pause: Duration, mut tell: impl FnMut(&[Refusal], u64)) {
        while let Ok(first) = self.kept.recv() {
            let mut told = vec![first];
            told.extend(self.kept.try_iter().take(KEPT_MAX - 1));
            tell(&told, self.others.swap(0, Relaxed));
            std::thread::sleep(pause);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    const PAUSE: Duration = Duration::from_millis(50);

    #[test]
    fn few_are_told_between_two_pauses_and_all_are_counted() {
        const PEERS: u64 = 20_000;
        let (refusals, teller) = refusals();
        let (mut lines, mut left_out, mut tellings) = (0, 0, 0);
        let began = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for at in 0..PEERS {
                    refusals.note(([10, 0, 0, 1], 7070).into(), Why::Crowd(usize::try_from(at).expect("small")));
                    if at % 100 == 0 {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                }
            });
            teller.run(PAUSE, |told, others| {
                assert!(!told.is_empty() && told.len() <= KEPT_MAX, "{}", told.len());
                (lines, left_out, tellings) = (lines + told.len() as u64, left_out + others, tellings + 1);
            });
        });
        // The last ones may have been counted after the last line was told.
        assert!(lines + left_out <= PEERS && lines + left_out + 100 >= PEERS, "{lines} and {left_out}");
        assert!(began.elapsed() >= PAUSE * tellings, "{tellings} in {:?}", began.elapsed());
        assert!(left_out > PEERS / 2, "{left_out}");
    }

    #[test]
    fn what_is_told_says_who_and_why() {
        let peer = ([10, 0, 0, 1], 7070).into();
        let said = |why| Refusal { peer, why }.to_string();
        assert!(said(Why::Told(Code::Token)).starts_with("refused 10.0.0.1:7070: the token is not the server's"));
        assert!(said(Why::malformed(b"\x16\x03\x01...")).contains("--tls-cert"));
        assert!(said(Why::malformed(b"GET / HTTP/1.1")).contains("protocol"));
        assert!(said(Why::Tls(tls::Failure::NotTls)).contains("`tls=1"));
        assert!(said(Why::Tls(tls::Failure::NoCertificate)).contains("`tls-cert`"));
    }
}

//! Proofs that a secret is known, without sending it.
//!
//! Each is HMAC-SHA256 over a label, the server's challenge and what the other side sent, so a recorded proof is worth
//! nothing on another connection, and one kind of proof is never another. Without TLS this keeps strangers out but not
//! those who can change packets on their way: see docs/PROTOCOL.md.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// Bytes of a proof.
pub const PROOF_BYTES: usize = 32;
/// A proof.
pub type Proof = [u8; PROOF_BYTES];
/// What only a tenant knows of itself: random, chosen by the pager.
pub type Secret = [u8; 16];

/// What the two ends of a TLS session know, and nobody else.
pub type Channel = [u8; 32];

/// What a proof is for. Each proof is bound to one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// The client knows the server's token.
    ClientToken,
    /// The server knows it too.
    ServerToken,
    /// The client knows the tenant's secret.
    Tenant,
    /// No proof: the pad under which a new tenant's secret travels.
    Seal,
    /// No proof: the challenge as it counts within one TLS session.
    Channel,
}

impl Purpose {
    fn label(self) -> &'static [u8] {
        match self {
            Self::ClientToken => b"spillway 1 client\0",
            Self::ServerToken => b"spillway 1 server\0",
            Self::Tenant => b"spillway 1 tenant\0",
            Self::Seal => b"spillway 1 seal\0",
            Self::Channel => b"spillway 1 channel\0",
        }
    }
}

fn mac(key: &[u8], purpose: Purpose, parts: [&[u8]; 2]) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of any length");
    mac.update(purpose.label());
    parts.iter().for_each(|part| mac.update(part));
    mac
}

/// The proof over `parts`, each of a length that the protocol fixes.
pub(crate) fn prove(key: &[u8], purpose: Purpose, parts: [&[u8]; 2]) -> Proof {
    mac(key, purpose, parts).finalize().into_bytes().into()
}

/// Whether `proof` is right, in a time that does not tell how much of it is.
pub(crate) fn verify(key: &[u8], purpose: Purpose, parts: [&[u8]; 2], proof: &Proof) -> bool {
    mac(key, purpose, parts).verify_slice(proof).is_ok()
}

/// Seals a secret, or opens a sealed one. The pad is used once, as the challenge and the nonce in `parts` are random.
pub(crate) fn seal(key: &[u8], parts: [&[u8]; 2], secret: Secret) -> Secret {
    let pad = prove(key, Purpose::Seal, parts);
    std::array::from_fn(|at| secret[at] ^ pad[at])
}

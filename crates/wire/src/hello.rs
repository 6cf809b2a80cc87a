//! The handshake: challenge, hello, then welcome or refusal. All but the texts have fixed lengths.
//!
//! ```text
//! challenge, server  magic 8 | nonce 32
//! hello, client      magic 8 | lowest version u16 | highest version u16 | flags u32 | tenant 16 | nonce 32 | sealed secret 16
//!                    | token proof 32 | tenant proof 32
//! reply, server      kind u16: 1 welcome, 2 refusal | body length u16
//! welcome            version u16 | batch u16 | window bytes u32 | lease seconds u32 | heartbeat seconds u32 | flags u32
//!                    | capacity pages u64 | free pages u64 | incarnation u64 | token proof 32
//! refusal            code u16 | text
//! ```

use std::fmt;

use crate::auth::{self, Channel, PROOF_BYTES, Proof, Purpose, Secret};
use crate::bytes::Reader;
use crate::{Malformed, VERSION, VERSION_MIN, answer};

/// What a server's challenge and a client's hello start with.
pub const MAGIC: [u8; 8] = *b"SPILLWAY";
/// Bytes of a challenge.
pub const CHALLENGE_BYTES: usize = 40;
/// Bytes of a hello.
pub const HELLO_BYTES: usize = PROVEN_BYTES + 2 * PROOF_BYTES;
/// Bytes of a hello before its proofs, which cover them.
const PROVEN_BYTES: usize = 80;
/// Bytes of a hello before the sealed secret.
const UNSEALED_BYTES: usize = 64;
/// Bytes of a reply before its body.
pub const REPLY_HEADER_BYTES: usize = 4;
const WELCOME_BYTES: usize = WELCOME_PROVEN_BYTES + PROOF_BYTES;
const WELCOME_PROVEN_BYTES: usize = 44;
/// Bytes of text in a refusal or a goodbye at most.
pub const TEXT_BYTES_MAX: usize = 256;
/// The longest reply.
pub const REPLY_BYTES_MAX: usize = REPLY_HEADER_BYTES + 2 + TEXT_BYTES_MAX;

const FLAG_CREATE: u32 = 1;
const FLAG_TAKE_OVER: u32 = 2;
const FLAG_EXISTED: u32 = 1;

/// Random bytes that are never used twice.
pub type Nonce = [u8; 32];
/// A tenant's name: random, so that no two pagers have the same.
pub type TenantId = [u8; 16];

/// Why a server refuses a connection, or ends one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Code {
    /// No version is spoken by both.
    Version = 1,
    /// The token's proof is wrong.
    Token = 2,
    /// The tenant's proof is wrong: the name is taken by someone else.
    Tenant = 3,
    /// The server does not know the tenant, and was not asked to make it: its pages are gone.
    UnknownTenant = 4,
    /// There are as many tenants or connections as the server allows. Later there may be fewer.
    Busy = 5,
    /// The other end did not keep to the protocol.
    Malformed = 6,
    /// Another connection of the tenant took over.
    TakenOver = 7,
    /// Nothing was heard, or nothing read, for too long.
    Silent = 8,
    /// The server ends.
    Ending = 9,
    /// The client proves a token, and the server has none that it could prove in turn.
    NoToken = 10,
}

impl Code {
    pub(crate) fn from_number(number: u16) -> Result<Self, Malformed> {
        Ok(match number {
            1 => Self::Version,
            2 => Self::Token,
            3 => Self::Tenant,
            4 => Self::UnknownTenant,
            5 => Self::Busy,
            6 => Self::Malformed,
            7 => Self::TakenOver,
            8 => Self::Silent,
            9 => Self::Ending,
            10 => Self::NoToken,
            _ => return Err(Malformed("a code is 1 to 10")),
        })
    }

    pub(crate) fn number(self) -> u16 {
        self as u16
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Version => "client and server speak no common version: use the same version of spillway on both",
            Self::Token => "the token is not the server's: give both the same token file",
            Self::NoToken => {
                "the server has no token, and the client gave one: start the server with --token-file, or leave token-file= out"
            }
            Self::Tenant => "the tenant's name is taken by another pager: start the pager anew",
            Self::UnknownTenant => {
                "the server has forgotten this tenant and its pages: its lease ran out, or it restarted"
            }
            Self::Busy => "the server has as many tenants or connections as it allows: try again later",
            Self::Malformed => "the client does not keep to the protocol: use the same version of spillway on both",
            Self::TakenOver => "a newer connection of the same pager took over",
            Self::Silent => "the client was silent, or did not read, for too long",
            Self::Ending => "the server ends, and its pages with it",
        })
    }
}

/// The server's first bytes.
#[must_use]
pub fn challenge(nonce: &Nonce) -> [u8; CHALLENGE_BYTES] {
    let mut bytes = [0; CHALLENGE_BYTES];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..].copy_from_slice(nonce);
    bytes
}

/// The nonce of a challenge.
///
/// # Errors
/// When the other end is no memory server.
pub fn decode_challenge(bytes: &[u8; CHALLENGE_BYTES]) -> Result<Nonce, Malformed> {
    let mut reader = Reader(bytes);
    if reader.array()? != MAGIC {
        return Err(Malformed("a challenge starts with SPILLWAY"));
    }
    reader.array()
}

/// The nonce that proofs within a TLS session are made with: whoever relays them between two sessions has proofs of
/// another nonce, whatever challenge is sent on.
#[must_use]
pub fn bind(challenge: &Nonce, channel: &Channel) -> Nonce {
    auth::prove(channel, Purpose::Channel, [challenge, &[]])
}

/// Versions that a client speaks, both included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Versions {
    /// The lowest.
    pub min: u16,
    /// The highest.
    pub max: u16,
}

impl Default for Versions {
    fn default() -> Self {
        Self { min: VERSION_MIN, max: VERSION }
    }
}

impl Versions {
    /// The highest that we speak too.
    #[must_use]
    pub fn common(self) -> Option<u16> {
        let highest = self.max.min(VERSION);
        (highest >= self.min.max(VERSION_MIN)).then_some(highest)
    }
}

/// Who connects, and how. The secrets themselves are given to [`Hello::encode`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Versions that the client speaks.
    pub versions: Versions,
    /// Whether the tenant may be made if the server does not know it. Without, a server that has lost the tenant's pages
    /// refuses with [`Code::UnknownTenant`].
    pub create: bool,
    /// Whether the tenant's other connections end first: when the welcome comes, no request of theirs will be carried
    /// out any more. For a client that reconnects and sends again what was not answered.
    pub take_over: bool,
    /// The tenant.
    pub tenant: TenantId,
    /// Random.
    pub nonce: Nonce,
}

/// A hello that was received; nothing in it is believed before it is proven.
#[derive(Clone, Copy)]
pub struct Received {
    /// What it says.
    pub hello: Hello,
    bytes: [u8; HELLO_BYTES],
    sealed: Secret,
    token_proof: Proof,
    tenant_proof: Proof,
}

impl Hello {
    /// The bytes to send. Without a token, the empty one.
    #[must_use]
    pub fn encode(&self, token: &[u8], secret: &Secret, challenge: &Nonce) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        let flags = if self.create { FLAG_CREATE } else { 0 } | if self.take_over { FLAG_TAKE_OVER } else { 0 };
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&self.versions.min.to_le_bytes());
        bytes[10..12].copy_from_slice(&self.versions.max.to_le_bytes());
        bytes[12..16].copy_from_slice(&flags.to_le_bytes());
        bytes[16..32].copy_from_slice(&self.tenant);
        bytes[32..64].copy_from_slice(&self.nonce);
        if self.create {
            let sealed = auth::seal(token, [challenge, &bytes[..UNSEALED_BYTES]], *secret);
            bytes[UNSEALED_BYTES..PROVEN_BYTES].copy_from_slice(&sealed);
        }
        let (proven, proofs) = bytes.split_at_mut(PROVEN_BYTES);
        let (token_proof, tenant_proof) = proofs.split_at_mut(PROOF_BYTES);
        token_proof.copy_from_slice(&auth::prove(token, Purpose::ClientToken, [challenge, proven]));
        tenant_proof.copy_from_slice(&auth::prove(secret, Purpose::Tenant, [challenge, proven]));
        bytes
    }
}

impl Received {
    /// Reads a hello.
    ///
    /// # Errors
    /// When the bytes are none.
    pub fn decode(bytes: &[u8; HELLO_BYTES]) -> Result<Self, Malformed> {
        let mut reader = Reader(bytes);
        if reader.array()? != MAGIC {
            return Err(Malformed("a hello starts with SPILLWAY"));
        }
        let versions = Versions { min: reader.u16()?, max: reader.u16()? };
        let flags = reader.u32()?;
        if versions.min > versions.max || flags & !(FLAG_CREATE | FLAG_TAKE_OVER) != 0 {
            return Err(Malformed("a hello's versions and flags are in order"));
        }
        let (create, take_over) = (flags & FLAG_CREATE != 0, flags & FLAG_TAKE_OVER != 0);
        let hello = Hello { versions, create, take_over, tenant: reader.array()?, nonce: reader.array()? };
        let sealed = reader.array()?;
        let (token_proof, tenant_proof) = (reader.array()?, reader.array()?);
        Ok(Self { hello, bytes: *bytes, sealed, token_proof, tenant_proof })
    }

    /// Whether the client knows the token.
    #[must_use]
    pub fn knows_token(&self, token: &[u8], challenge: &Nonce) -> bool {
        auth::verify(token, Purpose::ClientToken, [challenge, &self.bytes[..PROVEN_BYTES]], &self.token_proof)
    }

    /// Whether the client knows the tenant's secret.
    #[must_use]
    pub fn knows_secret(&self, secret: &Secret, challenge: &Nonce) -> bool {
        auth::verify(secret, Purpose::Tenant, [challenge, &self.bytes[..PROVEN_BYTES]], &self.tenant_proof)
    }

    /// The secret of a tenant to be made, if the hello carries one and proves it.
    #[must_use]
    pub fn new_secret(&self, token: &[u8], challenge: &Nonce) -> Option<Secret> {
        let secret = auth::seal(token, [challenge, &self.bytes[..UNSEALED_BYTES]], self.sealed);
        (self.hello.create && self.knows_secret(&secret, challenge)).then_some(secret)
    }
}

/// What a server grants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Welcome {
    /// The version that both speak from here on.
    pub version: u16,
    /// Pages, keys or ranges in a request at most; at most [`crate::BATCH_MAX`].
    pub batch_max: u16,
    /// Bytes of requests and of their answers that may be under way at a time; beyond, the server stops reading.
    pub window_bytes: u32,
    /// How long pages are kept while the tenant has no connection.
    pub lease_seconds: u32,
    /// How often the client is to say something; after three times as long without a word the server ends the connection.
    pub heartbeat_seconds: u32,
    /// Whether the tenant existed, and so do its pages.
    pub existed: bool,
    /// Pages that the server may keep in all.
    pub capacity_pages: u64,
    /// Pages that it would take now.
    pub free_pages: u64,
    /// Random, and the same as long as the tenant's pages are kept: another one means that they were lost meanwhile.
    pub incarnation: u64,
}

/// What a server replies to a hello.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply<'a> {
    /// Requests may follow.
    Welcome(Welcome),
    /// The connection ends.
    Refusal {
        /// Why.
        code: Code,
        /// Why, for people: checked to be UTF-8, but not to be fit for a terminal.
        text: &'a str,
    },
}

/// What both sides of a handshake know: what a welcome's proof covers.
#[derive(Clone, Copy)]
pub struct Transcript<'a> {
    /// The token, empty for none.
    pub token: &'a [u8],
    /// The server's nonce.
    pub challenge: &'a Nonce,
    /// The hello as it was sent.
    pub hello: &'a [u8; HELLO_BYTES],
}

impl Transcript<'_> {
    /// Appends a welcome, proven with the token, so that the client knows whom it hands its pages to.
    pub fn welcome(&self, out: &mut Vec<u8>, welcome: &Welcome) {
        out.extend_from_slice(&1u16.to_le_bytes());
        out.extend_from_slice(&u16::try_from(WELCOME_BYTES).expect("short").to_le_bytes());
        let start = out.len();
        out.extend_from_slice(&welcome.version.to_le_bytes());
        out.extend_from_slice(&welcome.batch_max.to_le_bytes());
        let flags = if welcome.existed { FLAG_EXISTED } else { 0 };
        for number in [welcome.window_bytes, welcome.lease_seconds, welcome.heartbeat_seconds, flags] {
            out.extend_from_slice(&number.to_le_bytes());
        }
        for number in [welcome.capacity_pages, welcome.free_pages, welcome.incarnation] {
            out.extend_from_slice(&number.to_le_bytes());
        }
        let proof = self.prove(&out[start..]);
        out.extend_from_slice(&proof);
    }

    fn prove(&self, welcome: &[u8]) -> Proof {
        let inner = auth::prove(self.token, Purpose::ServerToken, [self.challenge, self.hello]);
        auth::prove(self.token, Purpose::ServerToken, [&inner, welcome])
    }

    /// The reply at the start of `buffer`, and its length in bytes; `None` while it is not there as a whole.
    ///
    /// # Errors
    /// When the bytes are no reply, or a welcome of a server that does not know the token.
    pub fn decode<'b>(&self, buffer: &'b [u8]) -> Result<Option<(Reply<'b>, usize)>, Malformed> {
        let Some(header) = buffer.first_chunk::<REPLY_HEADER_BYTES>() else { return Ok(None) };
        let mut reader = Reader(header);
        let (kind, length) = (reader.u16()?, usize::from(reader.u16()?));
        let end = REPLY_HEADER_BYTES + length;
        if end > REPLY_BYTES_MAX {
            return Err(Malformed("a reply is short"));
        }
        let Some(body) = buffer.get(REPLY_HEADER_BYTES..end) else { return Ok(None) };
        let mut reader = Reader(body);
        let reply = match kind {
            1 => Reply::Welcome(self.decode_welcome(&mut reader, body)?),
            2 => {
                let code = Code::from_number(reader.u16()?)?;
                Reply::Refusal { code, text: answer::text(&mut reader)? }
            }
            _ => return Err(Malformed("a reply is 1 or 2")),
        };
        reader.end()?;
        Ok(Some((reply, end)))
    }

    fn decode_welcome(&self, reader: &mut Reader<'_>, body: &[u8]) -> Result<Welcome, Malformed> {
        let (version, batch_max) = (reader.u16()?, reader.u16()?);
        let (window_bytes, lease_seconds, heartbeat_seconds) = (reader.u32()?, reader.u32()?, reader.u32()?);
        let existed = match reader.u32()? {
            0 => false,
            FLAG_EXISTED => true,
            _ => return Err(Malformed("a welcome's flags are 0 or 1")),
        };
        let (capacity_pages, free_pages, incarnation) = (reader.u64()?, reader.u64()?, reader.u64()?);
        let proof: Proof = reader.array()?;
        let inner = auth::prove(self.token, Purpose::ServerToken, [self.challenge, self.hello]);
        let proven = &body[..WELCOME_PROVEN_BYTES];
        if !auth::verify(self.token, Purpose::ServerToken, [&inner, proven], &proof) {
            return Err(Malformed("a server knows the token"));
        }
        let spoken = (VERSION_MIN..=VERSION).contains(&version);
        if !spoken || batch_max == 0 || usize::from(batch_max) > crate::BATCH_MAX || heartbeat_seconds == 0 {
            return Err(Malformed("a welcome grants what its version allows"));
        }
        Ok(Welcome {
            version,
            batch_max,
            window_bytes,
            lease_seconds,
            heartbeat_seconds,
            existed,
            capacity_pages,
            free_pages,
            incarnation,
        })
    }
}

/// Appends a refusal; `text` is cut to [`TEXT_BYTES_MAX`].
pub fn refusal(out: &mut Vec<u8>, code: Code, text: &str) {
    let text = answer::cut(text);
    out.extend_from_slice(&2u16.to_le_bytes());
    out.extend_from_slice(&u16::try_from(2 + text.len()).expect("cut").to_le_bytes());
    out.extend_from_slice(&code.number().to_le_bytes());
    out.extend_from_slice(text.as_bytes());
}

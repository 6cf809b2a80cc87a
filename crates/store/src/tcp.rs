//! `tcp:`, our own memory servers as the pool. The protocol is `spillway-wire`'s: docs/PROTOCOL.md.
//!
//! Each server knows this pager as a tenant of its own, so that none of them can pose as it to another. A connection that
//! is made again takes over from the one before; a server that has forgotten the tenant gets a new one, and its pages are lost.

use std::time::Duration;

use spillway_wire::answer::{self, AnswerBody};
use spillway_wire::auth::{Channel, Secret};
use spillway_wire::frame::FRAME_BYTES_MAX;
use spillway_wire::hello::{
    self, CHALLENGE_BYTES, Code, HELLO_BYTES, Hello, MAGIC, Nonce, Reply, TenantId, Transcript, Versions,
};
use spillway_wire::request::{self, Class, PutPage, Range};
use spillway_wire::{Content, Key, VERSION_MIN, checksum};

use crate::Urgency;
use crate::pool::OpenErrorKind;
use crate::remote::protocol::{Answer, BATCH_MAX, Body, Grant, Greeting, Malformed, Name, Parcel, Protocol, Refusal};

/// What begins a complaint of a server that speaks TLS.
const TLS_ALERT: u8 = 21;
const WANTS_TLS: &str = "it speaks TLS only: add `tls=1&tls-ca=FILE` to the URL, with the authority that signed its \
                         certificate";

/// One memory server.
pub(crate) struct Tcp {
    token: Vec<u8>,
    tenant: TenantId,
    secret: Secret,
    /// Of the tenant's life that its pages belong to.
    incarnation: Option<u64>,
    /// What is spoken, once the server has said so.
    pub(crate) version: u16,
    /// Under TLS.
    channel: Option<Channel>,
    /// The nonce that proofs are made with and our hello, once they were exchanged.
    exchanged: Option<(Nonce, [u8; HELLO_BYTES])>,
}

fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).expect("getrandom(2) fails only before the system is up");
    bytes
}

impl Tcp {
    /// A new tenant; without a token, the empty one.
    pub(crate) fn new(token: Vec<u8>) -> Self {
        let (tenant, secret) = (random(), random());
        Self { token, tenant, secret, incarnation: None, version: VERSION_MIN, channel: None, exchanged: None }
    }

    fn say_hello(&mut self, challenge: &[u8; CHALLENGE_BYTES], out: &mut Vec<u8>) -> Result<(), Refusal> {
        let challenge = hello::decode_challenge(challenge).map_err(|malformed| other(&malformed))?;
        let challenge = self.channel.map_or(challenge, |channel| hello::bind(&challenge, &channel));
        let known = self.incarnation.is_some();
        let (tenant, nonce) = (self.tenant, random());
        let hello = Hello { versions: Versions::default(), create: !known, take_over: true, tenant, nonce };
        let bytes = hello.encode(&self.token, &self.secret, &challenge);
        out.extend_from_slice(&bytes[MAGIC.len()..]);
        self.exchanged = Some((challenge, bytes));
        Ok(())
    }

    fn grant(&mut self, welcome: &hello::Welcome) -> Grant {
        let forgot = self.incarnation != Some(welcome.incarnation);
        (self.incarnation, self.version) = (Some(welcome.incarnation), welcome.version);
        Grant {
            batch: usize::from(welcome.batch_max),
            window_bytes: usize::try_from(welcome.window_bytes).unwrap_or(usize::MAX),
            heartbeat: Duration::from_secs(u64::from(welcome.heartbeat_seconds)) / 2,
            forgot,
            capacity_pages: Some((welcome.capacity_pages, welcome.free_pages)),
        }
    }

    fn refused(&mut self, code: Code) -> Refusal {
        if code == Code::UnknownTenant {
            // The next hello makes a new one.
            self.incarnation = None;
            (self.tenant, self.secret) = (random(), random());
        }
        if code == Code::Token && self.token.is_empty() {
            return (OpenErrorKind::Denied, "it wants a token: name a file that has it with token-file=".into());
        }
        refusal(code)
    }
}

fn refusal(code: Code) -> Refusal {
    let kind = match code {
        Code::Token | Code::NoToken | Code::Tenant => OpenErrorKind::Denied,
        Code::Version | Code::Malformed => OpenErrorKind::Protocol,
        Code::Busy => OpenErrorKind::Full,
        _ => OpenErrorKind::Unreachable,
    };
    (kind, code.to_string())
}

fn other(malformed: &spillway_wire::Malformed) -> Refusal {
    (OpenErrorKind::Protocol, format!("it is no memory server of spillway: {malformed}"))
}

fn key(name: Name) -> Key {
    Key { region: u32::from(name.epoch), index: name.handle }
}

impl Protocol for Tcp {
    const ANSWER_BYTES_MAX: usize = FRAME_BYTES_MAX;
    const OVERHEAD_BYTES: usize = 64;
    const FORGETS: bool = true;

    fn identity(&self) -> Vec<u8> {
        let incarnation = self.incarnation.map(u64::to_le_bytes);
        [&self.tenant[..], &self.secret[..], incarnation.as_ref().map_or(&[][..], |bytes| &bytes[..])].concat()
    }

    fn resume(&mut self, identity: &[u8]) -> bool {
        let Some((tenant, rest)) = identity.split_first_chunk() else { return false };
        let Some((secret, incarnation)) = rest.split_first_chunk() else { return false };
        let Ok(incarnation) = incarnation.try_into() else { return false };
        (self.tenant, self.secret, self.incarnation) = (*tenant, *secret, Some(u64::from_le_bytes(incarnation)));
        true
    }

    fn bind(&mut self, channel: Channel) {
        self.channel = Some(channel);
    }

    /// Sends the hello's first bytes ahead: a server that speaks TLS waits for a client's word, and these make it object.
    fn greet(&mut self, out: &mut Vec<u8>) {
        self.exchanged = None;
        out.extend_from_slice(&MAGIC);
    }

    fn greeted(&mut self, input: &[u8], out: &mut Vec<u8>) -> Result<(usize, Greeting), Refusal> {
        let Some((challenge, hello)) = &self.exchanged else {
            // What is no server of ours is told by its first bytes: it may never say as many as a challenge has.
            let start = &input[..input.len().min(MAGIC.len())];
            if self.channel.is_none() && start.first() == Some(&TLS_ALERT) {
                return Err((OpenErrorKind::Protocol, WANTS_TLS.into()));
            }
            if !MAGIC.starts_with(start) {
                return Err(other(&spillway_wire::Malformed("a challenge starts with SPILLWAY")));
            }
            let Some(challenge) = input.first_chunk() else { return Ok((0, Greeting::Unfinished)) };
            self.say_hello(challenge, out)?;
            return Ok((CHALLENGE_BYTES, Greeting::Unfinished));
        };
        let transcript = Transcript { token: &self.token, challenge, hello };
        let reply = transcript.decode(input).map_err(|malformed| {
            if malformed.0 == "a server knows the token" { refusal(Code::Token) } else { other(&malformed) }
        })?;
        match reply {
            None => Ok((0, Greeting::Unfinished)),
            Some((Reply::Welcome(welcome), bytes)) => Ok((bytes, Greeting::Done(self.grant(&welcome)))),
            Some((Reply::Refusal { code, .. }, _)) => Err(self.refused(code)),
        }
    }

    fn put(&mut self, out: &mut Vec<u8>, id: u32, pages: &[Parcel<'_>]) {
        let mut puts = [PutPage { key: Key::default(), checksum: 0, content: Content::Zero }; BATCH_MAX];
        for (put, Parcel { name, page }) in puts.iter_mut().zip(pages) {
            *put = PutPage { key: key(*name), checksum: checksum(page), content: Content::Bytes(page) };
        }
        request::put(out, id, &puts[..pages.len()]);
    }

    fn get(&mut self, out: &mut Vec<u8>, id: u32, urgency: Urgency, names: &[Name]) {
        let class = match urgency {
            Urgency::Demand => Class::Demand,
            Urgency::Prefetch => Class::Prefetch,
        };
        let mut keys = [Key::default(); BATCH_MAX];
        keys.iter_mut().zip(names).for_each(|(to, name)| *to = key(*name));
        request::get(out, id, class, &keys[..names.len()]);
    }

    fn free(&mut self, out: &mut Vec<u8>, id: u32, names: &[Name]) {
        let mut keys = [Key::default(); BATCH_MAX];
        keys.iter_mut().zip(names).for_each(|(to, name)| *to = key(*name));
        let keys = &mut keys[..names.len()];
        keys.sort_unstable();
        let mut ranges = [Range { first: Key::default(), pages: 0 }; BATCH_MAX];
        let mut count = 0;
        for key in keys {
            let follows =
                |range: &Range| range.first.region == key.region && range.first.index + range.pages == key.index;
            match ranges[..count].last_mut().filter(|range| follows(range)) {
                Some(range) => range.pages += 1,
                None => {
                    ranges[count] = Range { first: *key, pages: 1 };
                    count += 1;
                }
            }
        }
        request::free(out, id, &ranges[..count]);
    }

    fn heartbeat(&mut self, out: &mut Vec<u8>, id: u32) {
        request::heartbeat(out, id);
    }

    fn answer<'a>(&mut self, input: &'a [u8]) -> Result<Option<(Answer<'a>, usize)>, Malformed> {
        let decoded = answer::Answer::decode(input).map_err(|malformed| Malformed(malformed.0))?;
        let Some((answer, bytes)) = decoded else { return Ok(None) };
        let body = match answer.body {
            AnswerBody::Put(statuses) => Body::Puts(statuses),
            AnswerBody::Get(pages) => Body::Gets(pages),
            AnswerBody::Free { .. } | AnswerBody::Heartbeat | AnswerBody::Leave => Body::Done,
            AnswerBody::Status(_) => return Err(Malformed("no status that was not asked for")),
            AnswerBody::Goodbye { code, .. } => Body::Goodbye(self.refused(code)),
        };
        Ok(Some((Answer { id: answer.id, condition: Some(answer.condition), body }, bytes)))
    }
}

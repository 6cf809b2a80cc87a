//! `redis:`, a Redis or Valkey as the pool. Its protocol: <https://redis.io/docs/latest/develop/reference/protocol-spec/>.
//!
//! One that evicts when it is full is refused, unless the user says `lossy=1`; see [`crate::memcached`].

use std::collections::VecDeque;
use std::io::Write;
use std::time::Duration;

use spillway_core::PAGE_BYTES;
use spillway_wire::answer::PageStatus;

use crate::Urgency;
use crate::pool::OpenErrorKind;
use crate::remote::names::{Names, line, number, quoted};
use crate::remote::protocol::{Answer, Body, Grant, Greeting, Malformed, Name, Parcel, Protocol, Refusal};
use spillway_codec::{Codec, Compression};

/// As in `memcached.rs`. A client's output beyond some megabytes makes servers end it.
const WINDOW_BYTES: usize = 1 << 20;
/// The longest report of a server on itself.
const REPORT_BYTES_MAX: usize = 16 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    Put,
    Get,
    Free,
    Heartbeat,
}

/// One Redis.
pub(crate) struct Redis {
    names: Names,
    codec: Codec,
    password: Option<String>,
    lossy: bool,
    /// Answers come in the order of the requests.
    asked: VecDeque<(u32, Asked)>,
    /// Whether the password's answer is still to come.
    authenticating: bool,
    /// Which of its lives pages were put in.
    run: Option<Vec<u8>>,
}

/// One reply.
#[derive(Debug, PartialEq, Eq)]
enum Reply<'a> {
    /// `+OK`
    Simple(&'a [u8]),
    /// `-ERR ...`
    Error(&'a [u8]),
    /// `:1`
    Integer,
    /// `$3` and three bytes, or `$-1`
    Bulk(Option<&'a [u8]>),
}

/// The reply at the start of `input`, and its length; `None` while it is not there as a whole.
fn reply(input: &[u8], bulk_bytes_max: usize) -> Result<Option<(Reply<'_>, usize)>, Malformed> {
    if input.first().is_some_and(|kind| !b"+-:$".contains(kind)) {
        return Err(Malformed("a reply's kind"));
    }
    let Some((text, bytes)) = line(input)? else { return Ok(None) };
    let (kind, text) = text.split_first().ok_or(Malformed("a reply's kind"))?;
    let reply = match kind {
        b'+' => Reply::Simple(text),
        b'-' => Reply::Error(text),
        b':' => Reply::Integer,
        b'$' if text == b"-1" => Reply::Bulk(None),
        b'$' => {
            let length: usize = number(text).ok_or(Malformed("`$` and a length"))?;
            if length > bulk_bytes_max {
                return Err(Malformed("values of at most a page"));
            }
            let Some(value) = input.get(bytes..bytes + length + 2) else { return Ok(None) };
            let value = value.strip_suffix(b"\r\n").ok_or(Malformed("a line's end after a value"))?;
            return Ok(Some((Reply::Bulk(Some(value)), bytes + length + 2)));
        }
        _ => return Err(Malformed("a reply's kind")),
    };
    Ok(Some((reply, bytes)))
}

/// Whether this error means that the server takes no writes for now, and answers everything else.
fn is_declined(error: &[u8]) -> bool {
    // It is full; it cannot save to its disk; too few replicas follow it; it became a replica itself.
    let codes: [&[u8]; 4] = [b"OOM ", b"MISCONF ", b"NOREPLICAS ", b"READONLY "];
    codes.iter().any(|code| error.starts_with(code))
}

/// Appends a command.
pub(crate) fn command(out: &mut Vec<u8>, words: &[&[u8]]) {
    write!(out, "*{}\r\n", words.len()).expect("memory takes it");
    for word in words {
        write!(out, "${}\r\n", word.len()).expect("memory takes it");
        out.extend_from_slice(word);
        out.extend_from_slice(b"\r\n");
    }
}

impl Redis {
    pub(crate) fn new(names: Names, password: Option<String>, compression: Compression, lossy: bool) -> Self {
        let asked = VecDeque::with_capacity(1024);
        Self { names, codec: Codec::new(compression), password, lossy, asked, authenticating: false, run: None }
    }

    fn judge(&mut self, report: &[u8]) -> Result<Grant, Refusal> {
        let value = |name: &[u8]| {
            let value = report.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(name));
            value.map(<[u8]>::trim_ascii)
        };
        if value(b"maxmemory_policy:") != Some(b"noeviction") && !self.lossy {
            let text = "it may evict pages, which are then lost: `redis-cli config set maxmemory-policy noeviction`, or \
                        accept that with `lossy=1`";
            return Err((OpenErrorKind::Unsuitable, text.into()));
        }
        // One that became a replica later is kept: it takes nothing new, and what it has can still be read.
        if self.run.is_none() && value(b"role:") == Some(b"slave") {
            let text = "it is a replica, which takes no pages: name the Redis that it follows";
            return Err((OpenErrorKind::Unsuitable, text.into()));
        }
        if value(b"cluster_enabled:") == Some(b"1") {
            let text = "it is part of a Redis Cluster, which takes only a share of the keys: name one that was started with \
                        `--cluster-enabled no`";
            return Err((OpenErrorKind::Unsuitable, text.into()));
        }
        let run = value(b"run_id:").map(<[u8]>::to_vec);
        let forgot = self.run.is_some() && run.is_some() && self.run != run;
        self.run = run.or(self.run.take());
        Ok(Grant {
            batch: 1,
            window_bytes: WINDOW_BYTES,
            heartbeat: Duration::from_secs(5),
            forgot,
            capacity_pages: None,
        })
    }

    fn refused(&self, text: &[u8]) -> Refusal {
        let denied = |text: &str| (OpenErrorKind::Denied, text.to_owned());
        if text.starts_with(b"NOAUTH") {
            return denied("it wants a password: `redis://:PASSWORD@host`");
        }
        if self.authenticating {
            return denied("it refuses the password: correct it in the URL");
        }
        (OpenErrorKind::Unsuitable, format!("it says `{}`: see its log", quoted(text)))
    }
}

impl Protocol for Redis {
    const ANSWER_BYTES_MAX: usize = REPORT_BYTES_MAX + 4096;
    const OVERHEAD_BYTES: usize = 64;
    const FORGETS: bool = false;

    fn identity(&self) -> Vec<u8> {
        [self.run.as_deref().unwrap_or_default(), b" ", self.names.prefix()].concat()
    }

    fn resume(&mut self, identity: &[u8]) -> bool {
        let Some(end) = identity.iter().position(|byte| *byte == b' ') else { return false };
        let Some(names) = Names::again(&identity[end + 1..]) else { return false };
        (self.names, self.run) = (names, Some(identity[..end].to_vec()).filter(|run| !run.is_empty()));
        true
    }

    fn greet(&mut self, out: &mut Vec<u8>) {
        self.asked.clear();
        self.authenticating = self.password.is_some();
        if let Some(password) = &self.password {
            command(out, &[b"AUTH", password.as_bytes()]);
        }
        command(out, &[b"INFO"]);
    }

    fn greeted(&mut self, input: &[u8], _out: &mut Vec<u8>) -> Result<(usize, Greeting), Refusal> {
        let other = |_| {
            let text = format!("it is neither Redis nor Valkey: it says `{}`", quoted(input));
            (OpenErrorKind::Protocol, text)
        };
        let Some((reply, bytes)) = reply(input, REPORT_BYTES_MAX).map_err(other)? else {
            return Ok((0, Greeting::Unfinished));
        };
        match reply {
            Reply::Error(text) => Err(self.refused(text)),
            Reply::Simple(_) if self.authenticating => {
                self.authenticating = false;
                Ok((bytes, Greeting::Unfinished))
            }
            Reply::Bulk(Some(report)) => Ok((bytes, Greeting::Done(self.judge(report)?))),
            _ => Err(other(Malformed("a report"))),
        }
    }

    fn put(&mut self, out: &mut Vec<u8>, id: u32, pages: &[Parcel<'_>]) {
        let mut buffer = Names::buffer();
        for Parcel { name, page } in pages {
            command(out, &[b"SET", self.names.write(*name, &mut buffer), self.codec.pack(page)]);
            self.asked.push_back((id, Asked::Put));
        }
    }

    fn get(&mut self, out: &mut Vec<u8>, id: u32, _urgency: Urgency, names: &[Name]) {
        let mut buffer = Names::buffer();
        for name in names {
            command(out, &[b"GET", self.names.write(*name, &mut buffer)]);
            self.asked.push_back((id, Asked::Get));
        }
    }

    fn free(&mut self, out: &mut Vec<u8>, id: u32, names: &[Name]) {
        let mut buffer = Names::buffer();
        for name in names {
            command(out, &[b"DEL", self.names.write(*name, &mut buffer)]);
            self.asked.push_back((id, Asked::Free));
        }
    }

    fn heartbeat(&mut self, out: &mut Vec<u8>, id: u32) {
        command(out, &[b"PING"]);
        self.asked.push_back((id, Asked::Heartbeat));
    }

    fn answer<'a>(&mut self, input: &'a [u8]) -> Result<Option<(Answer<'a>, usize)>, Malformed> {
        let Some((reply, bytes)) = reply(input, PAGE_BYTES)? else { return Ok(None) };
        let (id, asked) = self.asked.pop_front().ok_or(Malformed("nothing that was not asked for"))?;
        let body = match (asked, reply) {
            (Asked::Put, Reply::Simple(_)) => Body::Put(PageStatus::Ok),
            (Asked::Put, Reply::Error(text)) if is_declined(text) => Body::Put(PageStatus::Full),
            // It stays there until the server is flushed; its name is not read again before a newer page is under it.
            (Asked::Free, Reply::Error(text)) if is_declined(text) => Body::Done,
            (Asked::Get, Reply::Bulk(value)) => Body::Get(value),
            (Asked::Free, Reply::Integer) | (Asked::Heartbeat, Reply::Simple(_)) => Body::Done,
            (_, Reply::Error(text)) => {
                let text = format!("it says `{}`: see its log", quoted(text));
                Body::Goodbye((OpenErrorKind::Unreachable, text))
            }
            _ => return Err(Malformed("the reply to the command")),
        };
        Ok(Some((Answer { id, condition: None, body }, bytes)))
    }
}

#[cfg(test)]
mod tests;

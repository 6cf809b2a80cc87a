//! `memcached:`, a cluster of memcached as the pool. Its meta protocol: <https://docs.memcached.org/protocols/meta/>.
//!
//! A cache forgets what it was given when it needs room. So one that may evict is refused, unless the user says
//! `lossy=1`: pages that are then missing are lost, and what touches them is ended.

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

/// What an item may need beside its value.
const ITEM_OVERHEAD_BYTES: u64 = 512;
/// Requests and answers under way: a server reads on while it writes, so this bounds only its memory.
const WINDOW_BYTES: usize = 1 << 20;

/// How far a server's clock and its uptime may be apart from one time to the next.
const CLOCK_SECONDS: u64 = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    Put,
    Get,
    Free,
    Heartbeat,
}

/// One memcached.
pub(crate) struct Memcached {
    names: Names,
    codec: Codec,
    lossy: bool,
    /// Answers come in the order of the requests.
    asked: VecDeque<(u32, Asked)>,
    facts: Facts,
    /// The process that pages were put to, and when it started.
    process: Option<(u64, u64)>,
}

/// What the server says of itself.
#[derive(Default)]
struct Facts {
    evictions: Option<bool>,
    item_bytes_max: Option<u64>,
    version: Option<(u32, u32)>,
    process: Option<u64>,
    time: Option<u64>,
    uptime: Option<u64>,
    /// Lists that have ended.
    ends: u8,
}

impl Memcached {
    pub(crate) fn new(names: Names, compression: Compression, lossy: bool) -> Self {
        let asked = VecDeque::with_capacity(1024);
        Self { names, codec: Codec::new(compression), lossy, asked, facts: Facts::default(), process: None }
    }

    /// Whether it is another process than the one before, which has nothing of what that one was given.
    fn was_restarted(&mut self) -> bool {
        let started = self.facts.time.zip(self.facts.uptime).and_then(|(time, uptime)| time.checked_sub(uptime));
        let Some(now) = self.facts.process.zip(started) else { return false };
        let before = self.process.replace(now);
        before.is_some_and(|before| before.0 != now.0 || before.1.abs_diff(now.1) > CLOCK_SECONDS)
    }

    fn judge(&mut self) -> Result<Grant, Refusal> {
        let Facts { evictions, item_bytes_max, version, .. } = self.facts;
        let refuse = |text: &str| Err((OpenErrorKind::Unsuitable, text.into()));
        if version.is_some_and(|version| version < (1, 6)) {
            return refuse("this memcached is older than 1.6 and has no meta commands: install a newer one");
        }
        if item_bytes_max.is_some_and(|bytes| bytes < PAGE_BYTES as u64 + ITEM_OVERHEAD_BYTES) {
            return refuse("its items are smaller than a page: restart it with `-I 1m`");
        }
        if evictions != Some(false) && !self.lossy {
            return refuse(
                "it may evict pages, which are then lost: restart it with `memcached -M`, or accept that with `lossy=1`",
            );
        }
        Ok(Grant {
            batch: 1,
            window_bytes: WINDOW_BYTES,
            heartbeat: Duration::from_secs(5),
            forgot: self.was_restarted(),
            capacity_pages: None,
        })
    }
}

impl Facts {
    /// Takes one line of `stats`. Returns whether it was one.
    fn take(&mut self, line: &[u8]) -> bool {
        if line == b"END" {
            self.ends += 1;
            return true;
        }
        let mut words = line.splitn(3, |byte| *byte == b' ');
        if words.next() != Some(b"STAT") {
            return false;
        }
        let (name, value) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        match name {
            b"evictions" if self.ends == 0 => self.evictions = Some(value != b"off"),
            b"item_size_max" => self.item_bytes_max = number(value),
            b"pid" => self.process = number(value),
            b"time" => self.time = number(value),
            b"uptime" => self.uptime = number(value),
            b"version" => {
                let mut parts = value.split(|byte| *byte == b'.').map(number);
                self.version = parts.next().flatten().zip(parts.next().flatten());
            }
            _ => {}
        }
        true
    }
}

impl Protocol for Memcached {
    const ANSWER_BYTES_MAX: usize = PAGE_BYTES + 4096;
    const OVERHEAD_BYTES: usize = 64;
    const FORGETS: bool = false;

    fn identity(&self) -> Vec<u8> {
        let (process, started) = self.process.unwrap_or_default();
        [&process.to_le_bytes()[..], &started.to_le_bytes(), self.names.prefix()].concat()
    }

    fn resume(&mut self, identity: &[u8]) -> bool {
        let Some((process, rest)) = identity.split_first_chunk() else { return false };
        let Some((started, prefix)) = rest.split_first_chunk() else { return false };
        let Some(names) = Names::again(prefix) else { return false };
        self.names = names;
        self.process = Some((u64::from_le_bytes(*process), u64::from_le_bytes(*started)));
        true
    }

    fn greet(&mut self, out: &mut Vec<u8>) {
        self.asked.clear();
        self.facts = Facts::default();
        out.extend_from_slice(b"stats settings\r\nstats\r\n");
    }

    fn greeted(&mut self, input: &[u8], _out: &mut Vec<u8>) -> Result<(usize, Greeting), Refusal> {
        let other = |said: &[u8]| {
            let text = format!("it is no memcached, or lets no one in without a name: it says `{}`", quoted(said));
            (OpenErrorKind::Protocol, text)
        };
        // What is something else need not say whole lines.
        let may_be = |word: &[u8]| input.iter().zip(word).all(|(said, expected)| said == expected);
        if !may_be(b"STAT ") && !may_be(b"END\r\n") {
            return Err(other(input));
        }
        let Some((text, bytes)) = line(input).map_err(|_| other(input))? else { return Ok((0, Greeting::Unfinished)) };
        if !self.facts.take(text) {
            return Err(other(text));
        }
        let greeting = if self.facts.ends == 2 { Greeting::Done(self.judge()?) } else { Greeting::Unfinished };
        Ok((bytes, greeting))
    }

    fn put(&mut self, out: &mut Vec<u8>, id: u32, pages: &[Parcel<'_>]) {
        let mut buffer = Names::buffer();
        for Parcel { name, page } in pages {
            let value = self.codec.pack(page);
            out.extend_from_slice(b"ms ");
            out.extend_from_slice(self.names.write(*name, &mut buffer));
            write!(out, " {} O{id}\r\n", value.len()).expect("memory takes it");
            out.extend_from_slice(value);
            out.extend_from_slice(b"\r\n");
            self.asked.push_back((id, Asked::Put));
        }
    }

    fn get(&mut self, out: &mut Vec<u8>, id: u32, _urgency: Urgency, names: &[Name]) {
        let mut buffer = Names::buffer();
        for name in names {
            out.extend_from_slice(b"mg ");
            out.extend_from_slice(self.names.write(*name, &mut buffer));
            write!(out, " v O{id}\r\n").expect("memory takes it");
            self.asked.push_back((id, Asked::Get));
        }
    }

    fn free(&mut self, out: &mut Vec<u8>, id: u32, names: &[Name]) {
        let mut buffer = Names::buffer();
        for name in names {
            out.extend_from_slice(b"md ");
            out.extend_from_slice(self.names.write(*name, &mut buffer));
            write!(out, " O{id}\r\n").expect("memory takes it");
            self.asked.push_back((id, Asked::Free));
        }
    }

    fn heartbeat(&mut self, out: &mut Vec<u8>, id: u32) {
        out.extend_from_slice(b"mn\r\n");
        self.asked.push_back((id, Asked::Heartbeat));
    }

    fn answer<'a>(&mut self, input: &'a [u8]) -> Result<Option<(Answer<'a>, usize)>, Malformed> {
        let Some((text, mut bytes)) = line(input)? else { return Ok(None) };
        let &(id, asked) = self.asked.front().ok_or(Malformed("nothing that was not asked for"))?;
        let mut words = text.split(|byte| *byte == b' ').filter(|word| !word.is_empty());
        let first = words.next().unwrap_or_default();
        let body = match (asked, first) {
            (Asked::Put, b"HD") => Body::Put(PageStatus::Ok),
            (Asked::Put, b"NS") => Body::Put(PageStatus::Full),
            (Asked::Put, b"SERVER_ERROR") => {
                self.asked.pop_front();
                return Ok(Some((answer(id, Body::Put(PageStatus::Full)), bytes)));
            }
            (Asked::Get, b"EN") => {
                self.asked.pop_front();
                return Ok(Some((answer(id, Body::Get(None)), bytes)));
            }
            (Asked::Get, b"VA") => {
                let length: usize = words.next().and_then(number).ok_or(Malformed("`VA` and a length"))?;
                if length > PAGE_BYTES {
                    return Err(Malformed("values of at most a page"));
                }
                let Some(value) = input.get(bytes..bytes + length + 2) else { return Ok(None) };
                bytes += length + 2;
                let value = value.strip_suffix(b"\r\n").ok_or(Malformed("a line's end after a value"))?;
                Body::Get(Some(value))
            }
            (Asked::Free, b"HD" | b"NF") | (Asked::Heartbeat, b"MN") => Body::Done,
            (_, b"SERVER_ERROR" | b"CLIENT_ERROR" | b"ERROR") => {
                let text = format!("it says `{}`: see its log", quoted(text));
                Body::Goodbye((OpenErrorKind::Unreachable, text))
            }
            _ => return Err(Malformed("an answer of the meta protocol")),
        };
        // Misses and errors may come without it.
        let opaque = words.find_map(|word| word.strip_prefix(b"O"));
        if opaque.is_some_and(|opaque| number(opaque) != Some(id)) {
            return Err(Malformed("answers in order"));
        }
        self.asked.pop_front();
        Ok(Some((answer(id, body), bytes)))
    }
}

fn answer(id: u32, body: Body<'_>) -> Answer<'_> {
    Answer { id, condition: None, body }
}

#[cfg(test)]
mod tests;

//! What the servers of a pool say of themselves: asked once, with nothing put there.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use spillway_core::PAGE_BYTES;
use spillway_wire::answer::{self, AnswerBody, Condition, ServerStatus};
use spillway_wire::{request, tls};

use super::open::read_token;
use super::{Cache, Etcd, Host, OpenError, OpenErrorKind, Tcp, Tls, Url, hosts};
use crate::remote::names::number;
use crate::remote::protocol::{Greeting, Protocol};
use crate::remote::refusals;
use crate::stripe::spread;
use crate::tcp;

/// How long a server may take for each answer.
const PATIENCE: Duration = Duration::from_secs(3);
/// Times that a server is asked, for its latency.
const ROUNDS: usize = 20;
/// The longest report of a cache on itself.
const REPORT_BYTES_MAX: usize = 64 << 10;

/// What a server says of itself; `None` where its kind does not tell.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ServerReport {
    /// Host and port.
    pub server: String,
    /// What fails together with it, where its cluster tells.
    pub domain: Option<String>,
    /// Why nothing else is known.
    pub error: Option<String>,
    /// Bytes that it may use.
    pub capacity_bytes: Option<u64>,
    /// Bytes that it uses.
    pub used_bytes: Option<u64>,
    /// Pages of all pagers; of a cache, items of any kind.
    pub pages: Option<u64>,
    /// Pages kept, each once however many are identical.
    pub distinct_pages: Option<u64>,
    /// Of these, pages in a spill file.
    pub spilled_pages: Option<u64>,
    /// Bytes of memory that the others take.
    pub stored_bytes: Option<u64>,
    /// Pagers that have pages there.
    pub tenants: Option<u64>,
    /// Connections, this one included.
    pub connections: Option<u64>,
    /// Share of its time that it is busy, of 255.
    pub load: Option<u8>,
    /// Whether its pages are moving to other servers.
    pub leaving: Option<bool>,
    /// Median time from a question to its answer.
    pub latency: Option<Duration>,
}

/// Asks each server of a pool.
///
/// # Errors
/// When the URL is none, or names no servers. A server that does not answer says so in its report.
pub fn status(url: &str) -> Result<Vec<ServerReport>, OpenError> {
    let report = |host: &Host, asked: Result<ServerReport, OpenError>| {
        let server = host.to_string();
        match asked {
            Ok(report) => ServerReport { server, ..report },
            Err(error) => ServerReport { server, error: Some(error.text), ..ServerReport::default() },
        }
    };
    let ask_all = |pool: &Tcp| -> Result<Vec<ServerReport>, OpenError> {
        let token = pool.token_file.as_deref().map(read_token).transpose()?.unwrap_or_default();
        let tls = pool.tls.as_ref().map(Tls::read).transpose()?;
        let ask = |host| {
            let tls = tls.as_ref().map(|tls| tls.of(host)).transpose()?;
            ask_tcp(host, tls.as_ref(), token.clone())
        };
        Ok(pool.hosts.iter().map(|host| report(host, ask(host))).collect())
    };
    match Url::parse(url)? {
        Url::Tcp(pool) => ask_all(&pool),
        Url::Etcd(etcd) => {
            let found = etcd.find()?;
            let reports = ask_all(&found.tcp)?.into_iter().zip(found.members);
            Ok(reports.map(|(report, member)| ServerReport { domain: Some(member.domain), ..report }).collect())
        }
        Url::Memcached(cache) => Ok(cache.hosts.iter().map(|host| report(host, ask_memcached(host))).collect()),
        Url::Redis(cache) => Ok(cache.hosts.iter().map(|host| report(host, ask_redis(host, &cache))).collect()),
        Url::Local(_) | Url::File(_) | Url::Emulated(_) => {
            let text = "this pool has no servers: see `spillway ps` for what a pager keeps in it".into();
            Err(OpenError { server: String::new(), kind: OpenErrorKind::Unsuitable, text })
        }
    }
}

/// What a pool of these servers, used as `url` says, does not survive though it has parity enough, in a line. Servers without a
/// domain are domains of their own.
#[must_use]
pub fn warning(url: &str, servers: &[ServerReport]) -> Option<String> {
    let shape = match Url::parse(url).ok()? {
        Url::Tcp(tcp) | Url::Etcd(Etcd { tcp, .. }) => tcp.stripes,
        Url::Memcached(cache) | Url::Redis(cache) => cache.stripes,
        Url::Local(_) | Url::File(_) | Url::Emulated(_) => None,
    };
    let domains: Vec<&str> = servers.iter().map(|it| it.domain.as_ref().unwrap_or(&it.server).as_str()).collect();
    spread::warning(shape?, &domains)
}

/// A connection that is waited for.
pub(super) struct Line {
    stream: tls::Stream,
    input: Vec<u8>,
}

pub(super) fn fail(kind: OpenErrorKind, text: impl Into<String>) -> OpenError {
    OpenError { server: String::new(), kind, text: text.into() }
}

fn broken(error: &io::Error) -> OpenError {
    if let Some(failure) = tls::Failure::within(error) {
        let (kind, text) = refusals::insecure(failure);
        return fail(kind, text);
    }
    let error = refusals::plain(error);
    fail(OpenErrorKind::Unreachable, format!("it does not answer ({error}): see whether it is started and reachable"))
}

impl Line {
    fn to(host: &Host, tls: Option<&tls::Client>) -> Result<Self, OpenError> {
        let mut tried = Err(OpenError::no_such_name(host));
        for address in hosts::resolve(host)? {
            tried = TcpStream::connect_timeout(&address, PATIENCE).map_err(|error| broken(&error));
            if tried.is_ok() {
                break;
            }
        }
        let socket = tried?;
        socket.set_read_timeout(Some(PATIENCE)).map_err(OpenError::system)?;
        socket.set_nodelay(true).map_err(OpenError::system)?;
        let stream = match tls {
            Some(client) => tls::Stream::secure(socket, client).map_err(|error| broken(&error))?,
            None => tls::Stream::plain(socket),
        };
        Ok(Self { stream, input: Vec::new() })
    }

    pub(super) fn say(&mut self, bytes: &[u8]) -> Result<(), OpenError> {
        self.stream.write_all(bytes).map_err(|error| broken(&error))
    }

    /// Reads until `whole` finds what it looks for and says how long that is; takes it out.
    pub(super) fn hear<T>(&mut self, mut whole: impl FnMut(&[u8]) -> Heard<T>) -> Result<T, OpenError> {
        loop {
            if let Some((heard, bytes)) = whole(&self.input)? {
                self.input.drain(..bytes);
                return Ok(heard);
            }
            if self.input.len() > REPORT_BYTES_MAX {
                return Err(fail(OpenErrorKind::Protocol, "it says too much: check the scheme and the port"));
            }
            let mut buffer = [0; 4096];
            match self.stream.read(&mut buffer).map_err(|error| broken(&error))? {
                0 => return Err(broken(&io::ErrorKind::UnexpectedEof.into())),
                bytes => self.input.extend_from_slice(&buffer[..bytes]),
            }
        }
    }

    /// Reads until a text ends with `end`.
    fn hear_until(&mut self, end: &[u8]) -> Result<String, OpenError> {
        self.hear(|input| {
            let at = input.windows(end.len()).position(|window| window == end);
            Ok(at.map(|at| (String::from_utf8_lossy(&input[..at + end.len()]).into_owned(), at + end.len())))
        })
    }

    fn median(&mut self, mut ask: impl FnMut(&mut Self) -> Result<(), OpenError>) -> Result<Duration, OpenError> {
        let mut times = Vec::with_capacity(ROUNDS);
        for _ in 0..ROUNDS {
            let asked = Instant::now();
            ask(self)?;
            times.push(asked.elapsed());
        }
        times.sort_unstable();
        Ok(times[ROUNDS / 2])
    }
}

/// A connection to a server of ours, and the version that is spoken. The server makes a tenant for this and forgets it when
/// its lease has run out.
pub(super) fn enter(host: &Host, tls: Option<&tls::Client>, token: Vec<u8>) -> Result<(Line, u16), OpenError> {
    let (mut line, mut protocol) = (Line::to(host, tls)?, tcp::Tcp::new(token));
    line.stream.channel().into_iter().for_each(|channel| protocol.bind(channel));
    let mut out = Vec::new();
    protocol.greet(&mut out);
    loop {
        line.say(&std::mem::take(&mut out))?;
        let greeting = line.hear(|input| {
            let (used, greeting) = protocol.greeted(input, &mut out).map_err(|(kind, text)| fail(kind, text))?;
            Ok((used > 0).then_some((greeting, used)))
        })?;
        if let Greeting::Done(_) = greeting {
            return Ok((line, protocol.version));
        }
    }
}

/// What a server of ours says of itself.
pub(super) fn ask_status(line: &mut Line) -> Result<(ServerStatus, Condition), OpenError> {
    let mut question = Vec::new();
    request::status(&mut question, 1);
    line.say(&question)?;
    line.hear(hear_status)
}

fn ask_tcp(host: &Host, tls: Option<&tls::Client>, token: Vec<u8>) -> Result<ServerReport, OpenError> {
    let (mut line, _) = enter(host, tls, token)?;
    let (status, condition) = ask_status(&mut line)?;
    let mut heartbeat = Vec::new();
    request::heartbeat(&mut heartbeat, 2);
    let latency = line.median(|line| {
        line.say(&heartbeat)?;
        line.hear(|input| Ok(answer::Answer::decode(input).map_err(other)?.map(|(_, bytes)| ((), bytes))))
    })?;
    Ok(ServerReport {
        capacity_bytes: Some(status.capacity_bytes),
        used_bytes: Some(status.used_bytes),
        pages: Some(status.pages),
        distinct_pages: Some(status.distinct_pages),
        spilled_pages: Some(status.spilled_pages),
        stored_bytes: Some(status.stored_bytes),
        // Without the one that asks.
        tenants: Some(status.tenants.saturating_sub(1)),
        connections: Some(status.connections),
        load: Some(condition.load),
        leaving: Some(condition.leaving),
        latency: Some(latency),
        ..ServerReport::default()
    })
}

/// What was heard and its length, once it is there as a whole.
pub(super) type Heard<T> = Result<Option<(T, usize)>, OpenError>;

fn hear_status(input: &[u8]) -> Heard<(ServerStatus, Condition)> {
    match answer::Answer::decode(input).map_err(other)? {
        None => Ok(None),
        Some((answer::Answer { body: AnswerBody::Status(status), condition, .. }, bytes)) => {
            Ok(Some(((status, condition), bytes)))
        }
        Some(_) => Err(fail(OpenErrorKind::Protocol, "it answers what was not asked: use the same version on both")),
    }
}

pub(super) fn other(malformed: spillway_wire::Malformed) -> OpenError {
    fail(OpenErrorKind::Protocol, malformed.to_string())
}

fn ask_memcached(host: &Host) -> Result<ServerReport, OpenError> {
    let mut line = Line::to(host, None)?;
    line.say(b"stats\r\n")?;
    let report = line.hear_until(b"END\r\n")?;
    let value = |name: &str| {
        let mut values = report.lines().filter_map(|line| line.strip_prefix("STAT ")?.strip_prefix(name));
        values.find_map(|value| number(value.strip_prefix(' ')?.as_bytes()))
    };
    let latency = line.median(|line| {
        line.say(b"mn\r\n")?;
        line.hear_until(b"\r\n").map(drop)
    })?;
    Ok(ServerReport {
        capacity_bytes: value("limit_maxbytes"),
        used_bytes: value("bytes"),
        pages: value("curr_items"),
        connections: value("curr_connections"),
        latency: Some(latency),
        ..ServerReport::default()
    })
}

fn ask_redis(host: &Host, cache: &Cache) -> Result<ServerReport, OpenError> {
    let mut line = Line::to(host, None)?;
    let mut question = Vec::new();
    if let Some(password) = &cache.password {
        crate::redis::command(&mut question, &[b"AUTH", password.as_bytes()]);
        line.say(&question)?;
        refused(&line.hear_until(b"\r\n")?)?;
    }
    question.clear();
    crate::redis::command(&mut question, &[b"INFO"]);
    line.say(&question)?;
    let head = line.hear_until(b"\r\n")?;
    refused(&head)?;
    let bytes: usize = head.strip_prefix('$').and_then(|bytes| number(bytes.trim().as_bytes())).unwrap_or(usize::MAX);
    let report = line.hear(|input| {
        let report = bytes.checked_add(2).and_then(|end| input.get(..end));
        Ok(report.map(|report| (String::from_utf8_lossy(report).into_owned(), report.len())))
    })?;
    let value = |name: &str| -> Option<u64> {
        let mut values = report.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        values.find_map(|value| number(value.trim().as_bytes()))
    };
    let keys = report.lines().filter_map(|line| line.split_once(":keys=")?.1.split(',').next()?.parse::<u64>().ok());
    let pages = keys.sum();
    let latency = line.median(|line| {
        line.say(b"PING\r\n")?;
        line.hear_until(b"\r\n").map(drop)
    })?;
    Ok(ServerReport {
        // Zero is no limit but the host's.
        capacity_bytes: value("maxmemory").filter(|bytes| *bytes > 0).or(value("total_system_memory")),
        used_bytes: value("used_memory"),
        pages: Some(pages),
        connections: value("connected_clients"),
        latency: Some(latency),
        ..ServerReport::default()
    })
}

fn refused(reply: &str) -> Result<(), OpenError> {
    match reply.strip_prefix('-') {
        None => Ok(()),
        Some(text) => {
            let text = format!("it says `{}`: correct the password in the URL", text.trim().escape_debug());
            Err(fail(OpenErrorKind::Denied, text))
        }
    }
}

impl ServerReport {
    /// Of the pages there, the share that needs no room of its own, being identical to another; in percent.
    #[must_use]
    pub fn deduplicated_percent(&self) -> Option<u64> {
        let pages = self.pages.filter(|pages| *pages > 0)?;
        Some(100 - (self.distinct_pages?.min(pages) * 100).div_ceil(pages))
    }

    /// Of the bytes of distinct pages in memory, the share that compression saves; in percent.
    #[must_use]
    pub fn compressed_percent(&self) -> Option<u64> {
        let pages = self.distinct_pages?.saturating_sub(self.spilled_pages.unwrap_or(0));
        let bytes = Some(pages).filter(|pages| *pages > 0)?.checked_mul(PAGE_BYTES as u64)?;
        Some(100 - self.stored_bytes?.min(bytes).checked_mul(100)?.div_ceil(bytes))
    }
}

//! Drives a server with pages and prints how many it took or gave: `bench/serve` runs it against ours and memcached.
//!
//!     pages spillway|memcached ADDRESS fill|put|get --pages N --seconds S [--depth 32] [--batch 16] [--connections 4]
//!           [--tls-ca FILE]
//!     pages spillway ADDRESS images --pages N --images I
//!
//! Everything but the words on the wire is the same for both: one thread, blocking sockets served in turn, requests
//! written a batch at a time, answers read into one large buffer, pages checked by their first and last word. Prints one
//! line of JSON. `fill` writes each page once, in order; `put` and `get` choose at random. A share of each page, `--noise`,
//! is noise, and the rest one byte: noise does not compress. `images` writes I images of N pages, a random tenth of each
//! written anew and the rest the same in all, and says how many of the pages differ.

use std::fmt::Write as _;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, Instant};

use spillway_core::{PAGE_BYTES, Page};
use spillway_server::tls::{Client, Stream, Trust};
use spillway_wire::answer::{Answer, AnswerBody, PageStatus};
use spillway_wire::hello::{
    CHALLENGE_BYTES, Hello, REPLY_BYTES_MAX, Reply, Transcript, Versions, bind, decode_challenge,
};
use spillway_wire::request::{self, Class, PutPage};
use spillway_wire::{Content, Key};

/// Room for the answers to a full pipeline: small, to stay in the CPU's cache.
const BUFFER_BYTES: usize = 192 << 10;

type Fallible<T> = Result<T, Box<dyn std::error::Error>>;

/// The words of a protocol.
trait Words {
    fn connect(&mut self, stream: &mut Stream) -> Fallible<()>;
    fn put(&mut self, out: &mut Vec<u8>, batch: &[(u32, Page)]);
    fn get(&mut self, out: &mut Vec<u8>, keys: &[u32]);
    /// The pages of the answers at the start of `bytes`, and how many bytes those take.
    fn answers(&mut self, bytes: &[u8], page: impl FnMut(Option<&Page>)) -> Fallible<usize>;
}

struct Spillway;

impl Words for Spillway {
    fn connect(&mut self, stream: &mut Stream) -> Fallible<()> {
        let mut challenge = [0; CHALLENGE_BYTES];
        stream.read_exact(&mut challenge)?;
        let challenge = decode_challenge(&challenge)?;
        let challenge = stream.channel().map_or(challenge, |channel| bind(&challenge, &channel));
        // Anyone may be this tenant: nothing is at stake in a benchmark.
        let versions = Versions::default();
        let hello = Hello { versions, create: true, take_over: false, tenant: [7; 16], nonce: [7; 32] };
        let hello = hello.encode(b"", &[7; 16], &challenge);
        stream.write_all(&hello)?;
        let transcript = Transcript { token: b"", challenge: &challenge, hello: &hello };
        let mut reply = Vec::new();
        while reply.len() < REPLY_BYTES_MAX {
            let mut byte = [0];
            stream.read_exact(&mut byte)?;
            reply.push(byte[0]);
            match transcript.decode(&reply)? {
                None => {}
                Some((Reply::Welcome(_), _)) => return Ok(()),
                Some((Reply::Refusal { text, .. }, _)) => return Err(text.to_owned().into()),
            }
        }
        Err("a reply without an end".into())
    }

    fn put(&mut self, out: &mut Vec<u8>, batch: &[(u32, Page)]) {
        let puts: Vec<PutPage<'_>> = batch
            .iter()
            .map(|(key, page)| PutPage { key: key_of(*key), checksum: first_word(page), content: Content::Bytes(page) })
            .collect();
        request::put(out, 1, &puts);
    }

    fn get(&mut self, out: &mut Vec<u8>, keys: &[u32]) {
        let keys: Vec<Key> = keys.iter().map(|key| key_of(*key)).collect();
        request::get(out, 1, Class::Demand, &keys);
    }

    fn answers(&mut self, bytes: &[u8], mut page: impl FnMut(Option<&Page>)) -> Fallible<usize> {
        let mut at = 0;
        while let Some((answer, len)) = Answer::decode(&bytes[at..])? {
            at += len;
            match answer.body {
                AnswerBody::Put(statuses) => {
                    for status in statuses {
                        if status != PageStatus::Ok {
                            return Err(format!("a put: {status:?}").into());
                        }
                        page(None);
                    }
                }
                AnswerBody::Get(pages) => {
                    for got in pages {
                        match got.content {
                            Ok(Content::Bytes(bytes)) => page(Some(bytes)),
                            other => return Err(format!("a get: {other:?}").into()),
                        }
                    }
                }
                other => return Err(format!("unexpected: {other:?}").into()),
            }
        }
        Ok(at)
    }
}

fn key_of(number: u32) -> Key {
    Key { region: number >> 20, index: number & 0xf_ffff }
}

/// The meta commands, keys of eight digits.
struct Memcached;

impl Words for Memcached {
    fn connect(&mut self, _: &mut Stream) -> Fallible<()> {
        Ok(())
    }

    fn put(&mut self, out: &mut Vec<u8>, batch: &[(u32, Page)]) {
        let mut line = String::with_capacity(32);
        for (key, page) in batch {
            line.clear();
            let _ = write!(line, "ms {key:08x} {PAGE_BYTES}\r\n");
            out.extend_from_slice(line.as_bytes());
            out.extend_from_slice(page);
            out.extend_from_slice(b"\r\n");
        }
    }

    fn get(&mut self, out: &mut Vec<u8>, keys: &[u32]) {
        let mut line = String::with_capacity(32);
        for key in keys {
            line.clear();
            let _ = write!(line, "mg {key:08x} v\r\n");
            out.extend_from_slice(line.as_bytes());
        }
    }

    fn answers(&mut self, bytes: &[u8], mut page: impl FnMut(Option<&Page>)) -> Fallible<usize> {
        const VALUE: &[u8] = b"VA 4096\r\n";
        let mut at = 0;
        loop {
            let rest = &bytes[at..];
            if rest.starts_with(b"HD\r\n") {
                page(None);
                at += 4;
            } else if let Some(rest) = rest.strip_prefix(VALUE) {
                let Some((value, rest)) = rest.split_first_chunk::<PAGE_BYTES>() else { return Ok(at) };
                if rest.len() < 2 {
                    return Ok(at);
                }
                page(Some(value));
                at += VALUE.len() + PAGE_BYTES + 2;
            } else if rest.len() >= VALUE.len() {
                return Err(format!("unexpected: {}", String::from_utf8_lossy(&rest[..VALUE.len()])).into());
            } else {
                return Ok(at);
            }
        }
    }
}

fn first_word(page: &Page) -> u64 {
    page.first_chunk().map_or(0, |word| u64::from_le_bytes(*word))
}

fn last_word(page: &Page) -> u64 {
    page.last_chunk().map_or(0, |word| u64::from_le_bytes(*word))
}

#[derive(Clone, Copy, PartialEq)]
enum Work {
    Images,
    Fill,
    Put,
    Get,
}

struct Given {
    work: Work,
    /// Of one image, too.
    pages: u32,
    images: u32,
    noise: f64,
    time: Duration,
    depth: usize,
    batch: usize,
    connections: usize,
}

struct Connection {
    stream: Stream,
    buffer: Vec<u8>,
    filled: usize,
    outstanding: usize,
}

/// What is asked next.
struct Source {
    given: Given,
    random: u64,
    next: u32,
    batch: Vec<(u32, Page)>,
    keys: Vec<u32>,
    /// What images have in common, and which pages of it any has.
    base: Vec<Page>,
    common: Vec<bool>,
    /// Pages that differ from all others.
    distinct: u64,
}

impl Source {
    fn random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    fn key(&mut self) -> u32 {
        if matches!(self.given.work, Work::Fill | Work::Images) {
            self.next += 1;
            return self.next - 1;
        }
        u32::try_from(self.random() % u64::from(self.given.pages)).unwrap_or(0)
    }

    fn is_done(&self, began: Instant) -> bool {
        match self.given.work {
            Work::Fill => self.next >= self.given.pages,
            Work::Images => self.next >= self.given.pages * self.given.images,
            Work::Put | Work::Get => began.elapsed() >= self.given.time,
        }
    }

    /// Appends a batch of requests.
    fn ask(&mut self, words: &mut impl Words, out: &mut Vec<u8>) {
        if self.given.work == Work::Get {
            self.keys.clear();
            for _ in 0..self.given.batch {
                let key = self.key();
                self.keys.push(key);
            }
            words.get(out, &self.keys);
            return;
        }
        if self.given.work == Work::Images {
            (0..self.given.batch).for_each(|at| self.image_page(at));
            words.put(out, &self.batch);
            return;
        }
        for at in 0..self.given.batch {
            // Every page differs from every other, in its first word, and names its key in the last.
            let (key, word) = (self.key() % self.given.pages, self.random());
            let (slot, page) = &mut self.batch[at];
            *slot = key;
            page[..8].copy_from_slice(&word.to_le_bytes());
            page[PAGE_BYTES - 8..].copy_from_slice(&(u64::from(key) ^ word).to_le_bytes());
        }
        words.put(out, &self.batch);
    }
}

impl Source {
    /// The next page of an image.
    fn image_page(&mut self, at: usize) {
        let number = self.key();
        let index = (number % self.given.pages) as usize;
        if self.random().is_multiple_of(10) {
            let mut noise = self.random();
            let (slot, page) = &mut self.batch[at];
            *slot = number;
            make_noise(&mut noise, page);
            self.distinct += 1;
        } else {
            self.batch[at] = (number, self.base[index]);
            self.distinct += u64::from(!std::mem::replace(&mut self.common[index], true));
        }
    }
}

fn make_noise(state: &mut u64, bytes: &mut [u8]) {
    for word in bytes.as_chunks_mut::<8>().0 {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        *word = (*state ^ *state >> 29).to_le_bytes();
    }
}

/// Pages done, the time it took, and how many pages differ where that is known.
fn drive(words: &mut impl Words, address: &str, tls: Option<&Client>, given: Given) -> Fallible<(u64, Duration, u64)> {
    let mut connections = Vec::new();
    for _ in 0..given.connections {
        let socket = TcpStream::connect(address)?;
        socket.set_nodelay(true)?;
        let mut stream = match tls {
            Some(client) => Stream::secure(socket, client)?,
            None => Stream::plain(socket),
        };
        words.connect(&mut stream)?;
        connections.push(Connection { stream, buffer: vec![0; BUFFER_BYTES], filled: 0, outstanding: 0 });
    }
    let mut filler = 0x9e37_79b9_7f4a_7c15u64;
    let mut page = [7; PAGE_BYTES];
    let noisy = (0..PAGE_BYTES).filter(|at| (*at as f64) < given.noise * PAGE_BYTES as f64).count();
    make_noise(&mut filler, &mut page[..noisy]);
    let mut base = vec![[0; PAGE_BYTES]; if given.work == Work::Images { given.pages as usize } else { 0 }];
    base.iter_mut().for_each(|page| make_noise(&mut filler, page));
    let (batch, common) = (vec![(0, page); given.batch], vec![false; base.len()]);
    let mut source = Source { given, random: filler | 1, next: 0, batch, keys: Vec::new(), base, common, distinct: 0 };
    let (mut out, mut done, began) = (Vec::new(), 0, Instant::now());
    let mut bad = 0u64;
    loop {
        let mut waiting = false;
        for connection in &mut connections {
            out.clear();
            while connection.outstanding + source.given.batch <= source.given.depth && !source.is_done(began) {
                source.ask(words, &mut out);
                connection.outstanding += source.given.batch;
            }
            connection.stream.write_all(&out)?;
        }
        for connection in &mut connections {
            if connection.outstanding == 0 {
                continue;
            }
            waiting = true;
            let read = connection.stream.read(&mut connection.buffer[connection.filled..])?;
            if read == 0 {
                return Err("the server closed the connection".into());
            }
            connection.filled += read;
            let mut answered = 0;
            let used = words.answers(&connection.buffer[..connection.filled], |page| {
                answered += 1;
                bad += u64::from(
                    page.is_some_and(|page| first_word(page) ^ last_word(page) >= u64::from(source.given.pages)),
                );
            })?;
            connection.buffer.copy_within(used..connection.filled, 0);
            connection.filled -= used;
            connection.outstanding -= answered;
            done += answered as u64;
        }
        if !waiting {
            break;
        }
    }
    if bad > 0 {
        return Err(format!("{bad} pages are wrong").into());
    }
    Ok((done, began.elapsed(), source.distinct))
}

fn main() -> Fallible<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [server, address, work, options @ ..] = args.as_slice() else {
        return Err("usage: pages spillway|memcached ADDRESS fill|put|get --pages N --seconds S".into());
    };
    let option = |name: &str, default: f64| -> Fallible<f64> {
        match options.iter().position(|option| option == name) {
            Some(at) => Ok(options.get(at + 1).ok_or(format!("{name} needs a number"))?.parse()?),
            None => Ok(default),
        }
    };
    let number =
        |name: &str, default: u32| -> Fallible<u32> { Ok(format!("{:.0}", option(name, default.into())?).parse()?) };
    let given = Given {
        work: match work.as_str() {
            "images" => Work::Images,
            "fill" => Work::Fill,
            "put" => Work::Put,
            "get" => Work::Get,
            _ => return Err(format!("`{work}` is none of images, fill, put, get").into()),
        },
        pages: number("--pages", 65_536)?,
        images: number("--images", 50)?,
        noise: option("--noise", 1.0)?,
        time: Duration::from_secs_f64(option("--seconds", 2.0)?),
        depth: number("--depth", 32)? as usize,
        batch: number("--batch", 16)? as usize,
        connections: number("--connections", 4)? as usize,
    };
    let tls = match options.iter().position(|option| option == "--tls-ca") {
        Some(at) => {
            let trust = Trust::read(Path::new(options.get(at + 1).ok_or("--tls-ca needs a file")?), None)?;
            let host = address.rsplit_once(':').map_or("", |(host, _)| host);
            Some(trust.of(host).ok_or("the host is no name that certificates have")?)
        }
        None => None,
    };
    let (pages, took, distinct) = match server.as_str() {
        "spillway" => drive(&mut Spillway, address, tls.as_ref(), given)?,
        "memcached" => drive(&mut Memcached, address, tls.as_ref(), given)?,
        _ => return Err(format!("`{server}` is neither spillway nor memcached").into()),
    };
    println!("{{\"pages\": {pages}, \"seconds\": {}, \"distinct\": {distinct}}}", took.as_secs_f64());
    Ok(())
}

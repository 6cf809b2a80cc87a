//! A plain client with a blocking socket, and a server that ends with the test.
#![allow(dead_code, unreachable_pub, reason = "a part of each test file, which uses its own share of it")]

pub mod certificates;

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use spillway_server::tls::Stream;
use spillway_server::{Config, Error, Server, Stop};
use spillway_wire::answer::{Answer, AnswerBody, PageStatus, ServerStatus};
use spillway_wire::auth::Channel;
use spillway_wire::hello::{
    CHALLENGE_BYTES, Code, Hello, Nonce, Reply, Transcript, Versions, Welcome, decode_challenge,
};
use spillway_wire::request::{self, Class, PutPage, Range};
use spillway_wire::{Content, Key, checksum};

/// The address of all tests: any port of this host.
pub const LISTEN: ([u8; 4], u16) = ([127, 0, 0, 1], 0);
pub const MIB: u64 = 1 << 20;

/// A server that runs until it is dropped.
pub struct Running {
    pub address: SocketAddr,
    pub stop: Stop,
    thread: Option<JoinHandle<Result<(), Error>>>,
}

pub fn start(config: Config) -> Running {
    let server = Server::bind(config).expect("a server");
    let (address, stop) = (server.address(), server.stopper());
    Running { address, stop, thread: Some(std::thread::spawn(|| server.run())) }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop.stop();
        let ended = self.thread.take().expect("once").join();
        if !std::thread::panicking() {
            ended.expect("no panic").expect("a clean end");
        }
    }
}

/// Waits for something; fails naming it.
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < Duration::from_secs(15), "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A page that differs from those of other numbers in every word.
pub fn page(number: u64) -> [u8; 4096] {
    let mut page = [0; 4096];
    for (at, word) in (0u64..).zip(page.as_chunks_mut::<8>().0) {
        *word = (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(at << 48).to_le_bytes();
    }
    page
}

pub fn hello(tenant: u8) -> Hello {
    Hello { versions: Versions::default(), create: true, take_over: false, tenant: [tenant; 16], nonce: [9; 32] }
}

pub fn connect(server: &Running) -> TcpStream {
    let stream = TcpStream::connect(server.address).expect("connected");
    stream.set_read_timeout(Some(Duration::from_secs(20))).expect("set");
    stream
}

/// A connection that was welcomed.
pub struct Client {
    pub stream: Stream,
    pub welcome: Welcome,
    buffer: Vec<u8>,
}

impl Client {
    /// Connects as the tenant of this number.
    pub fn new(server: &Running, tenant: u8) -> Self {
        Self::greet(server, &hello(tenant), b"").expect("welcome")
    }

    pub fn greet(server: &Running, hello: &Hello, token: &[u8]) -> Result<Self, Code> {
        Self::over(Stream::plain(connect(server)), hello, token, |challenge, _| challenge)
    }

    /// Says hello over a connection, with proofs for the nonce that `bound` makes of the challenge and the TLS channel.
    pub fn over(
        mut stream: Stream,
        hello: &Hello,
        token: &[u8],
        bound: impl FnOnce(Nonce, Option<Channel>) -> Nonce,
    ) -> Result<Self, Code> {
        let mut challenge = [0; CHALLENGE_BYTES];
        stream.read_exact(&mut challenge).expect("a challenge");
        let challenge = bound(decode_challenge(&challenge).expect("ours"), stream.channel());
        let bytes = hello.encode(token, &hello.tenant, &challenge);
        stream.write_all(&bytes).expect("sent");
        let transcript = Transcript { token, challenge: &challenge, hello: &bytes };
        let mut buffer = Vec::new();
        loop {
            match transcript.decode(&buffer).expect("a reply") {
                Some((Reply::Welcome(welcome), len)) => {
                    buffer.drain(..len);
                    return Ok(Self { stream, welcome, buffer });
                }
                Some((Reply::Refusal { code, .. }, _)) => return Err(code),
                None => assert!(receive(&mut stream, &mut buffer), "closed without a reply"),
            }
        }
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).expect("sent");
    }

    /// The next answer; `None` when the server closed the connection.
    pub fn answer<T>(&mut self, mut read: impl FnMut(u32, AnswerBody<'_>) -> T) -> Option<T> {
        loop {
            if let Some((answer, len)) = Answer::decode(&self.buffer).expect("well formed") {
                let result = read(answer.id, answer.body);
                self.buffer.drain(..len);
                return Some(result);
            }
            if !receive(&mut self.stream, &mut self.buffer) {
                return None;
            }
        }
    }

    pub fn put(&mut self, pages: &[(Key, [u8; 4096])]) -> Vec<PageStatus> {
        let puts: Vec<PutPage<'_>> = pages
            .iter()
            .map(|(key, page)| PutPage { key: *key, checksum: checksum(page), content: Content::Bytes(page) })
            .collect();
        let mut bytes = Vec::new();
        request::put(&mut bytes, 1, &puts);
        self.send(&bytes);
        let statuses = self.answer(|_, body| match body {
            AnswerBody::Put(statuses) => statuses.collect(),
            other => panic!("{other:?}"),
        });
        statuses.expect("an answer")
    }

    /// The pages under these keys, their checksums verified.
    pub fn get(&mut self, keys: &[Key]) -> Vec<Result<[u8; 4096], PageStatus>> {
        let mut bytes = Vec::new();
        request::get(&mut bytes, 2, Class::Demand, keys);
        self.send(&bytes);
        let pages = self.answer(|_, body| match body {
            AnswerBody::Get(pages) => pages
                .map(|page| {
                    Ok(match page.content? {
                        Content::Zero => [0; 4096],
                        Content::Bytes(bytes) => {
                            assert_eq!(checksum(bytes), page.checksum);
                            *bytes
                        }
                    })
                })
                .collect(),
            other => panic!("{other:?}"),
        });
        pages.expect("an answer")
    }

    pub fn free(&mut self, first: Key, pages: u32) -> u32 {
        let mut bytes = Vec::new();
        request::free(&mut bytes, 3, &[Range { first, pages }]);
        self.send(&bytes);
        let freed = self.answer(|_, body| match body {
            AnswerBody::Free { pages } => pages,
            other => panic!("{other:?}"),
        });
        freed.expect("an answer")
    }

    pub fn status(&mut self) -> ServerStatus {
        let mut bytes = Vec::new();
        request::status(&mut bytes, 4);
        self.send(&bytes);
        let status = self.answer(|_, body| match body {
            AnswerBody::Status(status) => status,
            other => panic!("{other:?}"),
        });
        status.expect("an answer")
    }

    /// The code of the goodbye that ends the connection; `None` when it ends without.
    pub fn goodbye(&mut self) -> Option<Code> {
        let mut last = None;
        while let Some(code) = self.answer(|_, body| match body {
            AnswerBody::Goodbye { code, .. } => Some(code),
            _ => None,
        }) {
            last = code;
        }
        last
    }
}

fn receive(stream: &mut impl Read, buffer: &mut Vec<u8>) -> bool {
    let mut bytes = vec![0; 1 << 16];
    match stream.read(&mut bytes) {
        Ok(0) => false,
        Ok(len) => {
            buffer.extend_from_slice(&bytes[..len]);
            true
        }
        Err(error) if error.kind() == ErrorKind::ConnectionReset => false,
        Err(error) => panic!("{error}"),
    }
}

//! Servers under TLS, and peers that want something else of them.

mod common;

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use common::certificates::Authority;
use common::{Client, LISTEN, MIB, Running, connect, eventually, hello, page, start};
use spillway_server::tls::{self, Failure, Identity, Stream, Trust};
use spillway_server::{Config, Limits};
use spillway_wire::Key;
use spillway_wire::answer::AnswerBody;
use spillway_wire::hello::{Code, Nonce, bind};
use spillway_wire::request::{self, Class};

const TOKEN: &[u8] = b"a token of sixteen or more";

fn key(index: u32) -> Key {
    Key { region: 1, index }
}

/// A server for `127.0.0.1`, with an authority of clients or without.
fn serve(authority: &Authority, clients: Option<&Authority>, change: impl FnOnce(&mut Config)) -> Running {
    let pair = authority.issue("server", &["127.0.0.1"]);
    let identity = Identity { certificate: &pair.certificate, key: &pair.key };
    let mut config = Config::new(LISTEN.into(), 64 * MIB);
    config.tls = Some(tls::Server::read(identity, clients.map(Authority::ca).as_deref()).expect("files"));
    config.workers = 2;
    change(&mut config);
    start(config)
}

fn trust(authority: &Authority) -> Trust {
    Trust::read(&authority.ca(), None).expect("a file")
}

fn secure(server: &Running, trust: &Trust) -> std::io::Result<Stream> {
    Stream::secure(connect(server), &trust.of("127.0.0.1").expect("a name"))
}

fn bound(challenge: Nonce, channel: Option<[u8; 32]>) -> Nonce {
    bind(&challenge, &channel.expect("TLS"))
}

fn enter(server: &Running, trust: &Trust, token: &[u8], tenant: u8) -> Result<Client, Code> {
    Client::over(secure(server, trust).expect("TLS"), &hello(tenant), token, bound)
}

#[test]
fn pages_come_back_over_several_connections() {
    let authority = Authority::new();
    let server = serve(&authority, None, |_| {});
    let trust = trust(&authority);
    let mut clients: Vec<Client> = (0..4).map(|_| enter(&server, &trust, b"", 1).expect("welcome")).collect();
    for batch in 0..40u32 {
        let pages: Vec<_> = (0..64).map(|at| (key(batch * 64 + at), page(u64::from(batch * 64 + at)))).collect();
        clients[batch as usize % 4].put(&pages);
    }
    for batch in 0..40u32 {
        let keys: Vec<_> = (0..64).map(|at| key(batch * 64 + at)).collect();
        for (got, key) in clients[(batch as usize + 1) % 4].get(&keys).into_iter().zip(keys) {
            assert!(got.is_ok_and(|got| got == page(u64::from(key.index))));
        }
    }
    // More answers than the window, before the first is read.
    let keys: Vec<Key> = (0..64).map(key).collect();
    let mut gets = Vec::new();
    (0..100).for_each(|id| request::get(&mut gets, id, Class::Demand, &keys));
    clients[0].send(&gets);
    for expected in 0..100 {
        let id = clients[0].answer(|id, body| {
            let AnswerBody::Get(pages) = body else { panic!("{body:?}") };
            assert!(pages.zip(0..).all(|(got, at)| {
                matches!(got.content, Ok(spillway_wire::Content::Bytes(bytes)) if *bytes == page(at))
            }));
            id
        });
        assert_eq!(id, Some(expected));
    }
    server.stop.stop();
    assert_eq!(clients[1].goodbye(), Some(Code::Ending));
}

#[test]
fn proofs_count_within_their_session_alone() {
    let authority = Authority::new();
    let server = serve(&authority, None, |config| config.token = TOKEN.to_vec());
    let trust = trust(&authority);
    assert!(enter(&server, &trust, TOKEN, 1).is_ok());
    assert_eq!(enter(&server, &trust, b"another", 1).err(), Some(Code::Token));
    // As if relayed: made for no session, and for another.
    let other = secure(&server, &trust).expect("TLS").channel().expect("TLS");
    let relayed: [fn(Nonce, [u8; 32]) -> Nonce; 2] = [|nonce, _| nonce, |nonce, other| bind(&nonce, &other)];
    for made in relayed {
        let stream = secure(&server, &trust).expect("TLS");
        let refused = Client::over(stream, &hello(1), TOKEN, |nonce, _| made(nonce, other));
        assert_eq!(refused.err(), Some(Code::Token));
    }
}

#[test]
fn only_clients_with_a_certificate_enter_where_one_is_wanted() {
    let (authority, clients, strangers) = (Authority::new(), Authority::new(), Authority::new());
    let server = serve(&authority, Some(&clients), |_| {});
    let shown = |by: &Authority| {
        let pair = by.issue("client", &["client"]);
        Trust::read(&authority.ca(), Some(Identity { certificate: &pair.certificate, key: &pair.key })).expect("files")
    };
    let mut welcome = enter(&server, &shown(&clients), b"", 1).expect("welcome");
    welcome.put(&[(key(1), page(1))]);
    // The client's side of the handshake is over before the server has looked at its certificate.
    let refusal = |trust: &Trust| {
        let ended = secure(&server, trust).and_then(|mut stream| stream.read(&mut [0; 100]));
        Failure::within(&ended.expect_err("refused")).cloned().expect("a failure of TLS")
    };
    assert_eq!(refusal(&trust(&authority)), Failure::CertificateWanted);
    assert!(matches!(refusal(&shown(&strangers)), Failure::CertificateRefused(_)));
    assert!(welcome.get(&[key(1)])[0] == Ok(page(1)));
}

/// Everything that the server says until it ends the connection; that it does, before long.
fn rest(mut stream: TcpStream) -> Vec<u8> {
    let mut said = Vec::new();
    match stream.read_to_end(&mut said) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}"),
    }
    said
}

/// A record of TLS as it would be sent in clear.
fn record(kind: u8, length: u16, content: &[u8]) -> Vec<u8> {
    let mut bytes = vec![kind, 3, 3];
    bytes.extend_from_slice(&length.to_be_bytes());
    bytes.extend_from_slice(content);
    bytes
}

#[test]
fn what_is_no_handshake_ends_the_connection_and_nothing_else() {
    let authority = Authority::new();
    let server = serve(&authority, None, |_| {});
    let trust = trust(&authority);
    let mut witness = enter(&server, &trust, b"", 2).expect("welcome");
    witness.put(&[(key(1), page(1))]);
    let noise: Vec<u8> = (0..5000u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 13).to_le_bytes()[0]).collect();
    let attacks = [
        noise,
        b"SPILLWAY".to_vec(),
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        // Records that are longer than records may be, and end before their time.
        record(22, u16::MAX, &[0; 100]),
        // A handshake that begins with its end; one of a kind that does not exist; data before there are keys.
        record(22, 4, &[20, 0, 0, 0]),
        record(22, 4, &[99, 0, 0, 0]),
        record(23, 5, b"hello"),
        // An alert.
        record(21, 2, &[2, 40]),
    ];
    for (at, attack) in attacks.iter().enumerate() {
        let mut stream = connect(&server);
        stream.write_all(attack).expect("sent");
        let said = rest(stream);
        // At most an alert, and no word of ours.
        assert!(said.is_empty() || said[0] == 21 && said.len() < 16, "attack {at}: {said:?}");
        assert!(witness.get(&[key(1)])[0] == Ok(page(1)), "after attack {at}");
    }
    // A client without TLS learns that it is wanted.
    let mut stream = connect(&server);
    stream.write_all(b"SPILLWAY").expect("sent");
    assert_eq!(rest(stream).first(), Some(&21));
}

#[test]
fn a_hello_of_sixteen_mebibytes_is_not_heard_to_its_end() {
    let authority = Authority::new();
    let server = serve(&authority, None, |_| {});
    let mut stream = connect(&server);
    // A ClientHello that is to have as many bytes as its length can say, in records as long as they may be.
    let mut content = vec![1, 0xff, 0xff, 0xff];
    let mut sent = 0;
    while sent < 16 * MIB {
        content.resize(16 << 10, 0);
        if stream.write_all(&record(22, 16 << 10, &content)).is_err() {
            break;
        }
        sent += content.len() as u64;
        content.clear();
    }
    assert!(sent < 16 * MIB, "it was all taken");
}

#[test]
fn what_is_in_clear_or_changed_after_the_handshake_ends_the_connection() {
    let authority = Authority::new();
    let server = serve(&authority, None, |_| {});
    let trust = trust(&authority);
    let mut heartbeat = Vec::new();
    request::heartbeat(&mut heartbeat, 1);
    let attacks = [
        heartbeat,
        record(23, 16, &[7; 16]),
        record(23, 0, &[]),
        record(21, 2, &[1, 0]),
        record(22, 4, &[24, 0, 0, 0]),
    ];
    for (at, attack) in attacks.iter().enumerate() {
        let client = enter(&server, &trust, b"", 1).expect("welcome");
        let mut socket = client.stream.socket();
        socket.write_all(attack).expect("sent");
        let said = rest(socket.try_clone().expect("cloned"));
        assert!(said.len() < 100, "attack {at}: {} bytes", said.len());
    }
    assert!(enter(&server, &trust, b"", 1).is_ok());
}

#[test]
fn a_handshake_must_be_made_in_time() {
    let authority = Authority::new();
    let limits = Limits { hello: Duration::from_millis(600), ..Limits::default() };
    let server = serve(&authority, None, |config| config.limits = limits);
    let trust = trust(&authority);
    // What a client says first.
    let mut said = Vec::new();
    trust.of("127.0.0.1").expect("a name").connect().send(&mut said).expect("bytes");
    let began = Instant::now();
    let (silent, mut half, mut trickle) = (connect(&server), connect(&server), connect(&server));
    half.write_all(&said[..said.len() / 2]).expect("sent");
    // The handshake, and then no hello.
    let idle = secure(&server, &trust).expect("TLS");
    let mut living = enter(&server, &trust, b"", 1).expect("welcome");
    eventually("the end of those that dawdle", || {
        // Bytes that come now and then are no excuse.
        let _ = trickle.write_all(&said[..1]);
        said.rotate_left(1);
        std::thread::sleep(Duration::from_millis(100));
        living.status().connections == 1
    });
    assert!(began.elapsed() < Duration::from_secs(3), "after {:?}", began.elapsed());
    assert!(began.elapsed() > Duration::from_millis(600));
    for stream in [silent, half, trickle, idle.socket().try_clone().expect("cloned")] {
        let _ = stream.shutdown(Shutdown::Write);
        rest(stream);
    }
}

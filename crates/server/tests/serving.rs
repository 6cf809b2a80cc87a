//! A running server and clients with sockets.

mod common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use common::{Client, LISTEN, MIB, Running, connect, eventually, hello, page, start};
use spillway_server::{Config, Error, Limits, Server};
use spillway_wire::Key;
use spillway_wire::answer::{AnswerBody, PageStatus};
use spillway_wire::hello::{CHALLENGE_BYTES, Code, HELLO_BYTES, Hello, Reply, Transcript, Versions};
use spillway_wire::request::{self, Class, Range};

fn key(index: u32) -> Key {
    Key { region: 1, index }
}

fn config() -> Config {
    let mut config = Config::new(LISTEN.into(), 64 * MIB);
    config.workers = 2;
    config
}

/// A server with short times.
fn hasty(limits: Limits) -> Running {
    start(Config { limits, ..config() })
}

#[test]
fn pages_come_back_over_several_connections() {
    let server = start(config());
    let mut clients: Vec<Client> = (0..4).map(|_| Client::new(&server, 1)).collect();
    for batch in 0..40u32 {
        let pages: Vec<_> = (0..64).map(|at| (key(batch * 64 + at), page(u64::from(batch * 64 + at)))).collect();
        let statuses = clients[batch as usize % 4].put(&pages);
        assert!(statuses.len() == 64 && statuses.iter().all(|status| *status == PageStatus::Ok));
    }
    for batch in 0..40u32 {
        let keys: Vec<_> = (0..64).map(|at| key(batch * 64 + at)).collect();
        for (got, key) in clients[(batch as usize + 1) % 4].get(&keys).into_iter().zip(keys) {
            assert!(got.is_ok_and(|got| got == page(u64::from(key.index))));
        }
    }
    assert_eq!(clients[0].free(key(100), 1000), 1000);
    assert_eq!(clients[1].get(&[key(99), key(100), key(1099), key(1100)]).iter().filter(|got| got.is_err()).count(), 2);
    let status = clients[2].status();
    assert_eq!((status.pages, status.distinct_pages, status.tenant_pages), (1560, 1560, 1560));
    assert_eq!((status.tenants, status.connections, status.capacity_bytes), (1, 4, 64 * MIB));
    assert!(status.service_p50_ns > 0 && status.service_p50_ns <= status.service_p99_ns);
    assert!(status.used_bytes >= 1560 * 4096 && status.stored_bytes == 1560 * 4096);
}

#[test]
fn a_request_in_two_pieces_is_answered_wherever_it_is_cut() {
    let server = start(config());
    let mut client = Client::new(&server, 1);
    client.stream.socket().set_nodelay(true).expect("set");
    client.stream.socket().set_read_timeout(Some(Duration::from_secs(1))).expect("set");
    assert_eq!(client.put(&[(key(1), page(1))]), [PageStatus::Ok]);
    let mut get = Vec::new();
    request::get(&mut get, 7, Class::Demand, &[key(1)]);
    for cut in 1..get.len() {
        client.send(&get[..cut]);
        // For the server to receive the first piece alone.
        std::thread::sleep(Duration::from_millis(10));
        client.send(&get[cut..]);
        let is_whole = |id, body: AnswerBody<'_>| id == 7 && matches!(body, AnswerBody::Get(pages) if pages.len() == 1);
        assert_eq!(client.answer(is_whole), Some(true), "cut at {cut}");
    }
}

#[test]
fn a_full_server_says_so_in_every_answer() {
    let mut small = config();
    small.memory_bytes = MIB;
    let server = start(small);
    let mut client = Client::new(&server, 1);
    let (mut stored, mut declined) = (0, 0);
    for at in 0..512 {
        match client.put(&[(key(at), page(at.into()))])[..] {
            [PageStatus::Ok] => stored += 1,
            [PageStatus::Full] => declined += 1,
            ref other => panic!("{other:?}"),
        }
    }
    assert_eq!(u64::from(stored), client.welcome.capacity_pages);
    assert!(declined > 200);
    for at in 0..stored {
        assert!(client.get(&[key(at)])[0] == Ok(page(at.into())));
    }
    assert!(client.status().used_bytes <= MIB);
    client.free(key(0), 10);
    assert_eq!(client.put(&[(key(1000), page(1000))]), [PageStatus::Ok]);
}

#[test]
fn a_server_that_leaves_takes_nothing_until_it_stays() {
    let server = start(config());
    let (mut client, mut operator) = (Client::new(&server, 1), Client::new(&server, 2));
    assert_eq!(client.put(&[(key(1), page(1))]), [PageStatus::Ok]);
    let mut tell = |leaves| {
        let mut bytes = Vec::new();
        request::leave(&mut bytes, 9, leaves);
        operator.send(&bytes);
        assert_eq!(operator.answer(|id, body| (id, matches!(body, AnswerBody::Leave))), Some((9, true)));
    };
    tell(true);
    // Not even what is there already may be replaced.
    assert_eq!(client.put(&[(key(1), page(2)), (key(2), page(2))]), [PageStatus::Full; 2]);
    assert!(client.get(&[key(1)])[0] == Ok(page(1)));
    assert_eq!(Client::new(&server, 3).welcome.free_pages, 0);
    tell(false);
    assert_eq!(client.put(&[(key(2), page(2))]), [PageStatus::Ok]);
    // Who speaks version 1 knows of no leaving.
    let old = Hello { versions: Versions { min: 1, max: 1 }, ..hello(4) };
    let mut old = Client::greet(&server, &old, b"").expect("welcome");
    assert_eq!(old.welcome.version, 1);
    let mut bytes = Vec::new();
    request::leave(&mut bytes, 9, true);
    old.send(&bytes);
    let goodbye = old.answer(|_, body| matches!(body, AnswerBody::Goodbye { code: Code::Malformed, .. }));
    assert_eq!(goodbye, Some(true));
    assert_eq!(client.put(&[(key(3), page(3))]), [PageStatus::Ok]);
}

#[test]
fn a_lease_outlives_its_connection_and_then_ends() {
    let server = hasty(Limits { lease: Duration::from_millis(700), ..Limits::default() });
    let mut client = Client::new(&server, 1);
    client.put(&[(key(1), page(1))]);
    let incarnation = client.welcome.incarnation;
    drop(client);
    let again = Hello { create: false, take_over: true, ..hello(1) };
    let mut client = Client::greet(&server, &again, b"").expect("within the lease");
    assert!(client.welcome.existed && client.welcome.incarnation == incarnation);
    assert!(client.get(&[key(1)])[0] == Ok(page(1)));
    let ended = Instant::now();
    drop(client);
    let mut observer = Client::new(&server, 2);
    eventually("the end of the lease", || observer.status().tenants == 1);
    assert!(ended.elapsed() >= Duration::from_millis(600));
    eventually("the purge", || observer.status().distinct_pages == 0);
    assert_eq!(Client::greet(&server, &again, b"").err(), Some(Code::UnknownTenant));
    let mut anew = Client::new(&server, 1);
    assert!(!anew.welcome.existed && anew.welcome.incarnation != incarnation);
    assert!(anew.get(&[key(1)])[0] == Err(PageStatus::Missing));
}

#[test]
fn the_silent_are_let_go_and_the_living_are_not() {
    let limits =
        Limits { heartbeat: Duration::from_millis(500), hello: Duration::from_millis(500), ..Limits::default() };
    let server = hasty(limits);
    let (mut silent, mut living) = (Client::new(&server, 1), Client::new(&server, 2));
    let mut mute = TcpStream::connect(server.address).expect("connected");
    let mut heartbeat = Vec::new();
    request::heartbeat(&mut heartbeat, 1);
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(4) {
        living.send(&heartbeat);
        living.answer(|_, body| assert!(matches!(body, AnswerBody::Heartbeat))).expect("an answer");
        std::thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(silent.goodbye(), Some(Code::Silent));
    assert_eq!(living.status().connections, 1);
    let _ = mute.write_all(&[0; 10]);
}

#[test]
fn who_does_not_read_is_not_read_from() {
    let server = start(config());
    let mut greedy = Client::new(&server, 1);
    greedy.put(&(0..64).map(|at| (key(at), page(at.into()))).collect::<Vec<_>>());
    let keys: Vec<Key> = (0..64).map(key).collect();
    let mut gets = Vec::new();
    for id in 0..4000 {
        request::get(&mut gets, id, Class::Demand, &keys);
    }
    // Answers of 1 GiB: the server stops reading long before, and so this cannot all be sent.
    greedy.stream.socket().set_nonblocking(true).expect("set");
    let mut sent = 0;
    eventually("back pressure", || {
        let before = sent;
        while let Ok(more) = greedy.stream.write(&gets[sent..]) {
            sent += more;
            if sent == gets.len() {
                break;
            }
        }
        std::thread::sleep(Duration::from_millis(100));
        sent == before || sent == gets.len()
    });
    let mut other = Client::new(&server, 2);
    assert_eq!(other.put(&[(key(1), page(1))]), [PageStatus::Ok]);
    // And when it reads, it gets all that it asked for.
    greedy.stream.socket().set_nonblocking(false).expect("set");
    let mut writer = greedy.stream.socket().try_clone().expect("cloned");
    let rest = gets[sent..].to_vec();
    let writing = std::thread::spawn(move || writer.write_all(&rest));
    for expected in 0..4000 {
        let id = greedy.answer(|id, body| {
            assert!(matches!(body, AnswerBody::Get(pages) if pages.len() == 64));
            id
        });
        assert_eq!(id, Some(expected));
    }
    writing.join().expect("no panic").expect("all was sent");
}

#[test]
fn an_ending_server_says_goodbye() {
    let server = start(config());
    let mut client = Client::new(&server, 1);
    server.stop.stop();
    assert_eq!(client.goodbye(), Some(Code::Ending));
}

#[test]
fn connections_are_limited() {
    let server = hasty(Limits { connections_max: 2, ..Limits::default() });
    let (one, mut two) = (Client::new(&server, 1), Client::new(&server, 1));
    assert_eq!(Client::greet(&server, &hello(2), b"").err(), Some(Code::Busy));
    eventually("the end of the third", || two.status().connections == 2);
    drop(one);
    eventually("room for one more", || Client::greet(&server, &hello(2), b"").is_ok());
}

#[test]
fn strangers_keep_no_client_out_and_learn_why_they_go() {
    const MOST: usize = 16;
    let server = hasty(Limits { connections_max: MOST, ..Limits::default() });
    let mut first = Client::new(&server, 1);
    let mut silent: Vec<TcpStream> = (0..3 * MOST)
        .map(|_| {
            let mut stream = connect(&server);
            stream.read_exact(&mut [0; CHALLENGE_BYTES]).expect("a challenge");
            stream
        })
        .collect();
    let mut clients: Vec<Client> = (1..MOST).map(|_| Client::new(&server, 1)).collect();
    assert_eq!(Client::greet(&server, &hello(1), b"").err(), Some(Code::Busy), "these are as many as may be");
    // The oldest had to go, and each was told.
    for stream in &mut silent[..MOST] {
        let mut said = Vec::new();
        stream.read_to_end(&mut said).expect("an end");
        let transcript = Transcript { token: b"", challenge: &[0; 32], hello: &[0; HELLO_BYTES] };
        let reply = transcript.decode(&said).expect("a reply").expect("whole");
        assert!(matches!(reply, (Reply::Refusal { code: Code::Busy, .. }, _)), "{reply:?}");
    }
    let there = first.status().connections;
    assert!((MOST as u64..=MOST as u64 * 5 / 4).contains(&there), "{there}");
    assert!(clients.iter_mut().all(|client| client.get(&[key(1)]) == [Err(PageStatus::Missing)]));
}

#[test]
fn long_requests_keep_nobody_else_waiting() {
    const REQUESTS: u32 = 200;
    let server = start(Config { workers: 1, ..config() });
    let (mut long, mut other) = (Client::new(&server, 1), Client::new(&server, 2));
    let mut frees = Vec::new();
    for id in 0..REQUESTS {
        request::free(&mut frees, id, &[Range { first: key(0), pages: 1 << 14 }]);
    }
    let freed = |id, body: AnswerBody<'_>| matches!(body, AnswerBody::Free { pages: 0 }).then_some(id);
    long.send(&frees);
    assert_eq!(long.answer(freed), Some(Some(0)));
    let reading = std::thread::spawn(move || (1..REQUESTS).all(|id| long.answer(freed) == Some(Some(id))));
    let mut amid = 0;
    while !reading.is_finished() {
        other.status();
        amid += 1;
    }
    assert!(reading.join().expect("no panic"), "all were carried out, in order");
    assert!(amid > REQUESTS / 10, "{amid} others were served amid {REQUESTS}");
}

#[test]
fn what_cannot_be_started_is_refused_in_a_line() {
    let server = start(config());
    let taken = Server::bind(Config::new(server.address, MIB)).err().expect("the port is taken");
    assert!(matches!(taken, Error::Listen(..)) && taken.to_string().contains("--listen"));
    let little = Server::bind(Config::new(LISTEN.into(), 1000)).err().expect("too little");
    assert!(matches!(little, Error::TooLittle(1000)));
}

#[test]
fn compressed_pages_come_back_and_take_less() {
    let server = start(Config { compress: true, ..Config::new(LISTEN.into(), 16 * MIB) });
    let mut client = Client::new(&server, 1);
    const PAGES: u32 = 4096;
    let key = |index| Key { region: 1, index };
    // Of each page in four, three quarters are noise; of the others, none.
    let content = |index: u32| {
        let mut page = [index.to_le_bytes()[0]; 4096];
        let noisy = if index.is_multiple_of(4) { 3072 } else { 8 };
        let mut noise = u64::from(index) + 1;
        for word in page[..noisy].as_chunks_mut::<8>().0 {
            noise = noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            *word = (noise ^ noise >> 31).to_le_bytes();
        }
        page
    };
    for first in (0..PAGES).step_by(64) {
        let pages: Vec<(Key, [u8; 4096])> = (first..first + 64).map(|index| (key(index), content(index))).collect();
        assert_eq!(client.put(&pages), [PageStatus::Ok; 64]);
    }
    // As often again, and nothing more is stored.
    assert_eq!(client.put(&[(key(PAGES), content(5)), (key(PAGES + 1), content(8))]), [PageStatus::Ok; 2]);
    let status = client.status();
    assert_eq!((status.pages, status.distinct_pages), (u64::from(PAGES) + 2, PAGES.into()));
    // 3072 bytes of noise and a little take seven grains, and 8 bytes one.
    assert_eq!(status.stored_bytes, u64::from(PAGES / 4) * (7 + 3) * 512);
    for first in (0..PAGES).step_by(64) {
        let keys: Vec<Key> = (first..first + 64).map(key).collect();
        for (got, key) in client.get(&keys).into_iter().zip(&keys) {
            assert!(got == Ok(content(key.index)), "{key:?}");
        }
    }
    assert_eq!(client.free(key(0), PAGES + 2), PAGES + 2);
    let status = client.status();
    assert_eq!((status.stored_bytes, status.distinct_pages), (0, 0));
}

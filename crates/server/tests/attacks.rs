//! Peers that do not keep to the protocol, or want what is not theirs: fed to the server's state machine byte by byte.

use spillway_server::rehearsal::{Peer, Stage};
use spillway_server::{Config, Limits};
use spillway_wire::answer::{Answer, AnswerBody, PageStatus};
use spillway_wire::auth::Secret;
use spillway_wire::hello::{CHALLENGE_BYTES, Code, Hello, Nonce, Reply, Transcript, Versions, Welcome};
use spillway_wire::request::{self, Class, PutPage, Range};
use spillway_wire::{Content, Key, checksum};

const TOKEN: &[u8] = b"the server's token";
const KEY: Key = Key { region: 1, index: 2 };

fn stage() -> Stage {
    let mut config = Config::new(([127, 0, 0, 1], 0).into(), 4 << 20);
    config.token = TOKEN.to_vec();
    config.limits = Limits { tenants_max: 2, ..Limits::default() };
    Stage::new(config).expect("memory")
}

/// A client's end.
struct Client {
    peer: Peer,
    hello: [u8; spillway_wire::hello::HELLO_BYTES],
    reply: Result<Welcome, Code>,
}

const HELLO: Hello =
    Hello { versions: Versions { min: 1, max: 1 }, create: true, take_over: false, tenant: [1; 16], nonce: [9; 32] };

/// Says hello under this challenge.
fn greet(stage: &Stage, challenge: Nonce, hello: &Hello, token: &[u8], secret: &Secret) -> Client {
    let bytes = hello.encode(token, secret, &challenge);
    replay(stage, challenge, bytes, token)
}

fn replay(stage: &Stage, challenge: Nonce, hello: [u8; spillway_wire::hello::HELLO_BYTES], token: &[u8]) -> Client {
    let mut peer = stage.connect(challenge);
    assert_eq!(peer.feed(&[]).len(), CHALLENGE_BYTES);
    // In pieces: nothing may depend on how the bytes arrive.
    assert!(peer.feed(&hello[..50]).is_empty());
    let sent = peer.feed(&hello[50..]);
    let transcript = Transcript { token, challenge: &challenge, hello: &hello };
    let reply = match transcript.decode(&sent).expect("a reply").expect("whole") {
        (Reply::Welcome(welcome), _) => Ok(welcome),
        (Reply::Refusal { code, .. }, _) => Err(code),
    };
    assert_eq!(peer.is_closed(), reply.is_err());
    Client { peer, hello, reply }
}

fn enter(stage: &Stage, hello: &Hello, secret: &Secret) -> Client {
    let client = greet(stage, [3; 32], hello, TOKEN, secret);
    assert!(client.reply.is_ok(), "{:?}", client.reply);
    client
}

fn put(client: &mut Client, key: Key, byte: u8) -> PageStatus {
    let page = [byte; 4096];
    let mut bytes = Vec::new();
    request::put(&mut bytes, 1, &[PutPage { key, checksum: checksum(&page), content: Content::Bytes(&page) }]);
    let sent = client.peer.feed(&bytes);
    let Ok(Some((Answer { body: AnswerBody::Put(mut statuses), .. }, _))) = Answer::decode(&sent) else { panic!() };
    statuses.next().expect("one")
}

fn get(client: &mut Client, key: Key) -> Result<u8, PageStatus> {
    let mut bytes = Vec::new();
    request::get(&mut bytes, 1, Class::Demand, &[key]);
    let sent = client.peer.feed(&bytes);
    let Ok(Some((Answer { body: AnswerBody::Get(mut pages), .. }, _))) = Answer::decode(&sent) else { panic!() };
    match pages.next().expect("one").content? {
        Content::Zero => Ok(0),
        Content::Bytes(page) => Ok(page[0]),
    }
}

/// The code of the goodbye that this ends with.
fn goodbye(sent: &[u8]) -> Option<Code> {
    let mut at = 0;
    while let Ok(Some((answer, len))) = Answer::decode(&sent[at..]) {
        at += len;
        if let AnswerBody::Goodbye { code, .. } = answer.body {
            return Some(code);
        }
    }
    None
}

#[test]
fn a_tenant_reaches_its_own_pages_and_no_others() {
    let stage = stage();
    let mut one = enter(&stage, &HELLO, &[1; 16]);
    let mut two = enter(&stage, &Hello { tenant: [2; 16], ..HELLO }, &[2; 16]);
    assert_eq!(put(&mut one, KEY, 11), PageStatus::Ok);
    assert_eq!(get(&mut two, KEY), Err(PageStatus::Missing));
    assert_eq!(put(&mut two, KEY, 22), PageStatus::Ok);
    let mut bytes = Vec::new();
    request::free(&mut bytes, 1, &[Range { first: Key { region: 1, index: 0 }, pages: 16 }]);
    two.peer.feed(&bytes);
    assert_eq!((get(&mut one, KEY), get(&mut two, KEY)), (Ok(11), Err(PageStatus::Missing)));
    // A second connection of the first finds its page, and a stranger under its name gets nowhere.
    let mut again = enter(&stage, &Hello { create: false, ..HELLO }, &[1; 16]);
    assert!(again.reply.is_ok_and(|welcome| welcome.existed));
    assert_eq!(get(&mut again, KEY), Ok(11));
    for create in [true, false] {
        let stranger = greet(&stage, [4; 32], &Hello { create, ..HELLO }, TOKEN, &[2; 16]);
        assert_eq!(stranger.reply.err(), Some(Code::Tenant));
    }
}

#[test]
fn without_the_token_nobody_enters() {
    let stage = stage();
    for token in [&b""[..], b"the server's tokeN", b"another"] {
        assert_eq!(greet(&stage, [3; 32], &HELLO, token, &[1; 16]).reply.err(), Some(Code::Token));
    }
    // None of them made the tenant.
    let hello = Hello { create: false, ..HELLO };
    assert_eq!(greet(&stage, [3; 32], &hello, TOKEN, &[1; 16]).reply.err(), Some(Code::UnknownTenant));
}

#[test]
fn a_recorded_handshake_opens_nothing() {
    let stage = stage();
    let recorded = enter(&stage, &HELLO, &[1; 16]).hello;
    assert_eq!(replay(&stage, [8; 32], recorded, TOKEN).reply.err(), Some(Code::Token));
}

#[test]
fn versions_from_nowhere_are_refused() {
    let stage = stage();
    for (min, max) in [(0, 0), (u16::MAX, u16::MAX), (3, 7)] {
        let hello = Hello { versions: Versions { min, max }, ..HELLO };
        assert_eq!(greet(&stage, [3; 32], &hello, TOKEN, &[1; 16]).reply.err(), Some(Code::Version));
    }
    let hello = Hello { versions: Versions { min: 0, max: u16::MAX }, ..HELLO };
    assert!(greet(&stage, [3; 32], &hello, TOKEN, &[1; 16]).reply.is_ok());
}

#[test]
fn tenants_are_limited() {
    let stage = stage();
    let _one = enter(&stage, &HELLO, &[1; 16]);
    let _two = enter(&stage, &Hello { tenant: [2; 16], ..HELLO }, &[1; 16]);
    let third = greet(&stage, [3; 32], &Hello { tenant: [3; 16], ..HELLO }, TOKEN, &[1; 16]);
    assert_eq!(third.reply.err(), Some(Code::Busy));
}

#[test]
fn tenants_without_pages_go_with_their_connections() {
    let stage = stage();
    let mut keeps = enter(&stage, &HELLO, &[1; 16]);
    assert_eq!(put(&mut keeps, KEY, 1), PageStatus::Ok);
    for tenant in 2..20 {
        let hello = Hello { tenant: [tenant; 16], ..HELLO };
        let (first, second) = (enter(&stage, &hello, &[1; 16]), enter(&stage, &hello, &[1; 16]));
        assert!(second.reply.is_ok_and(|welcome| welcome.existed));
        drop(first);
        // The other connection is there still.
        let mut third = enter(&stage, &Hello { create: false, ..hello }, &[1; 16]);
        assert_eq!(put(&mut third, KEY, tenant), PageStatus::Ok);
        let mut bytes = Vec::new();
        request::free(&mut bytes, 1, &[Range { first: KEY, pages: 1 }]);
        third.peer.feed(&bytes);
        drop((second, third));
        let again = greet(&stage, [3; 32], &Hello { create: false, take_over: true, ..hello }, TOKEN, &[1; 16]);
        assert_eq!(again.reply.err(), Some(Code::UnknownTenant), "as after a lease");
    }
    drop(keeps);
    let mut keeps = enter(&stage, &Hello { create: false, ..HELLO }, &[1; 16]);
    assert_eq!(get(&mut keeps, KEY), Ok(1));
    assert!(stage.is_consistent());
}

#[test]
fn who_takes_over_is_the_only_one() {
    let stage = stage();
    let mut old = enter(&stage, &HELLO, &[1; 16]);
    assert_eq!(put(&mut old, KEY, 1), PageStatus::Ok);
    let mut new = enter(&stage, &Hello { create: false, take_over: true, ..HELLO }, &[1; 16]);
    assert_eq!(put(&mut new, KEY, 2), PageStatus::Ok);
    let page = [1; 4096];
    let mut late = Vec::new();
    request::put(&mut late, 5, &[PutPage { key: KEY, checksum: checksum(&page), content: Content::Bytes(&page) }]);
    assert_eq!(goodbye(&old.peer.feed(&late)), Some(Code::TakenOver));
    assert_eq!(get(&mut new, KEY), Ok(2));
}

#[test]
fn bytes_that_are_no_request_end_the_connection_and_nothing_else() {
    let stage = stage();
    let mut witness = enter(&stage, &Hello { tenant: [2; 16], ..HELLO }, &[2; 16]);
    assert_eq!(put(&mut witness, KEY, 7), PageStatus::Ok);
    let mut empty = Vec::new();
    request::heartbeat(&mut empty, 1);
    let changed = |changes: &[(usize, u8)]| {
        let mut bytes = empty.clone();
        changes.iter().for_each(|(at, byte)| bytes[*at] = *byte);
        bytes
    };
    let huge = changed(&[(0, 0xff), (1, 0xff), (2, 0xff), (3, 0xff), (4, 1), (6, 64)]);
    let attacks = [
        huge,
        changed(&[(4, 0)]),
        changed(&[(4, 6)]),
        changed(&[(4, 200)]),
        changed(&[(6, 65)]),
        changed(&[(6, 1)]),
        changed(&[(0, 1), (16, 0)].map(|(at, byte)| (at % 16, byte))),
        changed(&[(15, 1)]),
        changed(&[(4, 2), (5, 9), (6, 1), (0, 8)]),
    ];
    for (at, mut attack) in attacks.into_iter().enumerate() {
        attack.resize(attack.len() + 64, 0);
        let mut attacker = enter(&stage, &HELLO, &[1; 16]);
        assert_eq!(goodbye(&attacker.peer.feed(&attack)), Some(Code::Malformed), "attack {at}");
        assert!(attacker.peer.is_closed() && attacker.peer.feed(&empty).is_empty());
    }
    assert_eq!(get(&mut witness, KEY), Ok(7));
}

#[test]
fn half_frames_wait_and_half_hellos_too() {
    let stage = stage();
    let mut client = enter(&stage, &HELLO, &[1; 16]);
    let mut bytes = Vec::new();
    request::get(&mut bytes, 1, Class::Demand, &[KEY; 3]);
    for byte in &bytes[..bytes.len() - 1] {
        assert!(client.peer.feed(&[*byte]).is_empty());
    }
    assert!(!client.peer.feed(&bytes[bytes.len() - 1..]).is_empty());
    assert!(!client.peer.is_closed());
    let mut mute = stage.connect([5; 32]);
    mute.feed(&[]);
    assert!(mute.feed(b"SPILLWAY").is_empty() && !mute.is_closed());
    let mut loud = stage.connect([5; 32]);
    loud.feed(&[]);
    loud.feed(&[0xff; 1000]);
    assert!(loud.is_closed());
}

#[test]
fn a_client_that_asks_for_much_and_reads_late_gets_all_of_it() {
    let stage = stage();
    let mut client = enter(&stage, &HELLO, &[1; 16]);
    assert_eq!(put(&mut client, KEY, 5), PageStatus::Ok);
    let mut bytes = Vec::new();
    // 128 MiB of answers to 270 KiB of requests; bulk and demand mixed.
    for id in 0..512 {
        let class = if id % 2 == 0 { Class::Prefetch } else { Class::Demand };
        request::get(&mut bytes, id, class, &[KEY; 64]);
    }
    let sent = client.peer.feed(&bytes);
    let (mut at, mut seen) = (0, vec![false; 512]);
    while let Ok(Some((answer, len))) = Answer::decode(&sent[at..]) {
        at += len;
        let AnswerBody::Get(pages) = answer.body else { panic!() };
        assert!(pages.clone().all(|page| matches!(page.content, Ok(Content::Bytes(page)) if page[9] == 5)));
        assert!(!std::mem::replace(&mut seen[answer.id as usize], true));
    }
    assert!(at == sent.len() && seen.iter().all(|seen| *seen));
}

#[test]
fn demand_overtakes_bulk() {
    let stage = stage();
    let mut client = enter(&stage, &HELLO, &[1; 16]);
    assert_eq!(put(&mut client, KEY, 5), PageStatus::Ok);
    let mut bytes = Vec::new();
    for id in 0..20 {
        request::get(&mut bytes, id, Class::Prefetch, &[KEY; 64]);
    }
    request::get(&mut bytes, 99, Class::Demand, &[KEY]);
    let sent = client.peer.feed(&bytes);
    let (answer, _) = Answer::decode(&sent).expect("well formed").expect("whole");
    assert_eq!(answer.id, 99);
}

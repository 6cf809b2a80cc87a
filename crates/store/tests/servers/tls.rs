//! Our own memory servers under TLS, behind the pager's side of the network.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::time::Duration;

use crate::common::certificates::{Authority, Pair, text};
use crate::common::contract::Contract;
use crate::common::lender::{Lender, assert_all, lost, put_all, put_while_cut};
use crate::common::proxy::Proxy;
use crate::common::{client, page, refusal};
use rcgen::{BasicConstraints, IsCa, date_time_ymd};
use spillway_server::Config;
use spillway_server::tls::{Identity, Server};
use spillway_store::{Got, StoreError, Urgency, pool};

const MEMORY_BYTES: u64 = 64 << 20;

fn tls(pair: &Pair, clients: Option<&Authority>) -> Server {
    let identity = Identity { certificate: &pair.certificate, key: &pair.key };
    Server::read(identity, clients.map(Authority::ca).as_deref()).expect("files")
}

/// A server for 127.0.0.1.
fn lender(authority: &Authority, change: impl FnOnce(&mut Config)) -> Lender {
    let pair = authority.issue("server", &["127.0.0.1"]);
    Lender::start(MEMORY_BYTES, |config| {
        config.tls = Some(tls(&pair, None));
        change(config);
    })
}

/// The URL of servers on these ports.
fn url(ports: &[u16], authority: &Authority) -> String {
    let hosts: Vec<String> = ports.iter().map(|port| format!("127.0.0.1:{port}")).collect();
    format!("tcp://{}?tls=1&tls-ca={}", hosts.join(","), text(&authority.ca()))
}

#[test]
fn contract() {
    let authority = Authority::new();
    let (one, two) = (lender(&authority, |_| {}), lender(&authority, |_| {}));
    let mut client = client(&url(&[one.port, two.port], &authority));
    let mut contract = Contract::new(client.store(), 0x1234_5678_9abc);
    contract.run(20_000);
    assert!(contract.got > 2000, "{} pages were read", contract.got);
    // A window of less than two pages.
    let narrow = lender(&authority, |config| config.limits.window_bytes = 5000);
    let mut client = crate::common::client(&url(&[narrow.port], &authority));
    Contract::new(client.store(), 77).run(5000);
}

#[test]
fn many_pages_at_once_come_back_right() {
    let authority = Authority::new();
    let lender = lender(&authority, |_| {});
    let mut client = client(&url(&[lender.port], &authority));
    let pages = put_all(&mut client, 0..4000);
    let mut unused = page(0);
    for batch in pages.chunks(200) {
        for (_, handle) in batch {
            assert_eq!(client.store().get(*handle, Urgency::Prefetch, &mut unused), Ok(Got::Pending));
        }
        for (number, handle) in batch {
            assert!(*client.finish_get(*handle).unwrap() == page(*number));
        }
    }
}

#[test]
fn connections_that_break_are_made_again_and_nothing_is_lost() {
    let authority = Authority::new();
    let lender = lender(&authority, |_| {});
    let proxy = Proxy::to(lender.port);
    let mut client = client(&url(&[proxy.port], &authority));
    // Some of these within the handshake.
    put_while_cut(&mut client, &proxy, 100, 777);
}

#[test]
fn damaged_records_are_never_taken() {
    let authority = Authority::new();
    let lender = lender(&authority, |_| {});
    let proxy = Proxy::to(lender.port);
    let mut client = client(&(url(&[proxy.port], &authority) + "&deadline=2s"));
    let pages = put_all(&mut client, 0..300);
    proxy.damage_every(50_021);
    let mut unused = page(0);
    for (_, handle) in &pages {
        let _ = client.store().get(*handle, Urgency::Demand, &mut unused);
    }
    client.steps(Duration::from_millis(500));
    proxy.damage_every(0);
    // TLS sees the damage, ends the connection, and pages are asked for again: what comes is right.
    let gone = lost(&mut client, &pages);
    assert_eq!(gone, 0);
}

#[test]
fn certificates_that_do_not_verify_are_refused_in_a_line() {
    let (authority, stranger) = (Authority::new(), Authority::new());
    let refused = |pair: &Pair, parameters: &str| {
        let lender = Lender::start(MEMORY_BYTES, |config| config.tls = Some(tls(pair, None)));
        refusal(&(url(&[lender.port], &authority) + parameters))
    };
    let says = |line: String, what: &str| assert!(line.contains(what), "{line}");
    says(refused(&stranger.issue("server", &["127.0.0.1"]), ""), "no authority in `tls-ca`");
    let other = authority.issue("other", &["pool.example"]);
    says(refused(&other, ""), "for another name (`pool.example`): correct the host, or give `tls-name=NAME`");
    says(refused(&other, "&tls-name=pool.exampl"), "for another name");
    let time = |from: i32, to: i32| {
        authority.issue_with("time", &["127.0.0.1"], |params| {
            (params.not_before, params.not_after) = (date_time_ymd(from, 1, 1), date_time_ymd(to, 1, 1));
        })
    };
    says(refused(&time(2001, 2002), ""), "has expired");
    says(refused(&time(2900, 2901), ""), "not valid yet");
    let own = authority.issue_with("own", &["127.0.0.1"], |params| {
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    });
    says(refused(&own, ""), "docs/NETWORK.md");
    // And the name that it is for helps.
    let lender = Lender::start(MEMORY_BYTES, |config| config.tls = Some(tls(&other, None)));
    let mut client = client(&(url(&[lender.port], &authority) + "&tls-name=pool.example"));
    let pages = put_all(&mut client, 0..10);
    assert_all(&mut client, &pages);
}

#[test]
fn clients_without_the_right_certificate_are_refused_in_a_line() {
    let (authority, clients, strangers) = (Authority::new(), Authority::new(), Authority::new());
    let pair = authority.issue("server", &["127.0.0.1"]);
    let lender = Lender::start(MEMORY_BYTES, |config| config.tls = Some(tls(&pair, Some(&clients))));
    let url = url(&[lender.port], &authority);
    let shown = |pair: &Pair| format!("{url}&tls-cert={}&tls-key={}", text(&pair.certificate), text(&pair.key));
    assert!(refusal(&url).contains("give `tls-cert` and `tls-key`"), "{}", refusal(&url));
    let line = refusal(&shown(&strangers.issue("client", &["one"])));
    assert!(line.contains("it refuses the certificate in `tls-cert`"), "{line}");
    let old = clients.issue_with("old", &["one"], |params| params.not_after = date_time_ymd(2002, 1, 1));
    let line = refusal(&shown(&old));
    assert!(line.contains("its time is over"), "{line}");
    let right = shown(&clients.issue("client", &["one"]));
    let mut client = client(&right);
    let pages = put_all(&mut client, 0..10);
    assert_all(&mut client, &pages);
    let [asked] = &pool::status(&right).unwrap()[..] else { panic!("one server") };
    assert_eq!((asked.error.as_deref(), asked.pages), (None, Some(10)));
    let [refused] = &pool::status(&url).unwrap()[..] else { panic!("one server") };
    assert!(refused.error.as_deref().is_some_and(|error| error.contains("give `tls-cert`")), "{refused:?}");
}

#[test]
fn with_and_without_tls_do_not_understand_each_other_and_say_so() {
    let authority = Authority::new();
    let (plain, secure) = (Lender::start(MEMORY_BYTES, |_| {}), lender(&authority, |_| {}));
    let line = refusal(&format!("tcp://127.0.0.1:{}", secure.port));
    assert!(line.contains("it speaks TLS only: add `tls=1&tls-ca=FILE`"), "{line}");
    let line = refusal(&url(&[plain.port], &authority));
    assert!(line.contains("it speaks no TLS: start it with --tls-cert and --tls-key, or leave out `tls=1`"), "{line}");
    let [asked] = &pool::status(&format!("tcp://127.0.0.1:{}", secure.port)).unwrap()[..] else { panic!("one server") };
    assert!(asked.error.as_deref().is_some_and(|error| error.contains("it speaks TLS only")), "{asked:?}");
    let [asked] = &pool::status(&url(&[plain.port], &authority)).unwrap()[..] else { panic!("one server") };
    assert!(asked.error.as_deref().is_some_and(|error| error.contains("it speaks no TLS")), "{asked:?}");
}

#[test]
fn a_handshake_that_stalls_is_given_up() {
    let authority = Authority::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let mute = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        // The beginning of a record, and no more.
        stream.write_all(&[22, 3, 3, 1]).unwrap();
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let line = refusal(&(url(&[port], &authority) + "&deadline=600ms"));
    assert!(line.contains("it does not answer"), "{line}");
    mute.join().unwrap();
}

#[test]
fn files_that_will_not_do_are_refused_in_a_line() {
    let authority = Authority::new();
    let (one, two) = (authority.issue("one", &["one"]), authority.issue("two", &["two"]));
    let refused = |ca: &str, cert: &str, key: &str| {
        let url = format!("tcp://127.0.0.1:1?tls=1&tls-ca={ca}&tls-cert={cert}&tls-key={key}");
        assert!(pool::status(&url).is_err());
        refusal(&url)
    };
    let ca = authority.ca();
    let (ca, cert, key) = (text(&ca), text(&one.certificate), text(&one.key));
    let says = |line: String, what: &[&str]| assert!(what.iter().all(|what| line.contains(what)), "{line}");
    says(refused("/nonexistent", cert, key), &["authority's certificate in `/nonexistent`", "cannot be read"]);
    says(refused(ca, "/nonexistent", key), &["the certificate in `/nonexistent`", "cannot be read"]);
    says(refused(ca, cert, "/nonexistent"), &["private key in `/nonexistent`", "cannot be read"]);
    says(refused(ca, cert, text(&two.key)), &["is not that of the certificate in", cert]);
    let pem = std::fs::read_to_string(&one.certificate).unwrap();
    let garbled = [
        String::new(),
        "words".into(),
        pem[..pem.len() / 2].into(),
        pem.replace("M", "?"),
        pem.replacen("MII", "AAA", 1),
        pem.lines().take(3).chain(["-----END CERTIFICATE-----"]).collect::<Vec<_>>().join("\n"),
        "x".repeat(2 << 20),
    ];
    for content in garbled {
        let bad = authority.file("bad", &content, 0o600);
        says(refused(text(&bad), cert, key), &["holds no authority's certificate: give a PEM file"]);
        says(refused(ca, text(&bad), key), &["holds no certificate: give a PEM file"]);
        says(refused(ca, cert, text(&bad)), &["holds no private key: give a PEM file"]);
    }
    let exposed = authority.file("exposed", &std::fs::read_to_string(&one.key).unwrap(), 0o640);
    says(refused(ca, cert, text(&exposed)), &["others can read the private key", "chmod 600"]);
    says(refused("/dev/zero", cert, key), &["holds no authority's certificate"]);
    assert!(refusal("tcp://no_such_host..?tls=1&tls-ca=/dev/null").contains("holds no"));
}

#[test]
fn a_server_that_comes_back_without_its_certificate_gets_nothing() {
    let authority = Authority::new();
    let lender = lender(&authority, |_| {});
    let mut client = client(&(url(&[lender.port], &authority) + "&deadline=600ms"));
    let pages = put_all(&mut client, 0..10);
    let port = lender.port;
    drop(lender);
    // Whoever takes its place without the certificate is not spoken to.
    let stranger = Authority::new();
    let pair = stranger.issue("server", &["127.0.0.1"]);
    let _impostor = Lender::start_on(port, MEMORY_BYTES, |config| config.tls = Some(tls(&pair, None)));
    client.steps(Duration::from_millis(300));
    assert_eq!(client.put(&page(1), None, Duration::from_millis(100)), Err(StoreError::Unavailable));
    assert_eq!(lost(&mut client, &pages), pages.len());
}

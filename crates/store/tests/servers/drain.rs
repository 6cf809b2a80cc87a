//! Servers that are asked to leave, in this process, while pages are put, got and freed.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::common::client;
use crate::common::contract::Contract;
use crate::common::lender::{Lender, assert_all, put_all};
use crate::common::proxy::Proxy;
use spillway_store::Handle;
use spillway_store::blocking::Client;
use spillway_store::pool::Drain;

const LONG: Duration = Duration::from_secs(20);

fn url(ports: &[u16], parameters: &str) -> String {
    let hosts: Vec<String> = ports.iter().map(|port| format!("127.0.0.1:{port}")).collect();
    format!("tcp://{}{parameters}", hosts.join(","))
}

fn ask(url: &str, port: u16, leaves: bool) -> Drain {
    Drain::ask(url, &format!("127.0.0.1:{port}"), leaves).unwrap()
}

/// Lets the client work until the server is empty.
fn empties(client: &mut Client, drain: &mut Drain) {
    let began = Instant::now();
    while drain.left().unwrap().0 > 0 {
        assert!(began.elapsed() < LONG, "{:?} are left", drain.left());
        client.steps(Duration::from_millis(20));
    }
}

/// Puts so many pages, and asks the server to leave if it has more than `least`; again if not: one that answers late, for want of a CPU, gets
/// none for a while.
fn put_and_leave(
    client: &mut Client,
    url: &str,
    port: u16,
    pages: &mut Vec<(u64, Handle)>,
    count: u64,
    least: u64,
) -> Drain {
    let began = Instant::now();
    loop {
        let next = pages.len() as u64;
        pages.extend(put_all(client, next..next + count));
        let mut drain = ask(url, port, true);
        let has = drain.left().unwrap().0;
        if has > least {
            return drain;
        }
        assert!(began.elapsed() < LONG, "{url}: {has} pages are there");
        stay(client, url, port);
    }
}

/// Tells the server to stay, and waits until the client has heard it.
fn stay(client: &mut Client, url: &str, port: u16) {
    // One who asks must not be silent for long.
    ask(url, port, false);
    // As long as a client may be silent.
    client.steps(Duration::from_secs(3));
}

fn leaves_and_comes_back(servers: usize, parameters: &str) {
    let mut lenders: Vec<Lender> = (0..servers).map(|_| Lender::start(64 << 20, |_| {})).collect();
    let ports: Vec<u16> = lenders.iter().map(|lender| lender.port).collect();
    let url = url(&ports, parameters);
    let mut client = client(&url);
    let mut pages = Vec::new();
    let mut drain = put_and_leave(&mut client, &url, ports[0], &mut pages, 1500, 200);
    empties(&mut client, &mut drain);
    assert_all(&mut client, &pages);
    let next = pages.len() as u64;
    pages.extend(put_all(&mut client, next..next + 500));
    assert_eq!(ask(&url, ports[0], true).left().unwrap().0, 0, "{url}: nothing is put there");
    stay(&mut client, &url, ports[0]);
    // It is used again.
    let mut drain = put_and_leave(&mut client, &url, ports[0], &mut pages, 1000, 50);
    empties(&mut client, &mut drain);
    lenders[0].end();
    assert_all(&mut client, &pages);
}

/// Mostly waiting, hence all at the same time.
#[test]
fn a_server_that_leaves_is_emptied_and_not_used_until_it_stays() {
    std::thread::scope(|scope| {
        for (servers, parameters) in [(2, ""), (3, "?data=2&parity=1"), (3, "?replicas=2")] {
            scope.spawn(move || leaves_and_comes_back(servers, parameters));
        }
    });
}

#[test]
fn servers_leave_and_stay_while_pages_come_and_go() {
    // Whoever asks is a tenant for a while.
    let start = |_| Lender::start(64 << 20, |config| config.limits.tenants_max = 1 << 16);
    let lenders: Vec<Lender> = (0..3).map(start).collect();
    let ports = [0, 1, 2].map(|at: usize| lenders[at].port);
    // One is reached by a connection that breaks again and again.
    let proxy = Proxy::to(ports[2]);
    let direct = url(&ports, "");
    for (seed, parameters) in [(1, ""), (2, ""), (3, "?data=2&parity=1")] {
        let over = AtomicBool::new(false);
        let mut client = client(&url(&[ports[0], ports[1], proxy.port], parameters));
        let drained = std::thread::scope(|scope| {
            let operator = scope.spawn(|| {
                let mut drained = 0;
                for turn in 0_usize.. {
                    let mut drain = ask(&direct, ports[turn % 3], true);
                    let began = Instant::now();
                    while !over.load(Relaxed) && began.elapsed() < Duration::from_millis(400) {
                        if drain.left().unwrap().0 == 0 {
                            drained += 1;
                            break;
                        }
                        std::thread::sleep(Duration::from_millis(5));
                    }
                    if turn % 2 == 0 {
                        proxy.cut();
                    }
                    drain.tell(false).unwrap();
                    if over.load(Relaxed) {
                        return drained;
                    }
                }
                unreachable!("it ends when it is over")
            });
            let mut contract = Contract::new(client.store(), seed * 0x9abc_def1_2345);
            contract.run(15_000);
            assert!(contract.got > 150, "{} pages were read", contract.got);
            over.store(true, Relaxed);
            operator.join().unwrap()
        });
        println!("{parameters}: {drained} times empty");
    }
}

#[test]
fn what_cannot_leave_is_refused() {
    let lender = Lender::start(16 << 20, |_| {});
    let url = url(&[lender.port], "");
    let refusal = |url: &str, server: &str| Drain::ask(url, server, true).err().unwrap().to_string();
    assert!(refusal(&url, "127.0.0.1:1").contains("is not a server of this pool"), "{}", refusal(&url, "127.0.0.1:1"));
    assert!(refusal("memcached://a", "a").contains("only servers of spillway can leave"));
    assert!(refusal("local:", "a").contains("only servers of spillway can leave"));
}

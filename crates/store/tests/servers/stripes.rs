//! Pools that survive the loss of servers, with real ones.

use std::time::{Duration, Instant};

use crate::common::contract::Contract;
use crate::common::lender::{Lender, assert_all, lost, put_all};
use crate::common::proxy::Proxy;
use crate::common::{PATIENCE, Server, client, memcached_arguments, page};
use spillway_store::blocking::Client;
use spillway_store::{Handle, StoreError};

fn lenders(count: usize) -> Vec<Lender> {
    (0..count).map(|_| Lender::start(64 << 20, |_| {})).collect()
}

fn url(ports: impl IntoIterator<Item = u16>, scheme: &str, parameters: &str) -> String {
    let hosts: Vec<String> = ports.into_iter().map(|port| format!("127.0.0.1:{port}")).collect();
    format!("{scheme}://{}?{parameters}", hosts.join(","))
}

fn wait(client: &mut Client, what: &str, mut holds: impl FnMut(spillway_store::Protection) -> bool) {
    let started = Instant::now();
    while !holds(client.store().protection().expect("the pool is protected")) {
        let protection = client.store().protection();
        assert!(started.elapsed() < Duration::from_secs(20), "{what}: {protection:?}");
        while client.store().tidy() {}
        client.steps(Duration::from_millis(5));
    }
}

#[test]
fn what_every_store_owes_its_pager() {
    for (count, parameters) in [(5, "data=4&parity=1"), (4, "data=2&parity=2"), (2, "replicas=2")] {
        let lenders = lenders(count);
        let mut client = client(&url(lenders.iter().map(|lender| lender.port), "tcp", parameters));
        let mut contract = Contract::new(client.store(), 7);
        contract.run(4000);
        assert!(contract.got > 500, "{parameters}: {}", contract.got);
    }
}

/// One server after the other is lost, and comes back empty.
fn lose_each(
    client: &mut Client,
    pages: &mut Vec<(u64, Handle)>,
    mut lose: impl FnMut(usize, &mut Client),
    count: usize,
) {
    for at in 0..count {
        lose(at, client);
        assert_all(client, pages);
        let first = 10_000 * (at as u64 + 1);
        pages.extend(put_all(client, first..first + 200));
        assert_all(client, pages);
    }
}

#[test]
fn any_server_may_be_killed_and_come_back_empty() {
    let mut lenders = lenders(3);
    let ports: Vec<u16> = lenders.iter().map(|lender| lender.port).collect();
    let mut client = client(&url(ports.iter().copied(), "tcp", "data=2&parity=1&deadline=1s"));
    let mut pages = put_all(&mut client, 0..1000);
    let lose = |at: usize, client: &mut Client| {
        let rebuilt = client.store().protection().unwrap().rebuilt_chunks;
        lenders[at].end();
        lenders[at] = Lender::start_on(ports[at], 64 << 20, |_| {});
        wait(client, "what it had is rebuilt", |now| now.rebuilt_chunks > rebuilt && now.degraded == 0);
    };
    lose_each(&mut client, &mut pages, lose, 3);
    let protection = client.store().protection().unwrap();
    assert_eq!(protection.lost_pages, 0);
    assert!(protection.rebuilt_chunks > 1000, "{protection:?}");
}

#[test]
fn reads_and_writes_go_on_while_servers_are_gone() {
    let mut lenders = lenders(5);
    let ports: Vec<u16> = lenders.iter().map(|lender| lender.port).collect();
    let mut client = client(&url(ports, "tcp", "data=2&parity=2&deadline=1s"));
    let mut pages = put_all(&mut client, 0..500);
    lenders[1].end();
    lenders[3].end();
    let started = Instant::now();
    assert_all(&mut client, &pages);
    assert!(
        started.elapsed() < Duration::from_secs(5),
        "nothing waits for a server that is gone: {:?}",
        started.elapsed()
    );
    pages.extend(put_all(&mut client, 5000..5300));
    assert_all(&mut client, &pages);
    assert_eq!(client.store().protection().unwrap().lost_pages, 0);
}

/// Puts as the pager does: what is refused is put again.
fn insist(client: &mut Client, pages: &mut Vec<(u64, Handle)>, count: u64) {
    for number in pages.len() as u64..pages.len() as u64 + count {
        let until = Instant::now() + PATIENCE;
        let handle = loop {
            match client.put(&page(number), None, PATIENCE) {
                Ok(handle) => break handle,
                Err(error) => assert!(error == StoreError::Unavailable && Instant::now() < until, "{error:?}"),
            }
        };
        pages.push((number, handle));
    }
}

#[test]
fn a_server_that_falls_silent_again_and_again_is_not_waited_for() {
    let lenders = lenders(5);
    let mut ports: Vec<u16> = lenders.iter().map(|lender| lender.port).collect();
    let proxy = Proxy::to(ports[2]);
    ports[2] = proxy.port;
    let mut client = client(&url(ports, "tcp", "data=4&parity=1"));
    let mut pages = Vec::new();
    // Its connection is given up after twice the time each time, the next time after 3.2 s.
    for given_up_after in [800, 1600].map(Duration::from_millis) {
        proxy.hold(true);
        insist(&mut client, &mut pages, 50);
        client.steps(given_up_after + Duration::from_millis(500));
        proxy.hold(false);
        client.steps(Duration::from_millis(500));
    }
    proxy.hold(true);
    let started = Instant::now();
    insist(&mut client, &mut pages, 50);
    let took = started.elapsed();
    proxy.hold(false);
    assert!(took < Duration::from_secs(2), "{took:?}");
    assert_all(&mut client, &pages);
    assert_eq!(client.store().protection().unwrap().lost_pages, 0);
}

/// What is asked for to make a page out of is asked for by nobody who needs it: it was lost with that page, though its server had it still.
#[test]
fn an_outage_longer_than_the_deadline_loses_no_page_that_nobody_asked_for() {
    let lenders = lenders(5);
    let proxies: Vec<Proxy> = lenders.iter().map(|lender| Proxy::to(lender.port)).collect();
    let mut client = client(&url(proxies.iter().map(|proxy| proxy.port), "tcp", "data=4&parity=1&deadline=500ms"));
    let pages = put_all(&mut client, 0..400);
    proxies.iter().for_each(|proxy| proxy.hold(true));
    assert_eq!(lost(&mut client, &pages[..1]), 1);
    proxies.iter().for_each(|proxy| proxy.hold(false));
    client.steps(Duration::from_secs(1));
    wait(&mut client, "all servers are back", |now| now.degraded == 0);
    assert_eq!(lost(&mut client, &pages[1..]), 0);
    assert_eq!(client.store().protection().unwrap().lost_pages, 1);
}

#[test]
fn a_spare_takes_what_a_lost_server_had() {
    let mut lenders = lenders(4);
    let ports: Vec<u16> = lenders.iter().map(|lender| lender.port).collect();
    let mut client = client(&url(ports, "tcp", "data=2&parity=1&deadline=500ms"));
    let pages = put_all(&mut client, 0..600);
    lenders[0].end();
    client.steps(Duration::from_millis(600));
    wait(&mut client, "all is rebuilt elsewhere", |now| now.rebuilt_chunks > 100 && now.degraded == 0);
    // So another may be lost.
    lenders[2].end();
    assert_all(&mut client, &pages);
}

#[test]
fn caches_may_be_members() {
    let caches: Vec<Server> = (0..3).map_while(|_| Server::memcached(&["-M"])).collect();
    if caches.len() == 3 {
        let ports: Vec<u16> = caches.iter().map(|cache| cache.port).collect();
        let mut caches = caches;
        let mut client = client(&url(ports.iter().copied(), "memcached", "data=2&parity=1&deadline=1s"));
        let pages = put_all(&mut client, 0..500);
        caches[1].kill();
        assert_all(&mut client, &pages);
        let again = Server::start_on("memcached", ports[1], |port| memcached_arguments(port, &["-M"]));
        caches[1] = again.expect("it was there before");
        wait(&mut client, "what it had is rebuilt", |now| now.rebuilt_chunks > 100 && now.degraded == 0);
        caches[2].kill();
        assert_all(&mut client, &pages);
    }
    let mut redis: Vec<Server> = (0..2).map_while(|_| Server::redis(&[])).collect();
    if redis.len() == 2 {
        let mut client = client(&url(redis.iter().map(|redis| redis.port), "redis", "replicas=2&deadline=1s"));
        let pages = put_all(&mut client, 0..300);
        redis[0].kill();
        assert_all(&mut client, &pages);
    }
}

#[test]
fn a_pool_without_losses_has_no_group_that_misses_anything() {
    let lenders = lenders(5);
    let mut client = client(&url(lenders.iter().map(|lender| lender.port), "tcp", "data=4&parity=1"));
    let pages = put_all(&mut client, 0..400);
    assert_all(&mut client, &pages);
    let protection = client.store().protection().unwrap();
    assert_eq!((protection.degraded, protection.rebuilding, protection.lost_pages), (0, 0, 0));
    assert!(protection.groups >= 100, "{protection:?}");
}

//! Our own memory servers, in this process, behind the pager's side of the network.

use std::time::{Duration, Instant};

use crate::common::contract::Contract;
use crate::common::lender::{Lender, assert_all, lost, put_all, put_while_cut};
use crate::common::proxy::Proxy;
use crate::common::{PATIENCE, client, page, refusal};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use spillway_server::Limits;
use spillway_store::blocking::Client;
use spillway_store::{Got, Handle, Put, StoreError, Urgency};

#[test]
fn contract() {
    let (one, two) = (Lender::start(64 << 20, |_| {}), Lender::start(64 << 20, |_| {}));
    for seed in 1..4 {
        let mut client = client(&format!("tcp://127.0.0.1:{},127.0.0.1:{}", one.port, two.port));
        let mut contract = Contract::new(client.store(), seed * 0x1234_5678_9abc);
        contract.run(20_000);
        assert!(contract.got > 2000, "{} pages were read", contract.got);
    }
    // A window of less than two pages.
    let narrow = Lender::start(64 << 20, |config| config.limits.window_bytes = 5000);
    let mut client = client(&format!("tcp://127.0.0.1:{}", narrow.port));
    Contract::new(client.store(), 77).run(5000);
}

#[test]
fn servers_that_refuse_are_named_in_a_line() {
    let lender = Lender::start(16 << 20, |config| config.token = b"a token of sixteen or more".to_vec());
    let url = format!("tcp://127.0.0.1:{}", lender.port);
    assert!(refusal(&url).contains("it wants a token: name a file that has it with token-file="));
    let file = std::env::temp_dir().join(format!("spillway-token-{}", std::process::id()));
    std::fs::write(&file, "another token of sixteen or more\n").unwrap();
    assert!(refusal(&format!("{url}?token-file={}", file.display())).contains("the token is not the server's"));
    std::fs::write(&file, "a token of sixteen or more\n").unwrap();
    let mut client = client(&format!("{url}?token-file={}", file.display()));
    let pages = put_all(&mut client, 0..10);
    assert_all(&mut client, &pages);
    let open = Lender::start(16 << 20, |_| {});
    let line = refusal(&format!("tcp://127.0.0.1:{}?token-file={}", open.port, file.display()));
    assert!(
        line.contains("the server has no token, and the client gave one") && line.contains("leave token-file= out")
    );
    std::fs::remove_file(file).unwrap();
    assert!(refusal(&format!("redis://127.0.0.1:{}", lender.port)).contains("neither Redis nor Valkey"));
    assert!(refusal(&format!("memcached://127.0.0.1:{}", lender.port)).contains("it is no memcached"));
    let Some(cache) = crate::common::Server::redis(&[]) else { return };
    assert!(refusal(&format!("tcp://127.0.0.1:{}", cache.port)).contains("it does not answer"));
}

#[test]
fn a_pool_with_nothing_to_say_is_not_readable_for_long() {
    let lenders: Vec<Lender> = (0..3).map(|_| Lender::start(16 << 20, |_| {})).collect();
    let hosts: Vec<String> = lenders.iter().map(|lender| format!("127.0.0.1:{}", lender.port)).collect();
    for url in [format!("tcp://{}", hosts[0]), format!("tcp://{}?data=2&parity=1", hosts.join(","))] {
        let mut client = client(&url);
        let (store, began, mut in_a_row) = (client.store(), Instant::now(), 0);
        while began.elapsed() < Duration::from_secs(1) {
            store.progress(&mut |_| {});
            let descriptor = store.descriptor().expect("a pool of servers has one");
            let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
            let is_readable = poll(&mut [PollFd::new(&descriptor, PollFlags::IN)], Some(&at_once)) == Ok(1);
            in_a_row = if is_readable { in_a_row + 1 } else { 0 };
            // Who waits for it would run in circles, and take the CPU from the server.
            assert!(in_a_row < 1000, "{url}: readable each time that it was listened to");
        }
    }
}

#[test]
fn a_full_server_declines_and_another_takes() {
    let (small, large) = (Lender::start(4 << 20, |_| {}), Lender::start(64 << 20, |_| {}));
    let mut client = client(&format!("tcp://127.0.0.1:{},127.0.0.1:{}", small.port, large.port));
    let pages = put_all(&mut client, 0..6000);
    assert_all(&mut client, &pages);
    let lonely = Lender::start(4 << 20, |_| {});
    let mut alone = crate::common::client(&format!("tcp://127.0.0.1:{}", lonely.port));
    let mut kept = Vec::new();
    let full = loop {
        match alone.put(&page(kept.len() as u64), None, PATIENCE) {
            Ok(handle) => kept.push((kept.len() as u64, handle)),
            Err(error) => break error,
        }
        assert!(kept.len() < 2000, "4 MiB hold no more");
    };
    assert_eq!(full, StoreError::Full);
    assert_all(&mut alone, &kept);
    kept.drain(..100).for_each(|(_, handle)| alone.store().free(handle));
    alone.steps(Duration::from_millis(1100));
    let more = put_all(&mut alone, 10_000..10_050);
    assert_all(&mut alone, &more);
}

#[test]
fn connections_that_break_are_made_again_and_nothing_is_lost() {
    let lender = Lender::start(64 << 20, |_| {});
    let proxy = Proxy::to(lender.port);
    let mut client = client(&format!("tcp://127.0.0.1:{}", proxy.port));
    let pages = put_while_cut(&mut client, &proxy, 1000, 7777);
    proxy.refuse(true);
    proxy.cut();
    client.steps(Duration::from_millis(100));
    let mut got = page(0);
    assert_eq!(client.store().get(pages[0].1, Urgency::Demand, &mut got), Ok(Got::Pending));
    assert_eq!(client.put(&page(1), None, Duration::from_millis(100)), Err(StoreError::Unavailable));
    proxy.refuse(false);
    assert!(*client.finish_get(pages[0].1).unwrap() == page(pages[0].0));
    assert_all(&mut client, &pages);
}

#[test]
fn pages_are_lost_with_their_server_and_no_others() {
    let (mut one, two) = (Lender::start(64 << 20, |_| {}), Lender::start(64 << 20, |_| {}));
    let port = one.port;
    let mut client = client(&format!("tcp://127.0.0.1:{port},127.0.0.1:{}?deadline=600ms", two.port));
    let pages = put_all(&mut client, 0..400);
    one.end();
    let mut unused = page(0);
    for (_, handle) in &pages {
        let _ = client.store().get(*handle, Urgency::Demand, &mut unused);
    }
    let started = Instant::now();
    let gone = lost(&mut client, &pages);
    assert!(gone > 100 && gone < 300, "{gone} of 400");
    assert!(started.elapsed() < Duration::from_secs(2));
    let more = put_all(&mut client, 1000..1100);
    assert_all(&mut client, &more);
    // One that was started again makes a new tenant, and is used again.
    let _again = Lender::start_on(port, 64 << 20, |_| {});
    client.steps(Duration::from_millis(1500));
    pages.iter().for_each(|(_, handle)| client.store().free(*handle));
    let more = put_all(&mut client, 2000..2400);
    assert_eq!(lost(&mut client, &more), 0);
}

/// A server that is gone for good costs one deadline, not one a page; one that comes back in time costs nothing.
#[test]
fn a_server_that_is_gone_is_waited_for_once() {
    let lender = Lender::start(64 << 20, |_| {});
    let proxy = Proxy::to(lender.port);
    let mut client = client(&format!("tcp://127.0.0.1:{}?deadline=600ms", proxy.port));
    let pages = put_all(&mut client, 0..200);
    proxy.refuse(true);
    proxy.cut();
    // One after the other, as a program's thread does.
    let started = Instant::now();
    assert_eq!(lost(&mut client, &pages[..100]), 100);
    let took = started.elapsed();
    assert!((Duration::from_millis(500)..Duration::from_secs(2)).contains(&took), "{took:?}");
    // Nobody waits for what is fetched ahead, or to be brought home; and a copy there is not relied on.
    let mut unused = page(0);
    assert_eq!(client.store().get(pages[100].1, Urgency::Prefetch, &mut unused), Err(StoreError::Lost));
    assert_eq!(client.store().put(&page(101), Some(pages[101].1)), Err(StoreError::Unavailable));
    // It has the others still, when it is back within its lease.
    proxy.refuse(false);
    client.steps(Duration::from_millis(1500));
    assert_all(&mut client, &pages[100..]);
}

/// The page is in hand, and whoever comes back may have forgotten its copy.
#[test]
fn a_copy_at_a_server_that_is_away_is_not_relied_on() {
    let (one, two) = (Lender::start(64 << 20, |_| {}), Lender::start(64 << 20, |_| {}));
    let proxy = Proxy::to(one.port);
    let mut client = client(&format!("tcp://127.0.0.1:{},127.0.0.1:{}", proxy.port, two.port));
    let pages = put_all(&mut client, 0..100);
    let unchanged =
        |client: &mut Client, (number, handle): (u64, Handle)| match client.store().put(&page(number), Some(handle)) {
            Ok(Put::Unchanged(same)) => {
                assert_eq!(same, handle);
                Ok(())
            }
            Ok(Put::Pending(handle)) => Err((number, handle)),
            other => panic!("{other:?}"),
        };
    assert!(pages.iter().all(|page| unchanged(&mut client, *page).is_ok()));
    proxy.refuse(true);
    proxy.cut();
    client.steps(Duration::from_millis(100));
    let (mut kept, mut elsewhere) = (0, Vec::new());
    for page in &pages {
        match unchanged(&mut client, *page) {
            Ok(()) => kept += 1,
            Err((number, handle)) => elsewhere.push((number, client.finish_put(handle).unwrap())),
        }
    }
    assert!(kept > 20 && elsewhere.len() > 20, "{kept} of 100 are at the other");
    // They do not need the one that is away.
    assert_all(&mut client, &elsewhere);
    proxy.refuse(false);
    client.steps(Duration::from_millis(1500));
    assert_all(&mut client, &elsewhere);
}

/// As a server has it whose disk hangs, which it spills to.
#[test]
fn a_server_that_leaves_gets_unanswered_is_connected_to_anew() {
    let lender = Lender::start(64 << 20, |_| {});
    let proxy = Proxy::to(lender.port);
    let mut client = client(&format!("tcp://127.0.0.1:{}?deadline=1s", proxy.port));
    let pages = put_all(&mut client, 0..100);
    client.steps(Duration::from_millis(300));
    proxy.swallow_gets();
    assert_eq!(client.get(pages[0].1).map(drop), Err(StoreError::Lost));
    let started = Instant::now();
    while proxy.connections() == 1 {
        // Everything else is answered all the while.
        client.put(&page(1000), None, PATIENCE).unwrap();
        client.steps(Duration::from_millis(20));
        assert!(started.elapsed() < Duration::from_secs(4), "nothing is done about it");
    }
    assert_all(&mut client, &pages[1..]);
    assert_eq!(proxy.connections(), 2);
}

/// As a frozen control group has it, or a virtual machine that is paused.
#[test]
fn a_pager_that_did_not_run_loses_nothing() {
    let lender = Lender::start(64 << 20, |_| {});
    let proxy = Proxy::to(lender.port);
    let mut client = client(&format!("tcp://127.0.0.1:{}?deadline=600ms", proxy.port));
    let pages = put_all(&mut client, 0..1000);
    let mut unused = page(0);
    let mut ask = |client: &mut Client, handle| client.store().get(handle, Urgency::Demand, &mut unused);
    for (_, handle) in &pages {
        assert_eq!(ask(&mut client, *handle), Ok(Got::Pending));
    }
    client.store().flush();
    std::thread::sleep(Duration::from_millis(900));
    for (number, handle) in &pages {
        assert!(client.finish_get(*handle).is_ok_and(|got| *got == page(*number)), "page {number}");
    }
    assert_eq!(proxy.connections(), 1, "what was asked before is not unanswered for so long");
    // A server has not been away for longer than we looked.
    proxy.refuse(true);
    proxy.cut();
    client.steps(Duration::from_millis(50));
    assert_eq!(ask(&mut client, pages[0].1), Ok(Got::Pending));
    std::thread::sleep(Duration::from_millis(900));
    proxy.refuse(false);
    assert_eq!(ask(&mut client, pages[1].1), Ok(Got::Pending));
    for (number, handle) in &pages[..2] {
        assert!(client.finish_get(*handle).is_ok_and(|got| *got == page(*number)), "page {number}");
    }
}

/// What it hears first is that it is disconnected; only then that it did not run.
#[test]
fn a_pager_that_did_not_run_while_its_connection_broke_loses_nothing() {
    let lender = Lender::start(64 << 20, |_| {});
    let proxy = Proxy::to(lender.port);
    let mut client = client(&format!("tcp://127.0.0.1:{}?deadline=600ms", proxy.port));
    let pages = put_all(&mut client, 0..100);
    // All is calm, and looked at less often.
    client.steps(Duration::from_millis(500));
    let mut unused = page(0);
    proxy.hold(true);
    for (_, handle) in &pages {
        assert_eq!(client.store().get(*handle, Urgency::Demand, &mut unused), Ok(Got::Pending));
    }
    client.store().flush();
    proxy.cut();
    proxy.hold(false);
    std::thread::sleep(Duration::from_millis(1200));
    for (number, handle) in &pages {
        assert!(client.finish_get(*handle).is_ok_and(|got| *got == page(*number)), "page {number}");
    }
    assert_eq!(proxy.connections(), 2);
}

/// Connections stay, and nothing is said on them any more.
#[test]
fn a_silent_server_is_noticed_within_a_second() {
    silent_for_at_least("", Duration::from_millis(500));
    silent_for_at_least("?deadline=300ms", Duration::from_millis(100));
}

fn silent_for_at_least(parameters: &str, least: Duration) {
    let (one, two) = (Lender::start(64 << 20, |_| {}), Lender::start(64 << 20, |_| {}));
    let proxy = Proxy::to(one.port);
    let mut client = client(&format!("tcp://127.0.0.1:{},127.0.0.1:{}{parameters}", proxy.port, two.port));
    let pages = put_all(&mut client, 0..100);
    // All is calm, and looked at less often.
    client.steps(Duration::from_millis(500));
    proxy.hold(true);
    let mut pending = Vec::new();
    while pending.len() < 64 {
        match client.store().put(&page(1000 + pending.len() as u64), None) {
            Ok(Put::Pending(handle)) => pending.push(handle),
            other => panic!("{other:?}"),
        }
    }
    let (started, mut failed) = (Instant::now(), 0);
    for handle in pending {
        failed += usize::from(client.finish_put(handle).is_err());
    }
    let took = started.elapsed();
    assert!(failed > 0, "some went to the silent server");
    assert!((least..Duration::from_millis(1400)).contains(&took), "{took:?}");
    proxy.hold(false);
    client.steps(Duration::from_millis(1500));
    assert_all(&mut client, &pages);
}

#[test]
fn a_tenant_that_was_forgotten_is_made_again() {
    let lender = Lender::start(64 << 20, |config| {
        config.limits = Limits { lease: Duration::from_millis(100), ..Limits::default() };
    });
    let proxy = Proxy::to(lender.port);
    let mut client = client(&format!("tcp://127.0.0.1:{}", proxy.port));
    let pages = put_all(&mut client, 0..50);
    proxy.refuse(true);
    proxy.cut();
    client.steps(Duration::from_millis(1500));
    let mut unused = page(0);
    assert_eq!(client.store().get(pages[0].1, Urgency::Demand, &mut unused), Ok(Got::Pending));
    proxy.refuse(false);
    assert_eq!(client.finish_get(pages[0].1).map(drop), Err(StoreError::Lost));
    assert_eq!(lost(&mut client, &pages), pages.len());
    let more = put_all(&mut client, 100..150);
    assert_all(&mut client, &more);
}

#[test]
fn damaged_frames_are_never_taken() {
    let lender = Lender::start(64 << 20, |_| {});
    let proxy = Proxy::to(lender.port);
    let mut client = client(&format!("tcp://127.0.0.1:{}?deadline=2s", proxy.port));
    let pages = put_all(&mut client, 0..300);
    proxy.damage_every(10_007);
    let gone = lost(&mut client, &pages);
    assert!(gone > 0 && gone < 250, "{gone} of 300");
}

#[test]
fn what_is_freed_makes_room_at_the_server() {
    let lender = Lender::start(8 << 20, |_| {});
    let mut client = client(&format!("tcp://127.0.0.1:{}", lender.port));
    for round in 0..20 {
        let pages = put_all(&mut client, round * 1000..round * 1000 + 1000);
        assert_all(&mut client, &pages[..10]);
        pages.iter().for_each(|(_, handle)| client.store().free(*handle));
        client.steps(Duration::from_millis(20));
    }
}

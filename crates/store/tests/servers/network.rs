//! Servers that are not there, refuse, fill up, stop, die, lie or lose the connection.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::common::lender::{assert_all, lost, put_all, put_while_cut};
use crate::common::proxy::Proxy;
use crate::common::{PATIENCE, Server, client, free_port, memcached_arguments, page, redis_arguments, refusal};
use spillway_store::{Handle, Put, StoreError};

#[test]
fn what_cannot_be_a_pool_is_refused_in_a_line() {
    let nobody = free_port();
    let line = refusal(&format!("memcached://127.0.0.1:{nobody}"));
    assert!(line.contains(&format!("pool 127.0.0.1:{nobody}: no one listens there")), "{line}");
    assert!(refusal("redis://no-such-host.invalid").contains("its name is unknown"));
    assert!(refusal("tcp://127.0.0.1:1?token-file=/no/such/file").contains("/no/such/file: the token cannot be read"));
    assert!(refusal("file:///no/such/directory/pool?size=1M").contains("it cannot be opened"));
    assert!(refusal("file:///dev/shm/spillway-too-large?size=1000T").contains("there is no room for"));
    let _ = std::fs::remove_file("/dev/shm/spillway-too-large");
    let (Some(cache), Some(redis)) = (Server::memcached(&["-M"]), Server::redis(&["--requirepass", "x"])) else {
        return;
    };
    assert!(refusal(&format!("redis://127.0.0.1:{}", cache.port)).contains("it is neither Redis nor Valkey"));
    assert!(refusal(&format!("memcached://127.0.0.1:{}", redis.port)).contains("it is no memcached"));
    assert!(refusal(&format!("redis://127.0.0.1:{}", redis.port)).contains("it wants a password"));
    assert!(refusal(&format!("redis://:y@127.0.0.1:{}", redis.port)).contains("it refuses the password"));
}

#[test]
fn caches_that_evict_are_refused_unless_losses_are_accepted() {
    let Some(cache) = Server::memcached(&["-m", "4"]) else { return };
    let url = format!("memcached://127.0.0.1:{}", cache.port);
    assert!(refusal(&url).contains("restart it with `memcached -M`"));
    let mut client = client(&format!("{url}?lossy=1"));
    let pages = put_all(&mut client, 0..20_000);
    let right = pages.len() - lost(&mut client, &pages);
    assert!(right > 0 && right < pages.len(), "{right} pages were kept");
    let Some(redis) = Server::redis(&["--maxmemory", "8mb", "--maxmemory-policy", "allkeys-lru"]) else { return };
    let url = format!("redis://127.0.0.1:{}", redis.port);
    assert!(refusal(&url).contains("maxmemory-policy noeviction"));
    let mut client = crate::common::client(&format!("{url}?lossy=1"));
    let pages = put_all(&mut client, 0..4000);
    let right = pages.len() - lost(&mut client, &pages);
    assert!(right > 0 && right < pages.len(), "{right} pages were kept");
}

#[test]
fn redis_that_take_no_pages_are_refused() {
    let Some(first) = Server::redis(&[]) else { return };
    let followed = first.port.to_string();
    let nodes = format!("spillway-nodes-{}.conf", std::process::id());
    // Else it listens 10,000 ports higher, too, where the kernel may have given the port to a connection: then it ends.
    let bus = free_port().to_string();
    let cluster = ["--cluster-enabled", "yes", "--cluster-port", &bus, "--cluster-config-file", &nodes];
    let (Some(replica), Some(node)) =
        (Server::redis(&["--replicaof", "127.0.0.1", &followed]), Server::redis(&cluster))
    else {
        return;
    };
    for (redis, why) in [(&replica, "it is a replica"), (&node, "it is part of a Redis Cluster")] {
        let line = refusal(&format!("redis://127.0.0.1:{}", redis.port));
        assert!(line.contains(why), "{line}");
    }
    drop(node);
    let _ = std::fs::remove_file(std::path::Path::new("/tmp").join(nodes));
}

/// Has a Redis do something.
fn tell(redis: &Server, command: &str) {
    let mut socket = TcpStream::connect(("127.0.0.1", redis.port)).unwrap();
    socket.write_all(format!("{command}\r\n").as_bytes()).unwrap();
    let mut answer = [0; 5];
    socket.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"+OK\r\n", "{command}");
}

#[test]
fn a_redis_that_refuses_writes_for_a_while_is_read_from_meanwhile() {
    let (Some(one), Some(two)) = (Server::redis(&[]), Server::redis(&[])) else { return };
    let mut client = client(&format!("redis://127.0.0.1:{},127.0.0.1:{}?deadline=2s", one.port, two.port));
    let pages = put_all(&mut client, 0..100);
    let follow = format!("REPLICAOF 127.0.0.1 {}", free_port());
    let ways =
        [(&*follow, "REPLICAOF NO ONE"), ("CONFIG SET min-replicas-to-write 1", "CONFIG SET min-replicas-to-write 0")];
    for (number, (refuse, allow)) in (1..).zip(ways) {
        let freed = put_all(&mut client, number * 10_000..number * 10_000 + 100);
        tell(&one, refuse);
        freed.iter().for_each(|(_, handle)| client.store().free(*handle));
        let more = put_all(&mut client, number * 20_000..number * 20_000 + 100);
        client.steps(Duration::from_millis(100));
        assert_all(&mut client, &pages);
        assert_all(&mut client, &more);
        tell(&one, allow);
        // It is asked again, and has to take what the other does not.
        client.steps(Duration::from_millis(1200));
        tell(&two, refuse);
        let more = put_all(&mut client, number * 30_000..number * 30_000 + 100);
        assert_all(&mut client, &more);
        tell(&two, allow);
        client.steps(Duration::from_millis(1200));
    }
    assert_all(&mut client, &pages);
}

/// Puts until the pool is full, and again after some were freed.
fn fill(url: &str) {
    let mut client = client(url);
    let mut pages = Vec::new();
    let full = loop {
        match client.put(&page(pages.len() as u64), None, PATIENCE) {
            Ok(handle) => pages.push((pages.len() as u64, handle)),
            Err(error) => break error,
        }
    };
    assert_eq!(full, StoreError::Full);
    assert!(pages.len() > 100, "{} pages fit", pages.len());
    assert!(!client.store().accepts());
    assert_all(&mut client, &pages[..100]);
    for (_, handle) in pages.drain(..pages.len() / 2) {
        client.store().free(handle);
    }
    client.steps(Duration::from_millis(1200));
    let more = put_all(&mut client, 1_000_000..1_000_100);
    assert_all(&mut client, &more);
    assert_all(&mut client, &pages);
}

#[test]
fn full_servers_decline_and_take_again() {
    if let Some(cache) = Server::memcached(&["-M", "-m", "8"]) {
        fill(&format!("memcached://127.0.0.1:{}", cache.port));
    }
    if let Some(redis) = Server::redis(&["--maxmemory", "8mb"]) {
        fill(&format!("redis://127.0.0.1:{}", redis.port));
    }
}

#[test]
fn what_one_server_declines_another_takes() {
    let (Some(small), Some(large)) = (Server::memcached(&["-M", "-m", "8"]), Server::memcached(&["-M", "-m", "256"]))
    else {
        return;
    };
    let mut client = client(&format!("memcached://127.0.0.1:{},127.0.0.1:{}", small.port, large.port));
    let pages = put_all(&mut client, 0..12_000);
    assert_all(&mut client, &pages);
}

#[test]
fn a_server_that_dies_loses_its_pages_and_no_others() {
    let (Some(mut one), Some(two)) = (Server::redis(&[]), Server::redis(&[])) else { return };
    let mut client = client(&format!("redis://127.0.0.1:{},127.0.0.1:{}?deadline=600ms", one.port, two.port));
    let pages = put_all(&mut client, 0..200);
    one.kill();
    let started = Instant::now();
    for (_, handle) in &pages {
        let mut unused = page(0);
        let _ = client.store().get(*handle, spillway_store::Urgency::Demand, &mut unused);
    }
    let right = pages.len() - lost(&mut client, &pages);
    assert!(right > 50 && right < 150, "{right} of 200 pages were at the other server");
    assert!(started.elapsed() < Duration::from_secs(3), "pages are given up at the deadline");
    let more = put_all(&mut client, 1000..1100);
    assert_all(&mut client, &more);
    // Another server in its place has none of the pages, and takes new ones.
    let Some(_again) = Server::start_on("redis-server", one.port, |port| redis_arguments(port, &[])) else { return };
    client.steps(Duration::from_secs(1));
    pages.iter().for_each(|(_, handle)| client.store().free(*handle));
    let more = put_all(&mut client, 2000..2100);
    assert_all(&mut client, &more);
}

#[test]
fn a_server_that_was_restarted_has_lost_its_pages() {
    let Some(mut cache) = Server::memcached(&["-M"]) else { return };
    let port = cache.port;
    let mut client = client(&format!("memcached://127.0.0.1:{port}"));
    let pages = put_all(&mut client, 0..50);
    cache.kill();
    let Some(_again) = Server::start_on("memcached", port, |port| memcached_arguments(port, &["-M"])) else { return };
    assert_eq!(lost(&mut client, &pages), pages.len());
    let more = put_all(&mut client, 100..150);
    assert_all(&mut client, &more);
}

/// How many pages a memcached has.
fn items(cache: &Server) -> usize {
    let mut stream = TcpStream::connect(("127.0.0.1", cache.port)).unwrap();
    stream.write_all(b"stats\r\n").unwrap();
    let mut said = String::new();
    while !said.contains("END\r\n") {
        let mut some = [0; 4096];
        let count = stream.read(&mut some).unwrap();
        said += std::str::from_utf8(&some[..count]).unwrap();
    }
    let line = said.lines().find_map(|line| line.strip_prefix("STAT curr_items ")).unwrap();
    line.parse().unwrap()
}

/// It was: whatever a pager sent before its connection ended, or before it was killed, stayed for good where it was carried out
/// after the next connection had freed it.
#[test]
fn what_an_earlier_connection_brings_late_does_not_stay() {
    let Some(cache) = Server::memcached(&["-M"]) else { return };
    let proxy = Proxy::to(cache.port);
    let mut client = client(&format!("memcached://127.0.0.1:{}", proxy.port));
    let pages = put_all(&mut client, 0..100);
    let late = proxy.delay_and_part(|| {
        let put = |number| client.store().put(&page(number), None);
        assert!((100..103).map(put).all(|put| matches!(put, Ok(Put::Pending(_)))));
        client.steps(Duration::from_millis(50));
    });
    client.steps(Duration::from_millis(500));
    assert_all(&mut client, &pages);
    drop(late);
    client.steps(Duration::from_millis(200));
    assert!(items(&cache) > 100, "nothing came late");
    client.steps(Duration::from_secs(1));
    assert_eq!(items(&cache), 100);
    assert_all(&mut client, &pages);
}

#[test]
fn a_server_that_stops_for_a_while_is_waited_for() {
    let Some(redis) = Server::redis(&[]) else { return };
    let mut client = client(&format!("redis://127.0.0.1:{}", redis.port));
    let pages = put_all(&mut client, 0..100);
    redis.signal("-STOP");
    let mut unused = page(0);
    for (_, handle) in &pages {
        let _ = client.store().get(*handle, spillway_store::Urgency::Demand, &mut unused);
    }
    client.steps(Duration::from_millis(4500));
    redis.signal("-CONT");
    assert_all(&mut client, &pages);
    let more = put_all(&mut client, 1000..1100);
    assert_all(&mut client, &more);
}

fn cut_often(url: &str, proxy: &Proxy) {
    let mut client = client(url);
    let pages = put_while_cut(&mut client, proxy, 3000, 7777);
    proxy.refuse(true);
    proxy.cut();
    client.steps(Duration::from_millis(100));
    let refused = client.put(&page(1), None, Duration::from_millis(100));
    assert_eq!(refused, Err(StoreError::Unavailable));
    proxy.refuse(false);
    proxy.cut_after(0);
    assert_all(&mut client, &pages);
}

#[test]
fn connections_that_break_are_made_again() {
    if let Some(cache) = Server::memcached(&["-M"]) {
        let proxy = Proxy::to(cache.port);
        cut_often(&format!("memcached://127.0.0.1:{}", proxy.port), &proxy);
    }
    if let Some(redis) = Server::redis(&[]) {
        let proxy = Proxy::to(redis.port);
        cut_often(&format!("redis://127.0.0.1:{}", proxy.port), &proxy);
    }
}

#[test]
fn damaged_pages_are_never_taken() {
    let Some(redis) = Server::redis(&[]) else { return };
    let proxy = Proxy::to(redis.port);
    let mut client = client(&format!("redis://127.0.0.1:{}?deadline=2s", proxy.port));
    let pages = put_all(&mut client, 0..300);
    proxy.damage_every(10_007);
    let right = pages.len() - lost(&mut client, &pages);
    assert!(right < pages.len(), "nothing was damaged");
    assert!(right > 100, "{right}");
}

#[test]
fn a_pager_that_ends_leaves_nothing_in_a_cache() {
    let Some(redis) = Server::redis(&[]) else { return };
    let mut client = client(&format!("redis://127.0.0.1:{}", redis.port));
    let pages = put_all(&mut client, 0..2000);
    client.store().share(pages[0].1);
    drop(client);
    let mut socket = TcpStream::connect(("127.0.0.1", redis.port)).unwrap();
    socket.write_all(b"DBSIZE\r\n").unwrap();
    let mut answer = [0; 4];
    socket.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b":0\r\n");
}

#[test]
fn faults_are_made_as_often_as_was_asked() {
    let Some(redis) = Server::redis(&[]) else { return };
    let mut client = client(&format!("redis://127.0.0.1:{}?fault=lose:4,corrupt:4", redis.port));
    let pages = put_all(&mut client, 0..400);
    let right = pages.len() - lost(&mut client, &pages);
    assert!((180..270).contains(&right), "{right} of 400");
}

#[test]
fn a_server_that_stops_does_not_hold_up_the_others() {
    let (Some(one), Some(two)) = (Server::redis(&[]), Server::redis(&[])) else { return };
    let mut client = client(&format!("redis://127.0.0.1:{},127.0.0.1:{}", one.port, two.port));
    one.signal("-STOP");
    let started = Instant::now();
    let mut pending = Vec::new();
    while pending.len() < 2000 && started.elapsed() < Duration::from_millis(2500) {
        match client.store().put(&page(pending.len() as u64), None) {
            Ok(Put::Pending(handle)) => pending.push(handle),
            other => {
                assert_eq!(other, Err(StoreError::Unavailable));
                client.step(Duration::from_millis(20));
            }
        }
    }
    one.signal("-CONT");
    assert_eq!(pending.len(), 2000, "only one server was stopped");
    let kept = pending.into_iter().zip(0..).map(|(handle, number)| (number, client.finish_put(handle).unwrap()));
    let pages: Vec<(u64, Handle)> = kept.collect();
    assert_all(&mut client, &pages);
}

//! How long pages of a pool take: `cargo run --release -p spillway-store --example latency -- URL`.
//!
//! Microseconds for one get at a time, waited for as a fault is, and pages a second for puts and gets by the hundred.
//! With a second URL `tcp-echo`, the floor: 4 KiB over a loopback connection to a thread that answers at once.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use spillway_core::PAGE_BYTES;
use spillway_store::blocking::Client;
use spillway_store::{Got, Handle, Put, Urgency, pool};

const PAGES: usize = 20_000;
const GETS: usize = 20_000;

fn main() {
    for url in std::env::args().skip(1) {
        if url == "tcp-echo" {
            report("tcp-echo", echo());
        } else {
            measure(&url);
        }
    }
}

fn report(what: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let at = |share: usize| times[times.len() - 1 - times.len() / share].as_secs_f64() * 1e6;
    println!("{what}: one get p50 {:.1} us, p99 {:.1}, p99.9 {:.1}", at(2), at(100), at(1000));
}

/// The time of a request of 24 bytes and an answer of a page.
fn echo() -> Vec<Duration> {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let mut client = TcpStream::connect(listener.local_addr().expect("bound")).expect("a connection");
    client.set_nodelay(true).expect("a socket");
    std::thread::spawn(move || {
        let (mut server, _) = listener.accept().expect("a connection");
        server.set_nodelay(true).expect("a socket");
        let mut request = [0; 24];
        while server.read_exact(&mut request).is_ok() {
            server.write_all(&[7; PAGE_BYTES + 36]).expect("a reader");
        }
    });
    let mut answer = [0; PAGE_BYTES + 36];
    let once = |_| {
        let started = Instant::now();
        client.write_all(&[1; 24]).expect("a reader");
        client.read_exact(&mut answer).expect("an answer");
        started.elapsed()
    };
    (0..GETS).map(once).collect()
}

fn measure(url: &str) {
    let mut client = match pool::open(url) {
        Ok(opened) => Client::new(opened.store),
        Err(error) => return println!("{error}"),
    };
    let started = Instant::now();
    let mut page = [0x5a; PAGE_BYTES];
    let mut handles: Vec<Handle> = Vec::with_capacity(PAGES);
    while handles.len() < PAGES {
        page[..8].copy_from_slice(&handles.len().to_le_bytes());
        match client.store().put(&page, None) {
            Ok(Put::Stored(handle) | Put::Unchanged(handle) | Put::Pending(handle)) => handles.push(handle),
            Err(spillway_store::StoreError::Unavailable) => client.step(Duration::from_millis(10)),
            Err(error) => return println!("{url}: {error}"),
        }
    }
    let mut settled = client.get(handles[PAGES - 1]);
    while settled.is_err() {
        settled = client.get(handles[PAGES - 1]);
    }
    client.steps(Duration::from_millis(50));
    let rate = |pages: usize, time: Duration| pages as f64 / time.as_secs_f64() / 1e3;
    println!("{url}: {:.0} k puts/s", rate(PAGES, started.elapsed().saturating_sub(Duration::from_millis(50))));
    let mut state = 1_usize;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        handles[(state >> 33) % PAGES]
    };
    let times = (0..GETS).map(|_| {
        let handle = next();
        let started = Instant::now();
        client.get(handle).expect("it was put");
        started.elapsed()
    });
    report(url, times.collect());
    let started = Instant::now();
    for batch in handles.chunks(100) {
        let pending: Vec<Handle> = batch
            .iter()
            .copied()
            .filter(|handle| client.store().get(*handle, Urgency::Prefetch, &mut page) == Ok(Got::Pending))
            .collect();
        pending.into_iter().for_each(|handle| drop(client.finish_get(handle).expect("it was put")));
    }
    println!("{url}: {:.0} k gets/s by the hundred", rate(PAGES, started.elapsed()));
}

//! Servers that say anything at all: the pager may lose pages by them, and nothing else.

mod common;

use std::io::{Read, Write};
use std::net::TcpListener;
use std::time::Duration;

use common::page;
use spillway_store::blocking::Client;
use spillway_store::{StoreError, pool};

/// Answers every connection with `greeting`, then with rubbish for each read.
fn liar(greeting: &'static [u8], rubbish: impl Fn(u64) -> Vec<u8> + Send + 'static) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        let mut turn = 0;
        for mut socket in listener.incoming().flatten() {
            let _ = socket.set_read_timeout(Some(Duration::from_millis(500)));
            let mut buffer = [0; 64 << 10];
            let _ = socket.read(&mut buffer);
            let _ = socket.write_all(greeting);
            while let Ok(1..) = socket.read(&mut buffer) {
                turn += 1;
                if socket.write_all(&rubbish(turn)).is_err() {
                    break;
                }
            }
        }
    });
    port
}

fn rubbish(turn: u64) -> Vec<u8> {
    let mut bytes = match turn % 8 {
        0 => b"VA 4096 O65536\r\n".to_vec(),
        1 => b"$4096\r\n".to_vec(),
        2 => b"HD O65537\r\n".repeat(3),
        3 => b"+OK\r\n".to_vec(),
        4 => b"VA 18446744073709551615\r\n".to_vec(),
        5 => b"$-9223372036854775808\r\n".to_vec(),
        6 => b":1\r\n:1\r\n:1\r\n".to_vec(),
        _ => Vec::new(),
    };
    let mut state = turn.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let noise = (0..turn * 37 % 6000).map(|_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        state.to_le_bytes()[7]
    });
    bytes.extend(noise);
    bytes
}

fn survive(url: &str) {
    let mut client = Client::new(pool::open(url).unwrap().store);
    let mut kept = Vec::new();
    for number in 0..60 {
        if let Ok(handle) = client.put(&page(number), None, Duration::from_millis(300)) {
            kept.push((number, handle));
        }
    }
    for (number, handle) in kept {
        if let Ok(got) = client.get(handle) {
            assert!(*got == page(number), "a lie was believed");
        }
        client.store().free(handle);
    }
    client.step(Duration::from_millis(10));
    assert_eq!(client.store().status().stored_bytes, 0);
}

#[test]
fn a_lying_memcached_does_no_harm() {
    let port = liar(b"STAT evictions off\r\nEND\r\nSTAT version 1.6.18\r\nEND\r\n", rubbish);
    survive(&format!("memcached://127.0.0.1:{port}?deadline=300ms"));
}

#[test]
fn a_lying_redis_does_no_harm() {
    let port = liar(b"$29\r\nmaxmemory_policy:noeviction\r\n\r\n", rubbish);
    survive(&format!("redis://127.0.0.1:{port}?deadline=300ms"));
}

#[test]
fn a_redis_that_refuses_all_writes_is_full() {
    let port = liar(b"$29\r\nmaxmemory_policy:noeviction\r\n\r\n", |_| b"-READONLY it is a replica\r\n".to_vec());
    let mut client = Client::new(pool::open(&format!("redis://127.0.0.1:{port}?deadline=300ms")).unwrap().store);
    assert_eq!(client.put(&page(1), None, Duration::from_millis(300)), Err(StoreError::Full));
    assert_eq!(client.store().status().stored_bytes, 0);
}

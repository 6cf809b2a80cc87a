//! Servers that say anything at all: the pager may lose pages by them, and nothing else.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::time::Duration;

use crate::common::page;
use crate::common::scripted::{self, scripted};
use spillway_core::{PAGE_BYTES, Page};
use spillway_store::blocking::Client;
use spillway_store::{Got, Handle, Put, StoreError, Urgency, pool};
use spillway_wire::answer::{self, GotHead, PageStatus, ServerStatus};
use spillway_wire::request::{Request, RequestBody};
use spillway_wire::{Content, Key};

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

/// What is wrong with an answer of a memory server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lie {
    InventedId,
    Repeated,
    OneMore,
    OneLess,
    OtherKind,
    OtherPage,
    OtherPageUnderTheChecksum,
    Zeros,
    Missing,
    Unasked,
}

/// A memory server that keeps pages as it should, and lies in every third answer.
fn lender(lie: Lie) -> u16 {
    let (mut pages, mut turn) = (HashMap::new(), 0u32);
    scripted(4 << 20, move |out, request| {
        turn += 1;
        answer(out, request, turn.is_multiple_of(3).then_some(lie), &mut pages);
    })
}

fn answer(out: &mut Vec<u8>, request: Request<'_>, lie: Option<Lie>, pages: &mut HashMap<Key, (u64, Page)>) {
    let id = if lie == Some(Lie::InventedId) { request.id ^ 1 << 20 } else { request.id };
    let to = scripted::to(id);
    let count = |pages: usize| match lie {
        Some(Lie::OneMore) => pages + 1,
        Some(Lie::OneLess) => pages - 1,
        _ => pages,
    };
    let (begin, zero) = (out.len(), GotHead { checksum: 0, what: answer::Got::Zero });
    match request.body {
        RequestBody::Put(puts) => {
            let all = puts.len();
            for put in puts {
                let Content::Bytes(page) = put.content else { continue };
                pages.insert(put.key, (put.checksum, *page));
            }
            if lie == Some(Lie::OtherKind) {
                answer::got_head(out, to, std::iter::repeat_n(zero, all));
            } else {
                answer::put(out, to, &vec![PageStatus::Ok; count(all)]);
            }
        }
        RequestBody::Get(_, keys) if lie == Some(Lie::OtherKind) => {
            answer::put(out, to, &vec![PageStatus::Ok; keys.len()]);
        }
        RequestBody::Get(_, keys) => {
            let mut found: Vec<(GotHead, Page)> = keys.map(|key| got(key, lie, pages)).collect();
            found.resize(count(found.len()), (zero, [0; PAGE_BYTES]));
            let heads: Vec<GotHead> = found.iter().map(|(head, _)| *head).collect();
            answer::got_head(out, to, heads.into_iter());
            for (_, page) in found.iter().filter(|(head, _)| head.what == answer::Got::Bytes) {
                out.extend_from_slice(page);
            }
        }
        RequestBody::Free(_) => answer::free(out, to, 1),
        _ => answer::heartbeat(out, to),
    }
    match lie {
        Some(Lie::Repeated) => out.extend_from_within(begin..),
        Some(Lie::Unasked) => answer::status(out, to, &ServerStatus::default()),
        _ => {}
    }
}

/// What is said of a page.
fn got(key: Key, lie: Option<Lie>, pages: &HashMap<Key, (u64, Page)>) -> (GotHead, Page) {
    let (checksum, page) = pages[&key];
    let other = pages.iter().find(|(other, _)| **other != key).map(|(_, other)| *other);
    let (checksum, page) = match (lie, other) {
        (Some(Lie::OtherPage), Some(other)) => other,
        (Some(Lie::OtherPageUnderTheChecksum), Some((_, other))) => (checksum, other),
        _ => (checksum, page),
    };
    let what = match lie {
        Some(Lie::Zeros) => answer::Got::Zero,
        Some(Lie::Missing) => answer::Got::Not(PageStatus::Missing),
        _ => answer::Got::Bytes,
    };
    (GotHead { checksum, what }, page)
}

/// Many at a time, so that requests are of several pages. Returns how many came back.
fn survive_in_batches(client: &mut Client, lie: Lie) -> usize {
    let mut pending = Vec::new();
    for number in 0..100 {
        if let Ok(Put::Pending(handle)) = client.store().put(&page(number), None) {
            pending.push((number, handle));
        }
    }
    let is_kept = |(number, handle)| client.finish_put(handle).ok().map(|handle| (number, handle));
    let kept: Vec<(u64, Handle)> = pending.into_iter().filter_map(is_kept).collect();
    let mut right = 0;
    for some in kept.chunks(20) {
        let mut into = [0; PAGE_BYTES];
        for (_, handle) in some {
            let asked = client.store().get(*handle, Urgency::Demand, &mut into);
            assert!(matches!(asked, Ok(Got::Pending)), "{asked:?}");
        }
        for (number, handle) in some {
            if let Ok(got) = client.finish_get(*handle) {
                assert!(*got == page(*number), "{lie:?} was believed");
                right += 1;
            }
        }
    }
    kept.into_iter().for_each(|(_, handle)| client.store().free(handle));
    client.step(Duration::from_millis(10));
    assert_eq!(client.store().status().stored_bytes, 0);
    right
}

#[test]
fn a_lying_memory_server_does_no_harm() {
    use Lie::{
        InventedId, Missing, OneLess, OneMore, OtherKind, OtherPage, OtherPageUnderTheChecksum, Repeated, Unasked,
        Zeros,
    };
    let content = [OtherPage, OtherPageUnderTheChecksum, Zeros, Missing];
    for lie in [InventedId, Repeated, OneMore, OneLess, OtherKind, Unasked].into_iter().chain(content) {
        let url = format!("tcp://127.0.0.1:{}?deadline=2s", lender(lie));
        let mut client = Client::new(pool::open(&url).unwrap().store);
        let right: usize = (0..3).map(|_| survive_in_batches(&mut client, lie)).sum();
        assert!(right > 0, "{lie:?}: what is true is believed");
        assert!(right < 300, "{lie:?}: it did not lie");
    }
}

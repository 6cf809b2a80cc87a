//! What a program waits for overtakes what nobody waits for.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::lender::{assert_all, put_all};
use crate::common::scripted::{scripted, to};
use crate::common::{client, page};
use spillway_core::{PAGE_BYTES, Page};
use spillway_store::{Got, Put, Urgency};
use spillway_wire::answer::{self, GotHead, PageStatus};
use spillway_wire::request::{Class, RequestBody};
use spillway_wire::{Content, Key};

/// What a request asks for, and of how many pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    Put(usize),
    Prefetch(usize),
    Demand(usize),
}

/// A server that has told what it was asked, and answers nothing but gets on demand once `is_slow`.
#[derive(Default)]
struct Told {
    asked: Vec<Asked>,
    is_slow: bool,
}

/// With a window of so many bytes.
fn told(window_bytes: u32) -> (u16, Arc<Mutex<Told>>) {
    let told = Arc::new(Mutex::new(Told::default()));
    let (its, mut pages, mut held) = (Arc::clone(&told), HashMap::<Key, (u64, Page)>::new(), Vec::new());
    let port = scripted(window_bytes, move |out, request| {
        let mut told = its.lock().unwrap();
        let to = to(request.id);
        let mut now = Vec::new();
        let asked = match request.body {
            RequestBody::Put(puts) => {
                let all = puts.len();
                for put in puts {
                    let Content::Bytes(page) = put.content else { panic!("these pages have bytes") };
                    pages.insert(put.key, (put.checksum, *page));
                }
                answer::put(&mut now, to, &vec![PageStatus::Ok; all]);
                Asked::Put(all)
            }
            RequestBody::Get(class, keys) => {
                let found: Vec<(u64, Page)> = keys.map(|key| pages[&key]).collect();
                let heads = found.iter().map(|(checksum, _)| GotHead { checksum: *checksum, what: answer::Got::Bytes });
                answer::got_head(&mut now, to, heads);
                found.iter().for_each(|(_, page)| now.extend_from_slice(page));
                if class == Class::Demand { Asked::Demand(found.len()) } else { Asked::Prefetch(found.len()) }
            }
            RequestBody::Free(_) => return answer::free(out, to, 1),
            _ => return answer::heartbeat(out, to),
        };
        told.asked.push(asked);
        if told.is_slow && !matches!(asked, Asked::Demand(_)) {
            held.append(&mut now);
        } else {
            out.append(&mut now);
            // It is slow until somebody waits.
            out.append(&mut held);
        }
    });
    (port, told)
}

#[test]
fn what_is_waited_for_is_sent_first() {
    let (port, told) = told(4 << 20);
    let mut client = client(&format!("tcp://127.0.0.1:{port}"));
    let pages = put_all(&mut client, 0..40);
    told.lock().unwrap().asked.clear();
    let mut into = [0; PAGE_BYTES];
    let puts: Vec<_> = (100..140).map(|number| client.store().put(&page(number), None)).collect();
    assert!(puts.iter().all(|put| matches!(put, Ok(Put::Pending(_)))));
    for (_, handle) in &pages[1..30] {
        assert_eq!(client.store().get(*handle, Urgency::Prefetch, &mut into), Ok(Got::Pending));
    }
    assert_eq!(client.store().get(pages[0].1, Urgency::Demand, &mut into), Ok(Got::Pending));
    assert!(*client.finish_get(pages[0].1).unwrap() == page(0));
    puts.into_iter().for_each(|put| {
        let Ok(Put::Pending(handle)) = put else { unreachable!("all are") };
        client.finish_put(handle).unwrap();
    });
    let asked = told.lock().unwrap().asked.clone();
    assert_eq!(asked[0], Asked::Demand(1), "{asked:?}");
    let sum = |of: fn(&Asked) -> usize| asked.iter().map(of).sum::<usize>();
    let all = (
        sum(|it| if let Asked::Put(pages) = it { *pages } else { 0 }),
        sum(|it| if let Asked::Prefetch(pages) = it { *pages } else { 0 }),
    );
    assert_eq!(all, (40, 29));
}

/// Of its window bulk never takes all.
#[test]
fn a_server_that_is_slow_with_bulk_is_asked_for_what_is_waited_for() {
    let (port, told) = told(256 << 10);
    let mut client = client(&format!("tcp://127.0.0.1:{port}?deadline=20s"));
    let pages = put_all(&mut client, 0..100);
    {
        let mut told = told.lock().unwrap();
        told.is_slow = true;
        told.asked.clear();
    }
    let mut into = [0; PAGE_BYTES];
    let puts: Vec<_> = (100..200).map(|number| client.store().put(&page(number), None)).collect();
    for (_, handle) in &pages[1..] {
        assert_eq!(client.store().get(*handle, Urgency::Prefetch, &mut into), Ok(Got::Pending));
    }
    client.steps(Duration::from_millis(100));
    let before = told.lock().unwrap().asked.len();
    assert_eq!(client.store().get(pages[0].1, Urgency::Demand, &mut into), Ok(Got::Pending));
    assert!(*client.finish_get(pages[0].1).unwrap() == page(0));
    let asked = told.lock().unwrap().asked.clone();
    assert!(before > 0 && asked[before] == Asked::Demand(1), "{before} of {asked:?}");
    // The rest of the bulk was still to come.
    let bulk: usize = asked[..before]
        .iter()
        .map(|it| if let Asked::Put(pages) | Asked::Prefetch(pages) = it { *pages } else { 0 })
        .sum();
    assert!(bulk < 100, "{asked:?}");
    told.lock().unwrap().is_slow = false;
    assert!(puts.iter().all(|put| matches!(put, Ok(Put::Pending(_)))));
    let kept: Vec<_> = puts
        .into_iter()
        .flatten()
        .map(|put| if let Put::Pending(handle) = put { handle } else { unreachable!() })
        .collect();
    for (number, handle) in (100..).zip(kept) {
        client.finish_put(handle).unwrap();
        assert_all(&mut client, &[(number, handle)]);
    }
}

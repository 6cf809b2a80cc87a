//! A server's part, or a dead pager's, played by whoever has the bytes: what the fuzz targets call.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, PoisonError};

use spillway_core::PAGE_BYTES;

use crate::Urgency;
use crate::local::Compression;
use crate::memcached::Memcached;
use crate::redis::Redis;
use crate::remote::handles::{Handles, Slot};
use crate::remote::ledger::Ledger;
use crate::remote::names::Names;
use crate::remote::protocol::{Greeting, Item, Name, Parcel, Protocol};
use crate::stripe::{Shape, inherit};
use crate::tcp::Tcp;
use crate::vault::{Slabs, Use, Vault};

/// What of a server's bytes was understood.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Understood {
    /// The handshake was completed.
    pub greeted: bool,
    /// Answers.
    pub answers: usize,
    /// Bytes used.
    pub bytes: usize,
}

type Words = &'static [AtomicU64];

/// A memcached says `bytes`: to a greeting, or to requests.
#[must_use]
pub fn memcached(bytes: &[u8], greeting: bool) -> Understood {
    play(&mut Memcached::new(Names::new("p".into()), Compression::None, false), bytes, greeting)
}

/// A Redis says `bytes`: to a greeting, or to requests.
#[must_use]
pub fn redis(bytes: &[u8], greeting: bool) -> Understood {
    play(&mut Redis::new(Names::new("p".into()), Some("x".into()), Compression::None, false), bytes, greeting)
}

/// A memory server says `bytes`: to a greeting, or to requests.
#[must_use]
pub fn tcp(bytes: &[u8], greeting: bool) -> Understood {
    play(&mut Tcp::new(b"token".to_vec()), bytes, greeting)
}

/// A dead pager has left `bytes` of its ledger: words of the notes on its servers, and then, from the `notes`th word on, entries.
/// How many pages and servers that are.
#[must_use]
pub fn ledger(bytes: &[u8], notes: usize) -> Option<(usize, usize)> {
    // A vault is mapped for good, so there is one.
    static VAULT: Mutex<Option<(Vault, Words, Words)>> = Mutex::new(None);
    let mut made = VAULT.lock().unwrap_or_else(PoisonError::into_inner);
    let (vault, head, entries) = made.get_or_insert_with(|| {
        let vault = Vault::create().expect("there is memory");
        let entries = Slabs::new(&vault, Use::SLOTS).take().expect("there is room");
        (vault.clone(), vault.notes().expect("there is room"), entries)
    });
    let mut words = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
    head.iter().for_each(|place| place.store(0, Relaxed));
    let places = head[..notes.min(head.len())].iter().chain(entries.iter());
    places.for_each(|place| place.store(words.next().unwrap_or(0), Relaxed));
    let (ledger, servers) = Ledger::found(vault)?;
    let (mut handles, left) = Handles::take_over(ledger, servers.len());
    for &handle in &left {
        assert!(usize::from(handles.slot(handle).server) < servers.len(), "it is at a server that there is");
        assert!(handles.is_abandoned(handle), "no reference was counted");
    }
    for _ in 0..4 {
        let new = handles.insert(Slot::putting(1, 0)).expect("there is room");
        assert!(!left.contains(&new), "its name is taken");
    }
    left.iter().for_each(|handle| handles.recycle(*handle));
    Some((left.len(), servers.len()))
}

/// A dead pager has left `bytes` of its groups, of four pages and two pieces of parity: `rows` words of these, and then pages. How many
/// pages and groups are taken over.
#[must_use]
pub fn rows(bytes: &[u8], rows: usize) -> (usize, usize) {
    static VAULT: Mutex<Option<(Vault, Words, Words)>> = Mutex::new(None);
    let mut made = VAULT.lock().unwrap_or_else(PoisonError::into_inner);
    let shape = Shape { data: 4, parity: 2 };
    let (vault, groups, pages) = made.get_or_insert_with(|| {
        let vault = Vault::create_for(10).expect("there is memory");
        let [groups, pages] = inherit::uses(shape).map(|of| Slabs::new(&vault, of).take().expect("there is room"));
        (vault, groups, pages)
    });
    let mut words = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
    groups.iter().chain(pages.iter()).for_each(|place| place.store(0, Relaxed));
    let places = groups[..rows.min(groups.len())].iter().chain(pages.iter());
    places.zip(&mut words).for_each(|(place, word)| place.store(word, Relaxed));
    inherit::rehearse(shape, vault)
}

fn play<P: Protocol>(protocol: &mut P, bytes: &[u8], greeting: bool) -> Understood {
    let mut out = Vec::new();
    protocol.greet(&mut out);
    if greeting { greet(protocol, bytes, &mut out) } else { answer(protocol, bytes, &mut out) }
}

fn greet<P: Protocol>(protocol: &mut P, bytes: &[u8], out: &mut Vec<u8>) -> Understood {
    let mut understood = Understood::default();
    loop {
        let input = &bytes[understood.bytes..];
        let Ok((used, greeting)) = protocol.greeted(input, out).inspect_err(|(_, text)| assert_line(text)) else {
            return understood;
        };
        assert!(used <= input.len(), "no more is used than there is");
        understood.bytes += used;
        understood.greeted = matches!(greeting, Greeting::Done(_));
        if used == 0 || understood.greeted {
            return understood;
        }
    }
}

fn answer<P: Protocol>(protocol: &mut P, bytes: &[u8], out: &mut Vec<u8>) -> Understood {
    for turn in 0..16 {
        let (name, id) = (Name { epoch: 1, handle: turn + 1 }, turn * 4);
        protocol.put(out, id, &[Parcel { name, page: &[7; PAGE_BYTES] }]);
        protocol.get(out, id + 1, Urgency::Demand, &[name]);
        protocol.free(out, id + 2, &[name]);
        protocol.heartbeat(out, id + 3);
    }
    let mut understood = Understood::default();
    while let Ok(Some((answer, used))) = protocol.answer(&bytes[understood.bytes..]) {
        assert!(used > 0 && used <= bytes.len() - understood.bytes, "an answer has bytes");
        let pages = answer.body.len();
        let items = answer.body.take(pages).inspect(|item| {
            assert!(!matches!(item, Item::Bytes(bytes) if bytes.len() > PAGE_BYTES), "a page has no more bytes");
        });
        assert_eq!(items.count(), pages, "there are as many items as it says");
        understood.answers += 1;
        understood.bytes += used;
    }
    understood
}

fn assert_line(text: &str) {
    assert!(!text.is_empty() && !text.contains(char::is_control), "{text:?}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_servers_say_is_understood() {
        let greeting = b"STAT evictions off\r\nEND\r\nSTAT version 1.6.18\r\nEND\r\nMN\r\n";
        assert_eq!(memcached(greeting, true), Understood { greeted: true, answers: 0, bytes: greeting.len() - 4 });
        assert_eq!(memcached(b"HD O0\r\nEN\r\nHD\r\nMN\r\nHD O5\r\n", false).answers, 4);
        assert!(redis(b"+OK\r\n$29\r\nmaxmemory_policy:noeviction\r\n\r\n", true).greeted);
        assert_eq!(redis(b"+OK\r\n$1\r\nx\r\n:1\r\n+PONG\r\n", false).answers, 4);
        assert_eq!(tcp(&[b"SPILLWAY".as_slice(), &[0; 32]].concat(), true).bytes, 40);
        let mut heartbeat = Vec::new();
        let condition = spillway_wire::answer::Condition::default();
        spillway_wire::answer::heartbeat(&mut heartbeat, spillway_wire::answer::To { id: 3, condition });
        assert_eq!(tcp(&heartbeat, false).answers, 1);
    }
}

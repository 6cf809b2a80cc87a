use super::*;
use crate::remote::protocol::Item;

fn server(lossy: bool) -> Memcached {
    Memcached::new(Names::new("p".into()), Compression::None, lossy)
}

fn greet(lossy: bool, said: &str) -> Result<Grant, String> {
    let (mut server, mut out) = (server(lossy), Vec::new());
    server.greet(&mut out);
    let mut input = said.as_bytes();
    loop {
        match server.greeted(input, &mut out) {
            Ok((_, Greeting::Done(grant))) => return Ok(grant),
            Ok((0, _)) => return Err("unfinished".into()),
            Ok((bytes, _)) => input = &input[bytes..],
            Err((_, text)) => return Err(text),
        }
    }
}

#[test]
fn only_what_does_not_evict_is_taken() {
    let said = |evictions: &str, size: &str, version: &str| {
        format!(
            "STAT evictions {evictions}\r\nSTAT item_size_max {size}\r\nEND\r\nSTAT evictions 0\r\nSTAT version {version}\r\nEND\r\n"
        )
    };
    assert!(greet(false, &said("off", "1048576", "1.6.18")).is_ok());
    assert!(greet(true, &said("on", "1048576", "1.6.18")).is_ok());
    assert!(greet(false, &said("on", "1048576", "1.6.18")).unwrap_err().contains("memcached -M"));
    assert!(greet(false, &said("off", "1024", "1.6.18")).unwrap_err().contains("-I 1m"));
    assert!(greet(true, &said("off", "1048576", "1.5.22")).unwrap_err().contains("older than 1.6"));
    assert!(greet(false, "-ERR unknown\x1b[0m\r\n").unwrap_err().contains("`-ERR unknown\\u{1b}[0m`"));
    assert_eq!(greet(false, "STAT evictions off\r\nSTAT it").unwrap_err(), "unfinished");
}

#[test]
fn a_server_that_was_started_anew_has_forgotten() {
    let mut server = server(false);
    let mut forgot = |process: u64, uptime: u64, time: u64| {
        let said = format!(
            "STAT evictions off\r\nEND\r\nSTAT pid {process}\r\nSTAT uptime {uptime}\r\nSTAT time {time}\r\n\
             STAT version 1.6.18\r\nEND\r\n"
        );
        server.greet(&mut Vec::new());
        let mut input = said.as_bytes();
        loop {
            match server.greeted(input, &mut Vec::new()).unwrap() {
                (_, Greeting::Done(grant)) => return grant.forgot,
                (bytes, _) => input = &input[bytes..],
            }
        }
    };
    assert!(!forgot(7, 100, 5000));
    assert!(!forgot(7, 161, 5060));
    assert!(forgot(8, 2, 5070));
    assert!(forgot(8, 1, 5090));
    assert!(!forgot(8, 4, 5093));
}

#[test]
fn requests_are_written_as_documented() {
    let (mut server, mut out) = (server(false), Vec::new());
    let name = Name { epoch: 3, handle: 77 };
    server.put(&mut out, 5, &[Parcel { name, page: &[b'x'; PAGE_BYTES] }]);
    server.get(&mut out, 6, Urgency::Demand, &[name]);
    server.free(&mut out, 7, &[name]);
    server.heartbeat(&mut out, 8);
    let page = "x".repeat(PAGE_BYTES);
    let expected = format!("ms p:3-77 4096 O5\r\n{page}\r\nmg p:3-77 v O6\r\nmd p:3-77 O7\r\nmn\r\n");
    assert_eq!(String::from_utf8(out).unwrap(), expected);
}

/// Answers to one request of each kind, as items.
fn answers(said: &[u8]) -> Result<Vec<(u32, Option<Item<'_>>)>, Malformed> {
    let (mut server, mut out) = (server(false), Vec::new());
    let name = Name { epoch: 0, handle: 1 };
    server.put(&mut out, 1, &[Parcel { name, page: &[0; PAGE_BYTES] }]);
    server.get(&mut out, 2, Urgency::Demand, &[name]);
    server.free(&mut out, 3, &[name]);
    let (mut input, mut all) = (said, Vec::new());
    while let Some((mut answer, bytes)) = server.answer(input)? {
        all.push((answer.id, answer.body.next()));
        input = &input[bytes..];
    }
    Ok(all)
}

#[test]
fn answers_are_read_whole_or_not_at_all() {
    let said = b"HD O1\r\nVA 5 O2\r\na\r\nbc\r\nNF O3\r\n";
    let all = [(1, Some(Item::Kept)), (2, Some(Item::Bytes(b"a\r\nbc"))), (3, None)];
    for end in 0..=said.len() {
        let read = answers(&said[..end]).unwrap();
        assert_eq!(read, all[..read.len()]);
    }
    assert_eq!(answers(said).unwrap().len(), 3);
    let full = b"SERVER_ERROR out of memory storing object\r\nEN\r\nHD\r\n";
    assert_eq!(answers(full).unwrap(), [(1, Some(Item::Full)), (2, Some(Item::Gone)), (3, None)]);
}

#[test]
fn nonsense_ends_the_connection() {
    for said in [
        &b"HD O2\r\n"[..],
        b"VA 5 O1\r\nhello\r\n",
        b"HD\r\nVA 5000\r\n",
        b"HD\r\nVA -1\r\n",
        b"HD\r\nVA 99999999999999999999\r\n",
        b"HD\r\nVA 1\r\nxyz",
        b"HD\r\nEN\r\nHD\r\nHD\r\n",
        &[b'x'; 5000],
    ] {
        assert!(answers(said).is_err(), "{}", quoted(said));
    }
}

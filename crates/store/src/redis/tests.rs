use super::*;
use crate::remote::protocol::Item;

fn server(password: Option<&str>, lossy: bool) -> Redis {
    Redis::new(Names::new("p".into()), password.map(str::to_owned), Compression::None, lossy)
}

fn greet(password: Option<&str>, lossy: bool, said: &str) -> Result<Grant, String> {
    let (mut server, mut out) = (server(password, lossy), Vec::new());
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

fn report(policy: &str) -> String {
    let text = format!("# Memory\r\nused_memory:1\r\nmaxmemory_policy:{policy}\r\nother:2\r\n");
    format!("${}\r\n{text}\r\n", text.len())
}

#[test]
fn only_what_does_not_evict_is_taken() {
    assert!(greet(None, false, &report("noeviction")).is_ok());
    assert!(greet(None, false, &report("allkeys-lru")).unwrap_err().contains("noeviction"));
    assert!(greet(None, true, &report("allkeys-lru")).is_ok());
    assert!(greet(Some("x"), false, &format!("+OK\r\n{}", report("noeviction"))).is_ok());
    assert!(greet(Some("x"), false, "-WRONGPASS invalid\r\n").unwrap_err().contains("refuses the password"));
    assert!(greet(None, false, "-NOAUTH Authentication required.\r\n").unwrap_err().contains(":PASSWORD@"));
    assert!(greet(None, false, "ERROR\r\n").unwrap_err().contains("neither Redis nor Valkey"));
    assert!(greet(None, false, "$99999999\r\n").unwrap_err().contains("neither Redis nor Valkey"));
    assert_eq!(greet(None, false, "$20\r\nmax").unwrap_err(), "unfinished");
}

#[test]
fn one_that_takes_no_writes_is_refused_at_the_start() {
    let report = |lines: &str| {
        let text = format!("# Memory\r\nmaxmemory_policy:noeviction\r\n{lines}\r\nrun_id:a\r\n");
        format!("${}\r\n{text}\r\n", text.len())
    };
    let judge = |lines: &str| greet(None, false, &report(lines)).map(drop);
    assert_eq!(judge("role:master\r\ncluster_enabled:0"), Ok(()));
    assert!(judge("role:slave\r\nmaster_host:h").unwrap_err().contains("name the Redis that it follows"));
    assert!(judge("role:master\r\ncluster_enabled:1").unwrap_err().contains("--cluster-enabled no"));
    // What has pages already is not left for having become a replica.
    let mut server = server(None, false);
    for role in ["role:master", "role:slave"] {
        server.greet(&mut Vec::new());
        let greeted = server.greeted(report(role).as_bytes(), &mut Vec::new());
        assert!(matches!(greeted, Ok((_, Greeting::Done(Grant { forgot: false, .. })))), "{role}");
    }
}

#[test]
fn a_server_that_was_started_anew_has_forgotten() {
    let mut server = server(None, false);
    let mut forgot = |run: &str| {
        let text = format!("run_id:{run}\r\nmaxmemory_policy:noeviction\r\n");
        let said = format!("${}\r\n{text}\r\n", text.len());
        server.greet(&mut Vec::new());
        match server.greeted(said.as_bytes(), &mut Vec::new()).unwrap() {
            (_, Greeting::Done(grant)) => grant.forgot,
            _ => panic!("it is a whole greeting"),
        }
    };
    assert_eq!(["a", "a", "b", "b", "a"].map(&mut forgot), [false, false, true, false, true]);
}

#[test]
fn requests_are_written_as_documented() {
    let (mut server, mut out) = (server(None, false), Vec::new());
    let name = Name { epoch: 3, handle: 77 };
    server.put(&mut out, 5, &[Parcel { name, page: &[b'x'; PAGE_BYTES] }]);
    server.get(&mut out, 6, Urgency::Demand, &[name]);
    server.free(&mut out, 7, &[name]);
    server.heartbeat(&mut out, 8);
    let page = "x".repeat(PAGE_BYTES);
    let expected = format!(
        "*3\r\n$3\r\nSET\r\n$6\r\np:3-77\r\n$4096\r\n{page}\r\n*2\r\n$3\r\nGET\r\n$6\r\np:3-77\r\n\
         *2\r\n$3\r\nDEL\r\n$6\r\np:3-77\r\n*1\r\n$4\r\nPING\r\n"
    );
    assert_eq!(String::from_utf8(out).unwrap(), expected);
}

fn answers(said: &[u8]) -> Result<Vec<(u32, Option<Item<'_>>)>, Malformed> {
    let (mut server, mut out) = (server(None, false), Vec::new());
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
    let said = b"+OK\r\n$5\r\na\r\nbc\r\n:1\r\n";
    let all = [(1, Some(Item::Kept)), (2, Some(Item::Bytes(b"a\r\nbc"))), (3, None)];
    for end in 0..=said.len() {
        let read = answers(&said[..end]).unwrap();
        assert_eq!(read, all[..read.len()]);
    }
    assert_eq!(answers(said).unwrap().len(), 3);
    let full = b"-OOM command not allowed\r\n$-1\r\n:0\r\n";
    assert_eq!(answers(full).unwrap(), [(1, Some(Item::Full)), (2, Some(Item::Gone)), (3, None)]);
}

#[test]
fn writes_that_are_refused_for_now_are_declined() {
    for error in ["OOM full", "MISCONF no snapshot", "NOREPLICAS too few", "READONLY You can't write"] {
        let said = format!("-{error}\r\n$2\r\nab\r\n-{error}\r\n");
        let all = [(1, Some(Item::Full)), (2, Some(Item::Bytes(b"ab"))), (3, None)];
        assert_eq!(answers(said.as_bytes()).unwrap(), all, "{error}");
    }
    let (mut server, mut out) = (server(None, false), Vec::new());
    server.put(&mut out, 1, &[Parcel { name: Name { epoch: 0, handle: 1 }, page: &[0; PAGE_BYTES] }]);
    let (answer, _) = server.answer(b"-NOPERM no\r\n").unwrap().unwrap();
    assert!(matches!(answer.body, Body::Goodbye((_, text)) if text.contains("NOPERM")));
}

#[test]
fn nonsense_ends_the_connection() {
    for said in [
        &b":1\r\n"[..],
        b"\r\n",
        b"+OK\r\n$5000\r\n",
        b"+OK\r\n$-2\r\n",
        b"+OK\r\n$1\r\nxyz",
        b"+OK\r\n*1\r\n",
        b"+OK\r\n$-1\r\n:1\r\n:1\r\n",
        &[b'+'; 5000],
    ] {
        assert!(answers(said).is_err(), "{}", quoted(said));
    }
}

//! `spillway pool status`: servers that are there, that are not, and pools without any.

mod common;
use common::{Running, done, err, out};
use std::io::{BufRead, BufReader};

#[test]
fn servers_are_asked_and_those_that_do_not_answer_are_named() {
    let mut running = Running::start(&["serve", "--listen", "127.0.0.1:0", "--memory", "16M"]);
    let mut line = String::new();
    BufReader::new(running.child.stderr.take().expect("captured")).read_line(&mut line).expect("a line");
    let address = line.split(" on ").nth(1).and_then(|rest| rest.split(';').next()).expect("an address").to_owned();
    let status = done(&["pool", "status", &format!("tcp://{address}"), "--json"]);
    assert_eq!((status.status.code(), err(&status).as_str()), (Some(0), ""));
    let rows: serde_json::Value = serde_json::from_str(&out(&status)).expect("JSON");
    assert_eq!(rows[0]["server"], address);
    assert_eq!((&rows[0]["capacity_bytes"], &rows[0]["pages"]), (&(16 << 20).into(), &0.into()));
    assert!(rows[0]["latency_us"].as_u64().is_some() && rows[0]["error"].is_null());
    let status = done(&["pool", "status", &format!("tcp://{address},127.0.0.1:1")]);
    assert_eq!(status.status.code(), Some(1));
    let text = out(&status);
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].starts_with("SERVER") && lines[1].starts_with(&address), "{text}");
    assert!(lines[2].contains("127.0.0.1:1") && lines[2].contains("it does not answer"), "{text}");
}

#[test]
fn pools_without_servers_are_refused_in_a_line() {
    for (url, says) in [("local:", "has no servers"), ("nosuch:", "is unknown"), ("tcp://h?token-file=/no", "/no")] {
        let status = done(&["pool", "status", url]);
        let text = err(&status);
        assert_eq!((status.status.code(), text.lines().count()), (Some(2), 1), "{text}");
        assert!(text.contains(says), "{text}");
    }
}

#[test]
fn a_pool_that_cannot_be_reached_ends_run_before_the_program_starts() {
    let run = done(&["run", "--local", "16M", "--pool", "tcp://127.0.0.1:1", "--", "echo", "started"]);
    assert!(err(&run).contains("no one listens there"), "{}", err(&run));
    assert!(!out(&run).contains("started"));
}

//! `spillway bench` and `spillway sim cost`: what they refuse, and that a wrong byte is told. tests/e2e has the comparison itself.

mod common;
use common::{done, err, out, script};
use std::fs;

#[test]
fn what_cannot_be_compared_is_refused_with_a_remedy() {
    for (args, word) in [
        (&["bench", "--size", "1M"][..], "give 32.0 MiB or more"),
        (&["bench", "--size", "half"], "write a number"),
        (&["bench", "--size", "900T"], "give --size less"),
        (&["bench", "--quick", "--order", "phased"], "leave --quick out"),
        (&["bench", "--against", "/nonexistent"], "give the path of a spillway binary"),
        (&["bench", "--out", "/proc/no"], "give --out another directory"),
        (&["bench", "--mode", "disk"], "memcached"),
        (&["bench", "--rounds", "0"], "1..=1000"),
        (&["bench-walk", "--size", "4K"], "give 256.0 KiB or more"),
        (&["bench-walk", "--accesses", "0"], "give one at least"),
        (&["sim", "cost", "/nonexistent"], "cannot read /nonexistent"),
        (&["sim", "cost", "--example", "x"], "cannot be used with"),
    ] {
        let refused = done(args);
        assert_eq!(refused.status.code(), Some(2), "{args:?}: {}", err(&refused));
        assert_eq!(err(&refused).lines().count(), 1, "{}", err(&refused));
        assert!(err(&refused).contains(word), "{args:?}: {}", err(&refused));
    }
}

#[test]
fn the_workload_verifies_what_it_reads() {
    for order in ["uniform", "zipf", "sequential", "strided", "phased"] {
        let args =
            ["bench-walk", "--size", "2M", "--accesses", "5000", "--write", "20", "--threads", "2", "--order", order];
        let walked = done(&args);
        assert_eq!(walked.status.code(), Some(0), "{}", err(&walked));
        let figures: serde_json::Value = serde_json::from_str(&out(&walked)).expect("JSON");
        assert_eq!((figures["wrong"].as_u64(), figures["accesses"].as_u64()), (Some(0), Some(5000)));
        assert!(figures["writes"].as_u64().is_some_and(|writes| (800..1200).contains(&writes)), "{figures}");
        let spoilt = done(&[&args[..], &["--spoil"]].concat());
        assert_eq!(spoilt.status.code(), Some(1), "{}", out(&spoilt));
    }
}

#[test]
fn costs_are_compared() {
    let paper = done(&["sim", "cost", "--json"]);
    let told: serde_json::Value = serde_json::from_str(&out(&paper)).expect("JSON");
    assert_eq!(told[0]["systems"][2]["total"], 3148.0);
    let own = script(
        "\"$SPILLWAY\" sim cost --example >/tmp/spillway-cost-$$.toml && \"$SPILLWAY\" sim cost --json /tmp/spillway-cost-$$.toml; \
                      rm /tmp/spillway-cost-$$.toml",
    );
    assert_eq!(out(&own), out(&paper), "{}", err(&own));
    let path = std::env::temp_dir().join(format!("spillway-cost-{}.toml", std::process::id()));
    fs::write(&path, "years = 3\nyeers = 4\n").expect("written");
    let refused = done(&["sim", "cost", path.to_str().expect("text")]);
    fs::remove_file(&path).expect("removed");
    assert_eq!(refused.status.code(), Some(2));
    assert!(
        err(&refused).contains("line 2: unknown field `yeers`") && err(&refused).contains("--example"),
        "{}",
        err(&refused)
    );
}

//! Every store keeps the same contract.

use crate::common::contract::Contract;
use crate::common::{Server, client};

fn run(url: &str, steps: u64) {
    for seed in [0x1234_5678_9abc, 0xfeed_beef_cafe] {
        let mut client = client(url);
        let mut contract = Contract::new(client.store(), seed);
        contract.run(steps);
        assert!(contract.got > steps / 50, "{} pages were read", contract.got);
    }
}

#[test]
fn embedded_pool() {
    run("local:", 20_000);
    run("local:?compress=none&dedupe=0", 20_000);
}

#[test]
fn emulated_memory() {
    run("emulated:", 20_000);
    run("emulated:?delay=4us&serialize=1", 20_000);
    run("emulated:?delay=300us", 5_000);
}

#[test]
fn file_with_direct_access() {
    let directory = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    let path = directory.join(format!("pool-{}", std::process::id()));
    run(&format!("file://{}?size=4M", path.display()), 20_000);
    std::fs::remove_file(path).unwrap();
}

#[test]
fn file_in_memory() {
    let path = format!("/dev/shm/spillway-pool-{}", std::process::id());
    run(&format!("file://{path}?size=1M"), 20_000);
    std::fs::remove_file(path).unwrap();
}

#[test]
fn memcached() {
    let (Some(one), Some(two)) = (Server::memcached(&["-M"]), Server::memcached(&["-M"])) else { return };
    run(&format!("memcached://127.0.0.1:{}", one.port), 20_000);
    run(&format!("memcached://127.0.0.1:{},127.0.0.1:{}?compress=lz4", one.port, two.port), 20_000);
}

#[test]
fn redis() {
    let Some(open) = Server::redis(&[]) else { return };
    let Some(closed) = Server::redis(&["--requirepass", "secret"]) else { return };
    run(&format!("redis://127.0.0.1:{}", open.port), 20_000);
    run(&format!("redis://:secret@127.0.0.1:{}?compress=lz4", closed.port), 20_000);
}

#[test]
fn stores_made_slower_and_worse() {
    let Some(redis) = Server::redis(&[]) else { return };
    run(&format!("redis://127.0.0.1:{}?delay=200us&fault=decline:20,stall:50:2ms", redis.port), 4_000);
    let path = format!("/dev/shm/spillway-slow-pool-{}", std::process::id());
    run(&format!("file://{path}?size=1M&fault=decline:3"), 4_000);
    std::fs::remove_file(path).unwrap();
}

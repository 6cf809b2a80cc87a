//! Memory servers in this process, and pages that are put there.

use std::net::{Ipv4Addr, SocketAddr};
use std::thread::JoinHandle;

use spillway_server::{Config, Server, Stop};
use spillway_store::blocking::Client;
use spillway_store::{Handle, StoreError};

use super::proxy::Proxy;
use super::{PATIENCE, free_port, page};

/// A memory server that ends with the test.
pub struct Lender {
    pub port: u16,
    stop: Stop,
    thread: Option<JoinHandle<()>>,
}

impl Lender {
    pub fn start(memory_bytes: u64, change: impl FnOnce(&mut Config)) -> Self {
        Self::start_on(free_port(), memory_bytes, change)
    }

    pub fn start_on(port: u16, memory_bytes: u64, change: impl FnOnce(&mut Config)) -> Self {
        let mut config = Config::new(SocketAddr::from((Ipv4Addr::LOCALHOST, port)), memory_bytes);
        config.workers = 1;
        change(&mut config);
        let server = Server::bind(config).unwrap();
        let stop = server.stopper();
        let thread = Some(std::thread::spawn(move || server.run().unwrap()));
        Self { port, stop, thread }
    }

    pub fn end(&mut self) {
        self.stop.stop();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl Drop for Lender {
    fn drop(&mut self) {
        self.end();
    }
}

pub fn put_all(client: &mut Client, numbers: std::ops::Range<u64>) -> Vec<(u64, Handle)> {
    numbers.map(|number| (number, client.put(&page(number), None, PATIENCE).unwrap())).collect()
}

pub fn assert_all(client: &mut Client, pages: &[(u64, Handle)]) {
    for (number, handle) in pages {
        assert!(*client.get(*handle).unwrap() == page(*number));
    }
}

pub fn lost(client: &mut Client, pages: &[(u64, Handle)]) -> usize {
    let is_lost = |(number, handle): &(u64, Handle)| match client.get(*handle) {
        Ok(got) => {
            assert!(*got == page(*number), "wrong bytes");
            false
        }
        Err(error) => {
            assert!(matches!(error, StoreError::Lost | StoreError::Corrupt), "{error:?}");
            true
        }
    };
    pages.iter().map(is_lost).filter(|lost| *lost).count()
}

/// Of pages that were put while the connection was cut again and again, somewhere in a frame: those that were kept. What is under way when
/// it ends was not.
pub fn put_while_cut(client: &mut Client, proxy: &Proxy, first_bytes: u64, more_bytes: u64) -> Vec<(u64, Handle)> {
    let mut pages: Vec<(u64, Handle)> = Vec::new();
    for round in 0..10 {
        proxy.cut_after(first_bytes + round * more_bytes);
        for number in round * 100..round * 100 + 50 {
            let put = client.put(&page(number), None, PATIENCE);
            pages.extend(put.ok().map(|handle| (number, handle)));
        }
        assert_all(client, &pages);
        proxy.cut();
    }
    assert!(pages.len() > 400, "{} pages were kept", pages.len());
    pages
}

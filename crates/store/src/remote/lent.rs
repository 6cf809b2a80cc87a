//! Memory servers in this process, and pages that are put there and read.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use spillway_core::{PAGE_BYTES, Page};
use spillway_server::{Config, Server as Lender, Stop};

use super::{Peer, Remote, wait};
use crate::tcp::Tcp;
use crate::{Completion, Got, Handle, Put, Store, Urgency};

/// A memory server that ends with the test.
pub(super) struct Lent {
    pub(super) address: SocketAddr,
    stop: Stop,
    thread: Option<JoinHandle<()>>,
}

impl Lent {
    pub(super) fn start() -> Self {
        let mut config = Config::new(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), 16 << 20);
        config.workers = 1;
        let server = Lender::bind(config).unwrap();
        let (address, stop) = (server.address(), server.stopper());
        Self { address, stop, thread: Some(std::thread::spawn(move || server.run().unwrap())) }
    }

    pub(super) fn end(&mut self) {
        self.stop.stop();
        self.thread.take().into_iter().for_each(|thread| thread.join().unwrap());
    }

    pub(super) fn peer(&self) -> Peer<Tcp> {
        let (name, addresses) = (self.address.to_string(), vec![self.address]);
        Peer { name, addresses, protocol: Tcp::new(Vec::new()), tls: None }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.end();
    }
}

fn page(number: u64) -> Page {
    let mut page = [7; PAGE_BYTES];
    page[..8].copy_from_slice(&number.to_le_bytes());
    page
}

/// Goes on until something holds, given the pages that have come and how many were kept.
pub(super) fn until(remote: &mut Remote<Tcp>, holds: impl Fn(&Remote<Tcp>, &[Page], usize) -> bool) {
    let latest = Instant::now() + Duration::from_secs(10);
    let (mut came, mut kept) = (Vec::new(), 0);
    while !holds(remote, &came, kept) {
        assert!(Instant::now() < latest, "it does not come to that");
        wait(remote.descriptor().unwrap(), Duration::from_millis(20));
        remote.progress(&mut |completion| match completion {
            Completion::Put { result, .. } => {
                result.unwrap();
                kept += 1;
            }
            Completion::Got { page, .. } => came.push(*page.unwrap()),
        });
    }
}

/// Puts so many pages; which are where.
pub(super) fn put(remote: &mut Remote<Tcp>, numbers: std::ops::Range<u64>) -> Vec<(u64, Handle, u8)> {
    let put_one = |number| {
        let Ok(Put::Pending(handle)) = Store::put(remote, &page(number), None) else { panic!("it is taken") };
        Store::flush(remote);
        until(remote, |_, _, kept| kept == 1);
        (number, handle, remote.handles.slot(handle).server)
    };
    numbers.map(put_one).collect()
}

pub(super) fn read(remote: &mut Remote<Tcp>, pages: &[(u64, Handle, u8)]) {
    for (number, handle, _) in pages {
        let got = Store::get(remote, *handle, Urgency::Demand, &mut [0; PAGE_BYTES]);
        assert!(matches!(got, Ok(Got::Pending)));
        Store::flush(remote);
        until(remote, |_, came, _| came == [page(*number)]);
    }
}

/// Where nobody listens.
pub(super) fn nowhere() -> SocketAddr {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap()
}

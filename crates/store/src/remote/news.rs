//! Servers that come and go while a pool is open, as a thread beside tells it. What is made for a new one was made there; here it
//! is heard where house is kept.

use std::sync::mpsc::{Receiver, Sender};
use std::time::Instant;

use super::Remote;
use super::protocol::Protocol;
use super::server::Server;

/// As many as a page's place can name.
pub(crate) const SERVERS_MAX: usize = 255;

/// What has changed. Servers are named by number, in the order in which they came.
pub(crate) enum Change<P> {
    /// One more, in a domain.
    Joined(Box<Server<P>>, u8),
    /// Whether pages may be put to one.
    Listed(u8, bool),
    /// Which domain one is in: the number of any server there, but of the same for all.
    Domain(u8, u8),
}

/// Where changes come from. Whoever sends them learns when nobody listens any more.
pub(crate) struct News<P> {
    pub(crate) changes: Receiver<Change<P>>,
    pub(crate) _until_dropped: Sender<()>,
}

impl<P: Protocol> Remote<P> {
    /// Listens from now on; acts on what is known already.
    pub(crate) fn follow(&mut self, news: News<P>) {
        // So that nothing is moved later.
        self.servers.reserve_exact(SERVERS_MAX.saturating_sub(self.servers.len()));
        self.news = Some(news);
        self.heed_news();
    }

    pub(super) fn heed_news(&mut self) {
        while let Some(change) = self.news.as_ref().and_then(|news| news.changes.try_recv().ok()) {
            match change {
                Change::Joined(server, domain) => self.admit(*server, domain),
                Change::Listed(at, listed) => self.servers[usize::from(at)].listed = listed,
                Change::Domain(at, domain) => self.servers[usize::from(at)].domain = domain,
            }
        }
    }

    /// Whoever takes over knows of a server before anything is put there.
    fn admit(&mut self, mut server: Server<P>, domain: u8) {
        assert!(self.servers.len() < SERVERS_MAX, "whoever sends them counts them");
        server.domain = domain;
        if let Some(ledger) = &self.handles.ledger {
            ledger.add_server(&server.note());
        }
        self.servers.push(server);
    }

    /// Whether nobody expects it: it has left the cluster, or has never let us in, and has not been there for so long that
    /// nobody waits for it.
    pub(super) fn is_retired(&self, server: &Server<P>, now: Instant) -> bool {
        !server.has_joined() && server.is_gone(now, self.settings.deadline)
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr};
    use std::sync::mpsc::channel;
    use std::thread::JoinHandle;
    use std::time::Duration;

    use spillway_core::{PAGE_BYTES, Page};
    use spillway_server::{Config, Server as Lender, Stop};

    use super::*;
    use crate::remote::ledger::Ledger;
    use crate::remote::{Peer, Settings, wait};
    use crate::stripe::members;
    use crate::tcp::Tcp;
    use crate::vault::Vault;
    use crate::{Completion, Got, Handle, Put, Store, Urgency};

    /// A memory server that ends with the test.
    struct Lent {
        address: SocketAddr,
        stop: Stop,
        thread: Option<JoinHandle<()>>,
    }

    impl Lent {
        fn start() -> Self {
            let mut config = Config::new(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), 16 << 20);
            config.workers = 1;
            let server = Lender::bind(config).unwrap();
            let (address, stop) = (server.address(), server.stopper());
            Self { address, stop, thread: Some(std::thread::spawn(move || server.run().unwrap())) }
        }

        fn peer(&self) -> Peer<Tcp> {
            let (name, addresses) = (self.address.to_string(), vec![self.address]);
            Peer { name, addresses, protocol: Tcp::new(Vec::new()), tls: None }
        }
    }

    impl Drop for Lent {
        fn drop(&mut self) {
            self.stop.stop();
            self.thread.take().into_iter().for_each(|thread| thread.join().unwrap());
        }
    }

    fn page(number: u64) -> Page {
        let mut page = [7; PAGE_BYTES];
        page[..8].copy_from_slice(&number.to_le_bytes());
        page
    }

    /// Goes on until something holds, given the pages that have come and how many were kept.
    fn until(remote: &mut Remote<Tcp>, holds: impl Fn(&Remote<Tcp>, &[Page], usize) -> bool) {
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
    fn put(remote: &mut Remote<Tcp>, numbers: std::ops::Range<u64>) -> Vec<(u64, Handle, u8)> {
        let put_one = |number| {
            let Ok(Put::Pending(handle)) = Store::put(remote, &page(number), None) else { panic!("it is taken") };
            Store::flush(remote);
            until(remote, |_, _, kept| kept == 1);
            (number, handle, remote.handles.slot(handle).server)
        };
        numbers.map(put_one).collect()
    }

    fn read(remote: &mut Remote<Tcp>, pages: &[(u64, Handle, u8)]) {
        for (number, handle, _) in pages {
            let got = Store::get(remote, *handle, Urgency::Demand, &mut [0; PAGE_BYTES]);
            assert!(matches!(got, Ok(Got::Pending)));
            Store::flush(remote);
            until(remote, |_, came, _| came == [page(*number)]);
        }
    }

    #[test]
    fn servers_come_and_go_while_a_pool_is_open() {
        let lent = [Lent::start(), Lent::start()];
        let vault = Vault::create().unwrap();
        let mut remote = Remote::open(vec![lent[0].peer()], Settings::default(), Some(&vault)).unwrap();
        let ((changes, receiver), (until_dropped, over)) = (channel(), channel());
        changes.send(Change::Domain(0, 0)).unwrap();
        remote.follow(News { changes: receiver, _until_dropped: until_dropped });
        let before = put(&mut remote, 0..50);

        let newcomer = Server::new(lent[1].peer(), Instant::now());
        changes.send(Change::Joined(Box::new(newcomer), 0)).unwrap();
        until(&mut remote, |remote, _, _| remote.servers.len() == 2);
        // Written down before anything is put there, and before it can be.
        assert!(!remote.servers[1].is_ready());
        let known = |vault| Ledger::found(vault).unwrap().1.into_iter().map(|note| note.name).collect::<Vec<_>>();
        assert_eq!(known(&vault), [lent[0].address.to_string(), lent[1].address.to_string()]);
        assert_eq!((remote.servers[0].domain, remote.servers[1].domain), (0, 0));
        until(&mut remote, |remote, _, _| remote.servers[1].is_ready());
        let after = put(&mut remote, 50..150);
        assert!(after.iter().filter(|(.., server)| *server == 1).count() > 20, "{after:?}");

        // It leaves: nothing new goes there, and what it has is read.
        changes.send(Change::Listed(1, false)).unwrap();
        until(&mut remote, |remote, _, _| !remote.servers[1].listed);
        let last = put(&mut remote, 150..200);
        assert!(last.iter().all(|(.., server)| *server == 0), "{last:?}");
        for pages in [&before, &after, &last] {
            read(&mut remote, pages);
        }
        // One that never lets us in is none that will be back.
        let nobody = Lent::start().peer();
        changes.send(Change::Joined(Box::new(Server::new(nobody, Instant::now())), 2)).unwrap();
        until(&mut remote, |remote, _, _| remote.servers.get(2).is_some_and(|server| server.failure.is_some()));
        let is_retired = |at| members::Members::health(&remote, at, Instant::now()).is_retired();
        assert_eq!([0, 1, 2].map(is_retired), [false, false, true]);

        changes.send(Change::Listed(1, true)).unwrap();
        until(&mut remote, |remote, _, _| remote.servers[1].listed);
        assert!(put(&mut remote, 200..250).iter().any(|(.., server)| *server == 1), "it is back");
        drop(remote);
        assert!(over.try_recv().is_err_and(|error| error == std::sync::mpsc::TryRecvError::Disconnected));
    }
}

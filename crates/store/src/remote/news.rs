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
    use std::sync::mpsc::channel;

    use super::*;
    use crate::pool::OpenErrorKind;
    use crate::remote::ledger::Ledger;
    use crate::remote::lent::{Lent, nowhere, put, read, until};
    use crate::remote::{Peer, Settings};
    use crate::stripe::members;
    use crate::vault::Vault;

    #[test]
    fn a_server_is_tried_at_all_of_its_addresses_before_its_pool_is_refused() {
        let lent = Lent::start();
        let peer = |addresses| Peer { addresses, ..lent.peer() };
        let open = |addresses| Remote::open(vec![peer(addresses)], Settings::default(), None);
        let mut remote = open(vec![nowhere(), lent.address]).unwrap();
        let pages = put(&mut remote, 0..10);
        read(&mut remote, &pages);
        assert!(open(vec![nowhere(), nowhere()]).is_err_and(|error| error.kind == OpenErrorKind::Unreachable));
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

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

    /// Whether it has gone for good, as far as one can tell: it is no longer in the cluster, and has not been there for so long
    /// that nobody waits for it.
    pub(super) fn is_retired(&self, server: &Server<P>, now: Instant) -> bool {
        !server.listed && server.is_gone(now, self.settings.deadline)
    }
}

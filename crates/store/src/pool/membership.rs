//! Following a cluster for a pool that is open: a thread beside looks at etcd, and tells the store who has come and gone.
//!
//! While etcd is away nothing changes. The store hears of it where it keeps house (`remote/news.rs`).

use std::collections::BTreeSet;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use spillway_cluster::{Cluster, Directory, Member};

use super::hosts::HOSTS_MAX;
use super::open::read_token;
use super::roll::{Difference, Roll};
use super::tls::Credentials;
use super::{Host, OpenError, Tcp, Tls, hosts};
use crate::remote::Peer;
use crate::remote::news::{Change, News};
use crate::remote::server::Server;
use crate::tcp;

/// How often etcd is asked.
const EVERY: Duration = Duration::from_secs(1);

/// See the module's documentation.
pub struct Membership {
    cluster: String,
    directory: Directory,
    roll: Roll,
    token: Vec<u8>,
    tls: Option<Credentials>,
    changes: Sender<Change<tcp::Tcp>>,
    over: Receiver<()>,
    /// What the user was told, once each; whoever can write to etcd could make us say anything.
    told: BTreeSet<String>,
}

impl Membership {
    /// For a pool that has the servers at `addresses`, in this order, and speaks to them as `tcp` says. What is known of
    /// `members` is told before anything else.
    pub(super) fn new(
        cluster: &Cluster,
        tcp: &Tcp,
        addresses: impl IntoIterator<Item = String>,
        members: &[Member],
    ) -> Result<(Self, News<tcp::Tcp>), OpenError> {
        let ((changes, receiver), (until_dropped, over)) = (channel(), channel());
        let mut membership = Self {
            cluster: cluster.to_string(),
            directory: cluster.directory(),
            roll: Roll::new(addresses),
            token: tcp.token_file.as_deref().map(read_token).transpose()?.unwrap_or_default(),
            tls: tcp.tls.as_ref().map(Tls::read).transpose()?,
            changes,
            over,
            told: BTreeSet::new(),
        };
        membership.tell_differences(members);
        Ok((membership, News { changes: receiver, _until_dropped: until_dropped }))
    }

    /// Looks again and again, until the pool is closed. `say` is given lines for the user, which are few.
    pub fn run(mut self, mut say: impl FnMut(&str)) {
        loop {
            if let Ok(members) = self.directory.members() {
                // First what takes no time: names are looked up for newcomers.
                self.tell_differences(&members);
                self.admit(&members, &mut say);
            }
            if self.over.recv_timeout(EVERY) != Err(RecvTimeoutError::Timeout) {
                return;
            }
        }
    }

    fn admit(&mut self, members: &[Member], say: &mut impl FnMut(&str)) {
        let (strangers, beyond) = self.roll.strangers(members);
        for (host, domain) in strangers {
            match self.server(&host) {
                Ok(server) => {
                    let domain = self.roll.add(host.to_string(), Some(domain));
                    // If nobody listens any more, it is over anyway.
                    let _ = self.changes.send(Change::Joined(Box::new(server), domain));
                }
                Err(error) => self.say_once(format!("{error}; the pool does without it"), say),
            }
        }
        if beyond > 0 {
            let text = format!(
                "{} has more servers than the {HOSTS_MAX} that one pool may see: it does without the others until it is \
                 opened anew",
                self.cluster
            );
            self.say_once(text, say);
        }
    }

    fn server(&self, host: &Host) -> Result<Server<tcp::Tcp>, OpenError> {
        let tls = self.tls.as_ref().map(|tls| tls.of(host)).transpose()?;
        let protocol = tcp::Tcp::new(self.token.clone());
        let peer = Peer { name: host.to_string(), addresses: hosts::resolve(host)?, protocol, tls };
        Ok(Server::new(peer, Instant::now()))
    }

    fn tell_differences(&mut self, members: &[Member]) {
        for difference in self.roll.heed(members) {
            let _ = self.changes.send(match difference {
                Difference::Listed(at, listed) => Change::Listed(at, listed),
                Difference::Domain(at, domain) => Change::Domain(at, domain),
            });
        }
    }

    fn say_once(&mut self, text: String, say: &mut impl FnMut(&str)) {
        if self.told.len() < HOSTS_MAX && !self.told.contains(&text) {
            say(&text);
            self.told.insert(text);
        }
    }
}

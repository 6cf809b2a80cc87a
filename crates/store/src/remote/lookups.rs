//! Servers that come back at another address: the name of one that cannot be reached is looked up again, by a thread beside. Here
//! it is asked to, and heard, where house is kept; a connection that there is stays.

use std::net::SocketAddr;
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

use super::Remote;
use super::protocol::Protocol;

/// How long a server is away before its name is looked up: most are back where they were, at once.
pub(super) const AFTER: Duration = Duration::from_secs(1);
/// How long after a lookup the next one begins, while the server is away: the usual deadline, after which its pages are lost, has
/// room for two.
pub(super) const EVERY: Duration = Duration::from_secs(5);

/// A server's number and its name.
pub(crate) type Question = (u8, String);
/// Its number and its addresses; none if they are not known.
pub(crate) type Answer = (u8, Vec<SocketAddr>);

/// Who looks names up: one answer to each question. It ends when nobody can ask any more.
pub(crate) struct Lookups {
    pub(crate) questions: Sender<Question>,
    pub(crate) answers: Receiver<Answer>,
}

impl<P: Protocol> Remote<P> {
    /// Whether servers have names to look up, or others may come that do.
    pub(crate) fn may_have_names(&self) -> bool {
        self.news.is_some() || self.servers.iter().any(|server| server.has_name())
    }

    /// Has names looked up from now on.
    pub(crate) fn look_up(&mut self, lookups: Lookups) {
        self.lookups = Some(lookups);
    }

    pub(super) fn keep_addresses(&mut self, now: Instant) {
        let Some(Lookups { questions, answers }) = &self.lookups else { return };
        while let Ok((at, addresses)) = answers.try_recv() {
            self.servers[usize::from(at)].found(addresses, now + EVERY);
        }
        for (server, at) in self.servers.iter_mut().zip(0..) {
            if server.wants_lookup(now) {
                server.look_up_at = None;
                // If nobody is there to answer, none does.
                let _ = questions.send((at, server.name.clone()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{TryRecvError, channel};

    use super::*;
    use crate::remote::ledger::Ledger;
    use crate::remote::lent::{Lent, nowhere, put, read, until};
    use crate::remote::{Peer, Settings};
    use crate::tcp::Tcp;
    use crate::vault::Vault;

    /// Of a name for it.
    fn named(lent: &Lent, name: &str) -> Peer<Tcp> {
        Peer { name: name.into(), ..lent.peer() }
    }

    /// A store's lookups, and the ends of whoever looks up.
    fn lookups() -> (Lookups, Receiver<Question>, Sender<Answer>) {
        let ((questions, questioned), (answerer, answers)) = (channel(), channel());
        (Lookups { questions, answers }, questioned, answerer)
    }

    #[test]
    fn names_of_servers_that_are_away_are_looked_up_again_and_again() {
        let (mut lent, there) = ([Lent::start(), Lent::start(), Lent::start()], Lent::start());
        let [one, two, literal] = &lent;
        let peers =
            vec![named(one, "one.example:1"), named(two, "two.example:1"), literal.peer(), named(&there, "h:1")];
        let mut remote = Remote::open(peers, Settings::default(), None).unwrap();
        let (lookups, questions, answers) = lookups();
        remote.look_up(lookups);
        remote.servers[1].listed = false;
        let addresses = remote.servers[0].addresses.clone();
        let asked = |questions: &Receiver<Question>| questions.try_iter().collect::<Vec<_>>();
        let first = vec![(0, "one.example:1".to_string())];

        remote.keep_addresses(Instant::now() + EVERY);
        assert_eq!(asked(&questions), [], "all are there");
        lent.iter_mut().for_each(Lent::end);
        until(&mut remote, |remote, _, _| remote.servers[..3].iter().all(|server| server.failure.is_some()));
        remote.keep_addresses(Instant::now());
        assert_eq!(asked(&questions), [], "they may be back at once");
        let mut now = Instant::now() + AFTER;
        remote.keep_addresses(now);
        assert_eq!(asked(&questions), first, "neither one that has left, nor one without a name");
        now += EVERY * 2;
        remote.keep_addresses(now);
        assert_eq!(asked(&questions), [], "it is being looked up");

        answers.send((0, Vec::new())).unwrap();
        remote.keep_addresses(now);
        assert_eq!((asked(&questions), &remote.servers[0].addresses), (Vec::new(), &addresses));
        now += EVERY;
        remote.keep_addresses(now);
        assert_eq!(asked(&questions), first);
        answers.send((0, vec![there.address])).unwrap();
        answers.send((3, vec![nowhere()])).unwrap();
        remote.keep_addresses(now);
        assert_eq!(remote.servers[0].addresses, [there.address]);
        let epoch = remote.servers[3].epoch;
        until(&mut remote, |remote, _, _| remote.servers[0].is_ready());
        assert!(remote.servers[3].is_ready() && remote.servers[3].epoch == epoch, "a connection stays");
        now += EVERY;
        remote.keep_addresses(now);
        assert_eq!(asked(&questions), [], "it is back");

        // Nobody is there to answer any more.
        drop(questions);
        remote.servers[1].listed = true;
        remote.keep_addresses(now);
        drop(remote);
        assert!(answers.send((0, Vec::new())).is_err());
    }

    #[test]
    fn a_server_whose_name_is_unknown_at_a_takeover_is_there_when_it_is_known() {
        let lent = [Lent::start(), Lent::start()];
        let vault = Vault::create().unwrap();
        let peers = || vec![named(&lent[0], "one.example:1"), named(&lent[1], "two.example:1")];
        let mut remote = Remote::open(peers(), Settings::default(), Some(&vault)).unwrap();
        let pages = put(&mut remote, 0..50);
        assert!(pages.iter().any(|(.., server)| *server == 1));
        drop(remote);

        let (ledger, notes) = Ledger::found(&vault).unwrap();
        let mut peers = peers();
        peers[1].addresses.clear();
        let servers = peers.into_iter().zip(notes).collect();
        let mut remote = Remote::take_over(ledger, servers, Settings::default(), 1, &vault).unwrap();
        for (_, handle, _) in &pages {
            crate::Inheritance::count(&mut remote, *handle);
        }
        crate::Inheritance::all_counted(&mut remote);
        assert!(remote.may_have_names() && !remote.servers[1].is_ready());
        let (lookups, questions, answers) = lookups();
        remote.look_up(lookups);
        let address = lent[1].address;
        let thread = std::thread::spawn(move || {
            assert_eq!(questions.recv(), Ok((1, "two.example:1".into())));
            answers.send((1, vec![address])).unwrap();
            assert_eq!(questions.try_recv(), Err(TryRecvError::Empty));
        });
        until(&mut remote, |remote, _, _| remote.servers[1].is_ready());
        thread.join().unwrap();
        read(&mut remote, &pages);
    }

    #[test]
    fn a_pool_of_addresses_looks_nothing_up() {
        let lent = Lent::start();
        let remote = Remote::open(vec![lent.peer()], Settings::default(), None).unwrap();
        assert!(!remote.may_have_names());
        let server = |name: &str| crate::remote::server::Server::new(named(&lent, name), Instant::now());
        assert_eq!(["[::1]:7", "10.0.0.1:7", "a:7"].map(|name| server(name).has_name()), [false, false, true]);
    }
}

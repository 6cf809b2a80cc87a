//! Looking names of servers up for a pool that is open, on a thread beside: that may take seconds. The store asks about servers
//! that it cannot reach (`remote/lookups.rs`).

use std::net::SocketAddr;
use std::sync::mpsc::{Receiver, Sender, channel};

use super::{Host, hosts};
use crate::remote::Remote;
use crate::remote::lookups::{Answer, Lookups, Question};
use crate::remote::protocol::Protocol;

/// See the module's documentation.
pub struct Lookup {
    questions: Receiver<Question>,
    answers: Sender<Answer>,
}

impl Lookup {
    /// For these servers; none where that would never be asked anything.
    pub(super) fn of<P: Protocol>(remote: &mut Remote<P>) -> Option<Self> {
        remote.may_have_names().then(|| {
            let (lookup, lookups) = Self::new();
            remote.look_up(lookups);
            lookup
        })
    }

    fn new() -> (Self, Lookups) {
        let ((questioner, questions), (answers, answered)) = (channel(), channel());
        (Self { questions, answers }, Lookups { questions: questioner, answers: answered })
    }

    /// Answers what is asked, until the pool is closed.
    pub fn run(self) {
        self.run_with(|host| hosts::resolve(host).unwrap_or_default());
    }

    fn run_with(self, resolve: impl Fn(&Host) -> Vec<SocketAddr>) {
        for (server, name) in self.questions {
            let addresses = Host::parse(&name, 0).map(|host| resolve(&host)).unwrap_or_default();
            if self.answers.send((server, addresses)).is_err() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_question_is_answered_until_nobody_asks() {
        let (lookup, Lookups { questions, answers }) = Lookup::new();
        let address = SocketAddr::from(([10, 0, 0, 1], 7070));
        let thread = std::thread::spawn(move || {
            lookup.run_with(|host| if host.name == "known.example" { vec![address] } else { Vec::new() });
        });
        for (server, name, addresses) in
            [(3, "known.example:7070", vec![address]), (0, "unknown.example:7070", vec![]), (1, "no name", vec![])]
        {
            questions.send((server, name.into())).unwrap();
            assert_eq!(answers.recv(), Ok((server, addresses)));
        }
        drop(questions);
        thread.join().unwrap();
        assert!(answers.recv().is_err());
    }

    #[test]
    fn it_ends_when_nobody_hears_the_answer() {
        let (lookup, Lookups { questions, answers }) = Lookup::new();
        drop(answers);
        questions.send((0, "a:1".into())).unwrap();
        lookup.run_with(|_| Vec::new());
    }
}

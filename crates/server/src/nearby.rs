//! Where a worker runs while one client on this host waits for each of its answers.
//!
//! A worker on another CPU must be woken, and in a virtual machine waking a sleeping CPU takes several times as long as
//! serving a page. On the client's own CPU the two take turns. So a worker that has been serving one such connection, a
//! request or two at a time, goes where its packets come from: over loopback that is where the client runs. Clients that
//! keep many requests under way gain from a second CPU, and the worker stays where the kernel puts it.

use std::net::TcpStream;

use rustix::net::sockopt::socket_incoming_cpu;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Turns between two looks at whether the pattern lasts.
const LOOK_EVERY: u32 = 16;
/// Of those, so many must have been for the same client.
const DOMINANT: u32 = 14;
/// More requests in a turn than this come from a client that does not wait: a get and what is fetched ahead are two.
const REQUESTS_MAX: u32 = 2;

/// What a worker has seen lately.
pub(crate) struct Nearby {
    /// Where it may run; none when it stays where it is put.
    allowed: Option<CpuSet>,
    followed: Option<usize>,
    turns: u32,
    /// The connection that is looked at, and the turns that were for it alone.
    candidate: u64,
    waited: u32,
}

impl Nearby {
    /// For the calling thread.
    pub(crate) fn new() -> Self {
        let allowed = sched_getaffinity(None).ok().filter(|cpus| cpus.count() > 1);
        Self { allowed, followed: None, turns: 0, candidate: 0, waited: 0 }
    }

    /// Whether the client runs only while the worker sleeps: then there is nothing to look for awake.
    pub(crate) fn follows(&self) -> bool {
        self.followed.is_some()
    }

    /// A turn served `requests` of connection `token` and of no other, if it is given. `stream` finds its socket, if the
    /// client is on this host.
    pub(crate) fn note<'a>(
        &mut self,
        token: Option<u64>,
        requests: u32,
        stream: impl FnOnce(u64) -> Option<&'a TcpStream>,
    ) {
        let Some(allowed) = self.allowed else { return };
        self.turns += 1;
        let waits = token == Some(self.candidate) && requests <= REQUESTS_MAX;
        self.waited += u32::from(waits);
        let cpu = || {
            let cpu = socket_incoming_cpu(stream(self.candidate)?).ok()? as usize;
            (cpu < CpuSet::MAX_CPU && allowed.is_set(cpu)).then_some(cpu)
        };
        if self.turns < LOOK_EVERY {
            // Whom it follows may be moved hundreds of times a second, and waits several times as long until it is there.
            if waits && self.followed.is_some() {
                let cpu = cpu();
                self.go(allowed, cpu);
            }
            return;
        }
        let cpu = if self.waited >= DOMINANT { cpu() } else { None };
        self.go(allowed, cpu);
        (self.turns, self.waited) = (0, 0);
        self.candidate = token.unwrap_or(self.candidate);
    }

    fn go(&mut self, allowed: CpuSet, cpu: Option<usize>) {
        if cpu == self.followed {
            return;
        }
        // A refusal leaves it where it is, which is slower and not wrong.
        if sched_setaffinity(None, &cpu.map_or(allowed, only)).is_ok() {
            self.followed = cpu;
        }
    }
}

/// That CPU and no other.
fn only(cpu: usize) -> CpuSet {
    let mut cpus = CpuSet::new();
    cpus.set(cpu);
    cpus
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read as _, Write as _};
    use std::net::TcpListener;

    /// The CPUs on which the calling thread may run.
    fn places() -> u32 {
        sched_getaffinity(None).expect("it is known").count()
    }

    /// Both ends of a connection: the client's, the server's.
    fn connection() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let client = TcpStream::connect(listener.local_addr().expect("bound")).expect("connected");
        (client, listener.accept().expect("accepted").0)
    }

    #[test]
    fn it_goes_to_a_client_that_waits_and_leaves_one_that_does_not() {
        let (mut client, mut server) = connection();
        client.write_all(&[1]).expect("sent");
        server.read_exact(&mut [0]).expect("received");
        let before = places();
        let mut nearby = Nearby::new();
        let mut turns = |token, requests| {
            (0..2 * LOOK_EVERY).for_each(|_| nearby.note(token, requests, |_| Some(&server)));
            nearby.follows()
        };
        let may = before > 1;
        assert_eq!((turns(Some(7), 1), places()), (may, 1));
        assert_eq!((turns(Some(7), REQUESTS_MAX + 1), places()), (false, before));
        assert_eq!((turns(Some(7), 1), places()), (may, 1));
        assert_eq!((turns(None, 1), places()), (false, before));
    }

    /// It looked every sixteenth turn: a client that the kernel moves three hundred times a second waited for it half of the time.
    #[test]
    fn it_goes_where_its_client_has_gone_in_the_next_turn() {
        let allowed = sched_getaffinity(None).expect("it is known");
        let mut cpus = (0..CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu));
        let (Some(first), Some(second)) = (cpus.next(), cpus.next()) else {
            return eprintln!("SKIPPED: it needs two CPUs");
        };
        let (mut client, mut server) = connection();
        let (go, goes) = std::sync::mpsc::channel::<usize>();
        let (went, gone) = std::sync::mpsc::channel();
        let sends = std::thread::spawn(move || {
            for cpu in goes {
                sched_setaffinity(None, &only(cpu)).expect("one of those that are allowed");
                client.write_all(&[1]).expect("sent");
                went.send(()).expect("it is waited for");
            }
        });
        let mut nearby = Nearby::new();
        let mut turn = |cpu: usize| {
            go.send(cpu).expect("it runs");
            gone.recv().expect("it runs");
            server.read_exact(&mut [0]).expect("received");
            nearby.note(Some(7), 1, |_| Some(&server));
            nearby.followed
        };
        for _ in 0..2 * LOOK_EVERY {
            turn(first);
        }
        let followed = [first, second, second, first].map(&mut turn);
        drop(go);
        sends.join().expect("no panic");
        assert_eq!(followed, [first, second, second, first].map(Some));
    }
}

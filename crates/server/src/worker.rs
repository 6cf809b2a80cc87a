//! A thread that serves connections.
//!
//! Each connection belongs to one worker from its acceptance to its end. A worker waits for nothing but epoll. What a
//! connection may have done in one turn is limited; what is left is done when others had theirs.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use spillway_wire::hello::Code;

use crate::connection::{Connection, Gone, RECEIVE_BYTES};
use crate::nearby::Nearby;
use crate::parked::Parked;
use crate::pool::Work;
use crate::refusals::Why;
use crate::session::Context;
use crate::shared::Shared;
use crate::stats::Stopwatch;
use crate::sys::epoll::{Bell, Epoll, Event, Interest};

/// How often time limits are looked at.
const TICK: Duration = Duration::from_millis(500);
const BELL: u64 = 0;
const LISTENER: u64 = 1;
const FIRST_CONNECTION: u64 = 2;
const READ: Interest = Interest { read: true, write: false };

/// Looks for events before a worker sleeps, at most: about ten microseconds. To be woken costs whoever sends as much, and in
/// a virtual machine more.
const LOOKS_MAX: u32 = 32;
/// Sleeps after which it is tried again whether looking pays, when it did not.
const SLEEPS_BETWEEN_TRIALS: u32 = 64;

/// Whether to look for a while before sleeping: as long as that mostly finds something.
#[derive(Default)]
struct Spin {
    /// Times in a row that looking was in vain.
    in_vain: u32,
    sleeps: u32,
}

impl Spin {
    fn looks(&mut self) -> u32 {
        if self.in_vain < 4 {
            return LOOKS_MAX;
        }
        self.sleeps += 1;
        if self.sleeps.is_multiple_of(SLEEPS_BETWEEN_TRIALS) { LOOKS_MAX } else { 0 }
    }

    fn ended(&mut self, left: u32, found: bool) {
        if found && left > 0 {
            self.in_vain = 0;
        } else if !found {
            self.in_vain = self.in_vain.saturating_add(1);
        }
    }
}

/// What other threads have for a worker.
enum Letter {
    /// A connection that it is to serve.
    Connection(TcpStream),
    /// A get whose pages were read, and the connection that it belongs to.
    Read(Box<Parked>, u64),
}

/// A worker's letters.
pub(crate) struct Inbox {
    letters: Mutex<Vec<Letter>>,
    bell: Bell,
}

impl Inbox {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { letters: Mutex::default(), bell: Bell::new()? })
    }

    fn send(&self, letter: Letter) {
        self.letters.lock().expect("nothing panics with the letters locked").push(letter);
        self.wake();
    }

    /// Hands a connection over, unless so many wait for the worker already.
    fn offer(&self, stream: TcpStream, most: usize) -> Result<(), TcpStream> {
        let mut letters = self.letters.lock().expect("nothing panics with the letters locked");
        if letters.iter().filter(|letter| matches!(letter, Letter::Connection(_))).count() >= most {
            return Err(stream);
        }
        letters.push(Letter::Connection(stream));
        drop(letters);
        self.wake();
        Ok(())
    }

    /// Hands a get back whose pages were read.
    pub(crate) fn hand_back(&self, parked: Parked, connection: u64) {
        self.send(Letter::Read(Box::new(parked), connection));
    }

    /// Makes the worker look up.
    pub(crate) fn wake(&self) {
        self.bell.ring();
    }

    fn take(&self) -> Vec<Letter> {
        self.bell.hush();
        std::mem::take(&mut *self.letters.lock().expect("nothing panics with the letters locked"))
    }
}

/// A worker.
pub(crate) struct Worker {
    shared: Arc<Shared>,
    /// Which one it is.
    at: usize,
    inboxes: Arc<[Arc<Inbox>]>,
    /// One worker has it.
    listener: Option<TcpListener>,
    epoll: Epoll,
    connections: HashMap<u64, Connection>,
    /// Connections that had not said hello when it was last looked, the oldest first.
    strangers: VecDeque<u64>,
    /// Connections with requests left from their last turn.
    behind: Vec<u64>,
    next_connection: u64,
    /// The worker that gets the next connection.
    next_worker: usize,
    work: Work,
    buffer: Box<[u8]>,
    /// Requests served in this turn.
    requests: u32,
}

impl Worker {
    pub(crate) fn new(
        shared: Arc<Shared>,
        at: usize,
        inboxes: Arc<[Arc<Inbox>]>,
        listener: Option<TcpListener>,
    ) -> io::Result<Self> {
        let epoll = Epoll::new()?;
        epoll.add(inboxes[at].bell.fd(), BELL, READ)?;
        if let Some(listener) = &listener {
            listener.set_nonblocking(true)?;
            epoll.add(listener.as_raw_fd(), LISTENER, READ)?;
        }
        Ok(Self {
            shared,
            at,
            inboxes,
            listener,
            epoll,
            connections: HashMap::new(),
            strangers: VecDeque::new(),
            behind: Vec::new(),
            next_connection: FIRST_CONNECTION,
            next_worker: 0,
            work: Work::default(),
            buffer: vec![0; RECEIVE_BYTES].into_boxed_slice(),
            requests: 0,
        })
    }

    /// Serves until the server ends.
    pub(crate) fn run(mut self) -> io::Result<()> {
        let mut events: Vec<Event> = Vec::new();
        let began = Instant::now();
        let (mut watch, mut ticked) = (Stopwatch::new(began), began);
        let (mut spin, mut nearby) = (Spin::default(), Nearby::new());
        while !self.shared.ending.load(Relaxed) {
            let before = Instant::now();
            events.clear();
            if !nearby.follows() && self.behind.is_empty() {
                self.look(&mut events, &mut spin)?;
            }
            if !self.behind.is_empty() {
                events.extend(self.epoll.wait(Duration::ZERO)?);
            } else if events.is_empty() {
                // Nothing to do at once: what was kept for the next put goes back.
                self.shared.pool.settle(&mut self.work);
                let to_tick = (ticked + TICK).saturating_duration_since(before);
                // Rounded up, as epoll counts whole milliseconds: else it would spin through the last one.
                events.extend(self.epoll.wait(to_tick + Duration::from_millis(1))?);
            }
            let now = Instant::now();
            watch.waited(before, now, &self.shared.meters[self.at]);
            self.requests = 0;
            let behind = std::mem::take(&mut self.behind);
            for event in &events {
                self.serve(*event, now);
            }
            for token in behind {
                self.with(token, now, |connection, _, cx| connection.catch_up(cx));
            }
            let sole = if let [event] = events[..] { Some(event.token) } else { None };
            nearby.note(sole, self.requests, |token| self.connections.get(&token)?.on_this_host());
            if now.saturating_duration_since(ticked) >= TICK {
                ticked = now;
                self.tick(now);
            }
        }
        self.finish();
        Ok(())
    }

    /// Takes the events that there are or that come soon, where it has been worth the while to wait for those awake.
    fn look(&mut self, events: &mut Vec<Event>, spin: &mut Spin) -> io::Result<()> {
        let mut looks = spin.looks();
        loop {
            events.extend(self.epoll.wait(Duration::ZERO)?);
            if !events.is_empty() || looks == 0 {
                spin.ended(looks, !events.is_empty());
                return Ok(());
            }
            looks -= 1;
        }
    }

    fn serve(&mut self, event: Event, now: Instant) {
        match event.token {
            BELL => self.read_letters(now),
            LISTENER => self.accept(now),
            token => {
                self.with(token, now, |connection, buffer, cx| {
                    if event.readable {
                        connection.receive(buffer, cx)?
                    } else {
                        connection.send(cx)?
                    }
                    // Neither reading nor writing would find out, and epoll says it without end.
                    let is_over = event.broken && connection.wanted(cx.shared) == Interest::default();
                    if is_over { Err(Gone) } else { Ok(()) }
                });
            }
        }
    }

    /// Does something with a connection, and afterwards what follows from it.
    fn with(
        &mut self,
        token: u64,
        now: Instant,
        act: impl FnOnce(&mut Connection, &mut [u8], &mut Context<'_>) -> Result<(), Gone>,
    ) {
        let Some(connection) = self.connections.get_mut(&token) else { return };
        let mut cx = Context::new(&self.shared, &mut self.work, now);
        let went = act(connection, &mut self.buffer, &mut cx);
        let (parked, requests, refused) = (cx.parked, cx.requests, cx.refused);
        if let Some(why) = refused {
            self.shared.refused(connection.peer, why);
        }
        self.requests += u32::try_from(requests).unwrap_or(u32::MAX);
        if requests > 0 {
            self.shared.meters[self.at].record(now.elapsed(), requests);
        }
        for parked in parked {
            self.park(parked, token);
        }
        let connection = self.connections.get_mut(&token).filter(|_| went.is_ok());
        let kept = connection.is_some_and(|connection| {
            if connection.session.is_behind() && !self.behind.contains(&token) {
                self.behind.push(token);
            }
            let wanted = connection.wanted(&self.shared);
            let same = wanted == connection.interest;
            connection.interest = wanted;
            same || self.epoll.change(connection.fd(), token, wanted).is_ok()
        });
        if !kept {
            self.drop_connection(token);
        }
    }

    fn park(&self, mut parked: Parked, token: u64) {
        parked.back = Some((Arc::clone(&self.inboxes[self.at]), token));
        let undelivered = match &self.shared.to_keeper {
            Some(keeper) => keeper.send(parked).err().map(|error| error.0),
            None => Some(parked),
        };
        // Only while the server ends.
        undelivered.into_iter().for_each(|parked| parked.discard(&self.shared.pool));
    }

    fn read_letters(&mut self, now: Instant) {
        for letter in self.inboxes[self.at].take() {
            match letter {
                Letter::Connection(stream) => self.add(stream, now),
                Letter::Read(parked, token) if self.connections.contains_key(&token) => {
                    self.with(token, now, |connection, _, cx| {
                        connection.session.resume(*parked, cx.shared);
                        connection.send(cx)
                    });
                }
                Letter::Read(parked, _) => parked.discard(&self.shared.pool),
            }
        }
    }

    fn accept(&mut self, now: Instant) {
        let Some(listener) = &self.listener else { return };
        // A failure concerns the one connection, or will come again: nobody is there to be told.
        let Ok((stream, peer)) = listener.accept() else { return };
        self.next_worker = (self.next_worker + 1) % self.inboxes.len();
        // None of these has said hello. More of them come only faster than the worker looks.
        if let Err(stream) = self.inboxes[self.next_worker].offer(stream, self.shared.limits.strangers_max()) {
            self.turn_away(stream, peer, now);
        }
    }

    /// Refuses a connection that is nobody's yet.
    fn turn_away(&mut self, stream: TcpStream, peer: SocketAddr, now: Instant) {
        self.shared.refused(peer, Why::Crowd(self.shared.limits.strangers_max()));
        if let Ok(mut connection) = Connection::new(stream, &self.shared, now) {
            connection.end(Code::Busy, &mut Context::new(&self.shared, &mut self.work, now));
            connection.session.close(&self.shared);
        }
    }

    /// Makes room for one more connection without a hello. The oldest goes: a client that is there to be served says hello
    /// at once, so whoever would keep it out must connect faster than that, again and again.
    fn make_room(&mut self, now: Instant) {
        let is_new = |token: &u64| self.connections.get(token).is_some_and(|connection| connection.session.is_new());
        self.strangers.retain(is_new);
        let most = self.shared.limits.strangers_max();
        // This worker's share, as each gets as many of the new ones.
        let share = most.div_ceil(self.inboxes.len());
        while self.strangers.len() >= share
            && let Some(oldest) = self.strangers.pop_front()
        {
            self.with(oldest, now, |connection, _, cx| {
                cx.refused = Some(Why::Crowd(most));
                connection.end(Code::Busy, cx);
                Err(Gone)
            });
        }
    }

    fn add(&mut self, stream: TcpStream, now: Instant) {
        self.make_room(now);
        let token = self.next_connection;
        self.next_connection += 1;
        // Whoever has gone already is not missed.
        let Ok(mut connection) = Connection::new(stream, &self.shared, now) else { return };
        connection.interest = READ;
        let added = self.epoll.add(connection.fd(), token, READ);
        self.connections.insert(token, connection);
        self.strangers.push_back(token);
        self.with(token, now, |connection, _, cx| added.map_or(Err(Gone), |()| connection.send(cx)));
    }

    fn drop_connection(&mut self, token: u64) {
        if let Some(connection) = self.connections.remove(&token) {
            connection.session.close(&self.shared);
        }
    }

    fn tick(&mut self, now: Instant) {
        let tokens: Vec<u64> = self.connections.keys().copied().collect();
        for token in tokens {
            self.with(token, now, |connection, _, cx| connection.tick(cx));
        }
    }

    /// Says goodbye to everyone.
    fn finish(&mut self) {
        let now = Instant::now();
        let tokens: Vec<u64> = self.connections.keys().copied().collect();
        for token in tokens {
            self.with(token, now, |connection, _, cx| {
                connection.end(Code::Ending, cx);
                Err(Gone)
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::num::NonZeroU32;
    use std::sync::mpsc;

    use spillway_core::PAGE_BYTES;
    use spillway_wire::hello::{CHALLENGE_BYTES, Hello, Versions, decode_challenge};
    use spillway_wire::request::{self, Class, PutPage};
    use spillway_wire::{Content, Key, checksum};

    use super::*;
    use crate::config::{Config, Limits, SpillConfig};
    use crate::keeper::send_away;
    use crate::server::prepare;

    /// Waits for something; fails naming it.
    fn soon(what: &str, mut condition: impl FnMut() -> bool) {
        let began = Instant::now();
        while !condition() {
            assert!(began.elapsed() < Duration::from_secs(5), "waited in vain: {what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn one_that_breaks_off_while_nothing_is_wanted_of_it_is_dropped() {
        let path = std::env::temp_dir().join(format!("spillway-worker-{}", std::process::id()));
        let mut config = Config::new(([127, 0, 0, 1], 0).into(), 4 << 20);
        config.spill = Some(SpillConfig { path, bytes: 1 << 20 });
        config.limits = Limits { window_bytes: PAGE_BYTES, ..Limits::default() };
        let listener = TcpListener::bind(config.listen).expect("a port");
        let address = listener.local_addr().expect("bound");
        let (to_keeper, gets) = mpsc::channel();
        let mut shared = prepare(config).expect("memory");
        shared.to_keeper = Some(to_keeper);
        let shared = Arc::new(shared);
        let inboxes: Arc<[_]> = [Arc::new(Inbox::new().expect("a bell"))].into();
        let worker = Worker::new(Arc::clone(&shared), 0, Arc::clone(&inboxes), Some(listener)).expect("descriptors");
        let serving = std::thread::spawn(|| worker.run());

        let mut client = TcpStream::connect(address).expect("connected");
        let mut challenge = [0; CHALLENGE_BYTES];
        client.read_exact(&mut challenge).expect("a challenge");
        let challenge = decode_challenge(&challenge).expect("ours");
        let (key, page) = (Key { region: 1, index: 1 }, [7; PAGE_BYTES]);
        let hello =
            Hello { versions: Versions::default(), create: true, take_over: false, tenant: [1; 16], nonce: [9; 32] };
        let mut said = hello.encode(b"", &[1; 16], &challenge).to_vec();
        request::put(&mut said, 1, &[PutPage { key, checksum: checksum(&page), content: Content::Bytes(&page) }]);
        client.write_all(&said).expect("sent");
        soon("the page", || shared.pool.holdings().distinct == 1);
        // Twice, as the first time finds it used.
        assert!([(); 2].map(|()| send_away(&shared.pool, [NonZeroU32::MIN]).is_ok_and(|moved| moved == 1))[1]);
        let mut get = Vec::new();
        request::get(&mut get, 2, Class::Demand, &[key]);
        client.write_all(&get).expect("sent");
        // Nobody reads the page, so its answer fills the window for as long as the connection lives.
        let parked = gets.recv_timeout(Duration::from_secs(5)).expect("it waits for the file");
        // With answers unread, this is a reset.
        drop(client);
        soon("the end of the connection", || shared.connections.load(Relaxed) == 0);
        assert!(!parked.is_wanted());

        parked.discard(&shared.pool);
        shared.ending.store(true, Relaxed);
        inboxes[0].wake();
        serving.join().expect("no panic").expect("a clean end");
    }

    #[test]
    fn few_connections_wait_for_a_worker() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("bound");
        let inbox = Inbox::new().expect("a bell");
        let offer = || inbox.offer(TcpStream::connect(address).expect("connected"), 2).is_ok();
        assert_eq!([(); 3].map(|()| offer()), [true, true, false]);
        assert_eq!(inbox.take().len(), 2);
    }
}

//! Stands between a pager and a server, and breaks connections on request.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use spillway_wire::answer::{Answer, AnswerBody};

/// Passes bytes on. Its threads end with the connections.
pub struct Proxy {
    pub port: u16,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    /// Bytes to the pager after which the connection is cut; zero for never.
    cut_after: AtomicU64,
    /// What comes from the server is damaged: one bit of each so many bytes.
    damage_every: AtomicU64,
    refuses: AtomicBool,
    holds: AtomicBool,
    /// How many connections there were, and how many of the first of them pass nothing to the server for now.
    connections: AtomicU64,
    withheld: AtomicU64,
    /// How many of the first of them give the pager no answers to gets.
    swallowing: AtomicU64,
    open: Mutex<Vec<TcpStream>>,
}

impl Proxy {
    pub fn to(server: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let state = Arc::new(State::default());
        let shared = Arc::clone(&state);
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                if shared.refuses.load(SeqCst) {
                    continue;
                }
                let Ok(server) = TcpStream::connect(("127.0.0.1", server)) else { continue };
                shared.open.lock().unwrap().extend([client.try_clone().unwrap(), server.try_clone().unwrap()]);
                let (from, to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                let nth = shared.connections.fetch_add(1, SeqCst);
                let state = Arc::clone(&shared);
                std::thread::spawn(move || pass(from, to, Way::Up(&state, nth)));
                let state = Arc::clone(&shared);
                std::thread::spawn(move || pass(server, client, Way::Down(&state, nth)));
            }
        });
        Self { port, state }
    }

    /// Cuts one connection after so many bytes from the server, wherever in a frame that is.
    pub fn cut_after(&self, bytes: u64) {
        self.state.cut_after.store(bytes, SeqCst);
    }

    pub fn damage_every(&self, bytes: u64) {
        self.state.damage_every.store(bytes, SeqCst);
    }

    /// Takes no new connections, or does again.
    pub fn refuse(&self, refuse: bool) {
        self.state.refuses.store(refuse, SeqCst);
    }

    /// Passes nothing on that comes from the server, or does again; the connections stay.
    pub fn hold(&self, hold: bool) {
        self.state.holds.store(hold, SeqCst);
    }

    /// Passes everything on but answers to gets, on the connections that there are. Nothing may be under way on them.
    pub fn swallow_gets(&self) {
        self.state.swallowing.store(self.connections(), SeqCst);
    }

    /// How many connections there were.
    pub fn connections(&self) -> u64 {
        self.state.connections.load(SeqCst)
    }

    /// What the pager sends meanwhile, on the connections that there are, reaches the server only once what this returns is
    /// dropped. The pager loses those connections afterwards.
    pub fn delay_and_part(&self, meanwhile: impl FnOnce()) -> Delay<'_> {
        self.state.withheld.store(self.state.connections.load(SeqCst), SeqCst);
        meanwhile();
        for socket in self.state.open.lock().unwrap().iter() {
            // Ends what goes to the pager; what goes to the server is still to come.
            if socket.local_addr().is_ok_and(|address| address.port() == self.port) {
                let _ = socket.shutdown(Shutdown::Write);
            }
        }
        Delay(&self.state)
    }

    pub fn cut(&self) {
        for socket in self.state.open.lock().unwrap().drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

/// See [`Proxy::delay_and_part`].
pub struct Delay<'a>(&'a State);

impl Drop for Delay<'_> {
    fn drop(&mut self) {
        self.0.withheld.store(0, SeqCst);
    }
}

/// Bytes that go up to the server, or down to the pager, on the nth connection.
#[derive(Clone, Copy)]
enum Way<'a> {
    Up(&'a State, u64),
    Down(&'a State, u64),
}

impl Way<'_> {
    fn waits(self) -> bool {
        match self {
            Way::Up(state, nth) => nth < state.withheld.load(SeqCst),
            Way::Down(state, _) => state.holds.load(SeqCst),
        }
    }

    fn swallows(self) -> bool {
        matches!(self, Way::Down(state, nth) if nth < state.swallowing.load(SeqCst))
    }
}

fn pass(mut from: TcpStream, mut to: TcpStream, way: Way<'_>) {
    let state = if let Way::Down(state, _) = way { Some(state) } else { None };
    let mut buffer = [0; 16 << 10];
    let mut passed = 0;
    let (mut frames, mut others) = (Vec::new(), Vec::new());
    while let Ok(bytes @ 1..) = from.read(&mut buffer) {
        let mut bytes = &mut buffer[..bytes];
        while way.waits() {
            std::thread::sleep(Duration::from_millis(5));
        }
        if way.swallows() {
            frames.extend_from_slice(bytes);
            others.clear();
            take_others(&mut frames, &mut others);
            bytes = &mut others;
        }
        let cut_after = state.map_or(0, |state| state.cut_after.load(SeqCst));
        let last = cut_after > 0 && passed + bytes.len() as u64 > cut_after;
        if last {
            state.into_iter().for_each(|state| state.cut_after.store(0, SeqCst));
            let keep = usize::try_from(cut_after.saturating_sub(passed)).unwrap();
            bytes = &mut bytes[..keep];
        }
        let every = state.map_or(0, |state| state.damage_every.load(SeqCst));
        for (at, byte) in bytes.iter_mut().enumerate() {
            if every > 0 && (passed + at as u64) % every == every - 1 {
                *byte ^= 1;
            }
        }
        passed += bytes.len() as u64;
        if to.write_all(bytes).is_err() || last {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}

/// Takes whole frames; `others` gets those that answer something else than gets.
fn take_others(frames: &mut Vec<u8>, others: &mut Vec<u8>) {
    while let Some((answer, bytes)) = Answer::decode(frames).unwrap() {
        if !matches!(answer.body, AnswerBody::Get(_)) {
            others.extend_from_slice(&frames[..bytes]);
        }
        frames.drain(..bytes);
    }
}

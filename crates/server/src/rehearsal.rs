//! A server without sockets or threads, for tests and fuzzing: bytes in, bytes out.

use std::sync::Arc;
use std::time::Instant;

use std::io::IoSlice;

use spillway_wire::hello::Nonce;

use crate::config::Config;
use crate::pool::Work;
use crate::server::{Error, prepare};
use crate::session::{Context, Session};
use crate::shared::Shared;

/// The state of a server.
#[derive(Clone)]
pub struct Stage(Arc<Shared>);

impl Stage {
    /// As [`crate::Server::bind`], without an address.
    ///
    /// # Errors
    /// When the memory or the spill file cannot be had.
    pub fn new(config: Config) -> Result<Self, Error> {
        prepare(config).map(|shared| Self(Arc::new(shared)))
    }

    /// Whether the books agree with each other: what is counted, what tables hold, and what memory says. To be asked while
    /// no one is being served.
    #[must_use]
    pub fn is_consistent(&self) -> bool {
        let (pool, held) = (&self.0.pool, self.0.pool.holdings());
        let keys = self.0.tenants.keys();
        let pages_once_used = u64::from(pool.pages.numbers_used());
        held.keys == keys
            && held.distinct + held.zeros <= keys
            && held.distinct + pool.free.numbers() >= pages_once_used
            && pool.budget.used() <= pool.budget.capacity()
    }

    /// A connection, which has sent its challenge already.
    #[must_use]
    pub fn connect(&self, challenge: Nonce) -> Peer {
        Peer {
            stage: self.clone(),
            session: Some(Session::new(challenge, &self.0)),
            work: Work::default(),
            pending: Vec::new(),
        }
    }
}

/// The server's end of a connection.
pub struct Peer {
    stage: Stage,
    session: Option<Session>,
    work: Work,
    pending: Vec<u8>,
}

impl Peer {
    /// Carries out what these bytes, after those before, ask for, and returns what the server sends. Pages in the spill
    /// file are read at once.
    pub fn feed(&mut self, bytes: &[u8]) -> Vec<u8> {
        let shared = &self.stage.0;
        let Some(session) = &mut self.session else { return Vec::new() };
        let mut sent = Vec::new();
        self.pending.extend_from_slice(bytes);
        let mut cx = Context::new(shared, &mut self.work, Instant::now());
        loop {
            cx.next_turn();
            let done = session.input(&self.pending, &mut cx);
            self.pending.drain(..done);
            for mut parked in std::mem::take(&mut cx.parked) {
                parked.read(&shared.pool);
                session.resume(parked, shared);
            }
            let queued = session.output.queued();
            while session.output.queued() > 0 {
                let mut slices = [IoSlice::new(&[]); 3];
                let count = session.output.slices(&shared.pool, &mut slices);
                let before = sent.len();
                slices[..count].iter().for_each(|slice| sent.extend_from_slice(slice));
                session.output.advance(sent.len() - before, &shared.pool);
            }
            session.go_on(&mut cx);
            let waits = session.output.queued() > 0 || !cx.parked.is_empty() || session.is_behind();
            if queued == 0 && !waits {
                break;
            }
        }
        shared.pool.settle(&mut self.work);
        sent
    }

    /// Whether the server ended the connection.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.session.as_ref().is_none_or(Session::is_closing)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        if let Some(session) = self.session.take() {
            session.close(&self.stage.0);
        }
    }
}

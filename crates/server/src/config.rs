//! What a server is started with.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use spillway_wire::tls;

use crate::pool::Dedupe;
use crate::refusals::Refusals;

/// The least memory that is worth lending.
pub const MEMORY_MIN_BYTES: u64 = 1 << 20;

/// What a server is started with.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where to listen; port 0 for any that is free.
    pub listen: SocketAddr,
    /// DRAM for pages and their indices, at least [`MEMORY_MIN_BYTES`]. Buffers of connections come on top: at most a few
    /// MiB for each that has much under way; 70 KiB until its hello.
    pub memory_bytes: u64,
    /// Which identical pages are kept once.
    pub dedupe: Dedupe,
    /// Whether pages are kept compressed, where that saves memory.
    pub compress: bool,
    /// What clients must know; empty for nothing.
    pub token: Vec<u8>,
    /// How connections are encrypted, and whose are taken; `None` for plain ones.
    pub tls: Option<tls::Server>,
    /// Where cold pages go when the memory is full.
    pub spill: Option<SpillConfig>,
    /// Threads that serve connections; at least one.
    pub workers: usize,
    /// Times and numbers that are limited.
    pub limits: Limits,
    /// Who hears of peers that are not let in.
    pub refusals: Option<Refusals>,
}

/// A file for cold pages.
#[derive(Clone, Debug)]
pub struct SpillConfig {
    /// Must not exist. It loses its name at once.
    pub path: PathBuf,
    /// How large it may get.
    pub bytes: u64,
}

/// Times and numbers that are limited.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// How long a tenant's pages are kept while it has no connection.
    pub lease: Duration,
    /// How often clients must say something; three times as long without a word or a byte taken ends a connection.
    pub heartbeat: Duration,
    /// How long a client may take to say hello, the handshake of TLS included.
    pub hello: Duration,
    /// Bytes of answers that may wait on a connection.
    pub window_bytes: usize,
    /// Tenants.
    pub tenants_max: usize,
    /// Connections that were let in. A quarter as many may be there besides that have not said hello yet.
    pub connections_max: usize,
}

impl Limits {
    /// Connections that may be there without a hello. They are counted apart: strangers are not to keep clients out.
    pub(crate) fn strangers_max(&self) -> usize {
        (self.connections_max / 4).max(1)
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            lease: Duration::from_secs(60),
            heartbeat: Duration::from_secs(5),
            hello: Duration::from_secs(10),
            // A 25 Gbit/s link fills it in 1.3 ms: many round trips within a data centre.
            window_bytes: 4 << 20,
            tenants_max: 1024,
            // Half of the descriptors that a process usually may have.
            connections_max: 512,
        }
    }
}

impl Config {
    /// As much memory as this at an address, everything else as it is by default.
    #[must_use]
    pub fn new(listen: SocketAddr, memory_bytes: u64) -> Self {
        Self {
            listen,
            memory_bytes,
            dedupe: Dedupe::default(),
            compress: false,
            token: Vec::new(),
            tls: None,
            spill: None,
            workers: std::thread::available_parallelism().map_or(1, usize::from),
            limits: Limits::default(),
            refusals: None,
        }
    }
}

//! Servers to test against: memcached and Redis as the distribution has them, on ports of their own.

#[path = "../../../../server/tests/common/certificates.rs"]
pub mod certificates;
pub mod contract;
pub mod lender;
pub mod proxy;
pub mod scripted;

use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering::SeqCst};
use std::time::{Duration, Instant};

use spillway_core::{PAGE_BYTES, Page};
use spillway_store::blocking::Client;
use spillway_store::pool;

/// A server that ends with the test.
pub struct Server {
    child: Child,
    pub port: u16,
}

impl Server {
    /// `None` when the program is not installed; then the test has nothing to test against. With `SPILLWAY_TESTS_STRICT=1` it fails.
    pub fn start(program: &str, arguments: impl Fn(u16) -> Vec<String>) -> Option<Self> {
        let port = free_port();
        Self::start_on(program, port, arguments)
    }

    pub fn start_on(program: &str, port: u16, arguments: impl Fn(u16) -> Vec<String>) -> Option<Self> {
        let mut command = Command::new(program);
        command.args(arguments(port)).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn();
        let Ok(child) = child else {
            let strict = std::env::var("SPILLWAY_TESTS_STRICT").is_ok_and(|strict| strict == "1");
            assert!(!strict, "{program} is not installed: scripts/setup-tests installs it");
            eprintln!("SKIPPED: {program} is not installed");
            return None;
        };
        let started = Instant::now();
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(started.elapsed() < Duration::from_secs(20), "{program} does not start");
            std::thread::sleep(Duration::from_millis(10));
        }
        Some(Self { child, port })
    }

    pub fn memcached(more: &[&str]) -> Option<Self> {
        Self::start("memcached", |port| memcached_arguments(port, more))
    }

    pub fn redis(more: &[&str]) -> Option<Self> {
        Self::start("redis-server", |port| redis_arguments(port, more))
    }

    pub fn signal(&self, signal: &str) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
    }

    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

pub fn memcached_arguments(port: u16, more: &[&str]) -> Vec<String> {
    let common = ["-l", "127.0.0.1", "-U", "0", "-u", "nobody", "-t", "1", "-p"];
    common.iter().chain(&[&*port.to_string()]).chain(more).map(ToString::to_string).collect()
}

pub fn redis_arguments(port: u16, more: &[&str]) -> Vec<String> {
    let common = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", "/tmp", "--port"];
    common.iter().chain(&[&*port.to_string()]).chain(more).map(ToString::to_string).collect()
}

/// Below those that the kernel gives to connections, and given once by each test program. Not bound to be tried: what another test
/// starts at that moment would keep it bound until it runs its own program.
pub fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    loop {
        let offset = u16::try_from(std::process::id() % 24).unwrap() * 400 + NEXT.fetch_add(1, SeqCst) % 400;
        if TcpStream::connect(("127.0.0.1", 20_000 + offset)).is_err() {
            return 20_000 + offset;
        }
    }
}

pub fn client(url: &str) -> Client {
    match pool::open(url) {
        Ok(opened) => Client::new(opened.store),
        Err(error) => panic!("{url}: {error}"),
    }
}

/// Why a pool is not opened.
pub fn refusal(url: &str) -> String {
    match pool::open(url) {
        Ok(_) => panic!("{url} was opened"),
        Err(error) => {
            let line = error.to_string();
            assert!(!line.contains('\n'), "{line:?}");
            line
        }
    }
}

/// A page told by its number: a part of it noise, the rest repeats.
pub fn page(number: u64) -> Page {
    let mut page = [number.to_le_bytes()[0]; PAGE_BYTES];
    let mut state = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let noisy = PAGE_BYTES / 4 * usize::try_from(number % 5).unwrap();
    page[..8].copy_from_slice(&number.to_le_bytes());
    for word in page[8..].chunks_exact_mut(8).take(noisy / 8) {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mixed = (state ^ state >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word.copy_from_slice(&(mixed ^ mixed >> 32).to_le_bytes());
    }
    page
}

pub const PATIENCE: Duration = Duration::from_secs(5);

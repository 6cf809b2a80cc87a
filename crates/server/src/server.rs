//! Starting and ending.

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Instant;

use crate::config::{Config, MEMORY_MIN_BYTES};
use crate::keeper::Keeper;
use crate::pool::Pool;
use crate::shared::Shared;
use crate::spill::Spill;
use crate::stats::{self, Meter};
use crate::tenants::Tenants;
use crate::worker::{Inbox, Worker};

/// Why a server cannot be started, or ended before its time.
#[derive(Debug)]
pub enum Error {
    /// It cannot listen there.
    Listen(SocketAddr, io::Error),
    /// Too little memory to lend.
    TooLittle(u64),
    /// The kernel does not give the memory.
    Memory(u64, io::Error),
    /// The spill file cannot be made.
    Spill(PathBuf, io::Error),
    /// A thread, or what it waits with, cannot be had.
    Thread(io::Error),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Listen(address, error) => {
                write!(f, "cannot listen on {address}: {}; choose another with --listen", plain(error))
            }
            Self::TooLittle(bytes) => {
                write!(f, "{bytes} bytes are too little to lend: give at least {}M", MEMORY_MIN_BYTES >> 20)
            }
            Self::Memory(bytes, error) => {
                let mib = bytes >> 20;
                write!(f, "the kernel does not map {mib} MiB: {}; lend less with --memory", plain(error))
            }
            Self::Spill(path, error) => write!(
                f,
                "cannot make the spill file `{}`: {}; name a file that does not exist, in a directory that you may write to",
                path.display().to_string().escape_debug(),
                plain(error)
            ),
            Self::Thread(error) => {
                write!(f, "a thread cannot be had: {}; raise the limits of processes and open files", plain(error))
            }
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Listen(_, error) | Self::Memory(_, error) | Self::Spill(_, error) | Self::Thread(error) => {
                Some(error)
            }
            Self::TooLittle(_) => None,
        }
    }
}

/// An error of the system without its number.
fn plain(error: &io::Error) -> String {
    let text = error.to_string();
    text.rfind(" (os error").map_or(text.clone(), |end| text[..end].to_owned())
}

/// A server that listens already.
pub struct Server {
    shared: Arc<Shared>,
    address: SocketAddr,
    listener: TcpListener,
    inboxes: Arc<[Arc<Inbox>]>,
    keeper: Keeper,
}

/// Ends a server, and tells how it is, from any thread.
#[derive(Clone)]
pub struct Stop {
    shared: Arc<Shared>,
    inboxes: Arc<[Arc<Inbox>]>,
}

impl Stop {
    /// Makes [`Server::run`] return soon.
    pub fn stop(&self) {
        self.shared.ending.store(true, Relaxed);
        self.inboxes.iter().for_each(|inbox| inbox.wake());
    }

    /// The share of its time that it is busy.
    #[must_use]
    pub fn load_percent(&self) -> u8 {
        let percent = u16::from(stats::load(&self.shared.meters)) * 100 / u16::from(u8::MAX);
        u8::try_from(percent).expect("at most 100")
    }
}

impl Server {
    /// Maps the memory, makes the spill file and listens.
    ///
    /// # Errors
    /// When any of that fails; nothing is left behind then.
    pub fn bind(config: Config) -> Result<Self, Error> {
        let listener = TcpListener::bind(config.listen).map_err(|error| Error::Listen(config.listen, error))?;
        let address = listener.local_addr().map_err(|error| Error::Listen(config.listen, error))?;
        let workers = config.workers.max(1);
        let (to_keeper, gets) = mpsc::channel();
        let mut shared = prepare(config)?;
        shared.to_keeper = Some(to_keeper);
        let shared = Arc::new(shared);
        let inboxes: io::Result<Arc<[Arc<Inbox>]>> = (0..workers).map(|_| Inbox::new().map(Arc::new)).collect();
        let inboxes = inboxes.map_err(Error::Thread)?;
        let keeper = Keeper::new(Arc::clone(&shared), gets);
        Ok(Self { shared, address, listener, inboxes, keeper })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What ends it.
    #[must_use]
    pub fn stopper(&self) -> Stop {
        Stop { shared: Arc::clone(&self.shared), inboxes: Arc::clone(&self.inboxes) }
    }

    /// Serves until it is stopped. Whoever is connected then is told.
    ///
    /// # Errors
    /// When threads cannot be started, or can wait no more.
    pub fn run(self) -> Result<(), Error> {
        let stop = self.stopper();
        let mut workers = Vec::new();
        let mut listener = Some(self.listener);
        for at in 0..self.inboxes.len() {
            let worker = Worker::new(Arc::clone(&self.shared), at, Arc::clone(&self.inboxes), listener.take());
            workers.push(worker.map_err(Error::Thread)?);
        }
        let keeper = self.keeper;
        let mut threads: Vec<io::Result<JoinHandle<io::Result<()>>>> = vec![spawn("spillway-keeper", move || {
            keeper.run();
            Ok(())
        })];
        for worker in workers {
            let stop = stop.clone();
            threads.push(spawn("spillway-serve", move || {
                let ran = worker.run();
                // One that fails takes the others along: half a server would leave clients hanging.
                stop.stop();
                ran
            }));
        }
        if threads.iter().any(Result::is_err) {
            stop.stop();
        }
        let mut first_error = Ok(());
        for thread in threads {
            let ended =
                thread.and_then(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
            first_error = first_error.and(ended);
        }
        first_error.map_err(Error::Thread)
    }
}

fn spawn(name: &str, run: impl FnOnce() -> io::Result<()> + Send + 'static) -> io::Result<JoinHandle<io::Result<()>>> {
    std::thread::Builder::new().name(name.into()).spawn(run)
}

/// All that threads share, without a keeper yet.
pub(crate) fn prepare(config: Config) -> Result<Shared, Error> {
    if config.memory_bytes < MEMORY_MIN_BYTES {
        return Err(Error::TooLittle(config.memory_bytes));
    }
    let spill = match config.spill {
        Some(spill) => {
            Some(Spill::create(&spill.path, spill.bytes).map_err(|error| Error::Spill(spill.path.clone(), error))?)
        }
        None => None,
    };
    let pool = Pool::new(config.memory_bytes, config.dedupe, config.compress, spill)
        .map_err(|error| Error::Memory(config.memory_bytes, error))?;
    Ok(Shared {
        pool,
        tenants: Tenants::new(config.limits.tenants_max, config.limits.lease),
        token: config.token,
        tls: config.tls,
        limits: config.limits,
        meters: (0..config.workers.max(1)).map(|_| Meter::new()).collect(),
        connections: AtomicUsize::new(0),
        admitted: AtomicUsize::new(0),
        began: Instant::now(),
        ending: AtomicBool::new(false),
        leaving: AtomicBool::new(false),
        refusals: config.refusals,
        to_keeper: None,
    })
}

//! `spillway serve`: lends this host's memory to pagers on others.
//!
//! Invariants: it listens on the network only where clients must know a token or show a certificate; it ends only by a signal, or when it cannot
//! go on; pages end with it.

mod join;

use crate::failure::{FAILED, Failure};
use crate::{say, sys};
use spillway_core::size::{Bytes, parse_bytes};
use spillway_server::{Config, Dedupe, Error, Limits, MEMORY_MIN_BYTES, Refusal, Server, SpillConfig, tls};
use std::fs;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How often it is looked whether the server has ended by itself.
const TICK: Duration = Duration::from_millis(200);
/// The shortest token: 16 random bytes are beyond guessing.
const TOKEN_BYTES_MIN: usize = 16;
/// The longest: more is a file that is no token.
const TOKEN_BYTES_MAX: u64 = 4096;

/// Between lines about peers that were refused.
const REFUSALS_EVERY: Duration = Duration::from_secs(1);

/// What `spillway serve` is given.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Where to listen; 0.0.0.0:7070 lets other hosts in
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:7070")]
    listen: String,
    /// Memory to lend: 512M, 64G [default: half of what is available now]
    #[arg(long, value_name = "SIZE")]
    memory: Option<String>,
    /// Put cold pages into this file when the memory is full; it must not exist
    #[arg(long, value_name = "FILE", requires = "spill_size")]
    spill: Option<PathBuf>,
    /// How large that file may get
    #[arg(long, value_name = "SIZE", requires = "spill")]
    spill_size: Option<String>,
    /// Keep pages compressed (lz4): room for more of them, and more CPU time for each
    #[arg(long)]
    compress: bool,
    /// Keep identical pages as often as they come
    #[arg(long, conflicts_with = "dedupe_across_tenants")]
    no_dedupe: bool,
    /// Share pages between clients, too; each of them can then learn what others have
    #[arg(long)]
    dedupe_across_tenants: bool,
    /// What clients must know: a file of 16 bytes at least, for nobody else to read
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Encrypt connections (TLS 1.3): the server's certificate, in PEM
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// The key to that certificate, for nobody else to read
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Let in only clients with a certificate that one of these authorities has signed
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    client_ca: Option<PathBuf>,
    /// How long a client's pages are kept when it has gone
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..))]
    lease: u32,
    #[command(flatten)]
    join: join::Membership,
}

/// Serves until a signal ends it.
pub(crate) fn serve(args: &Args) -> Result<u8, Failure> {
    let mut config = config(args)?;
    let cluster = args.join.cluster(config.listen)?;
    let (refusals, teller) = spillway_server::refusals();
    config.refusals = Some(refusals);
    sys::block_signals();
    let memory = Bytes(config.memory_bytes);
    let server = Server::bind(config).map_err(|error| refused(&error))?;
    let over = if args.tls_cert.is_some() { " over TLS" } else { "" };
    let address = server.address();
    let reach = if address.ip().is_loopback() { "only this host reaches it (see --listen); " } else { "" };
    say::note(format!("lending {memory}{over} on {address}; {reach}Ctrl-C ends it, and the pages that it holds"));
    // A thread of its own: nobody may read what it says, and then it waits for ever.
    let telling = crate::control::thread("refusals").spawn(|| teller.run(REFUSALS_EVERY, tell_refused));
    telling.map_err(|error| refused(&Error::Thread(error)))?;
    let stop = server.stopper();
    let load = {
        let server = stop.clone();
        move || server.load_percent()
    };
    let joined = cluster.map(|cluster| args.join.join(cluster, server.address(), memory.0, load)).transpose()?;
    let serving = crate::control::thread("serve").spawn(|| server.run());
    let serving = serving.map_err(|error| refused(&Error::Thread(error)))?;
    while !serving.is_finished() {
        if sys::next_signal(Some(TICK)).is_some_and(|caught| sys::wants_end(caught.number)) {
            break;
        }
    }
    // First of all nobody new comes.
    joined.into_iter().for_each(join::Joined::leave);
    stop.stop();
    let served = serving.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    served.map(|()| 0).map_err(|error| Failure::new(FAILED, error.to_string()))
}

fn tell_refused(refusals: &[Refusal], others: u64) {
    refusals.iter().for_each(say::note);
    if others > 0 {
        say::note(format!("refused {others} more"));
    }
}

fn refused(error: &Error) -> Failure {
    Failure::refused(error.to_string())
}

fn config(args: &Args) -> Result<Config, Failure> {
    let listen = address(&args.listen)?;
    let token = args.token_file.as_deref().map(token).transpose()?.unwrap_or_default();
    let tls = tls(args)?;
    if !listen.ip().is_loopback() && token.is_empty() && args.client_ca.is_none() {
        return Err(strangers(listen, tls.is_some()));
    }
    let mut config = Config::new(listen, memory(args.memory.as_deref())?);
    (config.token, config.tls) = (token, tls);
    config.compress = args.compress;
    config.dedupe = match (args.no_dedupe, args.dedupe_across_tenants) {
        (true, _) => Dedupe::Off,
        (_, true) => Dedupe::Everyone,
        _ => Dedupe::Tenant,
    };
    config.limits = Limits { lease: Duration::from_secs(args.lease.into()), ..Limits::default() };
    if let (Some(path), Some(size)) = (&args.spill, &args.spill_size) {
        config.spill = Some(SpillConfig { path: path.clone(), bytes: size_of("--spill-size", size)? });
    }
    Ok(config)
}

/// Whoever reaches the address could use the memory.
fn strangers(listen: SocketAddr, tls: bool) -> Failure {
    Failure::refused(if tls {
        format!(
            "{listen} can be reached by others, and TLS without client authentication lets strangers store pages here: \
             give --client-ca FILE or --token-file FILE, or listen on 127.0.0.1"
        )
    } else {
        format!(
            "{listen} can be reached by others, who could then store and read pages here: give --token-file FILE \
             (made with `umask 077; head -c 32 /dev/urandom | base64 > FILE`), or listen on 127.0.0.1"
        )
    })
}

fn tls(args: &Args) -> Result<Option<tls::Server>, Failure> {
    let (Some(certificate), Some(key)) = (&args.tls_cert, &args.tls_key) else { return Ok(None) };
    let server = tls::Server::read(tls::Identity { certificate, key }, args.client_ca.as_deref());
    server.map(Some).map_err(|error| Failure::refused(error.to_string()))
}

fn address(text: &str) -> Result<SocketAddr, Failure> {
    let resolved = text.to_socket_addrs().ok().and_then(|mut addresses| addresses.next());
    resolved.ok_or_else(|| {
        Failure::refused(format!(
            "`{}` is no address to listen on: give HOST:PORT, such as 127.0.0.1:7070",
            text.escape_debug()
        ))
    })
}

fn size_of(option: &str, text: &str) -> Result<u64, Failure> {
    match parse_bytes(text) {
        Ok(bytes) if bytes >= MEMORY_MIN_BYTES => Ok(bytes),
        Ok(bytes) => Err(Failure::refused(format!("{option} {bytes}: give at least {}M", MEMORY_MIN_BYTES >> 20))),
        Err(error) => Err(Failure::refused(format!("{option}: {error}"))),
    }
}

fn memory(given: Option<&str>) -> Result<u64, Failure> {
    match given {
        Some(text) => size_of("--memory", text),
        None => available().map(|bytes| bytes / 2).filter(|bytes| *bytes >= MEMORY_MIN_BYTES).ok_or_else(|| {
            Failure::refused("it cannot be read how much memory is available: say how much to lend with --memory")
        }),
    }
}

/// Memory that could be had without swapping, in bytes.
pub(crate) fn available() -> Option<u64> {
    let meminfo = fs::read_to_string("/proc/meminfo").ok()?;
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// What is in a token's file, without the white space around it.
fn token(path: &Path) -> Result<Vec<u8>, Failure> {
    let name = path.display().to_string();
    let name = name.escape_debug();
    let unreadable = |error| {
        Failure::refused(format!("the token file `{name}` cannot be read: {}; see --token-file", say::error(&error)))
    };
    let meta = fs::metadata(path).map_err(unreadable)?;
    if meta.mode() & 0o077 != 0 {
        return Err(Failure::refused(format!("others can read the token file `{name}`: `chmod 600` it")));
    }
    if meta.len() > TOKEN_BYTES_MAX {
        return Err(Failure::refused(format!("`{name}` is too long for a token: make it with `openssl rand -hex 32`")));
    }
    let token = fs::read(path).map_err(unreadable)?.trim_ascii().to_vec();
    if token.len() < TOKEN_BYTES_MIN {
        return Err(Failure::refused(format!(
            "the token in `{name}` could be guessed: make one of {TOKEN_BYTES_MIN} bytes at least, such as \
             `openssl rand -hex 32`"
        )));
    }
    Ok(token)
}

//! `spillway vmm`: manages the memory of virtual machines whose monitor hands over its userfaultfd, as Firecracker does, and as is
//! proposed for Cloud Hypervisor.
//!
//! Invariants: one line for each monitor, whatever it sends, and for memory that is plugged into its guest; none keeps another
//! waiting, nor us longer than [`MESSAGE_WITHIN`]; we end only when all pages are home; the socket goes with us.

use crate::attach::{self, DEFAULT_LOCAL};
use crate::failure::Failure;
use crate::report::StatsFile;
use crate::service::Service;
use crate::{control, local, pool, replacement, say, sys};
use spillway_core::size::Bytes;
use spillway_pager::handed::{Conversation, Heard, receive};
use spillway_pager::{Choice, Error, OnPagerDeath, Options, Pager};
use spillway_store::Store;
use spillway_store::snapshot::{Image, Snapshot};
use std::fs;
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// How long a monitor may take to send its message: it does so right after it has connected.
const MESSAGE_WITHIN: Duration = Duration::from_secs(5);
/// Monitors that are listened to at a time.
const LISTENED_TO_MAX: usize = 64;

/// What `spillway vmm` is given.
#[derive(clap::Args)]
#[command(group(clap::ArgGroup::new("begins").required(true).args(["memory", "fresh"])))]
pub(crate) struct Args {
    /// Where monitors connect: a Unix socket, made here
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,
    /// The snapshot's memory file, which all of them start from; it must not change while they run
    #[arg(long, value_name = "FILE")]
    memory: Option<PathBuf>,
    /// Their memory starts as zeros, or as it is handed over
    #[arg(long)]
    fresh: bool,
    /// Local memory for all of them: 512M, 2G, or a share of what they have
    #[arg(long, value_name = "SIZE|PERCENT", default_value = DEFAULT_LOCAL)]
    local: String,
    /// Where the rest goes; local: is this host, compressed
    #[arg(long, value_name = "URL", default_value = pool::DEFAULT)]
    pool: String,
    #[command(flatten)]
    replacement: replacement::Choices,
    /// Write the final counters to this file, as JSON
    #[arg(long, value_name = "FILE")]
    stats: Option<PathBuf>,
    /// Say nothing but what went wrong
    #[arg(short, long)]
    quiet: bool,
}

/// The socket's name in the file system, removed when we end.
struct Bound<'a>(&'a Path);

impl Drop for Bound<'_> {
    fn drop(&mut self) {
        let _ = fs::remove_file(self.0);
    }
}

/// Serves monitors until it is told to let them go.
pub(crate) fn vmm(args: &Args) -> Result<u8, Failure> {
    let local = local::parse(&args.local)?;
    pool::parse(&args.pool)?;
    let stats = args.stats.as_deref().map(StatsFile::prepare).transpose()?;
    let image = args.memory.as_deref().map(open_image).transpose()?;
    sys::block_signals();
    let listener = bind(&args.socket)?;
    let bound = Bound(&args.socket);
    let store = pool::open(&args.pool)?;
    let store: Box<dyn Store> = match &image {
        Some(image) => Box::new(Snapshot::new(store, image.clone())),
        None => store,
    };
    let (replacement, on_pager_death) = (args.replacement.settings(), OnPagerDeath::HoldTarget);
    let options = Options {
        local,
        choice: Choice { handed_alone: true, ..Choice::default() },
        replacement,
        store,
        on_pager_death,
        recording: None,
        share_pages: false,
        lasting: None,
    };
    let own = std::process::id().cast_signed();
    let service = Arc::new(Service::new(Pager::host(options)?, own, 0).in_pool(&args.pool));
    let monitors = Monitors { service: Arc::clone(&service), image, quiet: args.quiet, listened_to: Arc::default() };
    let started = control::thread("monitors").spawn(move || monitors.listen(&listener));
    started.map_err(|error| Failure::refused(format!("cannot listen: {}", say::error(&error))))?;
    let note = format!("listening at {}; Ctrl-C brings all pages home and lets go", args.socket.display());
    attach::serve_until_gone(&service, None, (!args.quiet).then_some(note));
    drop(bound);
    stats.map_or(Ok(0), |stats| stats.write(&service.snapshot()).map(|()| 0))
}

fn open_image(path: &Path) -> Result<Image, Failure> {
    let refused = |error: io::Error| {
        let why = say::error(&error);
        Failure::refused(format!("cannot use {}: {why}; give --memory the file of a snapshot", path.display()))
    };
    Image::open(path).map_err(refused)
}

/// Makes the socket, for our own user alone: who connects has its memory managed. One that nobody listens at is replaced.
fn bind(path: &Path) -> Result<UnixListener, Failure> {
    let refused = |why: &str| Failure::refused(format!("cannot listen at {}: {why}", path.display()));
    match fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => {
            return Err(refused("something else has this name; choose another"));
        }
        Ok(found) if UnixStream::connect(path).is_ok() || found.uid() != sys::effective_uid() => {
            return Err(refused("another process has it; choose another name"));
        }
        Ok(_) => fs::remove_file(path).map_err(|error| refused(&say::error(&error)))?,
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(refused(&say::error(&error))),
    }
    let listening = UnixListener::bind(path).and_then(|listener| {
        fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
        Ok(listener)
    });
    listening.map_err(|error| refused(&say::error(&error)))
}

/// Those who connect.
struct Monitors {
    service: Arc<Service>,
    image: Option<Image>,
    quiet: bool,
    listened_to: Arc<AtomicUsize>,
}

impl Monitors {
    fn listen(self, listener: &UnixListener) {
        let monitors = Arc::new(self);
        for stream in listener.incoming() {
            let Ok(stream) = stream else {
                // Descriptors have run out: some will be closed.
                std::thread::sleep(Duration::from_millis(20));
                continue;
            };
            if monitors.listened_to.fetch_add(1, Ordering::Relaxed) >= LISTENED_TO_MAX {
                monitors.listened_to.fetch_sub(1, Ordering::Relaxed);
                say::note("a monitor was sent away: too many are being listened to; let it try again");
                continue;
            }
            let its = Arc::clone(&monitors);
            let hear = move || {
                let conversation = its.hear(&stream);
                its.listened_to.fetch_sub(1, Ordering::Relaxed);
                // No more of these than guests whose memory is managed.
                conversation.into_iter().for_each(|conversation| its.converse(&stream, conversation));
            };
            if control::thread("monitor").spawn(hear).is_err() {
                monitors.listened_to.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    fn hear(&self, stream: &UnixStream) -> Option<Conversation> {
        match self.take_in(stream) {
            Ok((line, conversation)) => {
                self.tell(&line);
                conversation
            }
            Err(why) => {
                say::note(say::clean(&why));
                None
            }
        }
    }

    fn tell(&self, line: &str) {
        if !self.quiet {
            say::note(line);
        }
    }

    fn take_in(&self, mut stream: &UnixStream) -> Result<(String, Option<Conversation>), String> {
        let refused = |why: &dyn std::fmt::Display| format!("a monitor was refused: {why}");
        let mut handed = receive(stream, MESSAGE_WITHIN).map_err(|why| refused(&why))?;
        let (pid, bytes, conversation) = (handed.pid(), Bytes(handed.bytes()), handed.conversation());
        let placed = handed.starting_from(self.image.as_ref()).map_err(|why| refused(&why))?;
        let taken = self.service.pager().take_in(placed);
        taken.map_err(|why| format!("monitor {pid} was refused, and its guest waits: {why}"))?;
        if conversation.is_some() {
            // Who does not wait for it any more is served all the same.
            let _ = stream.write_all(&[1]);
        }
        Ok((format!("manages {bytes} of guest memory of process {pid}"), conversation))
    }

    /// Hears what a monitor says whose memory is managed, until it hangs up; it may take us for gone if we do.
    fn converse(&self, mut stream: &UnixStream, mut conversation: Conversation) {
        let pid = conversation.pid();
        let mut is_understood = true;
        let not_managed = |why: &dyn std::fmt::Display| {
            let what = format!("what was plugged into the guest of process {pid} is not managed");
            say::note(say::clean(&format!("{what}, and whoever touches it waits: {why}")));
        };
        let why = loop {
            match conversation.next(stream, MESSAGE_WITHIN) {
                Ok(None) => return,
                Ok(Some(Heard::Plugged(plugged))) => {
                    let bytes = Bytes(plugged.bytes());
                    match self.service.pager().plug_in(plugged) {
                        Ok(()) => self.tell(&format!("manages {bytes} more of process {pid}")),
                        // Or it was let go.
                        Err(Error::Ended(_)) => {}
                        Err(why) => not_managed(&why),
                    }
                }
                Ok(Some(Heard::Refused(why))) => not_managed(&why),
                Ok(Some(Heard::Unknown)) => {
                    if std::mem::take(&mut is_understood) {
                        say::note(format!("monitor {pid} says something that is not understood: that is passed over"));
                    }
                }
                Err(why) => break why,
            }
        };
        say::note(say::clean(&format!("monitor {pid} is not listened to any more, and served on: {why}")));
        // It is not kept waiting for room in the socket, nor does it see us gone.
        let _ = stream.set_read_timeout(None);
        let mut nothing = [0; 4096];
        loop {
            match stream.read(&mut nothing) {
                Ok(1..) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Ok(0) | Err(_) => return,
            }
        }
    }
}

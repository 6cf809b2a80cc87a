//! Where control sockets are, and who listens there.
//!
//! Invariants: a socket is made only in a directory that is ours and closed to others; an entry is removed only when
//! its name is of our making and nobody listens any more; a pager that does not answer delays us by a bounded time.

use crate::control::{self, Request};
use crate::daemon::{self, TargetListing};
use crate::failure::Failure;
use crate::lines::Lines;
use crate::service::Listing;
use crate::waiting::Waiting;
use crate::{say, sys};
use spillway_pager::peer;
use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// How long a pager may take to answer a short question.
pub(crate) const ANSWER_LIMIT: Duration = Duration::from_secs(3);

/// A socket's name in the file system, removed when the pager ends in an orderly way.
pub(crate) struct Bound(PathBuf);

impl Drop for Bound {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Where this user's sockets may be, best first.
pub(crate) fn own_directories() -> Vec<PathBuf> {
    let uid = sys::effective_uid();
    let runtime = if uid == 0 {
        Some(PathBuf::from("/run/spillway"))
    } else {
        std::env::var_os("XDG_RUNTIME_DIR")
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
            .map(|path| path.join("spillway"))
    };
    runtime.into_iter().chain([PathBuf::from(format!("/tmp/spillway-{uid}"))]).collect()
}

/// Where sockets may be that this user can reach: for root, also those of others.
fn directories() -> Vec<PathBuf> {
    let mut all = own_directories();
    if sys::effective_uid() == 0 {
        let entries = |path| fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path());
        let of_runtime = |path: PathBuf| {
            let uid = path.file_name()?.to_str()?.parse::<u32>().ok()?;
            Some((path.join("spillway"), uid))
        };
        let of_temporary = |path: PathBuf| {
            let uid = path.file_name()?.to_str()?.strip_prefix("spillway-")?.parse::<u32>().ok()?;
            Some((path, uid))
        };
        let others = entries("/run/user").filter_map(of_runtime).chain(entries("/tmp").filter_map(of_temporary));
        // One that is not whose name it has was made by somebody who wants to be asked.
        all.extend(others.filter(|(path, uid)| private_owner(path).is_ok_and(|it| it == *uid)).map(|(path, _)| path));
        all.sort();
        all.dedup();
    }
    all
}

/// The owner of a socket directory that nobody else can write to.
fn private_owner(path: &Path) -> io::Result<u32> {
    let found = fs::symlink_metadata(path)?;
    if found.is_dir() && found.mode() & 0o077 == 0 {
        Ok(found.uid())
    } else {
        Err(io::Error::new(ErrorKind::PermissionDenied, "it is open to other users"))
    }
}

/// Makes this process's socket. The error says what other commands cannot do for lack of it.
pub(crate) fn bind() -> Result<(UnixListener, Bound), String> {
    let mut why = String::new();
    for directory in own_directories() {
        match bind_in(&directory, std::process::id()) {
            Ok(bound) => return Ok(bound),
            Err(error) => why = format!("{}: {error}", directory.display()),
        }
    }
    Err(format!("no control socket, so ps, resize and detach will not find this pager: {why}"))
}

/// Makes sure that a directory is there, is ours, and is closed to others.
pub(crate) fn own_directory(directory: &Path) -> io::Result<()> {
    match fs::DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    if private_owner(directory)? != sys::effective_uid() {
        return Err(io::Error::new(ErrorKind::PermissionDenied, "it belongs to another user"));
    }
    Ok(())
}

fn bind_in(directory: &Path, pid: u32) -> io::Result<(UnixListener, Bound)> {
    own_directory(directory)?;
    let path = directory.join(format!("{pid}.sock"));
    // Between bind() and listen() it looks like a dead pager's, which whoever lists pagers clears away.
    let unlisted = path.with_extension("new");
    let _ = fs::remove_file(&unlisted); // Left by a process that had our id.
    let listener = UnixListener::bind(&unlisted)?;
    let closed = fs::set_permissions(&unlisted, fs::Permissions::from_mode(0o600));
    if let Err(error) = closed.and_then(|()| fs::rename(&unlisted, &path)) {
        let _ = fs::remove_file(&unlisted);
        return Err(error);
    }
    Ok((listener, Bound(path)))
}

/// Connects within [`ANSWER_LIMIT`]; a stopped pager with a full queue would keep a plain connect waiting.
fn connect(path: PathBuf) -> io::Result<UnixStream> {
    let (send, receive) = mpsc::channel();
    std::thread::spawn(move || send.send(UnixStream::connect(path)));
    receive.recv_timeout(ANSWER_LIMIT).unwrap_or_else(|_| Err(io::Error::from(ErrorKind::TimedOut)))
}

/// A pager that was found, and the connection to it.
pub(crate) struct Found {
    /// What it said of itself.
    pub(crate) listing: Listing,
    /// Ask it more.
    pub(crate) lines: Lines,
    /// Whose it is.
    owner: u32,
    /// The process that it was found by: of its own, or managed by it.
    pub(crate) known_by: i32,
}

impl Found {
    /// Whether it is a daemon that was named itself, and not one of its targets.
    pub(crate) fn is_daemon_itself(&self) -> bool {
        self.listing.daemon && self.known_by == self.listing.pager_pid
    }

    /// Whether it is to be believed about a process: it could say that it manages any.
    fn may_manage(&self, pid: i32) -> bool {
        let own = sys::effective_uid();
        self.owner == 0
            || self.owner == own
            || fs::metadata(format!("/proc/{pid}")).is_ok_and(|it| it.uid() == self.owner)
    }
}

/// All pagers that answer this user.
pub(crate) fn pagers() -> Vec<Found> {
    let directories = directories();
    let mut all: Vec<Found> = directories.iter().flat_map(|directory| pagers_in(directory)).collect();
    // One that was given a place of its own.
    let elsewhere =
        daemon::path().filter(|path| path.parent().is_none_or(|it| directories.iter().all(|one| one != it)));
    if elsewhere.is_some() {
        all.extend(self::daemon().ok().flatten());
    }
    all
}

/// This user's daemon, if one runs.
pub(crate) fn daemon() -> Result<Option<Found>, Failure> {
    let Some(path) = daemon::path() else { return Ok(None) };
    let name = say::clean(&path.to_string_lossy());
    let refused = |why: &str| {
        Failure::refused(format!("the daemon at {name} {why}: try again, or add --no-daemon for a pager of its own"))
    };
    let stream = match connect(path) {
        // Where no directory is, nobody listens.
        Err(error)
            if matches!(
                error.kind(),
                ErrorKind::NotFound | ErrorKind::NotADirectory | ErrorKind::ConnectionRefused
            ) =>
        {
            return Ok(None);
        }
        Err(error) => return Err(refused(&format!("cannot be asked ({})", say::error(&error)))),
        Ok(stream) => stream,
    };
    let owner = peer(stream.as_fd()).map_or(u32::MAX, |peer| peer.uid);
    if owner != 0 && owner != sys::effective_uid() {
        return Err(refused("is another user's"));
    }
    match ask_who(stream, owner) {
        Some(found) if found.listing.daemon => Ok(Some(found)),
        _ => Err(refused("does not answer")),
    }
}

fn pagers_in(directory: &Path) -> Vec<Found> {
    let Ok(owner) = private_owner(directory) else { return Vec::new() };
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut found = Vec::new();
    for entry in entries {
        let since = Instant::now();
        found.extend(question(&entry.path(), owner));
        // Another user's that do not answer must not keep us for longer.
        if owner != sys::effective_uid() && since.elapsed() >= ANSWER_LIMIT {
            break;
        }
    }
    found
}

fn question(path: &Path, owner: u32) -> Option<Found> {
    let name = path.file_name()?.to_str()?.strip_suffix(".sock")?;
    let is_daemon = name == "daemon";
    if !is_daemon {
        name.parse::<u32>().ok()?;
    }
    let stream = cleared_or_connected(path, is_daemon)?;
    if peer(stream.as_fd()).ok()?.uid != owner {
        return None;
    }
    ask_who(stream, owner)
}

/// A connection to whoever listens there. The entry of a pager that is dead is removed.
fn cleared_or_connected(path: &Path, is_daemon: bool) -> Option<UnixStream> {
    match connect(path.to_owned()) {
        // Where a daemon listened the next one may begin to, just now.
        Err(error) if error.kind() == ErrorKind::ConnectionRefused && !is_daemon => {
            let _ = fs::remove_file(path);
            None
        }
        stream => stream.ok(),
    }
}

fn ask_who(stream: UnixStream, owner: u32) -> Option<Found> {
    let mut lines = Lines::new(stream).ok()?;
    let answer = control::ask_shortly(&mut lines, &Request::Stats, ANSWER_LIMIT).ok()?;
    let listing: Listing = serde_json::from_value(answer).ok()?;
    Some(Found { known_by: listing.pager_pid, listing, lines, owner })
}

/// The pager that this process is; none if it does not answer this user.
pub(crate) fn pager_that_is(pager: i32) -> Option<Found> {
    let asked = |directory: &PathBuf| {
        let owner = private_owner(directory).ok()?;
        question(&directory.join(format!("{pager}.sock")), owner)
    };
    directories().iter().find_map(asked)
}

/// The pager of a process: of its root, of one of its descendants, or of the `spillway run` before it.
pub(crate) fn pager_of(pid: i32) -> Result<Found, Failure> {
    let mut pagers = pagers();
    let manages = |of: &Listing, pid| {
        let is_target = |it: &TargetListing| it.pid == pid || it.front_pid == pid || it.pids.contains(&pid);
        [of.snapshot.pid, of.front_pid, of.pager_pid].contains(&pid)
            || of.snapshot.pids.contains(&pid)
            || of.targets.iter().flatten().any(is_target)
    };
    let ancestors = std::iter::successors(Some(pid), |&pid| crate::processes::parent(pid));
    for pid in ancestors.take_while(|&pid| pid > 1) {
        if let Some(index) = pagers.iter().position(|found| manages(&found.listing, pid) && found.may_manage(pid)) {
            return Ok(Found { known_by: pid, ..pagers.swap_remove(index) });
        }
    }
    if let Some(waiting) = Waiting::of(pid) {
        return Err(Failure::refused(waiting.to_string()));
    }
    Err(Failure::refused(if crate::processes::exists(pid) {
        format!("no pager of yours manages process {pid}: see `spillway ps`")
    } else {
        format!("there is no process {pid}: see `spillway ps` for those that are managed")
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn a_pager_that_begins_to_listen_is_not_taken_for_a_dead_one() {
        const PAGERS: u32 = 2000;
        let directory = std::env::temp_dir().join(format!("spillway-sockets-{}", std::process::id()));
        own_directory(&directory).expect("a directory");
        let over = AtomicBool::new(false);
        let look = || {
            while !over.load(Ordering::Relaxed) {
                for entry in fs::read_dir(&directory).expect("readable").flatten() {
                    if entry.path().extension().is_some_and(|it| it == "sock") {
                        cleared_or_connected(&entry.path(), false);
                    }
                }
            }
        };
        let begin = |id| bind_in(&directory, id).is_ok_and(|(_listener, bound)| UnixStream::connect(&bound.0).is_ok());
        let found = std::thread::scope(|scope| {
            scope.spawn(look);
            scope.spawn(look);
            let found = (0..PAGERS).filter(|&id| begin(id)).count();
            over.store(true, Ordering::Relaxed);
            found
        });
        assert_eq!(found, PAGERS as usize);
        fs::remove_dir(&directory).expect("nothing is left there");
    }
}

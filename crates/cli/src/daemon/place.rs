//! Where the daemon listens, and that there is but one.
//!
//! Invariant: whoever has the lock is the daemon of that place; the kernel gives the lock back when its process ends,
//! however that ends.

use crate::failure::{FAILED, Failure};
use crate::{say, sockets, sys};
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Where it is, if it is not where this user's control sockets are; `off` for nowhere.
const VARIABLE: &str = "SPILLWAY_DAEMON";

/// How long what a daemon had open may stay so when it is dead: its guardian closes it.
const CLOSED_WITHIN: Duration = Duration::from_millis(500);

/// Where this user's daemon listens, if it runs; none where none is wanted.
pub(crate) fn path() -> Option<PathBuf> {
    match std::env::var_os(VARIABLE) {
        Some(path) if path.is_empty() || path == "off" => None,
        Some(path) => Some(path.into()),
        None => sockets::own_directories().into_iter().next().map(|directory| directory.join("daemon.sock")),
    }
}

/// The place, taken. Dropping it leaves it.
pub(super) struct Place {
    path: PathBuf,
    _lock: File,
}

impl Place {
    /// Takes it, unless a daemon has it.
    pub(super) fn take() -> Result<Self, Failure> {
        let Some(path) = path() else {
            return Err(Failure::refused(format!(
                "{VARIABLE} says that there is to be no daemon: unset it, or name a socket"
            )));
        };
        let name = say::clean(&path.to_string_lossy());
        let refused = |error: std::io::Error| {
            let why = say::error(&error);
            Failure::refused(format!("no daemon can listen at {name}: {why}; {VARIABLE}=PATH names another place"))
        };
        let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."));
        sockets::own_directory(directory).map_err(refused)?;
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600).custom_flags(libc::O_NOFOLLOW);
        let mut lock = options.open(path.with_extension("lock")).map_err(refused)?;
        if !locked(&lock).map_err(refused)? {
            let mut pid = String::new();
            let _ = lock.read_to_string(&mut pid);
            return Err(Failure::refused(format!(
                "a daemon listens at {name} already (process {}): `spillway ps` shows it; {VARIABLE}=PATH names another place",
                say::clean(pid.trim())
            )));
        }
        lock.set_len(0).and_then(|()| writeln!(lock, "{}", std::process::id())).map_err(refused)?;
        Ok(Self { path, _lock: lock })
    }

    /// Begins to listen.
    pub(super) fn bind(&self) -> Result<UnixListener, Failure> {
        let _ = fs::remove_file(&self.path); // Left by one that was killed: the lock says that none is there.
        let listener = UnixListener::bind(&self.path);
        let bound = listener.and_then(|it| fs::set_permissions(&self.path, Permissions::from_mode(0o600)).map(|()| it));
        bound.map_err(|error| {
            let name = say::clean(&self.path.to_string_lossy());
            Failure::new(FAILED, format!("no daemon can listen at {name}: {}", say::error(&error)))
        })
    }

    /// Where it is.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

/// Takes the lock, unless somebody has it who lives.
fn locked(lock: &File) -> std::io::Result<bool> {
    let begun = Instant::now();
    loop {
        if sys::lock(lock)? {
            return Ok(true);
        }
        if begun.elapsed() > CLOSED_WITHIN {
            return Ok(false);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

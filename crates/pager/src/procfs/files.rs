//! Files of memory that processes have mapped or open, found through `/proc`.

use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use spillway_core::Span;

use super::mappings::{ANONYMOUS_SHARED, FileId, mappings};
use super::{if_asked, living_thread, processes};
use crate::guardian;

fn is_file(about: &fs::Metadata, id: FileId) -> bool {
    let device = (rustix::fs::major(about.dev()), rustix::fs::minor(about.dev()));
    id == FileId { device, inode: about.ino() }
}

/// Opens the file that `pid` has mapped there.
///
/// # Errors
/// Without the rights, or where that mapping is gone.
pub fn open_mapped(pid: i32, Span { start, end }: Span) -> io::Result<fs::File> {
    fs::File::options().read(true).write(true).open(format!("/proc/{pid}/map_files/{:x}-{:x}", start.0, end.0))
}

/// Opens a file that any of `pids` has mapped, or open.
pub fn open_of(id: FileId, pids: &[i32]) -> Option<fs::File> {
    let is_it = |file: &fs::File| file.metadata().is_ok_and(|about| is_file(&about, id));
    let mapped = |pid: &i32| {
        let its = mappings(*pid).ok()?.into_iter().filter(|mapping| mapping.file == Some(id));
        its.filter_map(|mapping| open_mapped(*pid, mapping.span).ok()).find(is_it)
    };
    let open = |pid: &i32| {
        let path = descriptor_of(id, *pid).ok()??;
        fs::File::options().read(true).write(true).open(path).ok().filter(is_it)
    };
    pids.iter().find_map(mapped).or_else(|| pids.iter().find_map(open))
}

/// A descriptor that `pid` has of a file of memory, by its path; no other files are looked at, as they may be of a host that is away.
fn descriptor_of(id: FileId, pid: i32) -> io::Result<Option<PathBuf>> {
    let living = living_thread(pid).unwrap_or(pid);
    let open = if_asked(fs::read_dir(format!("/proc/{living}/fd")))?.into_iter().flatten().flatten();
    let mut paths = open.map(|entry| entry.path());
    let is_memory = |path: &Path| {
        let link = fs::read_link(path).unwrap_or_default();
        let name = link.as_os_str().as_bytes();
        name.starts_with(b"/memfd:") || name == ANONYMOUS_SHARED.as_bytes()
    };
    Ok(paths.find(|path| is_memory(path) && fs::metadata(path).is_ok_and(|about| is_file(&about, id))))
}

/// Whether any process but this one, and its guardian, has a file of memory open, or mapped, or may have: where we could not ask.
pub fn is_open_elsewhere(id: FileId) -> bool {
    let own = [Some(std::process::id().cast_signed()), guardian::ours().map(|ours| ours.pid)];
    let has = |pid: i32| -> io::Result<bool> {
        let mapped = if_asked(mappings(pid))?.into_iter().flatten().any(|mapping| mapping.file == Some(id));
        Ok(mapped || descriptor_of(id, pid)?.is_some())
    };
    processes().map_or(true, |pids| {
        pids.into_iter().filter(|pid| !own.contains(&Some(*pid))).any(|pid| has(pid).unwrap_or(true))
    })
}

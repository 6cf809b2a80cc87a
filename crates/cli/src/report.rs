//! What is told at the end: the summary line and the `--stats` file.
//!
//! Invariant: the statistics file is whole or absent. It is written beside its name and renamed, and that this is
//! possible is found out before a target starts.

use crate::failure::{FAILED, Failure};
use crate::say;
use spillway_core::size::Bytes;
use spillway_pager::Snapshot;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// The line at the end of a run.
pub(crate) fn summary(of: &Snapshot) -> String {
    format!(
        "peak {} local, {} stored in {}, {} faults, p50 {:.1} us, p99 {:.1} us",
        Bytes(of.burst_peak_bytes),
        Bytes(of.stored_bytes),
        Bytes(of.stored_compressed_bytes),
        of.faults,
        of.fault_us.p50,
        of.fault_us.p99,
    )
}

/// Where the final counters go.
pub(crate) enum StatsFile {
    /// A file beside this one is written, then renamed to it.
    Renamed(PathBuf),
    /// Written in place: a device or a pipe must not be replaced by a file.
    InPlace(File),
}

impl StatsFile {
    /// Makes sure that the file can be written later.
    pub(crate) fn prepare(path: &Path) -> Result<Self, Failure> {
        Self::try_prepare(path).map_err(|error| {
            let (path, why) = (say::clean(&path.to_string_lossy()), say::error(&error));
            Failure::refused(format!("cannot write statistics to {path}: {why}; give --stats another file"))
        })
    }

    fn try_prepare(path: &Path) -> io::Result<Self> {
        // A link stays a link: what it points to is replaced.
        let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
        match fs::metadata(&path) {
            Ok(found) if found.is_dir() => return Err(io::Error::from(io::ErrorKind::IsADirectory)),
            Ok(found) if !found.is_file() => return Ok(Self::InPlace(OpenOptions::new().write(true).open(&path)?)),
            Ok(_) => drop(OpenOptions::new().write(true).open(&path)?),
            Err(_) => {}
        }
        let beside = beside(&path).ok_or(io::ErrorKind::InvalidInput)?;
        File::create(&beside)?;
        fs::remove_file(&beside)?;
        Ok(Self::Renamed(path))
    }

    /// Writes the counters.
    pub(crate) fn write(self, of: &Snapshot) -> Result<(), Failure> {
        self.try_write(of).map_err(|error| {
            Failure::new(FAILED, format!("the statistics could not be written: {}", say::error(&error)))
        })
    }

    fn try_write(self, of: &Snapshot) -> io::Result<()> {
        let mut text = serde_json::to_string_pretty(of)?;
        text.push('\n');
        match self {
            Self::InPlace(mut file) => file.write_all(text.as_bytes()),
            Self::Renamed(path) => {
                let beside = beside(&path).ok_or(io::ErrorKind::InvalidInput)?;
                let done = fs::write(&beside, text).and_then(|()| fs::rename(&beside, path));
                done.inspect_err(|_| drop(fs::remove_file(&beside)))
            }
        }
    }
}

/// A name in the same directory that nobody else uses.
fn beside(path: &Path) -> Option<PathBuf> {
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name()?);
    name.push(format!(".{}", std::process::id()));
    Some(path.with_file_name(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_whole_and_nothing_else_is_left() {
        let dir = std::env::temp_dir().join(format!("spillway-report-{}", std::process::id()));
        fs::create_dir_all(&dir).expect("a directory");
        let path = dir.join("stats.json");
        fs::write(&path, "old").expect("a file");
        let stats = StatsFile::prepare(&path).expect("writable");
        assert_eq!(fs::read_to_string(&path).expect("still there"), "old");
        stats.write(&Snapshot { faults: 7, ..Snapshot::default() }).expect("written");
        let back: Snapshot = serde_json::from_slice(&fs::read(&path).expect("there")).expect("JSON");
        assert_eq!(back.faults, 7);
        assert_eq!(fs::read_dir(&dir).expect("listed").count(), 1);
        StatsFile::prepare(&dir.join("unused")).expect("writable");
        assert_eq!(fs::read_dir(&dir).expect("listed").count(), 1);
        assert!(StatsFile::prepare(&dir).is_err());
        assert!(StatsFile::prepare(&dir.join("no/such")).is_err());
        let null = StatsFile::prepare(Path::new("/dev/null")).expect("a device");
        null.write(&Snapshot::default()).expect("swallowed");
        assert!(!fs::metadata("/dev/null").expect("still there").is_file());
        fs::remove_dir_all(dir).expect("removed");
    }
}

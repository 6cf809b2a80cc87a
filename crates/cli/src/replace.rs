//! Files that replace older ones in one step: whoever looks finds the old file or the new one.
//!
//! Invariants: that a file can be written is found out before a target starts. Until the new one has begun the old one is
//! untouched, and nothing is left beside it, however we end. A device or a pipe is written to, never replaced by a file.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

/// Where a file is to be.
pub(crate) enum Place {
    /// A file beside this one is begun, then renamed to it.
    Renamed(PathBuf),
    /// Written in place: a device or a pipe.
    InPlace(File),
}

impl Place {
    /// Makes sure that a file can be written there later, from whatever directory.
    pub(crate) fn prepare(path: &Path) -> io::Result<Self> {
        // A link stays a link: what it points to is replaced.
        let path = fs::canonicalize(path).or_else(|_| std::path::absolute(path))?;
        match fs::metadata(&path) {
            Ok(found) if found.is_dir() => return Err(io::Error::from(io::ErrorKind::IsADirectory)),
            Ok(found) if !found.is_file() => return Ok(Self::InPlace(OpenOptions::new().write(true).open(&path)?)),
            Ok(_) => drop(OpenOptions::new().write(true).open(&path)?),
            Err(_) => {}
        }
        let beside = beside(&path)?;
        File::create(&beside)?;
        fs::remove_file(&beside)?;
        Ok(Self::Renamed(path))
    }

    /// Replaces what is there as soon as `begin` has written the beginning of the new file.
    pub(crate) fn replace<T>(self, begin: impl FnOnce(File) -> io::Result<T>) -> io::Result<T> {
        match self {
            Self::InPlace(file) => begin(file),
            Self::Renamed(path) => {
                let beside = beside(&path)?;
                let begun = File::create(&beside).and_then(begin).and_then(|begun| {
                    fs::rename(&beside, path)?;
                    Ok(begun)
                });
                begun.inspect_err(|_| drop(fs::remove_file(&beside)))
            }
        }
    }
}

/// A name in the same directory that nobody else uses.
fn beside(path: &Path) -> io::Result<PathBuf> {
    let mut name = OsString::from(".");
    name.push(path.file_name().ok_or(io::ErrorKind::InvalidInput)?);
    name.push(format!(".{}", std::process::id()));
    Ok(path.with_file_name(name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn write(place: Place, text: &str) -> io::Result<()> {
        place.replace(|mut file| file.write_all(text.as_bytes()))
    }

    #[test]
    fn a_file_is_replaced_in_one_step_and_nothing_else_is_left() {
        let dir = std::env::temp_dir().join(format!("spillway-replace-{}", std::process::id()));
        fs::create_dir_all(&dir).expect("a directory");
        let entries = || fs::read_dir(&dir).expect("listed").count();
        let path = dir.join("file");
        fs::write(&path, "old").expect("a file");
        let place = Place::prepare(&path).expect("writable");
        let failed: io::Result<()> = place.replace(|_| Err(io::ErrorKind::StorageFull.into()));
        assert!(failed.is_err());
        assert_eq!((fs::read_to_string(&path).expect("still there").as_str(), entries()), ("old", 1));
        write(Place::prepare(&path).expect("writable"), "new").expect("written");
        assert_eq!((fs::read_to_string(&path).expect("there").as_str(), entries()), ("new", 1));
        Place::prepare(&dir.join("unused")).expect("writable");
        assert_eq!(entries(), 1);
        assert!(Place::prepare(&dir).is_err());
        assert!(Place::prepare(&dir.join("no/such")).is_err());
        let link = dir.join("link");
        std::os::unix::fs::symlink(&path, &link).expect("a link");
        write(Place::prepare(&link).expect("writable"), "by its link").expect("written");
        assert!(fs::symlink_metadata(&link).expect("there").is_symlink());
        assert_eq!(fs::read_to_string(&path).expect("there"), "by its link");
        write(Place::prepare(Path::new("/dev/null")).expect("a device"), "swallowed").expect("swallowed");
        assert!(!fs::metadata("/dev/null").expect("still there").is_file());
        fs::remove_dir_all(dir).expect("removed");
    }
}

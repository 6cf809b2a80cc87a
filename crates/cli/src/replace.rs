//! Files that replace older ones in one step: whoever looks finds the old file or the new one.
//!
//! Invariants: that a file can be written is found out before a target starts. Until the new one has begun the old one is
//! untouched, and nothing is left beside it, however we end. A device or a pipe is written to, never replaced by a file, and so is
//! what our own output goes to. What lies beside a file was made by us: a link that a stranger has put there is not followed.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Names that are tried for the file beside another.
const NAMES: u32 = 16;

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
        if let Some(file) = own_output(path) {
            return Ok(Self::InPlace(file));
        }
        // A link stays a link: what it points to is replaced.
        let path = fs::canonicalize(path).or_else(|_| std::path::absolute(path))?;
        match fs::metadata(&path) {
            Ok(found) if found.is_dir() => return Err(io::Error::from(io::ErrorKind::IsADirectory)),
            Ok(found) if !found.is_file() => return Ok(Self::InPlace(OpenOptions::new().write(true).open(&path)?)),
            Ok(_) => drop(OpenOptions::new().write(true).open(&path)?),
            Err(_) => {}
        }
        let (beside, _) = begin_beside(&path)?;
        fs::remove_file(&beside)?;
        Ok(Self::Renamed(path))
    }

    /// Replaces what is there as soon as `begin` has written the beginning of the new file.
    pub(crate) fn replace<T>(self, begin: impl FnOnce(File) -> io::Result<T>) -> io::Result<T> {
        match self {
            Self::InPlace(file) => begin(file),
            Self::Renamed(path) => {
                let (beside, file) = begin_beside(&path)?;
                let begun = begin(file).and_then(|begun| {
                    fs::rename(&beside, path)?;
                    Ok(begun)
                });
                begun.inspect_err(|_| drop(fs::remove_file(&beside)))
            }
        }
    }
}

/// The file that standard output or standard error goes to, if it is this one: to replace it would lose what was written.
fn own_output(path: &Path) -> Option<File> {
    let wanted = fs::metadata(path).ok().filter(fs::Metadata::is_file)?;
    let (out, error) = (io::stdout(), io::stderr());
    [out.as_fd(), error.as_fd()].into_iter().find_map(|stream: BorrowedFd<'_>| {
        let file = File::from(stream.try_clone_to_owned().ok()?);
        let found = file.metadata().ok()?;
        ((found.dev(), found.ino()) == (wanted.dev(), wanted.ino())).then_some(file)
    })
}

/// A new file in the same directory, under a name that nobody else uses.
fn begin_beside(path: &Path) -> io::Result<(PathBuf, File)> {
    let file_name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    for nth in 0..NAMES {
        let mut name = OsString::from(".");
        name.push(file_name);
        name.push(format!(".{}.{nth}", std::process::id()));
        let beside = path.with_file_name(name);
        match OpenOptions::new().write(true).create_new(true).open(&beside) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => return made.map(|file| (beside, file)),
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
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
        // What others have put where ours is to be is not written to.
        let planted = |nth: u32| dir.join(format!(".file.{}.{nth}", std::process::id()));
        (0..3).for_each(|nth| std::os::unix::fs::symlink(dir.join("victim"), planted(nth)).expect("a link"));
        fs::write(dir.join("victim"), "untouched").expect("a file");
        write(Place::prepare(&path).expect("writable"), "beside the links").expect("written");
        assert_eq!(fs::read_to_string(dir.join("victim")).expect("there"), "untouched");
        assert_eq!(fs::read_to_string(&path).expect("there"), "beside the links");
        (3..NAMES).for_each(|nth| drop(File::create(planted(nth)).expect("a file")));
        assert_eq!(Place::prepare(&path).err().expect("no name is left").kind(), io::ErrorKind::AlreadyExists);
        write(Place::prepare(Path::new("/dev/null")).expect("a device"), "swallowed").expect("swallowed");
        assert!(!fs::metadata("/dev/null").expect("still there").is_file());
        fs::remove_dir_all(dir).expect("removed");
    }
}

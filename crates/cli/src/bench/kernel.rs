//! The kernel's own swap, to compare with: a memory cgroup that holds a program to its budget, and a device or a file where
//! the rest goes.
//!
//! Invariants: all of it is ours, made for one run and undone after it, in the opposite order; what cannot be undone is told,
//! with the command that does it. The memory controller of version 2 alone may be somebody else's in the end: then it stays.

use super::child::is_unwanted;
use super::sys;
use crate::say;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

const ZRAM: &str = "/sys/class/zram-control";
/// What children of a cgroup of version 2 have.
const SUBTREE_CONTROL: &str = "cgroup.subtree_control";
/// What can be set for a cgroup of version 2 by the memory controller, and what stands there if nobody has.
const SETTINGS: [(&str, &str); 9] = [
    ("memory.max", "max"),
    ("memory.high", "max"),
    ("memory.min", "0"),
    ("memory.low", "0"),
    ("memory.oom.group", "0"),
    ("memory.swap.max", "max"),
    ("memory.swap.high", "max"),
    ("memory.zswap.max", "max"),
    ("memory.zswap.writeback", "1"),
];
/// A cgroup or a device may be busy for a moment after its last use.
const TRIES: u32 = 50;
const BETWEEN_TRIES: Duration = Duration::from_millis(100);

/// Does something that may have to be tried again.
fn persist(mut action: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    let mut tried = 0;
    loop {
        match action() {
            Err(error) if error.kind() != io::ErrorKind::NotFound && tried < TRIES => {
                tried += 1;
                std::thread::sleep(BETWEEN_TRIES);
            }
            done => return done,
        }
    }
}

fn tell_left(what: &str, remedy: &str, done: io::Result<()>) {
    if let Err(error) = done {
        say::note(format!("bench: {what} is left: {}; end it with `{remedy}`", say::error(&error)));
    }
}

/// Where memory cgroups can be made.
pub(super) struct Hierarchy {
    root: PathBuf,
    limit: &'static str,
    /// Where children had no memory controller before.
    _enabled: Option<Enabled>,
}

impl Hierarchy {
    /// Version 1, or version 2, alone or beside it. `None` where there is no memory cgroup for us.
    pub(super) fn find(root: &Path) -> Option<Self> {
        let first = root.join("memory");
        if first.join("memory.limit_in_bytes").exists() {
            return Some(Self { root: first, limit: "memory.limit_in_bytes", _enabled: None });
        }
        let has = |group: &Path, file: &str| {
            let listed = fs::read_to_string(group.join(file)).unwrap_or_default();
            listed.split_whitespace().any(|controller| controller == "memory")
        };
        let second = [root.to_path_buf(), root.join("unified")].into_iter();
        second.filter(|group| has(group, "cgroup.controllers")).find_map(|root| {
            // Refused in a cgroup that has processes, as in a container, unless its children have the controller already.
            let enabled = (!has(&root, SUBTREE_CONTROL)).then(|| Enabled::begin(&root)).transpose().ok()?;
            Some(Self { root, limit: "memory.max", _enabled: enabled })
        })
    }
}

/// The memory controller, which we gave to the children of a cgroup of version 2.
struct Enabled(PathBuf);

impl Enabled {
    fn begin(group: &Path) -> io::Result<Self> {
        fs::write(group.join(SUBTREE_CONTROL), "+memory")?;
        Ok(Self(group.to_path_buf()))
    }

    /// Whether somebody has set anything for a child since. The kernel takes the controller away all the same, and what was set with
    /// it; it refuses only where a child has given the controller on to children of its own.
    fn is_used(&self) -> bool {
        let set = |child: &Path| {
            let differs = |(name, default): &(&str, &str)| {
                fs::read_to_string(child.join(name)).is_ok_and(|found| found.trim() != *default)
            };
            SETTINGS.iter().any(differs)
        };
        let children = fs::read_dir(&self.0).into_iter().flatten().flatten();
        children.map(|child| child.path()).any(|child| child.is_dir() && set(&child))
    }
}

impl Drop for Enabled {
    fn drop(&mut self) {
        if self.is_used() {
            return;
        }
        let control = self.0.join(SUBTREE_CONTROL);
        match fs::write(&control, "-memory") {
            // A child has given it on: it is somebody else's by now.
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {}
            done => {
                let control = control.display();
                tell_left(&format!("memory in {control}"), &format!("echo -memory >{control}"), done);
            }
        }
    }
}

/// A memory cgroup of ours.
pub(super) struct Cgroup(PathBuf);

impl Cgroup {
    /// With a limit in bytes.
    pub(super) fn make(within: &Hierarchy, bytes: u64) -> io::Result<Self> {
        let made = Self(within.root.join(format!("spillway-bench-{}", std::process::id())));
        fs::create_dir(&made.0)?;
        fs::write(made.0.join(within.limit), bytes.to_string())?;
        Ok(made)
    }

    /// Puts a process into it. What it touches from then on counts.
    pub(super) fn enter(&self, pid: i32) -> io::Result<()> {
        fs::write(self.0.join("cgroup.procs"), pid.to_string())
    }

    /// Whether the kernel has killed one of its processes for lack of memory.
    pub(super) fn has_starved(&self) -> bool {
        // Of version 2, and of version 1.
        let told = ["memory.events", "memory.oom_control"].map(|file| fs::read_to_string(self.0.join(file)));
        told.into_iter().flatten().any(|told| {
            let killed = told.lines().find_map(|line| line.strip_prefix("oom_kill "));
            killed.is_some_and(|count| count.trim() != "0")
        })
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let path = self.0.display().to_string();
        tell_left(&path, &format!("rmdir {path}"), persist(|| fs::remove_dir(&self.0)));
    }
}

/// Whether zram devices can be made; what lacks, if not.
pub(super) fn zram_lacks() -> Option<String> {
    if !Path::new(ZRAM).join("hot_add").exists() {
        return Some("this kernel has no zram, or has not loaded it: `modprobe zram num_devices=0`".into());
    }
    mkswap_lacks()
}

/// Whether swap can be made.
pub(super) fn mkswap_lacks() -> Option<String> {
    let found = Command::new("mkswap").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    found.is_err().then(|| "`mkswap` is not installed; it comes with util-linux".into())
}

fn mkswap(path: &Path) -> io::Result<()> {
    let done = Command::new("mkswap").arg(path).stdout(Stdio::null()).stderr(Stdio::null()).status()?;
    if done.success() { Ok(()) } else { Err(io::Error::other(format!("mkswap {}: {done}", path.display()))) }
}

/// A zram device of ours.
struct Zram {
    number: String,
}

impl Zram {
    fn make(bytes: u64) -> io::Result<Self> {
        let number = fs::read_to_string(Path::new(ZRAM).join("hot_add"))?.trim().to_owned();
        let made = Self { number };
        fs::write(made.setting("comp_algorithm"), "lz4")?;
        fs::write(made.setting("disksize"), bytes.to_string())?;
        Ok(made)
    }

    fn setting(&self, name: &str) -> PathBuf {
        Path::new("/sys/block").join(format!("zram{}", self.number)).join(name)
    }

    fn device(&self) -> PathBuf {
        Path::new("/dev").join(format!("zram{}", self.number))
    }
}

impl Drop for Zram {
    fn drop(&mut self) {
        let done = persist(|| fs::write(self.setting("reset"), "1"))
            .and_then(|()| persist(|| fs::write(Path::new(ZRAM).join("hot_remove"), &self.number)));
        let remedy = format!("echo {} >{ZRAM}/hot_remove", self.number);
        tell_left(&self.device().display().to_string(), &remedy, done);
    }
}

/// A file to swap to, which is gone with us.
pub(super) struct SwapFile(PathBuf);

impl SwapFile {
    /// Of so many bytes, all written: swap may have no holes.
    pub(super) fn make(directory: &Path, bytes: u64) -> io::Result<Self> {
        use std::os::unix::fs::OpenOptionsExt;
        let path = directory.join(format!(".spillway-bench-{}.swap", std::process::id()));
        let mut file = File::options().write(true).create_new(true).mode(0o600).open(&path)?;
        let made = Self(path);
        let zeros = vec![0; 1 << 20];
        for _ in 0..bytes >> 20 {
            file.write_all(&zeros)?;
            if is_unwanted() {
                return Err(io::ErrorKind::Interrupted.into());
            }
        }
        file.sync_all()?;
        mkswap(&made.0)?;
        Ok(made)
    }

    /// Where it is.
    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for SwapFile {
    fn drop(&mut self) {
        let path = self.0.display().to_string();
        tell_left(&path, &format!("rm {path}"), fs::remove_file(&self.0));
    }
}

/// Swap that is on. The fields end in this order.
pub(super) struct Swap {
    _on: SwapOn,
    /// What it is on, if that is ours alone.
    _device: Option<Zram>,
}

impl Swap {
    /// On a new zram device.
    pub(super) fn on_zram(bytes: u64) -> io::Result<Self> {
        let device = Zram::make(bytes)?;
        mkswap(&device.device())?;
        Ok(Self { _on: SwapOn::begin(&device.device())?, _device: Some(device) })
    }

    /// On a file.
    pub(super) fn on_file(file: &SwapFile) -> io::Result<Self> {
        Ok(Self { _on: SwapOn::begin(file.path())?, _device: None })
    }
}

struct SwapOn(PathBuf);

impl SwapOn {
    fn begin(path: &Path) -> io::Result<Self> {
        sys::swap_on(path)?;
        Ok(Self(path.to_path_buf()))
    }
}

impl Drop for SwapOn {
    fn drop(&mut self) {
        let path = self.0.display().to_string();
        tell_left(&format!("swap on {path}"), &format!("swapoff {path}"), persist(|| sys::swap_off(&self.0)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cgroups_of_both_versions_are_found() {
        let root = std::env::temp_dir().join(format!("spillway-cgroups-{}", std::process::id()));
        fs::create_dir_all(&root).expect("a directory");
        let find = || Hierarchy::find(&root);
        let is =
            |of: Option<&Hierarchy>, place: &Path, limit| of.is_some_and(|of| of.root == place && of.limit == limit);
        assert!(find().is_none());
        fs::write(root.join("cgroup.controllers"), "cpu io memory pids\n").expect("written");
        let control = root.join("cgroup.subtree_control");
        let controlled = || fs::read_to_string(&control).expect("readable");
        fs::write(&control, "cpu memory\n").expect("written");
        assert!(is(find().as_ref(), &root, "memory.max"));
        assert_eq!(controlled(), "cpu memory\n");
        fs::write(&control, "cpu\n").expect("written");
        let second = find();
        assert!(is(second.as_ref(), &root, "memory.max"));
        assert_eq!(controlled(), "+memory");
        drop(second);
        assert_eq!(controlled(), "-memory");
        fs::create_dir(root.join("memory")).expect("a directory");
        fs::write(root.join("memory/memory.limit_in_bytes"), "").expect("written");
        assert!(is(find().as_ref(), &root.join("memory"), "memory.limit_in_bytes"));
        fs::remove_dir_all(root).expect("removed");
    }

    #[test]
    fn a_controller_that_others_use_by_now_stays() {
        let root = std::env::temp_dir().join(format!("spillway-controller-{}", std::process::id()));
        let (control, child) = (root.join(SUBTREE_CONTROL), root.join("theirs"));
        fs::create_dir_all(&child).expect("a directory");
        let left_as = |limit: &str, share: &str| {
            fs::write(root.join("cgroup.controllers"), "memory\n").expect("written");
            fs::write(&control, "").expect("written");
            let found = Hierarchy::find(&root).expect("one");
            // What the kernel makes for a child that is there already.
            fs::write(child.join("memory.max"), limit).expect("written");
            fs::write(child.join("memory.low"), share).expect("written");
            drop(found);
            fs::read_to_string(&control).expect("readable")
        };
        assert_eq!(left_as("max\n", "0\n"), "-memory");
        assert_eq!([left_as("1048576\n", "0\n"), left_as("max\n", "4096\n")], ["+memory", "+memory"]);
        // Nor does it matter where the kernel refuses.
        let enabled = Enabled(child.clone());
        fs::create_dir(child.join(SUBTREE_CONTROL)).expect("a directory");
        drop(enabled);
        fs::remove_dir_all(root).expect("removed");
    }

    #[test]
    fn a_file_to_swap_to_goes_with_us() {
        if mkswap_lacks().is_some() {
            eprintln!("skipped: no mkswap");
            return;
        }
        let file = SwapFile::make(&std::env::temp_dir(), 1 << 20).expect("a file");
        let bytes = fs::read(file.path()).expect("readable");
        assert_eq!((bytes.len(), &bytes[4086..4096]), (1 << 20, b"SWAPSPACE2".as_slice()));
        let path = file.path().to_path_buf();
        drop(file);
        assert!(!path.exists());
    }
}

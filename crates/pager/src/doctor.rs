//! What this machine offers, what each lack costs, and the command that mends it.

use std::fs;
use std::fs::File;
use std::io;

use crate::error::Error;
use crate::procfs;
use crate::sys::uffd::{FEATURES, IOC_NEW, Uffd, new_from_device, new_from_syscall};

/// The oldest kernel with `UFFDIO_MOVE`.
const KERNEL_OLDEST: (u32, u32) = (6, 8);
const CAP_IPC_LOCK: u32 = 14;
const CAP_SYS_PTRACE: u32 = 19;
const CAP_SYS_ADMIN: u32 = 21;

/// What holds targets back from being adopted here, for `doctor` and for start-up checks.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Check {
    /// Short name: `kernel`, `userfaultfd`, `privileges`, `ptrace`, `seccomp`, `memlock`.
    pub name: &'static str,
    /// Whether all is well.
    pub ok: bool,
    /// What was found.
    pub found: String,
    /// What its lack costs; empty when `ok`.
    pub cost: String,
    /// The command that mends it; empty when `ok` or when nothing mends it.
    pub remedy: String,
}

impl Check {
    fn new(name: &'static str, ok: bool, found: impl Into<String>, cost: &str, remedy: &str) -> Self {
        let said = |text: &str| if ok { String::new() } else { text.to_owned() };
        Self { name, ok, found: found.into(), cost: said(cost), remedy: said(remedy) }
    }
}

/// Examines this machine.
pub fn doctor() -> Vec<Check> {
    vec![kernel(), userfaultfd(), privileges(), ptrace(), seccomp(), memlock()]
}

/// Refuses a machine on which nothing can be adopted.
///
/// # Errors
/// With the first reason found.
pub fn usable() -> Result<(), Error> {
    let release = release();
    if parse_release(&release).is_none_or(|version| version < KERNEL_OLDEST) {
        return Err(Error::KernelTooOld { found: release });
    }
    let uffd = open_userfaultfd().map_err(Error::NoUserfaultfd)?;
    uffd.handshake().map_err(|error| match error.raw_os_error() {
        Some(libc::EPERM) => Error::NoForkEvents,
        _ => Error::NoUserfaultfd(error),
    })
}

fn release() -> String {
    fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned()
}

fn parse_release(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// As adoption does it: through the device where it may be opened, else by the system call.
fn open_userfaultfd() -> io::Result<Uffd> {
    debug_assert_eq!(IOC_NEW, 0xAA00);
    match File::options().read(true).write(true).open("/dev/userfaultfd") {
        Ok(device) => new_from_device(&device),
        Err(_) => new_from_syscall(),
    }
}

fn kernel() -> Check {
    let release = release();
    let ok = parse_release(&release).is_some_and(|version| version >= KERNEL_OLDEST);
    Check::new("kernel", ok, release, "UFFDIO_MOVE is missing: nothing can be evicted", "boot Linux 6.8 or newer")
}

fn userfaultfd() -> Check {
    let cost = "no fault of a target can be served";
    match open_userfaultfd().and_then(|uffd| uffd.offered()) {
        Ok(offered) => {
            let ok = offered & FEATURES == FEATURES;
            let found = format!("features {offered:#x}");
            Check::new("userfaultfd", ok, found, cost, "boot a kernel with CONFIG_USERFAULTFD=y, Linux 6.8 or newer")
        }
        Err(error) => {
            let remedy =
                "run as root, or: sudo chmod 666 /dev/userfaultfd, or: sudo sysctl vm.unprivileged_userfaultfd=1";
            Check::new("userfaultfd", false, error.to_string(), cost, remedy)
        }
    }
}

fn capabilities() -> u64 {
    procfs::status_field(std::process::id().cast_signed(), "CapEff")
        .and_then(|set| u64::from_str_radix(&set, 16).ok())
        .unwrap_or(0)
}

fn has(capability: u32) -> bool {
    capabilities() >> capability & 1 == 1
}

fn privileges() -> Check {
    let ok = has(CAP_SYS_PTRACE);
    let found = if ok { "CAP_SYS_PTRACE" } else { "no CAP_SYS_PTRACE" };
    let cost = "fork events are refused, so nothing can be adopted: a forked child would read zeros";
    Check::new(
        "privileges",
        ok,
        found,
        cost,
        "run as root, or: sudo setcap cap_sys_ptrace,cap_ipc_lock+ep $(command -v spillway)",
    )
}

fn ptrace() -> Check {
    let scope = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    let scope = scope.trim();
    let ok = match scope {
        "" | "0" => true,
        "1" | "2" => has(CAP_SYS_PTRACE),
        _ => false,
    };
    let found = if scope.is_empty() { "no restriction".to_owned() } else { format!("ptrace_scope {scope}") };
    Check::new(
        "ptrace",
        ok,
        found,
        "running processes cannot be adopted",
        "sudo sysctl kernel.yama.ptrace_scope=1, and run as root",
    )
}

fn seccomp() -> Check {
    let ok = has(CAP_SYS_ADMIN);
    let found = if ok { "filters can be suspended" } else { "no CAP_SYS_ADMIN" };
    let cost = "programs under a seccomp filter (browsers, some services) cannot be adopted";
    Check::new("seccomp", ok, found, cost, "run as root")
}

fn memlock() -> Check {
    let limit = procfs::limit("Max locked memory");
    let ok = has(CAP_IPC_LOCK) || limit.as_deref() == Some("unlimited");
    let found = if ok { "may lock memory".to_owned() } else { format!("limit {}", limit.unwrap_or_default()) };
    let cost = "the pager itself may be swapped out, and faults then wait for the disk";
    Check::new(
        "memlock",
        ok,
        found,
        cost,
        "ulimit -l unlimited, or: sudo setcap cap_ipc_lock+ep $(command -v spillway)",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_compared_by_number() {
        assert_eq!(parse_release("6.18.44-fc"), Some((6, 18)));
        assert!(parse_release("6.8.0-45-generic").is_some_and(|version| version >= KERNEL_OLDEST));
        assert!(parse_release("6.1.0").is_some_and(|version| version < KERNEL_OLDEST));
        assert!(parse_release("10.0").is_some_and(|version| version >= KERNEL_OLDEST));
        assert_eq!(parse_release(""), None);
    }

    #[test]
    fn a_failed_check_says_what_it_costs_and_how_to_mend_it() {
        for check in doctor() {
            assert_eq!(check.ok, check.cost.is_empty(), "{check:?}");
            assert_eq!(check.ok, check.remedy.is_empty(), "{check:?}");
        }
    }
}

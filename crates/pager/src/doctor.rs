//! What this machine offers, what each lack costs, and the command that mends it.

use std::fs;
use std::fs::File;
use std::io::ErrorKind;
use std::path::Path;

use crate::error::Error;
use crate::sys::process::{is_root, kernel_release};
use crate::sys::sched::idle_class_can_be_left;
use crate::sys::uffd::{FEATURES, Uffd, new_from_device, new_from_syscall};
use crate::{commons, merging, procfs};

/// The oldest kernel with `UFFDIO_MOVE`.
const KERNEL_OLDEST: (u32, u32) = (6, 8);
const CAP_IPC_LOCK: u32 = 14;
const CAP_SYS_PTRACE: u32 = 19;
const CAP_SYS_ADMIN: u32 = 21;
/// Yama's `ptrace_scope` that forbids all tracing, also to root, and taking a descriptor or reading memory of another process with it. It
/// cannot be lowered (`yama_dointvec_minmax`, security/yama/yama_lsm.c).
const SCOPE_NOBODY: u32 = 3;
const PROC: &str = "/proc";
/// All that the file of the binary can be given; `setcap` takes away what it does not name.
pub const CAPABILITIES: &str = "cap_sys_ptrace,cap_ipc_lock,cap_sys_nice+ep";

/// What holds targets back from being adopted here, for `doctor` and for start-up checks.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Check {
    /// Short name: `kernel`, `userfaultfd`, `privileges`, `ptrace`, `seccomp`, `memlock`, `priority`, `sharing`,
    /// `shared-memory`.
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
    let ptrace = ptrace(ptrace_scope(Path::new(PROC)), has(CAP_SYS_PTRACE));
    vec![kernel(), userfaultfd(), privileges(), ptrace, seccomp(), memlock(), priority(), sharing(), shared_memory()]
}

/// Refuses a machine on which no program that we start could be adopted.
///
/// # Errors
/// With the first reason found.
pub fn usable() -> Result<(), Error> {
    admit(heirs_may_trace())
}

/// Refuses a machine on which process `pid`, which runs already, could not be adopted with our rights.
///
/// # Errors
/// With the first reason found.
pub fn usable_for(pid: i32) -> Result<(), Error> {
    // CAP_SYS_PTRACE opens everything of another user's process but files that are its owner's alone.
    if File::open(format!("/proc/{pid}/pagemap")).is_err_and(|error| error.kind() == ErrorKind::PermissionDenied) {
        return Err(Error::NoPermission(pid));
    }
    admit(holds(pid, "CapEff", CAP_SYS_PTRACE))
}

fn admit(target_may_trace: bool) -> Result<(), Error> {
    let found = kernel_release();
    if parse_release(&found).is_none_or(|version| version < KERNEL_OLDEST) {
        return Err(Error::KernelTooOld { found });
    }
    traceable(ptrace_scope(Path::new(PROC)))?;
    let open = || open_userfaultfd(target_may_trace);
    open()?.handshake().or_else(|error| match error.raw_os_error() {
        Some(libc::EPERM) => Err(Error::NoForkEvents),
        // A userfaultfd tells what it offers once only: a fresh one says whether a feature was what is missing.
        _ => match open()?.offered() {
            Ok(offered) if offered & FEATURES != FEATURES => {
                Err(Error::KernelTooOld { found: format!("{found}, userfaultfd features {offered:#x}") })
            }
            _ => Err(Error::NoUserfaultfd(error)),
        },
    })
}

fn parse_release(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// As adoption does it: through the device where we may open it, else by the system call. Adoption makes that call in the
/// target, whose rights may be less than ours.
fn open_userfaultfd(target_may_trace: bool) -> Result<Uffd, Error> {
    let device = match File::options().read(true).write(true).open("/dev/userfaultfd") {
        Ok(device) => return new_from_device(&device).map_err(Error::NoUserfaultfd),
        Err(error) => error,
    };
    match new_from_syscall() {
        Ok(uffd) if target_may_trace || anyone_may_have_one() => Ok(uffd),
        Err(error) if error.raw_os_error() != Some(libc::EPERM) => Err(Error::NoUserfaultfd(error)),
        _ => Err(Error::UserfaultfdForbidden { device }),
    }
}

fn anyone_may_have_one() -> bool {
    fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").is_ok_and(|text| text.trim() == "1")
}

fn kernel() -> Check {
    let release = kernel_release();
    let ok = parse_release(&release).is_some_and(|version| version >= KERNEL_OLDEST);
    Check::new("kernel", ok, release, "UFFDIO_MOVE is missing: nothing can be evicted", "boot Linux 6.8 or newer")
}

fn userfaultfd() -> Check {
    let check = |ok, found: String, remedy: &str| {
        Check::new("userfaultfd", ok, found, "no fault of a target can be served", remedy)
    };
    let newer = "boot a kernel with CONFIG_USERFAULTFD=y, Linux 6.8 or newer";
    let opened = open_userfaultfd(heirs_may_trace());
    match opened.and_then(|uffd| uffd.offered().map_err(Error::NoUserfaultfd)) {
        Ok(offered) => check(offered & FEATURES == FEATURES, format!("features {offered:#x}"), newer),
        Err(Error::UserfaultfdForbidden { device }) => check(
            false,
            format!("/dev/userfaultfd: {device}"),
            "run as root, or: sudo chmod 666 /dev/userfaultfd, or: sudo sysctl vm.unprivileged_userfaultfd=1",
        ),
        Err(Error::NoUserfaultfd(error)) => check(false, error.to_string(), newer),
        Err(other) => check(false, other.to_string(), newer),
    }
}

/// Whether a set of capabilities of `pid`, by its name in `/proc/PID/status`, holds one.
fn holds(pid: i32, set: &str, capability: u32) -> bool {
    procfs::status_field(pid, set)
        .and_then(|set| u64::from_str_radix(&set, 16).ok())
        .is_some_and(|set| set >> capability & 1 == 1)
}

fn has(capability: u32) -> bool {
    holds(std::process::id().cast_signed(), "CapEff", capability)
}

/// Whether programs that we start may trace: `exec` gives root what the bounding set leaves, and others what is ambient.
/// What the file of our own binary gives us ends with it.
fn heirs_may_trace() -> bool {
    let own = |set| holds(std::process::id().cast_signed(), set, CAP_SYS_PTRACE);
    own("CapAmb") || (is_root() && own("CapBnd"))
}

fn or_setcap(remedy: &str) -> String {
    format!("{remedy}, or: sudo setcap {CAPABILITIES} $(command -v spillway)")
}

fn privileges() -> Check {
    let ok = has(CAP_SYS_PTRACE);
    let found = if ok { "CAP_SYS_PTRACE" } else { "no CAP_SYS_PTRACE" };
    let cost = "fork events are refused, so nothing can be adopted: a forked child would read zeros";
    Check::new("privileges", ok, found, cost, &or_setcap("run as root"))
}

/// What Yama says, where there is one.
fn ptrace_scope(proc: &Path) -> Option<u32> {
    fs::read_to_string(proc.join("sys/kernel/yama/ptrace_scope")).ok()?.trim().parse().ok()
}

/// Whether anything can be traced at all.
fn traceable(scope: Option<u32>) -> Result<(), Error> {
    if scope.is_some_and(|scope| scope >= SCOPE_NOBODY) { Err(Error::PtraceForbidden) } else { Ok(()) }
}

fn ptrace(scope: Option<u32>, may_trace: bool) -> Check {
    let found = scope.map_or_else(|| "no restriction".to_owned(), |scope| format!("ptrace_scope {scope}"));
    if let Err(error) = traceable(scope) {
        return Check::new("ptrace", false, found, "nothing can be adopted", &error.to_string());
    }
    let ok = may_trace || scope.is_none_or(|scope| scope == 0);
    Check::new("ptrace", ok, found, "running processes cannot be adopted", &or_setcap("run as root"))
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
    Check::new("memlock", ok, found, cost, &or_setcap("ulimit -l unlimited"))
}

fn priority() -> Check {
    let ok = idle_class_can_be_left();
    let found = if ok { "may go before and after other programs" } else { "no CAP_SYS_NICE" };
    let cost = "a fault takes about twice as long: the pager cannot give its CPU to the program that it serves";
    Check::new("priority", ok, found, cost, &or_setcap("run as root"))
}

/// Only for who wants it: whatever is found, nothing is amiss.
fn sharing() -> Check {
    let found = match merging::usable() {
        Ok(()) => "the kernel keeps equal pages once for --share".into(),
        Err(Error::MergingOff) => "switched off; for --share: echo 1 | sudo tee /sys/kernel/mm/ksm/run".to_owned(),
        Err(_) => "not in this kernel; --share wants Linux 6.4 or newer with CONFIG_KSM=y".into(),
    };
    Check::new("sharing", true, found, "", "")
}

fn shared_memory() -> Check {
    let found = match commons::usable() {
        Ok(()) => "what processes share can be managed with --shared-memory".into(),
        Err(error) => error.to_string(),
    };
    Check::new("shared-memory", true, found, "", "")
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

    /// What was said to mend it cannot be done until the next boot; and `run` began all the same, unmanaged.
    #[test]
    fn where_nobody_may_trace_nothing_begins_and_a_boot_is_advised() {
        let proc = std::env::temp_dir().join(format!("spillway-proc-{}", std::process::id()));
        let yama = proc.join("sys/kernel/yama");
        assert_eq!(ptrace_scope(&proc), None);
        fs::create_dir_all(&yama).expect("a directory");
        let [of_root, of_others] = [true, false].map(|may_trace| {
            ["0", "1", "2", "3"].map(|scope| {
                fs::write(yama.join("ptrace_scope"), format!("{scope}\n")).expect("a file");
                let scope = ptrace_scope(&proc);
                (ptrace(scope, may_trace), traceable(scope).is_ok())
            })
        });
        fs::remove_dir_all(&proc).expect("it is ours");
        assert_eq!(
            of_root.each_ref().map(|(check, usable)| (check.ok, *usable)),
            [(true, true), (true, true), (true, true), (false, false)]
        );
        assert_eq!(of_others.each_ref().map(|(check, _)| check.ok), [true, false, false, false]);
        let remedy = &of_root[3].0.remedy;
        assert!(remedy.contains("reboot") && !remedy.contains("sysctl kernel"), "{remedy}");
        assert!(of_others[1].0.remedy.contains("run as root") && ptrace(None, false).ok);
    }

    #[test]
    fn a_failed_check_says_what_it_costs_and_how_to_mend_it() {
        for check in doctor() {
            assert_eq!(check.ok, check.cost.is_empty(), "{check:?}");
            assert_eq!(check.ok, check.remedy.is_empty(), "{check:?}");
        }
    }
}

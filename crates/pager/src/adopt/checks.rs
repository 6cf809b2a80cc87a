//! What is looked at before anything in a target is touched.

use std::fs::{self, File};
use std::io;

use spillway_core::{PAGE_BYTES_U64, Span};

use super::SYSCALL;
use crate::error::Error;
use crate::procfs::{self, Stat};
use crate::sys::process;
use crate::sys::ptrace::is_left;

/// How often another thread is looked at where one has ended meanwhile: its process may go on.
pub(super) const THREAD_TRIES: usize = 64;

/// Whether no debugger traces this thread of `pid`.
///
/// # Errors
/// [`Error::Traced`]. [`Error::Ended`] where a thread of ours does: it has ended, and we have not taken note yet.
pub fn untraced(pid: i32, thread: i32) -> Result<(), Error> {
    match procfs::status_field(thread, "TracerPid").and_then(|tracer| tracer.parse().ok()) {
        Some(0) | None => Ok(()),
        Some(tracer) if procfs::thread_stat(std::process::id().cast_signed(), tracer).is_ok() => Err(Error::Ended(pid)),
        Some(tracer) => {
            let name = procfs::status_field(tracer, "Name").unwrap_or_else(|| "another program".into());
            Err(Error::Traced { pid, tracer, name })
        }
    }
}

/// Refuses what cannot be adopted, before anything is touched.
///
/// # Errors
/// As [`Error`] says.
pub fn examine(pid: i32) -> Result<(), Error> {
    let mut examined = Err(Error::Ended(pid));
    for _ in 0..THREAD_TRIES {
        examined = examine_one(pid);
        if !matches!(examined, Err(Error::Ended(_) | Error::NoSuchProcess(_))) || procfs::living_thread(pid).is_none() {
            break;
        }
    }
    examined
}

/// As above; [`Error::Ended`] and [`Error::NoSuchProcess`] also where that was a thread, and others go on.
fn examine_one(pid: i32) -> Result<(), Error> {
    let found = procfs::living_thread(pid);
    let living = found.unwrap_or(pid);
    // In one read: the next may find another thread, or none.
    let status = procfs::status(living).ok_or(Error::NoSuchProcess(pid))?;
    let field = |name| procfs::parse_field(&status, name);
    if field("State").is_none_or(|state| state.starts_with(['Z', 'X'])) || field("VmSize").is_none() {
        // A thread parts with its memory before it has ended.
        let is_ending = found.is_some() && procfs::thread_stat(pid, living).map_or(true, |thread| thread.is_ending);
        return Err(if is_ending { Error::Ended(pid) } else { Error::NoMemoryOfItsOwn(pid) });
    }
    // One that did not stop when it was to be adopted before is still traced by us.
    if !is_left(living)
        && let Err(traced) = untraced(pid, living)
    {
        return Err(unadopted(pid).err().unwrap_or(traced));
    }
    match File::open(format!("/proc/{living}/exe")) {
        Ok(mut file) => {
            let mut head = [0_u8; 5];
            if io::Read::read_exact(&mut file, &mut head).is_ok() && head[..4] == *b"\x7fELF" && head[4] != 2 {
                return Err(Error::Not64Bit(pid));
            }
        }
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Err(Error::NoPermission(pid)),
        // A deleted or otherwise unreadable program: the registers will tell.
        Err(_) => {}
    }
    unadopted(pid)
}

/// Whether no pager has an agent in it.
///
/// # Errors
/// [`Error::AlreadyAdopted`].
pub(super) fn unadopted(pid: i32) -> Result<(), Error> {
    let has_agent = procfs::threads(pid).is_ok_and(|all| all.iter().any(|&thread| procfs::is_agent(pid, thread)));
    if has_agent { Err(Error::AlreadyAdopted(pid)) } else { Ok(()) }
}

/// Whether agents are kept seized, out of reach of seccomp filters: that takes `CAP_SYS_ADMIN`.
pub fn keeps_seized() -> bool {
    const CAP_SYS_ADMIN: u32 = 21;
    procfs::status_field(std::process::id().cast_signed(), "CapEff")
        .and_then(|set| u64::from_str_radix(&set, 16).ok())
        .is_some_and(|set| set >> CAP_SYS_ADMIN & 1 == 1)
}

/// The vDSO of a target.
pub(super) struct Vdso {
    /// Where it is.
    pub(super) span: Span,
    /// The address of a `syscall` instruction in it.
    pub(super) instruction: u64,
}

/// The vDSO of the target, of which `thread` is one that lives.
///
/// # Errors
/// [`Error::Ended`] while the target becomes another program, which is to be looked at later, and where the thread has ended, as all but
/// the one do that runs that program.
pub(super) fn vdso(pid: i32, thread: i32) -> Result<Vdso, Error> {
    let program = auxiliary_vector(thread);
    mapped_vdso(pid, thread).map_err(|error| {
        let is_same = program == auxiliary_vector(thread) && !program.is_some_and(|vector| is_unwritten(&vector));
        if is_same && procfs::is_alive(procfs::stat(thread)) { error } else { Error::Ended(pid) }
    })
}

fn mapped_vdso(pid: i32, thread: i32) -> Result<Vdso, Error> {
    let system = |what| move |error| Error::System { what, error };
    let mappings = procfs::mappings(pid).map_err(|_| Error::NoPermission(pid))?;
    let vdso = mappings
        .iter()
        .find(|mapping| mapping.name == "[vdso]")
        .ok_or_else(|| Error::System { what: "finding the target's vDSO", error: io::ErrorKind::NotFound.into() })?;
    let mut image = vec![0_u8; usize::try_from(vdso.span.pages() * PAGE_BYTES_U64).unwrap_or(0)];
    process::read_memory(thread, vdso.span.start, &mut image).map_err(system("reading the target's vDSO"))?;
    let offset = image.windows(2).position(|bytes| bytes == SYSCALL).ok_or_else(|| Error::System {
        what: "finding a system call in the target's vDSO",
        error: io::ErrorKind::NotFound.into(),
    })?;
    Ok(Vdso { span: vdso.span, instruction: vdso.span.start.0 + offset as u64 })
}

/// By which two programs differ that a process runs after each other: where things are in memory. None where we may not read it.
fn auxiliary_vector(thread: i32) -> Option<Vec<u8>> {
    fs::read(format!("/proc/{thread}/auxv")).ok()
}

/// Whether it is that of a program which is being loaded: the vDSO is mapped before it is written (`load_elf_binary`, fs/binfmt_elf.c).
fn is_unwritten(vector: &[u8]) -> bool {
    vector.iter().all(|byte| *byte == 0)
}

/// A thread to borrow: rather one that sleeps, never one that cannot be stopped, or that stops and makes no system call for us.
pub(super) fn quiet_thread(pid: i32) -> Result<i32, Error> {
    let threads = procfs::threads(pid).map_err(|_| Error::NoSuchProcess(pid))?;
    let rank = |thread: &i32| match procfs::thread_stat(pid, *thread) {
        Ok(stat) if stat.is_kernels => 5,
        Ok(stat) if stat.is_ending => 4,
        Ok(Stat { state: b'S', .. }) => 0,
        Ok(Stat { state: b'R', .. }) => 1,
        Ok(Stat { state: b'T', .. }) => 2,
        Ok(Stat { state: b'D', .. }) => 3,
        _ => 4,
    };
    threads.into_iter().min_by_key(rank).ok_or(Error::NoSuchProcess(pid))
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    use super::*;
    use crate::sys::ptrace::Seized;

    /// A pager refused to end, as itself were a debugger that must let go first.
    #[test]
    fn who_is_traced_by_us_is_not_said_to_be_in_a_debugger() {
        let mut target = Command::new("sleep").arg("60").spawn().expect("a program");
        let pid = target.id().cast_signed();
        assert!(untraced(pid, pid).is_ok());
        let seized = Seized::new(pid).expect("it is ours");
        let told = untraced(pid, pid);
        drop(seized);
        target.kill().and_then(|()| target.wait()).expect("it is killed");
        assert!(matches!(told, Err(Error::Ended(_))));
    }

    /// Its process went on as another program, and the pager as if that had not let it go.
    #[test]
    fn a_thread_that_has_ended_is_not_taken_for_one_without_a_vdso() {
        let mut ended = Command::new("true").spawn().expect("a program");
        ended.wait().expect("it ends");
        let ended = ended.id().cast_signed();
        assert!(matches!(vdso(ended, ended), Err(Error::Ended(_))));
    }

    #[test]
    fn who_becomes_another_program_is_not_taken_for_one_without_a_vdso() {
        // It runs itself in its own place, for ever.
        let again = r#"exec /bin/sh -c "$0" "$0""#;
        let target = Command::new("/bin/sh").args(["-c", again, again]).stdin(Stdio::null()).spawn();
        let mut target = target.expect("a shell");
        let pid = target.id().cast_signed();
        let (begun, mut seen, mut missed) = (Instant::now(), 0, Vec::new());
        while begun.elapsed() < Duration::from_secs(2) {
            match vdso(pid, pid) {
                Ok(_) => seen += 1,
                Err(Error::Ended(_)) => {}
                Err(error) => missed.push(error.to_string()),
            }
        }
        target.kill().and_then(|()| target.wait()).expect("it is killed");
        assert_eq!((seen > 100, missed), (true, Vec::new()));
    }
}

//! PROCMAP_QUERY on `/proc/PID/maps` (Linux 6.11, `fs/proc/task_mmu.c`): one mapping, as it is now, in a microsecond.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use spillway_core::{Address, Span};

use crate::procfs::{self, FileId, Mapping};

const IOC_QUERY: u64 = 0xC068_6611;
const READABLE: u64 = 1;
const WRITABLE: u64 = 2;
const EXECUTABLE: u64 = 4;
const SHARED: u64 = 8;
/// `PROCMAP_QUERY_COVERING_OR_NEXT_VMA`.
const OR_NEXT: u64 = 0x10;
/// `PROCMAP_QUERY_FILE_BACKED_VMA`.
const OF_A_FILE: u64 = 0x20;
/// Names of memory without a file are shorter: at most 80 bytes and their brackets.
const NAME_BYTES: usize = 128;

/// `struct procmap_query`.
#[repr(C)]
#[derive(Default)]
struct QueryArgument {
    size: u64,
    query_flags: u64,
    query_addr: u64,
    start: u64,
    end: u64,
    flags: u64,
    page_size: u64,
    offset: u64,
    inode: u64,
    device: [u32; 2],
    name_size: u32,
    build_id_size: u32,
    name: u64,
    build_id: u64,
}

const _: () = assert!(size_of::<QueryArgument>() == 0x68);

/// The mappings of an address space, to be asked for one by one.
#[derive(Debug)]
pub struct ProcMap(File);

impl ProcMap {
    /// Opens the mappings of `pid`.
    ///
    /// # Errors
    /// Without ptrace rights over it, or when it is gone.
    pub fn open(pid: i32) -> io::Result<Self> {
        let thread = procfs::living_thread(pid).unwrap_or(pid);
        File::open(format!("/proc/{thread}/maps")).map(Self)
    }

    /// The mapping that `address` is in, or the next behind it; none where nothing is mapped any more.
    ///
    /// # Errors
    /// ENOTTY before 6.11, ESRCH when the process is gone.
    pub fn at_or_behind(&self, address: Address) -> io::Result<Option<Mapping>> {
        let mut name = [0_u8; NAME_BYTES];
        // The path of a file may be too long for it, and is of no interest.
        or_the_end(self.query(address, OR_NEXT, &mut name).or_else(|_| self.query(address, OR_NEXT, &mut [])))
    }

    /// Whether one of these files is mapped, shared memory without a name included. What is not of a file costs next to nothing.
    ///
    /// # Errors
    /// As for [`ProcMap::at_or_behind`].
    pub fn has_any(&self, is_one: impl Fn(FileId) -> bool) -> io::Result<bool> {
        let mut from = Address(0);
        while let Some(mapping) = or_the_end(self.query(from, OR_NEXT | OF_A_FILE, &mut []))? {
            if mapping.file.is_some_and(&is_one) {
                return Ok(true);
            }
            from = mapping.span.end;
        }
        Ok(false)
    }

    /// Mappings that reach into `span`, in their order, as far as the kernel can be asked.
    pub fn within(&self, span: Span) -> impl Iterator<Item = Mapping> {
        let mut from = span.start;
        std::iter::from_fn(move || {
            let mapping = self.at_or_behind(from).ok().flatten().filter(|mapping| mapping.span.start < span.end)?;
            from = mapping.span.end;
            Some(mapping)
        })
    }

    fn query(&self, address: Address, query_flags: u64, name: &mut [u8]) -> io::Result<Mapping> {
        let mut argument = QueryArgument {
            size: size_of::<QueryArgument>() as u64,
            query_flags,
            query_addr: address.0,
            name_size: u32::try_from(name.len()).unwrap_or(0),
            name: if name.is_empty() { 0 } else { name.as_mut_ptr() as u64 },
            ..QueryArgument::default()
        };
        // SAFETY: the kernel reads and writes the structure, whose size it is told, and writes at most `name_size` bytes of
        // the name; both are exclusively ours during the call.
        let answer = unsafe { libc::ioctl(self.0.as_raw_fd(), IOC_QUERY, &raw mut argument) };
        if answer != 0 {
            return Err(io::Error::last_os_error());
        }
        let has = |flag| argument.flags & flag != 0;
        let length = argument.name_size.saturating_sub(1) as usize;
        Ok(Mapping {
            span: Span { start: Address(argument.start), end: Address(argument.end) },
            readable: has(READABLE),
            writable: has(WRITABLE),
            executable: has(EXECUTABLE),
            private: !has(SHARED),
            file: (argument.inode != 0)
                .then_some(FileId { device: (argument.device[0], argument.device[1]), inode: argument.inode }),
            offset: argument.offset,
            name: String::from_utf8_lossy(name.get(..length).unwrap_or_default()).into_owned(),
        })
    }
}

/// None where nothing is mapped any more.
fn or_the_end(answer: io::Result<Mapping>) -> io::Result<Option<Mapping>> {
    match answer {
        Ok(mapping) => Ok(Some(mapping)),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use crate::skipped::skipped;
    use std::os::unix::fs::MetadataExt;

    use super::*;

    fn asked_of(own: i32) -> Option<ProcMap> {
        let map = ProcMap::open(own).expect("our own");
        let can_be_asked = map.query(Address(0), OR_NEXT, &mut []).is_ok();
        if !can_be_asked {
            skipped("PROCMAP_QUERY needs Linux 6.11");
        }
        can_be_asked.then_some(map)
    }

    #[test]
    fn the_kernel_tells_of_one_mapping_what_it_writes_into_the_list() {
        let own = std::process::id().cast_signed();
        let Some(map) = asked_of(own) else { return };
        let mut compared = 0;
        for expected in procfs::mappings(own).expect("our own") {
            let found = map.at_or_behind(expected.span.start).expect("it can be asked");
            // Other tests map and unmap meanwhile: what is the same in two lists has not changed between. The query knows nothing
            // of the page that the kernel shows to everyone.
            let again = procfs::mappings(own).expect("our own");
            if again.contains(&expected) && expected.name != "[vsyscall]" {
                assert_eq!(found, Some(expected));
                compared += 1;
            }
        }
        assert!(compared > 10);
        let first = map.at_or_behind(Address(0)).expect("it can be asked").expect("something is mapped");
        assert!(first.span.start > Address(0));
        assert_eq!(map.at_or_behind(Address(0x7fff_ffff_e000)).expect("it can be asked"), None);
    }

    #[test]
    fn who_has_a_file_mapped_is_found_without_reading_the_list() {
        let own = std::process::id().cast_signed();
        let Some(map) = asked_of(own) else { return };
        let files: Vec<FileId> = procfs::mappings(own).expect("our own").iter().filter_map(|it| it.file).collect();
        // What other tests have mapped may be gone; this program's own file is not.
        let program = std::fs::metadata("/proc/self/exe").expect("our own");
        let its: Vec<&FileId> = files.iter().filter(|file| file.inode == program.ino()).collect();
        assert!(!its.is_empty());
        assert!(map.has_any(|file| its.contains(&&file)).expect("it can be asked"));
        assert!(!map.has_any(|_| false).expect("it can be asked"));
    }
}

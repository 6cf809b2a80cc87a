//! What `/proc` says of a process's memory: its mappings, what they show, how large it is.

use std::io;

use spillway_core::{Address, Span};
use spillway_store::vault;

use super::{if_asked, living_thread, read_of_living, read_short};
use crate::adopt::NAME as AGENT_NAME;

/// What the kernel calls memory of `MAP_SHARED | MAP_ANONYMOUS`.
pub(super) const ANONYMOUS_SHARED: &str = "/dev/zero (deleted)";

/// Which file a mapping shows, whatever it is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileId {
    /// The device, major and minor.
    pub device: (u32, u32),
    /// The inode.
    pub inode: u64,
}

/// A line of `/proc/PID/maps`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// Where.
    pub span: Span,
    /// Readable.
    pub readable: bool,
    /// Writable.
    pub writable: bool,
    /// Executable.
    pub executable: bool,
    /// Private to the process.
    pub private: bool,
    /// The file that backs it.
    pub file: Option<FileId>,
    /// Where in the file it begins, in bytes.
    pub offset: u64,
    /// Path, or a name in brackets; may be empty.
    pub name: String,
}

impl Mapping {
    /// Adds it to mappings that were seen before it, each further up than the last. They change between two looks, and the
    /// newest is right: one that has grown is seen a second time, and taken as it is now.
    pub fn seen_behind(self, seen: &mut Vec<Self>) {
        while seen.pop_if(|last| last.span.start >= self.span.start).is_some() {}
        if let Some(last) = seen.last_mut() {
            last.span.end = last.span.end.min(self.span.start);
        }
        seen.push(self);
    }

    /// Parses one line.
    pub fn parse(line: &str) -> Option<Self> {
        let mut fields = line.split_ascii_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let start = Address(u64::from_str_radix(start, 16).ok()?);
        let end = Address(u64::from_str_radix(end, 16).ok()?);
        let &[r, w, x, p] = fields.next()?.as_bytes() else { return None };
        let offset = u64::from_str_radix(fields.next()?, 16).ok()?;
        let (major, minor) = fields.next()?.split_once(':')?;
        let device = (u32::from_str_radix(major, 16).ok()?, u32::from_str_radix(minor, 16).ok()?);
        let inode = fields.next()?.parse().ok()?;
        let file = (inode != 0).then_some(FileId { device, inode });
        let name = fields.collect::<Vec<_>>().join(" ");
        (start < end && start.page() == start && end.page() == end).then_some(Self {
            span: Span { start, end },
            readable: r == b'r',
            writable: w == b'w',
            executable: x == b'x',
            private: p == b'p',
            file,
            offset,
            name,
        })
    }

    /// Whether it is memory that processes share, and that nobody finds by a path: a memfd, or `MAP_SHARED | MAP_ANONYMOUS`.
    /// (`/memfd:` may also be one of huge pages: that shows in its file system.)
    pub fn is_common(&self) -> bool {
        let memfd = self.name.strip_prefix("/memfd:").and_then(|name| name.strip_suffix(" (deleted)"));
        let memfd = memfd.is_some_and(|name| ![AGENT_NAME, vault::NAME].contains(&name));
        !self.private && !self.executable && self.file.is_some() && (self.name == ANONYMOUS_SHARED || memfd)
    }

    /// Whether somebody may have a descriptor of such memory, by which it is read and written past all mappings.
    pub fn may_be_open(&self) -> bool {
        self.name != ANONYMOUS_SHARED
    }

    /// Whether its pages may be managed: private anonymous memory for data. A mapping without any access is included,
    /// because it is an allocator's reserve and becomes writable without notice. Stacks that grow by themselves are not:
    /// the kernel extends them under us. Memory that holds code (just-in-time compilers) stays local.
    pub fn is_manageable(&self) -> bool {
        let anonymous = self.private && self.file.is_none() && !self.executable && (self.writable || !self.readable);
        let special = self.name.starts_with("[stack") || self.name.starts_with("[v");
        anonymous && !special
    }
}

/// The mappings of `pid`.
///
/// # Errors
/// Without rights over it, or when it is gone.
pub fn mappings(pid: i32) -> io::Result<Vec<Mapping>> {
    let text = read_of_living(pid, "maps")?;
    let mut seen = Vec::new();
    for mapping in String::from_utf8_lossy(&text).lines().filter_map(Mapping::parse) {
        mapping.seen_behind(&mut seen);
    }
    Ok(seen)
}

/// Pages of memory in a process, from `/proc/PID/statm`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Size {
    /// Address space.
    pub total_pages: u64,
    /// Resident and not backed by a file: what could be managed, and stacks.
    pub anonymous_pages: u64,
}

/// How large `pid` is.
///
/// # Errors
/// When it is gone.
pub fn size(pid: i32) -> io::Result<Size> {
    let of = |pid| parse_statm(&read_short(&format!("/proc/{pid}/statm"))?).ok_or(io::ErrorKind::InvalidData.into());
    match of(pid)? {
        Size { total_pages: 0, .. } => of(living_thread(pid).ok_or(io::ErrorKind::NotFound)?),
        size => Ok(size),
    }
}

/// Parses `/proc/PID/statm`.
pub fn parse_statm(text: &str) -> Option<Size> {
    let mut fields = text.split_ascii_whitespace().map(|field| field.parse::<u64>());
    let (total, resident, shared) = (fields.next()?.ok()?, fields.next()?.ok()?, fields.next()?.ok()?);
    Some(Size { total_pages: total, anonymous_pages: resident.saturating_sub(shared) })
}

/// Mappings of `pid` that carry one of `flags` (two letters each, proc(5), `VmFlags`). Walks its page tables, as
/// everything does that tells flags: not for every day. None of one that has ended.
///
/// # Errors
/// When we could not ask ([`is_for_want_of`](super::is_for_want_of)).
pub fn mappings_with_flag(pid: i32, flags: &[&str]) -> io::Result<Vec<(Span, String)>> {
    let text = if_asked(read_of_living(pid, "smaps"))?.unwrap_or_default();
    Ok(parse_flags(&String::from_utf8_lossy(&text), flags))
}

/// Parses `/proc/PID/smaps`: the mappings that carry one of `flags`, each with the first of them that it carries.
pub fn parse_flags(text: &str, flags: &[&str]) -> Vec<(Span, String)> {
    let mut found = Vec::new();
    let mut mapping = None;
    for line in text.lines() {
        if let Some(carried) = line.strip_prefix("VmFlags:") {
            let flag = flags.iter().find(|flag| carried.split_ascii_whitespace().any(|carried| carried == **flag));
            found.extend(mapping.take().zip(flag.map(|flag| (*flag).to_owned())));
        } else if let Some(header) = Mapping::parse(line) {
            mapping = Some(header.span);
        }
    }
    found
}

/// Whether any of its memory is registered with a userfaultfd.
///
/// # Errors
/// When we could not ask ([`is_for_want_of`](super::is_for_want_of)).
pub fn has_registered_memory(pid: i32) -> io::Result<bool> {
    Ok(!mappings_with_flag(pid, &["um"])?.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Mapping {
        Mapping::parse(line).expect("a good line")
    }

    #[test]
    fn what_changes_while_it_is_looked_at_is_taken_as_seen_last() {
        let look = |lines: &[&str]| {
            let mut seen = Vec::new();
            lines.iter().for_each(|line| parse(line).seen_behind(&mut seen));
            seen.iter().map(|it| (it.span.start.0, it.span.end.0)).collect::<Vec<_>>()
        };
        let [low, grown] = ["10000-14000 rw-p 00000000 00:00 0", "10000-18000 rw-p 00000000 00:00 0"];
        let [inner, next] = ["12000-16000 rw-p 00000000 00:00 0", "18000-20000 rw-p 00000000 00:00 0"];
        assert_eq!(look(&[low, next]), [(0x10000, 0x14000), (0x18000, 0x20000)]);
        assert_eq!(look(&[low, grown, next]), [(0x10000, 0x18000), (0x18000, 0x20000)]);
        assert_eq!(look(&[low, inner]), [(0x10000, 0x12000), (0x12000, 0x16000)]);
        assert_eq!(look(&[low, inner, grown]), [(0x10000, 0x18000)]);
    }

    #[test]
    fn only_private_anonymous_data_is_manageable() {
        for (line, manageable) in [
            ("7f0000000000-7f0000200000 rw-p 00000000 00:00 0 ", true),
            ("55d000000000-55d000021000 rw-p 00000000 00:00 0                          [heap]", true),
            ("7f0000000000-7f0000200000 ---p 00000000 00:00 0 ", true),
            ("7f0000000000-7f0000200000 rw-p 00000000 00:00 0                          [anon: glibc: malloc]", true),
            ("7f0000000000-7f0000200000 r--p 00000000 00:00 0 ", false),
            ("7f0000000000-7f0000200000 rwxp 00000000 00:00 0 ", false),
            ("7f0000000000-7f0000200000 rw-s 00000000 00:01 7 /dev/zero (deleted)", false),
            ("7f0000000000-7f0000200000 rw-p 00001000 fe:01 7 /usr/lib/a b.so", false),
            ("7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0                          [stack]", false),
            ("7ffc00000000-7ffc00004000 r--p 00000000 00:00 0                          [vvar]", false),
        ] {
            assert_eq!(parse(line).is_manageable(), manageable, "{line}");
        }
    }

    #[test]
    fn garbage_is_no_mapping() {
        for line in ["", "x", "1-2", "2000-1000 rw-p 0 0 0", "1001-2000 rw-p 0 0:0 0", "1000-2000 rw 0 0:0 0", "-"] {
            assert_eq!(Mapping::parse(line), None, "{line}");
        }
    }

    #[test]
    fn flags_belong_to_the_mapping_above_them() {
        let text = "1000-2000 rw-p 00000000 00:00 0 \nRss: 4 kB\nVmFlags: rd wr mr mw me ac \n\
                    2000-5000 rw-p 00000000 00:00 0 \nVmFlags: rd wr wf um \nVmFlags: wf\nnonsense\n";
        let found = parse_flags(text, &["wf", "dc"]);
        assert_eq!(found, [(Span { start: Address(0x2000), end: Address(0x5000) }, "wf".to_owned())]);
    }

    #[test]
    fn statm_counts_what_no_file_backs() {
        let size = parse_statm("1000 300 100 5 0 200 0\n").expect("a good line");
        assert_eq!(size, Size { total_pages: 1000, anonymous_pages: 200 });
        assert_eq!(parse_statm("1000"), None);
    }
}

//! Any `/proc/PID/maps` and `/proc/PID/smaps`: what is taken for a mapping is a whole one, and reads the same again.

use spillway_core::PAGE_BYTES_U64;
use spillway_pager::procfs::{Mapping, parse_flags};

const FLAGS: [&str; 3] = ["dc", "wf", "um"];

/// Holds one input to it.
pub fn check(text: &str) {
    let mappings: Vec<Mapping> = text.lines().filter_map(Mapping::parse).collect();
    for mapping in &mappings {
        let (start, end) = (mapping.span.start.0, mapping.span.end.0);
        assert!(start < end && start % PAGE_BYTES_U64 == 0 && end % PAGE_BYTES_U64 == 0);
        assert!(!mapping.is_manageable() || mapping.private && mapping.file.is_none() && !mapping.executable);
        assert!(!mapping.is_common() || !mapping.private && mapping.file.is_some() && !mapping.executable);
        assert_eq!(Mapping::parse(&line(mapping)).as_ref(), Some(mapping));
    }
    let found = parse_flags(text, &FLAGS);
    assert!(found.len() <= text.lines().filter(|line| line.starts_with("VmFlags:")).count());
    for (span, flag) in &found {
        assert!(FLAGS.contains(&flag.as_str()));
        assert!(mappings.iter().any(|mapping| mapping.span == *span));
    }
    for flag in FLAGS {
        // Asked for alone, a flag is found wherever it was the first of several, and perhaps elsewhere.
        let alone = parse_flags(text, &[flag]);
        assert!(found.iter().filter(|(_, first)| first == flag).all(|each| alone.contains(each)));
    }
}

fn line(of: &Mapping) -> String {
    let letter = |yes, letter| if yes { letter } else { '-' };
    let access = [letter(of.readable, 'r'), letter(of.writable, 'w'), letter(of.executable, 'x')];
    let access: String = access.into_iter().chain([if of.private { 'p' } else { 's' }]).collect();
    let (start, end, offset) = (of.span.start.0, of.span.end.0, of.offset);
    let ((major, minor), inode) = of.file.map_or(((0, 0), 0), |file| (file.device, file.inode));
    format!("{start:x}-{end:x} {access} {offset:08x} {major:02x}:{minor:02x} {inode} {}", of.name)
}

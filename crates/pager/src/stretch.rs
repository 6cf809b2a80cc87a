//! Which addresses are registered, and let go, in one call.
//!
//! The kernel makes two of a mapping when a part of it is registered or unregistered, and `mremap` over both is EFAULT
//! where it would be one. What is known of mappings is always a moment old, and they grow: so a call covers mappings that
//! touch each other at once, and goes on into the free space behind the last.

use spillway_core::{Address, Span};

use crate::procfs::Mapping;

/// Mappings one right behind the other, to be registered together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// In order.
    pub mappings: Vec<Span>,
    /// Where the call ends.
    pub end: Address,
}

impl Stretch {
    /// All of it.
    pub fn span(&self) -> Span {
        Span { start: self.mappings[0].start, end: self.end }
    }
}

/// Those of `mappings` that are `wanted`, in stretches.
pub fn stretches(mappings: &[Mapping], wanted: impl Fn(&Mapping) -> bool) -> Vec<Stretch> {
    let mut stretches: Vec<Stretch> = Vec::new();
    let mut end = None;
    for &Mapping { span, .. } in mappings.iter().filter(|mapping| wanted(mapping)) {
        match stretches.last_mut().filter(|_| end == Some(span.start)) {
            Some(last) => last.mappings.push(span),
            None => stretches.push(Stretch { mappings: vec![span], end: span.end }),
        }
        end = Some(span.end);
    }
    for stretch in &mut stretches {
        let end = stretch.mappings.last().map_or(stretch.end, |last| last.end);
        stretch.end = room_behind(mappings, end);
    }
    stretches
}

/// How far a call reaches for what was known to end at `end`: over what the mapping has grown by since, and the nearer half
/// of the free space behind it, into which it may be growing right now. The kernel places new mappings at the other end of
/// free space; they may be of a kind that must not be registered. A stack grows into it from there.
pub fn room_behind(mappings: &[Mapping], end: Address) -> Address {
    let at = mappings.partition_point(|mapping| mapping.span.end < end);
    let Some(last) = mappings.get(at).filter(|mapping| mapping.span.start < end) else { return end };
    match mappings.get(at + 1) {
        Some(next) if !next.name.starts_with("[stack") => {
            last.span.end.plus_pages(next.span.start.pages_since(last.span.end) / 2)
        }
        _ => last.span.end,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mappings(lines: &[&str]) -> Vec<Mapping> {
        lines.iter().map(|line| Mapping::parse(line).expect("a good line")).collect()
    }

    fn span(start: u64, end: u64) -> Span {
        Span { start: Address(start), end: Address(end) }
    }

    #[test]
    fn what_touches_is_one_and_reaches_half_way_to_the_next() {
        let all = mappings(&[
            "10000-20000 rw-p 00000000 00:00 0",
            "20000-30000 ---p 00000000 00:00 0",
            "50000-60000 r-xp 00000000 fe:01 7 /usr/lib/a.so",
            "60000-70000 rw-p 00000000 00:00 0",
            "70000-71000 rw-p 00000000 fe:01 7 /usr/lib/a.so",
            "80000-90000 rw-p 00000000 00:00 0",
            "f0000-ff000 rw-p 00000000 00:00 0 [stack]",
        ]);
        let found = stretches(&all, Mapping::is_manageable);
        assert_eq!(
            found,
            [
                Stretch { mappings: vec![span(0x10000, 0x20000), span(0x20000, 0x30000)], end: Address(0x40000) },
                Stretch { mappings: vec![span(0x60000, 0x70000)], end: Address(0x70000) },
                Stretch { mappings: vec![span(0x80000, 0x90000)], end: Address(0x90000) },
            ]
        );
        assert_eq!(found[0].span(), span(0x10000, 0x40000));
    }

    #[test]
    fn what_has_grown_since_is_covered() {
        let now = mappings(&["10000-28000 rw-p 00000000 00:00 0", "48000-50000 rw-p 00000000 00:00 0"]);
        assert_eq!(room_behind(&now, Address(0x20000)), Address(0x38000));
        assert_eq!(room_behind(&now, Address(0x28000)), Address(0x38000));
        // Behind the last nothing is known; and what is gone has not grown.
        assert_eq!(room_behind(&now, Address(0x50000)), Address(0x50000));
        assert_eq!(room_behind(&now, Address(0x30000)), Address(0x30000));
        assert_eq!(room_behind(&[], Address(0x30000)), Address(0x30000));
    }
}

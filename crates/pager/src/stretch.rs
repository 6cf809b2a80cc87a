//! Which addresses are registered, and let go, in one call.
//!
//! The kernel makes two of a mapping when a part of it is registered or unregistered, and `mremap` over both is EFAULT
//! where it would be one. What is known of mappings is always a moment old, and they grow: so a call covers mappings that
//! touch each other at once, and goes on into the free space behind the last.

use spillway_core::{Address, Span};

use crate::procfs::Mapping;

/// Mappings in front of a stretch that are looked at: if there are more, the next scan finds them.
const BELOW_MAX: usize = 16;

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

    /// What of it is mapped.
    pub fn mapped(&self) -> Span {
        Span { end: self.mappings.last().map_or(self.end, |last| last.end), ..self.span() }
    }

    /// What is mapped now where it was, in stretches. `at_or_behind` tells of the mapping at an address, or else of the next.
    ///
    /// A mapping is taken as a whole, and what touches it too, whatever was mapped and unmapped there since it was seen.
    ///
    /// # Errors
    /// Those of `at_or_behind`.
    pub fn as_it_is<E>(
        &self,
        at_or_behind: impl Fn(Address) -> Result<Option<Mapping>, E>,
        wanted: impl Fn(&Mapping) -> bool,
    ) -> Result<Vec<Self>, E> {
        let Span { start: mut at, end } = self.mapped();
        for _ in 0..BELOW_MAX {
            let below = at_or_behind(Address(at.0.saturating_sub(1)))?;
            let Some(below) = below.filter(|below| below.span.start < at && wanted(below)) else { break };
            at = below.span.start;
        }
        let mut now: Vec<Mapping> = Vec::with_capacity(self.mappings.len() + 1);
        let mut behind = None;
        while let (Some(mapping), None) = (at_or_behind(at)?, behind) {
            at = mapping.span.end;
            let touches = now.last().is_some_and(|last| last.span.end == mapping.span.start && wanted(last));
            if mapping.span.start >= end && !(touches && wanted(&mapping)) {
                behind = Some(mapping.span.start);
            }
            mapping.seen_behind(&mut now);
        }
        // What is behind is not registered, and bounds the room that is.
        Ok(stretches(&now, |mapping| wanted(mapping) && Some(mapping.span.start) != behind))
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

/// The spans in order, those that touch or overlap made one.
pub fn joined(mut spans: Vec<Span>) -> Vec<Span> {
    spans.sort_unstable_by_key(|span| span.start);
    let mut joined: Vec<Span> = Vec::with_capacity(spans.len());
    for span in spans {
        match joined.last_mut().filter(|last| span.start <= last.end) {
            Some(last) => last.end = last.end.max(span.end),
            None => joined.push(span),
        }
    }
    joined
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

    /// What was made of mappings between the scan and the call.
    #[test]
    fn mappings_are_registered_as_they_are_and_not_as_they_were() {
        let seen = Stretch { mappings: vec![span(0x20000, 0x30000), span(0x30000, 0x40000)], end: Address(0x48000) };
        let now = |lines: &[&str]| {
            let all = mappings(lines);
            let at_or_behind = |at: Address| Ok::<_, ()>(all.iter().find(|mapping| mapping.span.end > at).cloned());
            seen.as_it_is(at_or_behind, Mapping::is_manageable).expect("no errors")
        };
        // It reaches further down now, by parts; and it has grown.
        assert_eq!(
            now(&[
                "00000-08000 rw-p 00000000 00:00 0",
                "10000-18000 rw-p 00000000 00:00 0",
                "18000-28000 rw-p 00000000 00:00 0",
                "28000-44000 rw-p 00000000 00:00 0",
                "44000-50000 r-xp 00000000 fe:01 7 /usr/lib/a.so",
            ]),
            [Stretch {
                mappings: vec![span(0x10000, 0x18000), span(0x18000, 0x28000), span(0x28000, 0x44000)],
                end: Address(0x44000)
            }]
        );
        // It has a hole, and something else lies behind.
        assert_eq!(
            now(&[
                "20000-28000 rw-p 00000000 00:00 0",
                "2c000-40000 rw-p 00000000 00:00 0",
                "60000-70000 rw-p 00000000 00:00 0",
            ]),
            [
                Stretch { mappings: vec![span(0x20000, 0x28000)], end: Address(0x2a000) },
                Stretch { mappings: vec![span(0x2c000, 0x40000)], end: Address(0x50000) },
            ]
        );
        // It is gone, or is of another kind.
        assert_eq!(now(&["60000-70000 rw-p 00000000 00:00 0"]), []);
        assert_eq!(now(&["20000-40000 r-xp 00000000 fe:01 7 /usr/lib/a.so"]), []);
    }

    /// Each look is at another moment.
    #[test]
    fn a_mapping_that_grows_between_two_looks_is_not_cut() {
        let seen = Stretch { mappings: vec![span(0x20000, 0x24000)], end: Address(0x28000) };
        let look = |lines: &[&str], at: Address| mappings(lines).into_iter().find(|mapping| mapping.span.end > at);
        let above = "60000-70000 rw-p 00000000 00:00 0";
        let grows = |at: Address| {
            let end = if at < Address(0x24000) { 0x24000 } else { at.0 + 0x4000 };
            let now = format!("20000-{:x} rw-p 00000000 00:00 0", end.min(0x30000));
            Ok::<_, ()>(look(&[&now, above], at))
        };
        let whole = [Stretch { mappings: vec![span(0x20000, 0x30000)], end: Address(0x48000) }];
        assert_eq!(seen.as_it_is(grows, Mapping::is_manageable).expect("no errors"), whole);
    }

    #[test]
    fn what_touches_is_one() {
        let spans = vec![span(8, 12), span(0, 4), span(4, 8), span(16, 20), span(17, 18), span(19, 24)];
        assert_eq!(joined(spans), [span(0, 12), span(16, 24)]);
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

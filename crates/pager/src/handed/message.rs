//! What a virtual machine monitor says when it hands its userfaultfd over: Firecracker's words
//! (docs/snapshotting/handling-page-faults-on-snapshot-resume.md there).
//!
//! A JSON array of regions. Nothing in it is believed: what does not fit together is refused, with a line that says what. A message
//! that begins with its length is [Cloud Hypervisor's](super::handoff).

use serde::Deserialize;
use spillway_core::{Address, PAGE_BYTES_U64, Span};

use super::Refusal;
use super::handoff::{self, HandOff};

/// A longer message is none: about 200 bytes a region.
pub const MESSAGE_BYTES_MAX: usize = 64 << 10;
/// Guests have one region below the hole for devices, one above, and one for each stick of memory.
pub(super) const REGIONS_MAX: usize = 256;
/// Nothing of a process is managed from here on.
const SPACE_END: u64 = crate::sys::uffd::NOWHERE.0;

/// Memory of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Where it is in the monitor.
    pub span: Span,
    /// Where its bytes are in the file that the memory was saved to.
    pub offset: u64,
}

/// A region as it is told. Fields of later versions are passed over.
#[derive(Deserialize)]
struct Told {
    base_host_virt_addr: u64,
    size: u64,
    offset: u64,
    /// In bytes.
    page_size: Option<u64>,
    /// In bytes, too, whatever its name: how versions before 1.13 said it.
    page_size_kib: Option<u64>,
}

/// A message that hands memory over: regions in order of address, no two of the same memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// Firecracker's.
    Regions(Vec<Region>),
    /// Cloud Hypervisor's.
    HandOff(HandOff),
}

/// Reads a message.
///
/// # Errors
/// What is wrong with it; [`Refusal::Incomplete`] for the beginning of one.
pub fn parse(bytes: &[u8]) -> Result<Message, Refusal> {
    if let Some(handed) = handoff::parse(bytes)? {
        return Ok(Message::HandOff(handed));
    }
    let told: Vec<Told> = match serde_json::from_slice(bytes) {
        Ok(told) => told,
        // It may be the beginning of a length.
        Err(error) if error.is_eof() || bytes.len() < size_of::<u32>() => return Err(Refusal::Incomplete),
        Err(error) => return Err(Refusal::NoRegions(error.to_string())),
    };
    in_order(told.iter().map(Told::region), told.len()).map(Message::Regions)
}

/// So many regions, each once.
pub(super) fn in_order(
    regions: impl Iterator<Item = Result<Region, Refusal>>,
    count: usize,
) -> Result<Vec<Region>, Refusal> {
    if count == 0 || count > REGIONS_MAX {
        return Err(Refusal::RegionCount(count));
    }
    let mut regions = regions.collect::<Result<Vec<_>, _>>()?;
    regions.sort_unstable_by_key(|region| region.span.start);
    match regions.windows(2).find(|two| two[0].span.end > two[1].span.start) {
        Some(two) => Err(Refusal::Overlapping(two[0].span, two[1].span)),
        None => Ok(regions),
    }
}

impl Region {
    /// One that can be.
    pub(super) fn checked(start: u64, size: u64, offset: u64) -> Result<Self, Refusal> {
        let is_whole = [start, size, offset].iter().all(|number| number.is_multiple_of(PAGE_BYTES_U64));
        let end = start.checked_add(size).filter(|end| *end <= SPACE_END && offset.checked_add(size).is_some());
        match end {
            Some(end) if is_whole && size > 0 && start > 0 => {
                Ok(Self { span: Span { start: Address(start), end: Address(end) }, offset })
            }
            _ => Err(Refusal::Impossible { start, size, offset }),
        }
    }
}

impl Told {
    fn region(&self) -> Result<Region, Refusal> {
        let &Self { base_host_virt_addr: start, size, offset, .. } = self;
        let page_bytes = self.page_size.or(self.page_size_kib).unwrap_or(PAGE_BYTES_U64);
        // Some say what the older name says.
        if page_bytes != PAGE_BYTES_U64 && page_bytes << 10 != PAGE_BYTES_U64 {
            return Err(Refusal::PageSize(page_bytes));
        }
        Region::checked(start, size, offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(start: u64, size: u64, offset: u64) -> String {
        format!(
            r#"{{"base_host_virt_addr":{start},"size":{size},"offset":{offset},"page_size":4096,"page_size_kib":4096}}"#
        )
    }

    fn refused(text: &str) -> Refusal {
        parse(text.as_bytes()).expect_err(text)
    }

    fn regions(text: &str) -> Vec<Region> {
        match parse(text.as_bytes()).expect(text) {
            Message::Regions(regions) => regions,
            Message::HandOff(_) => panic!("{text} is an array"),
        }
    }

    #[test]
    fn regions_are_read_in_order() {
        let text = format!("[{},{}]", one(0x7000_0000, 0x2000, 0x1000), one(0x10000, 0x1000, 0));
        let regions = regions(&text);
        assert_eq!(regions[0], Region { span: Span::of_pages(Address(0x10000), 1), offset: 0 });
        assert_eq!(regions[1], Region { span: Span::of_pages(Address(0x7000_0000), 2), offset: 0x1000 });
    }

    #[test]
    fn every_version_says_its_page_size() {
        for page_size in ["", r#","page_size":4096"#, r#","page_size_kib":4096"#, r#","page_size_kib":4"#] {
            let text =
                format!(r#"[{{"base_host_virt_addr":65536,"size":4096,"offset":0{page_size},"guest_phys_addr":0}}]"#);
            assert_eq!(regions(&text).len(), 1, "{text}");
        }
        let huge = r#"[{"base_host_virt_addr":65536,"size":4096,"offset":0,"page_size":2097152}]"#;
        assert!(matches!(refused(huge), Refusal::PageSize(2_097_152)));
    }

    #[test]
    fn what_cannot_be_is_refused() {
        for (start, size, offset) in [
            (0, 4096, 0),
            (65536, 0, 0),
            (65536, 4095, 0),
            (65537, 4096, 0),
            (65536, 4096, 1),
            (u64::MAX - 4095, 4096, 0),
            (65536, u64::MAX - 4095, 0),
            (65536, 4096, u64::MAX - 4095),
            (0x7fff_ffff_e000, 8192, 0),
        ] {
            let refusal = refused(&format!("[{}]", one(start, size, offset)));
            assert!(matches!(refusal, Refusal::Impossible { .. }), "{start:#x} {size:#x} {offset:#x}: {refusal}");
        }
        let twice = format!("[{},{}]", one(65536, 8192, 0), one(69632, 4096, 8192));
        assert!(matches!(refused(&twice), Refusal::Overlapping(..)));
        assert!(matches!(refused("[]"), Refusal::RegionCount(0)));
        let many = vec![one(65536, 4096, 0); REGIONS_MAX + 1].join(",");
        assert!(matches!(refused(&format!("[{many}]")), Refusal::RegionCount(257)));
    }

    #[test]
    fn what_is_no_message_is_refused() {
        let whole = format!("[{}]", one(65536, 4096, 0));
        assert!((0..whole.len()).all(|end| matches!(refused(&whole[..end]), Refusal::Incomplete)));
        for text in ["null", "[{}]", r#"[{"size":4096}]"#, "hello", "[] []", r#"{"type":"handoff"}"#] {
            assert!(matches!(refused(text), Refusal::NoRegions(_)), "{text}");
        }
        assert!(matches!(parse(&[0xff; 40]), Err(Refusal::NoRegions(_))));
        // Too short to tell from a length.
        for text in ["{}", "7", "[7]"] {
            assert!(matches!(refused(text), Refusal::Incomplete), "{text}");
        }
        assert!(matches!(parse(&[2, 0, 0, 0, b'[', b']']), Err(Refusal::NoRegions(_))));
        assert!(matches!(parse(&[0xff, 0xff, 0xff, 0, b'[']), Err(Refusal::TooLong)));
    }
}

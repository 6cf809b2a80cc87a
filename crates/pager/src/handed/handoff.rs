//! What Cloud Hypervisor says when it hands its guest's memory to a manager outside of it, as proposed there
//! (pull request 8657, `uffd_handoff_socket`): messages of a length, four bytes with the lowest first, and a JSON object.
//!
//! The first is the hand-off. Later ones, on the same socket, tell of memory that is plugged in. Nothing in them is believed, and no
//! more is kept of them than one message may have.

use serde::Deserialize;

use super::Refusal;
use super::message::{MESSAGE_BYTES_MAX, Region, in_order};

/// Bytes of a length.
const LENGTH_BYTES: usize = 4;
/// Of what a monitor calls its mode, so much is said again.
const MODE_CHARS_MAX: usize = 60;

/// A guest's memory is handed over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HandOff {
    /// The monitor, as it is called in its own pid namespace.
    pub pid: i64,
    /// Its memory, in order of address.
    pub regions: Vec<Region>,
    /// Bytes of the message, with its length.
    pub length: usize,
}

/// What is said afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Later {
    /// Memory was plugged in.
    Plugged(Region),
    /// Something that is not understood.
    Unknown,
}

/// A region as it is told. Fields of later versions are passed over, and so is where the guest has it.
#[derive(Deserialize)]
struct Told {
    host_virt_addr: u64,
    size: u64,
    #[serde(default)]
    backing_file_offset: u64,
}

impl Told {
    fn region(&self) -> Result<Region, Refusal> {
        Region::checked(self.host_virt_addr, self.size, self.backing_file_offset)
    }
}

/// A message of whichever type.
#[derive(Deserialize)]
struct Tagged {
    r#type: String,
}

/// What the first message says of itself, and the number of bytes that it takes; none if `bytes` do not begin with a length.
///
/// # Errors
/// [`Refusal::Incomplete`] for the beginning of a message, and what is wrong with a whole one.
pub(super) fn parse(bytes: &[u8]) -> Result<Option<HandOff>, Refusal> {
    #[derive(Deserialize)]
    struct Message {
        vmm_pid: i64,
        mode: String,
        regions: Vec<Told>,
    }
    if !begins_with_length(bytes) {
        return Ok(None);
    }
    let body = body(bytes)?.ok_or(Refusal::Incomplete)?;
    if type_of(body)? != "handoff" {
        return Err(Refusal::NoRegions("its length comes first, and it is no hand-off".into()));
    }
    let Message { vmm_pid: pid, mode, regions } = read(body)?;
    if !is_served(&mode) {
        return Err(Refusal::Mode(mode.chars().take(MODE_CHARS_MAX).collect()));
    }
    let regions = in_order(regions.iter().map(Told::region), regions.len())?;
    Ok(Some(HandOff { pid, regions, length: LENGTH_BYTES + body.len() }))
}

/// No text begins with a length: it has a byte of zeros, being below 16 MiB, or is longer than any message.
fn begins_with_length(bytes: &[u8]) -> bool {
    bytes.first_chunk::<LENGTH_BYTES>().is_some_and(|length| length.contains(&0))
}

/// The first message in `bytes`, without its length; none where that is not all there yet.
fn body(bytes: &[u8]) -> Result<Option<&[u8]>, Refusal> {
    let Some((length, rest)) = bytes.split_first_chunk::<LENGTH_BYTES>() else { return Ok(None) };
    match usize::try_from(u32::from_le_bytes(*length)) {
        Ok(length) if length <= MESSAGE_BYTES_MAX => Ok(rest.get(..length)),
        _ => Err(Refusal::TooLong),
    }
}

fn read<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, Refusal> {
    serde_json::from_slice(body).map_err(|error| Refusal::NoRegions(error.to_string()))
}

fn type_of(body: &[u8]) -> Result<String, Refusal> {
    read::<Tagged>(body).map(|Tagged { r#type }| r#type)
}

/// Whether it is of the one mode that serves: missing pages are asked for, and writes to protected ones wait.
fn is_served(mode: &str) -> bool {
    let mut words: Vec<&str> = mode.split('|').map(str::trim).collect();
    words.sort_unstable();
    words == ["MISSING", "WP"]
}

/// What a monitor says after it has handed over, as it comes.
#[derive(Debug, Default)]
pub struct Frames(Vec<u8>);

impl Frames {
    /// That came first.
    pub(super) fn beginning_with(bytes: Vec<u8>) -> Self {
        Self(bytes)
    }

    /// More has come. What is there is to be taken before ([`Frames::take`]), or it would become more and more.
    pub fn push(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    /// What is there of messages that were not taken.
    #[must_use]
    pub fn kept_bytes(&self) -> usize {
        self.0.len()
    }

    /// The next message, once it is all there.
    ///
    /// # Errors
    /// What is wrong with it; nothing behind it can be read.
    pub fn take(&mut self) -> Result<Option<Later>, Refusal> {
        #[derive(Deserialize)]
        struct Message {
            region: Told,
        }
        let Some(body) = body(&self.0)? else { return Ok(None) };
        let later = match type_of(body)?.as_str() {
            "add_region" => Later::Plugged(read::<Message>(body)?.region.region()?),
            _ => Later::Unknown,
        };
        self.0.drain(..LENGTH_BYTES + body.len());
        Ok(Some(later))
    }
}

#[cfg(test)]
mod tests {
    use spillway_core::{Address, Span};

    use super::*;

    fn framed(body: &str) -> Vec<u8> {
        let mut bytes = u32::try_from(body.len()).unwrap().to_le_bytes().to_vec();
        bytes.extend_from_slice(body.as_bytes());
        bytes
    }

    fn hand_off(mode: &str, regions: &str) -> Vec<u8> {
        framed(&format!(
            r#"{{"type":"handoff","version":0,"vmm_pid":4711,"mode":"{mode}","regions":[{regions}],"more":{{}}}}"#
        ))
    }

    fn one(start: u64, size: u64) -> String {
        format!(r#"{{"guest_phys_addr":0,"host_virt_addr":{start},"size":{size},"backing_file_offset":4096}}"#)
    }

    fn refused(bytes: &[u8]) -> Refusal {
        parse(bytes).expect_err("it is refused")
    }

    #[test]
    fn a_hand_off_is_read() {
        let bytes = hand_off("MISSING|WP", &format!("{},{}", one(0x7000_0000, 0x2000), one(0x10000, 0x1000)));
        let HandOff { pid, regions, length } = parse(&bytes).unwrap().unwrap();
        assert_eq!((pid, length), (4711, bytes.len()));
        assert_eq!(regions[0], Region { span: Span::of_pages(Address(0x10000), 1), offset: 4096 });
        assert_eq!(regions[1], Region { span: Span::of_pages(Address(0x7000_0000), 2), offset: 4096 });
        // What follows is the next message's.
        let more = [&bytes[..], b"\0\0"].concat();
        assert_eq!(parse(&more).unwrap().unwrap().length, bytes.len());
        // An offset may be left out.
        let short = hand_off("WP | MISSING", r#"{"host_virt_addr":65536,"size":4096}"#);
        assert_eq!(parse(&short).unwrap().unwrap().regions[0].offset, 0);
        assert!((4..bytes.len()).all(|end| matches!(refused(&bytes[..end]), Refusal::Incomplete)));
        assert_eq!(parse(b"[{}]").unwrap(), None);
    }

    #[test]
    fn only_one_mode_serves() {
        for mode in
            ["", "MISSING", "WP", "MISSING|WP|WP_ASYNC", "MISSING|WP|WP_UNPOPULATED", "MINOR|WP", "WP|WP", "missing|wp"]
        {
            assert!(matches!(refused(&hand_off(mode, &one(65536, 4096))), Refusal::Mode(said) if said == mode));
        }
        let long = "x".repeat(1000);
        assert!(matches!(refused(&hand_off(&long, "")), Refusal::Mode(said) if said.len() == MODE_CHARS_MAX));
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let of = |regions: &str| refused(&hand_off("MISSING|WP", regions));
        assert!(matches!(of(""), Refusal::RegionCount(0)));
        assert!(matches!(of(&vec![one(65536, 4096); 257].join(",")), Refusal::RegionCount(257)));
        assert!(matches!(of(&one(65537, 4096)), Refusal::Impossible { .. }));
        assert!(matches!(of(&one(65536, u64::MAX - 4095)), Refusal::Impossible { .. }));
        assert!(matches!(of(&format!("{},{}", one(65536, 8192), one(69632, 4096))), Refusal::Overlapping(..)));
        assert!(matches!(of(r#"{"size":4096}"#), Refusal::NoRegions(_)));
        for body in ["{}", "[]", "7", "hello", r#"{"type":7}"#, r#"{"type":"handoff"}"#, r#"{"type":"add_region"}"#, ""]
        {
            assert!(matches!(refused(&framed(body)), Refusal::NoRegions(_)), "{body}");
        }
        for length in [[1, 0, 1, 0], [0, 0, 0, 1], [0xff, 0xff, 0xff, 0]] {
            assert!(matches!(refused(&length), Refusal::TooLong), "{length:?}");
        }
    }

    #[test]
    fn what_comes_later_is_read_as_it_comes() {
        let plugged = framed(&format!(r#"{{"type":"add_region","region":{}}}"#, one(65536, 8192)));
        let all = [&plugged[..], &framed(r#"{"type":"news"}"#), &plugged].concat();
        let region = Region { span: Span::of_pages(Address(65536), 2), offset: 4096 };
        let expected = [Later::Plugged(region), Later::Unknown, Later::Plugged(region)];
        for step in [1, 3, 7, 1000] {
            let (mut frames, mut seen) = (Frames::default(), Vec::new());
            for piece in all.chunks(step) {
                frames.push(piece);
                while let Some(later) = frames.take().unwrap() {
                    seen.push(later);
                }
            }
            assert_eq!(seen, expected);
            assert_eq!(frames.kept_bytes(), 0);
        }
        for nonsense in [&framed("[]")[..], &framed(r#"{"type":"add_region"}"#), &[0, 0, 0, 9]] {
            let mut frames = Frames::beginning_with(nonsense.to_vec());
            assert!(frames.take().is_err());
        }
    }
}

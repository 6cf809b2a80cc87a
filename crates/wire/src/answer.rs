//! What servers answer. Every answer's header carries the server's free pages and its load, and whether it is leaving.
//!
//! ```text
//! put      count times { status u8 }
//! get      count times { checksum u64 | status u8 | flags u8: 1 = zeros | zero u16 }, then the pages that are there and not zeros
//! free     pages freed u32
//! status   fourteen times u64: see ServerStatus
//! heartbeat, leave: no body
//! goodbye  code u16 | text
//! ```

use spillway_core::PAGE_BYTES;

use crate::bytes::{Reader, u64_at};
use crate::frame::{ANSWER_HEADER_BYTES, GOT_ENTRY_BYTES, Header, Kind, REQUEST_HEADER_BYTES, count_of};
use crate::hello::{Code, TEXT_BYTES_MAX};
use crate::{Content, Malformed};

const FLAG_ZERO: u8 = 1;
const FLAG_LEAVING: u32 = 1;

/// What became of one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum PageStatus {
    /// Done as asked.
    Ok = 0,
    /// Get: the server has no such page.
    Missing = 1,
    /// Put: there is no room. What the server had under this key it still has.
    Full = 2,
    /// Get: the server had it and cannot give it back intact. It is lost.
    Corrupt = 3,
}

impl PageStatus {
    fn from_byte(byte: u8) -> Result<Self, Malformed> {
        Ok(match byte {
            0 => Self::Ok,
            1 => Self::Missing,
            2 => Self::Full,
            3 => Self::Corrupt,
            _ => return Err(Malformed("a page's status is 0 to 3")),
        })
    }

    fn to_byte(self) -> u8 {
        self as u8
    }
}

/// How a server is, in every answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Condition {
    /// Share of its time that the server is busy: 0 idle, 255 saturated.
    pub load: u8,
    /// Pages that it would still take.
    pub free_pages: u64,
    /// Whether its pages should move to other servers; never in version 1.
    pub leaving: bool,
}

/// An answer that was decoded.
#[derive(Clone, Copy, Debug)]
pub struct Answer<'a> {
    /// The request's id; zero in a goodbye.
    pub id: u32,
    /// How the server is.
    pub condition: Condition,
    /// What it answers.
    pub body: AnswerBody<'a>,
}

/// What a server answers.
#[derive(Clone, Copy, Debug)]
pub enum AnswerBody<'a> {
    /// To a put.
    Put(Statuses<'a>),
    /// To a get.
    Get(GotPages<'a>),
    /// To a free.
    Free {
        /// Pages that there were.
        pages: u32,
    },
    /// To a request for the status.
    Status(ServerStatus),
    /// To a heartbeat.
    Heartbeat,
    /// To a request to leave or to stay.
    Leave,
    /// The server closes the connection.
    Goodbye {
        /// Why.
        code: Code,
        /// Why, for people: checked to be UTF-8, but not to be fit for a terminal.
        text: &'a str,
    },
}

impl<'a> Answer<'a> {
    /// The frame at the start of `buffer`, and its length in bytes; `None` while it is not there as a whole.
    ///
    /// # Errors
    /// When the bytes are no answer.
    pub fn decode(buffer: &'a [u8]) -> Result<Option<(Self, usize)>, Malformed> {
        let Some(header) = Header::decode(buffer)? else { return Ok(None) };
        let end = ANSWER_HEADER_BYTES + header.body_bytes;
        let Some(body) = buffer.get(ANSWER_HEADER_BYTES..end) else { return Ok(None) };
        if header.flags & !FLAG_LEAVING != 0 {
            return Err(Malformed("an answer's flags are 0, or 1 for leaving"));
        }
        let (load, leaving) = (header.byte, header.flags & FLAG_LEAVING != 0);
        let condition = Condition { load, free_pages: u64_at(buffer, REQUEST_HEADER_BYTES), leaving };
        let body = AnswerBody::decode(header, body)?;
        Ok(Some((Self { id: header.id, condition, body }, end)))
    }
}

impl<'a> AnswerBody<'a> {
    fn decode(header: Header, body: &'a [u8]) -> Result<Self, Malformed> {
        let count = usize::from(header.count);
        if matches!(header.kind, Kind::Put | Kind::Get) != (count > 0) {
            return Err(Malformed("a batch has something in it, and nothing else has"));
        }
        let mut reader = Reader(body);
        let decoded = match header.kind {
            Kind::Put => {
                let statuses = reader.take(count)?;
                statuses.iter().try_for_each(|status| PageStatus::from_byte(*status).map(drop))?;
                Self::Put(Statuses(statuses))
            }
            Kind::Get => {
                let entries = reader.take(count * GOT_ENTRY_BYTES)?;
                let pages = GotPages { entries, pages: reader.0 };
                let mut with_bytes = 0;
                for entry in entries.chunks_exact(GOT_ENTRY_BYTES) {
                    with_bytes += usize::from(has_bytes(entry)?);
                }
                reader.take(with_bytes * PAGE_BYTES)?;
                Self::Get(pages)
            }
            Kind::Free => Self::Free { pages: reader.u32()? },
            Kind::Status => Self::Status(ServerStatus::decode(&mut reader)?),
            Kind::Heartbeat => Self::Heartbeat,
            Kind::Leave => Self::Leave,
            Kind::Goodbye => {
                let code = Code::from_number(reader.u16()?)?;
                Self::Goodbye { code, text: text(&mut reader)? }
            }
        };
        reader.end()?;
        Ok(decoded)
    }
}

/// The rest of a frame as text.
pub(crate) fn text<'a>(reader: &mut Reader<'a>) -> Result<&'a str, Malformed> {
    if reader.0.len() > TEXT_BYTES_MAX {
        return Err(Malformed("a text has at most 256 bytes"));
    }
    let bytes = reader.take(reader.0.len())?;
    std::str::from_utf8(bytes).map_err(|_| Malformed("a text is UTF-8"))
}

/// As much of a text as may travel.
pub(crate) fn cut(text: &str) -> &str {
    let mut end = text.len().min(TEXT_BYTES_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// Whether the bytes of a got page follow; an error when the entry makes no sense.
fn has_bytes(entry: &[u8]) -> Result<bool, Malformed> {
    let mut reader = Reader(entry);
    reader.u64()?;
    let [status, flags] = reader.array()?;
    reader.reserved(2)?;
    match (PageStatus::from_byte(status)?, flags) {
        (PageStatus::Ok, 0) => Ok(true),
        (PageStatus::Ok, FLAG_ZERO) | (_, 0) => Ok(false),
        _ => Err(Malformed("a page's flags are 0, or 1 for zeros")),
    }
}

/// What became of the pages of a put, in the order of the request.
#[derive(Clone, Copy, Debug)]
pub struct Statuses<'a>(&'a [u8]);

impl Iterator for Statuses<'_> {
    type Item = PageStatus;

    fn next(&mut self) -> Option<PageStatus> {
        let (status, rest) = self.0.split_first()?;
        self.0 = rest;
        PageStatus::from_byte(*status).ok()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.0.len(), Some(self.0.len()))
    }
}

impl ExactSizeIterator for Statuses<'_> {}

/// One page of the answer to a get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GotPage<'a> {
    /// The checksum that it was put with; zero when there is no page, meaningless for zeros.
    pub checksum: u64,
    /// What it holds, or why it is not there.
    pub content: Result<Content<'a>, PageStatus>,
}

/// The pages of the answer to a get, in the order of the request.
#[derive(Clone, Copy, Debug)]
pub struct GotPages<'a> {
    entries: &'a [u8],
    pages: &'a [u8],
}

impl<'a> Iterator for GotPages<'a> {
    type Item = GotPage<'a>;

    fn next(&mut self) -> Option<GotPage<'a>> {
        let (entry, rest) = self.entries.split_at_checked(GOT_ENTRY_BYTES)?;
        self.entries = rest;
        let content = match (PageStatus::from_byte(entry[8]).ok()?, entry[9]) {
            (PageStatus::Ok, 0) => {
                let (page, rest) = self.pages.split_first_chunk::<PAGE_BYTES>()?;
                self.pages = rest;
                Ok(Content::Bytes(page))
            }
            (PageStatus::Ok, _) => Ok(Content::Zero),
            (status, _) => Err(status),
        };
        Some(GotPage { checksum: u64_at(entry, 0), content })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.entries.len() / GOT_ENTRY_BYTES;
        (left, Some(left))
    }
}

impl ExactSizeIterator for GotPages<'_> {}

/// How a server is, in detail. Fields in the order in which they travel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServerStatus {
    /// Bytes of DRAM that the server may use for pages and their indices.
    pub capacity_bytes: u64,
    /// Bytes of these in use.
    pub used_bytes: u64,
    /// Pages of all tenants, by key.
    pub pages: u64,
    /// Pages of zeros among them.
    pub zero_pages: u64,
    /// Pages kept, each once however many keys share it.
    pub distinct_pages: u64,
    /// Bytes that the distinct pages in DRAM take: less than their number says when compressed.
    pub stored_bytes: u64,
    /// Distinct pages that are in the spill file instead.
    pub spilled_pages: u64,
    /// Tenants that have pages or connections.
    pub tenants: u64,
    /// Connections.
    pub connections: u64,
    /// Pages of the tenant that asks.
    pub tenant_pages: u64,
    /// Pages put and got since the start.
    pub served_pages: u64,
    /// Median time from a request's arrival to its answer, over the last requests; nanoseconds.
    pub service_p50_ns: u64,
    /// The same, 99th percentile.
    pub service_p99_ns: u64,
    /// Seconds since the start.
    pub uptime_seconds: u64,
}

impl ServerStatus {
    fn decode(reader: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            capacity_bytes: reader.u64()?,
            used_bytes: reader.u64()?,
            pages: reader.u64()?,
            zero_pages: reader.u64()?,
            distinct_pages: reader.u64()?,
            stored_bytes: reader.u64()?,
            spilled_pages: reader.u64()?,
            tenants: reader.u64()?,
            connections: reader.u64()?,
            tenant_pages: reader.u64()?,
            served_pages: reader.u64()?,
            service_p50_ns: reader.u64()?,
            service_p99_ns: reader.u64()?,
            uptime_seconds: reader.u64()?,
        })
    }

    fn fields(&self) -> [u64; 14] {
        [
            self.capacity_bytes,
            self.used_bytes,
            self.pages,
            self.zero_pages,
            self.distinct_pages,
            self.stored_bytes,
            self.spilled_pages,
            self.tenants,
            self.connections,
            self.tenant_pages,
            self.served_pages,
            self.service_p50_ns,
            self.service_p99_ns,
            self.uptime_seconds,
        ]
    }
}

/// The parts of an answer's header that are not in its body.
#[derive(Clone, Copy, Debug)]
pub struct To {
    /// The request's id.
    pub id: u32,
    /// How the server is.
    pub condition: Condition,
}

fn header(out: &mut Vec<u8>, to: To, kind: Kind, count: u16, body_bytes: usize) {
    let flags = if to.condition.leaving { FLAG_LEAVING } else { 0 };
    Header { body_bytes, kind, byte: to.condition.load, count, id: to.id, flags }.encode(out);
    out.extend_from_slice(&to.condition.free_pages.to_le_bytes());
}

/// Appends the answer to a put.
///
/// # Panics
/// For no page and for more than [`crate::BATCH_MAX`].
pub fn put(out: &mut Vec<u8>, to: To, statuses: &[PageStatus]) {
    header(out, to, Kind::Put, count_of(statuses.len()), statuses.len());
    out.extend(statuses.iter().map(|status| status.to_byte()));
}

/// Appends all of the answer to a get but the bytes of its pages, which follow in the same order, those of zeros left out.
///
/// # Panics
/// As [`put`].
pub fn got_head(out: &mut Vec<u8>, to: To, pages: impl ExactSizeIterator<Item = GotHead> + Clone) {
    let with_bytes = pages.clone().filter(|page| page.what == Got::Bytes).count();
    let body_bytes = pages.len() * GOT_ENTRY_BYTES + with_bytes * PAGE_BYTES;
    header(out, to, Kind::Get, count_of(pages.len()), body_bytes);
    for page in pages {
        let (status, flags) = match page.what {
            Got::Bytes => (PageStatus::Ok, 0),
            Got::Zero => (PageStatus::Ok, FLAG_ZERO),
            Got::Not(status) => (status, 0),
        };
        assert!(!matches!(page.what, Got::Not(PageStatus::Ok)), "a page that is not there has a reason");
        out.extend_from_slice(&page.checksum.to_le_bytes());
        out.extend_from_slice(&[status.to_byte(), flags, 0, 0]);
    }
}

/// A page of the answer to a get, without its bytes.
#[derive(Clone, Copy, Debug)]
pub struct GotHead {
    /// The checksum that it was put with.
    pub checksum: u64,
    /// What follows.
    pub what: Got,
}

/// What the answer to a get has of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Got {
    /// Its bytes, among those that follow.
    Bytes,
    /// It is all zeros.
    Zero,
    /// It is not there; never for [`PageStatus::Ok`].
    Not(PageStatus),
}

/// Appends the answer to a free.
pub fn free(out: &mut Vec<u8>, to: To, pages: u32) {
    header(out, to, Kind::Free, 0, 4);
    out.extend_from_slice(&pages.to_le_bytes());
}

/// Appends the answer to a request for the status.
pub fn status(out: &mut Vec<u8>, to: To, status: &ServerStatus) {
    let fields = status.fields();
    header(out, to, Kind::Status, 0, fields.len() * 8);
    fields.iter().for_each(|field| out.extend_from_slice(&field.to_le_bytes()));
}

/// Appends the answer to a heartbeat.
pub fn heartbeat(out: &mut Vec<u8>, to: To) {
    header(out, to, Kind::Heartbeat, 0, 0);
}

/// Appends the answer to a request to leave or to stay.
pub fn leave(out: &mut Vec<u8>, to: To) {
    header(out, to, Kind::Leave, 0, 0);
}

/// Appends the server's last word; `text` is cut to [`TEXT_BYTES_MAX`].
pub fn goodbye(out: &mut Vec<u8>, condition: Condition, code: Code, text: &str) {
    let text = cut(text);
    header(out, To { id: 0, condition }, Kind::Goodbye, 0, 2 + text.len());
    out.extend_from_slice(&code.number().to_le_bytes());
    out.extend_from_slice(text.as_bytes());
}

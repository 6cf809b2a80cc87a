//! What a server is told, and what it says: bytes in and out, no sockets.

use std::time::Duration;

use spillway_core::Page;
use spillway_wire::answer::{GotPages, PageStatus, Statuses};
use spillway_wire::auth::Channel;
use spillway_wire::{Content, answer};

use crate::Urgency;
use crate::pool::OpenErrorKind;

/// Pages in a request at most. Sixteen take 50 us on a link of 10 Gbit/s: what a get on demand may have to wait for.
pub(crate) const BATCH_MAX: usize = 16;

/// A page's name at a server, unique among all that this pager has put there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Name {
    /// Counts connections, so that what was left on an old one, and is carried out late, hits no newer page.
    pub(crate) epoch: u16,
    /// The handle.
    pub(crate) handle: u32,
}

/// A page to be put.
#[derive(Clone, Copy)]
pub(crate) struct Parcel<'a> {
    pub(crate) name: Name,
    pub(crate) page: &'a Page,
}

/// What a server grants after the handshake.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grant {
    /// Pages in a request.
    pub(crate) batch: usize,
    /// Bytes of requests and their answers that may be under way.
    pub(crate) window_bytes: usize,
    /// How often something must be said.
    pub(crate) heartbeat: Duration,
    /// Whether the server has none of the pages that it was given on earlier connections.
    pub(crate) forgot: bool,
    /// Pages that it may keep, and pages that it would take now, where it tells.
    pub(crate) capacity_pages: Option<(u64, u64)>,
}

/// How far a handshake is.
pub(crate) enum Greeting {
    /// More bytes are needed.
    Unfinished,
    /// Requests may follow.
    Done(Grant),
}

/// Why a connection cannot be used: one line, without the server's name.
pub(crate) type Refusal = (OpenErrorKind, String);

/// The other end does not keep to the protocol; what was expected.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Malformed(pub(crate) &'static str);

/// One answer.
pub(crate) struct Answer<'a> {
    /// The request that it answers.
    pub(crate) id: u32,
    pub(crate) condition: Option<answer::Condition>,
    pub(crate) body: Body<'a>,
}

/// What an answer says, for each page of the request in its order.
pub(crate) enum Body<'a> {
    Puts(Statuses<'a>),
    Put(PageStatus),
    Gets(GotPages<'a>),
    /// Bytes as they were put: a page or an LZ4 block of one.
    Get(Option<&'a [u8]>),
    /// To a free or a heartbeat.
    Done,
    /// The server closes the connection.
    Goodbye(Refusal),
}

/// What a server said of one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Item<'a> {
    /// Kept.
    Kept,
    /// Declined.
    Full,
    /// Here it is: a page or an LZ4 block of one.
    Bytes(&'a [u8]),
    /// It is all zeros.
    Zero,
    /// It is not there, or not intact.
    Gone,
}

impl<'a> Body<'a> {
    /// Pages that this speaks of.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Puts(statuses) => statuses.len(),
            Self::Gets(pages) => pages.len(),
            Self::Put(_) | Self::Get(_) => 1,
            Self::Done | Self::Goodbye(_) => 0,
        }
    }
}

impl<'a> Iterator for Body<'a> {
    type Item = Item<'a>;

    /// Called at most [`Body::len`] times.
    fn next(&mut self) -> Option<Item<'a>> {
        let put = |status| if status == PageStatus::Ok { Item::Kept } else { Item::Full };
        Some(match self {
            Self::Puts(statuses) => put(statuses.next()?),
            Self::Put(status) => put(*status),
            Self::Gets(pages) => match pages.next()?.content {
                Ok(Content::Bytes(page)) => Item::Bytes(page),
                Ok(Content::Zero) => Item::Zero,
                Err(_) => Item::Gone,
            },
            Self::Get(bytes) => bytes.map_or(Item::Gone, Item::Bytes),
            Self::Done | Self::Goodbye(_) => return None,
        })
    }
}

/// How one server is spoken to. Requests append to `out` and have an id each; answers come in any order.
///
/// Implementations allocate nothing for a request or an answer, and no bytes make them panic.
pub(crate) trait Protocol: Send + 'static {
    /// Answers are no longer than this.
    const ANSWER_BYTES_MAX: usize;
    /// What an answer to a get has beside its page.
    const OVERHEAD_BYTES: usize;
    /// Whether servers know their pagers: then they forget by themselves what one that ended has left there, and carry out nothing of
    /// its earlier connections once there is a new one.
    const FORGETS: bool;

    /// By what the server knows this pager and the pages that it has put: at most [`super::ledger::IDENTITY_BYTES_MAX`].
    fn identity(&self) -> Vec<u8>;
    /// This is the pager that had this identity. False when that makes no sense.
    fn resume(&mut self, identity: &[u8]) -> bool;
    /// The next connection is under TLS, and this is what its two ends know. Called before [`Protocol::greet`].
    fn bind(&mut self, _channel: Channel) {}
    /// A new connection: forgets the old one, and says what is to be said first.
    fn greet(&mut self, out: &mut Vec<u8>);
    /// Goes on with the handshake. Returns how many bytes of `input` it took.
    fn greeted(&mut self, input: &[u8], out: &mut Vec<u8>) -> Result<(usize, Greeting), Refusal>;
    /// At most as many pages as granted.
    fn put(&mut self, out: &mut Vec<u8>, id: u32, pages: &[Parcel<'_>]);
    /// At most as many pages as granted.
    fn get(&mut self, out: &mut Vec<u8>, id: u32, urgency: Urgency, names: &[Name]);
    /// At most as many pages as granted.
    fn free(&mut self, out: &mut Vec<u8>, id: u32, names: &[Name]);
    /// Something that is answered.
    fn heartbeat(&mut self, out: &mut Vec<u8>, id: u32);
    /// The answer at the start of `input` and its length; `None` while it is not there as a whole.
    fn answer<'a>(&mut self, input: &'a [u8]) -> Result<Option<(Answer<'a>, usize)>, Malformed>;
}

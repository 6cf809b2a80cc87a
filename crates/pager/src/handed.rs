//! Virtual machine monitors that make their own userfaultfd and hand it over, with a list of their guest's memory.
//!
//! Such a userfaultfd has the features that the monitor chose, and Firecracker's tells of removals alone. What else could
//! happen to the memory must then be impossible: adoption keeps it from forked children and seals it
//! ([0023](../../../docs/decisions/0023-memory-that-is-handed-over.md)).
//!
//! Cloud Hypervisor's is of shared memory: that is managed as what several processes have mapped is (`commons.rs`), and needs
//! the same. Its monitor goes on talking ([`Conversation`]).
//!
//! [`parse`] reads what is said, [`receive()`] takes the descriptor and looks at both; the watcher does the rest.

mod handoff;
mod message;
mod receive;

use std::fmt;
use std::io;

use spillway_core::{PAGE_BYTES_U64, Span};
use spillway_store::snapshot::Image;

pub use handoff::{Frames, HandOff, Later};
pub use message::{Message, Region, parse};
pub use receive::{Conversation, Heard, receive};

use crate::sys::uffd::Uffd;

/// What a monitor has handed over, looked at and not yet acted on.
#[derive(Debug)]
pub struct Handed {
    pub(crate) pid: i32,
    pub(crate) uffd: Uffd,
    pub(crate) regions: Vec<Region>,
    /// Whether it is shared.
    pub(crate) is_shared: bool,
    /// Where it is: what the monitor says next.
    pub(crate) conversation: Option<Conversation>,
}

impl Handed {
    /// The process that sent it.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// What the monitor has to say from now on, and that it waits to be told when its memory is served; of one that waits for nothing,
    /// none.
    pub fn conversation(&mut self) -> Option<Conversation> {
        self.conversation.take()
    }

    /// How much memory it is.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.regions.iter().map(|region| region.span.pages() * PAGE_BYTES_U64).sum()
    }

    /// Says where its missing pages are: in `image`, or nowhere, so that they are zeros.
    ///
    /// # Errors
    /// Regions that reach beyond the file, or have more bytes than it: the table of what is where would cost us, and not the
    /// monitor.
    pub fn starting_from(self, image: Option<&Image>) -> Result<Placed, Refusal> {
        if self.is_shared && image.is_some() {
            return Err(Refusal::NotFromFile);
        }
        if let Some(image) = image {
            let end = |region: &Region| region.offset / PAGE_BYTES_U64 + region.span.pages();
            if let Some(Region { span, offset }) = self.regions.iter().find(|region| end(region) > image.pages()) {
                return Err(Refusal::BeyondFile { span: *span, offset: *offset, pages: image.pages() });
            }
            if self.bytes() > image.pages() * PAGE_BYTES_U64 {
                return Err(Refusal::LargerThanFile(self.bytes()));
            }
        }
        Ok(Placed { handed: self, image: image.cloned() })
    }
}

/// What was handed over, all of whose pages have a place.
#[derive(Debug)]
pub struct Placed {
    pub(crate) handed: Handed,
    pub(crate) image: Option<Image>,
}

/// Memory that was plugged into a guest whose memory is managed.
#[derive(Clone, Copy, Debug)]
pub struct Plugged {
    /// The monitor, and when it was started.
    pub(crate) pid: i32,
    pub(crate) started: u64,
    pub(crate) region: Region,
}

impl Plugged {
    /// How much it is.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.region.span.pages() * PAGE_BYTES_U64
    }
}

/// Why a hand-over was refused; the text says what the monitor's operator may do.
#[derive(Debug)]
pub enum Refusal {
    /// The socket failed.
    Socket(io::Error),
    /// The sender has no number here.
    Elsewhere,
    /// Nothing came before the end.
    Nothing,
    /// It took too long.
    Late,
    /// The message goes on and on.
    TooLong,
    /// The message ended before its end.
    Incomplete,
    /// It is no list of regions.
    NoRegions(String),
    /// Its userfaultfd is used in another way.
    Mode(String),
    /// It is another process to itself.
    OtherPid {
        /// Which,
        said: i64,
        /// and which it is.
        is: i32,
    },
    /// No region, or too many.
    RegionCount(usize),
    /// Pages of another size.
    PageSize(u64),
    /// A region that cannot be.
    Impossible {
        /// Its address.
        start: u64,
        /// Its bytes.
        size: u64,
        /// Its offset in the file.
        offset: u64,
    },
    /// Two regions of the same memory.
    Overlapping(Span, Span),
    /// No descriptor came with it.
    NoDescriptor,
    /// The first descriptor is something else.
    OtherDescriptor(String),
    /// The userfaultfd was not agreed on with the kernel.
    NoHandshake,
    /// The userfaultfd does not tell of removals.
    NoRemovals,
    /// The userfaultfd has a feature that it must not have.
    Feature,
    /// The userfaultfd lets writes to protected pages pass.
    WritesPass,
    /// The process has no memory there.
    NotThere(Span),
    /// The memory there cannot be managed.
    OtherMemory {
        /// Where.
        span: Span,
        /// Whether it is shared.
        shared: bool,
        /// What it is called.
        name: String,
    },
    /// The memory there is private, and was to be shared.
    Private(Span),
    /// The memory there is shared, and in no file that can be managed.
    OtherFile {
        /// Where.
        span: Span,
        /// What it is called.
        name: String,
    },
    /// What is there is right already, whatever a file says.
    NotFromFile,
    /// The file is too short.
    BeyondFile {
        /// The region.
        span: Span,
        /// Its offset.
        offset: u64,
        /// The file's size.
        pages: u64,
    },
    /// All regions together have more bytes than the file.
    LargerThanFile(u64),
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = |span: &Span| format!("{:#x}-{:#x}", span.start.0, span.end.0);
        match self {
            Self::Socket(error) => write!(f, "{error}"),
            Self::Elsewhere => write!(
                f,
                "its process has no number in this pid namespace; run `spillway vmm` in the host's, or in the monitor's own"
            ),
            Self::Nothing => write!(f, "it closed the socket without a word"),
            Self::Late => write!(f, "its message was not there in time"),
            Self::TooLong => write!(f, "its message is longer than {} bytes", message::MESSAGE_BYTES_MAX),
            Self::Incomplete => write!(f, "its message ended before the JSON in it did"),
            Self::NoRegions(why) => {
                write!(f, "its message is no list of guest regions ({why}); docs/VMM.md says what is understood")
            }
            Self::Mode(mode) => {
                write!(f, "its mode is {mode:?}, and only MISSING|WP is served: give it uffd_handoff_mode=MISSING|WP")
            }
            Self::OtherPid { said, is } => write!(
                f,
                "it calls itself process {said}, and is {is} here; run `spillway vmm` in the pid namespace of the monitor"
            ),
            Self::RegionCount(count) => write!(f, "its message has {count} regions; 1 to 256 are taken"),
            Self::PageSize(bytes) => {
                write!(f, "its memory has pages of {bytes} bytes; only 4096 can be managed: turn huge pages off")
            }
            Self::Impossible { start, size, offset } => {
                write!(f, "it names a region that cannot be: {size:#x} bytes at {start:#x}, from offset {offset:#x}")
            }
            Self::Overlapping(one, other) => write!(f, "it names overlapping regions: {} and {}", at(one), at(other)),
            Self::NoDescriptor => write!(f, "no userfaultfd came with its message"),
            Self::OtherDescriptor(name) => write!(f, "the descriptor that came is no userfaultfd but {name}"),
            Self::NoHandshake => write!(f, "its userfaultfd was not agreed on with the kernel (UFFDIO_API)"),
            Self::NoRemovals => write!(
                f,
                "its userfaultfd does not tell what the guest gives back (UFFD_FEATURE_EVENT_REMOVE), which would come back \
                 to life; give the guest a balloon device, or use a newer monitor"
            ),
            Self::Feature => write!(
                f,
                "its userfaultfd tells of forks or turns faults into signals; leave UFFD_FEATURE_EVENT_FORK and \
                 UFFD_FEATURE_SIGBUS out"
            ),
            Self::WritesPass => write!(
                f,
                "its userfaultfd lets writes to protected pages pass (UFFD_FEATURE_WP_ASYNC): give it uffd_handoff_mode=MISSING|WP"
            ),
            Self::NotThere(span) => write!(f, "it names a region that it does not have: {}", at(span)),
            Self::OtherMemory { span, shared, name } => {
                let (how, name) = (if *shared { "shared" } else { "not private anonymous" }, name.trim());
                write!(f, "its memory at {} is {how} ({name}); only private anonymous memory is managed", at(span))
            }
            Self::Private(span) => write!(
                f,
                "its memory at {} is private, which this hand-off does not serve: start it with shared=on, or without \
                 uffd_handoff_socket and `spillway attach PID`",
                at(span)
            ),
            Self::OtherFile { span, name } => write!(
                f,
                "its memory at {} is in a file that cannot be managed ({}): only a memfd that is read and written, without huge \
                 pages, can; leave file= and hugepages=on out",
                at(span),
                name.trim()
            ),
            Self::NotFromFile => write!(
                f,
                "it hands over memory that is right as it is, and --memory is for guests of Firecracker; give it the socket of a \
                 `spillway vmm --fresh`"
            ),
            Self::BeyondFile { span, offset, pages } => write!(
                f,
                "its region {} would begin at {offset:#x} of a file of {pages} pages; give --memory the file of this snapshot",
                at(span)
            ),
            Self::LargerThanFile(bytes) => write!(
                f,
                "its regions have {bytes} bytes in all, more than the file; give --memory the file of this snapshot"
            ),
        }
    }
}

impl std::error::Error for Refusal {}

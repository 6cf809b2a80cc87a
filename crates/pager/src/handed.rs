//! Virtual machine monitors that make their own userfaultfd and hand it over, with a list of their guest's memory.
//!
//! Such a userfaultfd has the features that the monitor chose, and Firecracker's tells of removals alone. What else could
//! happen to the memory must then be impossible: adoption keeps it from forked children and seals it
//! ([0023](../../../docs/decisions/0023-memory-that-is-handed-over.md)).
//!
//! [`parse`] reads what is said, [`receive()`] takes the descriptor and looks at both; the watcher does the rest.

mod message;
mod receive;

use std::fmt;
use std::io;

use spillway_core::{PAGE_BYTES_U64, Span};
use spillway_store::snapshot::Image;

pub use message::{Region, parse};
pub use receive::receive;

use crate::sys::uffd::Uffd;

/// What a monitor has handed over, looked at and not yet acted on.
#[derive(Debug)]
pub struct Handed {
    pub(crate) pid: i32,
    pub(crate) uffd: Uffd,
    pub(crate) regions: Vec<Region>,
}

impl Handed {
    /// The process that sent it.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid
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
    /// It is the message that Cloud Hypervisor sends, as far as that is known.
    CloudHypervisor,
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
            Self::CloudHypervisor => write!(
                f,
                "it speaks Cloud Hypervisor's hand-off, which is not served: start it without, and `spillway attach PID --shared-memory` \
                 (docs/VMM.md)"
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
            Self::NotThere(span) => write!(f, "it names a region that it does not have: {}", at(span)),
            Self::OtherMemory { span, shared, name } => {
                let (how, name) = (if *shared { "shared" } else { "not private anonymous" }, name.trim());
                write!(f, "its memory at {} is {how} ({name}); only private anonymous memory is managed", at(span))
            }
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

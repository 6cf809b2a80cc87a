//! References from a file of any kind that is known, in order.

use std::io::{BufRead, Read};

use crate::error::Error;
use crate::record::{Access, Fault, What};
use crate::text::Lines;
use crate::trace::{MAGIC, Reader};

/// What a program did to its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// It touched a page.
    Touch {
        /// Which.
        page: u64,
        /// How.
        access: Access,
        /// How the pager served it, and for how long the program waited; none where nobody waited.
        served: Option<(Fault, u64)>,
        /// For how long the program had run by itself since the touch before.
        ran_ns: u64,
    },
    /// It gave back adjacent pages.
    Removed {
        /// The first.
        page: u64,
        /// How many, perhaps far more than it had touched.
        pages: u64,
    },
    /// Nothing; but a window of an exact trace begins.
    Window,
}

/// What the references are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Faults under a budget: what was local raised none.
    Faults {
        /// The budget in pages, or `u64::MAX` for none.
        budget_pages: u64,
    },
    /// The first touches of each page in windows of this length.
    Windows {
        /// Nanoseconds.
        window_ns: u64,
    },
    /// Every reference, without times.
    Addresses,
}

/// What is known of the references once they were all read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct About {
    /// What they are.
    pub kind: Kind,
    /// How many are missing because the recording could not keep up.
    pub dropped: u64,
    /// Whether the file ends before the recording did.
    pub truncated: bool,
}

/// Gives every reference in `from` to `each`. A reference in a list of addresses is taken to last `reference_ns`.
///
/// # Errors
/// When what is read is neither a trace nor a list, or `each` fails.
pub fn read(
    mut from: impl BufRead,
    reference_ns: u64,
    each: &mut dyn FnMut(Step) -> Result<(), Error>,
) -> Result<About, Error> {
    // One byte tells: that of a trace is no text.
    if from.fill_buf()?.first() == Some(&MAGIC[0]) {
        let reader = Reader::new(from)?.ok_or(Error::Garbled(0))?;
        return read_trace(reader, each);
    }
    let mut lines = Lines::new(from);
    while let Some(reference) = lines.next_reference()? {
        for page in reference.page..reference.page + reference.pages {
            each(Step::Touch { page, access: reference.access, served: None, ran_ns: reference_ns })?;
        }
    }
    Ok(About { kind: Kind::Addresses, dropped: 0, truncated: false })
}

fn read_trace<R: Read>(mut reader: Reader<R>, each: &mut dyn FnMut(Step) -> Result<(), Error>) -> Result<About, Error> {
    let header = reader.header();
    let mut steps = Steps::default();
    while let Some(record) = reader.next_record()? {
        if let Some(step) = steps.next(record.time_ns, record.what) {
            each(step)?;
        }
    }
    let kind = match header.window_ns {
        0 => Kind::Faults { budget_pages: header.budget_pages },
        window_ns => Kind::Windows { window_ns },
    };
    Ok(About { kind, dropped: steps.dropped, truncated: reader.is_truncated() })
}

/// Makes steps of records.
#[derive(Default)]
pub struct Steps {
    /// When the last fault was served.
    served_ns: Option<u64>,
    /// How many records are missing.
    pub dropped: u64,
}

impl Steps {
    /// What a record says that the program did, if anything.
    pub fn next(&mut self, time_ns: u64, what: What) -> Option<Step> {
        match what {
            What::Fault { page, fault, access, service_ns } => {
                let began_ns = time_ns.saturating_sub(service_ns);
                // Threads wait at the same time: what one of them did meanwhile is not seen.
                let ran_ns = self.served_ns.map_or(0, |served| began_ns.saturating_sub(served));
                self.served_ns = Some(time_ns);
                Some(Step::Touch { page, access, served: Some((fault, service_ns)), ran_ns })
            }
            What::Removed { page, pages } => Some(Step::Removed { page, pages }),
            What::Dropped { count } => {
                self.dropped = self.dropped.saturating_add(count);
                None
            }
            What::Window => Some(Step::Window),
            What::Evicted { .. } | What::End => None,
        }
    }
}

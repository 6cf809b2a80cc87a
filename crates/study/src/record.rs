//! What a pager records: faults, evictions, removals.
//!
//! A record has one encoding, [`Raw`]: a tag and up to two numbers. The ring passes it on and the file writes it down.

/// What the faulting instruction did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Nobody said.
    Unknown,
    /// It read.
    Read,
    /// It wrote.
    Write,
}

/// How a fault was served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// With zeros: nobody had touched the page, or it was given back, or it held only zeros when it left.
    FirstTouch,
    /// From one of the pager's buffers.
    Refault,
    /// From the store.
    Fetch,
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// A fault, once it was served.
    Fault {
        /// Which page.
        page: u64,
        /// How it was served.
        fault: Fault,
        /// By what.
        access: Access,
        /// From reading the fault to the wake-up.
        service_ns: u64,
    },
    /// Adjacent pages left the target.
    Evicted {
        /// The first.
        page: u64,
        /// How many.
        pages: u64,
    },
    /// Adjacent pages are the target's no more, or read as zeros from now on.
    Removed {
        /// The first.
        page: u64,
        /// How many.
        pages: u64,
    },
    /// A window of an exact trace begins: every page leaves once.
    Window,
    /// So many records got lost before this one: the reader was too slow.
    Dropped {
        /// How many.
        count: u64,
    },
    /// The recording ended, and the trace is whole.
    End,
}

/// What happened, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Nanoseconds since some moment that is the same for the whole trace.
    pub time_ns: u64,
    /// What.
    pub what: What,
}

/// Page numbers, and numbers of pages, are below this: 64 bits of address but for the last 2 MiB, which no program has. So
/// whatever is made of pages, up to what one table of them maps, has an end that 64 bits can name.
pub const PAGES_MAX: u64 = (1 << 52) - 512;

/// The largest value of a record that is not a page: 2^56 nanoseconds are two years.
pub const VALUE_MAX: u64 = (1 << 56) - 1;

/// A record's parts but for its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Raw {
    /// Which kind: below [`TAGS`].
    pub tag: u8,
    /// The page, for kinds that have one.
    pub page: u64,
    /// Nanoseconds or a count, for kinds that have one.
    pub value: u64,
}

/// How many tags there are: nine for faults (kind times access), and five.
pub const TAGS: u8 = 14;

const EVICTED: u8 = 9;
const REMOVED: u8 = 10;
const WINDOW: u8 = 11;
const DROPPED: u8 = 12;
const END: u8 = 13;

const FAULTS: [Fault; 3] = [Fault::FirstTouch, Fault::Refault, Fault::Fetch];
const ACCESSES: [Access; 3] = [Access::Unknown, Access::Read, Access::Write];

impl Raw {
    /// Whether records of this tag name a page.
    pub fn has_page(tag: u8) -> bool {
        tag <= REMOVED
    }

    /// Whether records of this tag have a value.
    pub fn has_value(tag: u8) -> bool {
        tag <= REMOVED || tag == DROPPED
    }

    /// What this means; none when a part is out of its range.
    pub fn what(self) -> Option<What> {
        let Self { tag, page, value } = self;
        let fits = page < PAGES_MAX && value <= VALUE_MAX;
        let span = fits && value > 0 && page.checked_add(value).is_some_and(|end| end <= PAGES_MAX);
        match tag {
            0..EVICTED => {
                let (fault, access) = (FAULTS[usize::from(tag / 3)], ACCESSES[usize::from(tag % 3)]);
                fits.then_some(What::Fault { page, fault, access, service_ns: value })
            }
            EVICTED => span.then_some(What::Evicted { page, pages: value }),
            REMOVED => span.then_some(What::Removed { page, pages: value }),
            WINDOW => Some(What::Window),
            DROPPED => fits.then_some(What::Dropped { count: value }),
            END => Some(What::End),
            _ => None,
        }
    }
}

impl From<What> for Raw {
    /// Values that are too large become the largest.
    fn from(what: What) -> Self {
        let of = |tag, page, value: u64| Self { tag, page, value: value.min(VALUE_MAX) };
        match what {
            What::Fault { page, fault, access, service_ns } => {
                let kind = match fault {
                    Fault::FirstTouch => 0,
                    Fault::Refault => 3,
                    Fault::Fetch => 6,
                };
                let by = match access {
                    Access::Unknown => 0,
                    Access::Read => 1,
                    Access::Write => 2,
                };
                of(kind + by, page, service_ns)
            }
            What::Evicted { page, pages } => of(EVICTED, page, pages),
            What::Removed { page, pages } => of(REMOVED, page, pages),
            What::Window => of(WINDOW, 0, 0),
            What::Dropped { count } => of(DROPPED, 0, count),
            What::End => of(END, 0, 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_encoded_comes_back() {
        let mut all = vec![
            What::Evicted { page: 7, pages: 16 },
            What::Removed { page: 0, pages: PAGES_MAX },
            What::Window,
            What::Dropped { count: 3 },
            What::End,
        ];
        for fault in FAULTS {
            all.extend(ACCESSES.map(|access| What::Fault { page: PAGES_MAX - 1, fault, access, service_ns: 12 }));
        }
        assert_eq!(all.len(), usize::from(TAGS));
        for what in all {
            assert_eq!(Raw::from(what).what(), Some(what));
        }
    }

    #[test]
    fn what_cannot_be_is_refused() {
        for (tag, page, value) in
            [(TAGS, 0, 0), (0, PAGES_MAX, 0), (EVICTED, 0, 0), (REMOVED, 1, PAGES_MAX), (DROPPED, 0, VALUE_MAX + 1)]
        {
            assert_eq!(Raw { tag, page, value }.what(), None, "{tag} {page} {value}");
        }
    }
}

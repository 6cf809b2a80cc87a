//! Why a trace cannot be used; the text tells what to do about it.

use std::fmt;
use std::io;

/// Why a trace cannot be read.
#[derive(Debug)]
pub enum Error {
    /// It is of another version.
    Version(u8),
    /// Its pages have another size.
    PageBytes(u32),
    /// What it says cannot be, at this byte.
    Garbled(u64),
    /// A line of text is no reference.
    NoReference {
        /// Counted from 1.
        line: u64,
        /// How it begins.
        text: String,
    },
    /// A line of text, counted from 1, refers to the last 2 MiB of 64 bits of address.
    TooHigh(u64),
    /// It holds no reference.
    Empty,
    /// It holds more than can be studied at once.
    TooLong,
    /// Reading failed.
    Io(io::Error),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Version(version) => {
                write!(
                    f,
                    "is a trace of version {version}, which this build does not know; record it anew with `spillway trace`"
                )
            }
            Self::PageBytes(bytes) => {
                write!(
                    f,
                    "has pages of {bytes} bytes, and this build knows those of 4096 only; record it on this kind of machine"
                )
            }
            Self::Garbled(at) => {
                write!(f, "is garbled at byte {at}; copy it again, or record it anew with `spillway trace`")
            }
            Self::NoReference { line, text } => write!(
                f,
                "is no trace and no list of addresses: line {line} is `{}`; write one address a line, such as `0x7f001234 R`",
                text.escape_debug()
            ),
            Self::TooHigh(line) => {
                write!(
                    f,
                    "refers to the last 2 MiB of all addresses in line {line}, where no program has memory; leave that line out"
                )
            }
            Self::Empty => write!(f, "holds no reference; trace a program that outgrows its budget, or use `--exact`"),
            Self::TooLong => write!(
                f,
                "holds more than {} changes of page; give a part of it, such as the first lines",
                crate::references::REFERENCES_MAX
            ),
            Self::Io(error) => write!(f, "cannot be read: {error}"),
        }
    }
}

impl std::error::Error for Error {}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

//! Pages' names where servers take any text: a prefix of this pager's own, the connection's count, the handle.

use std::io::Write;

use super::protocol::Name;

/// The longest prefix with what makes it this pager's own; memcached takes keys of 250 bytes.
pub(crate) const PREFIX_BYTES_MAX: usize = GIVEN_BYTES_MAX + 17;
/// The longest that users may give.
pub(crate) const GIVEN_BYTES_MAX: usize = 200;
/// What follows the prefix at most: `:65535-1073741823`.
const REST_BYTES_MAX: usize = 17;

/// Writes names.
#[derive(Clone, Debug)]
pub(crate) struct Names {
    prefix: String,
}

impl Names {
    /// With a prefix of letters, digits and `-_.:`, which the URL's parser has seen to.
    pub(crate) fn new(prefix: String) -> Self {
        assert!(prefix.len() <= PREFIX_BYTES_MAX, "the parser refuses more");
        Self { prefix }
    }

    /// The prefix.
    pub(crate) fn prefix(&self) -> &[u8] {
        self.prefix.as_bytes()
    }

    /// With a prefix that another process had.
    pub(crate) fn again(prefix: &[u8]) -> Option<Self> {
        let fits = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.:".contains(byte);
        let good = !prefix.is_empty() && prefix.len() <= PREFIX_BYTES_MAX && prefix.iter().all(fits);
        let prefix = String::from_utf8(prefix.to_vec()).ok().filter(|_| good)?;
        Some(Self { prefix })
    }

    /// Writes a name into `buffer`.
    pub(crate) fn write<'a>(&self, name: Name, buffer: &'a mut [u8; PREFIX_BYTES_MAX + REST_BYTES_MAX]) -> &'a [u8] {
        let mut rest = &mut buffer[..];
        write!(rest, "{}:{}-{}", self.prefix, name.epoch, name.handle).expect("it was made long enough");
        let unused = rest.len();
        &buffer[..buffer.len() - unused]
    }

    /// Room for [`Names::write`].
    pub(crate) fn buffer() -> [u8; PREFIX_BYTES_MAX + REST_BYTES_MAX] {
        [0; PREFIX_BYTES_MAX + REST_BYTES_MAX]
    }
}

/// The next line of `input` without its end, and its length with it; `None` while it has not come.
///
/// # Errors
/// When it is longer than any should be.
pub(crate) fn line(input: &[u8]) -> Result<Option<(&[u8], usize)>, super::protocol::Malformed> {
    let start = &input[..input.len().min(LINE_BYTES_MAX)];
    match start.iter().position(|byte| *byte == b'\n') {
        Some(end) => Ok(Some((start[..end].strip_suffix(b"\r").unwrap_or(&start[..end]), end + 1))),
        None if start.len() == LINE_BYTES_MAX => Err(super::protocol::Malformed("short lines")),
        None => Ok(None),
    }
}

/// The longest line that is read.
const LINE_BYTES_MAX: usize = 2048;

/// The number that `text` is.
pub(crate) fn number<T: std::str::FromStr>(text: &[u8]) -> Option<T> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

/// What a server said, fit for one line on a terminal.
pub(crate) fn quoted(text: &[u8]) -> String {
    let line = text.split(|byte| *byte == b'\n').next().unwrap_or_default().trim_ascii();
    let text = String::from_utf8_lossy(&line[..line.len().min(100)]);
    text.escape_debug().to_string()
}

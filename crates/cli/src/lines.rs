//! JSON values, one a line, over a socket.
//!
//! Invariants: a line is bounded in length and in the time it may take, however its bytes arrive; writing is bounded
//! too; a value of ours never contains a line break.

use serde::Serialize;
use std::fmt;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// The longest line in bytes: a listing of a thousand targets of a daemon fits, a flood does not.
pub(crate) const LINE_BYTES_MAX: usize = 512 << 10;
/// How long a peer may leave what we write unread.
const WRITE_LIMIT: Duration = Duration::from_secs(5);

/// Why no line came.
#[derive(Debug)]
pub(crate) enum LineError {
    /// The peer is done.
    Closed,
    /// The line is longer than [`LINE_BYTES_MAX`].
    TooLong,
    /// The time was over.
    TimedOut,
    /// The socket failed.
    Failed(io::Error),
}

impl fmt::Display for LineError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => f.write_str("the connection was closed"),
            Self::TooLong => write!(f, "a line is longer than {LINE_BYTES_MAX} bytes"),
            Self::TimedOut => f.write_str("nothing came in time"),
            Self::Failed(error) => write!(f, "the connection failed: {error}"),
        }
    }
}

/// A socket that is read and written by lines.
pub(crate) struct Lines {
    stream: UnixStream,
    /// Bytes that were read and not yet given out.
    unread: Vec<u8>,
}

impl Lines {
    /// Lines over this socket.
    pub(crate) fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_write_timeout(Some(WRITE_LIMIT))?;
        Ok(Self { stream, unread: Vec::new() })
    }

    /// The same socket, for another thread to write to.
    pub(crate) fn twin(&self) -> io::Result<Self> {
        Ok(Self { stream: self.stream.try_clone()?, unread: Vec::new() })
    }

    /// The next line, without its end, within `limit`, or for ever.
    pub(crate) fn next(&mut self, limit: Option<Duration>) -> Result<Vec<u8>, LineError> {
        let deadline = limit.map(|limit| Instant::now() + limit);
        let mut seen = 0;
        loop {
            if let Some(end) = self.unread[seen..].iter().position(|&byte| byte == b'\n') {
                let mut line: Vec<u8> = self.unread.drain(..=seen + end).collect();
                line.pop();
                return Ok(line);
            }
            seen = self.unread.len();
            if seen > LINE_BYTES_MAX {
                return Err(LineError::TooLong);
            }
            self.read_more(deadline)?;
        }
    }

    fn read_more(&mut self, deadline: Option<Instant>) -> Result<(), LineError> {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        if left == Some(Duration::ZERO) {
            return Err(LineError::TimedOut);
        }
        self.stream.set_read_timeout(left).map_err(LineError::Failed)?;
        let mut some = [0; 4096];
        match self.stream.read(&mut some) {
            Ok(0) => Err(LineError::Closed),
            Ok(count) => {
                self.unread.extend_from_slice(&some[..count]);
                Ok(())
            }
            Err(error) => match error.kind() {
                io::ErrorKind::Interrupted => Ok(()),
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Err(LineError::TimedOut),
                io::ErrorKind::ConnectionReset => Err(LineError::Closed),
                _ => Err(LineError::Failed(error)),
            },
        }
    }

    /// Writes a value as one line.
    pub(crate) fn send(&mut self, value: &impl Serialize) -> io::Result<()> {
        let mut line = serde_json::to_vec(value)?;
        line.push(b'\n');
        self.stream.write_all(&line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (Lines, UnixStream) {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        (Lines::new(ours).expect("lines"), theirs)
    }

    const SHORT: Option<Duration> = Some(Duration::from_millis(50));

    #[test]
    fn lines_come_whole_however_they_arrive() {
        let (mut lines, mut peer) = pair();
        peer.write_all(b"one\ntw").expect("written");
        assert_eq!(lines.next(SHORT).expect("a line"), b"one");
        assert!(matches!(lines.next(SHORT), Err(LineError::TimedOut)));
        peer.write_all(b"o\n\nrest").expect("written");
        assert_eq!(lines.next(SHORT).expect("a line"), b"two");
        assert_eq!(lines.next(SHORT).expect("a line"), b"");
        drop(peer);
        assert!(matches!(lines.next(SHORT), Err(LineError::Closed)));
    }

    #[test]
    fn a_line_that_drips_does_not_hold_us_longer_than_the_limit() {
        let (mut lines, mut peer) = pair();
        let began = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                while peer.write_all(b"x").is_ok() && began.elapsed() < Duration::from_secs(2) {
                    std::thread::sleep(Duration::from_millis(10));
                }
            });
            assert!(matches!(lines.next(Some(Duration::from_millis(100))), Err(LineError::TimedOut)));
            assert!(began.elapsed() < Duration::from_secs(1));
            drop(lines);
        });
    }

    #[test]
    fn an_endless_line_is_refused() {
        let (mut lines, mut peer) = pair();
        let flood = std::thread::spawn(move || peer.write_all(&vec![b'x'; 4 * LINE_BYTES_MAX]).is_err());
        assert!(matches!(lines.next(Some(Duration::from_secs(5))), Err(LineError::TooLong)));
        drop(lines);
        assert!(flood.join().expect("joined"), "the rest was not read");
    }
}

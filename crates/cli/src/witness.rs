//! Tells a signal that was sent to us from one that was sent to our whole process group.
//!
//! `kill %1`, `kill -- -PGID` and a service manager reach the target themselves; passing the signal on would deliver it
//! twice, and many programs take a second SIGTERM or SIGINT as an order to drop everything. The kernel does not say
//! which it was. So a child that does nothing sits in the group with all signals blocked: a signal that reached us and
//! waits there too was sent to all.
//!
//! Invariants: the witness holds none of our descriptors but its socket, never runs code of ours but a loop of three
//! system calls, and ends when we end. Without one, every signal is passed on: twice is better than never.

use crate::sys;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// How long an answer may take; the witness only looks at its own pending signals.
const ANSWER_LIMIT: Duration = Duration::from_millis(200);

/// The other member of the group.
pub(crate) struct Witness(Option<UnixStream>);

impl Witness {
    /// Places a witness in our group. All signals must be blocked, and no other thread may run.
    pub(crate) fn place() -> Self {
        let place = || {
            let (ours, theirs) = UnixStream::pair().ok()?;
            ours.set_read_timeout(Some(ANSWER_LIMIT)).ok()?;
            ours.set_write_timeout(Some(ANSWER_LIMIT)).ok()?;
            sys::fork_witness(&theirs).ok()?;
            Some(ours)
        };
        Self(place())
    }

    /// Whether the group got this signal since the last question.
    pub(crate) fn saw(&mut self, signal: i32) -> bool {
        let Some(socket) = &mut self.0 else { return false };
        let Ok(question) = u8::try_from(signal) else { return false };
        let mut answer = [0];
        if socket.write_all(&[question]).and_then(|()| socket.read_exact(&mut answer)).is_err() {
            self.0 = None; // A late answer must not be taken for the next one's.
        }
        answer == [1]
    }
}

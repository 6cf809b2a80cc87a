//! Takes records out of the fault thread's ring and puts them where they belong.
//!
//! Invariants: the fault thread never waits for us; what the ring had no room for is counted and told; a disk that is full
//! ends the recording and nothing else.

use crate::{control, say};
use serde::{Deserialize, Serialize};
use spillway_study::record::{Record, What};
use spillway_study::ring::{self, Consumer, Producer};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Records that the ring holds: far more than the fault thread makes between two looks, at a million a second.
const SLOTS: usize = 1 << 16;
/// How often the ring is looked at.
const TICK: Duration = Duration::from_millis(5);
/// How much of a recording may be lost when we are killed.
const FLUSH_EVERY: Duration = Duration::from_secs(1);

/// Where records go.
pub(crate) trait Sink: Send + 'static {
    /// Takes one.
    fn put(&mut self, record: &Record) -> io::Result<()>;
    /// Sees to what was taken so far.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
    /// Makes sure of all that was taken; nothing more comes.
    fn close(&mut self) -> io::Result<()> {
        self.flush()
    }
}

/// What a recording came to.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Totals {
    /// Records of faults.
    pub(crate) faults: u64,
    /// Records that got lost.
    pub(crate) dropped: u64,
    /// Windows that began.
    pub(crate) windows: u64,
}

/// A recording under way.
pub(crate) struct Recorder<S> {
    ended: Arc<AtomicBool>,
    thread: JoinHandle<(S, Totals, io::Result<()>)>,
}

impl<S: Sink> Recorder<S> {
    /// Begins; records that are put in at the end that is returned go to `sink`.
    pub(crate) fn start(sink: S) -> io::Result<(Producer, Self)> {
        let (producer, consumer) = ring::ring(SLOTS);
        let ended = Arc::new(AtomicBool::new(false));
        let until = Arc::clone(&ended);
        let thread = control::thread("recorder").spawn(move || drain(consumer, sink, &until))?;
        Ok((producer, Self { ended, thread }))
    }

    /// Ends: what is recorded from now on is lost.
    pub(crate) fn finish(self) -> Result<(S, Totals), String> {
        self.ended.store(true, Ordering::Release);
        let (sink, totals, done) = self.thread.join().map_err(|_| "the recording failed".to_owned())?;
        done.map_err(|error| format!("the trace could not be written to its end: {}", say::error(&error)))?;
        Ok((sink, totals))
    }
}

fn drain<S: Sink>(mut ring: Consumer, mut sink: S, ended: &AtomicBool) -> (S, Totals, io::Result<()>) {
    let mut totals = Totals::default();
    let (mut time_ns, mut flushed) = (0, Instant::now());
    let mut step = |sink: &mut S| -> io::Result<bool> {
        let last = ended.load(Ordering::Acquire);
        // No more than the ring holds: on a machine where they come faster than they are written, the end comes all the same.
        for record in std::iter::from_fn(|| ring.take()).take(SLOTS) {
            totals.faults += u64::from(matches!(record.what, What::Fault { .. }));
            totals.windows += u64::from(record.what == What::Window);
            time_ns = record.time_ns;
            sink.put(&record)?;
        }
        let count = ring.dropped();
        if count > 0 {
            totals.dropped += count;
            sink.put(&Record { time_ns, what: What::Dropped { count } })?;
        }
        if last {
            sink.put(&Record { time_ns, what: What::End })?;
            sink.close()?;
        } else if flushed.elapsed() >= FLUSH_EVERY {
            flushed = Instant::now();
            sink.flush()?;
        }
        Ok(last)
    };
    let done = loop {
        match step(&mut sink) {
            Ok(true) => break Ok(()),
            Ok(false) => std::thread::sleep(TICK),
            Err(error) => break Err(error),
        }
    };
    (sink, totals, done)
}
